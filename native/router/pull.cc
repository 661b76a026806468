// A pull: the servers' rows are received where the reply has them.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "router/pull_work.h"
#include "router/requests.h"
#include "router/shared.h"

namespace petps::router {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A pull that waits for a version asks the servers again after this time, unless its caller has
// left or the router stops.
constexpr uint32_t kWaitSliceMs = 250;
// A server that answers STALE at once is asked again after this.
constexpr std::chrono::milliseconds kStalePause{10};

Status find_tables(PullWork& work) {
  const wire::PullRequest& request = work.request;
  const wire::InstanceInfo*& instance = work.instance;
  size_t first = 0;
  for (const wire::PullSection& section : request.sections) {
    const wire::TableInfo* table = work.listing->table(section.table);
    work.sections.push_back({table, section.keys, first, nullptr});
    first += section.keys;
    if (table == nullptr) continue;
    work.known_keys += section.keys;
    work.rows_bytes_max += size_t{section.keys} * table->row_bytes;
    if (request.instance != 0 && table->instance != request.instance) {
      return Status(Code::kInvalidArgument,
                    "table " + std::to_string(table->id) + " (" + table->name +
                        ") is of instance " + std::to_string(table->instance) +
                        ", not of instance " + std::to_string(request.instance) +
                        ": read the tables again");
    }
    if (instance != nullptr && instance->id != table->instance) {
      return Status(Code::kInvalidArgument,
                    "the pull names tables of two instances, and a router answers each pull from "
                    "one: pull from each instance by itself");
    }
    instance = work.listing->instance(table->instance);
  }
  return instance == nullptr ? unknown_table(request.sections[0].table) : Status();
}

// Set the bits of `bitmap` from one byte for each key. Return how many are set.
uint32_t pack_mask(std::span<const uint8_t> mask, uint64_t* bitmap) {
  uint32_t count = 0;
  for (size_t first = 0; first < mask.size(); first += 64) {
    uint64_t word = 0;
    const size_t n = std::min<size_t>(64, mask.size() - first);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, mask.data() + first + i, sizeof(bytes));
      // Gather the lowest bit of each of the eight bytes in the highest byte.
      word |= ((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56) << i;
    }
    for (; i < n; ++i) word |= uint64_t{mask[first + i]} << i;
    bitmap[first / 64] = word;
    count += static_cast<uint32_t>(std::popcount(word));
  }
  return count;
}

// Move the rows that were found to `to`, one after another. Return the end of the last one.
std::byte* pack_rows(const PullSection& section, const uint8_t* mask, uint32_t rows_found,
                     std::byte* to) {
  const size_t row_bytes = section.table->row_bytes;
  const std::byte* from = section.rows;
  if (rows_found == section.keys) {
    if (to != from) std::memmove(to, from, row_bytes * section.keys);
    return to + row_bytes * section.keys;
  }
  for (uint32_t i = 0; i < section.keys; ++i, from += row_bytes) {
    if (mask[i] == 0) continue;
    if (to != from) std::memmove(to, from, row_bytes);
    to += row_bytes;
  }
  return to;
}

// A worker starts no larger pulls, because its other callers wait while it works: this is about a
// millisecond of its time.
constexpr size_t kStartedKeys = 4'096;
constexpr size_t kStartedSections = 64;
constexpr size_t kStartedBytes = size_t{2} << 20;  // of the request and the reply

// Set how long the servers may take for the next requests, and wait for the version.
void set_times(const Shared& shared, PullWork& work) {
  const uint64_t now = base::monotonic_ns();
  work.left_ms = work.wait_until_ns > now ? (work.wait_until_ns - now) / 1'000'000 : 0;
  work.options.wait_ms = static_cast<uint32_t>(std::min<uint64_t>(work.left_ms, kWaitSliceMs));
  work.options.deadline_ms = shared.options.deadline_ms + work.options.wait_ms;
}

