// The client of the contract suite: the peer's side of a connection, over any transport.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "tests/support/loopback/loopback.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {

// Frames of the suite: u32 length of the whole frame (a multiple of 8), u32 number, content. The
// length 0xbad makes the frame broken.
inline constexpr uint32_t kBadLength = 0xbad;
inline constexpr size_t kTestFrameBytesMax = size_t{4} << 20;
std::vector<std::byte> test_frame(uint32_t number, size_t content_bytes);
struct TestHeader {
  uint32_t length = 0;
  uint32_t number = 0;
};
TestHeader header_of(std::span<const std::byte> frame);
FrameRules test_rules();
// An error frame has this number; its content is the message.
inline constexpr uint32_t kErrorNumber = 0xffffffff;

class Client {
 public:
  virtual ~Client() = default;
  // Send all of `bytes`. Return false if the server has closed or does not take them.
  virtual bool send(std::span<const std::byte> bytes) = 0;
  // Return 0 if the server has closed or the time is over.
  virtual size_t receive(std::span<std::byte> out, int timeout_ms) = 0;
  virtual void end_sending() = 0;
  virtual void close() = 0;

  // Return one whole frame, or an empty vector. What has arrived of a frame when the time is over
  // is kept for the next call.
  std::vector<std::byte> receive_frame(int timeout_ms = 60'000);
  // Read until the server has closed. Return the last error frame's message, or "".
  std::string read_to_end(int timeout_ms = 60'000);

 private:
  // Receive until `frame_` has n bytes. Return false if the server has closed or the time is over.
  bool receive_up_to(size_t n, uint64_t until_ns);

  std::vector<std::byte> frame_;  // the first bytes of the next frame
};

// Connect to the port, from this address of the loopback network unless it is 0.
std::unique_ptr<Client> connect_plain(uint16_t port, uint32_t from = 0);

// The memory of the suite's rows, which a device can register before rows exist. Pieces are handed
// out in a ring: a piece is reused after kRowMemoryBytes more.
inline constexpr size_t kRowMemoryBytes = size_t{32} << 20;
std::span<std::byte> row_memory();
std::span<std::byte> row_memory(size_t bytes);

// How the suite makes a transport of each kind.
struct Backend {
  std::string name;
  std::function<std::unique_ptr<Transport>(const Limits& limits, size_t endpoints,
                                           const Admit& admit)>
      make;
  std::function<std::unique_ptr<Client>(Transport& transport)> connect;
};
inline void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }
std::vector<Backend> backends();
Backend backend_named(const std::string& name);

}  // namespace petps::transport
