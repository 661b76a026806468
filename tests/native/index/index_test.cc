// Tests of the index against a std::map: single forms, batches in rounds, moves, overflow until a
// counter saturates.
#include "index/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "tests/native/media/simulated_medium.h"
#include "tests/native/pool/memory_pool.h"
#include "tests/seed.h"

namespace petps::index {
namespace {

using base::Code;
using pool::testing_support::Memory;
using pool::testing_support::spec;

// An index without rows: refs are only numbers.
struct Rig {
  explicit Rig(uint64_t capacity) : pool(memory.format()) {
    const auto record = pool->create_table(spec("t", capacity));
    EXPECT_TRUE(record.ok()) << record.status().to_string();
    index =
        std::make_unique<Index>(*pool, record.value().bucket_offset, record.value().bucket_count);
    index->set_walked(0, 0);
  }
  // Return keys whose home is bucket `home`.
  std::vector<uint64_t> keys_of(uint64_t home, size_t count, uint64_t from = 1) const {
    std::vector<uint64_t> keys;
    for (uint64_t key = from; keys.size() < count; ++key) {
      if (index->path_of(key).home == home) keys.push_back(key);
    }
    return keys;
  }
  void expect_equal(const std::map<uint64_t, SlotRef>& model,
                    const std::vector<uint64_t>& keys) const {
    std::vector<SlotRef> refs(keys.size());
    index->find_refs(keys, refs.data());
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto known = model.find(keys[i]);
      const SlotRef expected = known == model.end() ? 0 : known->second;
      ASSERT_EQ(refs[i], expected) << "key " << keys[i];
      ASSERT_EQ(index->find_one(keys[i]).ref, expected) << "key " << keys[i];
    }
    ASSERT_EQ(index->rows(), model.size());
  }
  // Every key is found. Each counter equals the number of keys that passed its bucket, or is
  // higher, or is saturated.
  void expect_counters(const std::map<uint64_t, SlotRef>& model) const {
    std::vector<uint32_t> passed(index->bucket_count(), 0);
    for (const auto& [key, ref] : model) {
      const Path path = index->path_of(key);
      const Place place = index->find_one(key);
      ASSERT_NE(place.ref, 0u) << "key " << key;
      for (uint64_t d = 0; d < place.distance; ++d) passed[index->bucket_at(path, d)] += 1;
    }
    for (uint64_t b = 0; b < index->bucket_count(); ++b) {
      const uint8_t counter = index->bucket(b).overflow;
      if (counter != kSaturated) {
        ASSERT_GE(counter, passed[b]) << "bucket " << b;
      }
    }
  }

  Memory memory;
  std::unique_ptr<pool::Pool> pool;
  std::unique_ptr<Index> index;
};

void fuzz(uint64_t capacity, size_t crowd, size_t others, int rounds, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Rig rig(capacity);
  std::vector<uint64_t> keys = rig.keys_of(random() % rig.index->bucket_count(), crowd);
  for (size_t i = 0; i < others; ++i) keys.push_back(random() | (uint64_t{1} << 63));
  std::map<uint64_t, SlotRef> model;
  SlotRef next = 1;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t key = keys[random() % keys.size()];
    const auto known = model.find(key);
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
      case 3: {
        if (known == model.end() && model.size() >= capacity) break;
        const auto old = rig.index->exchange(key, ++next);
        ASSERT_TRUE(old.ok()) << old.status().to_string();
        ASSERT_EQ(old.value(), known == model.end() ? 0 : known->second);
        model[key] = next;
        break;
      }
      case 4:
      case 5: {
        const base::Status status = rig.index->erase(key, known == model.end() ? 7 : known->second);
        ASSERT_EQ(status.code(), known == model.end() ? Code::kNotFound : Code::kOk);
        model.erase(key);
        break;
      }
      case 6: {
        ASSERT_TRUE(rig.index->move_home(key, {}).ok());
        break;
      }
      case 7: {
        ASSERT_TRUE(rig.index->rehome_bucket(random() % rig.index->bucket_count()).ok());
        break;
      }
    }
    if (round % 16 == 0) rig.expect_equal(model, keys);
    if (round % 64 == 0) rig.expect_counters(model);
    if (::testing::Test::HasFatalFailure()) FAIL() << "round " << round;
  }
  uint64_t displaced = 0;
  for (const auto& [key, ref] : model) displaced += rig.index->find_one(key).distance > 0 ? 1 : 0;
  EXPECT_EQ(rig.index->displaced(), displaced);
}

