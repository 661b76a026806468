// Client::push, push_stored and erase. Each key goes to the one server that owns it.
#include <algorithm>
#include <numeric>
#include <random>

#include "petps_client/impl.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

Status invalid_push(const PushWork& work, const std::string& reason) {
  return Status(Code::kInvalidArgument, "push to '" + std::string(work.table) + "': " + reason);
}

std::string row_name(const PushWork& work, size_t row) {
  return "row " + std::to_string(row) + " (key " + std::to_string(work.keys[row]) + ")";
}

Status check_shape(const PushWork& work, const Table& table) {
  if (!table.takes_pushes) {
    return Status(Code::kFailedPrecondition,
                  "push to '" + table.name +
                      "': the table is fed by deltas, so it takes no pushes: publish a delta");
  }
  if (work.deletes) return {};
  if (work.encoded_as.has_value() &&
      (work.encoded_as->dtype != table.dtype || work.encoded_as->dim != table.dim)) {
    const auto type_of = [](const Table& described) {
      return std::string(codec::dtype_name(described.dtype)) + " of dim " +
             std::to_string(described.dim);
    };
    return Status(Code::kFailedPrecondition,
                  "push to '" + table.name + "': it is " + type_of(*work.encoded_as) +
                      " at one server and " + type_of(table) +
                      " at another: create it with the same dtype and dim at all servers of the "
                      "shard map");
  }
  if (work.stored.data() == nullptr && work.dim != table.dim) {
    return invalid_push(work, "rows have dim " + std::to_string(work.dim) + ", the table has " +
                                  std::to_string(table.dim));
  }
  const size_t values = work.keys.size() * table.dim;
  const size_t bytes = work.keys.size() * table.row_bytes;
  if (work.stored.data() == nullptr && work.floats.size() != values) {
    return invalid_push(work, std::to_string(work.keys.size()) + " keys need " +
                                  std::to_string(values) + " values, not " +
                                  std::to_string(work.floats.size()));
  }
  if (work.stored.data() != nullptr && work.stored.size() != bytes) {
    return invalid_push(work, std::to_string(work.keys.size()) + " keys need " +
                                  std::to_string(bytes) + " bytes as stored, not " +
                                  std::to_string(work.stored.size()));
  }
  return {};
}

// Check the rows and encode them. `rows` becomes a view of the caller's memory if the rows need no
// encoding, otherwise of `encoded`.
Status encode_rows(const PushWork& work, const Table& table, std::vector<std::byte>& encoded,
                   std::span<const std::byte>& rows) {
  const size_t n = work.keys.size();
  if (!work.options.allow_not_finite && !work.floats.empty()) {
    const size_t row = codec::first_not_finite(work.floats.data(), n, table.dim);
    if (row < n) {
      return invalid_push(
          work, row_name(work, row) + " holds a NaN or infinity; set allow_not_finite to store it");
    }
  }
  if (work.stored.data() != nullptr) {
    rows = work.stored;
  } else if (table.dtype == codec::Dtype::kF32) {
    rows = std::as_bytes(work.floats);
    return {};
  } else {
    encoded.resize(n * table.row_bytes);
    codec::encode(table.dtype, work.floats.data(), n, table.dim, encoded.data());
    rows = encoded;
  }
  if (work.options.allow_not_finite) return {};
  if (table.dtype == codec::Dtype::kF32 &&
      reinterpret_cast<uintptr_t>(rows.data()) % alignof(float) != 0) {
    return invalid_push(work, "stored rows of f32 must be aligned to 4 bytes");
  }
  const size_t row = codec::first_not_finite_stored(table.dtype, rows.data(), n, table.dim);
  if (row == n) return {};
  return invalid_push(work, row_name(work, row) + " becomes NaN or infinite as " +
                                std::string(codec::dtype_name(table.dtype)) +
                                ": its values are out of range; set allow_not_finite to store it");
}

template <typename Counts>
void add(const Counts& reply, PushReport& report) {
  report.inserted += reply.inserted;
  report.updated += reply.updated;
  report.deleted += reply.deleted;
  report.absent += reply.absent;
  report.refused += reply.refused;
}

