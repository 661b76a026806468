#include "simulated_medium.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define PETPS_UNPOISON(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#else
#define PETPS_UNPOISON(at, bytes) static_cast<void>(at)
#endif

namespace petps::media {
namespace {

constexpr size_t kImageAlignment = size_t{2} << 20;  // like the base of real media
// A full comparison takes time proportional to the image. The live run gets one at every drain. The
// many short runs on crash states get one at every kFullCheckEvery-th drain, and compare only the
// lines that they touched at the others.
constexpr uint64_t kFullCheckEvery = 64;

// Read a word that may be next to, or in, a poisoned free slot.
__attribute__((no_sanitize("address"), noinline)) uint64_t read_word(const std::byte* at) {
  return *reinterpret_cast<const volatile uint64_t*>(at);
}

__attribute__((no_sanitize("address"), noinline)) bool same_line(const std::byte* a,
                                                                 const std::byte* b) {
  const auto* x = reinterpret_cast<const uint64_t*>(a);
  const auto* y = reinterpret_cast<const uint64_t*>(b);
  uint64_t difference = 0;
  for (size_t i = 0; i < kLineBytes / 8; ++i) difference |= x[i] ^ y[i];
  return difference == 0;
}

}  // namespace

void SimulatedMedium::Recording::clear() {
  for (size_t i = 0; i < used; ++i) slot_of_line[lines[i].number] = 0;
  used = 0;
  events = 0;
  drains.clear();
  syncs.clear();
  last_store.clear();
  lost_since.clear();
  flushed_lines.clear();
  sizes.clear();
}

SimulatedMedium::SimulatedMedium(size_t capacity, Keeps keeps)
    : capacity_(capacity), keeps_(keeps) {
  PETPS_CHECK(capacity % kLineBytes == 0, "a simulated medium is made of whole lines");
  const size_t rounded = (capacity + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  memory_ = static_cast<std::byte*>(std::aligned_alloc(kImageAlignment, rounded));
  shadow_ = static_cast<std::byte*>(std::aligned_alloc(kImageAlignment, rounded));
  PETPS_CHECK(memory_ != nullptr && shadow_ != nullptr, "no memory for a simulated medium");
  std::memset(memory_, 0, rounded);
  std::memset(shadow_, 0, rounded);
  recordings_.push_back(std::make_unique<Recording>());
  top().slot_of_line.assign(capacity / kLineBytes, 0);
}

SimulatedMedium::~SimulatedMedium() {
  PETPS_UNPOISON(memory_, capacity_);
  std::free(memory_);
  std::free(shadow_);
}

std::unique_ptr<Media> SimulatedMedium::media(uint64_t bytes) {
  PETPS_CHECK(bytes <= capacity_, "a medium longer than its simulated memory");
  if (top().events == 0) {
    top().start_size = bytes;
  } else if (bytes != size_) {
    top().sizes.push_back({static_cast<uint32_t>(top().events), bytes});
    top().events += 1;
  }
  size_ = bytes;
  return Media::borrow(memory_, bytes, capacity_, this,
                       keeps_ == Keeps::kPages ? Kind::kFile : Kind::kDram);
}

SimulatedMedium::Line& SimulatedMedium::line_of(uint32_t number) {
  Recording& recording = top();
  uint32_t& slot = recording.slot_of_line[number];
  if (slot == 0) {
    if (recording.used == recording.lines.size()) recording.lines.emplace_back();
    slot = static_cast<uint32_t>(++recording.used);
    Line& line = recording.lines[slot - 1];
    line.number = number;
    line.flushed = 0;
    line.stores.clear();
    line.durable.clear();
    // The content before the store.
    std::memcpy(line.start.data(), shadow_ + uint64_t{number} * kLineBytes, kLineBytes);
  }
  return recording.lines[slot - 1];
}

void SimulatedMedium::record_words(uint64_t first_word, uint64_t last_word) {
  const auto event = static_cast<uint32_t>(top().events);
  for (uint64_t word = first_word; word <= last_word; ++word) {
    Line& line = line_of(static_cast<uint32_t>(word / kWords));
    const uint64_t value = read_word(memory_ + word * 8);
    line.stores.push_back({value, event, static_cast<uint32_t>(word % kWords)});
    std::memcpy(shadow_ + word * 8, &value, sizeof value);
    top().last_store[static_cast<uint32_t>(word / kWords / kPageLines)] = event;
  }
}

void SimulatedMedium::on_store(const void* at, size_t bytes) {
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - memory_);
  PETPS_CHECK(offset < capacity_ && bytes <= capacity_ - offset,
              "a store outside the simulated medium");
  if (bytes == 0) return;
  record_words(offset / 8, (offset + bytes - 1) / 8);
  top().events += 1;
}

void SimulatedMedium::on_flush(const void* at, size_t bytes, Site site) {
  sites_reached_.set(static_cast<size_t>(site));
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - memory_);
  PETPS_CHECK(offset < capacity_ && bytes <= capacity_ - offset,
              "a flush outside the simulated medium");
  if (bytes != 0 && keeps_ == Keeps::kLines && !suppressed_.test(static_cast<size_t>(site))) {
    Recording& recording = top();
    for (uint64_t number = offset / kLineBytes; number <= (offset + bytes - 1) / kLineBytes;
         ++number) {
      const uint32_t slot = recording.slot_of_line[number];
      if (slot == 0) continue;  // nothing was stored there since the start
      Line& line = recording.lines[slot - 1];
      line.flushed = static_cast<uint32_t>(line.stores.size());
      recording.flushed_lines.push_back(slot - 1);
    }
  }
  top().events += 1;
}

