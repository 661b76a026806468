// The memory that all connections hold together: requests that arrived and are not answered yet,
// replies that were copied out, pushes that wait for the writer. Each connection has its own
// limits; this class bounds the sum.
//
// Above the limit, a connection that needs more than kFreeBytes is refused with
// RESOURCE_EXHAUSTED and closed, pushes wait, and a peer that leaves replies unread is not read.
// Small requests are answered as usual.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace petps::transport {

// The default limit is this share of the machine's memory, and at most kMemoryBytesMax.
inline constexpr size_t kMemoryBytesMax = size_t{2} << 30;
inline constexpr size_t kMemoryShare = 8;
// A connection may always hold this much; it is counted and never refused. 64 KiB are 15 pulls of
// 500 keys, or their replies of 8-byte rows.
inline constexpr size_t kFreeBytes = size_t{64} << 10;
// A connection may take at most this much at once beyond kFreeBytes, so that the sum exceeds the
// limit by little.
inline constexpr size_t kTakeBytes = size_t{1} << 20;

size_t default_memory_bytes();

class MemoryBudget {
 public:
  explicit MemoryBudget(size_t limit = default_memory_bytes()) : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Count a change from `was` to `is` bytes, whatever the limit.
  void change(size_t was, size_t is) {
    if (was != is) used_.fetch_add(is - was, std::memory_order_relaxed);  // modulo 2^64
  }
  bool has_room(size_t more) const { return used() + more <= limit_; }
  // Return whether peers that leave replies unread must wait.
  bool is_tight() const { return used() > limit_ - limit_ / 4; }
  size_t used() const { return used_.load(std::memory_order_relaxed); }
  size_t limit() const { return limit_; }
  // Count a refusal and return the error for the peer.
  base::Status refuse(size_t more) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return base::Status(base::Code::kResourceExhausted,
                        "the server's memory for requests and replies is used up (" +
                            std::to_string(used()) + " of " + std::to_string(limit_) + " bytes, " +
                            std::to_string(more) +
                            " more wanted): ask another replica, try again later, or raise "
                            "server.limits.memory_bytes");
  }
  // Check whether a request, or a reply, may take `more` bytes.
  base::Status admit(size_t more) {
    return more > kFreeBytes && !has_room(more) ? refuse(more) : base::Status();
  }
  // Check whether `more` bytes of replies may wait for `peer` beside the `waiting` bytes that it
  // has not read, where its connection may hold `limit` bytes. On an error the caller must close
  // the connection with it.
  base::Status admit_output(const std::string& peer, size_t waiting, size_t more, size_t limit) {
    if (waiting + more > limit) {
      return base::Status(base::Code::kResourceExhausted, "peer " + peer + " leaves more than " +
                                                              std::to_string(limit) +
                                                              " bytes of replies unread");
    }
    return admit(more);
  }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const size_t limit_;
  std::atomic<size_t> used_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace petps::transport
