// Properties of the build and the machine: processor features, versions, the checksum of rows.
#include "base/base.h"
#include "base/time_slice.h"
#include "bindings/bindings.h"
#include "media/bus_error.h"
#include "pool/clock.h"
#include "pool/layout.h"
#include "pool/pool.h"
#include "pool/slots.h"
#include "wire/wire.h"

namespace petps::bindings {

namespace {

py::dict cpu_features() {
  const base::CpuFeatures& features = base::cpu_features();
  py::dict result;
  result["avx2"] = features.avx2;
  result["f16c"] = features.f16c;
  result["avx512f"] = features.avx512f;
  result["avx512bw"] = features.avx512bw;
  result["pclmul"] = features.pclmul;
  result["vpclmulqdq"] = features.vpclmulqdq;
  result["clflushopt"] = features.clflushopt;
  result["clwb"] = features.clwb;
  result["dcpop"] = features.dcpop;
  return result;
}

uint32_t crc32c(const py::buffer& data, uint32_t seed) {
  const py::buffer_info view = data.request();
  if (PyBuffer_IsContiguous(view.view(), 'C') == 0) invalid("data: expected contiguous bytes");
  const auto bytes = static_cast<size_t>(view.size * view.itemsize);
  const Released released_gil;
  return base::crc32c_extend(seed, view.ptr, bytes);
}

}  // namespace

void bind_base(py::module_& module) {
  module.def(
      "set_time_slice",
      [](bool are_short) { base::set_time_slice(are_short ? base::kShortSliceNs : 0); },
      py::arg("short"),
      "Give this thread, and the threads that it starts, short time slices, or those of Linux.");
  module.def("lower_priority", base::lower_priority, py::arg("niceness") = base::kLowNiceness,
             "Let this thread give way to others: at least this niceness, and long time slices.");
  module.def("cpu_features", cpu_features, "Return the features of this processor by name.");
  module.def(
      "formats",
      [] {
        py::dict result;
        result["pool"] = pool::layout::kFormatVersion;
        result["wire"] = wire::kProtocolVersion;
        return result;
      },
      "Return the version of each format that this build writes, by name.");
  module.def(
      "footprint_of",
      [](uint32_t row_bytes, uint64_t capacity) {
        if (capacity == 0 || capacity > pool::kMaxCapacity) invalid("capacity: out of range");
        constexpr uint64_t kUnit = pool::kDefaultUnitBytes;
        const auto slots = pool::Slots::footprint_of(row_bytes, capacity, kUnit);
        py::dict result;
        result["records"] = kUnit;
        result["index"] = (pool::index_bytes_for(capacity) + kUnit - 1) / kUnit * kUnit;
        result["rows"] = slots.pool;
        result["memory"] = slots.memory;
        return result;
      },
      py::arg("row_bytes"), py::arg("capacity"),
      "Return the most bytes that the table of a new pool takes, by name: in the pool its records, "
      "index and rows, in whole extents, and memory.");
  module.def("stop_on_lost_pool", media::stop_on_lost_pool,
             "Terminate this process, from now on, with a message and LOST_POOL_EXIT_STATUS when a "
             "page of "
             "a mapped pool is lost. For commands, not for libraries.");
  module.attr("LOST_POOL_EXIT_STATUS") = media::kLostPoolExitStatus;
  module.attr("EXPIRY_CELLS") = pool::kExpiryCells;
  module.attr("EXPIRY_STEPS") = pool::kExpirySteps;
  module.attr("VERSIONS_AHEAD") = pool::kVersionsAhead;
  module.def("crc32c", crc32c, py::arg("data"), py::arg("seed") = 0,
             "Return the CRC-32C of data; seed: the CRC-32C of the bytes before it.");
}

}  // namespace petps::bindings