void SimulatedMedium::mark_durable(Line& line, uint32_t event) {
  const uint32_t before = line.durable.empty() ? 0 : line.durable.back().count;
  if (line.flushed > before) line.durable.push_back({event, line.flushed});
}

base::Status SimulatedMedium::on_drain(Site site) {
  sites_reached_.set(static_cast<size_t>(site));
  check_some_recorded();
  Recording& recording = top();
  recording.drains.push_back(recording.events);
  const auto event = static_cast<uint32_t>(recording.events);
  recording.events += 1;
  if (suppressed_.test(static_cast<size_t>(site))) return base::Status();
  if (drains_to_failure_ > 0 && --drains_to_failure_ == 0) {
    // The write-backs in flight may be lost for good: as after a failed fsync, only a new flush
    // starts them again.
    for (const uint32_t place : recording.flushed_lines) recording.lines[place].flushed = 0;
    recording.flushed_lines.clear();
    if (keeps_ == Keeps::kPages) lose_pages();
    return base::Status(base::Code::kIoError, "simulated medium: the test makes this drain fail");
  }
  for (const uint32_t place : recording.flushed_lines) mark_durable(recording.lines[place], event);
  recording.flushed_lines.clear();
  return base::Status();
}

void SimulatedMedium::lose_pages() {
  Recording& recording = top();
  for (const auto& [page, event] : recording.last_store)
    recording.lost_since[page] = static_cast<uint32_t>(recording.events);
}

base::Status SimulatedMedium::on_sync(const void* at, size_t bytes, Site site) {
  PETPS_CHECK(keeps_ == Keeps::kPages, "only a file is synced");
  sites_reached_.set(static_cast<size_t>(site));
  check_some_recorded();
  Recording& recording = top();
  recording.syncs.push_back(recording.events);
  const auto event = static_cast<uint32_t>(recording.events);
  recording.events += 1;
  if (suppressed_.test(static_cast<size_t>(site))) return base::Status();
  if (syncs_to_failure_ > 0 && --syncs_to_failure_ == 0) {
    lose_pages();
    return base::Status(base::Code::kIoError, "simulated medium: the test makes this sync fail");
  }
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - memory_);
  const uint64_t page_bytes = kPageLines * kLineBytes;
  const uint64_t first = at == nullptr ? 0 : offset / page_bytes;
  const uint64_t end =
      at == nullptr ? capacity_ / page_bytes : (offset + bytes + page_bytes - 1) / page_bytes;
  for (size_t i = 0; i < recording.used; ++i) {
    Line& line = recording.lines[i];
    const uint32_t page = line.number / kPageLines;
    if (page < first || page >= end) continue;
    const auto lost = recording.lost_since.find(page);
    if (lost != recording.lost_since.end() && recording.last_store.at(page) < lost->second)
      continue;
    line.flushed = static_cast<uint32_t>(line.stores.size());
    mark_durable(line, event);
  }
  return base::Status();
}

