// Catalogues asked for side by side: what an endpoint read last never goes back to an earlier state of its server.
#include "petps_client/endpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "fixtures.h"

namespace petps::client::testing {
namespace {

constexpr uint32_t kDeadlineMs = 20'000;

// Its alias means ranking@2 from the second answer on; the first `held` answers are made at once, and sent when
// they are let go.
class SwitchingServer {
 public:
  explicit SwitchingServer(uint64_t held)
      : held_(held), server_([this](wire::Opcode opcode, uint64_t count, wire::Frame& reply) {
          if (opcode != wire::Opcode::kTables) return Answer::kSend;
          wire::FrameHeader header;
          std::memcpy(&header, reply.data(), sizeof(header));
          wire::TablesReply tables;
          tables.instances.push_back({1, "ranking", "ranking@1", 1, 5});
          tables.instances.push_back({2, "ranking", "ranking@2", 1, 5});
          tables.aliases.push_back({"ranking", count == 0 ? 1u : 2u});
          EXPECT_TRUE(wire::encode_tables_reply(header.request_id, tables, reply).ok());
          if (count < held_.size()) {
            held_[count].asked.set_value();
            held_[count].let_go.get_future().wait();
          }
          return Answer::kSend;
        }) {}

  void wait_until_asked(size_t number) { held_[number].asked.get_future().wait(); }
  void let_go(size_t number) { held_[number].let_go.set_value(); }
  uint64_t asked() const { return server_.count(wire::Opcode::kTables); }
  std::string address() const { return server_.address(); }

 private:
  struct Held {
    std::promise<void> asked;
    std::promise<void> let_go;
  };
  std::vector<Held> held_;
  FakeServer server_;  // last: its threads end first
};

std::string read_instance(Endpoint& endpoint) {
  const Deadline deadline = Deadline::in_ms(kDeadlineMs);
  auto leased = endpoint.lease(deadline);
  if (!leased.ok()) return leased.status().to_string();
  const auto read = endpoint.read_catalogue(**leased, deadline);
  return read.ok() ? read.value()->instance_name() : read.status().to_string();
}

std::unique_ptr<Endpoint> endpoint_of(const SwitchingServer& server) {
  const auto url = parse_url("petps://" + server.address());
  EXPECT_TRUE(url.ok()) << url.status().to_string();
  return std::make_unique<Endpoint>(url.value().addresses[0], "ranking", Options());
}

TEST(Endpoint, AnOlderAnswerThatComesLateIsNotKept) {
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

TEST(Endpoint, AnAnswerThatWasAskedForEarlierDoesNotServeALaterCall) {
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
  EXPECT_EQ(server.asked(), 3u) << "which of the two states is newer was not known";
}

}  // namespace
}  // namespace petps::client::testing