TEST(IndexFuzz, TwoBuckets) {
  for (uint64_t i = 0; i < 10; ++i) fuzz(22, 12, 16, 2000, tests::seed() + i);
}
TEST(IndexFuzz, OneCrowdedHome) {
  for (uint64_t i = 0; i < 5; ++i) fuzz(120, 80, 60, 3000, tests::seed() + 100 + i);
}
TEST(IndexFuzz, NearlyFull) {
  for (uint64_t i = 0; i < 3; ++i) fuzz(300, 0, 330, 6000, tests::seed() + 200 + i);
}

TEST(Index, EraseOfAChangedRefIsRefused) {
  Rig rig(100);
  EXPECT_EQ(rig.index->erase(5, 10).code(), Code::kNotFound);
  ASSERT_TRUE(rig.index->exchange(5, 10).ok());
  EXPECT_EQ(rig.index->exchange(5, 11).value(), 10u);
  const base::Status changed = rig.index->erase(5, 10);
  EXPECT_EQ(changed.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(pool::testing_support::contains(changed, "another slot by now"))
      << changed.to_string();
  EXPECT_EQ(rig.index->find_one(5).ref, 11u);
  EXPECT_TRUE(rig.index->erase(5, 11).ok());
  EXPECT_EQ(rig.index->find_one(5).ref, 0u);
  EXPECT_EQ(rig.index->erase(5, 11).code(), Code::kNotFound);
}

// A displaced key that leaves its bucket lowers only the counters of the buckets that it passed.
// The bucket that it was in keeps its counter, because another key passed that bucket.
TEST(Index, ALeavingKeyDoesNotLowerTheCounterOfTheBucketThatItWasIn) {
  for (const bool moves : {false, true}) {
    SCOPED_TRACE(moves ? "the key moves home" : "the key is erased");
    Rig rig(100);
    std::map<uint64_t, SlotRef> model;
    std::vector<uint64_t> keys;
    const auto insert = [&](uint64_t key) {
      ASSERT_TRUE(rig.index->exchange(key, key).ok());
      model[key] = key;
      keys.push_back(key);
    };
    for (const uint64_t key : rig.keys_of(0, kEntries + 1)) insert(key);
    const uint64_t first = keys[0];
    const uint64_t guest = keys[kEntries];
    const Place place = rig.index->find_one(guest);
    ASSERT_EQ(place.distance, 1u);
    for (const uint64_t key : rig.keys_of(place.bucket, kEntries)) insert(key);
    ASSERT_EQ(rig.index->find_one(keys.back()).distance, 1u) << "it passed the guest's bucket";
    ASSERT_EQ(rig.index->bucket(0).overflow, 1);
    ASSERT_EQ(rig.index->bucket(place.bucket).overflow, 1);

    const uint64_t erased = moves ? first : guest;
    ASSERT_TRUE(rig.index->erase(erased, erased).ok());
    model.erase(erased);
    if (moves) {
      ASSERT_EQ(rig.index->move_home(guest, {}).value(), 1u);
    }
    EXPECT_EQ(rig.index->bucket(0).overflow, 0);
    EXPECT_EQ(rig.index->bucket(place.bucket).overflow, 1);
    rig.expect_equal(model, keys);
    rig.expect_counters(model);
  }
}

// With more displaced keys than a counter can count, the counter stays at its maximum (until a
// recount), and no key is lost.
TEST(Index, ASaturatedCounterStaysUntilARecount) {
  Rig rig(600);
  constexpr uint64_t kHome = 3;
  const std::vector<uint64_t> keys = rig.keys_of(kHome, 14 + 300);
  std::map<uint64_t, SlotRef> model;
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(rig.index->exchange(keys[i], i + 1).ok());
    model[keys[i]] = i + 1;
  }
  EXPECT_EQ(rig.index->bucket(kHome).overflow, kSaturated);
  rig.expect_equal(model, keys);
  std::vector<uint64_t> order = keys;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(tests::seed()));
  for (size_t i = 0; i < 290; ++i) {
    ASSERT_TRUE(rig.index->erase(order[i], model[order[i]]).ok());
    model.erase(order[i]);
  }
  EXPECT_EQ(rig.index->bucket(kHome).overflow, kSaturated)
      << "a saturated counter does not count any more";
  rig.expect_equal(model, keys);
}

