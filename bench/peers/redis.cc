// Redis by hiredis: MGET and MSET with 8-byte keys, pipelined. Without persistence while it serves.
#include <hiredis/hiredis.h>

#include <cstring>

#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"

namespace petps::bench {
namespace {

class Redis : public Peer {
 public:
  explicit Redis(const PeerShape& shape)
      : shape_(shape),
        port_(free_port()),
        server_(shape.folder, "redis",
                {"redis-server", "--bind", "127.0.0.1", "--port", std::to_string(port_), "--dir",
                 shape.folder, "--save", "", "--appendonly", "no"}) {
    retry("redis", [this] {
      if (connection_ != nullptr) redisFree(connection_);
      connection_ = redisConnect("127.0.0.1", port_);
      return connection_ != nullptr && connection_->err == 0;
    });
  }
  ~Redis() override { redisFree(connection_); }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    begin("MSET");
    for (size_t i = 0; i < keys.size(); ++i) {
      add(&keys[i], sizeof keys[i]);
      add(rows + i * shape_.row_bytes, shape_.row_bytes);
    }
    append();
    freeReplyObject(reply());
  }

  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const size_t requests = keys.size() / shape_.request_keys;
    for (size_t sent = 0, received = 0; received < requests; ++received) {
      for (; sent < requests && sent < received + kInFlight; ++sent) {
        begin("MGET");
        for (uint32_t i = 0; i < shape_.request_keys; ++i)
          add(&keys[sent * shape_.request_keys + i], sizeof keys[0]);
        append();
      }
      redisReply* const rows = reply();
      for (size_t i = 0; i < rows->elements; ++i, out += shape_.row_bytes) {
        const redisReply& row = *rows->element[i];
        if (row.type != REDIS_REPLY_STRING || row.len != shape_.row_bytes)
          fail("redis: a loaded key is missing");
        std::memcpy(out, row.str, row.len);
      }
      freeReplyObject(rows);
    }
  }
  pid_t server() const override { return server_.process(); }

 private:
  void begin(const char* command) {
    parts_.assign(1, command);
    lengths_.assign(1, std::strlen(command));
  }
  void add(const void* at, size_t bytes) {
    parts_.push_back(static_cast<const char*>(at));
    lengths_.push_back(bytes);
  }
  void append() {
    redisAppendCommandArgv(connection_, static_cast<int>(parts_.size()), parts_.data(),
                           lengths_.data());
  }
  redisReply* reply() {
    void* answer = nullptr;
    if (redisGetReply(connection_, &answer) != REDIS_OK) fail("redis: the connection broke");
    auto* const result = static_cast<redisReply*>(answer);
    if (result->type == REDIS_REPLY_ERROR) fail(std::string("redis: ") + result->str);
    return result;
  }

  PeerShape shape_;
  uint16_t port_;
  ServerProgram server_;
  redisContext* connection_ = nullptr;
  std::vector<const char*> parts_;
  std::vector<size_t> lengths_;
};

}  // namespace

std::unique_ptr<Peer> open_redis(const PeerShape& shape) { return std::make_unique<Redis>(shape); }

}  // namespace petps::bench
