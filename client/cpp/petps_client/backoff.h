// Backoff: how long the client leaves a server alone after a failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

namespace petps::client {

// After this number of failures in a row a server counts as gone until its next reply, and its
// last catalogue no longer counts. The two backoffs between three failures take 7.5 to 15 ms.
inline constexpr uint32_t kFailuresUntilGone = 3;

struct BackoffOptions {
  // The first backoff is shorter than a server's restart; the longest delays a recovery little.
  uint64_t first_ns = 5'000'000;
  uint64_t longest_ns = 500'000'000;
  // A server that is silent for this long has failed. A shorter silence only means that the
  // caller had less time; it says nothing about the server.
  uint64_t silence_ns = 500'000'000;
  uint32_t failures_until_gone = kFailuresUntilGone;
  // How long a call that may leave out keys waits for a reply: a little longer than silence_ns, so
  // that the timeout counts as a failure.
  uint64_t patience_ns() const { return silence_ns + silence_ns / 10; }
  // Seed of the jitter; 0: a different one in each process.
  uint64_t seed = 0;
};

// Exponential backoff. Each pause is random, between half of the current limit and the limit. So
// clients that lost a server at the same moment do not all return at the same moment.
// Threads: one at a time.
class Backoff {
 public:
  explicit Backoff(const BackoffOptions& options)
      : options_(options), random_(options.seed != 0 ? options.seed : std::random_device()()) {}
  // Return the next pause.
  uint64_t next_ns() {
    limit_ns_ = limit_ns_ == 0 ? options_.first_ns : std::min(limit_ns_ * 2, options_.longest_ns);
    return std::uniform_int_distribution<uint64_t>(limit_ns_ / 2, limit_ns_)(random_);
  }
  void reset() { limit_ns_ = 0; }

 private:
  const BackoffOptions options_;
  std::mt19937_64 random_;
  uint64_t limit_ns_ = 0;
};

}  // namespace petps::client
