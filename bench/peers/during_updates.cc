// Pulls while another client updates random rows at a fixed rate, which is the same for all peers.
#include <algorithm>
#include <atomic>
#include <thread>

#include "bench/common/loaded_table.h"
#include "bench/peers/contender.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Updates rows of a peer from a second thread.
class Updates {
 public:
  // `core`: where the thread runs.
  Updates(Contender& contender, uint64_t rows_per_s, int core)
      : begun_(Clock::now()), thread_([this, &contender, rows_per_s, core] {
          run_on(core);
          run(contender, rows_per_s);
        }) {}
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  // Stop, and return the rows per second that were written. Call it once.
  double stop() {
    is_stopped_ = true;
    thread_.join();
    const std::chrono::duration<double> taken = Clock::now() - begun_;
    return static_cast<double>(rows_) / taken.count();
  }

 private:
  void run(Contender& contender, uint64_t rows_per_s) {
    const auto gap = std::chrono::nanoseconds(kWriteRows * 1'000'000'000 / rows_per_s);
    Random random(29);
    for (auto due = begun_; !is_stopped_; std::this_thread::sleep_until(due += gap)) {
      contender.update_batch(random, ++turn_);
      rows_ += kWriteRows;
    }
  }

  Clock::time_point begun_;
  std::atomic<bool> is_stopped_{false};
  uint64_t rows_ = 0;
  uint64_t turn_ = 1000;  // above those of the rounds of updates alone
  std::thread thread_;    // last: it uses the others
};

// What was measured of one contender, by round.
struct Rounds {
  uint64_t at = 0;  // position in the keys
  std::vector<double> rates;
  std::vector<double> p50_us;
  std::vector<double> p99_us;
  std::vector<double> update_rates;
};

void run_round(Contender& contender, const std::vector<uint64_t>& keys, const Setting& setting,
               int core, Rounds* rounds) {
  Updates updates(contender, setting.update_rows_per_s, core);
  rounds->rates.push_back(contender.pull(keys, &rounds->at));
  std::vector<double> latencies;
  const auto end = Clock::now() + setting.window;
  do {
    latencies.push_back(contender.time_pull(keys, &rounds->at));
    if (latencies.size() % 64 == 1) contender.check(keys);
  } while (Clock::now() < end);
  rounds->update_rates.push_back(updates.stop());
  std::sort(latencies.begin(), latencies.end());
  rounds->p50_us.push_back(percentile(latencies, 0.5));
  rounds->p99_us.push_back(percentile(latencies, 0.99));
}

void print(const std::string& name, const std::string& peer, const char* unit,
           const Setting& setting, const Rounds& ours, const Rounds& theirs,
           std::vector<double> Rounds::*figure) {
  Compared compared;
  summarise(ours.*figure, theirs.*figure, &compared);
  Line(name + peer)
      .text("medium", "file")
      .text("access", access_name(Access::kUniform))
      .text("unit", unit)
      .text("ratio_to", peer)
      .number("rows", static_cast<double>(setting.shape.rows))
      .number("update_rows_per_s_wanted", static_cast<double>(setting.update_rows_per_s))
      .number("petps_update_rows_per_s", median(ours.update_rates))
      .number("update_rows_per_s", median(theirs.update_rates))
      .number("petps_p50_us", median(ours.p50_us))
      .number("p50_us", median(theirs.p50_us))
      .number("value", compared.value)
      .number("limit", compared.limit)
      .number("ratio", compared.ratio)
      .number("ratio_low", compared.ratio_low)
      .number("ratio_high", compared.ratio_high);
}

}  // namespace

void measure_during_updates(const std::vector<std::unique_ptr<Contender>>& contenders,
                            const Setting& setting, bool over_tcp) {
  const std::vector<uint64_t> keys = draw_keys(Access::kUniform, setting);
  const int core = over_tcp ? client_core() : server_core();
  std::vector<Rounds> rounds(contenders.size());
  for (uint32_t round = 0; round < setting.rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      if (round == 0) rounds[i].at = i * keys.size() / contenders.size();
      if (contenders[i]->writes_beside_pulls())
        run_round(*contenders[i], keys, setting, core, &rounds[i]);
    }
  }
  for (size_t i = 1; i < contenders.size(); ++i) {
    if (!contenders[i]->writes_beside_pulls()) continue;
    const std::string& name = contenders[i]->name();
    print("peers.during_updates.", name, "rows/s", setting, rounds[0], rounds[i], &Rounds::rates);
    print("peers.p99_during_updates.", name, "us", setting, rounds[0], rounds[i], &Rounds::p99_us);
  }
}

}  // namespace petps::bench
