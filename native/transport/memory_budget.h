// Bytes that connections hold in all: what has arrived and is not answered, replies that were
// copied out, pushes that wait for the writer. Each connection has its own limits; this bounds
// their sum.
//
// Beyond it a connection that wants more than kFreeBytes is refused with RESOURCE_EXHAUSTED and
// closed, pushes wait, and a peer that leaves replies unread is not read. Small requests are
// answered as ever.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace petps::transport {

// The default is an eighth of the machine's memory, and at most this.
inline constexpr size_t kMemoryBytesMax = size_t{2} << 30;
inline constexpr size_t kMemoryShare = 8;
// Of a connection: counted and never refused. 15 pulls of 500 keys, or their replies of 8-byte
// rows.
inline constexpr size_t kFreeBytes = size_t{64} << 10;
// What a connection may take at once beyond that, so that the sum is exceeded by little.
inline constexpr size_t kTakeBytes = size_t{1} << 20;

size_t default_memory_bytes();

class MemoryBudget {
 public:
  explicit MemoryBudget(size_t limit = default_memory_bytes()) : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // From `was` to `is` bytes. Counts, whatever the limit says.
  void change(size_t was, size_t is) {
    if (was != is) used_.fetch_add(is - was, std::memory_order_relaxed);  // modulo 2^64
  }
  bool has_room(size_t more) const { return used() + more <= limit_; }
  // Whoever leaves replies unread waits from here on.
  bool is_tight() const { return used() > limit_ - limit_ / 4; }
  size_t used() const { return used_.load(std::memory_order_relaxed); }
  size_t limit() const { return limit_; }
  // What a peer is told. Counts it.
  base::Status refuse(size_t more) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return base::Status(base::Code::kResourceExhausted,
                        "the server's memory for requests and replies is used up (" +
                            std::to_string(used()) + " of " + std::to_string(limit_) + " bytes, " +
                            std::to_string(more) +
                            " more wanted): ask another replica, try again later, or raise "
                            "server.limits.memory_bytes");
  }
  // Whether `more` bytes of replies may wait for `peer` beside the `waiting` ones that it leaves
  // unread, where its connection may hold `limit`. An error: close the connection with it.
  base::Status admit_output(const std::string& peer, size_t waiting, size_t more, size_t limit) {
    if (waiting + more > limit) {
      return base::Status(base::Code::kResourceExhausted, "peer " + peer + " leaves more than " +
                                                              std::to_string(limit) +
                                                              " bytes of replies unread");
    }
    return more > kFreeBytes && !has_room(more) ? refuse(more) : base::Status();
  }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const size_t limit_;
  std::atomic<size_t> used_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace petps::transport
