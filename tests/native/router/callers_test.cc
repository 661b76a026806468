// Tokens through a router: whose rights a request has, and what one caller may take from others.
#include <atomic>

#include "access/access.h"
#include "router/calls.h"
#include "router/names.h"
#include "router_fixture.h"
#include "tests/support/certificates/certificates.h"

namespace petps::router {
namespace {

using access::Role;
using client::testing::Answer;
using client::testing::FakeServer;
using client::testing::first_keys;
using client::testing::keys_of;
using client::testing::kKeys;
using client::testing::kPartitions;
using client::testing::rows_of;

access::Grant grant_of(const std::string& token, const std::vector<Role>& roles,
                       std::vector<std::string> models = {}) {
  access::Grant grant;
  grant.name = "of " + token;
  grant.has_token = true;
  grant.token = access::hash_token(token);
  for (const Role role : roles) grant.roles |= static_cast<access::Roles>(role);
  grant.models = std::move(models);
  return grant;
}

class RouterCallers : public RouterFixture {
 protected:
  // Start a server that asks for tokens, with the rows of its partitions.
  void add_guarded(uint64_t owned, std::shared_ptr<const tls::ServerContext> tls = nullptr) {
    server::ServerOptions options;
    options.gate = gate_;
    options.tls = std::move(tls);
    auto server = std::make_unique<RealServer>(options, kPartitions);
    for (size_t i = 0; i < servers_.size(); ++i)
      server->add_table("spare" + std::to_string(i), codec::Dtype::kF32, 1, 10, 0);
    table::Table& table = server->add_table("f32", codec::Dtype::kF32, kDim, 4 * kKeys, 0);
    RealServer::fill(table, keys_of(owned), 0);
    server->start();
    owned_.push_back(owned);
    servers_.push_back(std::move(server));
  }
  void start_guarded() {
    gate_->replace({grant_of("reader", {Role::kRead}), grant_of("writer", {Role::kWrite}),
                    grant_of("elsewhere", {Role::kRead}, {"another"})});
    add_guarded(kFirstHalf);
    add_guarded(kSecondHalf);
    publish();
    start();
  }
  static Status push(Client& client, uint64_t version) {
    const std::vector<uint64_t> keys = first_keys(200);
    return client.push("f32", keys, rows_of(keys, kDim, version), kDim).status();
  }

  std::shared_ptr<access::Gate> gate_ = std::make_shared<access::Gate>(access::Mode::kGrants);
};

TEST_F(RouterCallers, ATokenDecidesWhatItsCallerMay) {
  start_guarded();
  const auto reader = connect_to_router("reader");
  const auto writer = connect_to_router("writer");
  std::atomic<int> pulls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        std::vector<float> rows(200 * kDim);
        const auto report = reader->pull("f32", first_keys(200), rows);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        expect_error(push(*reader, 1), Code::kPermissionDenied, {"of reader"});
        ++pulls;
      }
    });
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const Status pushed = push(*writer, 0);
        ASSERT_TRUE(pushed.ok()) << pushed.to_string();
        expect_error(pull(*writer, first_keys(200)).status(), Code::kPermissionDenied,
                     {"of writer"});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pulls, 150);
  EXPECT_EQ(router_->snapshot().callers, 2u);
}

TEST_F(RouterCallers, WithoutAGoodTokenNobodyIsServed) {
  start_guarded();
  expect_error(refusal_of(""), Code::kUnauthenticated, {"token"});
  expect_error(refusal_of("guessed"), Code::kUnauthenticated, {"token"});
  EXPECT_EQ(router_->snapshot().callers, 0u);
  // A stranger does not learn where the servers are.
  for (const char* token : {"", "guessed"}) {
    const Status refusal = hello(*raw(), token);
    for (const auto& server : servers_) {
      EXPECT_EQ(refusal.message().find(server->address()), std::string_view::npos)
          << refusal.to_string();
    }
  }
  // A request without a hello is one without a token, and its connection is closed.
  const auto client = raw();
  const server::Reply reply = client->call(server::pull_frame(9, {{1, {1}}}));
  EXPECT_EQ(reply.header.request_id, 9u);
  EXPECT_EQ(reply.error().code(), Code::kUnauthenticated);
  EXPECT_TRUE(client->receive().closed);
  // A right token passes after any number of wrong ones.
  for (int i = 0; i < 30; ++i) {
    expect_error(refusal_of("guessed" + std::to_string(i)), Code::kUnauthenticated,
                 {"the servers do not know this token"});
  }
  ASSERT_TRUE(pull(*connect_to_router("reader"), first_keys(100)).ok());
}

