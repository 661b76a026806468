// The driver: performs steps on a live pool over a simulated medium, and keeps the World beside
// it.
//
// A step is one call that petps acknowledges: an apply, a move, a catalogue change, a close, an
// open. A Listener is called around every step. There a test explores crashes, makes drains fail,
// or notes the boundaries between acknowledged steps.
#pragma once

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

// Room for four tables that each get a second extent of slots, because no walk has found their free
// slots, for some third ones (a pool that was killed and then lost power was opened twice without a
// walk), and for one more table.
inline constexpr size_t kMediumBytes = size_t{7} << 20;
inline constexpr uint64_t kMetadataBytes = uint64_t{1} << 20;
inline constexpr size_t kSites = static_cast<size_t>(media::Site::kCount);

const char* site_name(media::Site site);

// The simulated medium of the suite's pools.
class CrashMedium : public media::SimulatedMedium {
 public:
  explicit CrashMedium(Keeps keeps = Keeps::kLines) : SimulatedMedium(kMediumBytes, keeps) {}
};

// Every row that was ever passed to apply, whether or not it was acknowledged.
class History {
 public:
  explicit History(const History* earlier) : earlier_(earlier) {}
  void add(const std::string& table, uint64_t key, uint64_t value) {
    of_table_[table].emplace(key, value);
  }
  bool has(const std::string& table, uint64_t key, uint64_t value) const;
  WasWritten finder() const {
    return [this](const std::string& table, uint64_t key, uint64_t value) {
      return has(table, key, value);
    };
  }

 private:
  const History* earlier_;
  std::map<std::string, std::set<std::pair<uint64_t, uint64_t>>> of_table_;
};

class Driver;

class Listener {
 public:
  virtual ~Listener() = default;
  virtual void before_step(Driver&) {}
  // `after` is the world that the step produces; the driver's world is still the one before it.
  virtual void after_step(Driver& /*driver*/, const base::Status& /*status*/,
                          const World& /*after*/) {}
};

// Records the points of the recording where steps were acknowledged, with the world after each.
class Boundaries : public Listener {
 public:
  Boundaries(CrashMedium& medium, const World& start) : medium_(&medium) {
    list.emplace_back(medium.events(), start);
  }
  void after_step(Driver&, const base::Status& status, const World& after) override {
    if (status.ok()) list.emplace_back(medium_->events(), after);
  }
  std::vector<std::pair<size_t, World>> list;

 private:
  CrashMedium* medium_;
};

struct Change {
  uint64_t key;
  uint64_t value;  // 0 deletes
};

class Driver {
 public:
  // `earlier`: the history of the life that this driver continues.
  Driver(CrashMedium& medium, uint64_t seed, const History* earlier = nullptr)
      : history(earlier), medium_(&medium), random(seed) {}

  // Format a pool with one instance "model@1" of three partitions.
  void format();
  // ---- steps ----
  void open();  // attach, in the foreground
  void close();
  void walk();  // not a step: makes nothing durable
  void create_instance(const std::string& name);
  void create_table(std::shared_ptr<const Shape> shape);
  void drop_table(const std::string& name);
  void set_feed(const std::string& table, pool::Feed feed);
  void set_alias(const std::string& alias, const std::string& instance);
  // The instance's progress must not be ahead of another instance's, so nothing of theirs
  // changes.
  void drop_instance(const std::string& name);
  void set_durability(media::Durability to);
  void record_progress(const std::vector<pool::Progress>& all);
  void record_progress(const pool::Progress& progress) { record_progress(std::vector{progress}); }
  // The value of a row is also its stamp.
  void apply(const std::string& table, const std::vector<Change>& changes);
  // Push keys and rows to a table that evicts rows by `rule` if they do not fit. `is_group`: as two
  // pushes that are applied together.
  void push_full(const std::string& table, size_t inserts, size_t updates, table::WhenFull rule,
                 bool is_group = false);
  // Commit what was written so far in partitions of instance 1, `second` seconds after the first
  // commit, together with the progress there.
  void commit(const std::vector<uint32_t>& partitions, uint64_t second);
  void expire(const std::string& table);
  // Two steps: damage the headers of some rows, durably, and remove the rows as the scrubber does.
  void scrub(const std::string& table, size_t rows);
  void set_expiry(const std::string& table, uint32_t seconds);
  void migrate(const std::string& table, const std::vector<uint64_t>& hot);
  void rehome(const std::string& table);
  void recount(const std::string& table);
  // Grow a table. Each part of it is a step; between() performs steps between them. With
  // `behind`, a pin is held from before the growth; behind() performs steps after the swap, while
  // the pin keeps the array of before.
  void grow(const std::string& table, uint64_t capacity, const std::function<void()>& between,
            const std::function<void()>& behind = nullptr);
  void shrink();
  // Perform any other step: `act` does it, then `expect` changes the world accordingly.
  void step(const std::string& name, const std::function<base::Status()>& act,
            const std::function<void(World*)>& expect);

  // Forget the live pool, as a killed process does; open() comes next.
  void drop() {
    growth_.reset();  // its thread is in a table
    pin_.drop();
    tables.reset();
  }
  // Perform one step and kill the process just before that step's drain number `drain`. The next
  // open sees everything that was stored by then. If `seen`, the world then is the one after the
  // step, otherwise the one before it.
  void kill_before_drain(size_t drain, bool seen, const std::function<void()>& perform);
  // Take over a pool whose state is `observed`.
  void adopt(const World& observed);
  // Return what rows may revert to after the kills of this pool, if the world is `now`.
  std::vector<World> reverted_worlds(const World& now) const;

  // ---- random changes that the table can take ----
  std::vector<Change> random_changes(const std::string& table, size_t inserts, size_t updates,
                                     size_t deletions);
  uint64_t next_value() { return ++value_; }
  table::Table& table(const std::string& name);
  CrashMedium& medium() { return *medium_; }
  // The first step that failed without an injected failure; empty if there is none.
  std::string problem;
  std::string step_name;

  media::Durability durability = media::Durability::kPower;  // for the pool that format() makes

  std::unique_ptr<table::Tables> tables;
  World world;
  History history;
  // The world before each kill: rows that were not written since may revert to it.
  std::vector<World> killed_from;
  Listener* listener = nullptr;
  bool expects_failure = false;  // a drain will fail: later steps are not performed

 private:
  base::Status write(const std::string& table, const std::vector<Change>& changes, bool is_group);
  // As random_changes(), but perhaps with more inserts than the table has room for.
  std::vector<Change> choose_changes(const std::string& table, size_t inserts, size_t updates,
                                     size_t deletions);
  class Growth;
  std::shared_ptr<Growth> growth_;  // in progress
  epoch::Pin pin_;                  // of a growth, which keeps the array of before
  CrashMedium* medium_;
  uint64_t value_ = 0;

 public:
  std::mt19937_64 random;
};

pool::TableSpec table_spec(const std::string& name, uint64_t capacity, uint32_t row_bytes,
                           bool with_default = false);
// Return a table whose scenario uses `keys` keys, drawn from all of u64.
std::shared_ptr<const Shape> shape_of(const pool::TableSpec& spec, size_t keys, uint64_t seed);
// Return a table with `keys` keys of one home bucket (so they fill it and the buckets behind it),
// and `others` random keys.
std::shared_ptr<const Shape> crowded_shape(const pool::TableSpec& spec, size_t keys, size_t others,
                                           uint64_t seed);

}  // namespace petps::crash
