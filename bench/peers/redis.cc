// Redis by hiredis: MGET and MSET with 8-byte keys, pipelined.
#include <hiredis/hiredis.h>

#include <cstring>

#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"

namespace petps::bench {
namespace {

enum class Persistence { kNone, kAppendOnly, kSnapshot };

class Connection {
 public:
  ~Connection() { redisFree(context_); }

  // Return whether the server answers and has loaded its rows.
  bool open(uint16_t port) {
    if (context_ != nullptr) redisFree(context_);
    context_ = redisConnect("127.0.0.1", port);
    if (context_ == nullptr || context_->err != 0) return false;
    auto* const pong = static_cast<redisReply*>(redisCommand(context_, "PING"));
    const bool is_loaded = pong != nullptr && pong->type == REDIS_REPLY_STATUS;
    freeReplyObject(pong);
    return is_loaded;
  }

  void begin(const char* command) {
    parts_.assign(1, command);
    lengths_.assign(1, std::strlen(command));
  }
  void add(const void* at, size_t bytes) {
    parts_.push_back(static_cast<const char*>(at));
    lengths_.push_back(bytes);
  }
  void append() {
    redisAppendCommandArgv(context_, static_cast<int>(parts_.size()), parts_.data(),
                           lengths_.data());
  }
  redisReply* reply() {
    void* answer = nullptr;
    if (redisGetReply(context_, &answer) != REDIS_OK) fail("redis: the connection broke");
    auto* const result = static_cast<redisReply*>(answer);
    if (result->type == REDIS_REPLY_ERROR) fail(std::string("redis: ") + result->str);
    return result;
  }
  // Return the text of the reply to a command without arguments.
  std::string run(const char* command) {
    redisAppendCommand(context_, command);
    redisReply* const answer = reply();
    std::string text(answer->str, answer->len);
    freeReplyObject(answer);
    return text;
  }

 private:
  redisContext* context_ = nullptr;
  std::vector<const char*> parts_;
  std::vector<size_t> lengths_;
};

class Redis : public Peer {
 public:
  Redis(const PeerShape& shape, Persistence persistence)
      : shape_(shape),
        persistence_(persistence),
        port_(free_port()),
        server_(shape.folder, "redis",
                {"redis-server", "--bind", "127.0.0.1", "--port", std::to_string(port_), "--dir",
                 shape.folder, "--save", "", "--appendfsync", "everysec", "--appendonly",
                 persistence == Persistence::kAppendOnly ? "yes" : "no"}) {
    retry("redis", [this] { return puller_.open(port_); });
    retry("redis", [this] { return writer_.open(port_); });
  }

  void write(std::span<const uint64_t> keys, const std::byte* rows) override {
    writer_.begin("MSET");
    for (size_t i = 0; i < keys.size(); ++i) {
      writer_.add(&keys[i], sizeof keys[i]);
      writer_.add(rows + i * shape_.row_bytes, shape_.row_bytes);
    }
    writer_.append();
    freeReplyObject(writer_.reply());
  }

  void pull(std::span<const uint64_t> keys, std::byte* out) override {
    const size_t requests = keys.size() / shape_.request_keys;
    for (size_t sent = 0, received = 0; received < requests; ++received) {
      for (; sent < requests && sent < received + kInFlight; ++sent) {
        puller_.begin("MGET");
        for (uint32_t i = 0; i < shape_.request_keys; ++i)
          puller_.add(&keys[sent * shape_.request_keys + i], sizeof keys[0]);
        puller_.append();
      }
      redisReply* const rows = puller_.reply();
      for (size_t i = 0; i < rows->elements; ++i, out += shape_.row_bytes) {
        const redisReply& row = *rows->element[i];
        if (row.type != REDIS_REPLY_STRING || row.len != shape_.row_bytes)
          fail("redis: a loaded key is missing");
        std::memcpy(out, row.str, row.len);
      }
      freeReplyObject(rows);
    }
  }
  // Rewrite the log as a snapshot, which loads faster than the commands.
  void settle() override {
    if (persistence_ != Persistence::kAppendOnly) return;
    retry("redis", [this] { return !reports("aof_rewrite_in_progress:1"); });
    writer_.run("BGREWRITEAOF");
    retry("redis", [this] {
      return !reports("aof_rewrite_in_progress:1") && !reports("aof_rewrite_scheduled:1");
    });
    if (!reports("aof_last_bgrewrite_status:ok")) fail("redis did not rewrite its log");
  }
  void persist() override {
    if (persistence_ == Persistence::kSnapshot) writer_.run("SAVE");
    // Redis answers before it writes its log while an earlier sync takes long. What is in the
    // kernel outlives a killed process.
    if (persistence_ == Persistence::kAppendOnly)
      retry("redis", [this] { return reports("aof_buffer_length:0\r"); });
  }
  pid_t server() const override { return server_.process(); }

 private:
  bool reports(const char* state) {
    return writer_.run("INFO persistence").find(state) != std::string::npos;
  }

  PeerShape shape_;
  Persistence persistence_;
  uint16_t port_;
  ServerProgram server_;
  Connection puller_;
  Connection writer_;  // of its own, because a second thread may write
};

}  // namespace

std::unique_ptr<Peer> open_redis(const PeerShape& shape) {
  return std::make_unique<Redis>(shape, Persistence::kNone);
}
std::unique_ptr<Peer> open_redis_append_only(const PeerShape& shape) {
  return std::make_unique<Redis>(shape, Persistence::kAppendOnly);
}
std::unique_ptr<Peer> open_redis_snapshot(const PeerShape& shape) {
  return std::make_unique<Redis>(shape, Persistence::kSnapshot);
}

}  // namespace petps::bench