Result<client::PullReport> pull_once(Shared& shared, Job& job) {
  PullWork& work = *job.pull;
  if (const auto started = std::move(work.started)) return started->finish();
  set_times(shared, work);
  return job.caller->client().pull_many(work.pulls, work.options);
}

// Pull, and wait for a version in slices, so that a caller that leaves is noticed.
Result<client::PullReport> pull_in_time(Shared& shared, Job& job) {
  for (;;) {
    auto report = pull_once(shared, job);
    if (report.status().code() != Code::kStale || job.pull->left_ms == 0) return report;
    if (!job.is_awaited() || shared.stopping.load(std::memory_order_relaxed)) return report;
    std::this_thread::sleep_for(kStalePause);
  }
}

// Check a pull that needs no row. A server decides whether the caller may pull, as for any other
// request, or a revoked token and one without the role would get answers here, and no limit would
// count them. The version is that of the names.
Status check_without_keys(const Shared& shared, Job& job) {
  const PullWork& work = *job.pull;
  PETPS_RETURN_IF_ERROR(job.caller->forwarder().check_pull(work.pulls[0].table, work.instance->name,
                                                           shared.options.deadline_ms));
  if (work.request.min_version <= work.instance->applied_version) return {};
  return Status(Code::kStale, "version " + std::to_string(work.request.min_version) +
                                  " was requested, the servers had applied " +
                                  std::to_string(work.instance->applied_version) +
                                  " when their names were read last");
}

// Take memory for the reply. Errors: kResourceExhausted.
Status take_memory(Shared& shared, Job& job) {
  const PullWork& work = *job.pull;
  const size_t bytes = work.head_bytes + work.rows_bytes_max;
  const size_t body_bytes = bytes - wire::kHeaderBytes;
  if (body_bytes > shared.options.limits.body_bytes) {
    return Status(
        Code::kResourceExhausted,
        "the reply to a pull of " + std::to_string(work.request.keys.size()) + " keys could have " +
            std::to_string(body_bytes) + " bytes, above the frame limit of " +
            std::to_string(shared.options.limits.body_bytes) + ": split the request by row bytes");
  }
  PETPS_RETURN_IF_ERROR(shared.memory->admit(bytes));
  shared.memory->change(0, bytes);
  job.counted_bytes += bytes;
  return {};
}

// Write the reply's head and pack its rows, which lie where their keys are.
void pack_reply(Job& job, uint64_t applied_version) {
  const std::vector<PullSection>& sections = job.pull->sections;
  const std::span<std::byte> head = job.pull->head;
  const wire::PullReplyParts parts = wire::start_pull_reply(job.pull->request.sections, head);
  uint64_t* bitmap = parts.bitmaps.data();
  std::byte* end = job.reply.room();
  for (size_t i = 0; i < sections.size(); ++i) {
    const PullSection& section = sections[i];
    if (section.table == nullptr) {
      parts.sections[i].code = static_cast<uint16_t>(Code::kNotFound);
    } else {
      const std::span<const uint8_t> mask(job.mask.data() + section.first, section.keys);
      const uint32_t rows_found = pack_mask(mask, bitmap);
      parts.sections[i].row_bytes = section.table->row_bytes;
      parts.sections[i].rows_found = rows_found;
      end = pack_rows(section, mask.data(), rows_found, end);
      job.rows += rows_found;
    }
    bitmap += wire::bitmap_words(section.keys);
  }
  const auto rows_bytes = static_cast<size_t>(end - job.reply.room());
  wire::finish_pull_reply(job.header.request_id, applied_version, sections.size(), rows_bytes,
                          head);
  job.reply.grow(rows_bytes);
}

// Decode the request, and find its tables and the size of its reply.
Status decode(const Shared& shared, Job& job) {
  if (job.pull == nullptr) job.pull = std::make_unique<PullWork>();
  PullWork& work = *job.pull;
  work.clear();
  PETPS_RETURN_IF_ERROR(
      wire::decode_pull(job.header, job.body(), shared.options.limits, work.request));
  work.listing = job.caller->names().listing();
  PETPS_RETURN_IF_ERROR(find_tables(work));
  work.head_bytes = wire::pull_reply_head_bytes(work.request.sections);
  return {};
}

