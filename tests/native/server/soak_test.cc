// Pulls under full-speed updates and reclaim, over tcp in each gather mode, and over rdma if a
// device exists. A row shows its key and version, so the readers detect a torn, foreign, missing or
// outdated row. Under ASan freed slots are poisoned, so a late read terminates the program. With
// pins disabled the same run must detect the fault.
// PETPS_SOAK_SECONDS sets the seconds per mode; `make soak-pull` sets ten minutes. The lab also
// runs this on persistent memory (PETPS_TEST_POOL: a path or a device) and between two networks,
// where zero-copy is real (PETPS_TEST_HOST: the server's address; PETPS_TEST_CLIENT_NETWORK: the
// clients' network, a file of /run/netns).
// Does not cover: crashes (tests/crash).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "base/clock.h"
#include "rdma_client.h"
#include "server/server.h"
#include "tests/seed.h"
#include "transport/gather_choice.h"

#if defined(__SANITIZE_ADDRESS__)
#define PETPS_ASAN 1
#else
#define PETPS_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__)
#define PETPS_TSAN 1
#else
#define PETPS_TSAN 0
#endif

namespace petps::server {
namespace {

using transport::GatherMode;

// Return the value of the environment variable, or null if it is not set.
const char* pool_path() { return std::getenv("PETPS_TEST_POOL"); }
const char* client_network() { return std::getenv("PETPS_TEST_CLIENT_NETWORK"); }
std::string host() {
  const char* address = std::getenv("PETPS_TEST_HOST");
  return address != nullptr ? address : "127.0.0.1";
}
// Return the first RDMA device of this machine, or null.
std::shared_ptr<transport::Verbs> rdma_device() {
  static const std::shared_ptr<transport::Verbs> device = [] {
    auto opened = transport::open_verbs("");
    return opened.ok() ? std::shared_ptr<transport::Verbs>(std::move(opened.value())) : nullptr;
  }();
  return device;
}

// The way in which rows travel to the client.
struct Way {
  GatherMode gather = GatherMode::kCopy;
  bool rdma = false;
};
std::string name_of(const Way& way) {
  return way.rdma ? "rdma_device" : transport::gather_mode_name(way.gather);
}
void PrintTo(const Way& way, std::ostream* out) { *out << name_of(way); }
std::vector<Way> ways() {
  std::vector<Way> ways;
  for (const GatherMode mode : transport::kGatherModes) ways.push_back({mode});
  if (rdma_device() != nullptr) ways.push_back({GatherMode::kCopy, true});
  return ways;
}

constexpr uint64_t kKeys = 3000;
constexpr uint32_t kRowBytes = 512;
constexpr uint64_t kBatchRows = 256;

double soak_seconds() {
  const char* seconds = std::getenv("PETPS_SOAK_SECONDS");
  return seconds != nullptr ? std::strtod(seconds, nullptr) : 2.0;
}

uint64_t word_of(uint64_t key, uint64_t version, size_t i) {
  return i == 0 ? version : (key * 0x9E3779B97F4A7C15u ^ version * 0xC2B2AE3D27D4EB4Fu) + i;
}

class Soak {
 public:
  Soak(const Way& way, uint64_t seed)
      : seed_(seed), way_(way), pool_(pool_path() != nullptr ? pool_path() : "") {
    table_ = &pool_.add_table("rows", kRowBytes / 4, kRowBytes, kKeys);
    write(0, kKeys, 1);
    ServerOptions options;
    options.port = 0;
    options.host = host();
    options.gather = way.gather;
    options.transport.pin_ms = options.transport.output_stall_ms = 600'000;
    if (way.rdma) options.rdma = rdma_device();
    auto started = Server::start(*pool_.tables, options);
    EXPECT_TRUE(started.ok()) << started.status().to_string();
    server_ = std::move(started.value());
  }

  void disable_pins() { pool_.tables->epochs().disable_pins_for_test(); }

