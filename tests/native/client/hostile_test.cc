// Servers that lie, stall, hang up or send garbage. The client returns an error that names the
// server by the deadline, and never crashes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "fixtures.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using testing::Answer;
using testing::connect_to;
using testing::expect_error;
using testing::FakeServer;
using wire::Opcode;

constexpr size_t kKeys = 1300;  // three requests

Options quick() {
  Options options;
  options.deadline_ms = 250;
  options.catalogue_ms = 0;
  options.hot_sample_every = 0;
  return options;
}

// Options for calls that must succeed on a busy machine too.
Options patient() {
  Options options = quick();
  options.deadline_ms = 20'000;
  return options;
}

Status pull_once(Client& client) {
  const std::vector<uint64_t> keys = testing::first_keys(kKeys);
  std::vector<float> rows(kKeys * FakeServer::kDim);
  std::vector<uint8_t> mask(kKeys);
  return client.pull("users", keys, rows, mask).status();
}

// Connect and pull through `tamper`. Return the first error.
Status run(FakeServer::Tamper tamper, const Options& options = quick()) {
  FakeServer server(std::move(tamper));
  auto client = Client::connect(server.url(), options);
  if (!client.ok()) return client.status();
  return pull_once(**client);
}

using Call = std::function<Status(const Options&)>;

Call run_through(const FakeServer::Tamper& tamper) {
  return [tamper](const Options& options) { return run(tamper, options); };
}

Call connect_through(FakeServer& server) {
  return [&](const Options& options) { return Client::connect(server.url(), options).status(); };
}

bool names_any(const Status& status, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
    return status.message().find(part) != std::string::npos;
  });
}

// Call with ever longer deadlines until the error is not of the deadline, or contains one of the
// parts. On a busy machine a deadline may pass before the server runs. It may also cut the last
// attempts short, and the message names only the last two.
Status call_until_named(const Call& call, std::initializer_list<std::string_view> parts) {
  Options options = quick();
  Status status = call(options);
  while (status.code() == Code::kDeadlineExceeded && !names_any(status, parts) &&
         options.deadline_ms < 20'000) {
    options.deadline_ms *= 4;
    status = call(options);
  }
  return status;
}

FakeServer::Tamper tamper_reply(Opcode opcode, std::function<Answer(wire::Frame&)> change) {
  return [opcode, change](Opcode received, uint64_t, wire::Frame& reply) {
    return received == opcode ? change(reply) : Answer::kSend;
  };
}

FakeServer::Tamper tamper_header(Opcode opcode, std::function<void(wire::FrameHeader&)> change) {
  return tamper_reply(opcode, [change](wire::Frame& reply) {
    wire::FrameHeader header = testing::header_of(reply);
    change(header);
    std::memcpy(reply.data(), &header, sizeof(header));
    return Answer::kSend;
  });
}

FakeServer::Tamper tamper_section(std::function<void(wire::PullReplySection&)> change) {
  return tamper_reply(Opcode::kPull, [change](wire::Frame& reply) {
    wire::PullReplySection section;
    std::byte* at = reply.data() + wire::kHeaderBytes + sizeof(wire::PullReplyPrefix);
    std::memcpy(&section, at, sizeof(section));
    change(section);
    std::memcpy(at, &section, sizeof(section));
    return Answer::kSend;
  });
}

void expect_distrust(const Status& status, const char* part) {
  // On a busy machine the deadline may cut the last retry short. The message then includes the
  // error of the attempt before.
  const bool is_cut = status.code() == Code::kDeadlineExceeded;
  expect_error(status, is_cut ? status.code() : Code::kUnavailable, {"127.0.0.1:", part});
}

// Expect a call that fails because of what the server sent.
void expect_distrust(const Call& call, const char* part) {
  expect_distrust(call_until_named(call, {part}), part);
}

TEST(Hostile, RepliesOfACorrectServerAreAccepted) {
  FakeServer server;
  EXPECT_TRUE(pull_once(*connect_to(server.url(), patient())).ok());
}

