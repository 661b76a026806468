// pull.tcp: compares 500-key pulls over loopback TCP from a petps server in another process with
// pulls from a server that gathers the same rows by row number and sends them behind a 4-byte
// length.
//
// pull.tls (with --tls=1): the same over TLS. The limit encrypts with the same library and cipher.
// tls.handshakes: new connections with their handshakes, compared with those of OpenSSL alone.
//
// pull.p99_during_apply: compares the latency of pulls that are sent on a schedule while the server
// applies batches to the same table with that of the same pulls while it applies nothing.
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/common/random.h"
#include "bench/pull/loopback.h"
#include "bench/pull/tcp_limit.h"
#include "bench/pull/tcp_processes.h"
#include "petps_client/client.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Setting {
  TableShape shape;
  ApplyPace pace;
  Plan plan;
  uint32_t request_keys = 500;
  uint32_t in_flight = 2;  // over all connections
  uint32_t connections_max = 2;
  uint32_t call_requests = 0;  // requests per call of the client; in_flight of them at a time
  std::chrono::milliseconds window{0};
  std::chrono::milliseconds apply_window{0};
  uint32_t apply_windows = 0;  // idle windows, and as many while applying
  uint32_t load_percent = 0;   // of the peak rate, sent on a schedule
  uint32_t senders = 0;
  TlsPaths tls;  // empty: plain text

  std::string name() const { return tls.empty() ? "pull.tcp" : "pull.tls"; }
};

// Keys and row numbers of the same rows, drawn before the clock starts. The two sides begin at
// different places, so that neither finds in the caches what the other has just read.
struct Stream {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> numbers;
};

Stream make_stream(Access access, uint64_t rows, uint64_t count) {
  Stream stream;
  stream.numbers = row_stream(access, rows, count, 1);
  for (const uint32_t number : stream.numbers) stream.keys.push_back(LoadedTable::key(number));
  return stream;
}

void check_rows(const uint64_t* keys, uint64_t n, const std::byte* rows, uint32_t row_bytes) {
  for (uint64_t i = 0; i < n; ++i) {
    if (!LoadedTable::whole(keys[i], rows + i * row_bytes, row_bytes)) fail("a row is torn");
  }
}

std::unique_ptr<client::Client> connect(const Setting& setting, uint32_t port,
                                        uint32_t requests_in_flight) {
  client::Options options;
  options.name = "bench";
  options.deadline_ms = 60'000;
  options.keys_per_request = setting.request_keys;
  options.requests_in_flight = requests_in_flight;
  options.tls.ca = setting.tls.certificate;
  const std::string scheme = setting.tls.empty() ? "petps://" : "petps+tls://";
  return value_of(client::Client::connect(scheme + "127.0.0.1:" + std::to_string(port), options));
}

// The work of one thread of one side. Both sides cycle through an output array of the same size.
class Lane {
 public:
  Lane(const Setting& setting, const Stream& stream, uint32_t in_flight, uint64_t from)
      : setting_(setting),
        stream_(stream),
        in_flight_(in_flight),
        request_bytes_(uint64_t{setting.request_keys} * setting.shape.dim * 4),
        // A call drains its pipeline at the end. With one request in flight there is no pipeline.
        call_requests_(in_flight == 1 ? 1 : setting.call_requests),
        out_(uint64_t{call_requests_} * setting.request_keys * setting.shape.dim),
        at_(from / call_keys() * call_keys()) {}

  uint64_t pull(client::Client& client, Clock::time_point until) {
    uint64_t rows = 0;
    for (; Clock::now() < until; rows += call_keys()) pull_once(client);
    return rows;
  }

  void pull_once(client::Client& client) {
    client::PullOptions options;
    options.dedup = client::Dedup::kNever;  // the limit sends repeated rows too
    const auto report = value_of(client.pull("rows", {keys(), call_keys()}, out_, {}, options));
    if (report.found != call_keys()) fail("a loaded key is missing");
    at_ += call_keys();
  }

