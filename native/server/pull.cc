// A pull takes a pin, reads the applied version and looks up the keys, in this order. Then the
// list and the pin move into the transport.
#include <algorithm>

#include "base/clock.h"
#include "base/peer.h"
#include "base/prefetch.h"
#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using base::Code;
using base::Status;

namespace {

std::string text_of(table::Lack lack, uint32_t partition, const std::string& address) {
  const std::string where = "partition " + std::to_string(partition) + " of this instance is not ";
  if (lack == table::Lack::kUnread) {
    return where + "yet at " + address +
           ": the log has not been read to its end since the pool was opened without its rows. Ask "
           "another owner of the partition, or wait (petps status shows how far it is)";
  }
  return where + "at " + address +
         ": it came when the model's name referred to a newer instance. Pull that one, or ask "
         "another owner of the partition";
}

}  // namespace

Worker::Outcome Worker::pull(const Request& request, Status& refusal) {
  wire::PullRequest pull;
  refusal = wire::decode_pull(request.header, request.body(), shared_.options.limits, pull);
  if (!refusal.ok()) return Outcome::kDone;
  epoch::Pin pin = reader_.pin();  // before finding the tables, which may be dropped at any time
  if (!pin) {                      // every pin is held by a list in flight: wait for completions
    stats_.waits_for_pin.add(1);
    return Outcome::kWait;
  }
  refusal = find_tables(pull);
  if (!refusal.ok()) return Outcome::kDone;
  if (spans_ != nullptr) {  // only of callers that may read
    spans_->begin(pull, request.start_ns, static_cast<uint8_t>(source_),
                  state_of(request.connection).front);
  }
  refusal = check_pulled(pull.keys);
  if (!refusal.ok()) return Outcome::kDone;
  const size_t head_bytes = wire::pull_reply_head_bytes(pull.sections);
  uint64_t rows_bytes_max = 0;
  refusal = check_reply_size(pull, head_bytes, rows_bytes_max);
  if (!refusal.ok()) return Outcome::kDone;
  const Applied applied = applied_version(pull);
  const bool may_lack = applied.version == 0 && ownership_->map.version != 0 && is_any_partial();
  if (!has_current_map()) {  // changed since the keys were checked: `applied` may be of the new map
    pin.drop();
    take_map();
    return this->pull(request, refusal);
  }
  if (may_lack) {
    refusal = check_loaded(pull);
    if (!refusal.ok()) return Outcome::kDone;
  }
  if (pull.min_version > applied.version) return park(request.connection, pull, applied, refusal);

  if (spans_ != nullptr) spans_->begin_lookup();
  list_.clear();
  const bool copy = copies_rows(pull.keys.size(), rows_bytes_max);
  const std::span<std::byte> head = list_.header(head_bytes, copy ? rows_bytes_max : 0);
  const wire::PullReplyParts parts = wire::start_pull_reply(pull.sections, head);
  size_t key = 0;
  size_t word = 0;
  uint64_t found = 0;
  for (size_t i = 0; i < pull.sections.size(); ++i) {
    const size_t n = pull.sections[i].keys;
    const size_t words = wire::bitmap_words(n);
    if (section_tables_[i] == nullptr) {
      parts.sections[i].code = static_cast<uint16_t>(Code::kNotFound);
    } else {
      gather_section(pull.keys.subspan(key, n), *section_tables_[i], parts.sections[i],
                     parts.bitmaps.subspan(word, words), copy);
    }
    found += parts.sections[i].rows_found;
    key += n;
    word += words;
  }
  const size_t rows_bytes = list_.bytes() - head_bytes;
  wire::finish_pull_reply(request.header.request_id, applied.version, pull.sections.size(),
                          rows_bytes, head);
  if (spans_ != nullptr) spans_->begin_send(applied.version, applied.instance, found);
  // Before the reply, so that a client that has the reply sees it counted.
  count_pull(pull, parts.sections, found);
  caller_->spend_bytes(list_.bytes());
  endpoint_.post(request.connection, std::move(list_), std::move(pin));
  return Outcome::kDone;
}