TEST(Hostile, WrongHeadersBreakTheProtocol) {
  const struct {
    Opcode opcode;
    void (*change)(wire::FrameHeader& header);
    const char* part;
  } cases[] = {
      {Opcode::kPull, [](auto& h) { h.signature = 0x50545448; }, "not a petps frame"},
      {Opcode::kPull, [](auto& h) { h.version = 9; }, "protocol version 9"},
      {Opcode::kPull, [](auto& h) { h.opcode = 3; }, "where a reply is expected"},
      {Opcode::kPull, [](auto& h) { h.opcode = 0x8004; }, "does not fit the pull"},
      {Opcode::kPull, [](auto& h) { h.request_id += 1000; }, "not waiting"},
      {Opcode::kPull, [](auto& h) { h.request_id = 3; }, "not waiting"},
      {Opcode::kPull, [](auto& h) { h.body_bytes = 0xffffffff; }, "above the limit"},
      {Opcode::kPull, [](auto& h) { h.body_bytes = 8; }, "does not fit the pull"},
      {Opcode::kPull, [](auto& h) { h.body_bytes += 16; }, "do not announce the"},
      {Opcode::kPull, [](auto& h) { h.sections = 2; }, "does not fit the pull"},
      {Opcode::kPull, [](auto& h) { h.code = 6; }, "an error text of"},
      {Opcode::kHello, [](auto& h) { h.request_id += 1; }, "another request"},
      {Opcode::kTables, [](auto& h) { h.opcode = 0x8001; }, "another request"},
  };
  for (const auto& [opcode, change, part] : cases)
    expect_distrust(run_through(tamper_header(opcode, change)), part);
}

TEST(Hostile, AnErrorThatAnswersNoRequestIsReportedAsTheServerSentIt) {
  const auto tamper = tamper_reply(Opcode::kPull, [](wire::Frame& reply) {
    wire::encode_error(static_cast<uint16_t>(Opcode::kPull), 0,
                       Status(Code::kUnavailable, "the server is stopping"), reply);
    return Answer::kSend;
  });
  const char* const part = "the server is stopping";
  const Status status = call_until_named(run_through(tamper), {part});
  expect_distrust(status, part);
  EXPECT_EQ(status.message().find("broke the protocol"), std::string::npos) << status.to_string();
}

TEST(Hostile, WrongSectionsBreakTheProtocol) {
  const struct {
    void (*change)(wire::PullReplySection& section);
    const char* part;
  } cases[] = {
      {[](auto& s) { s.table += 1; }, "other tables"},
      {[](auto& s) { s.keys = 64; }, "broke the protocol"},
      {[](auto& s) { s.keys = 0xffffffff; }, "broke the protocol"},
      {[](auto& s) { s.rows_found += 1; }, "presence bits"},
      {[](auto& s) { s.row_bytes = 0xffffffff; }, "row bytes"},
      {[](auto& s) { s.row_bytes /= 2; }, "row bytes"},
      {[](auto& s) { s.code = 2; }, "does not have"},
  };
  for (const auto& [change, part] : cases)
    expect_distrust(run_through(tamper_section(change)), part);
}

TEST(Hostile, RowsOfAnotherWidthBreakTheProtocolEvenIfTheirBytesAddUp) {
  // Half of the rows, each twice as wide: consistent in itself, but wrong for the table.
  const auto tamper = tamper_reply(Opcode::kPull, [](wire::Frame& reply) {
    std::byte* at = reply.data() + wire::kHeaderBytes + sizeof(wire::PullReplyPrefix);
    wire::PullReplySection section;
    std::memcpy(&section, at, sizeof(section));
    section.rows_found /= 2;
    section.row_bytes *= 2;
    std::memcpy(at, &section, sizeof(section));
    auto* words = reinterpret_cast<uint64_t*>(at + sizeof(section));
    uint32_t kept = 0;
    for (uint32_t i = 0; i < section.keys; ++i) {
      const uint64_t bit = uint64_t{1} << (i % 64);
      if ((words[i / 64] & bit) != 0 && ++kept > section.rows_found) words[i / 64] &= ~bit;
    }
    return Answer::kSend;
  });
  expect_distrust(run_through(tamper), "rows of 32 bytes, the table's have 16");
}