  uint64_t gather(LimitClient& client, Clock::time_point until) {
    uint64_t sent = 0;
    uint64_t received = 0;
    const auto ask = [&] {
      client.ask(numbers());
      at_ += setting_.request_keys;
      ++sent;
    };
    while (sent < in_flight_) ask();
    while (received < sent) {
      client.take(out() + received % call_requests_ * request_bytes_);
      ++received;
      if (Clock::now() < until) ask();
    }
    return received * setting_.request_keys;
  }

  uint64_t call_keys() const { return uint64_t{call_requests_} * setting_.request_keys; }
  const uint64_t* keys() const { return stream_.keys.data() + at_ % end(); }
  std::byte* out() { return reinterpret_cast<std::byte*>(out_.data()); }

 private:
  const uint32_t* numbers() const { return stream_.numbers.data() + at_ % end(); }
  uint64_t end() const { return stream_.keys.size() / call_keys() * call_keys(); }

  const Setting& setting_;
  const Stream& stream_;
  uint32_t in_flight_;
  uint64_t request_bytes_;
  uint32_t call_requests_;
  std::vector<float> out_;
  uint64_t at_;
};

// Run `work(lane number)` on one thread per connection. Return the sum of the results.
template <typename Work>
uint64_t on_each(uint32_t connections, const Work& work) {
  std::atomic<uint64_t> sum{0};
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < connections; ++i) {
    others.emplace_back([&, i] { sum += work(i); });
  }
  sum += work(0);
  for (std::thread& other : others) other.join();
  return sum;
}

class Sides {
 public:
  Sides(const Setting& setting, Control& control, const Stream& stream, uint32_t connections)
      : setting_(setting), connections_(connections), limit_port_(control.limit_port) {
    const uint32_t in_flight = std::max(setting.in_flight / connections, 1u);
    client_ = connect(setting, control.petps_port, in_flight);
    const uint64_t part = stream.keys.size() / (2 * connections);
    for (uint32_t i = 0; i < connections; ++i) {
      ours_.push_back(std::make_unique<Lane>(setting, stream, in_flight, 2 * i * part));
      theirs_.push_back(std::make_unique<Lane>(setting, stream, in_flight, (2 * i + 1) * part));
    }
  }

  uint64_t pull() {
    const auto until = Clock::now() + setting_.window;
    return on_each(connections_, [&](uint32_t i) { return ours_[i]->pull(*client_, until); });
  }
  uint64_t gather() {
    const auto until = Clock::now() + setting_.window;
    return on_each(connections_,
                   [&](uint32_t i) { return theirs_[i]->gather(*limits_[i], until); });
  }

  void set_limit(const LimitSetting& limit) {
    limits_.clear();
    for (uint32_t i = 0; i < connections_; ++i) {
      limits_.push_back(std::make_unique<LimitClient>(static_cast<uint16_t>(limit_port_), limit,
                                                      setting_.request_keys, setting_.shape.dim * 4,
                                                      setting_.tls));
    }
  }

  // Exit the program unless both sides return untorn rows of the requested keys.
  void check() {
    const uint32_t row_bytes = setting_.shape.dim * 4;
    Lane& ours = *ours_[0];
    const uint64_t* keys = ours.keys();
    ours.pull_once(*client_);
    check_rows(keys, ours.call_keys(), ours.out(), row_bytes);
    Lane& theirs = *theirs_[0];
    keys = theirs.keys();
    theirs.gather(*limits_[0], Clock::now());
    check_rows(keys, setting_.request_keys, theirs.out(), row_bytes);
  }

 private:
  const Setting& setting_;
  uint32_t connections_;
  uint32_t limit_port_;
  std::unique_ptr<client::Client> client_;
  std::vector<std::unique_ptr<LimitClient>> limits_;
  std::vector<std::unique_ptr<Lane>> ours_;
  std::vector<std::unique_ptr<Lane>> theirs_;
};