  // Run for `seconds`, or until the first violation if the test does not expect the program to die.
  void run(double seconds, bool until_death = false) {
    const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(seconds * 1e9);
    const uint64_t give_up = until + kPatienceNs;
    const auto is_over = [&] {
      const uint64_t now = base::monotonic_ns();
      return (now > until && (until_death || has_seen_enough() || now > give_up)) ||
             (violations > 0 && !until_death);
    };
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      for (; !is_over(); ++version_) {
        const uint64_t from = version_ * kBatchRows % kKeys;
        write(from, std::min(from + kBatchRows, kKeys), version_);
        pool_.tables->reclaim();
      }
    });
    // One reader reads at once; the other is slow, so that rows wait in the send queue.
    threads.emplace_back([&] { read(500, 2, 0, 1, is_over); });
    threads.emplace_back([&] { read(2000, 4, 3, 2, is_over); });
    for (std::thread& thread : threads) thread.join();
  }

  StatsSnapshot stats() const { return server_->stats(); }
  table::VerifyReport verify() { return pool_.tables->verify(); }
  ~Soak() {
    server_ = nullptr;
    pool_.tables = nullptr;
    struct stat about {};
    const char* path = pool_path();
    if (path != nullptr && ::stat(path, &about) == 0 && S_ISREG(about.st_mode)) ::unlink(path);
  }

  static constexpr uint64_t kRowsLeast = 10'000;
  static constexpr uint64_t kListsLeast = 10;
  std::atomic<uint64_t> violations{0};
  std::atomic<uint64_t> rows_read{0};
  std::string first;  // valid after run()

 private:
  static constexpr uint64_t kPatienceNs = 60'000'000'000;  // enough for a busy machine

  bool has_seen_enough() const {
    const StatsSnapshot stats = server_->stats();
    const bool gathers = way_.rdma || way_.gather != GatherMode::kCopy;
    return rows_read > kRowsLeast &&
           (!gathers || stats.lists_gathered + stats.lists_zerocopy > kListsLeast);
  }

  struct Request {
    std::vector<uint64_t> keys;
    std::vector<uint64_t> versions;  // acknowledged before the request was sent
  };

  void write(uint64_t from, uint64_t to, uint64_t version) {
    std::vector<uint64_t> keys;
    std::vector<uint64_t> rows;
    for (uint64_t key = from; key < to; ++key) {
      keys.push_back(key);
      for (size_t i = 0; i < kRowBytes / 8; ++i) rows.push_back(word_of(key, version, i));
    }
    table::Batch batch;
    batch.keys = keys;
    batch.rows = reinterpret_cast<const std::byte*>(rows.data());
    const auto report = table_->apply(batch);
    if (!report.ok()) violation("apply: " + report.status().to_string());
    for (const uint64_t key : keys) acknowledged_[key].store(version, std::memory_order_release);
  }

