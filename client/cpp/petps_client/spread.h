// Spread: which server answers which keys of one pull.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace petps::client {

// What a call knows of a server. Of the owners of a group only those of the lowest rank are asked.
struct Candidate {
  static constexpr uint8_t kNotAsked = 255;
  uint8_t rank = kNotAsked;
  uint32_t in_flight = 0;   // of this client
  uint64_t latency_ns = 0;  // of recent replies, for equally many keys; 0: unknown
};

inline constexpr uint32_t kNoServer = UINT32_MAX;

// Return whether `one` is busier than `other`, by enough that a call should rather ask `other`.
// A difference in latency counts only from a factor of two, so that chance does not send all
// requests to one of two equal servers.
bool is_busier(const Candidate& one, const Candidate& other);

// Return a server for each of `groups`, or kNoServer if none of its owners may be asked.
//
// A server takes as many groups as possible, so that a call sends few requests, but no more than
// `keys_per_server` keys or an equal part of all keys, whichever is more. Where several servers
// can answer, the less busy one of two random ones does.
//
// owners: the numbers of the servers of each group. keys: the number of keys of each group.
// servers: by number.
std::vector<uint32_t> spread(std::span<const std::vector<uint32_t>> owners,
                             std::span<const uint32_t> groups, std::span<const uint32_t> keys,
                             std::span<const Candidate> servers, uint32_t keys_per_server,
                             uint64_t random);

}  // namespace petps::client
