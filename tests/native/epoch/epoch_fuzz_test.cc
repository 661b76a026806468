// Random events, sent to a Domain and to a slow model. For every retired item, the model keeps the
// pins that were live when the item was retired. This does not cover threads
// (epoch_threads_test.cc does).
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "epoch/epoch.h"
#include "tests/seed.h"

namespace petps::epoch {
namespace {

constexpr int kSteps = 5'000;

// The model: an item may be reclaimed when every pin taken before its retirement is dropped.
class Model {
 public:
  void pin(uint64_t pin) { live_.insert(pin); }
  void drop(uint64_t pin) {
    live_.erase(pin);
    for (auto& [item, holders] : retired_) holders.erase(pin);
  }
  void retire(uint64_t item) { retired_[item] = live_; }
  std::set<uint64_t> reclaim() {
    std::set<uint64_t> reclaimed;
    for (auto it = retired_.begin(); it != retired_.end();) {
      if (it->second.empty()) {
        reclaimed.insert(it->first);
        it = retired_.erase(it);
      } else {
        ++it;
      }
    }
    return reclaimed;
  }
  size_t waiting() const { return retired_.size(); }

 private:
  std::set<uint64_t> live_;
  std::map<uint64_t, std::set<uint64_t>> retired_;
};

class Collector : public Reclaimer {
 public:
  void reclaim(std::span<const uint64_t> reclaimed) override {
    for (const uint64_t item : reclaimed)
      EXPECT_TRUE(items.insert(item).second) << "reclaimed twice: " << item;
  }
  std::set<uint64_t> items;
};

struct Live {
  uint64_t id;
  Pin pin;
};

class RandomEvents {
 public:
  explicit RandomEvents(uint64_t seed) : random_(seed) {
    for (size_t i = 0; i < 1 + random_() % 6; ++i) readers_.push_back(domain_.lease());
    burst_ = random_() % 4 == 0;
  }

  void step() {
    switch (random_() % 10) {
      case 0:
      case 1:
      case 2:
      case 3:
        return burst_ && random_() % 50 == 0 ? fill() : pin();
      case 4:
      case 5:
      case 6:
        return drop();
      case 7:
        return retire();
      case 8:
        return reclaim();
      default:
        return swap_reader();
    }
  }

  void finish() {
    while (!pins_.empty()) drop();
    reclaim();
    EXPECT_EQ(domain_.retired_items(), 0u);
  }

 private:
  void pin() {
    Reader* reader = readers_[random_() % readers_.size()];
    const size_t live = reader->live();
    Pin pin = reader->pin();
    ASSERT_EQ(static_cast<bool>(pin), live < kPinsPerReader);
    if (!pin) return;
    ASSERT_EQ(reader->live(), live + 1);
    model_.pin(next_pin_);
    pins_.push_back({next_pin_++, std::move(pin)});
  }
  void fill() {
    for (size_t i = 0; i < 300; ++i) pin();
  }
  void drop() {
    if (pins_.empty()) return;
    const size_t chosen = random_() % pins_.size();
    model_.drop(pins_[chosen].id);
    pins_[chosen].pin.drop();
    std::swap(pins_[chosen], pins_.back());
    pins_.pop_back();
    if (burst_ && random_() % 20 == 0) {
      for (size_t i = 0; i < 200; ++i) drop_last();
    }
  }
  void drop_last() {
    if (pins_.empty()) return;
    model_.drop(pins_.back().id);
    pins_.pop_back();
  }
  void retire() {
    std::vector<uint64_t> items(random_() % 4);
    for (uint64_t& item : items) model_.retire(item = next_item_++);
    domain_.retire(collector_, items);
  }
  void reclaim() {
    const size_t count = domain_.reclaim();
    ASSERT_EQ(collector_.items.size(), count);
    ASSERT_EQ(collector_.items, model_.reclaim());
    ASSERT_EQ(domain_.retired_items(), model_.waiting());
    collector_.items.clear();
  }
  void swap_reader() {
    Reader*& reader = readers_[random_() % readers_.size()];
    domain_.release(reader);
    reader = domain_.lease();
    ASSERT_NE(reader, nullptr);
  }

  std::mt19937_64 random_;
  bool burst_ = false;
  Domain domain_;
  Collector collector_;
  Model model_;
  std::vector<Reader*> readers_;
  std::vector<Live> pins_;
  uint64_t next_pin_ = 1;
  uint64_t next_item_ = 1;
};

TEST(EpochFuzz, ReclaimsExactlyWhatTheModelDoes) {
  const uint64_t first = tests::seed();
  for (uint64_t seed = first; seed < first + 8; ++seed) {
    std::printf("[epoch] seed %lu (PETPS_SEED repeats it)\n", static_cast<unsigned long>(seed));
    RandomEvents events(seed);
    for (int i = 0; i < kSteps; ++i) {
      events.step();
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << "seed " << seed << " step " << i;
    }
    events.finish();
  }
}

}  // namespace
}  // namespace petps::epoch