TEST_F(RouterCallers, ARevokedTokenEnds) {
  start_guarded();
  const auto reader = connect_to_router("reader");
  ASSERT_TRUE(pull(*reader, first_keys(100)).ok());
  ASSERT_TRUE(router_->names("reader", "127.0.0.1").ok());
  gate_->replace({grant_of("writer", {Role::kWrite})});
  EXPECT_TRUE(waits_until(
      [&] { return pull(*reader, first_keys(100)).status().code() == Code::kUnauthenticated; }));
  EXPECT_TRUE(waits_until([&] {
    return router_->names("reader", "127.0.0.1").status().code() == Code::kUnauthenticated;
  }));
}

// As at a server: a client with a file of tokens connects again with the next one.
TEST_F(RouterCallers, TheConnectionsOfARevokedTokenEndWithTheirNextRequest) {
  start_guarded();
  const auto reader = raw();
  const auto writer = raw();
  ASSERT_TRUE(hello(*reader, "reader").ok());
  ASSERT_TRUE(hello(*writer, "writer").ok());
  const uint32_t table = id_of(tables_of(*reader), "f32");
  const uint32_t of_writer = id_of(tables_of(*writer), "f32");
  gate_->replace({grant_of("writer", {Role::kWrite})});
  server::Reply last;
  EXPECT_TRUE(waits_until([&] {
    last = reader->call(server::pull_frame(1, {{table, {1}}}));
    return !last.error().ok();
  }));
  expect_error(last.error(), Code::kUnauthenticated, {"connect again"});
  EXPECT_TRUE(reader->receive().closed);
  EXPECT_FALSE(router_->knows("reader", "127.0.0.1"));
  EXPECT_EQ(hello(*raw(), "reader").code(), Code::kUnauthenticated);
  // A wrong token on a connection of a right one ends nobody else's.
  const auto other = raw();
  ASSERT_TRUE(hello(*other, "writer").ok());
  EXPECT_FALSE(hello(*other, "guessed").ok());
  EXPECT_TRUE(router_->knows("writer", "127.0.0.1"));
  EXPECT_EQ(writer->call(server::pull_frame(2, {{of_writer, {1}}})).error().code(),
            Code::kPermissionDenied);
  router_->tend();  // nobody uses the former caller now
}

// The servers decide about requests too for which the router needs nothing of them.
TEST_F(RouterCallers, ServersDecideAboutRequestsWithoutKeys) {
  start_guarded();
  const auto reader = raw();
  const auto writer = raw();
  ASSERT_TRUE(hello(*reader, "reader").ok());
  ASSERT_TRUE(hello(*writer, "writer").ok());
  const uint32_t table = id_of(tables_of(*reader), "f32");
  const uint32_t of_writer = id_of(tables_of(*writer), "f32");
  EXPECT_TRUE(reader->call(server::pull_frame(1, {{table, {}}})).error().ok());
  // Keys of unknown tables are none either.
  for (const server::Section& unknown : {server::Section{4711, {}}, server::Section{4711, {1}}}) {
    expect_error(writer->call(server::pull_frame(2, {unknown, {of_writer, {}}})).error(),
                 Code::kPermissionDenied, {"of writer"});
  }
  wire::Frame frame;
  wire::encode_hot_keys(3, {of_writer, {}}, frame);
  expect_error(writer->call(frame).error(), Code::kPermissionDenied, {"of writer"});
}