  // Move the calling thread into the clients' network.
  static void enter_network() {
    if (client_network() == nullptr) return;
    const int network = ::open(client_network(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(::setns(network, CLONE_NEWNET), 0) << client_network();
    ::close(network);
  }

  template <typename IsOver>
  void read(size_t keys, size_t depth, int pause_ms, uint64_t salt, const IsOver& is_over) {
    enter_network();
    if (way_.rdma) {
      RdmaClient client(server_->port(), *rdma_device());
      read_over(client, keys, depth, pause_ms, salt, is_over);
    } else {
      RawClient client(server_->port(), host());
      read_over(client, keys, depth, pause_ms, salt, is_over);
    }
  }

  template <typename Client, typename IsOver>
  void read_over(Client& client, size_t keys, size_t depth, int pause_ms, uint64_t salt,
                 const IsOver& is_over) {
    std::mt19937_64 random(seed_ + salt);
    std::deque<Request> in_flight;
    while (!is_over()) {
      while (in_flight.size() < depth) {
        Request& request = in_flight.emplace_back();
        for (size_t i = 0; i < keys; ++i) {
          request.keys.push_back(random() % kKeys);
          request.versions.push_back(
              acknowledged_[request.keys.back()].load(std::memory_order_acquire));
        }
        if (!client.send(pull_frame(salt, {{table_->id(), request.keys}})))
          violation("a pull could not be sent");
      }
      if (pause_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      const Reply reply = client.receive(30'000);
      if (!reply.error().ok()) {
        violation("no reply: " + reply.error().to_string());
        return;
      }
      check(in_flight.front(), reply);
      in_flight.pop_front();
    }
  }

  void check(const Request& request, const Reply& reply) {
    wire::PullReplyPrefix prefix;
    if (!wire::decode_pull_reply_prefix(reply.header, reply.body, prefix).ok() ||
        reply.body.size() != prefix.rows_offset + request.keys.size() * kRowBytes) {
      violation("rows are missing, or the head of the reply is torn");
      return;
    }
    const std::byte* at = reply.body.data() + prefix.rows_offset;
    for (size_t k = 0; k < request.keys.size(); ++k, at += kRowBytes) {
      std::array<uint64_t, kRowBytes / 8> row;
      std::memcpy(row.data(), at, kRowBytes);
      const std::string name = "key " + std::to_string(request.keys[k]);
      if (row[0] < request.versions[k]) violation(name + " is older than an acknowledged write");
      for (size_t i = 1; i < row.size(); ++i) {
        if (row[i] != word_of(request.keys[k], row[0], i)) {
          violation(name + " is torn or of another key");
          break;
        }
      }
    }
    rows_read += request.keys.size();
  }

  void violation(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (violations++ == 0) first = text;
  }

  const uint64_t seed_;
  const Way way_;
  TestPool pool_;
  table::Table* table_ = nullptr;
  std::unique_ptr<Server> server_;
  uint64_t version_ = 2;
  std::array<std::atomic<uint64_t>, kKeys> acknowledged_{};
  std::mutex mutex_;
};

class Soaked : public testing::TestWithParam<Way> {};

TEST_P(Soaked, NoRowIsTornWrongOrMissing) {
  Soak soak(GetParam(), tests::seed());
  soak.run(soak_seconds());
  EXPECT_EQ(soak.violations, 0u) << soak.first;
  EXPECT_GT(soak.rows_read, Soak::kRowsLeast);
  const StatsSnapshot stats = soak.stats();
  std::printf("%llu rows, %llu lists copied, %llu gathered, %llu zero-copy\n",
              static_cast<unsigned long long>(soak.rows_read.load()),
              static_cast<unsigned long long>(stats.lists_copied),
              static_cast<unsigned long long>(stats.lists_gathered),
              static_cast<unsigned long long>(stats.lists_zerocopy));
  const bool by_card = GetParam().rdma || GetParam().gather == GatherMode::kZerocopy;
  EXPECT_EQ(stats.lists_gathered > Soak::kListsLeast, GetParam().gather == GatherMode::kSendmsg);
  EXPECT_EQ(stats.lists_zerocopy > Soak::kListsLeast, by_card);
  if (client_network() != nullptr && GetParam().gather == GatherMode::kZerocopy) {
    std::printf("the kernel copied %llu of %llu zero-copy sends\n",
                static_cast<unsigned long long>(stats.zerocopy_copied),
                static_cast<unsigned long long>(stats.zerocopy_sends));
    // The kernel copies data that it retransmits; over loopback it copies all data.
    EXPECT_LT(2 * stats.zerocopy_copied, stats.zerocopy_sends);
  }
  EXPECT_EQ(stats.connections_closed_for_cause, 0u);
  const table::VerifyReport report = soak.verify();
  EXPECT_TRUE(report.clean()) << report.problems.front();
}

TEST_P(Soaked, FindsWrongRowsIfPinsAreDisabled) {
  if (PETPS_TSAN != 0) GTEST_SKIP() << "the fault is a data race by design";
  if (PETPS_ASAN != 0) {
    if (GetParam().rdma || GetParam().gather == GatherMode::kZerocopy)
      GTEST_SKIP() << "the kernel reads the rows and ignores poison; the release build finds them";
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const uint64_t seed = tests::seed();
    EXPECT_DEATH(
        {
          Soak soak(GetParam(), seed);
          soak.disable_pins();
          soak.run(60, /*until_death=*/true);  // a torn row may be seen before a poisoned one
        },
        // ASan reports unknown-crash if the slot was reused before it looked up the cause.
        "use-after-poison|unknown-crash");
    return;
  }
  Soak soak(GetParam(), tests::seed());
  soak.disable_pins();
  soak.run(60);
  EXPECT_GT(soak.violations, 0u) << "slots were reused under readers, but no wrong row was found";
  std::printf("found: %s\n", soak.first.c_str());
}

INSTANTIATE_TEST_SUITE_P(Ways, Soaked, testing::ValuesIn(ways()),
                         [](const auto& way) { return name_of(way.param); });

}  // namespace
}  // namespace petps::server
