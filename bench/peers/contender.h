// One peer with its rows, and what is measured of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "bench/peers/peer.h"

namespace petps::bench {

struct Setting {
  PeerShape shape;
  uint32_t call_requests;  // pulled by one call, kInFlight of them at a time
  uint32_t rounds;
  std::chrono::milliseconds window;
  uint64_t latency_pulls;      // of a round, one at a time
  uint64_t update_batches;     // of a round
  uint64_t update_rows_per_s;  // of a second client, while pulls are measured
};

class Contender {
 public:
  // Open the peer in a folder of its own and load its rows.
  Contender(const Candidate& candidate, const Setting& setting);

  const std::string& name() const { return name_; }
  bool writes_beside_pulls() const { return peer_->writes_beside_pulls(); }

  // Pull for a window, from position `at` of the keys on. Return the rows per second.
  double pull(const std::vector<uint64_t>& keys, uint64_t* at);
  // Pull one request. Return the microseconds.
  double time_pull(const std::vector<uint64_t>& keys, uint64_t* at);
  // Measure the latency of setting.latency_pulls pulls, one at a time, for print().
  void time_pulls(const std::vector<uint64_t>& keys, uint64_t* at);
  // Measure the rate of setting.update_batches writes, for print(). It begins with clean pages.
  void update(Random& random, uint64_t turn);
  // Write kWriteRows random rows with the content of `turn`. Return the seconds that the peer
  // needed.
  double update_batch(Random& random, uint64_t turn);
  // Exit the program unless the peer returns the row of each key.
  void check(const std::vector<uint64_t>& keys);

  // Add the figures to a line.
  void print(Line& line, const std::string& prefix);
  void forget_pulls();

 private:
  static std::span<const uint64_t> next(const std::vector<uint64_t>& keys, uint64_t* at,
                                        uint64_t count);
  double write(const std::vector<uint64_t>& keys, uint64_t turn);

  std::string name_;
  const Setting& setting_;
  PeerShape shape_;
  std::unique_ptr<Peer> peer_;
  std::vector<std::byte> rows_;
  std::vector<std::byte> out_;
  double load_rate_ = 0;
  double memory_ = 0;
  double disk_ = 0;
  double pulled_ = 0;
  double client_cpu_ = 0;
  double server_cpu_ = 0;
  std::vector<double> latencies_us_;
  std::vector<double> update_rates_;
};

// Draw the keys that the contenders pull, before the clock starts.
std::vector<uint64_t> draw_keys(Access access, const Setting& setting);

// Measure pulls while another client updates rows at a fixed rate: peers.during_updates.* and
// peers.p99_during_updates.*. The first contender is petps.
void measure_during_updates(const std::vector<std::unique_ptr<Contender>>& contenders,
                            const Setting& setting, bool over_tcp);

// Measure the time from a kill to the first correct pull: peers.restart.*. The caller must have no
// other threads.
void measure_restart(const Setting& setting);

}  // namespace petps::bench