TEST_F(RouterCallers, ARevokedTokenGetsNoShardMap) {
  start_guarded();
  const auto reader = raw();
  ASSERT_TRUE(hello(*reader, "reader").ok());
  wire::Frame frame;
  wire::encode_shard_map(1, frame);
  EXPECT_TRUE(reader->call(frame).error().ok());
  gate_->replace({grant_of("writer", {Role::kWrite})});
  expect_error(first_refusal(*reader, frame), Code::kUnauthenticated, {"connect again"});
}

TEST_F(RouterCallers, ACallersLimitsCountItsShardMaps) {
  access::Grant grant = grant_of("slow", {Role::kRead});
  grant.requests_per_second = 20;
  gate_->replace({grant});
  add_guarded(kAllPartitions);
  start();
  const auto slow = raw();
  ASSERT_TRUE(hello(*slow, "slow").ok());
  wire::Frame frame;
  wire::encode_shard_map(1, frame);
  expect_error(first_refusal(*slow, frame), Code::kResourceExhausted, {"20 requests a second"});
}

TEST_F(RouterCallers, ACallerSeesNoTablesOfOthers) {
  gate_->replace(
      {grant_of("a", {Role::kRead}, {"ranking"}), grant_of("b", {Role::kRead}, {"another"})});
  add_guarded(kAllPartitions);
  RealServer& server = *servers_[0];
  const auto another = server.tables().pool().create_instance("another", "another@1", 2);
  ASSERT_TRUE(another.ok());
  server.add_table("secret", codec::Dtype::kF32, kDim, 100, 10, {}, pool::Feed::kPush,
                   another.value().id);
  start();
  const auto a = raw();
  const auto b = raw();
  ASSERT_TRUE(hello(*a, "a").ok());
  ASSERT_TRUE(hello(*b, "b").ok());
  const wire::TablesReply of_a = tables_of(*a);
  const wire::TablesReply of_b = tables_of(*b);
  ASSERT_EQ(of_a.tables.size(), 1u);
  ASSERT_EQ(of_b.tables.size(), 1u);
  EXPECT_EQ(of_a.tables[0].name, "f32");
  EXPECT_EQ(of_b.tables[0].name, "secret");
  EXPECT_NE(of_a.state.pool_uuid, of_b.state.pool_uuid);
  // Ids are of one caller: each has its own table at the same one, and no other one.
  for (uint32_t id = 0; id < 10; ++id) {
    const server::Pulled pulled =
        server::decode_pulled(a->call(server::pull_frame(id, {{id, {1}}})));
    if (id == of_a.tables[0].id) {
      ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
      EXPECT_EQ(pulled.rows[0].size(), kDim * sizeof(float));
    } else {
      EXPECT_EQ(pulled.status.code(), Code::kNotFound);
      EXPECT_EQ(pulled.status.message().find("secret"), std::string_view::npos);
    }
  }
}

TEST_F(RouterCallers, TheStatusNeedsTheSightOfAServers) {
  start_guarded();
  const auto status = connect_to_router("reader")->status();
  ASSERT_TRUE(status.ok()) << status.status().to_string();
  EXPECT_NE(status.value().find("\"kind\":\"router\""), std::string::npos);
  EXPECT_TRUE(router_->check_sight("reader", "127.0.0.1").ok());
  expect_error(router_->check_sight("writer", "127.0.0.1"), Code::kPermissionDenied, {});
  expect_error(router_->check_sight("", "127.0.0.1"), Code::kUnauthenticated, {});
  // A revoked token that asks for nothing else ends too.
  gate_->replace({grant_of("writer", {Role::kWrite})});
  EXPECT_TRUE(waits_until([&] {
    (void)router_->check_sight("reader", "127.0.0.1");
    return !router_->knows("reader", "127.0.0.1");
  }));
}

TEST_F(RouterCallers, ServesSoManyTokensAndForgetsIdleOnes) {
  options_.callers = 2;
  options_.caller_idle_ms = 1;
  start_guarded();
  auto reader = connect_to_router("reader");
  auto writer = connect_to_router("writer");
  expect_error(refusal_of("elsewhere"), Code::kResourceExhausted, {"2 tokens", "router.callers"});
  reader.reset();
  // A token without connections gives its place up, and comes back when it is used again.
  EXPECT_TRUE(waits_until([&] { return refusal_of("elsewhere").code() == Code::kNotFound; }));
  writer.reset();
  EXPECT_TRUE(waits_until([&] {
    router_->tend();
    return router_->snapshot().callers == 0;
  }));
  ASSERT_TRUE(pull(*connect_to_router("reader"), first_keys(100)).ok());
}

