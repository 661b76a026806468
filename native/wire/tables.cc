#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

struct TablesHead {
  uint32_t instances;
  uint32_t aliases;
  uint32_t tables;
  uint32_t reserved;
};

struct InstanceHead {
  uint32_t id;
  uint32_t partitions;
  uint64_t applied_version;
};

struct TableHead {
  uint32_t id;
  uint32_t instance;
  uint8_t dtype;
  uint8_t feed;
  uint16_t reserved;
  uint32_t dim;
  uint32_t row_bytes;
  uint32_t default_row_bytes;
  uint64_t capacity;
  uint64_t rows;
};
static_assert(sizeof(TableHead) == 40, "copied whole: see FORMAT.md, tables reply");

constexpr uint32_t kWithState = 1;  // flag of the request

struct TablesRequestBody {
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(TablesRequestBody) == 8, "copied whole: see FORMAT.md, tables");

struct StateHead {
  std::array<uint8_t, 16> pool_uuid;
  uint64_t counter;
};
static_assert(sizeof(StateHead) == 24, "copied whole: see FORMAT.md, tables reply");

// Return which count is above its limit, such as "70000 tables, more than 65536"; empty: none.
std::string excess_of(const TablesHead& head) {
  const auto text = [](uint32_t count, uint32_t most, const char* what) {
    return count <= most
               ? ""
               : std::to_string(count) + " " + what + ", more than " + std::to_string(most);
  };
  std::string excess = text(head.instances, kMaxInstances, "instances");
  if (excess.empty()) excess = text(head.aliases, kMaxAliases, "aliases");
  return excess.empty() ? text(head.tables, kMaxTables, "tables") : excess;
}

Status take_state(Cursor& cursor, size_t body_bytes, TablesReply& reply) {
  StateHead head{};
  if (!cursor.take(head)) return truncated("tables reply", "state", body_bytes);
  if (head.counter == 0)
    return bad_frame("tables reply: the counter of a pool is 0, but must be at least 1");
  reply.state = {head.pool_uuid, head.counter};
  for (AliasInfo& alias : reply.aliases) {
    if (!cursor.take(alias.previous))
      return truncated("tables reply", "previous instances", body_bytes);
  }
  return {};
}

Status take_instance(Cursor& cursor, size_t body_bytes, InstanceInfo& out) {
  InstanceHead head{};
  std::string_view model;
  std::string_view name;
  if (!cursor.take(head) || !cursor.take_name(model) || !cursor.take_name(name)) {
    return truncated("tables reply", "instances", body_bytes);
  }
  if (head.partitions > kMaxPartitions)
    return bad_frame("tables reply: instance '" + std::string(name) + "' has " +
                     std::to_string(head.partitions) + " partitions, more than " +
                     std::to_string(kMaxPartitions));
  out = {head.id, std::string(model), std::string(name), head.partitions, head.applied_version};
  return {};
}

Status take_table(Cursor& cursor, size_t body_bytes, TableInfo& out) {
  TableHead head{};
  std::string_view name;
  std::span<const std::byte> default_row;
  if (!cursor.take(head) || !cursor.take_name(name) ||
      !cursor.take_bytes(head.default_row_bytes, default_row)) {
    return truncated("tables reply", "tables", body_bytes);
  }
  if (head.default_row_bytes != 0 && head.default_row_bytes != head.row_bytes) {
    return bad_frame("tables reply: table '" + std::string(name) + "' has rows of " +
                     std::to_string(head.row_bytes) + " bytes and a default row of " +
                     std::to_string(head.default_row_bytes) + "; they must be equal");
  }
  out = {head.id,           head.instance,
         std::string(name), head.dtype,
         head.feed,         head.dim,
         head.row_bytes,    head.capacity,
         head.rows,         {default_row.begin(), default_row.end()}};
  return {};
}

}  // namespace

void encode_tables(uint64_t request_id, const TablesRequest& request, Frame& frame) {
  start_frame(Opcode::kTables, request_id, frame);
  if (!request.with_state) return;
  append(TablesRequestBody{kWithState, 0}, frame);
  finish_frame(frame);
}