TEST(Index, AFullTableRefusesNewKeysAndLowersTheCountersItRaised) {
  Rig rig(22);  // two buckets of 14
  std::map<uint64_t, SlotRef> model;
  std::vector<uint64_t> keys;
  for (uint64_t key = 1; key <= 28; ++key) {
    ASSERT_TRUE(rig.index->exchange(key, key).ok());
    model[key] = key;
    keys.push_back(key);
  }
  const uint8_t before[2] = {rig.index->bucket(0).overflow, rig.index->bucket(1).overflow};
  const auto refused = rig.index->exchange(99, 99);
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted) << refused.status().to_string();
  EXPECT_EQ(rig.index->bucket(0).overflow, before[0]);
  EXPECT_EQ(rig.index->bucket(1).overflow, before[1]);
  rig.expect_equal(model, keys);
  EXPECT_EQ(rig.index->exchange(7, 70).value(), 7u) << "present keys can still change";
}

// The plan of a batch saw room in a bucket, but the bucket is full at publish: the key goes to the
// next bucket, after another drain.
TEST(Index, AKeyGoesToTheNextBucketIfItsDestinationFillsUp) {
  Rig rig(100);
  const std::vector<uint64_t> keys = rig.keys_of(0, 16);
  for (size_t i = 0; i < 13; ++i) ASSERT_TRUE(rig.index->exchange(keys[i], i + 1).ok());
  Op op;
  op.key = keys[15];
  op.ref = 500;
  media::Flusher flusher(rig.pool->medium());
  rig.index->plan({&op, 1});
  ASSERT_EQ(op.state, OpState::kNew);
  rig.index->raise(op, flusher);
  EXPECT_EQ(op.passed, 0u) << "one entry of its home is free";
  ASSERT_TRUE(rig.index->exchange(keys[13], 14).ok());  // another writer takes it
  rig.index->publish({&op, 1}, flusher);
  ASSERT_EQ(op.state, OpState::kAgain);
  EXPECT_EQ(rig.index->find_one(keys[15]).ref, 0u);
  rig.index->raise(op, flusher);
  EXPECT_EQ(op.state, OpState::kNew);
  EXPECT_EQ(op.passed, 1u);
  EXPECT_EQ(rig.index->bucket(0).overflow, 1);
  rig.index->publish({&op, 1}, flusher);
  ASSERT_EQ(op.state, OpState::kDone);
  rig.index->settle(op);
  EXPECT_EQ(rig.index->find_one(keys[15]).ref, 500u);
  EXPECT_EQ(rig.index->find_one(keys[15]).distance, 1u);
  EXPECT_EQ(rig.index->bucket(0).overflow, 1);
}

// Counters were raised for a key that another writer then inserted: settle lowers them again.
TEST(Index, CountersRaisedInVainAreLowered) {
  Rig rig(100);
  const std::vector<uint64_t> keys = rig.keys_of(0, 15);
  for (size_t i = 0; i < 14; ++i) ASSERT_TRUE(rig.index->exchange(keys[i], i + 1).ok());
  Op op;
  op.key = keys[14];
  op.ref = 500;
  media::Flusher flusher(rig.pool->medium());
  rig.index->plan({&op, 1});
  rig.index->raise(op, flusher);
  EXPECT_EQ(op.passed, 1u);
  ASSERT_TRUE(rig.index->exchange(keys[14], 400).ok());
  EXPECT_EQ(rig.index->bucket(0).overflow, 2);
  rig.index->publish({&op, 1}, flusher);
  rig.index->settle(op);
  EXPECT_EQ(op.old, 400u);
  EXPECT_EQ(rig.index->bucket(0).overflow, 1);
  ASSERT_TRUE(rig.index->erase(keys[14], 500).ok());
  EXPECT_EQ(rig.index->bucket(0).overflow, 0);
}