TEST_F(RouterCallers, BeyondLoopbackTheServersMustAskForTokens) {
  options_.needs_token = true;
  start_guarded();
  ASSERT_TRUE(pull(*connect_to_router("reader"), first_keys(100)).ok());
  expect_error(refusal_of(""), Code::kUnauthenticated, {});
  // The same router in front of a server that asks nobody serves nobody.
  RealServer open;
  open.add_table("f32", codec::Dtype::kF32, kDim, 100, 10);
  open.start();
  router_.reset();
  start_for("petps://" + open.address());
  for (const char* token : {"", "any"}) {
    expect_error(refusal_of(token), Code::kFailedPrecondition,
                 {"nobody for credentials", "router.insecure"});
  }
  router_.reset();
}

TEST_F(RouterCallers, ServersThatBeginToServeEverybodyAreNoticed) {
  options_.needs_token = true;
  // It refuses its second caller: the one without a token by whom the router checks that it asks
  // for one. Then all get in, as after a restart without an access file.
  FakeServer server([](wire::Opcode opcode, uint64_t count, wire::Frame& reply) {
    if (opcode == wire::Opcode::kHello && count == 1)
      client::testing::replace_by_error(reply, Code::kUnauthenticated, "who are you?");
    return Answer::kSend;
  });
  start_for("petps://" + server.address());
  ASSERT_TRUE(hello(*raw(), "known").ok());
  for (const char* token : {"", "any"}) {
    expect_error(hello(*raw(), token), Code::kFailedPrecondition,
                 {"nobody for credentials", "router.insecure"});
  }
  router_.reset();
}

// The same if a token comes first: what the servers refused counts only for a time.
TEST_F(RouterCallers, ThatServersAskForCredentialsIsLookedAtAgain) {
  for (const bool counts : {true, false}) {
    FakeServer server([](wire::Opcode opcode, uint64_t count, wire::Frame& reply) {
      if (opcode == wire::Opcode::kHello && count == 1)
        client::testing::replace_by_error(reply, Code::kUnauthenticated, "who are you?");
      return Answer::kSend;
    });
    CallersOptions options;
    options.servers = "petps://" + server.address();
    options.needs_token = true;
    options.refusal_counts_ms = counts ? 600'000 : 0;
    Callers callers(options);
    ASSERT_TRUE(callers.open("known", "127.0.0.1", true).ok());
    const auto other = callers.open("any", "127.0.0.1", true);
    EXPECT_EQ(other.status().code(), counts ? Code::kOk : Code::kFailedPrecondition);
  }
}

// A caller that is forgotten between its names and its request has other ids afterwards.
TEST_F(RouterCallers, IdsAreThoseOfTheNamesThatWereSeen) {
  options_.callers = 1;
  gate_->replace({grant_of("a", {Role::kRead}), grant_of("b", {Role::kRead})});
  add_guarded(kAllPartitions);
  start();
  auto seen = router_->names("a", "127.0.0.1");
  ASSERT_TRUE(seen.ok()) << seen.status().to_string();
  ASSERT_EQ(seen.value().listing->reply.tables.size(), 1u);
  const uint32_t id = seen.value().listing->reply.tables[0].id;
  // It is in use, so nobody takes its place.
  expect_error(router_->names("b", "127.0.0.1").status(), Code::kResourceExhausted, {});
  servers_[0]->add_table("before", codec::Dtype::kF32, kDim, 100, 10);
  const wire::Frame reply =
      router_->call(seen.value(), "a", "127.0.0.1", server::pull_frame(1, {{id, first_keys(10)}}));
  wire::FrameHeader header;
  std::memcpy(&header, reply.data(), sizeof(header));
  EXPECT_EQ(header.code, static_cast<uint16_t>(Code::kOk));
  seen = Status(Code::kInternal, "forgotten");
  EXPECT_TRUE(router_->names("b", "127.0.0.1").ok());
}

