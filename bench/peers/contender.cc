#include "bench/peers/contender.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench/common/loaded_table.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

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

}  // namespace

Contender::Contender(const Candidate& candidate, const Setting& setting)
    : name_(candidate.name), setting_(setting), shape_(setting.shape) {
  shape_.folder += "/" + name_;
  std::filesystem::create_directories(shape_.folder);
  const double before = candidate.over_tcp ? 0 : memory_bytes(0);
  // The peer's own threads run where a server would, beside the pulls.
  if (!candidate.over_tcp) run_on(server_core());
  peer_ = candidate.open(shape_);
  run_on(client_core());
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

double Contender::pull(const std::vector<uint64_t>& keys, uint64_t* at) {
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

double Contender::time_pull(const std::vector<uint64_t>& keys, uint64_t* at) {
  const auto request = next(keys, at, shape_.request_keys);
  const auto begun = Clock::now();
  peer_->pull(request, out_.data());
  return seconds_since(begun) * 1e6;
}

void Contender::time_pulls(const std::vector<uint64_t>& keys, uint64_t* at) {
  for (uint64_t i = 0; i < setting_.latency_pulls; ++i)
    latencies_us_.push_back(time_pull(keys, at));
}

double Contender::update_batch(Random& random, uint64_t turn) {
  std::vector<uint64_t> keys(kWriteRows);
  for (uint64_t& key : keys) key = LoadedTable::key(random.below(shape_.rows));
  return write(keys, turn);
}

void Contender::update(Random& random, uint64_t turn) {
  clean_pages(shape_.folder);
  double seconds = 0;
  for (uint64_t batch = 0; batch < setting_.update_batches; ++batch)
    seconds += update_batch(random, turn);
  update_rates_.push_back(static_cast<double>(setting_.update_batches * kWriteRows) / seconds);
}

void Contender::check(const std::vector<uint64_t>& keys) {
  uint64_t at = 0;
  const auto request = next(keys, &at, shape_.request_keys);
  peer_->pull(request, out_.data());
  for (size_t i = 0; i < request.size(); ++i) {
    if (!LoadedTable::whole(request[i], out_.data() + i * shape_.row_bytes, shape_.row_bytes))
      fail(name_ + " returned a wrong row");
  }
}

void Contender::print(Line& line, const std::string& prefix) {
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

void Contender::forget_pulls() {
  latencies_us_.clear();
  client_cpu_ = server_cpu_ = pulled_ = 0;
}

std::span<const uint64_t> Contender::next(const std::vector<uint64_t>& keys, uint64_t* at,
                                          uint64_t count) {
  if (*at + count > keys.size()) *at = 0;
  const std::span<const uint64_t> part(keys.data() + *at, count);
  *at += count;
  return part;
}

// Return the seconds that the peer needed.
double Contender::write(const std::vector<uint64_t>& keys, uint64_t turn) {
  for (size_t i = 0; i < keys.size(); ++i)
    LoadedTable::fill(keys[i], turn, rows_.data() + i * shape_.row_bytes, shape_.row_bytes);
  const auto begun = Clock::now();
  peer_->write(keys, rows_.data());
  return seconds_since(begun);
}

std::vector<uint64_t> draw_keys(Access access, const Setting& setting) {
  const uint64_t call = uint64_t{setting.call_requests} * setting.shape.request_keys;
  std::vector<uint64_t> keys;
  for (const uint32_t row : row_stream(access, setting.shape.rows, 64 * call, 3))
    keys.push_back(LoadedTable::key(row));
  return keys;
}

}  // namespace petps::bench
