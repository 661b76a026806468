// memcached by libmemcached: multi-get over two connections, because the library keeps one request
// in flight per connection. Keys are 8 bytes, so the protocol is the binary one.
#include <libmemcached/memcached.h>

#include <cstring>
#include <unordered_map>

#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"

namespace petps::bench {
namespace {

void check(memcached_return_t result, const char* what) {
  if (memcached_failed(result))
    fail(std::string("memcached: ") + what + ": " + memcached_strerror(nullptr, result));
}

class Memcached : public Peer {
 public:
  explicit Memcached(const PeerShape& shape)
      : shape_(shape),
        port_(free_port()),
        // A change of user would undo that the server is killed with this process.
        server_(shape.folder, "memcached",
                {"memcached", "-u", "root", "-l", "127.0.0.1", "-p", std::to_string(port_), "-m",
                 std::to_string(megabytes(shape)), "-t", "1"}) {
    for (memcached_st** place : {&connections_[0], &connections_[1], &writer_}) {
      memcached_st* const connection = *place = memcached_create(nullptr);
      check(memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_BINARY_PROTOCOL, 1), "protocol");
      check(memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_TCP_NODELAY, 1), "no delay");
      check(memcached_server_add(connection, "127.0.0.1", port_), "address");
      retry("memcached", [&] { return !memcached_failed(memcached_version(connection)); });
    }
    memcached_result_create(connections_[0], &result_);
  }
  ~Memcached() override {
    memcached_result_free(&result_);
    for (memcached_st* connection : connections_) memcached_free(connection);
    memcached_free(writer_);
  }

  // Quiet sets in one buffer, then a request whose reply comes after all of them.
  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    memcached_st* const connection = writer_;
    memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_NOREPLY, 1);
    memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_BUFFER_REQUESTS, 1);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto* const row = reinterpret_cast<const char*>(rows + i * shape_.row_bytes);
      const memcached_return_t result =
          memcached_set(connection, text(keys[i]), sizeof keys[i], row, shape_.row_bytes, 0, 0);
      if (result != MEMCACHED_BUFFERED) check(result, "set");
    }
    check(memcached_flush_buffers(connection), "flush");
    memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_BUFFER_REQUESTS, 0);
    memcached_behavior_set(connection, MEMCACHED_BEHAVIOR_NOREPLY, 0);
    check(memcached_version(connection), "version");
  }

  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const uint32_t n = shape_.request_keys;
    const size_t requests = keys.size() / n;
    for (size_t sent = 0, received = 0; received < requests; ++received) {
      for (; sent < requests && sent < received + kInFlight; ++sent)
        ask(*connections_[sent % kInFlight], keys.subspan(sent * n, n));
      take(*connections_[received % kInFlight], keys.subspan(received * n, n), out);
      out += uint64_t{n} * shape_.row_bytes;
    }
  }
  pid_t server() const override { return server_.process(); }

 private:
  static uint64_t megabytes(const PeerShape& shape) {
    return shape.rows * (shape.row_bytes + 128) / (1 << 20) + 512;
  }
  static const char* text(const uint64_t& key) { return reinterpret_cast<const char*>(&key); }

  void ask(memcached_st& connection, std::span<const uint64_t> keys) {
    names_.clear();
    for (const uint64_t& key : keys) names_.push_back(text(key));
    lengths_.assign(keys.size(), sizeof keys[0]);
    check(memcached_mget(&connection, names_.data(), lengths_.data(), keys.size()), "get");
  }
  // The replies come in the order of the keys.
  void take(memcached_st& connection, std::span<const uint64_t> keys, std::byte* out) {
    for (const uint64_t key : keys) {
      memcached_return_t status;
      const memcached_result_st* row = memcached_fetch_result(&connection, &result_, &status);
      if (row == nullptr || memcached_result_length(row) != shape_.row_bytes ||
          std::memcmp(memcached_result_key_value(row), &key, sizeof key) != 0)
        fail("memcached: a loaded key is missing");
      std::memcpy(out, memcached_result_value(row), shape_.row_bytes);
      out += shape_.row_bytes;
    }
    memcached_return_t status;
    while (memcached_fetch_result(&connection, &result_, &status) != nullptr)
      fail("memcached: more rows than keys");
  }

  PeerShape shape_;
  uint16_t port_;
  ServerProgram server_;
  memcached_st* connections_[kInFlight] = {};
  memcached_st* writer_ = nullptr;  // a second thread may write
  memcached_result_st result_;
  std::vector<const char*> names_;
  std::vector<size_t> lengths_;
};

}  // namespace

std::unique_ptr<Peer> open_memcached(const PeerShape& shape) {
  return std::make_unique<Memcached>(shape);
}

}  // namespace petps::bench