LimitSetting tune_limit(const Setting& setting, Sides& sides) {
  LimitSetting best;
  double best_rate_so_far = 0;
  for (const uint32_t send_rows : {32u, 64u, 128u, 256u, setting.request_keys}) {
    for (const bool wait_all : {true, false}) {
      const LimitSetting candidate{send_rows, best.ahead, wait_all};
      sides.set_limit(candidate);
      const double rate = best_rate(setting.plan.windows, [&] { return sides.gather(); });
      if (rate > best_rate_so_far) best_rate_so_far = rate, best = candidate;
    }
  }
  for (const uint32_t ahead : {4u, 12u, 16u, 24u}) {
    const LimitSetting candidate{best.send_rows, ahead, best.wait_all};
    sides.set_limit(candidate);
    const double rate = best_rate(setting.plan.windows, [&] { return sides.gather(); });
    if (rate > best_rate_so_far) best_rate_so_far = rate, best.ahead = ahead;
  }
  sides.set_limit(best);
  return best;
}

Line& describe(Line& line, const Setting& setting) {
  const double trip = line_round_trip_ns();
  return line.number("rows", static_cast<double>(setting.shape.rows))
      .number("request_keys", setting.request_keys)
      .text("scheduling", scheduling())
      .text("cores", distance_name(trip))
      .number("line_round_trip_ns", trip);
}

// Like compare() of measure.h, but the rate of a side in a round is the median of its windows.
// Windows that lost their core cannot be repeated: a thread that waits for its peer cannot tell
// whether it lost its core. And once a second the kernel gives the cores to threads that the
// bench kept waiting.
Compared compare_medians(const Plan& plan, const std::function<uint64_t()>& petps,
                         const std::function<uint64_t()>& limit) {
  const auto rate = [](const std::function<uint64_t()>& side) {
    const auto start = Clock::now();
    const uint64_t rows = side();
    return static_cast<double>(rows) / std::chrono::duration<double>(Clock::now() - start).count();
  };
  Compared result;
  std::vector<double> values, limits;
  rate(petps);
  rate(limit);
  for (uint32_t round = 0; round < plan.rounds; ++round) {
    std::vector<double> ours, theirs;
    for (uint32_t window = 0; window < plan.windows; ++window) {
      ours.push_back(rate(petps));
      theirs.push_back(rate(limit));
      result.value_best = std::max(result.value_best, ours.back());
      result.limit_best = std::max(result.limit_best, theirs.back());
    }
    values.push_back(median(ours));
    limits.push_back(median(theirs));
  }
  summarise(values, limits, &result);
  return result;
}

// Measure and print pull.tcp. Return the rows per second of petps.
double measure_rate(const Setting& setting, Control& control, Access access, const Stream& stream,
                    uint32_t connections) {
  Sides sides(setting, control, stream, connections);
  const LimitSetting limit = tune_limit(setting, sides);
  sides.check();
  const Compared compared = compare_medians(
      setting.plan, [&] { return sides.pull(); }, [&] { return sides.gather(); });
  Line line(setting.name(), setting.shape.medium);
  line.text("access", access_name(access))
      .text("unit", "rows/s")
      .text("ratio_to", setting.tls.empty()
                            ? "loopback server of rows by row number behind a 4-byte length"
                            : "the same server of rows by row number, with OpenSSL")
      .number("connections", connections)
      .number("in_flight", setting.in_flight)
      .number("limit_send_rows", limit.send_rows)
      .number("limit_ahead", limit.ahead)
      .text("limit_receive", limit.wait_all ? "whole replies" : "what is there");
  describe(line, setting).compared(compared);
  return compared.value;
}

