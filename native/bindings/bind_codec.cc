// Row codecs and the key -> partition function, over numpy arrays.
#include <pybind11/stl.h>

#include "base/hash.h"
#include "bindings/arrays.h"
#include "codec/codec.h"
#include "codec/quantise.h"
#include "pool/pool.h"
#include "wire/wire.h"

namespace petps::bindings {

namespace {

void check_dim(uint64_t dim) {
  if (dim == 0 || dim > pool::kMaxDim) {
    invalid("dim " + std::to_string(dim) + " is outside 1.." + std::to_string(pool::kMaxDim));
  }
}

py::array_t<uint8_t> encode_rows(const std::string& dtype_text, const py::object& rows) {
  const codec::Dtype dtype = unwrap(codec::parse_dtype(dtype_text));
  const Rows<const float> block = floats_of(rows, "rows");
  check_dim(block.width);
  const auto dim = static_cast<uint32_t>(block.width);
  py::array_t<uint8_t> stored({block.n, codec::row_bytes(dtype, dim)});
  auto* out = reinterpret_cast<std::byte*>(stored.mutable_data());
  const Released released_gil;
  codec::encode(dtype, block.data, block.n, dim, out);
  return stored;
}

py::array_t<float> decode_rows(const std::string& dtype_text, uint32_t dim,
                               const py::object& rows) {
  const codec::Dtype dtype = unwrap(codec::parse_dtype(dtype_text));
  check_dim(dim);
  const Rows<const std::byte> block = stored_rows_of(rows, "rows");
  if (block.width != codec::row_bytes(dtype, dim)) {
    invalid("rows: a stored " + dtype_text + " row of dim " + std::to_string(dim) + " has " +
            std::to_string(codec::row_bytes(dtype, dim)) + " bytes, got uint8[" +
            std::to_string(block.n) + ", " + std::to_string(block.width) + "]");
  }
  py::array_t<float> decoded({block.n, static_cast<size_t>(dim)});
  float* out = decoded.mutable_data();
  const Released released_gil;
  codec::decode(dtype, block.data, block.n, dim, out);
  return decoded;
}

codec::Quantisation quantisation_of(const std::string& method, uint32_t bits) {
  codec::Quantisation quantisation;
  quantisation.method = unwrap(codec::parse_method(method));
  quantisation.bits = bits;
  check(codec::check(quantisation));
  return quantisation;
}

py::array_t<uint8_t> quantise_rows(const std::string& method, uint32_t bits, const py::object& rows,
                                   uint32_t bins, double ratio, uint64_t seed) {
  codec::Quantisation quantisation = quantisation_of(method, bits);
  quantisation.bins = bins;
  quantisation.ratio = ratio;
  quantisation.seed = seed;
  check(codec::check(quantisation));
  const Rows<const float> block = floats_of(rows, "rows");
  check_dim(block.width);
  const auto dim = static_cast<uint32_t>(block.width);
  py::array_t<uint8_t> quantised({block.n, codec::quantised_row_bytes(quantisation, dim)});
  auto* out = reinterpret_cast<std::byte*>(quantised.mutable_data());
  size_t bad = 0;
  {
    const Released released_gil;
    bad = codec::quantise(quantisation, block.data, block.n, dim, out);
  }
  if (bad < block.n) {
    invalid("rows: row " + std::to_string(bad) + " of " + std::to_string(block.n) +
            " has a NaN, an infinity or a range beyond float32, which no codes can represent; "
            "correct the row or store it as f32");
  }
  return quantised;
}

py::array_t<float> dequantise_rows(const std::string& method, uint32_t bits, uint32_t dim,
                                   const py::object& rows) {
  const codec::Quantisation written = quantisation_of(method, bits);
  check_dim(dim);
  const Rows<const std::byte> block = stored_rows_of(rows, "rows");
  const size_t bytes = codec::quantised_row_bytes(written, dim);
  if (block.width != bytes) {
    invalid("rows: a row of dim " + std::to_string(dim) + " has " + std::to_string(bytes) +
            " bytes by " + method + " with " + std::to_string(bits) + " bits, got uint8[" +
            std::to_string(block.n) + ", " + std::to_string(block.width) + "]");
  }
  py::array_t<float> values({block.n, static_cast<size_t>(dim)});
  float* out = values.mutable_data();
  const Released released_gil;
  codec::dequantise(written, block.data, block.n, dim, out);
  return values;
}

size_t quantised_row_bytes(const std::string& method, uint32_t bits, uint32_t dim) {
  check_dim(dim);
  return codec::quantised_row_bytes(quantisation_of(method, bits), dim);
}

size_t first_not_finite(const py::object& rows) {
  const Rows<const float> block = floats_of(rows, "rows");
  const Released released_gil;
  return codec::first_not_finite(block.data, block.n, static_cast<uint32_t>(block.width));
}

py::array_t<uint32_t> partition_of(const py::object& keys, uint32_t partitions) {
  const std::span<const uint64_t> key_list = keys_of(keys);
  if (partitions == 0 || partitions > wire::kMaxPartitions) {
    invalid("partitions " + std::to_string(partitions) + " is outside 1.." +
            std::to_string(wire::kMaxPartitions));
  }
  py::array_t<uint32_t> result(static_cast<py::ssize_t>(key_list.size()));
  uint32_t* out = result.mutable_data();
  const Released released_gil;
  for (size_t i = 0; i < key_list.size(); ++i) out[i] = wire::partition_of(key_list[i], partitions);
  return result;
}

py::array_t<uint64_t> hash_rows(const py::object& rows) {
  const Rows<const std::byte> block = stored_rows_of(rows, "rows");
  py::array_t<uint64_t> result(static_cast<py::ssize_t>(block.n));
  uint64_t* out = result.mutable_data();
  const Released released_gil;
  for (size_t i = 0; i < block.n; ++i)
    out[i] = base::row_hash(block.data + i * block.width, block.width);
  return result;
}

size_t row_bytes(const std::string& dtype, uint32_t dim) {
  check_dim(dim);
  return codec::row_bytes(unwrap(codec::parse_dtype(dtype)), dim);
}

}  // namespace

void bind_codec(py::module_& module) {
  module.def("encode_rows", encode_rows, py::arg("dtype"), py::arg("rows"),
             "Return the stored rows: float32[n, dim] -> uint8[n, row_bytes(dtype, dim)].");
  module.def("decode_rows", decode_rows, py::arg("dtype"), py::arg("dim"), py::arg("rows"),
             "Decode stored rows: uint8[n, row_bytes] -> float32[n, dim].");
  module.def("row_bytes", row_bytes, py::arg("dtype"), py::arg("dim"),
             "Return the bytes of a stored row.");
  module.def("quantise_rows", quantise_rows, py::arg("method"), py::arg("bits"), py::arg("rows"),
             py::kw_only(), py::arg("bins") = codec::Quantisation{}.bins,
             py::arg("ratio") = codec::Quantisation{}.ratio,
             py::arg("seed") = codec::Quantisation{}.seed,
             "Quantise rows: float32[n, dim] -> uint8[n, quantised_row_bytes(method, bits, dim)].");
  module.def("dequantise_rows", dequantise_rows, py::arg("method"), py::arg("bits"), py::arg("dim"),
             py::arg("rows"),
             "Decode quantised rows: uint8[n, quantised_row_bytes] -> float32[n, dim].");
  module.def("quantised_row_bytes", quantised_row_bytes, py::arg("method"), py::arg("bits"),
             py::arg("dim"), "Return the bytes of a quantised row.");
  module.def("first_not_finite", first_not_finite, py::arg("rows"),
             "Return the index of the first row of float32[n, dim] with a NaN or infinity, or n.");
  module.def("hash_rows", hash_rows, py::arg("rows"),
             "Return XXH3-64 of each stored row: uint8[n, width] -> uint64[n].");
  module.def("partition_of", partition_of, py::arg("keys"), py::arg("partitions"),
             "Return the partition of each key, XXH3-64 mod partitions: uint64[n] -> uint32[n].");
}

}  // namespace petps::bindings
