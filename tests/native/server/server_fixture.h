// The fixtures of tests that use one server and raw clients.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "raw_client.h"
#include "server/server.h"

namespace petps::server {

// A pool, and a server of it that a test starts with `options_`.
class ServerFixture : public testing::Test {
 protected:
  explicit ServerFixture(const std::string& path = "") : pool_(path) { options_.port = 0; }

  // Start the server, over tcp or over the given transport.
  void start(std::unique_ptr<transport::Transport> transport = nullptr) {
    auto started = transport == nullptr
                       ? Server::start(*pool_.tables, options_)
                       : Server::start(*pool_.tables, options_, std::move(transport));
    ASSERT_TRUE(started.ok()) << started.status().to_string();
    server_ = std::move(started.value());
  }
  std::unique_ptr<RawClient> connect() { return std::make_unique<RawClient>(server_->port()); }

  // Wait until the condition is true. Return false if it does not become true within a minute.
  static bool waits_until(const std::function<bool()>& condition) {
    for (int i = 0; i < 60'000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  bool status_contains(const std::string& part) const {
    return server_->status_json().find(part) != std::string::npos;
  }
  static void expect_error(const base::Status& status, base::Code code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(part), std::string_view::npos) << status.to_string();
  }

  TestPool pool_;
  ServerOptions options_;
  std::unique_ptr<Server> server_;
};

// Three tables: two that take pushes and have rows, and one that takes deltas.
class ServerTest : public ServerFixture {
 protected:
  ServerTest() {
    fill(users_, 100, 1);
    fill(items_, 50, 1);
    options_.software = "test \"quoted\"";
  }
  // Expect that the server answers a pull over this connection.
  void expect_serves(RawClient& client) {
    const Pulled pulled = decode_pulled(client.call(pull_frame(7, {{users_.id(), {1}}})));
    ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    EXPECT_EQ(pulled.rows[0], row_of(1, 1, 64));
  }

  table::Table& users_ = pool_.add_table("users", 16, 64, 1000);
  table::Table& items_ = pool_.add_table("items", 3, 6, 1000);
  table::Table& deltas_ = pool_.add_table("clicks", 16, 64, 1000, pool::Feed::kDelta);
};

}  // namespace petps::server
