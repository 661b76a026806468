// The scrubber's methods of petps._native.Table, and their records.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/blocks.h"
#include "bindings/record.h"
#include "bindings/table_handle.h"

namespace petps::bindings {

namespace {

const char* fault_name(const table::DamagedRow& row) {
  switch (row.fault) {
    case table::Fault::kNoSlot:
      return "no slot";
    case table::Fault::kOtherKey:
      return "other key";
    case table::Fault::kChecksum:
      break;
  }
  return "checksum";
}

table::ApplyReport restore(const TableHandle& handle, const py::object& keys,
                           const py::object& rows, const py::object& stamps) {
  const std::span<const uint64_t> key_list = keys_of(keys);
  const Rows<const std::byte> block = stored_rows_of(rows, "rows");
  const std::span<const uint32_t> stamp_list = stamps_of(stamps, "stamps", key_list.size());
  if (block.n != key_list.size() || block.width != handle.record.spec.row_bytes) {
    invalid("table '" + handle.record.spec.name + "': rows must be uint8[" +
            std::to_string(key_list.size()) + ", " + std::to_string(handle.record.spec.row_bytes) +
            "], one stored row per key; got uint8[" + std::to_string(block.n) + ", " +
            std::to_string(block.width) + "]");
  }
  return with_table(handle, [&](table::Table& table) {
    return unwrap(table.restore(key_list, block.data, stamp_list));
  });
}

py::array_t<bool> find_damaged(const TableHandle& handle, const py::object& keys) {
  const std::span<const uint64_t> key_list = keys_of(keys);
  py::array_t<bool> damaged(static_cast<py::ssize_t>(key_list.size()));
  auto* const marks = reinterpret_cast<uint8_t*>(damaged.mutable_data());
  with_table(handle, [&](table::Table& table) {
    check(table.find_damaged(key_list, {marks, key_list.size()}));
  });
  return damaged;
}

}  // namespace

void bind_scrub_records(py::module_& module) {
  py::class_<table::ScrubCursor>(module, "ScrubCursor", "Where a pass of the scrubber is.")
      .def(py::init<>());
  using Row = table::DamagedRow;
  Record<Row>(module, "DamagedRow", "A row that differs from its header or its key.")
      .field("key", &Row::key)
      .field("slot", &Row::slot)
      .field("stamp", &Row::stamp)
      .field("crc", &Row::crc)
      .field("fault", fault_name);
  using Step = table::ScrubStep;
  Record<Step>(module, "ScrubStep", "What one step of the scrubber read and found.")
      .field("rows", &Step::rows)
      .field("bytes", &Step::bytes)
      .field("buckets", &Step::buckets)
      .field("bucket_count", &Step::bucket_count)
      .field("complete", &Step::complete)
      .field("default_row_damaged", &Step::default_row_damaged)
      .field("damaged", &Step::damaged);
}

void bind_scrub(py::class_<TableHandle>& table) {
  table.def(
      "scrub",
      [](const TableHandle& handle, table::ScrubCursor& cursor, uint64_t bytes) {
        return with_table(handle,
                          [&](table::Table& open) { return unwrap(open.scrub(&cursor, bytes)); });
      },
      py::arg("cursor"), py::arg("bytes"));
  table.def(
      "remove_damaged",
      [](const TableHandle& handle, const std::vector<table::DamagedRow>& rows) {
        return with_table(handle,
                          [&](table::Table& open) { return unwrap(open.remove_damaged(rows)); });
      },
      py::arg("rows"));
  table.def(
      "note_missing",
      [](const TableHandle& handle, const py::object& keys) {
        const auto key_list = keys_of(keys);
        with_table(handle, [&](table::Table& open) { check(open.note_missing(key_list)); });
      },
      py::arg("keys"));
  table.def("restore", restore, py::arg("keys"), py::arg("rows"), py::arg("stamps"));
  table.def("missing_keys", [](const TableHandle& handle) {
    return array_of(with_table(handle, [](table::Table& open) { return open.missing_keys(); }));
  });
  table.def("find_damaged", find_damaged, py::arg("keys"));
}

}  // namespace petps::bindings
