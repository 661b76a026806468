// What is counted for each address of peers: open connections, and refusals by their reason. So one
// address cannot take the places of all, and a flood cannot hide what else happens. Internal to
// transport/tcp.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace petps::transport {

// The places of open connections. Any thread may call it.
class Places {
 public:
  // One connection's place, free again when it is destroyed.
  class Place {
   public:
    Place(Places& places, std::string host) : places_(places), host_(std::move(host)) {}
    ~Place() { places_.release(host_); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    Places& places_;
    const std::string host_;
  };

  // Return a place, or null if the host has `of_one_peer` already; 0: no limit.
  std::unique_ptr<Place> take(const std::string& host, uint32_t of_one_peer);

 private:
  void release(const std::string& host);
  std::mutex mutex_;  // guards by_host_
  std::unordered_map<std::string, uint32_t> by_host_;
};

// Counts refusals. Of each reason it remembers only the last peer, so a flood needs no memory. Any
// thread may call it.
class Refusals {
 public:
  enum class Reason : uint8_t {
    kConnections,        // all places are taken
    kConnectionsOfPeer,  // of one peer
    kHandshakes,         // at once
    kHandshakesOfPeer,
    kMemory,  // for a handshake
    kDescriptors,
    kEnd,
  };
  void count(Reason reason, const std::string& host);
  // Return a line for each reason that has occurred.
  std::vector<std::string> lines() const;

 private:
  struct Last {
    uint64_t count = 0;
    std::string host;
  };
  mutable std::mutex mutex_;  // guards last_
  std::array<Last, static_cast<size_t>(Reason::kEnd)> last_;
};

}  // namespace petps::transport
