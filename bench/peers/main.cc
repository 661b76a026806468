// peers: the same pulls and writes from petps and from what users would pick instead. Rounds are
// interleaved: in each, every peer has one window after the other.
#include <algorithm>

#include "bench/common/arguments.h"
#include "bench/peers/contender.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {
namespace {

const std::vector<Candidate> kCandidates = {
    {"petps", true, open_petps_over_tcp},     {"redis", true, open_redis},
    {"memcached", true, open_memcached},      {"petps", false, open_petps_in_process},
    {"rocksdb", false, open_rocksdb},         {"lmdb", false, open_lmdb},
    {"absl_flat_hash_map", false, open_absl}, {"libcuckoo", false, open_libcuckoo},
};

void measure_pulls(const std::vector<std::unique_ptr<Contender>>& contenders,
                   const Setting& setting, bool over_tcp, Access access) {
  const std::vector<uint64_t> keys = draw_keys(access, setting);
  std::vector<std::vector<double>> rates(contenders.size());
  std::vector<uint64_t> at(contenders.size());
  for (size_t i = 0; i < contenders.size(); ++i) {
    at[i] = i * keys.size() / contenders.size();  // no one reads what another has just read
    contenders[i]->check(keys);
    contenders[i]->pull(keys, &at[i]);
    contenders[i]->forget_pulls();
  }
  for (uint32_t round = 0; round < setting.rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      rates[i].push_back(contenders[i]->pull(keys, &at[i]));
      contenders[i]->time_pulls(keys, &at[i]);
    }
  }
  for (size_t i = 1; i < contenders.size(); ++i) {
    Compared compared;
    summarise(rates[0], rates[i], &compared);
    compared.value_best = *std::max_element(rates[0].begin(), rates[0].end());
    compared.limit_best = *std::max_element(rates[i].begin(), rates[i].end());
    Line line(std::string(over_tcp ? "peers.tcp." : "peers.inprocess.") + contenders[i]->name());
    line.text("medium", "file")
        .text("access", access_name(access))
        .text("unit", "rows/s")
        .text("ratio_to", contenders[i]->name())
        .number("rows", static_cast<double>(setting.shape.rows));
    contenders[0]->print(line, "petps_");
    contenders[i]->print(line, "");
    line.compared(compared);
  }
}

void measure(const Setting& setting, bool over_tcp) {
  std::vector<std::unique_ptr<Contender>> contenders;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.over_tcp == over_tcp)
      contenders.push_back(std::make_unique<Contender>(candidate, setting));
  }
  Random random(23);
  for (uint32_t round = 0; round < setting.rounds; ++round) {
    for (const auto& contender : contenders) contender->update(random, round + 1);
  }
  for (const Access access : {Access::kUniform, Access::kZipf})
    measure_pulls(contenders, setting, over_tcp, access);
  measure_during_updates(contenders, setting, over_tcp);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  Setting setting;
  setting.shape.rows = arguments.number("rows", 2'000'000);
  setting.shape.row_bytes = 4 * arguments.small_number("dim", 128);
  setting.shape.request_keys = arguments.small_number("request_keys", 500);
  setting.shape.folder = arguments.text("folder", "build/bench/peers");
  setting.call_requests = arguments.small_number("call_requests", 8);
  setting.rounds = arguments.small_number("rounds", 5);
  setting.window = std::chrono::milliseconds(arguments.number("window_ms", 500));
  setting.latency_pulls = arguments.number("latency_pulls", 500);
  setting.update_batches = arguments.number("update_batches", 100);
  setting.update_rows_per_s = arguments.number("update_rows_per_s", 20'000);
  const std::string side = arguments.text("side", "tcp");
  const auto port = static_cast<uint16_t>(arguments.small_number("port", 0));
  arguments.finish();
  if (side == "serve") serve_petps(setting.shape, port);
  run_on(client_core());
  if (side == "restart") {
    measure_restart(setting);
  } else {
    measure(setting, side == "tcp");
  }
}