Status decode_tables(const FrameHeader& header, std::span<const std::byte> body,
                     TablesRequest& request) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kTables, body));
  request = {};
  if (body.empty()) return {};
  Cursor cursor(body);
  TablesRequestBody flags{};
  if (!cursor.take(flags) || cursor.left() != 0 || flags.flags != kWithState ||
      flags.reserved != 0) {
    return bad_frame("tables: the body must be empty, or 8 bytes that set only flag 1");
  }
  request.with_state = true;
  return {};
}

Status encode_tables_reply(uint64_t request_id, const TablesReply& reply, Frame& frame) {
  const TablesHead head{static_cast<uint32_t>(reply.instances.size()),
                        static_cast<uint32_t>(reply.aliases.size()),
                        static_cast<uint32_t>(reply.tables.size()), 0};
  if (const std::string excess = excess_of(head); !excess.empty()) {
    return Status(Code::kResourceExhausted,
                  "the list of tables has " + excess + ": drop instances that are not used");
  }
  start_reply(Opcode::kTables, request_id, frame);
  append(head, frame);
  for (const InstanceInfo& instance : reply.instances) {
    append(InstanceHead{instance.id, instance.partitions, instance.applied_version}, frame);
    append_name(instance.model, frame);
    append_name(instance.name, frame);
  }
  for (const AliasInfo& alias : reply.aliases) {
    append(alias.instance, frame);
    append_name(alias.name, frame);
  }
  for (const TableInfo& table : reply.tables) {
    append(
        TableHead{table.id, table.instance, table.dtype, table.feed, 0, table.dim, table.row_bytes,
                  static_cast<uint32_t>(table.default_row.size()), table.capacity, table.rows},
        frame);
    append_name(table.name, frame);
    append_bytes(table.default_row.data(), table.default_row.size(), frame);
  }
  if (reply.state.counter != 0) {
    append(StateHead{reply.state.pool_uuid, reply.state.counter}, frame);
    for (const AliasInfo& alias : reply.aliases) append(alias.previous, frame);
  }
  if (frame.size() - kHeaderBytes > kMaxBodyBytes) {
    return Status(Code::kResourceExhausted, "the list of " + std::to_string(reply.tables.size()) +
                                                " tables does not fit in one frame: drop "
                                                "instances that are not used");
  }
  finish_frame(frame);
  return {};
}

Status decode_tables_reply(const FrameHeader& header, std::span<const std::byte> body,
                           TablesReply& reply) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kTables, body));
  Cursor cursor(body);
  TablesHead head{};
  if (!cursor.take(head)) return truncated("tables reply", "counts", body.size());
  if (const std::string excess = excess_of(head); !excess.empty())
    return bad_frame("tables reply: it has " + excess);
  // Never reserve by the peer's counts, so that memory stays in proportion to the frame.
  reply = {};
  for (uint32_t i = 0; i < head.instances; ++i) {
    InstanceInfo instance;
    PETPS_RETURN_IF_ERROR(take_instance(cursor, body.size(), instance));
    reply.instances.push_back(std::move(instance));
  }
  for (uint32_t i = 0; i < head.aliases; ++i) {
    AliasInfo alias;
    std::string_view name;
    if (!cursor.take(alias.instance) || !cursor.take_name(name)) {
      return truncated("tables reply", "aliases", body.size());
    }
    alias.name = name;
    reply.aliases.push_back(std::move(alias));
  }
  for (uint32_t i = 0; i < head.tables; ++i) {
    TableInfo table;
    PETPS_RETURN_IF_ERROR(take_table(cursor, body.size(), table));
    reply.tables.push_back(std::move(table));
  }
  if (cursor.left() != 0) PETPS_RETURN_IF_ERROR(take_state(cursor, body.size(), reply));
  return expect_end(cursor, "tables reply", "last part");
}

}  // namespace petps::wire