void SimulatedMedium::on_grow(const void* at, size_t bytes) {
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - memory_);
  const auto event = static_cast<uint32_t>(top().events);
  size_ = offset + bytes;
  top().sizes.push_back({event, size_});
  // Data of an earlier life beyond the end is zero now, and durably so. Bytes below `offset` in
  // its word are kept.
  for (uint64_t word = offset / 8; word * 8 < size_; ++word) {
    if (read_word(shadow_ + word * 8) == read_word(memory_ + word * 8)) continue;
    record_words(word, word);
    Line& line = line_of(static_cast<uint32_t>(word / kWords));
    line.flushed = static_cast<uint32_t>(line.stores.size());
    mark_durable(line, event);
  }
  top().events += 1;
}

SimulatedMedium::Span SimulatedMedium::span_at(const Line& line, size_t point) {
  const auto later = [](size_t limit, const auto& item) { return limit <= item.event; };
  const auto stored = std::upper_bound(line.stores.begin(), line.stores.end(), point, later);
  const auto durable = std::upper_bound(line.durable.begin(), line.durable.end(), point, later);
  return {durable == line.durable.begin() ? 0 : std::prev(durable)->count,
          static_cast<uint32_t>(stored - line.stores.begin())};
}

SimulatedMedium::LineContent SimulatedMedium::content(const Line& line, uint32_t kept) {
  LineContent words = line.start;
  for (uint32_t i = 0; i < kept; ++i) words[line.stores[i].word] = line.stores[i].value;
  return words;
}

SimulatedMedium::LineContent SimulatedMedium::torn_content(const Line& line, uint32_t durable,
                                                           uint32_t kept, std::mt19937_64& random) {
  // Any words of the store in which the prefix ends may have landed, in any order.
  const uint32_t event = line.stores[kept].event;
  uint32_t first = kept;
  while (first > durable && line.stores[first - 1].event == event) --first;
  LineContent words = content(line, first);
  for (uint32_t i = first; i < line.stores.size() && line.stores[i].event == event; ++i) {
    if ((random() & 1) != 0) words[line.stores[i].word] = line.stores[i].value;
  }
  return words;
}

void SimulatedMedium::write_line(uint32_t number, const LineContent& words) {
  std::memcpy(memory_ + uint64_t{number} * kLineBytes, words.data(), kLineBytes);
  std::memcpy(shadow_ + uint64_t{number} * kLineBytes, words.data(), kLineBytes);
}

void SimulatedMedium::begin_crash(size_t point) {
  PETPS_CHECK(point <= top().events, "a crash point after the last event");
  PETPS_UNPOISON(memory_, capacity_);
  choices_.clear();
  crash_point_ = point;
  crash_events_ = top().events;
}

void SimulatedMedium::end_crash(size_t point) {
  size_ = top().start_size;
  for (const SizeChange& change : top().sizes) {
    if (change.event < point) size_ = change.size;
  }
  depth_ += 1;
  if (depth_ == recordings_.size()) {
    recordings_.push_back(std::make_unique<Recording>());
    top().slot_of_line.assign(capacity_ / kLineBytes, 0);
  }
  top().clear();
  top().start_size = size_;
}

size_t SimulatedMedium::open_lines(size_t point) const {
  size_t count = 0;
  for (size_t i = 0; i < top().used; ++i) {
    const Span span = span_at(top().lines[i], point);
    if (span.stored > span.durable) ++count;
  }
  return count;
}

void SimulatedMedium::undo() {
  PETPS_CHECK(depth_ > 0, "undo without a crash");
  PETPS_UNPOISON(memory_, capacity_);
  Recording& above = top();
  for (size_t i = 0; i < above.used; ++i) write_line(above.lines[i].number, above.lines[i].start);
  above.clear();
  depth_ -= 1;
  Recording& below = top();
  for (size_t i = 0; i < below.used; ++i) {
    const Line& line = below.lines[i];
    write_line(line.number, content(line, static_cast<uint32_t>(line.stores.size())));
  }
  size_ = below.sizes.empty() ? below.start_size : below.sizes.back().size;
}

