// One epoll with its connections. Internal to transport/tcp.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/stream.h"
#include "transport/tcp/flights.h"
#include "transport/tcp/peers.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {

// Replies are staged up to this size before a send. A send wakes the peer and costs about 10 us
// beside its bytes, so small replies share one; the peer of a large reply should start to read
// while the next is gathered.
inline constexpr size_t kStageBytes = size_t{128} << 10;
// A longer reply is staged and sent in parts of this size. It bounds the buffer and fits a
// second-level cache.
inline constexpr size_t kStageBytesMax = size_t{1} << 20;
// An encrypted reply is sent in parts of this size: the peer decrypts while the next part is
// encrypted, and the records of all parts use the same memory.
inline constexpr size_t kEncryptBytes = size_t{64} << 10;
// A lingering socket is closed early if more than this arrives and is discarded.
inline constexpr size_t kLingerBytes = size_t{1} << 20;
// Zero-copy may hold this many lists of one connection; further lists are copied. So a slow peer
// holds few of its worker's pins.
inline constexpr size_t kZerocopyListsPerConnection = 16;
// The same for all connections together: half of a worker's pins stay for lists that are copied.
inline constexpr size_t kZerocopyListsMax = epoch::kPinsPerReader / 2;
// How long end() waits for the kernel to release rows.
inline constexpr uint64_t kSettleMs = 1'000;
inline constexpr int kEpollEvents = 256;
// TLS: one recv takes at most this much ciphertext, which is eight records.
inline constexpr size_t kCiphertextBytes = 8 * (tls::kRecordBytes + tls::kRecordExtraBytes);
// The poll budget: before it polls epoll, the endpoint reads at most this many connections again,
// and it may skip epoll for at most kLookEveryNs. That is a few short pulls but not one long pull;
// otherwise a client with long pulls would delay the others.
inline constexpr size_t kReceiveTries = 4;
inline constexpr uint64_t kLookEveryNs = 50'000;

// A peer that the acceptor hands over. If `refusal` is an error, send it to the peer and close.
struct NewPeer {
  int fd = -1;
  std::string address;
  base::Status refusal;
  std::unique_ptr<tls::Stream> tls;  // after its handshake; null: plain text
  std::vector<std::byte> arrived;    // ciphertext that followed the handshake
  // All places are taken: close an idle connection to make room, or refuse the peer.
  bool needs_room = false;
  std::unique_ptr<Places::Place> place;  // null: refused
};

struct TcpConnection final : StreamConnection {
  size_t lists_in_flight() const override { return flights.size(); }
  bool take_overdue(uint64_t since_ns) override { return flights.take_overdue(since_ns); }

  int fd = -1;
  std::unique_ptr<Places::Place> place;  // until the socket is closed; null: refused
  std::unique_ptr<tls::Stream> tls;      // null: plain text
  std::vector<std::byte> undecrypted;    // ciphertext for which there was no room in `in`
  bool has_announced_end = false;        // close_notify is in `out` or `notices`, or was sent
  std::vector<tls::Notice> notices;      // kernel TLS: to send when `out` is empty
  uint64_t records = 0;                  // kernel TLS: that the kernel has encrypted, or more
  // Return whether the cipher is in this process, and not in the kernel.
  bool encrypts() const { return tls != nullptr && !tls->writes_by_kernel(); }
  bool kernel_encrypts() const { return tls != nullptr && tls->writes_by_kernel(); }
  bool has_output() const { return out.bytes() > 0 || !notices.empty(); }
  PeerIdentity identity;
  // Return whether input waits that no socket event announces.
  bool has_buffered() const {
    return tls != nullptr && !ended && (!undecrypted.empty() || tls->has_plain());
  }
  bool zerocopy = false;   // the socket supports zero-copy
  bool reported = false;   // reported for settling too long
  uint32_t next_send = 0;  // number of the next zero-copy send
  uint32_t interest = 0;   // epoll mask
  Flights flights;
  uint64_t settling_since_ns = 0;
  size_t linger_bytes = 0;
};

class TcpEndpoint final : public StreamEndpoint {
 public:
  explicit TcpEndpoint(const TcpOptions& options);
  ~TcpEndpoint() override;
  base::Status open();

  std::span<const Event> poll(int timeout_ms) override;
  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override;
  void flush() override;
  PeerIdentity identity(ConnectionId connection) const override;
  base::Status watch(int file) override;

