// Overlapping reads of catalogues: a RemoteServer never returns to an earlier state of its server.
#include "petps_client/remote_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "fixtures.h"

namespace petps::client::testing {
namespace {

constexpr uint32_t kDeadlineMs = 20'000;

// A server whose alias resolves to ranking@2 from its second reply on. It builds the first `held`
// replies at once, but sends each only when the test releases it.
class SwitchingServer {
 public:
  explicit SwitchingServer(uint64_t held, bool has_counters = true)
      : has_counters_(has_counters),
        held_(held),
        server_([this](wire::Opcode opcode, uint64_t count, wire::Frame& reply) {
          if (opcode != wire::Opcode::kTables) return Answer::kSend;
          wire::TablesReply tables;
          tables.instances.push_back({1, "ranking", "ranking@1", 1, 5});
          tables.instances.push_back({2, "ranking", "ranking@2", 1, 5});
          tables.aliases.push_back({"ranking", count == 0 ? 1u : 2u});
          if (has_counters_) tables.state.counter = count == 0 ? 10 : 11;
          EXPECT_TRUE(wire::encode_tables_reply(header_of(reply).request_id, tables, reply).ok());
          if (count < held_.size()) {
            held_[count].requested.set_value();
            held_[count].released.get_future().wait();
          }
          return Answer::kSend;
        }) {
    if (has_counters) server_.hello().features |= wire::kFeatureCatalogueState;
  }

  void wait_for_request(size_t number) { held_[number].requested.get_future().wait(); }
  void release(size_t number) { held_[number].released.set_value(); }
  uint64_t requests() const { return server_.count(wire::Opcode::kTables); }
  std::string address() const { return server_.address(); }

