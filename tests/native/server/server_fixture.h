// The fixture of tests that use one server through raw sockets.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "raw_client.h"
#include "server/server.h"

namespace petps::server {

class ServerTest : public testing::Test {
 protected:
  ServerTest()
      : users_(pool_.add_table("users", 16, 64, 1000)),
        items_(pool_.add_table("items", 3, 6, 1000)),
        deltas_(pool_.add_table("clicks", 16, 64, 1000, pool::Feed::kDelta)) {
    fill(users_, 100, 1);
    fill(items_, 50, 1);
    options_.port = 0;
    options_.software = "test \"quoted\"";
  }
  void start() {
    auto started = Server::start(*pool_.tables, options_);
    ASSERT_TRUE(started.ok()) << started.status().to_string();
    server_ = std::move(started.value());
  }
  std::unique_ptr<RawClient> connect() { return std::make_unique<RawClient>(server_->port()); }

  static void expect_error(const base::Status& status, base::Code code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(part), std::string_view::npos) << status.to_string();
  }
  // A bad request must not affect the connection's next request.
  void expect_serves(RawClient& client) {
    const Pulled pulled = decode_pulled(client.call(pull_frame(7, {{users_.id(), {1}}})));
    ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    EXPECT_EQ(pulled.rows[0], row_of(1, 1, 64));
  }

  TestPool pool_;
  table::Table& users_;
  table::Table& items_;
  table::Table& deltas_;
  ServerOptions options_;
  std::unique_ptr<Server> server_;
};

}  // namespace petps::server
