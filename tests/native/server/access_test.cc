// Who gets in through the native door, and which error the others see.
#include "access/access.h"

#include <gtest/gtest.h>

#include <numeric>

#include "server_fixture.h"

namespace petps::server {
namespace {

using access::Role;
using base::Code;
using base::Status;

access::Grant grant_of(const std::string& name, const std::string& token,
                       const std::vector<Role>& roles, std::vector<std::string> models = {}) {
  access::Grant grant;
  grant.name = name;
  grant.has_token = true;
  grant.token = access::hash_token(token);
  for (const Role role : roles) grant.roles |= static_cast<access::Roles>(role);
  grant.models = std::move(models);
  return grant;
}

wire::Frame hello_frame(std::string_view token) {
  wire::Frame frame;
  wire::encode_hello(1, {1, 1, "test", token}, frame);
  return frame;
}

class AccessTest : public ServerTest {
 protected:
  AccessTest() {
    options_.gate = gate_;
    grants_ = {grant_of("reader", "r", {Role::kRead}), grant_of("writer", "w", {Role::kWrite}),
               grant_of("operator", "a", {Role::kAdmin}),
               grant_of("here", "h", {Role::kRead, Role::kWrite}, {model()}),
               grant_of("elsewhere", "e", {Role::kRead, Role::kWrite, Role::kAdmin}, {"other"})};
    gate_->replace(grants_);
  }
  std::string model() const { return pool_.tables->pool().instances()[0].model; }
  // Return a client that has said hello with the token.
  std::unique_ptr<RawClient> connect_as(const std::string& token) {
    auto client = connect();
    const Status status = client->call(hello_frame(token)).error();
    EXPECT_TRUE(status.ok()) << status.to_string();
    return client;
  }
  wire::Frame tables_frame() const {
    wire::Frame frame;
    wire::encode_tables(2, {}, frame);
    return frame;
  }
  wire::Frame status_frame() const {
    wire::Frame frame;
    wire::encode_status(3, frame);
    return frame;
  }
  wire::Frame hot_keys_frame() const {
    const std::vector<uint64_t> keys{1, 2};
    wire::Frame frame;
    wire::encode_hot_keys(4, {users_.id(), keys}, frame);
    return frame;
  }
  wire::Frame pull_of_users() const { return pull_frame(7, {{users_.id(), {1}}}); }
  wire::Frame push_to_users() const { return push_frame(8, users_, {1}, 1); }