void Worker::count_pull(const wire::PullRequest& request,
                        std::span<const wire::PullReplySection> sections, uint64_t rows_found) {
  stats_.pulls.add(1);
  stats_.keys.add(request.keys.size());
  stats_.rows_found.add(rows_found);
  section_stats_.assign(sections.size(), nullptr);
  for (size_t i = 0; i < sections.size(); ++i) {
    if (section_tables_[i] == nullptr) continue;
    TableStats& stats = stats_of(request.sections[i].table);
    stats.pulls.add(1);
    stats.keys.add(request.sections[i].keys);
    stats.rows_found.add(sections[i].rows_found);
    section_stats_[i] = &stats;
  }
}

// Fill section_tables_. An unknown table does not affect the others; if no table is known, refuse
// the request.
Status Worker::find_tables(const wire::PullRequest& request) {
  section_tables_.resize(request.sections.size());
  bool is_any_known = false;
  for (size_t i = 0; i < request.sections.size(); ++i) {
    table::Table* table = find_table(request.sections[i].table);
    section_tables_[i] = table;
    PETPS_RETURN_IF_ERROR(check_right(access::Role::kRead, request.sections[i].table, table));
    if (table == nullptr) continue;
    is_any_known = true;
    const uint32_t instance = table->record().spec.instance;
    if (request.instance != 0 && instance != request.instance) {
      return Status(Code::kInvalidArgument,
                    "table " + std::to_string(table->id()) + " (" + table->record().spec.name +
                        ") is of instance " + std::to_string(instance) + ", not of instance " +
                        std::to_string(request.instance) + ": read the tables again");
    }
  }
  return is_any_known ? Status() : unknown_table(request.sections[0].table);
}

Status Worker::check_reply_size(const wire::PullRequest& request, size_t head_bytes,
                                uint64_t& rows_bytes_max) const {
  rows_bytes_max = 0;  // 65,536 keys x 16 KiB: far from overflow
  for (size_t i = 0; i < request.sections.size(); ++i) {
    if (section_tables_[i] == nullptr) continue;
    rows_bytes_max +=
        uint64_t{request.sections[i].keys} * section_tables_[i]->record().spec.row_bytes;
  }
  const uint64_t body_bytes = head_bytes - wire::kHeaderBytes + rows_bytes_max;
  if (body_bytes <= shared_.options.limits.body_bytes) return {};
  return Status(
      Code::kResourceExhausted,
      "the reply to a pull of " + std::to_string(request.keys.size()) + " keys could have " +
          std::to_string(body_bytes) + " bytes, above the frame limit of " +
          std::to_string(shared_.options.limits.body_bytes) + ": split the request by row bytes");
}

Worker::Applied Worker::applied_version(const wire::PullRequest& request) const {
  if (request.instance != 0)
    return {shared_.tables.applied_version(request.instance), request.instance};
  Applied lowest{~uint64_t{0}, ~uint32_t{0}};
  uint32_t last = ~uint32_t{0};
  for (const table::Table* table : section_tables_) {
    if (table == nullptr || table->record().spec.instance == last) continue;
    last = table->record().spec.instance;
    const uint64_t version = shared_.tables.applied_version(last);
    if (version < lowest.version) lowest = {version, last};
  }
  return lowest;
}

bool Worker::is_any_partial() const {
  return std::ranges::any_of(section_tables_, [&](const table::Table* table) {
    return table != nullptr && shared_.tables.is_partial(table->record().spec.instance);
  });
}

