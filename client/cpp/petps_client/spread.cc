#include "petps_client/spread.h"

#include <algorithm>

namespace petps::client {

namespace {

uint64_t next_random(uint64_t& state) {  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// One call of spread().
class Spreading {
 public:
  Spreading(std::span<const std::vector<uint32_t>> owners, std::span<const uint32_t> keys,
            std::span<const Candidate> servers, uint64_t random)
      : owners_(owners),
        keys_(keys),
        servers_(servers),
        random_(random | 1),
        taken_(servers.size()),
        left_(servers.size()) {}

  std::vector<uint32_t> run(std::span<const uint32_t> groups, uint32_t keys_per_server) {
    std::vector<uint32_t> result(groups.size(), kNoServer);
    std::vector<size_t> open;  // positions of groups with a choice
    uint64_t all_keys = 0;
    uint64_t servers = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
      find_eligible(groups[i]);
      all_keys += keys_[groups[i]];
      for (const uint32_t server : eligible_) {
        servers += left_[server] == 0 ? 1 : 0;
        left_[server] += keys_[groups[i]];
      }
      if (eligible_.size() > 1) open.push_back(i);
      if (eligible_.size() == 1) result[i] = take(eligible_[0], groups[i]);
    }
    limit_ = std::max<uint64_t>(keys_per_server, (all_keys + servers) / std::max(servers, kOne));
    const size_t first = open.empty() ? 0 : next_random(random_) % open.size();
    for (size_t n = 0; n < open.size(); ++n) {
      const size_t i = open[(first + n) % open.size()];
      find_eligible(groups[i]);
      for (const uint32_t server : eligible_) left_[server] -= keys_[groups[i]];
      result[i] = take(choose(keys_[groups[i]]), groups[i]);
    }
    return result;
  }

 private:
  static constexpr uint64_t kOne = 1;

  void find_eligible(uint32_t group) {
    eligible_.clear();
    uint8_t rank = Candidate::kNotAsked;
    for (const uint32_t server : owners_[group]) rank = std::min(rank, servers_[server].rank);
    if (rank == Candidate::kNotAsked) return;
    for (const uint32_t server : owners_[group]) {
      if (servers_[server].rank == rank) eligible_.push_back(server);
    }
  }

  uint32_t take(uint32_t server, uint32_t group) {
    taken_[server] += keys_[group];
    return server;
  }

  // Choose among the eligible servers: one that has keys of the call and room for these, else a
  // further one, else the one with the fewest keys.
  uint32_t choose(uint32_t keys) {
    uint32_t with_room = kNoServer;
    uint32_t fewest = eligible_[0];
    further_.clear();
    for (const uint32_t server : eligible_) {
      if (taken_[server] < taken_[fewest]) fewest = server;
      if (taken_[server] == 0) {
        further_.push_back(server);
      } else if (taken_[server] + keys <= limit_ &&
                 (with_room == kNoServer || taken_[server] < taken_[with_room])) {
        with_room = server;
      }
    }
    if (with_room != kNoServer) return with_room;
    return further_.empty() ? fewest : choose_further();
  }

  uint32_t choose_further() {
    if (further_.size() == 1) return further_[0];
    const size_t i = next_random(random_) % further_.size();
    const size_t step = 1 + next_random(random_) % (further_.size() - 1);
    const uint32_t one = further_[i];
    const uint32_t other = further_[(i + step) % further_.size()];
    if (is_busier(servers_[one], servers_[other])) return other;
    if (is_busier(servers_[other], servers_[one])) return one;
    return left_[other] > left_[one] ? other : one;  // it can take more of the keys that are left
  }

  const std::span<const std::vector<uint32_t>> owners_;
  const std::span<const uint32_t> keys_;
  const std::span<const Candidate> servers_;
  uint64_t random_;
  uint64_t limit_ = 0;
  std::vector<uint64_t> taken_;     // keys, by server
  std::vector<uint64_t> left_;      // keys without a server that it can take, by server
  std::vector<uint32_t> eligible_;  // servers of the current group
  std::vector<uint32_t> further_;   // of these, those without keys of the call
};

}  // namespace

bool is_busier(const Candidate& one, const Candidate& other) {
  const bool is_known = one.latency_ns != 0 && other.latency_ns != 0;
  if (!is_known) return one.in_flight > other.in_flight;
  const uint64_t load = (uint64_t{one.in_flight} + 1) * one.latency_ns;
  const uint64_t other_load = (uint64_t{other.in_flight} + 1) * other.latency_ns;
  if (one.in_flight == other.in_flight) return load / 2 > other_load;
  return load > other_load;
}

std::vector<uint32_t> spread(std::span<const std::vector<uint32_t>> owners,
                             std::span<const uint32_t> groups, std::span<const uint32_t> keys,
                             std::span<const Candidate> servers, uint32_t keys_per_server,
                             uint64_t random) {
  return Spreading(owners, keys, servers, random).run(groups, keys_per_server);
}

}  // namespace petps::client
