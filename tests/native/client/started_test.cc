// Pulls that are sent without waiting, and whose replies are read as they arrive (forward.h).
#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <atomic>
#include <thread>

#include "base/clock.h"
#include "drip.h"
#include "fleet.h"
#include "petps_client/forward.h"
#include "tests/support/certificates/certificates.h"

namespace petps::client {
namespace {

using codec::Dtype;
using testing::Answer;
using testing::connect_to;
using testing::Drip;
using testing::FakeServer;
using testing::Fleet;
using testing::kDim;
using testing::kKeys;
using testing::quiet;
using testing::RealServer;
using State = StartedPull::State;

constexpr const char* kInstance = "ranking@1";
constexpr std::array kTables = {Dtype::kF32, Dtype::kF16, Dtype::kInt8};

// The arrays of a pull of all tables.
struct Rows {
  Rows(const std::vector<uint64_t>& its_keys, Form form) : keys(its_keys) {
    for (const Dtype dtype : kTables) {
      const size_t stored_bytes = codec::row_bytes(dtype, kDim);
      rows.emplace_back(keys.size() *
                        (form == Form::kStored ? stored_bytes : kDim * sizeof(float)));
      masks.emplace_back(keys.size(), uint8_t{7});
    }
    for (size_t i = 0; i < kTables.size(); ++i)
      pulls.push_back({codec::dtype_name(kTables[i]), keys, rows[i], masks[i], form});
  }
  std::vector<uint64_t> keys;
  std::vector<std::vector<std::byte>> rows;
  std::vector<std::vector<uint8_t>> masks;
  std::vector<TablePull> pulls;
};

std::vector<uint64_t> random_keys(size_t n, std::mt19937_64& random) {
  std::vector<uint64_t> keys(n);
  for (uint64_t& key : keys) key = random() % (kKeys + kKeys / 4);  // a fifth do not exist
  return keys;
}

PullOptions of_instance() {
  PullOptions options;
  options.instance = kInstance;
  return options;
}

// Wait for something to arrive, and take it. Return the state.
State wait_and_advance(StartedPull& pull) {
  const std::span<const pollfd> awaited = pull.awaited();
  std::vector<pollfd> entries(awaited.begin(), awaited.end());
  EXPECT_GT(poll(entries.data(), entries.size(), 60'000), 0);
  State state = State::kWaiting;
  for (const pollfd& entry : entries) {
    if (entry.revents != 0 && state == State::kWaiting) state = pull.advance(entry.fd);
  }
  return state;
}

// Read a started pull to its end. Return the last state.
State read_to_end(StartedPull& pull) {
  State state = State::kWaiting;
  while (state == State::kWaiting) state = wait_and_advance(pull);
  return state;
}

// The same, while each piece of a reply is read before the next one passes.
// Return the last state, and count the pieces.
State read_in_pieces(StartedPull& pull, std::span<const std::unique_ptr<Drip>> drips, size_t most,
                     std::mt19937_64& random, uint64_t& pieces) {
  State state = State::kWaiting;
  while (state == State::kWaiting) {
    while (!drips[random() % drips.size()]->step(most, random)) std::this_thread::yield();
    state = wait_and_advance(pull);
    ++pieces;
  }
  return state;
}

enum class Over { kPlain, kTls };

// A server behind a drip; with two, each of the drips leads to one half of the keys.
class StartedOverTest : public ::testing::TestWithParam<Over> {
 protected:
  StartedOverTest() {
    options_.keys_per_request = 100;
    if (GetParam() == Over::kPlain) return;
    const tests::KeyPair files = authority_.issue_local();
    auto opened = tls::ServerContext::open({files.certificate, files.key, {}});
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    context_ = std::move(opened).value();
    options_.tls.ca = authority_.ca();
  }
  void add_server() {
    drips_.push_back(std::make_unique<Drip>());
    server::ServerOptions options;
    options.tls = context_;
    options.address = drips_.back()->address();
    servers_.push_back(std::make_unique<RealServer>(options, testing::kPartitions));
    for (const Dtype dtype : kTables) {
      servers_.back()->add_table(std::string(codec::dtype_name(dtype)), dtype, kDim, 2 * kKeys,
                                 kKeys, testing::kDefaultRow);
    }
    servers_.back()->start();
    drips_.back()->lead_to(servers_.back()->address());
  }
  // Add two servers with these partitions.
  void add_two(uint64_t first, uint64_t second) {
    add_server();
    add_server();
    wire::ShardMap map{"ranking", 1, testing::kPartitions, {}};
    map.servers.push_back({drips_[0]->address(), {first}});
    map.servers.push_back({drips_[1]->address(), {second}});
    for (const auto& server : servers_) server->set_shard_map(map);
  }
  std::unique_ptr<Client> connect() const {
    const std::string scheme = GetParam() == Over::kTls ? "petps+tls://" : "petps://";
    return connect_to(scheme + drips_[0]->address() + "/ranking", options_);
  }
  void hold(bool holds) {
    for (const auto& drip : drips_) drip->hold(holds);
  }
  void check_in_pieces(uint64_t& pieces);

  const tests::Authority authority_;
  std::shared_ptr<tls::ServerContext> context_;
  Options options_ = quiet();
  std::vector<std::unique_ptr<RealServer>> servers_;
  std::vector<std::unique_ptr<Drip>> drips_;  // destroyed before the servers
};
INSTANTIATE_TEST_SUITE_P(All, StartedOverTest, ::testing::Values(Over::kPlain, Over::kTls),
                         [](const auto& test) {
                           return test.param == Over::kTls ? "tls" : "plain";
                         });

void StartedOverTest::check_in_pieces(uint64_t& pieces) {
  const auto client = connect();
  std::mt19937_64 random(tests::seed());
  for (const size_t most : {size_t{1}, size_t{3}, size_t{40}, size_t{1000}, size_t{100'000}}) {
    for (const Form form : {Form::kFloat32, Form::kStored}) {
      // 300 keys of each of three tables are nine requests, more than may be in flight at once.
      const std::vector<uint64_t> keys = random_keys(most == 1 ? 30 : 300, random);
      Rows expected(keys, form);
      ASSERT_TRUE(client->pull_many(expected.pulls, of_instance()).ok());
      Rows received(keys, form);
      const PullOptions options = of_instance();
      hold(true);
      const auto started = Forwarder(*client).start_pull(received.pulls, options);
      ASSERT_NE(started, nullptr);
      ASSERT_EQ(started->awaited().size(), servers_.size());
      ASSERT_EQ(read_in_pieces(*started, drips_, most, random, pieces), State::kDone);
      const auto report = started->finish();
      ASSERT_TRUE(report.ok()) << report.status().to_string();
      EXPECT_EQ(received.rows, expected.rows) << "pieces of " << most;
      EXPECT_EQ(received.masks, expected.masks);
      EXPECT_EQ(report.value().instance, kInstance);
      hold(false);
    }
  }
}

TEST_P(StartedOverTest, ReplyMayArriveInAnyPieces) {
  add_server();
  uint64_t pieces = 0;
  check_in_pieces(pieces);
  EXPECT_GT(pieces, 5'000u);
}

// Rows of two servers are scattered over the caller's arrays.
TEST_P(StartedOverTest, RepliesMayArriveInAnyPieces) {
  add_two(0x0F, 0xF0);
  uint64_t pieces = 0;
  check_in_pieces(pieces);
  EXPECT_GT(pieces, 5'000u);
}

// Another thread may go on in the middle of anything.
TEST_P(StartedOverTest, AnotherThreadMayFinish) {
  add_two(0x0F, 0xF0);
  const auto client = connect();
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 60; ++round) {
    const std::vector<uint64_t> keys = random_keys(300, random);
    const Form form = round % 2 == 0 ? Form::kFloat32 : Form::kStored;
    Rows expected(keys, form);
    ASSERT_TRUE(client->pull_many(expected.pulls, of_instance()).ok());
    Rows received(keys, form);
    const PullOptions options = of_instance();
    hold(true);
    const auto started = Forwarder(*client).start_pull(received.pulls, options);
    ASSERT_NE(started, nullptr);
    State state = State::kWaiting;
    for (uint64_t steps = random() % 40; steps > 0 && state == State::kWaiting; --steps) {
      while (!drips_[random() % 2]->step(400, random)) std::this_thread::yield();
      state = wait_and_advance(*started);
    }
    std::thread other([&] {
      const auto report = started->finish();
      EXPECT_TRUE(report.ok()) << report.status().to_string();
    });
    hold(false);
    other.join();
    EXPECT_EQ(received.rows, expected.rows);
    EXPECT_EQ(received.masks, expected.masks);
  }
}

// With two owners and known latencies, a pull is due when another owner should be asked; no more
// when its reply has begun to arrive.
TEST_P(StartedOverTest, AreDueWhenAHedgeIs) {
  add_two(0xFF, 0xFF);
  const auto client = connect();
  Rows rows(testing::first_keys(30), Form::kStored);
  const PullOptions options = of_instance();
  for (int round = 0; round < 500; ++round)
    ASSERT_TRUE(client->pull_many(rows.pulls, options).ok());
  std::unique_ptr<StartedPull> started;
  while (started == nullptr) {  // where a hedge has won, the next pull opens a connection
    hold(false);
    ASSERT_TRUE(client->pull_many(rows.pulls, options).ok());
    hold(true);
    started = Forwarder(*client).start_pull(rows.pulls, options);
  }
  // The server has half of the deadline of 20 s.
  const uint64_t half_ns = 5'000'000'000;
  EXPECT_LT(started->due_ns(), base::monotonic_ns() + half_ns);
  std::mt19937_64 random(tests::seed());
  while (!drips_[random() % 2]->step(40, random)) std::this_thread::yield();
  EXPECT_EQ(wait_and_advance(*started), State::kWaiting);
  if (GetParam() == Over::kPlain) {  // 40 bytes of TLS are not a record yet
    EXPECT_GT(started->due_ns(), base::monotonic_ns() + half_ns);
  }
  hold(false);
  ASSERT_TRUE(started->finish().ok());
}

// Errors of a server, cut anywhere, among replies that are right.
TEST(StartedErrorTest, ErrorsMayArriveInAnyPieces) {
  std::mt19937_64 random(tests::seed());
  std::atomic<bool> refuses{false};
  FakeServer server([&](wire::Opcode opcode, uint64_t count, wire::Frame& reply) {
    if (opcode == wire::Opcode::kPull && refuses && count % 3 == 1)
      testing::replace_by_error(reply, base::Code::kIoError, "the disk is full of sand");
    return Answer::kSend;
  });
  std::vector<std::unique_ptr<Drip>> drips;
  drips.push_back(std::make_unique<Drip>());
  drips[0]->lead_to(server.address());
  Options options = quiet();
  options.keys_per_request = 50;
  const auto client = connect_to("petps://" + drips[0]->address() + "/ranking", options);
  const std::vector<uint64_t> keys = testing::first_keys(500);
  std::vector<float> rows(keys.size() * FakeServer::kDim);
  const TablePull pull{"users", keys, std::as_writable_bytes(std::span(rows))};
  const PullOptions pull_options = of_instance();
  uint64_t pieces = 0;
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(client->pull_many({&pull, 1}, pull_options).ok());
    refuses = true;
    drips[0]->hold(true);
    const auto started = Forwarder(*client).start_pull({&pull, 1}, pull_options);
    ASSERT_NE(started, nullptr);
    const State state = read_in_pieces(*started, drips, 1 + random() % 60, random, pieces);
    EXPECT_EQ(state, State::kUnusual);
    drips[0]->hold(false);
    testing::expect_error(started->finish().status(), base::Code::kIoError, {"full of sand"});
    refuses = false;
  }
  EXPECT_GT(pieces, 1'000u);
}

class StartedTest : public Fleet {
 protected:
  void start_two() {
    add_server(0x0F, 0xFF);
    add_server(0xF0, 0xFF);
    publish();
  }
  static void expect_rows(const std::vector<float>& rows, const std::vector<uint64_t>& keys) {
    EXPECT_EQ(rows, testing::rows_of(keys, kDim));
  }
  // One pull of the table f32.
  struct Pull {
    explicit Pull(std::vector<uint64_t> its_keys)
        : keys(std::move(its_keys)),
          rows(keys.size() * kDim, -1.0f),
          pull{"f32", keys, std::as_writable_bytes(std::span(rows))} {}
    std::unique_ptr<StartedPull> start(Client& client) {
      return Forwarder(client).start_pull({&pull, 1}, options);
    }
    std::vector<uint64_t> keys;
    std::vector<float> rows;
    TablePull pull;
    PullOptions options = of_instance();
  };
  // Start two servers, and return a client with a connection to each.
  std::unique_ptr<Client> connect_to_two() {
    start_two();
    auto client = connect();
    Pull first(testing::first_keys(800));
    EXPECT_TRUE(client->pull_many({&first.pull, 1}, first.options).ok());
    return client;
  }
};

TEST_F(StartedTest, ReadsFromSeveralServers) {
  const auto client = connect_to_two();
  for (int round = 0; round < 20; ++round) {
    Pull pull(testing::first_keys(800));
    const auto started = pull.start(*client);
    ASSERT_NE(started, nullptr);
    EXPECT_EQ(started->awaited().size(), 2u);
    EXPECT_EQ(started->advance(-1), State::kWaiting) << "not a file of this pull";
    ASSERT_EQ(read_to_end(*started), State::kDone);
    const auto report = started->finish();
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().found, pull.keys.size());
    expect_rows(pull.rows, pull.keys);
  }
}

// finish() may be called at any time: it waits for what is left.
TEST_F(StartedTest, CanBeFinishedByWaiting) {
  const auto client = connect_to_two();
  for (int round = 0; round < 20; ++round) {
    Pull pull(testing::first_keys(800));
    const auto started = pull.start(*client);
    ASSERT_NE(started, nullptr);
    if (round % 2 == 0) (void)wait_and_advance(*started);
    ASSERT_TRUE(started->finish().ok());
    expect_rows(pull.rows, pull.keys);
  }
}

TEST_F(StartedTest, StartsNothingThatWouldHaveToWait) {
  start_two();
  const auto client = connect();
  Pull pull(testing::first_keys(800));
  EXPECT_EQ(pull.start(*client), nullptr) << "the second server has no connection yet";
  ASSERT_TRUE(client->pull_many({&pull.pull, 1}, pull.options).ok());
  const auto in_flight = pull.start(*client);
  ASSERT_NE(in_flight, nullptr);
  Pull other(testing::first_keys(800));
  EXPECT_EQ(other.start(*client), nullptr) << "all connections are in use";
  ASSERT_TRUE(in_flight->finish().ok());
  EXPECT_NE(other.start(*client), nullptr);

  ASSERT_TRUE(client->pull_many({&pull.pull, 1}, pull.options).ok());
  other.options.instance = "ranking@9";
  EXPECT_EQ(other.start(*client), nullptr) << "no server is known to have it";
  other.options.instance = {};
  EXPECT_EQ(other.start(*client), nullptr) << "the instance is to be chosen";
  other.options = of_instance();
  PullTrace trace;
  other.options.trace = &trace;
  EXPECT_EQ(other.start(*client), nullptr) << "a trace has a part for each attempt";
  other.options.trace = nullptr;
  other.pull.table = "unknown";
  EXPECT_EQ(other.start(*client), nullptr);
  other.pull.table = "f32";
  EXPECT_NE(other.start(*client), nullptr);
}

// A refusal is no result of the first round: finish() reads the newer map and asks again.
TEST_F(StartedTest, LeavesRefusalsToFinish) {
  const auto client = connect_to_two();
  Pull pull(testing::first_keys(800));
  split_between_two(0x3C);
  for (const auto& server : servers_) server->set_shard_map(map());
  const auto started = pull.start(*client);
  ASSERT_NE(started, nullptr);
  EXPECT_EQ(read_to_end(*started), State::kUnusual);
  EXPECT_GT(wrong_shards(), 0u);
  const auto report = started->finish();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  expect_rows(pull.rows, pull.keys);
}

// A server dies while its reply arrives. Its keys are asked again.
TEST_F(StartedTest, LeavesLostConnectionsToFinish) {
  add_server(0xFF);
  Drip drip;
  drip.lead_to(servers_[0]->address());
  const auto client = connect_to("petps://" + drip.address() + "/ranking", quiet());
  std::mt19937_64 random(tests::seed());
  for (const size_t steps : {0, 1, 5}) {
    Pull pull(testing::first_keys(800));
    ASSERT_TRUE(client->pull_many({&pull.pull, 1}, pull.options).ok());
    drip.hold(true);
    const auto started = pull.start(*client);
    ASSERT_NE(started, nullptr);
    for (size_t step = 0; step < steps; ++step) {
      while (!drip.step(100, random)) std::this_thread::yield();
      ASSERT_EQ(wait_and_advance(*started), State::kWaiting);
    }
    drip.close_all();
    EXPECT_EQ(read_to_end(*started), State::kUnusual);
    drip.hold(false);
    const auto report = started->finish();
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    expect_rows(pull.rows, pull.keys);
  }
}

// The reply to a pull that was given up must not answer the next pull of the connection.
TEST_F(StartedTest, GivenUpPullsLeaveNothingBehind) {
  const auto client = connect_to_two();
  Pull pull(testing::first_keys(800));
  for (int round = 0; round < 5; ++round) {
    ASSERT_NE(pull.start(*client), nullptr);  // and destroyed at once
    Pull next(testing::first_keys(700));
    ASSERT_TRUE(client->pull_many({&next.pull, 1}, next.options).ok());
    expect_rows(next.rows, next.keys);
    // Its connections were closed: a reply to an earlier request would count as a failure.
    for (const ServerCounts& counts : client->server_counts()) EXPECT_EQ(counts.failures, 0u);
  }
}

// A pull without keys sends nothing, so nothing would arrive.
TEST_F(StartedTest, StartsNoPullWithoutKeys) {
  add_server(0xFF);
  const auto client = connect();
  Pull pull({});
  ASSERT_TRUE(client->pull_many({&pull.pull, 1}, pull.options).ok());
  EXPECT_EQ(pull.start(*client), nullptr);
}

}  // namespace
}  // namespace petps::client
