// Performs steps on a live pool over a simulated medium and keeps the World beside it.
//
// A step is one call that petps acknowledges: an apply, a move, a catalogue change, a close, an
// open. A Listener is told around every step, which is where crashes are explored, drains are made
// to fail, or boundaries between acknowledged steps are noted.
#pragma once

#include <bitset>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/native/media/simulated_medium.h"
#include "world.h"

namespace petps::crash {

inline constexpr size_t kMediumBytes = size_t{5} << 20;
inline constexpr uint64_t kMetadataBytes = uint64_t{1} << 20;
inline constexpr size_t kSites = static_cast<size_t>(media::Site::kCount);

const char* site_name(media::Site site);

// A simulated medium that can fail a given drain and tells which sites were heard since asked.
class CrashMedium : public media::SimulatedMedium {
 public:
  explicit CrashMedium(Keeps keeps = Keeps::kLines) : SimulatedMedium(kMediumBytes, keeps) {}
  void fail_drain(size_t after) { fail_in_ = after + 1; }  // 0 = the next one
  void fail_no_drain() { fail_in_ = 0; }
  void fail_sync(size_t after) { fail_sync_in_ = after + 1; }
  std::bitset<kSites> heard;

  void on_flush(const void* at, size_t bytes, media::Site site) override;
  base::Status on_drain(media::Site site) override;
  base::Status on_sync(const void* at, size_t bytes, media::Site site) override;

 private:
  size_t fail_in_ = 0;
  size_t fail_sync_in_ = 0;
};

// Every row that was ever given to apply, whether or not that was acknowledged.
class History {
 public:
  explicit History(const History* earlier) : earlier_(earlier) {}
  void add(const std::string& table, uint64_t key, uint64_t value) {
    of_table_[table].emplace(key, value);
  }
  bool has(const std::string& table, uint64_t key, uint64_t value) const;

 private:
  const History* earlier_;
  std::map<std::string, std::set<std::pair<uint64_t, uint64_t>>> of_table_;
};

class Driver;

class Listener {
 public:
  virtual ~Listener() = default;
  virtual void before_step(Driver&) {}
  // `after` is the world that the step makes; the driver's world is still the one before it.
  virtual void after_step(Driver& /*driver*/, const base::Status& /*status*/,
                          const World& /*after*/) {}
};

struct Change {
  uint64_t key;
  uint64_t value;  // 0 deletes
};

class Driver {
 public:
  // `earlier`: of the life that this one continues.
  Driver(CrashMedium& medium, uint64_t seed, const History* earlier = nullptr)
      : history(earlier), medium_(&medium), random(seed) {}

  // Formats a pool with one instance "model@1" of three partitions.
  void format();
  // ---- steps ----
  void open();  // attach, in the foreground
  void close();
  void walk();  // no step: makes nothing durable
  void create_instance(const std::string& name);
  void create_table(std::shared_ptr<const Shape> shape);
  void set_feed(const std::string& table, pool::Feed feed);
  void set_alias(const std::string& alias, const std::string& instance);
  // Of an instance whose progress is not ahead of another's: nothing of theirs changes.
  void drop_instance(const std::string& name);
  void set_durability(media::Durability to);
  void record_progress(const std::vector<pool::Progress>& all);
  void record_progress(const pool::Progress& progress) { record_progress(std::vector{progress}); }
  void apply(const std::string& table, const std::vector<Change>& changes);
  void migrate(const std::string& table, const std::vector<uint64_t>& hot);
  void rehome(const std::string& table);
  void recount(const std::string& table);
  // Any other step: `act` does it, `expect` changes the world as it should.
  void step(const std::string& name, const std::function<base::Status()>& act,
            const std::function<void(World*)>& expect);

  // Forgets the live pool, as a killed process does; open() comes next.
  void drop() { tables.reset(); }
  // Performs one step and kills the process just before that step's drain number `drain`, everything stored by then being
  // seen by whoever opens the pool next. `seen`: that is what the step makes; else what was before it.
  void kill_before_drain(size_t drain, bool seen, const std::function<void()>& perform);
  // Takes over a pool that is as `found` says.
  void adopt(const World& found);

  // ---- random changes that the table can take ----
  std::vector<Change> random_changes(const std::string& table, size_t inserts, size_t updates,
                                     size_t deletions);
  uint64_t next_value() { return ++value_; }
  table::Table& table(const std::string& name);
  CrashMedium& medium() { return *medium_; }
  // The first step that failed without being told to; empty when all went well.
  std::string problem;
  std::string step_name;

  media::Durability durability = media::Durability::kPower;  // of the pool that format() makes

  std::unique_ptr<table::Tables> tables;
  World world;
  History history;
  // Before each kill: what rows may go back to, as long as nobody wrote them since.
  std::vector<World> killed_from;
  Listener* listener = nullptr;
  bool expects_failure = false;  // a drain was told to fail: later steps are not performed

 private:
  CrashMedium* medium_;
  uint64_t value_ = 0;

 public:
  std::mt19937_64 random;
};

pool::TableSpec table_spec(const std::string& name, uint64_t capacity, uint32_t row_bytes,
                           bool with_default = false);
// A table whose scenario uses `keys` keys, drawn from all of u64.
std::shared_ptr<const Shape> shape_of(const pool::TableSpec& spec, size_t keys, uint64_t seed);
// The same with keys that all have one home bucket (and so fill it and everything behind it).
std::shared_ptr<const Shape> crowded_shape(const pool::TableSpec& spec, size_t keys, size_t others,
                                           uint64_t seed);

}  // namespace petps::crash
