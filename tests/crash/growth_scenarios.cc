// Tables that grow, pools that shrink, and rows that expire, are evicted or are damaged.
#include "scenarios.h"

namespace petps::crash {
namespace {

using Begin = std::function<void()>;

// Writes reach both arrays, in buckets that are copied and in those that are not. Afterwards the
// array of before has the buckets of the next growth.
void growing(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", kMoreThanSlots, kOddRow), 90, 60), 50);
  begin();
  d.grow("t", 2 * kMoreThanSlots, [&] { d.apply("t", d.random_changes("t", 4, 6, 4)); });
  d.apply("t", d.random_changes("t", 4, 6, 4));
  d.grow("t", 2 * kMoreThanSlots + 40, [&] { d.apply("t", d.random_changes("t", 2, 4, 3)); });
  d.apply("t", d.random_changes("t", 2, 4, 3));
}

// A crowded table: the keys of one home pass many buckets, in either array.
void growing_full(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 100, 61), 56);
  begin();
  d.grow("t", 100, [&] { d.apply("t", d.random_changes("t", 0, 8, 6)); });
  d.apply("t", d.random_changes("t", 40, 4, 4));
  d.open();
  d.apply("t", d.random_changes("t", 4, 4, 4));
  d.walk();
  d.grow("t", 130, [&] { d.apply("t", d.random_changes("t", 0, 8, 6)); });
  d.apply("t", d.random_changes("t", 20, 4, 4));
  d.close();
  d.open();
}

// A reader keeps the array of before, so writes reach both arrays after the swap too, but not the
// keys that are new since.
void growing_pinned(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 100, 62), 56);
  begin();
  d.grow(
      "t", 120, [&] { d.apply("t", d.random_changes("t", 0, 6, 4)); },
      [&] {
        d.apply("t", d.random_changes("t", 30, 6, 4));
        d.apply("t", d.random_changes("t", 10, 8, 8));
      });
  d.apply("t", d.random_changes("t", 4, 4, 4));
  d.open();
  d.apply("t", d.random_changes("t", 4, 4, 4));
}

// The space of an index of before, and of a dropped table, has no blocks until it is used again.
void shrinking(Driver& d, const Begin& begin) {
  two_instances(d);
  d.set_alias("model", "model@2");
  d.grow("u", 400, [] {});
  begin();
  d.drop_instance("model@1");
  if (d.tables != nullptr) d.tables->reclaim();
  d.shrink();
  d.apply("u", d.random_changes("u", 3, 3, 3));
  d.create_table(
      of_instance("model@2", table_spec("v", 40, kOddRow, /*with_default=*/true), 40, 45));
  d.apply("v", d.random_changes("v", 20, 0, 0));
  d.open();
  d.shrink();
  d.grow("u", 500, [&] { d.apply("u", d.random_changes("u", 2, 3, 3)); });
  d.drop_table("v");
  if (d.tables != nullptr) d.tables->reclaim();
  d.shrink();
  d.close();
  d.open();
}

pool::TableSpec expiring_spec(const std::string& name, uint32_t seconds) {
  pool::TableSpec spec = table_spec(name, kMoreThanSlots, kOddRow);
  spec.feed = pool::Feed::kDelta;
  spec.expire_after = seconds;
  return spec;
}

// Commits advance three event times; walks delete what they made too old, while rows of the same
// keys are written again.
void expiring(Driver& d, const Begin& begin) {
  start(d, shape_of(expiring_spec("t", 48), 60, 70), 30);
  d.commit({0, 1, 2}, 0);
  begin();
  d.apply("t", d.random_changes("t", 4, 6, 1));
  d.commit({0, 1}, 12);
  d.commit({0, 2}, 24);
  d.commit({0, 1, 2}, 36);
  d.apply("t", d.random_changes("t", 4, 4, 1));
  d.commit({0, 1, 2}, 48);
  d.commit({1, 2}, 60);
  d.expire("t");
  d.apply("t", d.random_changes("t", 8, 4, 1));
  d.open();
  d.commit({0, 2}, 72);
  d.commit({0}, 84);
  d.expire("t");
  d.walk();
  d.apply("t", d.random_changes("t", 4, 2, 1));
  d.close();
  d.open();
  d.commit({0, 1, 2}, 90);
}

// Damaged rows go while the table is written, grows, and is opened again; their keys come back.
void scrubbing(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", kMoreThanSlots, kOddRow), 40, 30, 72), 60);
  begin();
  d.scrub("t", 1);
  d.scrub("t", 12);
  d.apply("t", d.random_changes("t", 8, 4, 4));
  d.scrub("t", 8);
  d.apply("t", d.random_changes("t", 6, 2, 2));
  d.grow("t", 2 * kMoreThanSlots, [&] { d.scrub("t", 2); });
  d.open();
  d.scrub("t", 4);  // before the walk
  d.apply("t", d.random_changes("t", 4, 2, 2));
  d.walk();
  d.scrub("t", 4);
  d.apply("t", d.random_changes("t", 6, 2, 2));
  d.close();
  d.open();
}

// A full table gives up rows for new keys: at once, while it grows, and when no walk has counted
// its rows since a kill.
void evicting(Driver& d, const Begin& begin) {
  constexpr auto kOldest = table::WhenFull::kEvictOldest;
  constexpr auto kColdest = table::WhenFull::kEvictColdest;
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 60, 73), 56);
  begin();
  d.push_full("t", 1, 0, kOldest);
  d.push_full("t", 8, 4, kColdest);
  d.apply("t", d.random_changes("t", 0, 4, 3));
  d.push_full("t", 20, 6, kOldest);
  d.push_full("t", 10, 4, kColdest, /*is_group=*/true);
  d.grow("t", 70, [&] { d.push_full("t", 6, 4, kOldest); });
  d.push_full("t", 24, 4, kColdest);
  d.open();
  d.push_full("t", 6, 6, kOldest);
  d.close();
  d.open();
  d.push_full("t", 12, 2, kColdest);
}

// The clocks of a table take the space of a dropped one, and begin at zero when its rows expire
// again.
void expiry_changes(Driver& d, const Begin& begin) {
  two_instances(d);
  d.set_alias("model", "model@2");
  d.drop_instance("model@1");
  if (d.tables != nullptr) d.tables->reclaim();
  begin();
  d.create_table(of_instance("model@2", expiring_spec("v", 48), 40, 71));
  d.apply("v", d.random_changes("v", 10, 0, 0));
  d.set_expiry("v", 96);
  d.set_expiry("u", 60);
  d.set_expiry("v", 0);
  d.open();
  d.set_expiry("v", 48);
  d.set_expiry("u", 0);
  d.close();
  d.open();
}

}  // namespace

const std::vector<Scenario>& growth_scenarios() {
  static const std::vector<Scenario> all = {
      {"growing", growing},     {"growing_full", growing_full}, {"growing_pinned", growing_pinned},
      {"shrinking", shrinking}, {"expiring", expiring},         {"expiry_changes", expiry_changes},
      {"scrubbing", scrubbing}, {"evicting", evicting},
  };
  return all;
}

}  // namespace petps::crash
