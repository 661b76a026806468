// A medium whose power can fail at any instant: the test double of the crash suite.
//
// It observes every store, flush and drain of a Media over memory that it owns. Afterwards it can
// turn that memory into any state that a crash at any event could have left:
//   - A line (64 bytes) holds its durable content plus ANY prefix of its later stores, each line
//     on its own.
//   - An aligned 8-byte store is never torn. A longer store is split into its 8-byte words, in
//     address order (or, with set_any_word(true), into any subset of them, as streamed and string
//     stores may really do).
//   - A flush marks the content of its lines as being written back. A drain makes every mark
//     durable. Nothing else makes anything durable.
//
// With Keeps::kPages it is an ordinary file behind a page cache instead, a Media of kind kFile:
//   - A page (4 KiB) holds any of the versions that it had since its last sync, each page on its
//     own. A page whose write-back was in flight holds any of them in each of its 512-byte
//     sectors.
//   - A sync makes the pages of its range durable as they are then. Flushes and drains do
//     nothing.
//   - A failed sync loses its pages: they look clean, and a later sync skips those that were not
//     written again.
//
// Recordings form a stack, so that a test can reopen a state, write to it, crash it again, and
// take all that back. This costs the touched lines and never the whole image:
//
//   SimulatedMedium disk(4 << 20);
//   auto pool = Pool::format(disk.media(kBytes), kTestUnitBytes);  // recording 0
//   disk.settle();                         // what is durable by now is the start
//   ... one operation on the pool ...
//   for (size_t point = 0; point <= disk.events(); ++point) {
//     disk.crash(point, rng);              // memory is a crash state; recording 1 begins
//     { auto reopened = Pool::attach(disk.media()); ... verify, write ... }
//     disk.crash(disk.events(), rng);      // a second crash; recording 2 begins
//     { auto again = Pool::attach(disk.media()); ... verify ... }
//     disk.undo();                         // back to recording 1
//     disk.undo();                         // back to recording 0: memory as the live pool left it
//   }
//   ... the live pool may continue ...
//
// An unreported store is a test failure that names its offset: each drain compares memory with
// the record. The double does not cover two threads that store at once, stores that the CPU makes
// visible out of program order within a line (x86 does not, except as set_any_word says), or a
// drain that loses lines of another process.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "media/media.h"

namespace petps::media {

class SimulatedMedium : public Observer {
 public:
  using Sites = std::bitset<static_cast<size_t>(Site::kCount)>;
  enum class Keeps : uint8_t { kLines, kPages };
  // Make zeroed memory of `capacity` bytes, a multiple of 64 (4096 for kPages); all of it is
  // durable.
  explicit SimulatedMedium(size_t capacity, Keeps keeps = Keeps::kLines);
  ~SimulatedMedium() override;
  SimulatedMedium(const SimulatedMedium&) = delete;
  SimulatedMedium& operator=(const SimulatedMedium&) = delete;

  // Return a Media over the memory, `bytes` long and growable to the capacity. The top recording
  // records it.
  std::unique_ptr<Media> media(uint64_t bytes);
  // Return a Media with the length that the medium had at the crash.
  std::unique_ptr<Media> media() { return media(size_); }
  std::byte* memory() { return memory_; }
  uint64_t size() const { return size_; }

  // Return the number of events (stores, flushes, drains, syncs, grows) of the top recording. A
  // crash point p is "after the first p events".
  size_t events() const { return top().events; }
  // Return, for each drain of the top recording, the point just before it: most lines are open
  // there.
  const std::vector<size_t>& drains() const { return top().drains; }
  // Return the same for each sync of the top recording.
  const std::vector<size_t>& syncs() const { return top().syncs; }
  size_t depth() const { return depth_; }

  // Forget what is durable already: the top recording restarts with only the undrained stores
  // open.
  void settle();

  // Turn memory into a random crash state at `point` of the top recording, and begin a new
  // recording above it.
  void crash(size_t point, std::mt19937_64& random);
  // Return the number of states at `point` (saturating); turn memory into the index-th of them.
  // With kPages, these states contain no torn page.
  uint64_t state_count(size_t point) const;
  void crash_exhaustive(size_t point, uint64_t index);
  // Kill the process at `point`, with the power on: memory is everything that was stored by then.
  // A new recording begins, in which undrained stores are still open. A test that reopens the
  // memory sees stores that a later crash may still take back.
  void kill(size_t point);
  // Return the number of lines that hold undrained stores at `point`.
  size_t open_lines(size_t point) const;
  // Drop the top recording; memory is again what the recording below had when it was crashed.
  void undo();
  // Return what the last crash() chose, for messages: "crash point 17 of 40: offset 192 kept 1 of
  // 4, offset 576 kept 0 of 2,".
  std::string describe() const;