TEST(Hostile, ACallToASilentServerFailsAtTheDeadline) {
  const char* const late = "no complete reply within ";
  for (const Opcode opcode : {Opcode::kHello, Opcode::kTables, Opcode::kPull}) {
    uint64_t ms = 0;
    uint64_t limit_ms = 0;
    const auto call = [&](const Options& options) {
      const uint64_t before = base::monotonic_ns();
      const Status status =
          run(tamper_reply(opcode, [](wire::Frame&) { return Answer::kSilent; }), options);
      ms = (base::monotonic_ns() - before) / 1'000'000;
      limit_ms = 2 * options.deadline_ms + 20'000;  // generous: the machine may be busy
      return status;
    };
    // On a busy machine the deadline may pass before the client has connected.
    expect_error(call_until_named(call, {late}), Code::kDeadlineExceeded, {"127.0.0.1:", late});
    EXPECT_GE(ms, 200u);
    EXPECT_LE(ms, limit_ms);
  }
}

// Expect a call that fails because the server closes. The client retries until the deadline, which
// may cut the last attempt on a busy machine. A request that arrives after the close is answered by
// a reset.
void expect_closed(const FakeServer::Tamper& tamper) {
  const auto closes = {std::string_view("clos"), std::string_view("Connection reset"),
                       std::string_view("Broken pipe")};
  const Status status = call_until_named(run_through(tamper), closes);
  EXPECT_TRUE(status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded)
      << status.to_string();
  EXPECT_TRUE(names_any(status, closes)) << status.to_string();
}

TEST(Hostile, ACallFailsWhenTheServerClosesAtAnyPoint) {
  for (const Opcode opcode : {Opcode::kHello, Opcode::kTables, Opcode::kPull}) {
    expect_closed(tamper_reply(opcode, [](wire::Frame&) { return Answer::kClose; }));
    for (const size_t kept : {1u, 31u, 32u, 40u, 56u, 100u, 137u, 1000u}) {
      expect_closed(tamper_reply(opcode, [kept](wire::Frame& reply) {
        reply.erase(reply.begin() + static_cast<ptrdiff_t>(std::min(kept, reply.size() - 1)),
                    reply.end());
        return Answer::kSendAndClose;
      }));
    }
  }
}

TEST(Hostile, ACallFailsWhenTheLastByteIsMissing) {
  const auto cut = [](wire::Frame& reply) {
    reply.pop_back();
    return Answer::kSend;
  };
  EXPECT_FALSE(run(tamper_reply(Opcode::kPull, cut)).ok());
}

TEST(Hostile, ContradictionsInTheCatalogueBreakTheProtocol) {
  const auto serve = [](auto change) {
    auto server = std::make_unique<FakeServer>();
    change(server->tables().tables[0]);
    return server;
  };
  const auto expect_refused = [&](auto change, const char* part) {
    const auto server = serve(change);
    expect_distrust(connect_through(*server), part);
  };
  expect_refused([](auto& t) { t.dim = 0; }, "dim 0");
  expect_refused([](auto& t) { t.dim = 5000; }, "dim 5000");
  expect_refused([](auto& t) { t.row_bytes = 12; }, "12 row bytes");
  const auto odd = serve([](auto& t) { t.default_row.resize(3); });
  EXPECT_FALSE(call_until_named(connect_through(*odd), {}).ok());
  const auto newer = serve([](auto& t) { t.dtype = 77; });
  expect_error(call_until_named(connect_through(*newer), {}), Code::kUnimplemented, {});
  FakeServer wide;
  wide.tables().instances[0].partitions = wire::kMaxPartitions + 1;
  expect_distrust(connect_through(wide), "has 1025 partitions");
  FakeServer server;
  server.hello().limits.in_flight = 0;
  expect_distrust(connect_through(server), "limit of 0");
}

TEST(Hostile, ContradictionsInTheShardMapBreakTheProtocol) {
  const auto expect_refused = [](const wire::ShardMap& map, const char* part) {
    FakeServer server;
    server.set_shard_map(map);
    const Status status = call_until_named(connect_through(server), {part});
    expect_error(status, Code::kUnavailable, {"127.0.0.1:", part});
  };
  expect_refused({"ranking", 1, 2, {{"h1:1", {0b01}}}}, "owned by no server");
  expect_refused({"ranking", 1, 2, {{"h1:1", {0b11}}, {"h1:1", {0b01}}}}, "h1:1 appears twice");
  expect_refused({"ranking", 1, 1, {{"h1:zero", {1}}}}, "'h1:zero': the port must be a number");
}