 private:
  struct Held {
    std::promise<void> requested;
    std::promise<void> released;
  };
  const bool has_counters_;
  std::vector<Held> held_;
  FakeServer server_;  // last: its threads terminate before the other members are destroyed
};

std::string read_instance(RemoteServer& remote) {
  const Deadline deadline = Deadline::in_ms(kDeadlineMs);
  auto leased = remote.lease(deadline);
  if (!leased.ok()) return leased.status().to_string();
  const auto read = remote.read_catalogue(**leased, deadline);
  return read.ok() ? read.value()->instance_name() : read.status().to_string();
}

std::unique_ptr<RemoteServer> remote_server_of(const SwitchingServer& server) {
  const auto url = parse_url("petps://" + server.address());
  EXPECT_TRUE(url.ok()) << url.status().to_string();
  return std::make_unique<RemoteServer>(url.value().addresses[0], "ranking", Options());
}

TEST(RemoteServer, DoesNotKeepAnOlderReplyThatArrivesLate) {
  SwitchingServer server(1);
  const auto remote = remote_server_of(server);
  auto late = std::async(std::launch::async, [&] { return read_instance(*remote); });
  server.wait_for_request(0);
  EXPECT_EQ(read_instance(*remote), "ranking@2");
  server.release(0);
  EXPECT_EQ(late.get(), "ranking@2") << "the newer reply arrived during the late call";
  EXPECT_EQ(remote->last_catalogue()->instance_name(), "ranking@2");
  EXPECT_EQ(server.requests(), 2u);
}

// The second reply shows a newer state, although its request began while the first was in flight.
TEST(RemoteServer, KeepsTheReplyWithTheHigherCounter) {
  SwitchingServer server(2);
  const auto remote = remote_server_of(server);
  auto first = std::async(std::launch::async, [&] { return read_instance(*remote); });
  server.wait_for_request(0);
  auto second = std::async(std::launch::async, [&] { return read_instance(*remote); });
  server.wait_for_request(1);
  server.release(0);
  EXPECT_EQ(first.get(), "ranking@1");
  server.release(1);
  EXPECT_EQ(second.get(), "ranking@2");
  EXPECT_EQ(remote->last_catalogue()->instance_name(), "ranking@2");
  EXPECT_EQ(server.requests(), 2u);
}

// A server of an earlier release sends no counter: the later request wins.
TEST(RemoteServer, KeepsTheReplyToTheLaterRequestIfThereAreNoCounters) {
  SwitchingServer server(1, false);
  const auto remote = remote_server_of(server);
  auto late = std::async(std::launch::async, [&] { return read_instance(*remote); });
  server.wait_for_request(0);
  EXPECT_EQ(read_instance(*remote), "ranking@2");
  server.release(0);
  EXPECT_EQ(late.get(), "ranking@2");
  EXPECT_EQ(remote->last_catalogue()->instance_name(), "ranking@2");
}

// A server whose state the test sets.
struct ChangingServer {
  wire::TablesReply tables;
  FakeServer server;
  ChangingServer()
      : server([this](wire::Opcode opcode, uint64_t, wire::Frame& reply) {
          if (opcode == wire::Opcode::kTables) {
            EXPECT_TRUE(wire::encode_tables_reply(header_of(reply).request_id, tables, reply).ok());
          }
          return Answer::kSend;
        }) {
    server.hello().features |= wire::kFeatureCatalogueState;
    set_state(1, 10, 1);
  }
  void set_state(uint8_t pool, uint64_t counter, uint32_t instance) {
    tables = {};
    for (const uint32_t number : {1u, 2u}) {
      const std::string name = "ranking@" + std::to_string(number);
      tables.instances.push_back({number, "ranking", name, 1, 5});
    }
    tables.aliases.push_back({"ranking", instance});
    tables.state.pool_uuid[0] = pool;
    tables.state.counter = counter;
    server.hello().pool_uuid = tables.state.pool_uuid;
  }
  std::unique_ptr<RemoteServer> remote() {
    const auto url = parse_url("petps://" + server.address());
    return std::make_unique<RemoteServer>(url.value().addresses[0], "ranking", Options());
  }
};

TEST(RemoteServer, RefusesARestoredPoolUntilItsCounterHasPassedTheOneSeen) {
  ChangingServer server;
  const auto remote = server.remote();
  server.set_state(1, 20, 2);
  EXPECT_EQ(read_instance(*remote), "ranking@2");
  server.set_state(1, 17, 1);
  const std::string refusal = read_instance(*remote);
  for (const std::string& part : {server.server.address() + ": its pool is an older copy",
                                  std::string("counter 17, and this client has seen 20")})
    EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
  EXPECT_EQ(remote->last_catalogue()->instance_name(), "ranking@2");
  server.set_state(1, 19, 2);
  EXPECT_NE(read_instance(*remote).find("counter 19"), std::string::npos);
  server.set_state(1, 20, 1);
  EXPECT_EQ(read_instance(*remote), "ranking@1") << "its counter has passed the one seen";
  server.set_state(1, 17 + (uint64_t{1} << 32), 2);
  EXPECT_EQ(read_instance(*remote), "ranking@2") << "verify --accept passes every counter seen";
}

TEST(RemoteServer, NeverComparesTheCountersOfTwoPools) {
  ChangingServer server;
  const auto remote = server.remote();
  server.set_state(1, 20, 2);
  EXPECT_EQ(read_instance(*remote), "ranking@2");
  {
    // The address now leads to another pool. The old connection is still open.
    const auto old = remote->lease(Deadline::in_ms(kDeadlineMs));
    ASSERT_TRUE(old.ok());
    server.set_state(2, 5, 1);
    EXPECT_EQ(read_instance(*remote), "ranking@1");
    EXPECT_EQ(remote->last_catalogue()->instance_name(), "ranking@1");
    const auto kept = remote->catalogue(*old.value(), Deadline::in_ms(kDeadlineMs));
    ASSERT_TRUE(kept.ok()) << kept.status().to_string();
    EXPECT_EQ(kept.value()->instance_name(), "ranking@2") << "of the pool behind that connection";
    // The tables are of another pool than the hello, so they are refused.
    const auto mixed = remote->read_catalogue(*old.value(), Deadline::in_ms(kDeadlineMs));
    expect_error(mixed.status(), base::Code::kUnavailable, {"tables are of another pool"});
  }
}

// A server that does not reply to requests for its catalogue, and a RemoteServer for it.
struct SilentServer {
  FakeServer server{[](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kTables ? Answer::kSilent : Answer::kSend;
  }};
  RemoteServer remote;
  explicit SilentServer(const BackoffOptions& options)
      : remote(parse_url(server.url()).value().addresses[0], "ranking", Options(), options) {}

