// Overlapping reads of catalogues: an endpoint never goes back to an earlier state of its server.
#include "petps_client/remote_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
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
          wire::FrameHeader header;
          std::memcpy(&header, reply.data(), sizeof(header));
          wire::TablesReply tables;
          tables.instances.push_back({1, "ranking", "ranking@1", 1, 5});
          tables.instances.push_back({2, "ranking", "ranking@2", 1, 5});
          tables.aliases.push_back({"ranking", count == 0 ? 1u : 2u});
          if (has_counters_) tables.state.counter = count == 0 ? 10 : 11;
          EXPECT_TRUE(wire::encode_tables_reply(header.request_id, tables, reply).ok());
          if (count < held_.size()) {
            held_[count].asked.set_value();
            held_[count].let_go.get_future().wait();
          }
          return Answer::kSend;
        }) {
    if (has_counters) server_.hello().features |= wire::kFeatureCatalogueState;
  }

  void wait_until_asked(size_t number) { held_[number].asked.get_future().wait(); }
  void let_go(size_t number) { held_[number].let_go.set_value(); }
  uint64_t asked() const { return server_.count(wire::Opcode::kTables); }
  std::string address() const { return server_.address(); }

 private:
  struct Held {
    std::promise<void> asked;
    std::promise<void> let_go;
  };
  const bool has_counters_;
  std::vector<Held> held_;
  FakeServer server_;  // last: its threads terminate before the other members are destroyed
};

std::string read_instance(RemoteServer& endpoint) {
  const Deadline deadline = Deadline::in_ms(kDeadlineMs);
  auto leased = endpoint.lease(deadline);
  if (!leased.ok()) return leased.status().to_string();
  const auto read = endpoint.read_catalogue(**leased, deadline);
  return read.ok() ? read.value()->instance_name() : read.status().to_string();
}

std::unique_ptr<RemoteServer> endpoint_of(const SwitchingServer& server) {
  const auto url = parse_url("petps://" + server.address());
  EXPECT_TRUE(url.ok()) << url.status().to_string();
  return std::make_unique<RemoteServer>(url.value().addresses[0], "ranking", Options());
}

TEST(RemoteServer, AnOlderAnswerThatComesLateIsNotKept) {
  SwitchingServer server(1);
  const auto endpoint = endpoint_of(server);
  auto late = std::async(std::launch::async, [&] { return read_instance(*endpoint); });
  server.wait_until_asked(0);
  EXPECT_EQ(read_instance(*endpoint), "ranking@2");
  server.let_go(0);
  EXPECT_EQ(late.get(), "ranking@2") << "asked for during the late call, so it serves that too";
  EXPECT_EQ(endpoint->last_catalogue()->instance_name(), "ranking@2");
  EXPECT_EQ(server.asked(), 2u);
}

// The second reply shows a newer state, although its request began while the first was in flight.
TEST(RemoteServer, OfTwoAnswersTheHigherCounterIsKept) {
  SwitchingServer server(2);
  const auto endpoint = endpoint_of(server);
  auto first = std::async(std::launch::async, [&] { return read_instance(*endpoint); });
  server.wait_until_asked(0);
  auto second = std::async(std::launch::async, [&] { return read_instance(*endpoint); });
  server.wait_until_asked(1);
  server.let_go(0);
  EXPECT_EQ(first.get(), "ranking@1");
  server.let_go(1);
  EXPECT_EQ(second.get(), "ranking@2");
  EXPECT_EQ(endpoint->last_catalogue()->instance_name(), "ranking@2");
  EXPECT_EQ(server.asked(), 2u);
}

// A server of an earlier release sends no counter: the later request wins.
TEST(RemoteServer, WithoutCountersTheLaterQuestionCounts) {
  SwitchingServer server(1, false);
  const auto endpoint = endpoint_of(server);
  auto late = std::async(std::launch::async, [&] { return read_instance(*endpoint); });
  server.wait_until_asked(0);
  EXPECT_EQ(read_instance(*endpoint), "ranking@2");
  server.let_go(0);
  EXPECT_EQ(late.get(), "ranking@2");
  EXPECT_EQ(endpoint->last_catalogue()->instance_name(), "ranking@2");
}

