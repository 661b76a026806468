// Client::push, push_stored and erase: each key goes to its one owner. Replicas take no pushes.
#include <algorithm>
#include <numeric>
#include <random>

#include "petps_client/impl.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

Status wrong(const PushWork& work, const std::string& what) {
  return Status(Code::kInvalidArgument, "push to '" + std::string(work.table) + "': " + what);
}

Status check_shape(const PushWork& work, const Table& table) {
  if (!table.takes_pushes) {
    return Status(Code::kFailedPrecondition,
                  "push to '" + table.name +
                      "': the table is fed by deltas, and takes no pushes: publish a delta");
  }
  if (work.deletes) return {};
  if (work.encoded_as.has_value() &&
      (work.encoded_as->dtype != table.dtype || work.encoded_as->dim != table.dim)) {
    const auto form = [](const Table& of) {
      return std::string(codec::dtype_name(of.dtype)) + " of dim " + std::to_string(of.dim);
    };
    return Status(Code::kFailedPrecondition,
                  "push to '" + table.name + "': it is " + form(*work.encoded_as) +
                      " at one server and " + form(table) +
                      " at another: create it alike at all servers of the shard map");
  }
  if (work.stored.data() == nullptr && work.dim != table.dim) {
    return wrong(work, "rows have dim " + std::to_string(work.dim) + ", the table has " +
                           std::to_string(table.dim));
  }
  const size_t values = work.keys.size() * table.dim;
  const size_t bytes = work.keys.size() * table.row_bytes;
  if (work.stored.data() == nullptr && work.floats.size() != values) {
    return wrong(work, std::to_string(work.keys.size()) + " keys need " + std::to_string(values) +
                           " values, not " + std::to_string(work.floats.size()));
  }
  if (work.stored.data() != nullptr && work.stored.size() != bytes) {
    return wrong(work, std::to_string(work.keys.size()) + " keys need " + std::to_string(bytes) +
                           " bytes as stored, not " + std::to_string(work.stored.size()));
  }
  return {};
}

