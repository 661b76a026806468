// The keys of a table that its clients find hot. Part of room table.
//
// Each client reports its own hot set about once per interval. Moving one client's keys home must
// not evict another client's. So the keys that were reported in this interval and in the one
// before are spared from eviction, and a key moves home at most once per interval.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <utility>

namespace petps::table {

class HotKeys {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Keys = std::unordered_set<uint64_t>;
  static constexpr auto kInterval = std::chrono::seconds(10);  // between the hot sets of a client

  // Remember at most `most` keys per interval; further keys may be evicted and moved again.
  explicit HotKeys(size_t most) : most_(most) {}

  void add(std::span<const uint64_t> keys, Time now) {
    if (now - began_ >= kInterval) {
      spared_ = now - began_ < 2 * kInterval ? std::exchange(recent_, {}) : Keys();
      recent_.clear();
      moved_.clear();
      began_ = now;
    }
    for (const uint64_t key : keys) {
      if (recent_.size() >= most_) break;
      recent_.insert(key);
      spared_.insert(key);
    }
  }
  const Keys& spared() const { return spared_; }
  bool has_moved(uint64_t key) const { return moved_.contains(key); }
  void add_moved(uint64_t key) {
    if (moved_.size() < most_) moved_.insert(key);
  }

 private:
  size_t most_;
  Time began_;   // start of this interval
  Keys recent_;  // reported in this interval
  Keys spared_;  // reported in this interval or the one before
  Keys moved_;   // moved home in this interval
};

}  // namespace petps::table