// A batch whose keys all have one home: several rounds of raise and publish place every key.
TEST(Index, ABatchOfKeysWithOneHomeIsPlacedInRounds) {
  Rig rig(300);
  const std::vector<uint64_t> keys = rig.keys_of(1, 200);
  std::vector<Op> ops(keys.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].key = keys[i];
    ops[i].ref = i + 1;
  }
  media::Flusher flusher(rig.pool->medium());
  rig.index->plan(ops);
  int rounds = 0;
  bool waiting = true;
  while (waiting) {
    ASSERT_LT(++rounds, 40);
    for (Op& op : ops) {
      if (op.state == OpState::kNew || op.state == OpState::kAgain) rig.index->raise(op, flusher);
    }
    rig.index->publish(ops, flusher);
    waiting = std::any_of(ops.begin(), ops.end(),
                          [](const Op& op) { return op.state == OpState::kAgain; });
  }
  std::map<uint64_t, SlotRef> model;
  for (const Op& op : ops) {
    ASSERT_EQ(op.state, OpState::kDone);
    rig.index->settle(op);
    model[op.key] = op.ref;
  }
  rig.expect_equal(model, keys);
  rig.expect_counters(model);
}

TEST(Index, ProbingVisitsEveryBucket) {
  Rig rig(300);
  for (uint64_t key = 1; key < 200; ++key) {
    const Path path = rig.index->path_of(key);
    std::vector<bool> seen(rig.index->bucket_count(), false);
    for (uint64_t d = 0; d < rig.index->bucket_count(); ++d)
      seen[rig.index->bucket_at(path, d)] = true;
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true),
              static_cast<int64_t>(rig.index->bucket_count()));
  }
}

// A move whose copy could not be made durable leaves the key in one place, where scans and pulls
// find it.
TEST(Index, AFailedMoveLeavesTheKeyInOnePlace) {
  media::SimulatedMedium disk(uint64_t{4} << 20);
  auto pool = pool::Pool::format(disk.media(uint64_t{1} << 20), pool::kTestUnitBytes);
  ASSERT_TRUE(pool.ok() && pool.value()->create_instance("model", "model@1", 1).ok());
  const auto record = pool.value()->create_table(spec("t", 100));
  ASSERT_TRUE(record.ok());
  Index index(*pool.value(), record.value().bucket_offset, record.value().bucket_count);
  index.set_walked(0, 0);
  std::vector<uint64_t> keys;
  for (uint64_t key = 1; keys.size() < 15; ++key) {
    if (index.path_of(key).home == 0) keys.push_back(key);
  }
  for (const uint64_t key : keys) ASSERT_TRUE(index.exchange(key, key).ok());
  ASSERT_EQ(index.find_one(keys[14]).distance, 1u);
  ASSERT_TRUE(index.erase(keys[0], keys[0]).ok());
  disk.suppress(media::Site::kJournalDrain);  // so that the next drain is that of the copy
  disk.fail_drain();
  EXPECT_FALSE(index.move_home(keys[14], {}).ok());
  size_t entries = 0;
  for (uint64_t b = 0; b < index.bucket_count(); ++b) {
    for (const Entry& entry : index.bucket(b).entries)
      entries += entry.ref != 0 && entry.key == keys[14] ? 1 : 0;
  }
  EXPECT_EQ(entries, 1u);
  EXPECT_EQ(index.find_one(keys[14]).ref, keys[14]);
}

}  // namespace
}  // namespace petps::index