// Check the rows and encode them. `rows` is the caller's own memory when nothing has to change,
// otherwise `encoded`.
Status encode_rows(const PushWork& work, const Table& table, std::vector<std::byte>& encoded,
                   std::span<const std::byte>& rows) {
  const size_t n = work.keys.size();
  if (!work.options.allow_not_finite && !work.floats.empty()) {
    const size_t row = codec::first_not_finite(work.floats.data(), n, table.dim);
    if (row < n) {
      return wrong(work, "row " + std::to_string(row) + " (key " + std::to_string(work.keys[row]) +
                             ") holds a NaN or infinity; set allow_not_finite to store it");
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
    return wrong(work, "stored rows of f32 must be aligned to 4 bytes");
  }
  const size_t row = codec::first_not_finite_stored(table.dtype, rows.data(), n, table.dim);
  if (row == n) return {};
  return wrong(work, "row " + std::to_string(row) + " (key " + std::to_string(work.keys[row]) +
                         ") becomes NaN or infinite as " +
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
  // One byte more for its bit of the deletion bitmap, rounded up.
  const size_t a_key = sizeof(uint64_t) + row_bytes + 1;
  return std::clamp<size_t>(room / a_key, 1, limits.keys_per_push);
}

Status send_rows(Connection& connection, wire::PushRequest request, const Deadline& deadline,
                 PushReport& report) {
  wire::encode_push(connection.next_request_id(), request, connection.frame());
  wire::FrameHeader header;
  const auto body = connection.ask(connection.frame(), header, deadline);
  if (!body.ok()) return body.status();
  wire::PushReply reply;
  const Status decoded = wire::decode_push_reply(header, body.value(), reply);
  if (!decoded.ok()) return connection.distrust(decoded.message());
  add(reply, report);
  return {};
}

}  // namespace

PushNumbers::PushNumbers()
    : client_([] {
        std::random_device device;
        const uint64_t drawn = (uint64_t{device()} << 32) | device();
        return std::max<uint64_t>(1, drawn);
      }()) {}

uint64_t PushNumbers::begin() {
  const std::lock_guard lock(mutex_);
  under_way_.insert(next_);
  return next_++;
}

void PushNumbers::end(uint64_t number) {
  const std::lock_guard lock(mutex_);
  under_way_.erase(number);
}

wire::PushOrder PushNumbers::order(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  wire::PushOrder order{client_, number, *under_way_.begin(), 0};
  for (uint64_t i = 1; i < wire::kPushOrderCalls && order.oldest + i < next_; ++i) {
    if (!under_way_.contains(order.oldest + i)) order.finished |= uint64_t{1} << i;
  }
  return order;
}

Status Client::Impl::push_to(RemoteServer& server, const Deadline& until, const PushWork& work,
                             PushReport& report, size_t& acknowledged) {
  auto leased = server.lease(until, Use::kWrite);
  if (!leased.ok()) return leased.status();
  Connection& connection = **leased;
  std::shared_ptr<const Catalogue> catalogue;
  const std::string instance = work.encoded_as.has_value() ? work.encoded_as->instance : "";
  const auto found = find_table(server, connection, work.table, until, catalogue, instance);
  if (!found.ok()) return found.status();
  const Table& table = found.value()->table;
  PETPS_RETURN_IF_ERROR(check_shape(work, table));
  std::vector<std::byte> encoded;
  std::span<const std::byte> rows;
  if (!work.deletes) PETPS_RETURN_IF_ERROR(encode_rows(work, table, encoded, rows));
  wire::PushRequest request;
  request.table = found.value()->id;
  request.instance = catalogue->instance(instance);
  request.dim = table.dim;
  request.dtype = static_cast<uint32_t>(table.dtype);
  request.row_bytes = work.deletes ? 0 : table.row_bytes;
  request.stamp = work.options.stamp;
  const size_t step = keys_per_frame(leased->limits(), request.row_bytes);
  const std::vector<uint64_t> all_deleted(work.deletes ? wire::bitmap_words(step) : 0,
                                          ~uint64_t{0});
  for (acknowledged = 0; acknowledged < work.keys.size();) {
    const size_t first = acknowledged;
    const size_t keys = std::min(step, work.keys.size() - first);
    request.keys = work.keys.subspan(first, keys);
    request.rows =
        work.deletes ? rows : rows.subspan(first * table.row_bytes, keys * table.row_bytes);
    std::vector<uint64_t> deletions(
        all_deleted.begin(),
        all_deleted.begin() +
            (work.deletes ? static_cast<ptrdiff_t>(wire::bitmap_words(keys)) : 0));
    if (!deletions.empty() && keys % 64 != 0) deletions.back() >>= 64 - keys % 64;
    request.deletions = deletions;
    if (leased->has(wire::kFeaturePushOrder)) request.order = push_numbers.order(work.number);
    const Status status = send_rows(connection, request, until, report);
    if (status.ok()) {
      acknowledged += keys;
      continue;
    }
    const bool in_doubt = connection.broken();
    std::string text(status.message());
    text += " (" + std::to_string(first) + " of " + std::to_string(work.keys.size()) +
            " rows were acknowledged";
    text += in_doubt ? ", the following " + std::to_string(keys) + " may have been taken)" : ")";
    return Status(status.code(), std::move(text));
  }
  return {};
}

// Some keys of a push with copies of their stored rows: the part for one group.
struct PushPart {
  std::vector<uint64_t> keys;
  std::vector<std::byte> stored;

  PushPart(const PushWork& of, std::span<const uint32_t> positions) {
    const size_t bytes = of.keys.empty() ? 0 : of.stored.size() / of.keys.size();
    keys.reserve(positions.size());
    stored.reserve(positions.size() * bytes);
    for (const size_t at : positions) {
      keys.push_back(of.keys[at]);
      const auto row = of.stored.subspan(at * bytes, bytes);
      stored.insert(stored.end(), row.begin(), row.end());
    }
  }
  PushWork work(const PushWork& like) const {
    PushWork part = like;
    part.keys = keys;
    if (!like.deletes) part.stored = stored;
    return part;
  }
};

// Refuse the whole push, before anything is sent, if any of its keys has more than one server.
Status Client::Impl::refuse_replicas(const Routing& by, const PushWork& work) {
  std::vector<bool> is_pushed_to(by.groups.size(), by.groups.size() == 1);
  if (by.groups.size() > 1) {
    for (const uint64_t key : work.keys) is_pushed_to[by.group(key)] = true;
  }
  for (size_t group = 0; group < by.groups.size(); ++group) {
    const RemoteServers& replicas = by.groups[group];
    if (!is_pushed_to[group] || replicas.size() < 2) continue;
    std::vector<std::string> names;
    for (const auto& server : replicas) names.push_back(server->name());
    return wire::refuse_replicated_push(work.table, names);
  }
  return {};
}

// Push to the one server of a group. Adds its counts to `report`.
Status Client::Impl::push_to_owner(RemoteServer& owner, const Deadline& until, const PushWork& work,
                                   PushReport& report, size_t& acknowledged) {
  PushReport here;
  const Status status = push_to(owner, until, work, here, acknowledged);
  add(here, report);
  if (status.code() == Code::kWrongShard) (void)read_shard_map(owner, until);
  if (!status.ok() || here.refused == 0) return status;
  return Status(Code::kResourceExhausted,
                owner.name() + ": table '" + std::string(work.table) + "' is full: " +
                    std::to_string(here.refused) + " of " + std::to_string(work.keys.size()) +
                    " rows were refused (new keys), the others are applied: raise its capacity "
                    "or erase rows");
}

// Check and encode all rows before the first is sent, and choose the instance for all groups.
Status Client::Impl::encode_push(const Routing& by, const Deadline& until, PushWork& work,
                                 std::vector<std::byte>& encoded) {
  Choice choice;
  PETPS_RETURN_IF_ERROR(choose_instance(by, until, choice));
  return try_any("push", until, [&](RemoteServer& server, const Deadline& share) -> Status {
    auto leased = server.lease(share);
    if (!leased.ok()) return leased.status();
    std::shared_ptr<const Catalogue> catalogue;
    const auto found = find_table(server, **leased, work.table, share, catalogue, choice.instance);
    if (!found.ok()) return found.status();
    const Table& table = found.value()->table;
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

// Push group by group. Keys that a group refuses with WRONG_SHARD remain in `left`. A full group
// does not keep rows from the other groups.
Status Client::Impl::push_by(const Routing& by, const Deadline& until, const PushWork& work,
                             PushReport& report, std::vector<uint32_t>& left) {
  std::vector<std::vector<uint32_t>> shares(by.groups.size());
  for (const uint32_t at : left) shares[by.group(work.keys[at])].push_back(at);
  left.clear();
  Status full;
  Status refusal;
  for (size_t group = 0; group < shares.size(); ++group) {
    if (shares[group].empty()) continue;
    const PushPart part(work, shares[group]);
    size_t rows = 0;
    const Status pushed = push_to_owner(*by.groups[group][0], until, part.work(work), report, rows);
    if (pushed.code() == Code::kResourceExhausted) full = pushed;
    if (pushed.ok() || pushed.code() == Code::kResourceExhausted) continue;
    if (pushed.code() != Code::kWrongShard) return pushed;
    refusal = pushed;
    left.insert(left.end(), shares[group].begin() + static_cast<ptrdiff_t>(rows),
                shares[group].end());
  }
  std::sort(left.begin(), left.end());  // the last row of a repeated key wins
  return full.ok() ? refusal : full;
}

Result<PushReport> Client::Impl::push(const PushWork& given) {
  PETPS_RETURN_IF_ERROR(check_process());
  const Deadline until = deadline(given.options.deadline_ms);
  PushReport report;
  PushWork work = given;
  const PushNumber number(push_numbers);
  work.number = number.value;
  std::vector<std::byte> encoded;
  std::vector<uint32_t> left(work.keys.size());  // not acknowledged yet
  std::iota(left.begin(), left.end(), 0u);
  bool is_encoded = false;
  const Status status = by_shard_map(until, [&](const Routing& by) -> Status {
    PETPS_RETURN_IF_ERROR(refuse_replicas(by, work));
    // One group and nothing acknowledged yet: send the caller's own memory.
    if ((by.groups.size() == 1 && left.size() == work.keys.size()) || work.keys.empty()) {
      size_t rows = 0;
      const Status pushed = push_to_owner(*by.groups[0][0], until, work, report, rows);
      left.erase(left.begin(), left.begin() + static_cast<ptrdiff_t>(rows));
      return pushed;
    }
    if (!is_encoded) PETPS_RETURN_IF_ERROR(encode_push(by, until, work, encoded));
    is_encoded = true;
    return push_by(by, until, work, report, left);
  });
  if (given.options.report != nullptr) *given.options.report = report;
  if (!status.ok()) return status;
  return report;
}

Result<PushReport> Client::push(std::string_view table, std::span<const uint64_t> keys,
                                std::span<const float> rows, uint32_t dim,
                                const PushOptions& options) {
  PushWork work;
  work.table = table;
  work.keys = keys;
  work.floats = rows;
  work.dim = dim;
  work.options = options;
  return impl_->push(work);
}

Result<PushReport> Client::push_stored(std::string_view table, std::span<const uint64_t> keys,
                                       std::span<const std::byte> rows,
                                       const PushOptions& options) {
  alignas(8) static constexpr std::byte kNoRows{};  // marks `stored` as set when there are no keys
  PushWork work;
  work.table = table;
  work.keys = keys;
  work.stored = rows.data() != nullptr ? rows : std::span<const std::byte>(&kNoRows, 0);
  work.options = options;
  return impl_->push(work);
}

Result<PushReport> Client::erase(std::string_view table, std::span<const uint64_t> keys,
                                 const PushOptions& options) {
  PushWork work;
  work.table = table;
  work.keys = keys;
  work.deletes = true;
  work.options = options;
  return impl_->push(work);
}

}  // namespace petps::client