// Send a pull every `gap` and return the latencies in microseconds. A latency begins when the
// pull was due, so it includes the time that the pull waited for a free sender.
std::vector<double> send_on_schedule(const Setting& setting, client::Client& client,
                                     const Stream& stream, std::chrono::nanoseconds gap,
                                     uint64_t first) {
  const auto count = static_cast<uint64_t>(std::chrono::nanoseconds(setting.apply_window) / gap);
  const uint64_t end = stream.keys.size() / setting.request_keys;
  std::vector<double> latencies(count);
  std::atomic<uint64_t> next{0};
  const auto start = Clock::now() + std::chrono::milliseconds(1);
  on_each(setting.senders, [&](uint32_t) -> uint64_t {
    prctl(PR_SET_TIMERSLACK, 1);
    std::vector<float> out(uint64_t{setting.request_keys} * setting.shape.dim);
    for (uint64_t i = next++; i < count; i = next++) {
      const auto due = start + gap * i;
      std::this_thread::sleep_until(due);
      const uint64_t* keys = stream.keys.data() + (first + i) % end * setting.request_keys;
      const auto report = value_of(client.pull("rows", {keys, setting.request_keys}, out));
      latencies[i] = std::chrono::duration<double, std::micro>(Clock::now() - due).count();
      if (report.found != setting.request_keys) fail("a loaded key is missing");
      if (i % 64 == 0) {
        check_rows(keys, setting.request_keys, reinterpret_cast<const std::byte*>(out.data()),
                   setting.shape.dim * 4);
      }
    }
    return 0;
  });
  return latencies;
}

void measure_latency(const Setting& setting, Control& control, Access access, const Stream& stream,
                     double peak_rows) {
  const auto client = connect(setting, control.petps_port, 1);
  const double pulls_per_s = peak_rows / setting.request_keys * setting.load_percent / 100;
  const std::chrono::nanoseconds gap(static_cast<int64_t>(1e9 / pulls_per_s));
  std::vector<double> idle, during, idle_middle, during_middle, ratios, apply_rate;
  uint64_t first = 0;
  const auto window = [&](bool apply, std::vector<double>& p99, std::vector<double>& middle) {
    control.apply = apply;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const uint64_t applied = control.applied_rows;
    const auto start = Clock::now();
    std::vector<double> latencies = send_on_schedule(setting, *client, stream, gap, first);
    const std::chrono::duration<double> passed = Clock::now() - start;
    if (apply) {
      apply_rate.push_back(static_cast<double>(control.applied_rows - applied) / passed.count());
    }
    control.apply = false;
    first += latencies.size();
    std::sort(latencies.begin(), latencies.end());
    p99.push_back(percentile(latencies, 0.99));
    middle.push_back(percentile(latencies, 0.5));
  };
  const uint64_t applied = control.applied_rows;
  const uint64_t apply_ns = control.apply_ns;
  for (uint32_t i = 0; i < setting.apply_windows; ++i) {
    window(false, idle, idle_middle);
    window(true, during, during_middle);
    ratios.push_back(during.back() / idle.back());
  }
  const auto batches = static_cast<double>(control.applied_rows - applied) /
                       static_cast<double>(setting.pace.batch_rows);
  Line line("pull.p99_during_apply", setting.shape.medium);
  line.text("access", access_name(access))
      .text("unit", "us")
      .text("ratio_to", "p99 while nothing is applied")
      .number("senders", setting.senders)
      .number("pulls_per_s", pulls_per_s)
      .number("apply_rows_per_s", median(apply_rate))
      .number("apply_batch_rows", static_cast<double>(setting.pace.batch_rows))
      .number("apply_batch_us", static_cast<double>(control.apply_ns - apply_ns) / 1e3 / batches)
      .number("p50", median(during_middle))
      .number("limit_p50", median(idle_middle));
  describe(line, setting)
      .number("value", median(during))
      .number("limit", median(idle))
      .number("ratio", median(during) / median(idle))
      .number("ratio_low", *std::min_element(ratios.begin(), ratios.end()))
      .number("ratio_high", *std::max_element(ratios.begin(), ratios.end()));
}

double cpu_seconds(pid_t process) {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9;
}

// Connect and shake hands for a window, by OpenSSL on the client's side. Return the number.
uint64_t shake_hands(const Setting& setting, uint32_t port) {
  uint64_t count = 0;
  for (const auto until = Clock::now() + setting.window; Clock::now() < until; ++count) {
    Channel channel(connect_to_loopback(static_cast<uint16_t>(port)));
    if (!channel.secure(setting.tls, false)) fail("a handshake failed");
  }
  return count;
}

