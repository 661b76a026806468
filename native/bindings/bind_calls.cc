// petps._native.Calls: requests of this process to its own server, as frames of room wire.
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/arrays.h"
#include "bindings/call_frames.h"
#include "bindings/server_handle.h"
#include "codec/codec.h"

namespace petps::bindings {

namespace {

using server::CallReply;
using server::Calls;

// View the content of a Python bytes object. ASSUMPTIONS: the object outlives the view.
std::span<const std::byte> view_of(const py::bytes& bytes) {
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {reinterpret_cast<const std::byte*>(data), static_cast<size_t>(size)};
}

void append_words(const py::bytes& bytes, const std::string& name, std::vector<uint64_t>& words) {
  const std::span<const std::byte> view = view_of(bytes);
  if (view.size() % sizeof(uint64_t) != 0) {
    invalid(name + " has " + std::to_string(view.size()) +
            " bytes, which is not a multiple of 8: pack each as 8 little-endian bytes");
  }
  const size_t before = words.size();
  words.resize(before + view.size() / sizeof(uint64_t));
  std::memcpy(words.data() + before, view.data(), view.size());
}

// Return the deletion bitmap of a push. deleted: empty, or a bit for each key. all: whether an
// empty `deleted` deletes all keys.
std::vector<uint64_t> deletions_of(const py::bytes& deleted, size_t keys, bool all) {
  std::vector<uint64_t> words;
  const std::span<const std::byte> view = view_of(deleted);
  if (view.empty() && !all) return words;
  words.resize(wire::bitmap_words(keys));
  if (!view.empty()) {
    if (view.size() < (keys + 7) / 8 || view.size() > words.size() * sizeof(uint64_t)) {
      invalid("deleted has " + std::to_string(view.size()) +
              " bytes, expected one bit for each of " + std::to_string(keys) +
              " keys: " + std::to_string(words.size() * sizeof(uint64_t)) + " bytes");
    }
    std::memcpy(words.data(), view.data(), view.size());
    return words;
  }
  for (size_t i = 0; i < keys; ++i) words[i / 64] |= uint64_t{1} << (i % 64);
  return words;
}

}  // namespace

wire::Frame encode_pull_call(uint32_t instance,
                             const std::vector<std::pair<uint32_t, py::bytes>>& sections,
                             uint64_t min_version, uint32_t wait_ms, const py::bytes& trace) {
  std::vector<wire::PullSection> heads;
  std::vector<uint64_t> keys;
  for (const auto& [table, bytes] : sections) {
    const size_t before = keys.size();
    append_words(bytes, "keys", keys);
    heads.push_back({table, static_cast<uint32_t>(keys.size() - before)});
  }
  wire::PullRequest request{min_version, instance, wait_ms, heads, keys};
  if (const auto ids = view_of(trace); !ids.empty()) {
    constexpr size_t kTraceIdBytes = sizeof(request.trace.trace_id);
    if (ids.size() != kTraceIdBytes + sizeof(request.trace.span_id))
      invalid("trace must have a trace id and a span id: 24 bytes");
    std::memcpy(request.trace.trace_id.data(), ids.data(), kTraceIdBytes);
    std::memcpy(request.trace.span_id.data(), ids.data() + kTraceIdBytes,
                sizeof(request.trace.span_id));
    request.trace.flags = wire::kTraceSampled;
  }
  wire::Frame frame;
  wire::encode_pull(0, request, frame);
  return frame;
}

wire::Frame encode_push_call(const PushedTable& table, const py::bytes& keys, const py::bytes& rows,
                             const py::bytes& deleted, uint64_t stamp) {
  std::vector<uint64_t> key_list;
  append_words(keys, "keys", key_list);
  const std::span<const std::byte> stored = view_of(rows);
  const bool deletes_all = stored.empty();
  if (!deletes_all && stored.size() != key_list.size() * table.row_bytes) {
    invalid("table '" + table.name + "': " + std::to_string(key_list.size()) + " rows of " +
            std::to_string(table.row_bytes) + " bytes are " +
            std::to_string(key_list.size() * table.row_bytes) + " bytes, got " +
            std::to_string(stored.size()));
  }
  const std::vector<uint64_t> deletions = deletions_of(deleted, key_list.size(), deletes_all);
  const uint32_t row_bytes = deletes_all ? 0 : table.row_bytes;
  const auto low_stamp = static_cast<uint32_t>(stamp);
  const wire::PushOrder no_order;
  wire::Frame frame;
  wire::encode_push(0,
                    {table.id, table.instance, table.dim, table.dtype, row_bytes, low_stamp,
                     no_order, key_list, deletions, stored},
                    frame);
  return frame;
}

wire::Frame encode_hot_keys_call(uint32_t table, const py::bytes& keys) {
  std::vector<uint64_t> hot;
  append_words(keys, "keys", hot);
  wire::Frame frame;
  wire::encode_hot_keys(0, {table, hot}, frame);
  return frame;
}

namespace {

uint64_t pull(Calls& calls, uint32_t instance,
              const std::vector<std::pair<uint32_t, py::bytes>>& sections, uint64_t min_version,
              uint32_t wait_ms, const py::bytes& trace) {
  return unwrap(calls.submit(encode_pull_call(instance, sections, min_version, wait_ms, trace)));
}

uint64_t push(Calls& calls, const pool::TableRecord& table, const py::bytes& keys,
              const py::bytes& rows, const py::bytes& deleted, uint64_t stamp) {
  const pool::TableSpec& spec = table.spec;
  const PushedTable pushed{spec.name, table.id,   spec.instance,
                           spec.dim,  spec.dtype, spec.row_bytes};
  return unwrap(calls.submit(encode_push_call(pushed, keys, rows, deleted, stamp)));
}

uint64_t set_hot_keys(Calls& calls, uint32_t table, const py::bytes& keys) {
  return unwrap(calls.submit(encode_hot_keys_call(table, keys)));
}

wire::FrameHeader header_of(const CallReply& reply) {
  wire::FrameHeader header;
  check(wire::decode_reply_header(reply.frame, header));
  const std::span<const std::byte> body = std::span(reply.frame).subspan(wire::kHeaderBytes);
  if (header.code != 0) check(wire::decode_error(header, body));
  return header;
}

py::bytes bytes_of(std::span<const std::byte> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

py::tuple decode_pulled(const CallReply& reply) {
  const wire::FrameHeader header = header_of(reply);
  const std::span<const std::byte> body = std::span(reply.frame).subspan(wire::kHeaderBytes);
  wire::PullReplyPrefix prefix;
  check(wire::decode_pull_reply_prefix(header, body, prefix));
  wire::PullReply out;
  check(wire::decode_pull_reply_head(header, body.first(prefix.rows_offset), out));
  py::list sections;
  size_t word = 0;
  size_t row = prefix.rows_offset;
  for (const wire::PullReplySection& section : out.sections) {
    const size_t words = wire::bitmap_words(section.keys);
    const size_t bytes = size_t{section.rows_found} * section.row_bytes;
    sections.append(py::make_tuple(section.code, section.row_bytes, section.rows_found,
                                   bytes_of(std::as_bytes(out.bitmaps.subspan(word, words))),
                                   bytes_of(body.subspan(row, bytes))));
    word += words;
    row += bytes;
  }
  return py::make_tuple(out.applied_version, sections);
}

py::tuple decode_pushed(const CallReply& reply) {
  const wire::FrameHeader header = header_of(reply);
  wire::PushReply out;
  check(wire::decode_push_reply(header, std::span(reply.frame).subspan(wire::kHeaderBytes), out));
  return py::make_tuple(out.inserted, out.updated, out.deleted, out.absent, out.refused);
}

}  // namespace

void bind_calls(py::module_& module) {
  py::class_<CallReply> reply(module, "CallReply",
                              "The reply of a call. Its methods raise the error of a refusal.");
  reply.def_readonly("ticket", &CallReply::ticket);
  reply.def("check", [](const CallReply& refusal) { header_of(refusal); });
  reply.def("pulled", decode_pulled);
  reply.def("pushed", decode_pushed);

  py::class_<Calls> calls(module, "Calls", "Requests of this process to its own server.");
  calls.def_property_readonly("ready_descriptor", &Calls::ready_descriptor);
  calls.def("pull", pull, py::arg("instance"), py::arg("sections"), py::kw_only(),
            py::arg("min_version") = 0, py::arg("wait_ms") = 0, py::arg("trace") = py::bytes());
  calls.def("push", push, py::arg("table"), py::arg("keys"), py::arg("rows"), py::kw_only(),
            py::arg("deleted") = py::bytes(), py::arg("stamp") = 0);
  calls.def("set_hot_keys", set_hot_keys, py::arg("table"), py::arg("keys"));
  calls.def(
      "hold", [](Calls& held, size_t bytes) { check(held.hold(bytes)); }, py::arg("bytes"));
  calls.def("release", &Calls::release, py::arg("bytes"));
  calls.def("drop", &Calls::drop, py::arg("ticket"));
  calls.def("take", &Calls::take);
}

}  // namespace petps::bindings