  void time_out(uint32_t deadline_ms) {
    const Deadline deadline = Deadline::in_ms(deadline_ms);
    auto leased = remote.lease(deadline);
    if (!leased.ok()) return;  // the machine is busy; this is a timeout too
    EXPECT_EQ(remote.read_catalogue(*leased.value(), deadline).status().code(),
              base::Code::kDeadlineExceeded);
  }
};

// The caller's deadline is shorter than the silence that counts as a failure of the server.
TEST(RemoteServer, ACallersOwnTimeoutIsNoFailureOfTheServer) {
  SilentServer server({.silence_ns = 60'000'000'000});
  for (int i = 0; i < 5; ++i) server.time_out(20);
  EXPECT_EQ(server.remote.backoff_until_ns(), 0u);
  EXPECT_TRUE(server.remote.is_live());
  EXPECT_TRUE(server.remote.is_in_doubt()) << "calls try other servers first";
  server.remote.record_reply();
  EXPECT_FALSE(server.remote.is_in_doubt());
}

TEST(RemoteServer, ALongSilenceIsAFailureOfTheServer) {
  SilentServer server({.silence_ns = 1'000'000});
  for (uint32_t i = 0; i < kFailuresUntilGone; ++i) {
    EXPECT_TRUE(server.remote.is_live()) << i;
    server.time_out(200);
  }
  EXPECT_FALSE(server.remote.is_live());
  EXPECT_GT(server.remote.backoff_until_ns(), 0u);
  server.remote.record_reply();
  EXPECT_TRUE(server.remote.is_live());
}

TEST(Backoff, PausesGrowAndDifferBetweenClients) {
  BackoffOptions backoff_options;
  backoff_options.seed = seed();
  Backoff backoff(backoff_options);
  Backoff same(backoff_options);
  backoff_options.seed += 1;
  Backoff other(backoff_options);
  uint64_t limit = backoff_options.first_ns;
  bool differs = false;
  for (int i = 0; i < 20; ++i) {
    const uint64_t pause = backoff.next_ns();
    EXPECT_GE(pause, limit / 2) << i;
    EXPECT_LE(pause, limit) << i;
    EXPECT_EQ(pause, same.next_ns()) << "the seed determines the pauses";
    differs = differs || pause != other.next_ns();
    limit = std::min(limit * 2, backoff_options.longest_ns);
  }
  EXPECT_TRUE(differs);
  backoff.reset();
  EXPECT_LE(backoff.next_ns(), backoff_options.first_ns);
}

// A client with many idle connections would keep the memory of the largest request of each.
TEST(RemoteServer, AnIdleConnectionKeepsNoLargeBuffers) {
  constexpr size_t kLarge = size_t{4} << 20;
  FakeServer server;
  const auto url = parse_url("petps://" + server.address());
  ASSERT_TRUE(url.ok()) << url.status().to_string();
  RemoteServer remote(url.value().addresses[0], "ranking", Options());
  for (const bool was_large : {false, true}) {
    auto leased = remote.lease(Deadline::in_ms(kDeadlineMs));
    ASSERT_TRUE(leased.ok()) << leased.status().to_string();
    Connection& connection = **leased;
    EXPECT_LT(connection.frame().capacity(), kLarge);
    EXPECT_LT(connection.scratch().capacity(), kLarge);
    if (was_large) break;
    connection.frame().resize(kLarge);
    connection.scratch().resize(kLarge);
  }
  EXPECT_EQ(server.count(wire::Opcode::kHello), 1u) << "both used one connection";
}

}  // namespace
}  // namespace petps::client::testing