TEST_F(RouterCallers, GuessedTokensNeitherKeepGoodOnesOutNorStayConnected) {
  options_.needs_token = true;
  start_guarded();
  std::vector<std::unique_ptr<RawClient>> guesses;
  for (int i = 0; i < 30; ++i) {
    guesses.push_back(raw());
    EXPECT_FALSE(hello(*guesses.back(), "guessed" + std::to_string(i)).ok());
    EXPECT_TRUE(guesses.back()->receive().closed) << i;
  }
  EXPECT_EQ(router_->snapshot().logins_failed, 30u);
  ASSERT_TRUE(pull(*connect_to_router("reader"), first_keys(100)).ok());
}

// Guessed tokens that wait for a server take no place of a call, however many hosts send them.
TEST_F(RouterCallers, GuessedTokensDelayNobodyWhoIsKnown) {
  std::atomic<bool> is_silent{false};
  FakeServer server([&](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kHello && is_silent ? Answer::kSilent : Answer::kSend;
  });
  options_.calls = 4;
  options_.deadline_ms = 5'000;  // of a login that is not answered
  start_for("petps://" + server.address());
  const auto caller = raw();
  ASSERT_TRUE(waits_until([&] { return hello(*caller, "known").ok(); }));
  const uint32_t table = id_of(tables_of(*caller), "users");
  const auto pulls = [&] {  // it may need a connection of its own for once
    return caller->call(server::pull_frame(1, {{table, {2, 4}}})).error().ok();
  };
  ASSERT_TRUE(waits_until(pulls));
  is_silent = true;
  std::vector<std::unique_ptr<RawClient>> guesses;
  for (const char* host : {"127.0.0.2", "127.0.0.3"}) {
    for (int i = 0; i < 12; ++i) {
      wire::Frame frame;
      wire::encode_hello(1, {.client = "raw", .token = host + std::to_string(i)}, frame);
      guesses.push_back(raw(host));
      guesses.back()->send(frame);
    }
  }
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().logins_in_flight == kLogins; }));
  EXPECT_EQ(router_->snapshot().calls_in_flight, 0u);
  EXPECT_TRUE(waits_until(pulls));
  const auto again = raw();
  EXPECT_TRUE(hello(*again, "known").ok());
  EXPECT_TRUE(router_->knows("known", "127.0.0.1"));
  EXPECT_FALSE(router_->knows("127.0.0.20", "127.0.0.2"));
  is_silent = false;
  guesses.clear();
  router_.reset();
}

TEST_F(RouterCallers, WhoGuessesHasOneLoginAtATime) {
  std::atomic<bool> is_silent{false};
  FakeServer server([&](wire::Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode != wire::Opcode::kHello) return Answer::kSend;
    client::testing::replace_by_error(reply, Code::kUnauthenticated, "unknown");
    while (is_silent) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Answer::kSend;
  });
  start_for("petps://" + server.address());
  EXPECT_TRUE(waits_until([&] {
    const auto guess = raw();
    (void)hello(*guess, "guessed");
    return router_->snapshot().logins_failed > kFailuresMax;
  }));
  is_silent = true;
  const uint64_t asked = server.count(wire::Opcode::kHello);
  const auto first = raw();
  wire::Frame frame;
  wire::encode_hello(1, {.client = "raw", .token = "first"}, frame);
  first->send(frame);
  EXPECT_TRUE(waits_until([&] { return server.count(wire::Opcode::kHello) > asked; }));
  // gRPC callers are refused at once, and native ones wait without a place.
  expect_error(router_->names("second", "127.0.0.1").status(), Code::kResourceExhausted,
               {"refused many lately"});
  const auto second = raw();
  wire::Frame other;
  wire::encode_hello(1, {.client = "raw", .token = "second"}, other);
  second->send(other);
  for (int i = 0; i < 20; ++i) {
    EXPECT_LE(router_->snapshot().logins_in_flight, 1u);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  is_silent = false;
  EXPECT_EQ(second->receive().error().code(), Code::kUnauthenticated);
  router_.reset();
}