// Make room for the reply, and for the rows at their places in it.
Status make_room(Shared& shared, Job& job) {
  PullWork& work = *job.pull;
  const wire::PullRequest& request = work.request;
  PETPS_RETURN_IF_ERROR(take_memory(shared, job));
  work.head = job.reply.header(work.head_bytes, work.rows_bytes_max);
  if (job.mask.size() < request.keys.size()) job.mask.resize(request.keys.size());
  std::byte* rows = job.reply.room();
  for (PullSection& section : work.sections) {
    if (section.table == nullptr) continue;
    section.rows = rows;
    const size_t bytes = size_t{section.keys} * section.table->row_bytes;
    work.pulls.push_back({section.table->name, request.keys.subspan(section.first, section.keys),
                          std::span(rows, bytes),
                          std::span(job.mask.data() + section.first, section.keys),
                          client::Form::kStored});
    rows += bytes;
  }
  job.keys = request.keys.size();
  work.trace.trace_id = request.trace.trace_id;
  work.trace.span_id = request.trace.span_id;
  work.options.min_version = request.min_version;
  work.options.instance = work.instance->name;
  work.options.on_unavailable = client::OnUnavailable::kError;
  if (request.trace.is_sampled()) work.options.trace = &work.trace;
  work.wait_until_ns = base::monotonic_ns() + uint64_t{job.wait_ms} * 1'000'000;
  work.is_prepared = true;
  return {};
}

}  // namespace

bool start_pull(Shared& shared, Job& job) {
  job.reply.clear();
  // Room for a reply is filled with zeros, so look at the sizes first.
  const size_t request_bytes_max = wire::pull_request_bytes(kStartedSections, kStartedKeys);
  if (job.frame.size() > request_bytes_max || job.header.sections > kStartedSections) return false;
  const Status refusal = decode(shared, job);
  PullWork& work = *job.pull;
  work.refusal = refusal;
  const size_t bytes = job.frame.size() + work.head_bytes + work.rows_bytes_max;
  const bool is_small = refusal.ok() && work.known_keys > 0 &&
                        work.request.keys.size() <= kStartedKeys && bytes <= kStartedBytes;
  if (!is_small) return false;
  work.refusal = make_room(shared, job);
  if (!work.refusal.ok()) return false;
  set_times(shared, work);
  work.started = job.caller->forwarder().start_pull(work.pulls, work.options);
  return work.started != nullptr;
}

Status pull(Shared& shared, Job& job) {
  Status refusal = job.pull == nullptr ? Status() : job.pull->refusal;
  if (refusal.ok() && (job.pull == nullptr || !job.pull->is_prepared)) {
    refusal = decode(shared, job);
    if (refusal.ok()) refusal = make_room(shared, job);
  }
  if (refusal.code() == Code::kNotFound) return refuse_unknown(shared, job, std::move(refusal));
  PETPS_RETURN_IF_ERROR(refusal);
  const PullWork& work = *job.pull;
  uint64_t applied_version = work.instance->applied_version;
  if (work.known_keys == 0) {
    PETPS_RETURN_IF_ERROR(check_without_keys(shared, job));
  } else {
    const auto report = pull_in_time(shared, job);
    if (report.status().code() == Code::kInvalidArgument) {
      std::vector<uint32_t> tables;
      for (const PullSection& section : work.sections) {
        if (section.table != nullptr) tables.push_back(section.table->id);
      }
      return refuse_unfit(shared, job, tables, report.status());
    }
    if (!report.ok()) return report.status();
    applied_version = report.value().applied_version;
  }
  pack_reply(job, applied_version);
  return {};
}

}  // namespace petps::router
