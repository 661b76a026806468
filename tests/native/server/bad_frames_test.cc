// Frames that no petps client sends: the server refuses each with a message that names the fault,
// and continues to serve.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "server_fixture.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

using base::Code;

class BadFrames : public ServerTest {
 protected:
  // Connect until a pull is answered: a connection without a byte may be closed after frame_ms.
  std::unique_ptr<RawClient> connect_and_be_served() {
    std::unique_ptr<RawClient> client;
    EXPECT_TRUE(waits_until([&] {
      client = connect();
      return client->call(pull_frame(7, {{users_.id(), {1}}})).error().ok();
    }));
    return client;
  }
};

TEST_F(BadFrames, AnUnknownOpcodeIsRefusedAndTheConnectionStaysOpen) {
  start();
  auto client = connect();
  wire::Frame frame = pull_frame(4, {{users_.id(), {1}}});
  const uint16_t opcode = 99;
  std::memcpy(frame.data() + offsetof(wire::FrameHeader, opcode), &opcode, sizeof(opcode));
  const Reply reply = client->call(frame);
  EXPECT_EQ(reply.header.request_id, 4u);
  expect_error(reply.error(), Code::kUnimplemented, "opcode 99 is unknown");
  expect_serves(*client);
}

// It once switched aliases and dropped instances.
TEST_F(BadFrames, AControlRequestIsRefusedWithTheRemedy) {
  start();
  auto client = connect();
  wire::Frame frame = pull_frame(4, {{users_.id(), {1}}});
  const auto opcode = static_cast<uint16_t>(wire::Opcode::kControl);
  std::memcpy(frame.data() + offsetof(wire::FrameHeader, opcode), &opcode, sizeof(opcode));
  expect_error(client->call(frame).error(), Code::kUnimplemented, "`petps alias`");
  expect_serves(*client);
}

TEST_F(BadFrames, BytesOfAnotherProtocolAreRefused) {
  start();
  auto client = connect();
  const std::string text = "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";
  client->send(std::as_bytes(std::span(text)));
  expect_error(client->last_error(), Code::kInvalidArgument, "not a petps frame");
  auto other = connect();
  expect_serves(*other);
}

TEST_F(BadFrames, AnOversizedFrameIsRefusedByItsHeader) {
  start();
  auto client = connect();
  wire::FrameHeader header;
  header.opcode = static_cast<uint16_t>(wire::Opcode::kPush);
  header.body_bytes = wire::kMaxBodyBytes + 8;
  client->send(std::as_bytes(std::span(&header, 1)));
  expect_error(client->last_error(), Code::kResourceExhausted, "16777224 bytes is above the limit");
}

TEST_F(BadFrames, AServerMayLowerTheFrameLimit) {
  options_.limits.body_bytes = 4096;
  start();
  auto client = connect();
  expect_serves(*client);
  wire::FrameHeader header;
  header.opcode = static_cast<uint16_t>(wire::Opcode::kPush);
  header.body_bytes = 8192;
  client->send(std::as_bytes(std::span(&header, 1)));
  expect_error(client->last_error(), Code::kResourceExhausted, "above the limit of 4128");
}

TEST_F(BadFrames, ATruncatedFrameIsRefused) {
  start();
  auto client = connect();
  const wire::Frame frame = pull_frame(1, {{users_.id(), {1, 2, 3}}});
  client->send(std::span(frame).first(frame.size() - 8));
  client->end_sending();
  expect_error(client->last_error(), Code::kInvalidArgument, "truncated frame");
}

TEST_F(BadFrames, TheIncidentOfAResetConnectionNamesThePeer) {
  start();
  auto client = connect();
  expect_serves(*client);
  client->reset();
  auto other = connect();
  while (!status_contains("recv from 127.0.0.1:")) expect_serves(*other);
}

TEST_F(BadFrames, AConnectionThatSendsAFrameTooSlowlyIsClosed) {
  options_.transport.frame_ms = 80;
  start();
  auto client = connect_and_be_served();
  const wire::Frame frame = pull_frame(1, {{users_.id(), {1, 2, 3}}});
  client->send(std::span(frame).first(40));
  expect_error(client->last_error(), Code::kDeadlineExceeded,
               "not complete 80 ms after its first byte");
  connect_and_be_served();
  EXPECT_TRUE(waits_until([&] { return status_contains("not complete 80 ms"); }))
      << "it must be among the incidents";
}

TEST_F(BadFrames, MutatedFramesNeverStopTheServer) {
  start();
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  std::vector<wire::Frame> samples = {pull_frame(1, {{users_.id(), {1, 2, 3}}, {items_.id(), {4}}}),
                                      push_frame(2, users_, {1, 2}, 1)};
  samples.emplace_back();
  wire::encode_hello(3, {1, 1, "x"}, samples.back());
  samples.emplace_back();
  wire::encode_tables(3, {.with_state = true}, samples.back());
  samples.emplace_back();
  wire::encode_hot_keys(3, {users_.id(), std::vector<uint64_t>{1, 2}}, samples.back());
  samples.emplace_back();
  wire::encode_shard_map(3, samples.back());
  for (int i = 0; i < 400; ++i) {
    const size_t sample = random() % samples.size();
    wire::Frame frame = samples[sample];
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      // Mutate the body mostly: a broken header is refused by its first check.
      const size_t from = random() % 4 == 0 ? 0 : wire::kHeaderBytes;
      if (frame.size() > from)
        frame[from + random() % (frame.size() - from)] = static_cast<std::byte>(random());
    }
    // A pull that waits for a version is answered late; shards_test covers that.
    if (sample == 0) std::fill_n(frame.begin() + wire::kHeaderBytes + 12, 4, std::byte{0});
    auto client = connect();
    client->send(frame);
    client->end_sending();
    const Reply reply = client->receive();
    ASSERT_FALSE(reply.closed) << "round " << i
                               << ": every frame is answered, if only with an error";
    if (reply.header.code != 0) {
      ASSERT_FALSE(reply.error().message().empty());
    }
  }
  auto client = connect();
  const Pulled pulled = decode_pulled(client->call(pull_frame(1, {{items_.id(), {4}}})));
  ASSERT_TRUE(pulled.status.ok());
}

}  // namespace
}  // namespace petps::server