size_t keys_per_frame(const wire::Limits& limits, size_t row_bytes) {
  const size_t fixed = wire::push_request_bytes(0, 0, true);
  const size_t room = limits.body_bytes > fixed ? limits.body_bytes - fixed : 0;
  // One byte more than key and row: the key's bit of the deletion bitmap, rounded up.
  const size_t bytes_per_key = sizeof(uint64_t) + row_bytes + 1;
  return std::clamp<size_t>(room / bytes_per_key, 1, limits.keys_per_push);
}

Status send_rows(Connection& connection, wire::PushRequest request, const Deadline& deadline,
                 PushReport& report) {
  wire::encode_push(connection.next_request_id(), request, connection.frame());
  wire::PushReply reply;
  PETPS_RETURN_IF_ERROR(
      connection.exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
        return wire::decode_push_reply(header, body, reply);
      }));
  add(reply, report);
  return {};
}

}  // namespace

PushNumbers::PushNumbers()
    : client_([] {
        std::random_device device;
        const uint64_t number = (uint64_t{device()} << 32) | device();
        return std::max<uint64_t>(1, number);
      }()) {}

uint64_t PushNumbers::begin() {
  const std::lock_guard lock(mutex_);
  in_flight_.insert(next_);
  return next_++;
}

void PushNumbers::end(uint64_t number) {
  const std::lock_guard lock(mutex_);
  in_flight_.erase(number);
}

wire::PushOrder PushNumbers::order(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  wire::PushOrder order{client_, number, *in_flight_.begin(), 0};
  for (uint64_t i = 1; i < wire::kPushOrderCalls && order.oldest + i < next_; ++i) {
    if (!in_flight_.contains(order.oldest + i)) order.finished |= uint64_t{1} << i;
  }
  return order;
}

// Push all keys to one server, in as many requests as needed. Set `acknowledged` to the number of
// keys that the server acknowledged.
Status Client::Impl::push_to(RemoteServer& server, const Deadline& until, const PushWork& work,
                             PushReport& report, size_t& acknowledged) {
  auto leased = server.lease(until, Use::kWrite);
  if (!leased.ok()) return leased.status();
  Connection& connection = **leased;
  std::shared_ptr<const Catalogue> catalogue;
  const std::string instance =
      work.encoded_as.has_value() ? work.encoded_as->instance : std::string(work.options.instance);
  const auto entry = find_table(server, connection, work.table, until, catalogue, instance);
  if (!entry.ok()) return entry.status();
  const Table& table = entry.value()->table;
  PETPS_RETURN_IF_ERROR(check_shape(work, table));
  std::vector<std::byte> encoded;
  std::span<const std::byte> rows;
  if (!work.deletes) PETPS_RETURN_IF_ERROR(encode_rows(work, table, encoded, rows));
  wire::PushRequest request;
  request.table = entry.value()->id;
  request.instance = catalogue->instance(instance);
  request.dim = table.dim;
  request.dtype = static_cast<uint32_t>(table.dtype);
  request.row_bytes = work.deletes ? 0 : table.row_bytes;
  request.stamp = work.options.stamp;
  const size_t step = keys_per_frame(leased->limits(), request.row_bytes);
  for (acknowledged = 0; acknowledged < work.keys.size();) {
    const size_t first = acknowledged;
    const size_t keys = std::min(step, work.keys.size() - first);
    request.keys = work.keys.subspan(first, keys);
    request.rows =
        work.deletes ? rows : rows.subspan(first * table.row_bytes, keys * table.row_bytes);
    std::vector<uint64_t> deletions(work.deletes ? wire::bitmap_words(keys) : 0, ~uint64_t{0});
    if (!deletions.empty() && keys % 64 != 0) deletions.back() >>= 64 - keys % 64;
    request.deletions = deletions;
    if (leased->has(wire::kFeaturePushOrder))
      request.order = work.order != nullptr ? *work.order : push_numbers.order(work.number);
    const Status status = send_rows(connection, request, until, report);
    if (status.ok()) {
      acknowledged += keys;
      continue;
    }
    const bool is_in_doubt = connection.is_broken();
    std::string text(status.message());
    text += " (the server acknowledged " + std::to_string(first) + " of " +
            std::to_string(work.keys.size()) + " rows";
    text += is_in_doubt ? ", and may have applied the next " + std::to_string(keys) + ")" : ")";
    return Status(status.code(), std::move(text));
  }
  return {};
}