// Two texts of one address: the client asks it again for what is missing, as of any server.
TEST(Hostile, AServerThatTheMapNamesTwiceIsOneServer) {
  FakeServer server([](Opcode opcode, uint64_t count, wire::Frame&) {
    return opcode == Opcode::kPull && count == 0 ? Answer::kClose : Answer::kSend;
  });
  const std::string port = server.address().substr(server.address().find(':') + 1);
  const std::string same = "127.0.0.1:0" + port;
  server.set_shard_map({"ranking", 1, 2, {{server.address(), {0b01}}, {same, {0b10}}}});
  const auto client = connect_to(server.url(), patient());
  const Status pulled = pull_once(*client);
  EXPECT_TRUE(pulled.ok()) << pulled.to_string();
  EXPECT_EQ(client->server_counts().size(), 1u);
}

// The server refuses every pull, although its map gives it all keys.
TEST(Hostile, ACallThatIsAlwaysAnsweredWithWrongShardFailsAtTheDeadline) {
  FakeServer server(tamper_reply(Opcode::kPull, [](wire::Frame& reply) {
    testing::replace_by_error(reply, Code::kWrongShard, "not mine");
    return Answer::kSend;
  }));
  server.set_shard_map({"ranking", 1, 1, {{server.address(), {1}}}});
  const auto client = connect_to(server.url(), patient());
  const std::vector<uint64_t> keys = {2};
  std::vector<float> out(FakeServer::kDim);
  Status status;
  uint64_t pulls = 0;
  uint64_t maps = 0;
  // On a busy machine a short deadline may pass while a request is in flight, or before the third.
  const auto is_cut = [&] { return status.code() != Code::kWrongShard || pulls <= 2 || maps <= 2; };
  PullOptions options;
  for (options.deadline_ms = 1'000;; options.deadline_ms *= 4) {
    const uint64_t pulls_before = server.count(Opcode::kPull);
    const uint64_t maps_before = server.count(Opcode::kShardMap);
    status = client->pull("users", keys, out, {}, options).status();
    pulls = server.count(Opcode::kPull) - pulls_before;
    maps = server.count(Opcode::kShardMap) - maps_before;
    // The pauses between two attempts grow to 100 ms.
    EXPECT_LT(pulls, 30 + options.deadline_ms / 50);
    if (!is_cut() || options.deadline_ms > 10'000) break;
  }
  EXPECT_EQ(Code::kWrongShard, status.code()) << status.to_string();
  EXPECT_GT(pulls, 2u);
  EXPECT_GT(maps, 2u);
}

TEST(Hostile, RequestsStayWithinTheLimitsOfTheServer) {
  FakeServer server;
  server.hello().limits.keys_per_pull = 7;
  server.hello().limits.in_flight = 2;
  server.hello().limits.body_bytes = 200;
  EXPECT_TRUE(pull_once(*connect_to(server.url(), patient())).ok());
  EXPECT_GE(server.count(Opcode::kPull), kKeys / 7);
}

TEST(Hostile, AConnectionIsReusedAfterAnErrorReply) {
  std::atomic<bool> refuse{true};
  std::atomic<int> hellos{0};
  FakeServer server([&](Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode == Opcode::kHello) ++hellos;
    if (opcode == Opcode::kPull && refuse)
      testing::replace_by_error(reply, Code::kStale, "version 5 is below 9");
    return Answer::kSend;
  });
  const auto client = connect_to(server.url(), patient());
  const Status status = pull_once(*client);
  EXPECT_EQ(Code::kStale, status.code()) << status.to_string();
  EXPECT_EQ(server.address() + ": version 5 is below 9", status.message());
  refuse = false;
  EXPECT_TRUE(pull_once(*client).ok());
  EXPECT_EQ(1, hellos) << "every reply was read, so the connection was used again";
}

TEST(Hostile, RepliesMayArriveInAnotherOrder) {
  // Send each three replies in reverse order. The client finds the request by its id.
  std::vector<wire::Frame> held;
  FakeServer server([&](Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode != Opcode::kPull) return Answer::kSend;
    held.push_back(reply);
    if (held.size() < 3) return Answer::kSilent;
    reply.clear();
    for (size_t i = held.size(); i-- > 0;)
      reply.insert(reply.end(), held[i].begin(), held[i].end());
    held.clear();
    return Answer::kSend;
  });
  const auto client = connect_to(server.url(), patient());
  std::vector<float> rows(kKeys * FakeServer::kDim);
  const auto report = client->pull("users", testing::first_keys(kKeys), rows);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(kKeys / 2, report.value().found);
  EXPECT_EQ(5u, report.value().applied_version);
  for (size_t i = 0; i < kKeys; ++i) {
    const auto expected =
        i % 2 == 0 ? testing::row_of(i, FakeServer::kDim) : std::vector<float>(FakeServer::kDim);
    ASSERT_TRUE(testing::has_row(rows, i, expected)) << i;
  }
}