// A server that shows the state chosen by the test.
struct ChangingServer {
  wire::TablesReply tables;
  FakeServer server;
  ChangingServer()
      : server([this](wire::Opcode opcode, uint64_t, wire::Frame& reply) {
          wire::FrameHeader header;
          std::memcpy(&header, reply.data(), sizeof(header));
          if (opcode == wire::Opcode::kTables) {
            EXPECT_TRUE(wire::encode_tables_reply(header.request_id, tables, reply).ok());
          }
          return Answer::kSend;
        }) {
    server.hello().features |= wire::kFeatureCatalogueState;
    show(1, 10, 1);
  }
  void show(uint8_t pool, uint64_t counter, uint32_t instance) {
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
  std::unique_ptr<RemoteServer> endpoint() {
    const auto url = parse_url("petps://" + server.address());
    return std::make_unique<RemoteServer>(url.value().addresses[0], "ranking", Options());
  }
};

TEST(RemoteServer, APoolRestoredFromAnOlderCopyIsRefusedUntilItHasPassedWhatWasSeen) {
  ChangingServer server;
  const auto endpoint = server.endpoint();
  server.show(1, 20, 2);
  EXPECT_EQ(read_instance(*endpoint), "ranking@2");
  server.show(1, 17, 1);
  const std::string refusal = read_instance(*endpoint);
  EXPECT_NE(refusal.find(server.server.address() + ": its pool is an older copy"),
            std::string::npos)
      << refusal;
  EXPECT_NE(refusal.find("counter 17, and this client has seen 20"), std::string::npos) << refusal;
  EXPECT_EQ(endpoint->last_catalogue()->instance_name(), "ranking@2");
  server.show(1, 19, 2);
  EXPECT_NE(read_instance(*endpoint).find("counter 19"), std::string::npos);
  server.show(1, 20, 1);
  EXPECT_EQ(read_instance(*endpoint), "ranking@1") << "it has caught up";
  server.show(1, 17 + (uint64_t{1} << 32), 2);
  EXPECT_EQ(read_instance(*endpoint), "ranking@2") << "verify --accept passes what anybody saw";
}

TEST(RemoteServer, CountersOfTwoPoolsAreNeverCompared) {
  ChangingServer server;
  const auto endpoint = server.endpoint();
  server.show(1, 20, 2);
  EXPECT_EQ(read_instance(*endpoint), "ranking@2");
  {
    // The address now leads to another pool. The old connection is still open.
    const auto old = endpoint->lease(Deadline::in_ms(kDeadlineMs));
    ASSERT_TRUE(old.ok());
    server.show(2, 5, 1);
    EXPECT_EQ(read_instance(*endpoint), "ranking@1");
    EXPECT_EQ(endpoint->last_catalogue()->instance_name(), "ranking@1");
    const auto kept = endpoint->catalogue(*old.value(), Deadline::in_ms(kDeadlineMs));
    ASSERT_TRUE(kept.ok()) << kept.status().to_string();
    EXPECT_EQ(kept.value()->instance_name(), "ranking@2") << "what that connection's pool means";
    // The tables are of another pool than the hello, so they are refused.
    const auto mixed = endpoint->read_catalogue(*old.value(), Deadline::in_ms(kDeadlineMs));
    ASSERT_FALSE(mixed.ok());
    EXPECT_NE(mixed.status().message().find("tables are of another pool"), std::string_view::npos)
        << mixed.status().to_string();
  }
}

// The caller's deadline is shorter than the silence that counts as a failure of the server.
TEST(RemoteServer, ACallersOwnTimeoutIsNoFailureOfTheServer) {
  FakeServer server([](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kTables ? Answer::kSilent : Answer::kSend;
  });
  const auto url = parse_url("petps://" + server.address());
  BackoffOptions backoff_options;
  backoff_options.silence_ns = 60'000'000'000;
  RemoteServer endpoint(url.value().addresses[0], "ranking", Options(), backoff_options);
  for (int i = 0; i < 5; ++i) {
    const Deadline deadline = Deadline::in_ms(20);
    auto leased = endpoint.lease(deadline);
    if (!leased.ok()) continue;  // the machine is busy
    EXPECT_EQ(endpoint.read_catalogue(*leased.value(), deadline).status().code(),
              base::Code::kDeadlineExceeded);
  }
  EXPECT_EQ(endpoint.backoff_until_ns(), 0u);
  EXPECT_TRUE(endpoint.answers());
  EXPECT_TRUE(endpoint.is_in_doubt()) << "others are asked first";
  endpoint.answered();
  EXPECT_FALSE(endpoint.is_in_doubt());
}

TEST(RemoteServer, AServerThatIsSilentForLongerThanOurPatienceFails) {
  FakeServer server([](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kTables ? Answer::kSilent : Answer::kSend;
  });
  const auto url = parse_url("petps://" + server.address());
  BackoffOptions backoff_options;
  backoff_options.silence_ns = 1'000'000;
  RemoteServer endpoint(url.value().addresses[0], "ranking", Options(), backoff_options);
  for (uint32_t i = 0; i < kFailuresUntilGone; ++i) {
    EXPECT_TRUE(endpoint.answers()) << i;
    const Deadline deadline = Deadline::in_ms(200);
    auto leased = endpoint.lease(deadline);
    if (!leased.ok()) continue;  // the machine is busy: this counts as silence too
    EXPECT_EQ(endpoint.read_catalogue(*leased.value(), deadline).status().code(),
              base::Code::kDeadlineExceeded);
  }
  EXPECT_FALSE(endpoint.answers());
  EXPECT_GT(endpoint.backoff_until_ns(), 0u);
  endpoint.answered();
  EXPECT_TRUE(endpoint.answers()) << "its next answer";
}

TEST(Backoff, RestsGrowAndDifferFromClientToClient) {
  BackoffOptions backoff_options;
  backoff_options.seed = seed();
  Backoff one(backoff_options);
  Backoff same(backoff_options);
  backoff_options.seed += 1;
  Backoff other(backoff_options);
  uint64_t due = backoff_options.first_ns;
  bool differs = false;
  for (int i = 0; i < 20; ++i) {
    const uint64_t rest = one.next_ns();
    EXPECT_GE(rest, due / 2) << i;
    EXPECT_LE(rest, due) << i;
    EXPECT_EQ(rest, same.next_ns()) << "one seed, one schedule";
    differs = differs || rest != other.next_ns();
    due = std::min(due * 2, backoff_options.longest_ns);
  }
  EXPECT_TRUE(differs);
  one.reset();
  EXPECT_LE(one.next_ns(), backoff_options.first_ns);
}

}  // namespace
}  // namespace petps::client::testing
