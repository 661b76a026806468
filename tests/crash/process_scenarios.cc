// The scenarios that run only on pools with durability `process`.
#include <algorithm>

#include "scenarios.h"

namespace petps::crash {

namespace {

using Begin = std::function<void()>;

// The durability changes while rows are written. After a change the pool is also closed and
// opened.
void durabilities(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 60, kOddRow), 60, 50), 40);
  begin();
  d.set_durability(media::Durability::kPower);
  d.apply("t", d.random_changes("t", 4, 6, 4));
  d.set_durability(media::Durability::kProcess);
  d.apply("t", d.random_changes("t", 4, 6, 4));
  d.record_progress({1, 1, 7, 2, 2, 2, {}, 0});
  d.close();
  d.open();
  d.apply("t", d.random_changes("t", 2, 6, 2));
  d.set_durability(media::Durability::kPower);
  d.apply("t", d.random_changes("t", 2, 6, 2));
  d.close();
  d.open();
}

// New tables get the same keys, in the space of dropped ones. An old row must not be taken for a
// new one.
void same_keys_again(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 40, kOddRow), 40, 51), 40);
  d.create_instance("model@2");
  d.set_alias("model", "model@2");
  d.drop_instance("model@1");
  if (d.tables != nullptr) d.tables->reclaim();
  d.close();
  d.open();
  begin();
  d.create_table(of_instance("model@2", table_spec("v", 40, kOddRow), 40, 51));
  d.apply("v", d.random_changes("v", 40, 0, 0));
  d.apply("v", d.random_changes("v", 0, 20, 0));
}

// The process is killed when the clean superblock is stored but not synced. The next process
// writes the other copy.
void killed_clean_close(Driver& d, const Begin& begin) {
  d.format();
  // A close writes the tables' row counts, which are in several sectors: the superblock can be
  // torn.
  const auto table = [](int i) { return "t" + std::to_string(i); };
  constexpr int kTables = 4;
  const auto apply = [&](size_t inserts) {
    for (int i = 0; i < kTables; ++i) d.apply(table(i), d.random_changes(table(i), inserts, 2, 0));
  };
  for (int i = 0; i < kTables; ++i)
    d.create_table(shape_of(table_spec(table(i), 30, kOddRow), 30, 60 + static_cast<uint64_t>(i)));
  apply(10);
  d.close();
  d.open();
  apply(3);
  constexpr size_t kCleanSuperblockDrain = 1;  // follows the drain of the close itself
  d.kill_before_drain(kCleanSuperblockDrain, /*seen=*/true, [&] { d.close(); });
  begin();
  d.open();
  apply(2);
}

// There are more partitions than one page holds progress pairs.
void many_partitions(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 60, kOddRow), 60, 53), 40);
  for (uint32_t i = 0; i < 14; ++i) d.create_instance("model@" + std::to_string(i + 2));
  begin();
  for (uint32_t i = 0; i < 45; ++i) {
    if (i % 15 == 0) d.apply("t", d.random_changes("t", 1, 4, 1));
    d.record_progress({1 + i / 3, i % 3, 7, 1, 1, 1, {}, 0});
  }
}

}  // namespace

const std::vector<Scenario>& process_scenarios() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> chosen;
    std::copy_if(
        scenarios().begin(), scenarios().end(), std::back_inserter(chosen),
        [](const Scenario& scenario) { return scenario.name != std::string("interrupted_move"); });
    chosen.push_back({"durabilities", durabilities});
    chosen.push_back({"same_keys_again", same_keys_again});
    chosen.push_back({"killed_clean_close", killed_clean_close});
    chosen.push_back({"many_partitions", many_partitions});
    return chosen;
  }();
  return all;
}

}  // namespace petps::crash
