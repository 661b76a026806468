// The scenarios of the index. In each, two or three threads meet on a few entries. IndexRig checks
// every answer of a reader against the values that its key had.
#include <functional>
#include <unordered_set>

#include "tests/model/index_rig.h"
#include "tests/model/scenarios.h"

namespace petps::model {
namespace {

using Keys = std::vector<uint64_t>;

Scenario make_scenario(const std::shared_ptr<IndexRig>& rig, const std::string& name,
                       std::vector<std::function<void()>> threads, bool walked = true) {
  rig->keep();
  Scenario scenario;
  scenario.name = name;
  scenario.setup = [rig, walked] { rig->restore(walked); };
  scenario.threads = std::move(threads);
  scenario.check = [rig] { rig->check(); };
  return scenario;
}

std::string name_of(const std::string& scenario, bool batch) {
  return batch ? scenario + ", batch" : scenario;
}

// Return a reader of `together` in one batch, or of the keys of `alone` one by one.
std::function<void()> reader(const std::shared_ptr<IndexRig>& rig, bool batch, const Keys& alone,
                             const Keys& together) {
  if (batch) return [=] { rig->find_batch(together); };
  return [=] {
    for (const uint64_t key : alone) rig->find_one(key);
  };
}

// Bucket 0 has one free entry. A key that was displaced from it to bucket 1 moves home.
Scenario moves_home(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys full = rig->keys(0, 2, 14);
  const uint64_t key = rig->keys(0, 1, 1)[0];
  const uint64_t other = rig->keys(1, 2, 1)[0];
  for (const uint64_t filler : full) rig->put(filler);
  rig->put(key);
  rig->put(other);
  rig->erase(full[13]);
  const auto move = [=] {
    const auto moved = rig->index().move_home(key, {});
    if (!moved.ok() || moved.value() != 1) fail("the key did not move");
  };
  const auto read = reader(rig, batch, {key}, {key, other});
  return make_scenario(rig, name_of("a key moves home", batch), {move, read});
}

// The key moves, and at once a key with the same tag gets its old entry.
Scenario moves_and_is_overwritten(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys full = rig->keys(0, 2, 14);
  const uint64_t key = rig->keys(0, 1, 1)[0];
  uint64_t next = rig->keys(1, 2, 1)[0];
  while (rig->index().path_of(next).tag != rig->index().path_of(key).tag)
    next = rig->keys(1, 2, 1)[0];
  for (const uint64_t filler : full) rig->put(filler);
  rig->put(key);
  rig->erase(full[13]);
  const auto move = [=] {
    const auto moved = rig->index().move_home(key, {});
    if (!moved.ok() || moved.value() != 1) fail("the key did not move");
    rig->put(next);
  };
  const auto read = reader(rig, batch, {key}, {key});
  return make_scenario(rig, name_of("a moved key is overwritten", batch), {move, read});
}

// A key is evicted from its home and comes back: it has three places in all.
Scenario moves_there_and_back(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys full = rig->keys(0, 2, 13);
  const uint64_t cold = rig->keys(0, 1, 1)[0];
  const uint64_t hot = rig->keys(0, 2, 1)[0];
  for (const uint64_t filler : full) rig->put(filler);
  rig->put(cold);
  rig->put(hot);
  std::unordered_set<uint64_t> stay(full.begin(), full.end());
  stay.insert(hot);
  const auto move = [=] {
    const auto moved = rig->index().move_home(hot, stay);
    if (!moved.ok() || moved.value() != 2) fail("nothing was evicted");
    rig->erase(full[0]);
    if (!rig->index().rehome_bucket(1).ok()) fail("a move failed");
  };
  const auto read = reader(rig, batch, {cold}, {cold});
  return make_scenario(rig, name_of("a key is evicted and comes back", batch), {move, read});
}

// An entry goes from one key to another and back to the first.
Scenario reuses_an_entry(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys keys = rig->keys(0, 1, 2);
  rig->put(keys[0]);
  rig->put(rig->keys(0, 1, 1)[0]);
  const auto write = [=] {
    rig->erase(keys[0]);
    rig->put(keys[1]);
    rig->erase(keys[1]);
    rig->put(keys[0]);
  };
  const auto read = reader(rig, batch, {keys[0], keys[1]}, {keys[1], keys[0]});
  return make_scenario(rig, name_of("an entry is used again", batch), {write, read});
}

Scenario updates(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys keys = rig->keys(0, 1, 3);
  rig->put(keys[0]);
  rig->put(keys[1]);
  const auto update = [=] {
    rig->replace(keys[0]);
    rig->put(keys[0]);
  };
  const auto insert = [=] { rig->put(keys[2]); };
  const auto read = reader(rig, batch, {keys[0]}, {keys[0]});
  return make_scenario(rig, name_of("a key is updated beside an insert", batch),
                       {update, insert, read});
}

// Two writers want the last free entry of a bucket: one gets it, the other uses the next bucket.
Scenario fills_up() {
  auto rig = std::make_shared<IndexRig>();
  for (const uint64_t filler : rig->keys(0, 1, 13)) rig->put(filler);
  const Keys keys = rig->keys(0, 1, 2);
  return make_scenario(
      rig, "two inserts want one entry",
      {[=] { rig->put(keys[0]); }, [=] { rig->put(keys[1]); }, [=] { rig->find_one(keys[0]); }});
}

Scenario counters(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  for (const uint64_t filler : rig->keys(0, 1, 14)) rig->put(filler);
  const Keys keys = rig->keys(0, 1, 3);
  rig->put(keys[0]);
  rig->put(keys[1]);
  const auto read = reader(rig, batch, {keys[2]}, {keys[1], keys[2]});
  return make_scenario(rig, name_of("displaced keys come and go", batch),
                       {[=] { rig->erase(keys[0]); }, [=] { rig->put(keys[2]); }, read});
}

// After a crash, the first writers heal the bucket, and readers compare keys.
Scenario heals(bool batch) {
  auto rig = std::make_shared<IndexRig>();
  const Keys keys = rig->keys(0, 1, 4);
  for (size_t i = 0; i < 3; ++i) rig->put(keys[i]);
  rig->make_old(0);
  const auto read = reader(rig, batch, {keys[0]}, {keys[0], keys[3]});
  return make_scenario(rig, name_of("an old bucket is healed", batch),
                       {[=] { rig->put(keys[3]); }, [=] { rig->erase(keys[1]); }, read});
}

Scenario scans() {
  auto rig = std::make_shared<IndexRig>();
  const Keys keys = rig->keys(0, 1, 3);
  rig->put(keys[0]);
  rig->put(keys[1]);
  const auto write = [=] {
    rig->erase(keys[0]);
    rig->put(keys[2]);
    rig->replace(keys[1]);
  };
  return make_scenario(rig, "a bucket is scanned", {write, [=] { rig->scan(0, {keys[1]}); }});
}

Scenario walks() {
  auto rig = std::make_shared<IndexRig>();
  for (const uint64_t filler : rig->keys(0, 1, 14)) rig->put(filler);
  const Keys keys = rig->keys(0, 1, 2);
  rig->put(keys[0]);
  for (uint64_t b = 0; b < rig->buckets(); ++b) rig->make_old(b);
  const auto walk = [=] {
    media::Flusher flusher(rig->medium());
    for (uint64_t b = 0; b < rig->buckets(); ++b)
      rig->index().walk_bucket(b, flusher, [](uint64_t, pool::SlotRef) {});
  };
  const auto write = [=] {
    rig->erase(keys[0]);
    rig->put(keys[1]);
  };
  Scenario scenario = make_scenario(rig, "the walk counts beside a writer", {walk, write}, false);
  scenario.check = [=] {
    if (!rig->index().walked()) fail("the walk does not finish");
    if (rig->index().rows_at_open() != 15) fail("the walk counts rows that came since the open");
    rig->check();
  };
  return scenario;
}

// A table grows while a key is replaced, erased or inserted, and read. A step copies one bucket,
// the last one swaps.
Scenario grows(const std::string& how, bool batch) {
  auto rig = std::make_shared<IndexRig>(/*grows=*/true);
  const Keys keys = rig->keys(0, 1, 2);
  rig->put(keys[0]);
  const auto grow = [=] {
    rig->begin_growing();
    rig->copy_bucket(0);
    rig->swap();
  };
  const auto write = [=] {
    if (how == "replaced") rig->replace(keys[0]);
    if (how == "erased") rig->erase(keys[0]);
    if (how == "inserted") rig->put(keys[1]);
  };
  const auto read = reader(rig, batch, {how == "inserted" ? keys[1] : keys[0]}, keys);
  return make_scenario(rig, name_of("a table grows while a key is " + how, batch),
                       {grow, write, read});
}

}  // namespace

std::vector<Scenario> index_scenarios() {
  std::vector<Scenario> all = {fills_up(), scans(), walks()};
  for (const bool batch : {false, true}) {
    for (const auto& make : {moves_home, moves_and_is_overwritten, moves_there_and_back,
                             reuses_an_entry, updates, counters, heals})
      all.push_back(make(batch));
    for (const char* how : {"replaced", "erased", "inserted"}) all.push_back(grows(how, batch));
  }
  return all;
}

}  // namespace petps::model