TEST(Hostile, ASecondReplyToARequestBreaksTheProtocol) {
  const auto send_twice = [](wire::Frame& reply) {
    const wire::Frame copy = reply;
    reply.insert(reply.end(), copy.begin(), copy.end());
    return Answer::kSend;
  };
  expect_distrust(run_through(tamper_reply(Opcode::kPull, send_twice)), "not waiting");
}

// Change, cut or extend a reply at random.
Answer damage(uint64_t seed, wire::Frame& reply) {
  std::mt19937_64 random(seed);
  const size_t reach = random() % 2 == 0 ? std::min<size_t>(reply.size(), 160) : reply.size();
  for (uint64_t i = 0, n = 1 + random() % 4; i < n; ++i)
    reply[random() % reach] = static_cast<std::byte>(random());
  if (random() % 4 == 0) reply.resize(random() % reply.size());
  if (random() % 4 == 0) {
    const wire::Frame extra(1 + random() % 64, std::byte{0x5a});
    const auto at = reply.begin() + static_cast<ptrdiff_t>(random() % (reply.size() + 1));
    reply.insert(at, extra.begin(), extra.end());
  }
  return random() % 3 == 0 ? Answer::kSendAndClose : Answer::kSend;
}

TEST(Hostile, RandomDamageNeverCrashesNorHangs) {
  std::mt19937_64 random(testing::seed());
  Options options = quick();
  options.deadline_ms = 10;
  int failures = 0;
  const uint64_t started = base::monotonic_ns();
  int rounds = 0;
  const auto has_time = [&] { return base::monotonic_ns() - started < 8'000'000'000; };
  for (; rounds < 1000 && (rounds < 100 || has_time()); ++rounds) {
    const auto tamper = [seed = random()](wire::Frame& reply) { return damage(seed, reply); };
    const Status status = run(tamper_reply(static_cast<Opcode>(1 + rounds % 3), tamper), options);
    failures += status.ok() ? 0 : 1;
  }
  EXPECT_GT(failures, rounds / 4) << "seed " << testing::seed();
  std::printf("[client] %d damaged conversations, %d refused, seed %llu\n", rounds, failures,
              static_cast<unsigned long long>(testing::seed()));
}

TEST(Hostile, DamagedRowValuesAreNotDetected) {
  // Rows have no checksum on the wire, because TCP has one.
  const auto change_last_byte = [](wire::Frame& reply) {
    reply.back() ^= std::byte{0x40};
    return Answer::kSend;
  };
  EXPECT_TRUE(run(tamper_reply(Opcode::kPull, change_last_byte), patient()).ok());
}

TEST(Hostile, RandomBytesAreAnError) {
  std::mt19937_64 random(testing::seed());
  Options options = quick();
  options.deadline_ms = 50;
  for (int round = 0; round < 50; ++round) {
    // A retry may use a second connection at the same time, so each reply has its own generator.
    const auto tamper = [seed = random()](wire::Frame& reply) {
      std::mt19937_64 bytes(seed);
      reply.resize(bytes() % 5000);
      for (std::byte& byte : reply) byte = static_cast<std::byte>(bytes());
      return Answer::kSendAndClose;
    };
    EXPECT_FALSE(run(tamper_reply(static_cast<Opcode>(1 + round % 3), tamper), options).ok());
  }
}

TEST(Hostile, AForkedChildMustConnectAgain) {
  FakeServer server;
  auto client = connect_to(server.url(), patient());
  const pid_t child = fork();
  if (child == 0) {
    const Status status = pull_once(*client);
    const bool is_refused = status.code() == Code::kFailedPrecondition &&
                            status.message().find("fork") != std::string::npos;
    client.reset();  // must not wait for the parent's thread
    _exit(is_refused ? 0 : 1);
  }
  int result = -1;
  ASSERT_EQ(child, waitpid(child, &result, 0));
  EXPECT_EQ(0, result);
  EXPECT_TRUE(pull_once(*client).ok()) << "the parent continues";
}

}  // namespace
}  // namespace petps::client