// Refuse keys of partitions that this server has not loaded, because misses would look like an
// answer, and another owner may have the rows (decisions 122 and 123). Pushes feed a table in all
// its partitions.
Status Worker::check_loaded(const wire::PullRequest& request) const {
  size_t begin = 0;
  for (size_t i = 0; i < request.sections.size(); ++i) {
    const std::span<const uint64_t> keys = request.keys.subspan(begin, request.sections[i].keys);
    begin += keys.size();
    const table::Table* table = section_tables_[i];
    if (table == nullptr || table->record().spec.feed != pool::Feed::kDelta) continue;
    wire::PartitionSet loaded{};
    for (const uint64_t key : keys) {
      const uint32_t partition = wire::partition_of(key, ownership_->shard.partitions);
      if (wire::has_partition(loaded, partition)) continue;
      const auto lack = shared_.tables.lack_of(table->record().spec.instance, partition);
      // A pull that names a version waits for it, or is STALE.
      const bool may_wait = lack == table::Lack::kUnread && request.min_version > 0;
      if (lack != table::Lack::kNone && !may_wait)
        return Status(Code::kNotFound, text_of(lack, partition, shared_.address));
      loaded[partition / 64] |= uint64_t{1} << (partition % 64);
    }
  }
  return {};
}

// The frame stays at the front of its connection, which is not read until the pull resumes. So a
// parked pull holds no pin and no memory of its own.
Worker::Outcome Worker::park(transport::ConnectionId connection, const wire::PullRequest& request,
                             const Applied& applied, Status& refusal) {
  ConnectionState& state = state_of(connection);
  const uint64_t now = base::monotonic_ns();
  if (state.parked_until_ns == 0)
    state.parked_until_ns = now + uint64_t{request.wait_ms} * 1'000'000;
  if (now < state.parked_until_ns && !draining_ && may_park(state.peer)) {
    parked_.push_back({connection, applied.instance, request.min_version, state.parked_until_ns});
    stats_.waits_for_version.add(1);
    return Outcome::kPark;
  }
  refusal = Status(Code::kStale, "version " + std::to_string(request.min_version) +
                                     " was requested, this server has applied " +
                                     std::to_string(applied.version));
  return Outcome::kDone;
}

// Return whether there is a place for a pull of this peer. One host has at most half of them.
bool Worker::may_park(const std::string& peer) const {
  if (parked_.size() < kMaxParkedPulls / 2) return true;
  if (parked_.size() >= kMaxParkedPulls) return false;
  const std::string host = base::host_of(peer);
  const auto is_same = [&](const Parked& parked) {
    return base::host_of(connections_[transport::slot_of(parked.connection)].peer) == host;
  };
  return std::ranges::count_if(parked_, is_same) < static_cast<ptrdiff_t>(kMaxParkedPulls / 2);
}

// Return whether the worker copies rows into the reply. It copies small rows while it looks up
// later ones, so that memory and core are both busy. The transport or the kernel reads large rows.
bool Worker::copies_rows(size_t keys, uint64_t rows_bytes_max) const {
  if (source_ == Source::kRdma) return false;  // the network card reads them
  if (keys == 0) return true;
  return shared_.gather->mode_for(rows_bytes_max / keys, keys) == transport::GatherMode::kCopy;
}

void Worker::gather_section(std::span<const uint64_t> keys, const table::Table& table,
                            wire::PullReplySection& section, std::span<uint64_t> bitmap,
                            bool copy) {
  const uint32_t row_bytes = table.record().spec.row_bytes;
  uint32_t found = 0;
  const auto add = [&](size_t i) {
    if (rows_[i] == nullptr) return;
    bitmap[i / 64] |= uint64_t{1} << (i % 64);
    if (copy) {
      list_.append(rows_[i], row_bytes);
    } else {
      list_.add(rows_[i], row_bytes);
    }
    ++found;
  };
  if (copy) {
    table.lookup(keys, rows_.data(), [&](size_t searched, size_t ready) {
      if (searched != table::kNoKey && rows_[searched] != nullptr)
        base::prefetch(rows_[searched], row_bytes);
      if (ready != table::kNoKey) add(ready);
    });
  } else {
    table.lookup(keys, rows_.data());
    for (size_t i = 0; i < keys.size(); ++i) add(i);
  }
  table.note_pulled(keys);
  section.row_bytes = row_bytes;
  section.rows_found = found;
}

}  // namespace petps::server
