// Fixtures of client tests: a real server over a pool in memory, and a fake server that can lie.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "petps_client/client.h"
#include "server/server.h"
#include "table/table.h"
#include "tests/seed.h"
#include "wire/wire.h"

namespace petps::client::testing {

using tests::seed;

// Return the row of a key: small multiples of 1/4, exact in every dtype but int8.
std::vector<float> row_of(uint64_t key, uint32_t dim, uint64_t version = 0);
// Return the rows of keys, float32[n, dim].
std::vector<float> rows_of(std::span<const uint64_t> keys, uint32_t dim, uint64_t version = 0);
// Return the row that a pull returns, after encoding to the table's dtype.
std::vector<float> pulled_row(codec::Dtype dtype, uint64_t key, uint32_t dim, uint64_t version = 0);
// Return whether row number `i` of float32[n, dim] equals `row` bit by bit.
bool has_row(std::span<const float> rows, size_t i, const std::vector<float>& row);
// Return the keys 0 .. n - 1.
std::vector<uint64_t> first_keys(size_t n);

// Connect, or fail the test.
std::unique_ptr<Client> connect_to(const std::string& url, const Options& options = {});
// Expect an error with this code, whose message contains all parts.
void expect_error(const base::Status& status, base::Code code,
                  std::initializer_list<std::string_view> parts);

// A pool in memory, served on a port that stays the same over restarts: a free one of 127.0.0.1, or
// that of the options if they have another host.
class RealServer {
 public:
  static constexpr const char* kHost = "127.0.0.1";
  explicit RealServer(server::ServerOptions options = {}, uint32_t partitions = 2);
  ~RealServer() { stop(); }
  // `default_row`: dim values, or empty. Fills the keys 0 .. rows - 1.
  table::Table& add_table(const std::string& name, codec::Dtype dtype, uint32_t dim,
                          uint64_t capacity, uint64_t rows,
                          const std::vector<float>& default_row = {},
                          pool::Feed feed = pool::Feed::kPush, uint32_t instance = UINT32_MAX);
  static void fill(table::Table& table, uint64_t rows, uint64_t version);
  static void fill(table::Table& table, std::span<const uint64_t> keys, uint64_t version);
  void start();
  void stop();  // waits for requests in flight
  // Set the map of the running server, and of each later start.
  void set_shard_map(const wire::ShardMap& map);
  table::Tables& tables() { return *tables_; }
  server::Server& server() { return *server_; }
  uint32_t instance() const { return instance_; }
  std::string address() const { return options_.host + ":" + std::to_string(options_.port); }
  std::string url() const { return "petps://" + address() + "/ranking"; }

 private:
  server::ServerOptions options_;
  std::unique_ptr<table::Tables> tables_;
  uint32_t instance_ = 0;
  std::unique_ptr<server::Server> server_;
};

enum class Answer { kSend, kSilent, kClose, kSendAndClose };

// A server with one table "users" (dim 4, f32, id 7; odd keys are missing). It builds a correct
// reply, which `tamper` may change. One thread per connection.
class FakeServer {
 public:
  // `count`: number of earlier requests with this opcode, over all connections.
  using Tamper = std::function<Answer(wire::Opcode opcode, uint64_t count, wire::Frame& reply)>;
  static constexpr uint32_t kTable = 7;
  static constexpr uint32_t kDim = 4;
  static constexpr uint64_t kVersion = 5;

  explicit FakeServer(Tamper tamper = nullptr);
  ~FakeServer();
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::string url() const { return "petps://" + address() + "/ranking"; }
  uint64_t count(wire::Opcode opcode) const {
    return counts_.at(static_cast<size_t>(opcode)).load();
  }
  // Change these before a client connects.
  wire::HelloReply& hello() { return hello_; }
  wire::TablesReply& tables() { return tables_; }
  void set_shard_map(const wire::ShardMap& map);
  // Act like a restart on another pool, in which the table has another id.
  void move_to_pool(uint8_t uuid, uint32_t table);
  // Return the trace contexts of all pulls, those of untraced ones too, and the bytes of their
  // bodies.
  std::vector<std::pair<wire::TraceContext, size_t>> traces() {
    const std::lock_guard lock(mutex_);
    return traces_;
  }

 private:
  void accept_all();
  void serve(int socket);
  void answer(const wire::FrameHeader& header, std::span<const std::byte> body, wire::Frame& reply);
  void answer_pull(const wire::FrameHeader& header, std::span<const std::byte> body,
                   wire::Frame& reply);

  Tamper tamper_;
  wire::HelloReply hello_;
  wire::TablesReply tables_;
  wire::ShardMap shard_map_;
  std::array<std::atomic<uint64_t>, 256> counts_ = {};  // by opcode
  int listener_ = -1;
  uint16_t port_ = 0;
  std::thread accepting_;
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::pair<wire::TraceContext, size_t>> traces_;
  std::vector<std::thread> serving_;
};

// Send all bytes, unless the peer is gone.
void send_all(int socket, std::span<const std::byte> bytes);
// Return the header of a frame.
wire::FrameHeader header_of(const wire::Frame& frame);
// Replace the reply to a pull by an error.
void replace_by_error(wire::Frame& reply, base::Code code, const std::string& message);
// Return 127.0.0.1 with this port.
sockaddr_in loopback(uint16_t port);
// Return a socket that listens on a free port of 127.0.0.1.
int listen_anywhere(uint16_t* port);
// Return a port without a listener. It is below the range from which kernels choose ports, so no
// other process gets it by chance, also while a server that uses it is stopped.
uint16_t stable_port();

}  // namespace petps::client::testing
