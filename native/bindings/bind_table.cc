// petps._native.Table: apply, pull, placement, status.
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/arrays.h"
#include "bindings/blocks.h"
#include "bindings/pool_info.h"
#include "bindings/pull_rows.h"
#include "bindings/scan.h"
#include "bindings/table_handle.h"

namespace petps::bindings {

namespace {

std::string name_of(const TableHandle& handle) { return "table '" + handle.record.spec.name + "'"; }

table::ApplyReport apply(const TableHandle& handle, const py::object& keys, const py::object& rows,
                         const py::object& deleted, const py::object& stamp, uint32_t threads) {
  table::Batch batch;
  batch.keys = keys_of(keys);
  batch.deleted = mask_of(deleted, "deleted", batch.keys.size());
  if (py::isinstance<py::array>(stamp)) {
    batch.stamps = stamps_of(stamp, "stamp", batch.keys.size());
  } else {
    batch.stamp = static_cast<uint32_t>(stamp.cast<uint64_t>());
  }
  batch.threads = threads;
  std::vector<uint8_t> all;
  if (rows.is_none()) {
    for (const uint8_t flag : batch.deleted) {
      if (flag == 0)
        invalid(name_of(handle) + ": rows is None, but deleted does not mark every key");
    }
    if (deleted.is_none()) all.assign(batch.keys.size(), 1);
    if (deleted.is_none()) batch.deleted = all;
  } else {
    const Rows<const std::byte> block = stored_rows_of(rows, "rows");
    if (block.n != batch.keys.size() || block.width != handle.record.spec.row_bytes) {
      invalid(name_of(handle) + ": rows must be uint8[" + std::to_string(batch.keys.size()) + ", " +
              std::to_string(handle.record.spec.row_bytes) +
              "], one stored row per key; got uint8[" + std::to_string(block.n) + ", " +
              std::to_string(block.width) + "]");
    }
    batch.rows = block.data;
  }
  return with_table(handle, [&](table::Table& table) { return unwrap(table.apply(batch)); });
}

uint64_t pull(const TableHandle& handle, const py::object& keys, const py::object& out,
              const py::object& mask, const py::object& stamps) {
  const std::span<const uint64_t> key_list = keys_of(keys);
  const Out target =
      out_of(out, key_list.size(), handle.record.spec.dim, handle.record.spec.row_bytes);
  const PullTarget pull_target{target.data, target.stored,
                               writable_mask_of(mask, "mask", key_list.size()),
                               writable_stamps_of(stamps, "stamps", key_list.size())};
  return with_table(handle, [&](const table::Table& table) {
    return pull_rows(*handle.session, table, key_list, pull_target);
  });
}

py::array_t<uint8_t> default_row(const TableHandle& handle) {
  py::array_t<uint8_t> row(static_cast<py::ssize_t>(handle.record.spec.row_bytes));
  const auto& stored = handle.record.spec.default_row;
  std::memset(row.mutable_data(), 0, static_cast<size_t>(row.size()));
  if (!stored.empty()) std::memcpy(row.mutable_data(), stored.data(), stored.size());
  return row;
}

// stamps: appended to, unless null.
py::array_t<uint64_t> list_keys(const TableHandle& handle, std::vector<uint32_t>* stamps) {
  constexpr uint64_t kBucketsAtOnce = 4096;  // bounds how long a pin is held
  std::vector<uint64_t> keys;
  with_table(handle, [&](table::Table& table) {
    const table::Table::ScanGuard guard(table);
    for (uint64_t bucket = 0; bucket < table.bucket_count();) {
      Session::Lease lease(*handle.session);
      const epoch::Pin pin = lease.pin();
      const table::ScanPage page = table.scan(bucket, kBucketsAtOnce);
      keys.insert(keys.end(), page.keys.begin(), page.keys.end());
      if (stamps != nullptr) {
        for (const std::byte* row : page.rows) stamps->push_back(table.stamp_of(row));
      }
      bucket = page.next_bucket;
    }
  });
  return array_of(std::move(keys));
}

py::tuple list_keys_and_stamps(const TableHandle& handle) {
  std::vector<uint32_t> stamps;
  py::array_t<uint64_t> keys = list_keys(handle, &stamps);
  return py::make_tuple(std::move(keys), array_of(std::move(stamps)));
}

void bind_data(py::class_<TableHandle>& table) {
  table.def("apply", apply, py::arg("keys"), py::arg("rows"), py::arg("deleted") = py::none(),
            py::arg("stamp") = 0, py::arg("threads") = 1,
            "Write and delete rows; they are durable on return. keys: uint64[n], rows: uint8[n, "
            "row_bytes] or None, deleted: bool[n] or None. stamp: the version's low 32 bits, or "
            "uint32[n]. threads: of a large batch, at most.");
  table.def("pull", pull, py::arg("keys"), py::arg("out"), py::arg("mask") = py::none(),
            py::arg("stamps") = py::none(),
            "Fill out (float32[n, dim], or uint8[n, row_bytes] as stored) and mask (bool[n]). "
            "Return the number of keys found.");
}

void bind_placement(py::class_<TableHandle>& table) {
  table.def(
      "set_hot_keys",
      [](const TableHandle& handle, const py::object& keys) {
        const auto hot = keys_of(keys);
        std::vector<uint64_t> copy(hot.begin(), hot.end());
        with_table(handle, [&](table::Table& open) { open.set_hot_keys(std::move(copy)); });
      },
      py::arg("keys"));
  table.def(
      "migrate",
      [](const TableHandle& handle, const py::object& keys) {
        const auto hot = keys_of(keys, "hot_keys");
        return with_table(handle, [&](table::Table& open) { return unwrap(open.migrate(hot)); });
      },
      py::arg("hot_keys"));
  table.def("rehome", [](const TableHandle& handle) {
    return with_table(handle, [](table::Table& open) { return unwrap(open.rehome()); });
  });
  table.def(
      "bucket_reads",
      [](const TableHandle& handle, const py::object& keys) {
        const auto key_list = keys_of(keys);
        return with_table(handle, [&](table::Table& open) { return open.bucket_reads(key_list); });
      },
      py::arg("keys"));
}

}  // namespace

void bind_table(py::module_& module) {
  py::class_<TableHandle> table(module, "Table", "A table of an open pool.");
  table.def_property_readonly("record", [](const TableHandle& handle) { return handle.record; });
  table.def_property_readonly("id", [](const TableHandle& handle) { return handle.record.id; });
  table.def_property_readonly("name",
                              [](const TableHandle& handle) { return handle.record.spec.name; });
  table.def_property_readonly("dim",
                              [](const TableHandle& handle) { return handle.record.spec.dim; });
  table.def_property_readonly(
      "row_bytes", [](const TableHandle& handle) { return handle.record.spec.row_bytes; });
  table.def_property_readonly("dtype", [](const TableHandle& handle) {
    return codec::dtype_name(static_cast<codec::Dtype>(handle.record.spec.dtype));
  });
  table.def("default_row", default_row,
            "Return uint8[row_bytes], the stored row that a missing key gets.");
  table.def("status", [](const TableHandle& handle) {
    return with_table(handle, [](table::Table& open) { return open.status(); });
  });
  table.def(
      "scan",
      [](const TableHandle& handle, uint64_t buckets) {
        const Released released;  // the Scan waits for a move in progress
        return std::make_unique<Scan>(handle, buckets);
      },
      py::arg("buckets_per_page") = 4096,
      "Return an iterator over pages (keys, rows) of the whole table.");
  table.def(
      "keys", [](const TableHandle& handle) { return list_keys(handle, nullptr); },
      "Return uint64[n], all keys in any order.");
  table.def("keys_and_stamps", list_keys_and_stamps,
            "Return the keys as keys() does, and uint32[n], the stamps of their rows.");
  bind_data(table);
  bind_placement(table);
  bind_scrub(table);
}

}  // namespace petps::bindings
