// The transport over TCP: one acceptor thread, one epoll per endpoint.
//
// Why an acceptor and not SO_REUSEPORT: the kernel spreads REUSEPORT by a hash of the addresses,
// so two connections on two workers share one worker half of the time. The acceptor gives each
// connection to the endpoint with the fewest.
#pragma once

#include <memory>
#include <string>

#include "tls/tls.h"
#include "transport/gather_choice.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"

namespace petps::transport {

// A shorter list is copied, because pinning its pages and reading the completion cost more than its
// bytes (Documentation/networking/msg_zerocopy.rst puts the limit at 10 KB; this is four pages).
inline constexpr size_t kZerocopyBytes = size_t{16} << 10;

inline constexpr uint32_t kBusyPollMaxUs = 1'000'000;

// Limits of the TLS handshakes that are not finished. A handshake costs about a millisecond of a
// processor, so those of 256 peers take less than half of handshake_ms.
struct HandshakeLimits {
  uint32_t at_once = 256;
  uint32_t of_one_peer = 32;  // by its address, without the port
  uint64_t handshake_ms = 5'000;
};

struct TcpOptions {
  std::string host = "127.0.0.1";  // numeric
  uint16_t port = 0;
  size_t endpoints = 1;
  // How rows are sent. Shared, because the measurement publishes its figures into it later.
  std::shared_ptr<const GatherChoice> gather = std::make_shared<const GatherChoice>();
  size_t zerocopy_bytes = kZerocopyBytes;
  // After a request an endpoint polls for this time without sleeping; at most kBusyPollMaxUs.
  uint32_t busy_poll_us = 0;
  int socket_buffer_bytes = 0;  // SO_SNDBUF and SO_RCVBUF; 0: the kernel tunes them
  // Null: plain text. With TLS, rows are gathered where the kernel encrypts (GATHER.md), and copied
  // elsewhere.
  std::shared_ptr<const tls::ServerContext> tls;
  HandshakeLimits handshakes;
  Limits limits;
  std::shared_ptr<MemoryBudget> memory = std::make_shared<MemoryBudget>();
  FrameRules rules;
  Admit admit;  // empty: every peer is admitted
};

// Bind and listen; start() begins to accept peers. Errors: kInvalidArgument (not an address),
// kUnavailable (the address is in use), kIoError (another failed system call).
base::Result<std::unique_ptr<Transport>> make_tcp(const TcpOptions& options);

}  // namespace petps::transport
