// A raw client, which sends any frame, valid or not, and reads replies, over a socket or the
// loopback transport. Also the pools, rows and frames of the server's tests.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "table/table.h"
#include "tests/support/loopback/loopback.h"
#include "wire/wire.h"

namespace petps::server {

struct Reply {
  wire::FrameHeader header;
  std::vector<std::byte> body;
  bool closed = false;         // no reply: the connection was closed, or the time limit passed
  base::Status error() const;  // OK if the code is 0; kUnavailable if closed
};

class RawClient {
 public:
  // source: the client's own address.
  explicit RawClient(uint16_t port, const std::string& host = "127.0.0.1",
                     const std::string& source = "127.0.0.1");
  explicit RawClient(std::unique_ptr<transport::LoopbackClient> loopback);
  ~RawClient();
  RawClient(RawClient&&) = delete;

  bool send(std::span<const std::byte> bytes);
  void end_sending();
  void reset();  // only over a socket: send nothing more, not even that this is the end
  Reply receive(int timeout_ms = 60'000);
  Reply call(const wire::Frame& frame) {
    send(frame);
    return receive();
  }
  // Read until the connection is closed; return the last error.
  base::Status last_error(int timeout_ms = 60'000);

 private:
  bool receive_exactly(std::byte* out, size_t n, int timeout_ms);
  int fd_ = -1;
  std::unique_ptr<transport::LoopbackClient> loopback_;
};

// The result of a pull: rows[i] is empty for a missing key.
struct Pulled {
  base::Status status;
  uint64_t applied_version = 0;
  std::vector<wire::PullReplySection> sections;
  std::vector<std::vector<std::byte>> rows;  // of all sections, by key
};
Pulled decode_pulled(const Reply& reply);

struct Section {
  uint32_t table;
  std::vector<uint64_t> keys;
};
wire::Frame pull_frame(uint64_t id, const std::vector<Section>& sections, uint32_t instance = 0,
                       uint64_t min_version = 0, uint32_t wait_ms = 0);

// A pool with one instance of two partitions and the tables that a test creates, in memory or at a
// path.
struct TestPool {
  explicit TestPool(const std::string& path = "");
  table::Table& add_table(const std::string& name, uint32_t dim, uint32_t row_bytes,
                          uint64_t capacity, pool::Feed feed = pool::Feed::kPush);
  // Record that the partition, or each partition, has applied the version.
  void record_version(uint32_t partition, uint64_t version);
  void record_version(uint64_t version);
  std::unique_ptr<table::Tables> tables;
  uint32_t instance = 0;
};

// Return a row that shows its key and version, and whether it is torn.
std::vector<std::byte> row_of(uint64_t key, uint64_t version, size_t row_bytes);
// Return whether the row is row_of(key, version) of the version that it shows.
bool is_whole(uint64_t key, std::span<const std::byte> row, uint64_t* version = nullptr);
// Return row_of() of each key, one after another.
std::vector<std::byte> rows_of(std::span<const uint64_t> keys, uint64_t version, size_t row_bytes);
wire::Frame push_frame(uint64_t id, const table::Table& table, const std::vector<uint64_t>& keys,
                       uint64_t version, const wire::PushOrder& order = {});
// Write row_of(key, version) for the keys 0, 1, .., keys - 1.
void fill(table::Table& table, uint64_t keys, uint64_t version);

}  // namespace petps::server