  std::shared_ptr<access::Gate> gate_ = std::make_shared<access::Gate>(access::Mode::kGrants);
  std::vector<access::Grant> grants_;
};

TEST_F(AccessTest, EachOperationNeedsItsRole) {
  start();
  struct Case {
    const char* token;
    bool pulls, pushes, hot_keys, sees_status;
  };
  for (const Case& rights :
       {Case{"r", true, false, true, true}, Case{"w", false, true, false, false},
        Case{"a", false, false, false, true}, Case{"h", true, true, true, false},
        Case{"e", false, false, false, false}}) {
    SCOPED_TRACE(rights.token);
    const auto client = connect_as(rights.token);
    const auto expect = [&](const wire::Frame& frame, bool is_allowed) {
      const Status status = client->call(frame).error();
      EXPECT_EQ(status.code(), is_allowed ? Code::kOk : Code::kPermissionDenied)
          << status.to_string();
    };
    expect(pull_of_users(), rights.pulls);
    expect(push_to_users(), rights.pushes);
    expect(hot_keys_frame(), rights.hot_keys);
    expect(status_frame(), rights.sees_status);
    expect(tables_frame(), true);
  }
  EXPECT_EQ(gate_->counts().requests_denied, 12u);
}

TEST_F(AccessTest, AConnectionWithoutACredentialGetsOneErrorAndIsClosed) {
  start();
  for (const wire::Frame& frame : {pull_of_users(), push_to_users(), hot_keys_frame(),
                                   status_frame(), tables_frame(), hello_frame("")}) {
    const auto client = connect();
    expect_error(client->call(frame).error(), Code::kUnauthenticated, "needs a token");
    EXPECT_TRUE(client->receive().closed);
  }
}

TEST_F(AccessTest, NobodySendsALongFrameBeforeTheHello) {
  start();
  std::vector<uint64_t> keys(200);
  std::iota(keys.begin(), keys.end(), 0);
  const wire::Frame pull = pull_frame(7, {{users_.id(), keys}});
  ASSERT_GT(pull.size(), wire::kFirstFrameBytes);
  const auto stranger = connect();
  stranger->send(
      std::span(pull).first(wire::kHeaderBytes));  // its bytes would be kept till the end
  expect_error(stranger->last_error(), Code::kResourceExhausted, "begin with a hello");
  const auto longest = connect();  // of hellos
  wire::Frame hello;
  const std::string name(wire::kMaxNameBytes, 'x');
  wire::encode_hello(1, {1, 1, name, name}, hello);
  EXPECT_LE(hello.size(), wire::kFirstFrameBytes);
  EXPECT_EQ(longest->call(hello).error().code(), Code::kUnauthenticated);
  EXPECT_TRUE(decode_pulled(connect_as("r")->call(pull)).status.ok());
}

TEST_F(AccessTest, AnOpenServerTakesALongFirstFrame) {
  options_.gate = nullptr;
  start();
  std::vector<uint64_t> keys(200);
  std::iota(keys.begin(), keys.end(), 0);
  EXPECT_TRUE(decode_pulled(connect()->call(pull_frame(7, {{users_.id(), keys}}))).status.ok());
}

TEST_F(AccessTest, AMapIsShownOnlyToGrantsOfItsModel) {
  options_.address = "127.0.0.1:7070";
  start();
  wire::ShardMap map;
  map.model = model();
  map.version = 3;
  map.partitions = 2;
  map.servers = {{.address = options_.address, .partitions = {0b01}},
                 {.address = "127.0.0.1:7171", .partitions = {0b10}}};
  const Status status = server_->set_shard_map(map);
  ASSERT_TRUE(status.ok()) << status.to_string();
  const auto version_for = [&](const std::string& token) {
    wire::Frame frame;
    wire::encode_shard_map(5, frame);
    const Reply reply = connect_as(token)->call(frame);
    wire::ShardMap answer;
    EXPECT_TRUE(wire::decode_shard_map_reply(reply.header, reply.body, answer).ok());
    return answer.version;
  };
  EXPECT_EQ(version_for("h"), 3u);
  EXPECT_EQ(version_for("w"), 3u);
  EXPECT_EQ(version_for("e"), 0u);
  // A pull of a table that it may not read says nothing of the map either.
  for (uint64_t key = 0; key < 8; ++key) {
    const wire::Frame pull = pull_frame(7, {{users_.id(), {key}}});
    EXPECT_EQ(connect_as("e")->call(pull).error().code(), Code::kPermissionDenied);
    const wire::Frame push = push_frame(8, users_, {key}, 1);
    EXPECT_EQ(connect_as("e")->call(push).error().code(), Code::kPermissionDenied);
  }
}

TEST_F(AccessTest, AFloodAboutPeersHasFewLines) {
  start();
  uint64_t number = 0;
  size_t lines = 0;
  const auto read = [&] {
    for (const Incident& incident : server_->incidents_after(number)) {
      number = incident.number;
      if (!incident.host.empty()) ++lines;
    }
  };
  for (int host = 1; host <= 12; ++host) {
    for (uint32_t i = 0; i < access::kFailuresMax; ++i) {
      RawClient client(server_->port(), "127.0.0.1", "127.0.1." + std::to_string(host));
      EXPECT_EQ(client.call(hello_frame("wrong")).error().code(), Code::kUnauthenticated);
      read();
    }
  }
  ASSERT_GT(12 * access::kFailuresMax, 60u);
  EXPECT_EQ(lines, 60u);
}

TEST_F(AccessTest, AWrongTokenGetsOneErrorAndIsClosed) {
  start();
  const auto client = connect();
  expect_error(client->call(hello_frame("s3cret")).error(), Code::kUnauthenticated,
               "not known to this server");
  EXPECT_TRUE(client->receive().closed);
  EXPECT_TRUE(waits_until([&] { return status_contains("UNAUTHENTICATED"); }));
  EXPECT_FALSE(status_contains("s3cret")) << "a token is a secret";
  connect_as("r");
}

TEST_F(AccessTest, AnotherHelloChangesTheCaller) {
  start();
  const auto client = connect_as("r");
  EXPECT_EQ(client->call(push_to_users()).error().code(), Code::kPermissionDenied);
  EXPECT_TRUE(client->call(hello_frame("w")).error().ok());
  EXPECT_TRUE(client->call(push_to_users()).error().ok());
  EXPECT_EQ(client->call(pull_of_users()).error().code(), Code::kPermissionDenied);
  expect_error(client->call(hello_frame("wrong")).error(), Code::kUnauthenticated, "not known");
  EXPECT_TRUE(client->receive().closed) << "it must not stay the writer";
}

TEST_F(AccessTest, FurtherFailuresOfOnePeerAreNotReportedOneByOne) {
  start();
  for (uint32_t i = 0; i <= access::kFailuresMax; ++i) {
    const Status status = connect()->call(hello_frame("wrong")).error();
    const bool is_last = i == access::kFailuresMax;
    EXPECT_EQ(status.code(), is_last ? Code::kResourceExhausted : Code::kUnauthenticated);
  }
  const std::string status = server_->status_json();
  size_t reported = 0;
  for (size_t at = 0; (at = status.find("UNAUTHENTICATED: ", at)) != std::string::npos; ++at)
    ++reported;
  EXPECT_EQ(reported, access::kFailuresMax);
  connect_as("r");
}

TEST_F(AccessTest, TheCatalogueHasOnlyModelsOfTheGrant) {
  start();
  wire::TablesReply list;
  Reply reply = connect_as("h")->call(tables_frame());
  ASSERT_TRUE(wire::decode_tables_reply(reply.header, reply.body, list).ok());
  EXPECT_EQ(list.tables.size(), 3u);
  EXPECT_EQ(list.instances.size(), 1u);
  ASSERT_TRUE(pool_.tables->pool().set_alias("live", pool_.instance).ok());
  reply = connect_as("e")->call(tables_frame());
  ASSERT_TRUE(wire::decode_tables_reply(reply.header, reply.body, list).ok());
  EXPECT_TRUE(list.tables.empty());
  EXPECT_TRUE(list.instances.empty());
  EXPECT_TRUE(list.aliases.empty());
}

TEST_F(AccessTest, NoErrorTellsWhetherATableExists) {
  start();
  const auto client = connect_as("e");
  const uint32_t unknown = 4711;
  const auto text_of = [&](uint32_t id) {
    std::string text(client->call(pull_frame(7, {{id, {1}}})).error().message());
    const std::string number = std::to_string(id);
    return text.replace(text.find(number), number.size(), "N");
  };
  EXPECT_EQ(text_of(users_.id()), text_of(unknown));
  wire::Frame frame;
  const std::vector<uint64_t> keys{1};
  wire::encode_hot_keys(4, {unknown, keys}, frame);
  expect_error(client->call(frame).error(), Code::kPermissionDenied, "table 4711");
}

TEST_F(AccessTest, ARequestIsRefusedWholeIfOneOfItsTablesIs) {
  start();
  expect_error(connect_as("h")->call(pull_frame(7, {{users_.id(), {1}}, {4711, {1}}})).error(),
               Code::kPermissionDenied, "table 4711");
}

TEST_F(AccessTest, ARevokedTokenEndsItsConnectionsAndNoOther) {
  start();
  const auto reader = connect_as("r");
  const auto other = connect_as("h");
  expect_serves(*reader);
  grants_.erase(grants_.begin());
  gate_->replace(grants_);
  expect_error(reader->last_error(), Code::kUnauthenticated, "the grant of 'reader' was revoked");
  expect_serves(*other);
  expect_error(connect()->call(hello_frame("r")).error(), Code::kUnauthenticated, "revoked");
}

TEST_F(AccessTest, AChangedGrantHoldsForOpenConnections) {
  start();
  const auto client = connect_as("r");
  expect_serves(*client);
  grants_[0].roles = static_cast<access::Roles>(Role::kWrite);
  gate_->replace(grants_);
  EXPECT_TRUE(waits_until(
      [&] { return client->call(pull_of_users()).error().code() == Code::kPermissionDenied; }));
}

TEST_F(AccessTest, APushInFlightIsAnsweredBeforeItsConnectionEnds) {
  start();
  const auto client = connect_as("w");
  // The gate has other grants before the worker sees the push, or while the writer has it.
  for (int round = 0; round < 50; ++round) {
    const auto again = connect_as("w");
    again->send(push_to_users());
    gate_->replace({});
    const Reply reply = again->receive();
    ASSERT_FALSE(reply.closed);
    const Status status = reply.error();
    EXPECT_TRUE(status.ok() || status.code() == Code::kUnauthenticated) << status.to_string();
    gate_->replace(grants_);
  }
}

TEST_F(AccessTest, ALimitRefusesARequestAndKeepsTheConnection) {
  grants_[0].requests_per_second = 1;
  gate_->replace(grants_);
  start();
  const auto client = connect_as("r");
  Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = client->call(pull_of_users()).error();
  expect_error(status, Code::kResourceExhausted, "'reader' has used up its 1 requests a second");
  expect_serves(*connect_as("h"));
  EXPECT_TRUE(waits_until([&] { return client->call(pull_of_users()).error().ok(); }));
  EXPECT_GT(gate_->counts().requests_limited, 0u);
}

TEST_F(AccessTest, AFrameThatWaitsIsCountedOnce) {
  // A pull that waits for a version is handled again and again. The limit admits two requests and
  // the hello within a second, and refuses the third pull only if the waiting one counted more.
  grants_[0].requests_per_second = 3;
  gate_->replace(grants_);
  start();
  const auto client = connect_as("r");
  const Status status =
      client->call(pull_frame(7, {{users_.id(), {1}}}, 0, 1'000'000, 200)).error();
  EXPECT_EQ(status.code(), Code::kStale) << status.to_string();
  expect_serves(*client);
}

TEST_F(AccessTest, WithoutAGateEverybodyMayDoEverything) {
  options_.gate = nullptr;
  start();
  expect_serves(*connect());
  connect_as("any token is ignored");
}

}  // namespace
}  // namespace petps::server