std::vector<SimulatedMedium::Line> SimulatedMedium::open_at(size_t point) const {
  std::vector<Line> open;
  for (size_t i = 0; i < top().used; ++i) {
    const Line& line = top().lines[i];
    const Span span = span_at(line, point);
    if (span.durable == span.stored) continue;
    open.push_back({line.number,
                    0,
                    content(line, span.durable),
                    {line.stores.begin() + span.durable, line.stores.begin() + span.stored},
                    {}});
    if (point == top().events && line.flushed > span.durable) {
      open.back().flushed = line.flushed - span.durable;
    }
  }
  return open;
}

void SimulatedMedium::carry_on(std::vector<Line> open, const std::vector<uint32_t>& lost) {
  Recording& recording = top();
  std::vector<uint32_t> events;
  for (const Line& line : open) {
    for (const Store& store : line.stores) events.push_back(store.event);
  }
  std::sort(events.begin(), events.end());
  events.erase(std::unique(events.begin(), events.end()), events.end());
  // Only the stores that are still open keep a place in the order.
  recording.events = events.size();
  for (Line& kept : open) {
    for (Store& store : kept.stores) {
      const auto place = std::lower_bound(events.begin(), events.end(), store.event);
      store.event = static_cast<uint32_t>(place - events.begin());
    }
    Line& line = line_of(kept.number);
    line = std::move(kept);
    uint32_t& last = recording.last_store[line.number / kPageLines];
    last = std::max(last, line.stores.back().event);
    if (line.flushed > 0) {
      recording.flushed_lines.push_back(recording.slot_of_line[line.number] - 1);
    }
  }
  for (const uint32_t page : lost)
    recording.lost_since[page] = static_cast<uint32_t>(recording.events);
}

// Return the pages that look clean and are lost; carried-on stores do not change that.
std::vector<uint32_t> SimulatedMedium::lost_pages() const {
  std::vector<uint32_t> pages;
  for (const auto& [page, since] : top().lost_since) {
    if (top().last_store.at(page) < since) pages.push_back(page);
  }
  return pages;
}

void SimulatedMedium::settle() {
  std::vector<Line> open = open_at(top().events);
  const std::vector<uint32_t> lost = lost_pages();
  top().clear();
  top().start_size = size_;
  carry_on(std::move(open), lost);
}

void SimulatedMedium::kill(size_t point) {
  begin_crash(point);
  std::vector<Line> open = open_at(point);
  const std::vector<uint32_t> lost = point == top().events ? lost_pages() : std::vector<uint32_t>();
  for (Line& line : open) line.flushed = 0;  // a write-back in flight may not have happened
  write_stored(point);
  end_crash(point);
  carry_on(std::move(open), lost);
}

std::string SimulatedMedium::describe() const {
  std::string text =
      "crash point " + std::to_string(crash_point_) + " of " + std::to_string(crash_events_) + ":";
  for (const Choice& choice : choices_) {
    text += " offset " + std::to_string(uint64_t{choice.line} * kLineBytes) + " kept " +
            std::to_string(choice.kept - choice.from) + " of " +
            std::to_string(choice.to - choice.from) + ",";
  }
  return text;
}

bool SimulatedMedium::check_lines(uint64_t first, uint64_t last) {
  constexpr int kMaxReported = 8;
  int different = 0;
  for (uint64_t number = first; number < last && different < kMaxReported; ++number) {
    const uint64_t offset = number * kLineBytes;
    if (same_line(memory_ + offset, shadow_ + offset)) continue;
    uint64_t word = 0;
    while (read_word(memory_ + offset + word * 8) == read_word(shadow_ + offset + word * 8)) ++word;
    ++different;
    ADD_FAILURE() << "a store that was not reported to the medium: offset " << offset + word * 8
                  << " (line at " << offset << ") holds " << std::hex
                  << read_word(memory_ + offset + word * 8) << ", the recorded stores make it "
                  << read_word(shadow_ + offset + word * 8);
  }
  return different == 0;
}

bool SimulatedMedium::check_all_recorded() { return check_lines(0, capacity_ / kLineBytes); }

void SimulatedMedium::check_some_recorded() {
  if (depth_ == 0 || ++drains_seen_ % kFullCheckEvery == 0) {
    check_all_recorded();
    return;
  }
  for (size_t i = 0; i < top().used; ++i)
    check_lines(top().lines[i].number, top().lines[i].number + 1);
}

}  // namespace petps::media