// Some keys of a push with copies of their stored rows: the part for one group.
struct PushPart {
  std::vector<uint64_t> keys;
  std::vector<std::byte> stored;

  PushPart(const PushWork& whole, std::span<const uint32_t> positions) {
    const size_t bytes = whole.keys.empty() ? 0 : whole.stored.size() / whole.keys.size();
    keys.reserve(positions.size());
    stored.reserve(positions.size() * bytes);
    for (const size_t position : positions) {
      keys.push_back(whole.keys[position]);
      const auto row = whole.stored.subspan(position * bytes, bytes);
      stored.insert(stored.end(), row.begin(), row.end());
    }
  }
  PushWork work(const PushWork& whole) const {
    PushWork part = whole;
    part.keys = keys;
    if (!whole.deletes) part.stored = stored;
    return part;
  }
};

namespace {

bool have_one_host(const RemoteServers& replicas) {
  return std::all_of(replicas.begin(), replicas.end(),
                     [&](const auto& server) { return server->host() == replicas[0]->host(); });
}

// Return whether all addresses of a host lead to one pool, such as those of a load balancer.
bool have_one_pool(const RemoteServers& replicas) {
  const auto first = replicas[0]->last_catalogue();
  return first != nullptr && std::all_of(replicas.begin(), replicas.end(), [&](const auto& server) {
           const auto catalogue = server->last_catalogue();
           return catalogue != nullptr && catalogue->state().pool_uuid == first->state().pool_uuid;
         });
}

// Return the server that takes the pushes to a group, which has one pool.
RemoteServer& owner_of(const RemoteServers& replicas) {
  const auto alive = std::find_if(replicas.begin(), replicas.end(),
                                  [](const auto& server) { return !server->is_dead(); });
  return alive == replicas.end() ? *replicas[0] : **alive;
}

}  // namespace

// Refuse the whole push, before anything is sent, if any of its keys has more than one server.
Status Client::Impl::refuse_replicas(const Routing& by, const Deadline& until,
                                     const PushWork& work) {
  std::vector<bool> is_pushed_to(by.groups.size(), by.groups.size() == 1);
  if (by.groups.size() > 1) {
    for (const uint64_t key : work.keys) is_pushed_to[by.group(key)] = true;
  }
  for (size_t group = 0; group < by.groups.size(); ++group) {
    const RemoteServers& replicas = by.groups[group];
    if (!is_pushed_to[group] || replicas.size() < 2) continue;
    if (have_one_host(replicas)) {
      read_missing_catalogues(by, until);
      if (have_one_pool(replicas)) continue;
    }
    std::vector<std::string> names;
    for (const auto& server : replicas) names.push_back(server->name());
    return wire::refuse_replicated_push(work.table, names);
  }
  return {};
}

// Push to the one server of a group. Adds its counts to `report`. A full table refuses some rows,
// and `full` becomes the error of the call once the others are applied.
Status Client::Impl::push_to_owner(RemoteServer& owner, const Deadline& until, const PushWork& work,
                                   PushReport& report, size_t& acknowledged, Status& full) {
  PushReport counts;
  const Status status = push_to(owner, until, work, counts, acknowledged);
  add(counts, report);
  if (status.code() == Code::kWrongShard) (void)read_shard_map(owner, until);
  if (counts.refused > 0) {
    full = Status(Code::kResourceExhausted,
                  owner.name() + ": table '" + std::string(work.table) + "' is full: " +
                      std::to_string(counts.refused) + " of " + std::to_string(work.keys.size()) +
                      " rows were refused (new keys), the others are applied: give the table more "
                      "capacity (petps table grow), or erase rows");
  }
  return status;
}

