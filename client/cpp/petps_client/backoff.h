// How long a server is left alone after it failed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

namespace petps::client {

// After so many failures in a row, and until its next answer, what a server was last known to have
// does not count. The rests between them make about 10 ms at least.
inline constexpr uint32_t kFailuresUntilGone = 3;

struct Patience {
  // The first rest is shorter than a server's restart, the longest one costs a recovered server little.
  uint64_t first_rest_ns = 5'000'000;
  uint64_t longest_rest_ns = 500'000'000;
  // A server that is silent for so long has failed. One that is silent for less was asked by a
  // caller with less time, which says nothing about the server.
  uint64_t silence_ns = 500'000'000;
  uint32_t failures_until_gone = kFailuresUntilGone;
  // Of the jitter; 0: another one in each process.
  uint64_t seed = 0;
};

// Growing rests, each between a half and the whole of what is due: clients that lost one server at
// the same moment do not come back at the same moment. Not thread-safe.
class Backoff {
 public:
  explicit Backoff(const Patience& patience)
      : patience_(patience), random_(patience.seed != 0 ? patience.seed : std::random_device()()) {}
  uint64_t next_ns() {
    due_ns_ =
        due_ns_ == 0 ? patience_.first_rest_ns : std::min(due_ns_ * 2, patience_.longest_rest_ns);
    return std::uniform_int_distribution<uint64_t>(due_ns_ / 2, due_ns_)(random_);
  }
  void reset() { due_ns_ = 0; }

 private:
  const Patience patience_;
  std::mt19937_64 random_;
  uint64_t due_ns_ = 0;
};

}  // namespace petps::client
