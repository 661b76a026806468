// Fake servers that die, pause, return late, are restored from old copies, and exchange their
// pools. One thread serves them all, so a change between two calls of a client is complete before
// the second call.
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

// Instance number n is "m@n". Its rows have row_dim(n) values, each equal to n.
inline std::string instance_of(uint32_t number) { return "m@" + std::to_string(number); }
inline uint32_t row_dim(uint32_t number) { return 1 + number % 3; }

// The names of a pool, as in a server's superblock.
struct FakePool {
  std::array<uint8_t, 16> uuid{};
  uint64_t counter = 1;
  uint32_t first_id = 1;            // instance n has id first_id + n: ids differ between pools
  std::vector<uint32_t> instances;  // their numbers, ascending
  uint32_t current = 0;             // the instance that the alias "m" resolves to
  uint32_t previous = 0;            // the instance that it resolved to before

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

  // Changes of the fleet. Each one is complete when the function returns.
  void change(size_t server, const std::function<void(FakePool&)>& how);
  FakePool pool(size_t server) const;
  void kill(size_t server);    // closes its connections, refuses new ones
  void revive(size_t server);  // at the same address
  void pause(size_t server, bool paused);
  void swap(size_t one, size_t other);  // exchanges the pools for new connections
  void close_idle(size_t server);

  // Return the violations so far: a client (by the name in its hello) received rows of a pool in
  // an older state than the one it had seen at the address.
  std::vector<std::string> violations() const;
  // Record that the client has seen this state of a pool. A sent reply does not prove that, because
  // the client may have given up before it arrived.
  void record_seen(const std::string& client, size_t server, const wire::CatalogueState& state);
  // Return the highest counter that this client has seen at the address, of its current pool.
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
    uint64_t sent = 0;  // counter of the last reply; seen once another request arrives
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

  mutable std::mutex mutex_;  // guards everything below; held while the thread replies
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
