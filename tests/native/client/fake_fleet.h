// Servers that die, pause, return late, are restored from old copies and change places, all on one
// thread: whatever a test does to them between two calls of a client has happened when it calls.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "wire/wire.h"

namespace petps::client::testing {

// Instance number n is "m@n"; its rows have row_dim(n) values, each of them n.
inline std::string instance_of(uint32_t number) { return "m@" + std::to_string(number); }
inline uint32_t row_dim(uint32_t number) { return 1 + number % 3; }

// The names of a pool, as a server's superblock has them.
struct FakePool {
  std::array<uint8_t, 16> uuid{};
  uint64_t counter = 1;
  uint32_t first_id = 1;            // of instance number 1 here: ids differ from pool to pool
  std::vector<uint32_t> instances;  // their numbers, ascending
  uint32_t meant = 0;
  uint32_t previous = 0;

  bool has(uint32_t number) const;
  void create(uint32_t number);
  void switch_to(uint32_t number);
  void drop(uint32_t number);
};

class FakeFleet {
 public:
  explicit FakeFleet(size_t servers);
  ~FakeFleet();
  std::string address(size_t server) const;

  // Changes of the world, each done when it returns.
  void change(size_t server, const std::function<void(FakePool&)>& how);
  FakePool pool(size_t server) const;
  void kill(size_t server);    // connections are closed, new ones refused
  void revive(size_t server);  // at the same address
  void pause(size_t server, bool paused);
  void swap(size_t one, size_t other);  // new connections to either address reach the other's pool
  void close_idle(size_t server);

  // What a client (by the name of its hello) did against the promise: took rows of a pool at an
  // older state than it had seen at the address. Empty: nothing.
  std::vector<std::string> violations() const;
  // The client shows that it knows this state of a pool. An answer that was sent proves nothing:
  // the client may have given up before it came.
  void saw(const std::string& client, size_t server, const wire::CatalogueState& state);
  // The highest counter that this client has seen at the address, of the pool that is there now.
  uint64_t seen(const std::string& client, size_t server) const;
  uint64_t requests() const { return requests_.load(); }

 private:
  struct Server {
    uint16_t port = 0;
    int listener = -1;
    bool listens = true;
    size_t pool = 0;
    bool paused = false;
  };
  struct Peer {
    int socket = -1;
    size_t server = 0;
    size_t pool = 0;
    std::string client;
    std::vector<std::byte> inbox;
    uint64_t sent = 0;  // the counter of the last answer; seen when a request follows
  };
  void run();
  void listen_at(Server& server);
  void close_peers(size_t server);
  bool take_bytes(Peer& peer);
  void answer_all(Peer& peer);
  void answer(Peer& peer, const wire::FrameHeader& header, std::span<const std::byte> body,
              wire::Frame& reply);
  void answer_pull(Peer& peer, const wire::FrameHeader& header, std::span<const std::byte> body,
                   wire::Frame& reply);
  static std::string key_of(const std::string& client, size_t server, size_t pool);
  uint64_t seen_of(const std::string& client, size_t server, size_t pool) const;
  wire::TablesReply tables_of(const FakePool& pool) const;
  void wake() const;

  mutable std::mutex mutex_;  // guards everything below; held while the thread answers
  std::vector<Server> servers_;
  std::vector<FakePool> pools_;
  std::vector<Peer> peers_;
  std::map<std::string, uint64_t> seen_;  // by client, address and pool
  std::vector<std::string> violations_;
  bool stopping_ = false;
  int wake_ = -1;
  std::atomic<uint64_t> requests_{0};
  std::thread thread_;
};

}  // namespace petps::client::testing
