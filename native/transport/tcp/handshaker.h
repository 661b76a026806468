// The thread that runs the TLS handshakes of new peers, between the acceptor and the endpoints, so
// that a handshake, which costs about a millisecond of a processor, delays no request. Internal to
// transport/tcp.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "transport/tcp/endpoint.h"

namespace petps::transport {

// Memory of a handshake, as measured: the stream with its certificates and record buffers.
inline constexpr size_t kHandshakeBytes = size_t{64} << 10;

class Handshaker {
 public:
  // `deliver` receives each peer that is through, and each that speaks plain text, which has a
  // refusal and no stream. It runs on the handshaker's thread.
  Handshaker(const TcpOptions& options, Refusals& refusals, std::function<void(NewPeer)> deliver);
  ~Handshaker();
  Handshaker(const Handshaker&) = delete;
  Handshaker& operator=(const Handshaker&) = delete;

  base::Status open();
  void start();
  // Close the peers that are not through.
  void stop();
  // Take a new peer, or refuse it by closing the socket. When as many handshakes as may be at once
  // are unfinished, the oldest of the peer that has the most makes room: otherwise peers that
  // never finish would keep all others out. Any thread may call it.
  void take(int fd, std::string address);
  Handshakes counts() const;

 private:
  struct Guest {
    int fd = -1;
    std::string address;
    std::string host;
    std::unique_ptr<tls::Stream> tls;
    std::vector<std::byte> out;  // what the socket has not taken
    uint64_t until_ns = 0;
    bool is_lingering = false;  // it has failed, and may read the alert
  };
  using Guests = std::map<uint64_t, Guest>;

  void run();
  void adopt_new();
  void adopt(int fd, std::string address);
  void make_room();
  void advance(Guests::iterator at);
  // Receive once and take a step. Return false if the guest is gone, or has nothing more now.
  bool step(Guests::iterator at);
  void refuse_plain_text(Guests::iterator at);
  void finish(Guests::iterator at, std::span<const std::byte> rest);
  void fail(Guests::iterator at);
  // Send what the socket takes. Return false if the socket is broken.
  bool send_out(Guest& guest);
  void set_interest(uint64_t id, const Guest& guest);
  void remove(Guests::iterator at, bool closes);
  void remove_overdue();
  int wait_ms() const;
  // Count the peer among those at once. Return why it must be refused, or kEnd.
  Refusals::Reason count_in(const std::string& host);
  void count_out(const std::string& host);

  void refuse(Refusals::Reason reason, const std::string& host);

  const TcpOptions& options_;
  Refusals& refusals_;
  const std::function<void(NewPeer)> deliver_;
  int epoll_ = -1;
  int wake_ = -1;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  // Of the thread.
  Guests guests_;  // by number
  uint64_t next_guest_ = 0;
  std::vector<std::byte> arrived_;

  std::mutex mutex_;  // guards the members below
  std::vector<std::pair<int, std::string>> new_;
  uint32_t at_once_ = 0;
  std::unordered_map<std::string, uint32_t> by_host_;

  std::atomic<uint64_t> finished_{0};
  std::atomic<uint64_t> failed_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace petps::transport