// Check and encode all rows before the first is sent, and choose the instance for all groups.
Status Client::Impl::encode_push(const Routing& by, const Deadline& until, PushWork& work,
                                 std::vector<std::byte>& encoded) {
  Choice choice;
  if (work.options.instance.empty()) {
    PETPS_RETURN_IF_ERROR(choose_instance(by, until, choice));
  } else {
    choice.instance = work.options.instance;
  }
  return try_any("push", until, [&](RemoteServer& server, const Deadline& share) -> Status {
    auto leased = server.lease(share);
    if (!leased.ok()) return leased.status();
    std::shared_ptr<const Catalogue> catalogue;
    const auto entry = find_table(server, **leased, work.table, share, catalogue, choice.instance);
    if (!entry.ok()) return entry.status();
    const Table& table = entry.value()->table;
    PETPS_RETURN_IF_ERROR(check_shape(work, table));
    std::span<const std::byte> rows;
    if (!work.deletes) PETPS_RETURN_IF_ERROR(encode_rows(work, table, encoded, rows));
    work.encoded_as = table;
    if (work.deletes) return {};
    work.floats = {};
    work.stored = rows;
    work.options.allow_not_finite = true;  // the rows were checked above
    return {};
  });
}

// Push group by group. Keys that a group refuses with WRONG_SHARD remain in `left`, and the status
// is that refusal. If a table is full at one group, the other groups still receive their rows, and
// `full` says so.
Status Client::Impl::push_by(const Routing& by, const Deadline& until, const PushWork& work,
                             PushReport& report, std::vector<uint32_t>& left, Status& full) {
  std::vector<std::vector<uint32_t>> shares(by.groups.size());
  for (const uint32_t position : left) shares[by.group(work.keys[position])].push_back(position);
  left.clear();
  Status refusal;
  for (size_t group = 0; group < shares.size(); ++group) {
    if (shares[group].empty()) continue;
    const PushPart part(work, shares[group]);
    size_t rows = 0;
    const Status status =
        push_to_owner(owner_of(by.groups[group]), until, part.work(work), report, rows, full);
    if (status.ok()) continue;
    if (status.code() != Code::kWrongShard) return status;
    refusal = status;
    left.insert(left.end(), shares[group].begin() + static_cast<ptrdiff_t>(rows),
                shares[group].end());
  }
  std::sort(left.begin(), left.end());  // the last row of a repeated key wins
  return refusal;
}

Result<PushReport> Client::Impl::push(PushWork work) {
  PETPS_RETURN_IF_ERROR(check_process());
  const Deadline until = deadline(work.options.deadline_ms);
  PushReport report;
  const PushNumber number(push_numbers);
  work.number = number.value;
  std::vector<std::byte> encoded;
  std::vector<uint32_t> left(work.keys.size());  // not acknowledged yet
  std::iota(left.begin(), left.end(), 0u);
  bool is_encoded = false;
  Status full;
  Status status = by_shard_map(until, [&](const Routing& by) -> Status {
    PETPS_RETURN_IF_ERROR(refuse_replicas(by, until, work));
    // One group and nothing acknowledged yet: send the caller's own memory.
    if ((by.groups.size() == 1 && left.size() == work.keys.size()) || work.keys.empty()) {
      size_t rows = 0;
      Status result = push_to_owner(owner_of(by.groups[0]), until, work, report, rows, full);
      left.erase(left.begin(), left.begin() + static_cast<ptrdiff_t>(rows));
      return result;
    }
    if (!is_encoded) PETPS_RETURN_IF_ERROR(encode_push(by, until, work, encoded));
    is_encoded = true;
    return push_by(by, until, work, report, left, full);
  });
  report.is_complete = status.ok();
  if (status.ok()) status = full;
  if (work.options.report != nullptr) *work.options.report = report;
  if (!status.ok()) return status;
  return report;
}

Result<PushReport> Client::push(std::string_view table, std::span<const uint64_t> keys,
                                std::span<const float> rows, uint32_t dim,
                                const PushOptions& options) {
  return impl_->push(
      {.table = table, .keys = keys, .floats = rows, .dim = dim, .options = options});
}

Result<PushReport> Client::push_stored(std::string_view table, std::span<const uint64_t> keys,
                                       std::span<const std::byte> rows,
                                       const PushOptions& options) {
  alignas(8) static constexpr std::byte kNoRows{};  // marks `stored` as set when there are no keys
  const auto stored = rows.data() != nullptr ? rows : std::span<const std::byte>(&kNoRows, 0);
  return impl_->push({.table = table, .keys = keys, .stored = stored, .options = options});
}

Result<PushReport> Client::erase(std::string_view table, std::span<const uint64_t> keys,
                                 const PushOptions& options) {
  return impl_->push({.table = table, .keys = keys, .deletes = true, .options = options});
}

}  // namespace petps::client
