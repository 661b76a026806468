// The transport inside one process, for tests: the same contract as tcp, with completions that a
// test can hold, shuffle or lose.
//
// A held list is read only when it completes, as a network card would read it, so a row that was
// freed too early shows in the reply.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "transport/transport.h"

namespace petps::transport {

struct LoopbackOptions {
  size_t endpoints = 1;
  Limits limits;
  FrameRules rules;
  Admit admit;  // empty: every peer is admitted
};

enum class Completions : uint8_t {
  kAtOnce,    // post() reads the rows and drops the pin
  kHeld,      // nothing completes until the test completes it
  kShuffled,  // each poll completes a random subset, in random order
};

// Both directions of one connection. LoopbackTransport's mutex guards it.
struct Pipe {
  std::vector<std::byte> to_server;
  std::vector<std::byte> to_client;
  size_t to_client_at = 0;
  uint64_t taken_ns = 0;      // when the client last took bytes, or had none to take
  bool client_ended = false;  // the client sends no more
  bool client_gone = false;   // the client reads no more either
  bool server_ended = false;
  size_t unread() const { return to_client.size() - to_client_at; }
};

class LoopbackTransport;

// The peer's side. Any thread may use it.
class LoopbackClient {
 public:
  LoopbackClient(LoopbackTransport& transport, std::shared_ptr<Pipe> pipe)
      : transport_(transport), pipe_(std::move(pipe)) {}
  ~LoopbackClient() { close(); }

  // Send all of `bytes`. Return false if the server has closed.
  bool send(std::span<const std::byte> bytes);
  // Receive up to out.size() bytes and return their number. Return 0 after timeout_ms, or when the
  // server has closed and all its bytes are read.
  size_t receive(std::span<std::byte> out, int timeout_ms);
  void end_sending();
  void close();

 private:
  LoopbackTransport& transport_;
  std::shared_ptr<Pipe> pipe_;
};

class LoopbackEndpoint;

class LoopbackTransport final : public Transport {
 public:
  explicit LoopbackTransport(const LoopbackOptions& options);
  ~LoopbackTransport() override;

  size_t endpoints() const override { return endpoints_.size(); }
  Endpoint& endpoint(size_t worker) override;
  base::Status start() override;
  void stop_accepting() override;
  void end() override {
    while (drop_newest()) {
    }
  }
  uint16_t port() const override { return 0; }
  uint64_t refused() const override { return refused_.load(std::memory_order_relaxed); }
  const char* name() const override { return "loopback"; }

  // Return a client for a new connection. The client of a refused peer receives the error frame
  // only.
  std::unique_ptr<LoopbackClient> connect();

  // Control by the test, from any thread. "Oldest" and "newest" count all connections of all
  // endpoints.
  void set_completions(Completions completions, uint64_t seed = 0);
  size_t held() const;
  bool complete_oldest();
  bool complete_newest();
  // Lose the newest list: drop its pin and close its connection.
  bool drop_newest();
  void complete_all();

 private:
  friend class LoopbackClient;
  friend class LoopbackEndpoint;
  enum class Which : uint8_t { kOldest, kNewest };
  bool finish_list(Which which, bool is_lost);

  const LoopbackOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<LoopbackEndpoint>> endpoints_;
  Completions completions_ = Completions::kAtOnce;
  std::mt19937_64 random_;
  uint64_t next_post_ = 0;  // numbers the posts of all endpoints
  bool accepting_ = false;
  uint64_t next_peer_ = 1;
  std::atomic<uint64_t> refused_{0};
};

}  // namespace petps::transport