  // For mutation checks: from now on, flushes, drains and syncs of `site` do nothing.
  void suppress(Site site) { suppressed_.set(static_cast<size_t>(site)); }
  void suppress_none() { suppressed_.reset(); }
  // Return the sites reached since construction or forget_sites(), so that a suite can check that
  // it reaches each of them.
  const Sites& sites_reached() const { return sites_reached_; }
  void forget_sites() { sites_reached_.reset(); }

  // Let `others` drains that are not suppressed pass, and make the next one fail: it makes nothing
  // durable.
  void fail_drain(size_t others = 0) { drains_to_failure_ = others + 1; }
  void fail_no_drain() { drains_to_failure_ = 0; }
  // Do the same for a sync.
  void fail_sync(size_t others = 0) { syncs_to_failure_ = others + 1; }
  void set_any_word(bool any) { any_word_ = any; }
  // Compare all of memory with the record now. Add a test failure per line that differs (at most
  // 8).
  bool check_all_recorded();

  void on_store(const void* at, size_t bytes) override;
  void on_flush(const void* at, size_t bytes, Site site) override;
  base::Status on_drain(Site site) override;
  base::Status on_sync(const void* at, size_t bytes, Site site) override;
  void on_grow(const void* at, size_t bytes) override;

 private:
  static constexpr size_t kWords = kLineBytes / 8;
  static constexpr uint32_t kPageLines = 64;
  static constexpr uint32_t kSectorLines = 8;
  static constexpr uint32_t kSectors = kPageLines / kSectorLines;
  using LineContent = std::array<uint64_t, kWords>;

  struct Store {
    uint64_t value;  // the whole word, after the store
    uint32_t event;
    uint32_t word;  // 0..7
  };
  struct Durable {
    uint32_t event;  // the drain
    uint32_t count;  // of the line's stores
  };
  struct Line {
    uint32_t number;
    uint32_t flushed;  // stores marked as being written back
    LineContent start;
    std::vector<Store> stores;
    std::vector<Durable> durable;
  };
  struct SizeChange {
    uint32_t event;
    uint64_t size;
  };
  struct Recording {
    size_t events = 0;
    std::vector<size_t> drains;
    std::vector<size_t> syncs;
    // kPages: the event of the last store into each page, and of the failed sync since which a
    // page looks clean.
    std::unordered_map<uint32_t, uint32_t> last_store;
    std::unordered_map<uint32_t, uint32_t> lost_since;
    std::vector<Line> lines;  // the first `used`; the rest keep their vectors for reuse
    size_t used = 0;
    std::vector<uint32_t> slot_of_line;  // 1 + index in lines; 0 = untouched
    std::vector<uint32_t> flushed_lines;
    std::vector<SizeChange> sizes;
    uint64_t start_size = 0;
    void clear();
  };
  // A page with open stores. It may be as it was before the first of `events`, or after any of
  // them.
  struct OpenPage {
    uint32_t number;
    std::vector<uint32_t> lines;  // indexes into Recording::lines
    std::vector<uint32_t> events;
  };
  struct Choice {
    uint32_t line;
    uint32_t from, kept, to;
  };
  struct Span {
    uint32_t durable, stored;
  };

  Recording& top() { return *recordings_[depth_]; }
  const Recording& top() const { return *recordings_[depth_]; }
  Line& line_of(uint32_t number);
  void record_words(uint64_t first_word, uint64_t last_word);
  void mark_durable(Line& line, uint32_t event);
  static Span span_at(const Line& line, size_t point);
  static LineContent content(const Line& line, uint32_t kept);
  static LineContent torn_content(const Line& line, uint32_t durable, uint32_t kept,
                                  std::mt19937_64& random);
  std::vector<OpenPage> open_pages(size_t point) const;
  // Write the page as it was after the first `kept` events, or each sector as after kept[sector].
  void write_page(const OpenPage& page, const std::array<uint32_t, kSectors>& kept, size_t point);
  void write_stored(size_t point);
  void crash_pages(size_t point, std::mt19937_64& random);
  void lose_pages();
  std::vector<Line> open_at(size_t point) const;
  std::vector<uint32_t> lost_pages() const;
  void carry_on(std::vector<Line> open, const std::vector<uint32_t>& lost);
  void write_line(uint32_t number, const LineContent& content);
  void begin_crash(size_t point);
  void end_crash(size_t point);
  void check_some_recorded();
  bool check_lines(uint64_t first, uint64_t last);

  size_t capacity_;
  Keeps keeps_;
  std::byte* memory_;
  std::byte* shadow_;  // memory as the recorded stores produce it
  uint64_t size_ = 0;
  size_t depth_ = 0;
  std::vector<std::unique_ptr<Recording>> recordings_;
  std::vector<Choice> choices_;
  size_t crash_point_ = 0;
  size_t crash_events_ = 0;
  uint64_t drains_seen_ = 0;
  Sites suppressed_;
  Sites sites_reached_;
  size_t drains_to_failure_ = 0;  // 0: no drain fails
  size_t syncs_to_failure_ = 0;
  bool any_word_ = false;
};

}  // namespace petps::media