  // Called by the acceptor's thread.
  void adopt(NewPeer peer);
  // Start of the longest idleness of a connection, as of the last sweep; ~0: none is idle.
  uint64_t idle_since_ns() const { return idle_since_ns_.load(std::memory_order_relaxed); }
  // Close that connection soon, so that a new peer finds a place.
  void ask_for_room();
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  // See Transport::end(). Call it when the endpoint's thread has stopped polling.
  void end();

 private:
  using Connection = TcpConnection;

  static Connection& tcp(StreamConnection& c) { return static_cast<Connection&>(c); }
  void set_interest(Connection& c);
  base::Status add_file(int file, uint64_t slot);

  // Receive side: endpoint.cc.
  void adopt_new();
  void adopt_peer(NewPeer& peer);
  bool review_candidates();
  void report_candidates();
  int wait(uint64_t now, bool is_busy, int timeout_ms);
  void handle(Connection& c, uint32_t events);
  // Receive once. Return whether bytes have arrived.
  bool receive(Connection& c);
  // Note the end or the failure of a socket whose recv returned n <= 0.
  void note_end(Connection& c, ssize_t n);
  void note_input(size_t bytes);  // count bytes of the network
  void receive_waiting(StreamConnection& c) override;

  // Send side: send.cc.
  void send_staged();
  // Send as much as the socket takes. Return false if the connection is broken.
  bool send_some(Connection& c, const std::byte* bytes, size_t n, size_t& sent);
  void stage_list(Connection& c, const gather::GatherList& list);
  GatherMode mode_of(Connection& c, const gather::GatherList& list);
  void send_list(Connection& c, gather::GatherList& list, epoch::Pin& pin, bool zerocopy);
  void take_flight(Connection& c, gather::GatherList& list, epoch::Pin& pin, uint32_t first);
  void collect_completions(Connection& c);
  void send_output(StreamConnection& c) override;
  void keep_output(Connection& c, const std::byte* bytes, size_t n);
  // Send bytes behind the waiting output, and keep what the socket does not take.
  void send_or_keep(Connection& c, std::span<const std::byte> bytes);
  void append_output(StreamConnection& c, std::span<const std::byte> bytes) override;

  // TLS: encrypted.cc.
  void leave_to_kernel(Connection& c);
  void note_sent(Connection& c, size_t bytes);
  bool has_worn_key(const Connection& c) const;
  bool end_worn(Connection& c);
  void keep_notices(Connection& c);
  void send_notices(Connection& c);
  bool decrypt(Connection& c, std::span<std::byte> space);
  void keep_undecrypted(Connection& c, std::span<const std::byte> rest);
  void send_encrypted(Connection& c, std::span<const std::byte> plain);
  void send_encrypted_parts(Connection& c, std::span<const std::byte> plain);
  void announce_end(Connection& c);

  // Closing: close.cc.
  void sweep_sockets(uint64_t now);
  bool make_room();
  bool end_lingering(Connection& c);
  void discard(Connection& c);
  void destroy(StreamConnection& c) override;
  void settle(Connection& c);
  void settle_all();
  void check_flights(Connection& c, uint64_t now);

  const TcpOptions options_;
  int epoll_ = -1;
  std::array<epoll_event, kEpollEvents> ready_{};
  std::vector<std::byte> stage_;
  size_t staged_ = 0;
  std::vector<std::byte> ciphertext_;  // of the last recv from a TLS peer
  std::vector<std::byte> encrypted_;   // records on their way to a socket
  bool kernel_lacks_tls_ = false;
  Connection* staged_for_ = nullptr;
  uint64_t busy_until_ns_ = 0;              // see TcpOptions::busy_poll_us
  uint64_t looked_ns_ = 0;                  // when epoll was last polled
  size_t in_flight_ = 0;                    // lists of all connections that the kernel reads
  std::vector<gather::GatherList> landed_;  // empty lists whose memory is reused

  std::atomic<uint64_t> idle_since_ns_{~uint64_t{0}};
  std::atomic<uint64_t> refused_{0};
  std::atomic<bool> wants_room_{false};
  std::atomic<bool> has_new_{false};
  std::mutex mutex_;  // guards new_
  std::vector<NewPeer> new_;
};

}  // namespace petps::transport