void measure_handshakes(const Setting& setting, ServerProcesses& servers) {
  uint64_t ours = 0;
  uint64_t theirs = 0;
  double our_cpu = -cpu_seconds(servers.petps());
  double their_cpu = -cpu_seconds(servers.limit());
  const Compared compared = compare_medians(
      setting.plan,
      [&] {
        const uint64_t count = shake_hands(setting, servers.control().petps_port);
        ours += count;
        return count;
      },
      [&] {
        const uint64_t count = shake_hands(setting, servers.control().limit_port);
        theirs += count;
        return count;
      });
  our_cpu += cpu_seconds(servers.petps());
  their_cpu += cpu_seconds(servers.limit());
  Line line("tls.handshakes", setting.shape.medium);
  line.text("unit", "handshakes/s")
      .text("ratio_to", "handshakes of OpenSSL, with a thread for each connection")
      .number("server_cpu_us", 1e6 * our_cpu / static_cast<double>(ours))
      .number("limit_cpu_us", 1e6 * their_cpu / static_cast<double>(theirs));
  describe(line, setting).compared(compared);
}

Setting read_setting(Arguments& arguments) {
  Setting setting;
  setting.shape.rows = arguments.number("rows", 2'000'000);
  setting.shape.dim = arguments.small_number("dim", 128);
  setting.shape.medium = arguments.text("medium", "file");
  setting.shape.folder = arguments.text("folder", setting.shape.folder);
  setting.request_keys = arguments.small_number("request_keys", setting.request_keys);
  setting.in_flight = arguments.small_number("in_flight", setting.in_flight);
  setting.connections_max = arguments.small_number("connections_max", setting.connections_max);
  setting.call_requests = arguments.small_number("call_requests", 32);
  // A window is shorter than changes in the machine's other load, and longer than a dozen calls.
  setting.window = std::chrono::milliseconds(arguments.number("window_ms", 24));
  setting.plan.rounds = arguments.small_number("rounds", 5);
  setting.plan.windows = arguments.small_number("windows", 21);
  setting.apply_window = std::chrono::milliseconds(arguments.number("apply_window_ms", 1500));
  setting.apply_windows = arguments.small_number("apply_windows", 5);
  setting.load_percent = arguments.small_number("load_percent", 25);
  setting.senders = arguments.small_number("senders", 2);
  setting.pace.batch_rows = arguments.number("apply_batch", setting.pace.batch_rows);
  setting.pace.rows_per_s = arguments.number("apply_rows_per_s", setting.pace.rows_per_s);
  return setting;
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  Setting setting = read_setting(arguments);
  const bool has_tls = arguments.number("tls", 0) != 0;
  arguments.finish();
  if (has_tls) setting.tls = make_certificate(setting.shape.folder);
  ServerProcesses servers(setting.shape, setting.pace, setting.tls);
  const uint64_t call_keys = uint64_t{setting.call_requests} * setting.request_keys;
  const uint64_t draws =
      std::max(std::min<uint64_t>(4'000'000, 4 * setting.shape.rows), 8 * call_keys);
  const Stream uniform = make_stream(Access::kUniform, setting.shape.rows, draws);
  const Stream zipf = make_stream(Access::kZipf, setting.shape.rows, draws);
  servers.wait_until_serving();
  run_before_others();
  run_on(client_core());
  double peak = 0;
  for (uint32_t connections = 1; connections <= setting.connections_max; ++connections) {
    const double rate =
        measure_rate(setting, servers.control(), Access::kUniform, uniform, connections);
    peak = std::max(peak, rate);
    measure_rate(setting, servers.control(), Access::kZipf, zipf, connections);
  }
  if (has_tls) {
    measure_handshakes(setting, servers);
    return 0;
  }
  // There are three kinds of threads now, and none is busy all the time. Let the kernel choose
  // their cores, as it does for users.
  run_on(-1);
  run_process_on(servers.petps(), -1);
  if (setting.apply_windows == 0) return 0;
  measure_latency(setting, servers.control(), Access::kUniform, uniform, peak);
}
