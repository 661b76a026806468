// peers: the same pulls and writes from petps and from what users would pick instead. Rounds are
// interleaved: in each, every peer has one window after the other.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "bench/peers/peer.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

const std::vector<Candidate> kCandidates = {
    {"petps", true, open_petps_over_tcp},     {"redis", true, open_redis},
    {"memcached", true, open_memcached},      {"petps", false, open_petps_in_process},
    {"rocksdb", false, open_rocksdb},         {"lmdb", false, open_lmdb},
    {"absl_flat_hash_map", false, open_absl}, {"libcuckoo", false, open_libcuckoo},
};

struct Setting {
  PeerShape shape;
  uint32_t call_requests;  // pulled by one call, kInFlight of them at a time
  uint32_t rounds;
  std::chrono::milliseconds window;
  uint64_t latency_pulls;   // of a round, one at a time
  uint64_t update_batches;  // of a round
};

double seconds_since(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

// Return the seconds of processor time that a process has used; 0: this process.
double cpu_seconds(pid_t process) {
  const std::string name = process == 0 ? "self" : std::to_string(process);
  std::ifstream file("/proc/" + name + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int field = 0; field < 11; ++field) fields >> skipped;
  double user, system;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Return the bytes of memory that a process occupies, mapped files included; 0: this process.
double memory_bytes(pid_t process) {
  std::ifstream file("/proc/" + (process == 0 ? "self" : std::to_string(process)) + "/statm");
  double total, resident;
  file >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// One peer with its rows, and what was measured of it.
class Contender {
 public:
  Contender(const Candidate& candidate, const Setting& setting)
      : name_(candidate.name), setting_(setting), shape_(setting.shape) {
    shape_.folder += "/" + name_;
    std::filesystem::create_directories(shape_.folder);
    const double before = candidate.over_tcp ? 0 : memory_bytes(0);
    peer_ = candidate.open(shape_);
    rows_.resize(kWriteRows * shape_.row_bytes);
    const auto begun = Clock::now();
    std::vector<uint64_t> keys;
    for (uint64_t row = 0; row < shape_.rows; row += keys.size()) {
      keys.clear();
      while (keys.size() < kWriteRows && row + keys.size() < shape_.rows)
        keys.push_back(LoadedTable::key(row + keys.size()));
      write(keys, 0);
    }
    load_rate_ = static_cast<double>(shape_.rows) / seconds_since(begun);
    peer_->settle();
    memory_ = memory_bytes(peer_->server()) - before;
    disk_ = static_cast<double>(bytes_below(shape_.folder));
    out_.resize(uint64_t{setting.call_requests} * shape_.request_keys * shape_.row_bytes);
  }

  const std::string& name() const { return name_; }

  // Pull for a window, from position `at` of the keys on. Return the rows per second.
  double pull(const std::vector<uint64_t>& keys, uint64_t* at) {
    const uint64_t call = uint64_t{setting_.call_requests} * shape_.request_keys;
    const double own_before = cpu_seconds(0);
    const double server_before = cpu_seconds(peer_->server());
    const auto begun = Clock::now();
    uint64_t rows = 0;
    for (; Clock::now() - begun < setting_.window; rows += call)
      peer_->pull(next(keys, at, call), out_.data());
    const double rate = static_cast<double>(rows) / seconds_since(begun);
    pulled_ += static_cast<double>(rows);
    client_cpu_ += cpu_seconds(0) - own_before;
    if (peer_->server() != 0) server_cpu_ += cpu_seconds(peer_->server()) - server_before;
    return rate;
  }

  void time_pulls(const std::vector<uint64_t>& keys, uint64_t* at) {
    for (uint64_t i = 0; i < setting_.latency_pulls; ++i) {
      const auto request = next(keys, at, shape_.request_keys);
      const auto begun = Clock::now();
      peer_->pull(request, out_.data());
      latencies_us_.push_back(seconds_since(begun) * 1e6);
    }
  }

  void update(Random& random, uint64_t turn) {
    std::vector<uint64_t> keys(kWriteRows);
    double seconds = 0;
    for (uint64_t batch = 0; batch < setting_.update_batches; ++batch) {
      for (uint64_t& key : keys) key = LoadedTable::key(random.below(shape_.rows));
      seconds += write(keys, turn);
    }
    update_rates_.push_back(static_cast<double>(setting_.update_batches * kWriteRows) / seconds);
  }

  // Exit the program unless the peer returns the row of each key.
  void check(const std::vector<uint64_t>& keys) {
    uint64_t at = 0;
    const auto request = next(keys, &at, shape_.request_keys);
    peer_->pull(request, out_.data());
    for (size_t i = 0; i < request.size(); ++i) {
      if (!LoadedTable::whole(request[i], out_.data() + i * shape_.row_bytes, shape_.row_bytes))
        fail(name_ + " returned a wrong row");
    }
  }

  // Add the figures to a line, and forget those of pulls.
  void print(Line& line, const std::string& prefix) {
    std::sort(latencies_us_.begin(), latencies_us_.end());
    const double raw = static_cast<double>(shape_.rows * shape_.row_bytes);
    const auto number = [&](const char* field, double value) {
      line.number((prefix + field).c_str(), value);
    };
    number("p50_us", percentile(latencies_us_, 0.5));
    number("p99_us", percentile(latencies_us_, 0.99));
    number("client_cpu_s_per_million_rows", client_cpu_ / pulled_ * 1e6);
    number("server_cpu_s_per_million_rows", server_cpu_ / pulled_ * 1e6);
    number("load_rows_per_s", load_rate_);
    number("update_rows_per_s", median(update_rates_));
    number("memory_over_rows", memory_ / raw);
    number("disk_over_rows", disk_ / raw);
  }
  void forget_pulls() {
    latencies_us_.clear();
    client_cpu_ = server_cpu_ = pulled_ = 0;
  }

 private:
  static std::span<const uint64_t> next(const std::vector<uint64_t>& keys, uint64_t* at,
                                        uint64_t count) {
    if (*at + count > keys.size()) *at = 0;
    const std::span<const uint64_t> part(keys.data() + *at, count);
    *at += count;
    return part;
  }

  // Return the seconds that the peer needed.
  double write(const std::vector<uint64_t>& keys, uint64_t turn) {
    for (size_t i = 0; i < keys.size(); ++i)
      LoadedTable::fill(keys[i], turn, rows_.data() + i * shape_.row_bytes, shape_.row_bytes);
    const auto begun = Clock::now();
    peer_->write(keys, rows_.data());
    return seconds_since(begun);
  }

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

std::vector<uint64_t> draw_keys(Access access, const Setting& setting) {
  const uint64_t call = uint64_t{setting.call_requests} * setting.shape.request_keys;
  std::vector<uint64_t> keys;
  for (const uint32_t row : row_stream(access, setting.shape.rows, 64 * call, 3))
    keys.push_back(LoadedTable::key(row));
  return keys;
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
  for (const Access access : {Access::kUniform, Access::kZipf}) {
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
  const bool over_tcp = arguments.text("side", "tcp") == "tcp";
  arguments.finish();
  run_on(client_core());
  measure(setting, over_tcp);
}