// More logins than places: those that wait too long are refused, and do not wait for ever.
TEST_F(RouterCallers, ALoginThatFindsNoPlaceIsRefusedInTime) {
  FakeServer server([](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kHello ? Answer::kSilent : Answer::kSend;
  });
  options_.deadline_ms = 500;
  start_for("petps://" + server.address());
  std::vector<std::unique_ptr<RawClient>> clients;
  for (uint32_t i = 0; i < 4 * kLoginsOfHost; ++i) {
    wire::Frame frame;
    wire::encode_hello(i, {.client = "raw", .token = "token" + std::to_string(i)}, frame);
    clients.push_back(raw());
    clients.back()->send(frame);
  }
  uint32_t refused = 0;
  for (uint32_t i = 0; i < clients.size(); ++i) {
    const server::Reply reply = clients[i]->receive();
    ASSERT_FALSE(reply.closed);
    EXPECT_EQ(reply.header.request_id, i);
    if (reply.error().code() != Code::kResourceExhausted) continue;  // it was asked, in vain
    expect_error(reply.error(), Code::kResourceExhausted,
                 {"no place for the login", "router.deadline_seconds"});
    EXPECT_TRUE(clients[i]->receive().closed);
    ++refused;
  }
  // Some may get the places of the first ones in time.
  EXPECT_GE(refused, kLoginsOfHost);
  router_.reset();
}

TEST_F(RouterCallers, GuessedTokensEndNoCaller) {
  options_.callers = 1;
  start_guarded();
  ASSERT_TRUE(pull(*connect_to_router("reader"), first_keys(100)).ok());
  EXPECT_EQ(refusal_of("guessed").code(), Code::kUnauthenticated);
  EXPECT_TRUE(router_->knows("reader", "127.0.0.1"));
}

// Servers refuse each login of a host with kResourceExhausted after several wrong ones of it.
TEST_F(RouterCallers, ARevokedTokenSeesNoNamesWhileOthersGuess) {
  start_guarded();
  ASSERT_TRUE(router_->names("reader", "127.0.0.1").ok());
  for (int i = 0; i < 30; ++i) (void)refusal_of("guessed" + std::to_string(i));
  gate_->replace({grant_of("writer", {Role::kWrite})});
  EXPECT_TRUE(waits_until([&] { return !router_->names("reader", "127.0.0.1").ok(); }));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(router_->names("reader", "127.0.0.1").ok());
  EXPECT_FALSE(router_->knows("reader", "127.0.0.1"));
}

TEST_F(RouterCallers, SpeaksTlsOnBothSides) {
  const tests::Authority authority;
  const auto pair = authority.issue_local();
  auto context = tls::ServerContext::open({pair.certificate, pair.key, {}, {}});
  ASSERT_TRUE(context.ok()) << context.status().to_string();
  const std::shared_ptr<tls::ServerContext> opened = std::move(context).value();
  gate_->replace({grant_of("reader", {Role::kRead})});
  add_guarded(kFirstHalf, opened);
  add_guarded(kSecondHalf, opened);
  publish();
  options_.tls = opened;
  options_.server_tls.ca = authority.ca();
  start_for("petps+tls://" + servers_[0]->address());
  Options options = quiet();
  options.token = "reader";
  options.tls.ca = authority.ca();
  const auto routed =
      connect_to("petps+tls://127.0.0.1:" + std::to_string(router_->port()), options);
  std::vector<float> rows(kKeys * kDim);
  const auto report = routed->pull("f32", first_keys(kKeys), rows);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(rows, rows_of(first_keys(kKeys), kDim));
  // A router that trusts another authority reaches no server, and says why.
  const tests::Authority stranger("stranger");
  router_.reset();
  options_.server_tls.ca = stranger.ca();
  start_for("petps+tls://" + servers_[0]->address());
  expect_error(
      Client::connect("petps+tls://127.0.0.1:" + std::to_string(router_->port()), options).status(),
      Code::kUnauthenticated, {servers_[0]->address()});
}

}  // namespace
}  // namespace petps::router
