// The fixture of the router's tests: servers of one model with a shard map, and a router.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "router/router.h"
#include "tests/native/client/fleet.h"
#include "tests/native/server/raw_client.h"

namespace petps::router {

using base::Code;
using base::Status;
using client::Client;
using client::Options;
using client::PullOptions;
using client::PullReport;
using client::testing::connect_to;
using client::testing::expect_error;
using client::testing::Fleet;
using client::testing::kDim;
using client::testing::quiet;
using client::testing::RealServer;
using server::RawClient;

constexpr uint64_t kFirstHalf = 0x0F;  // of the eight partitions
constexpr uint64_t kSecondHalf = 0xF0;
constexpr uint64_t kAllPartitions = 0xFF;

class RouterFixture : public Fleet {
 protected:
  RouterFixture() {
    options_.port = 0;
    options_.deadline_ms = 20'000;
  }
  // Start a router of the servers.
  void start() {
    options_.servers = "petps://" + servers_[0]->address();
    for (size_t i = 1; i < servers_.size(); ++i) options_.servers += "," + servers_[i]->address();
    start_for(options_.servers);
  }
  void start_for(const std::string& servers) {
    options_.servers = servers;
    auto started = Router::start(options_);
    ASSERT_TRUE(started.ok()) << started.status().to_string();
    router_ = std::move(started).value();
  }
  std::string url() const {
    return "petps://127.0.0.1:" + std::to_string(router_->port()) + "/ranking";
  }
  std::unique_ptr<Client> connect_to_router(const std::string& token = "") const {
    Options options = quiet();
    options.token = token;
    return connect_to(url(), options);
  }
  Status refusal_of(const std::string& token) const {
    Options options = quiet();
    options.token = token;
    return Client::connect(url(), options).status();
  }
  std::unique_ptr<RawClient> raw(const std::string& source = "127.0.0.1") const {
    return std::make_unique<RawClient>(router_->port(), "127.0.0.1", source);
  }
  static Status hello(RawClient& client, const std::string& token = "") {
    wire::Frame frame;
    wire::encode_hello(1, {.client = "raw", .token = token}, frame);
    return client.call(frame).error();
  }
  // Return the list of tables that a raw client receives.
  static wire::TablesReply tables_of(RawClient& client) {
    wire::Frame frame;
    wire::encode_tables(2, {.with_state = true}, frame);
    const server::Reply reply = client.call(frame);
    wire::TablesReply tables;
    const Status status = reply.error().ok()
                              ? wire::decode_tables_reply(reply.header, reply.body, tables)
                              : reply.error();
    EXPECT_TRUE(status.ok()) << status.to_string();
    return tables;
  }
  static uint32_t id_of(const wire::TablesReply& tables, const std::string& name) {
    for (const wire::TableInfo& table : tables.tables) {
      if (table.name == name) return table.id;
    }
    return 0;
  }
  // Wait until the condition is true. Return false if it does not become true within a minute.
  static bool waits_until(const std::function<bool()>& condition) {
    for (int i = 0; i < 60'000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  // Send a request until it is refused, and return why.
  static Status first_refusal(RawClient& client, const wire::Frame& frame) {
    Status last;
    EXPECT_TRUE(waits_until([&] {
      last = client.call(frame).error();
      return !last.ok();
    }));
    return last;
  }

  RouterOptions options_;
  std::unique_ptr<Router> router_;  // destroyed before the servers
};

}  // namespace petps::router
