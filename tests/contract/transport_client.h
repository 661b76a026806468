// The peer's side of a connection, over any transport: what the contract suite speaks through.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "transport/loopback/loopback.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {

// Frames of the suite: u32 length of the whole frame (a multiple of 8), u32 number, content. Length
// 0xbad is broken.
inline constexpr uint32_t kBadLength = 0xbad;
inline constexpr size_t kTestFrameBytesMax = size_t{4} << 20;
std::vector<std::byte> test_frame(uint32_t number, size_t content_bytes);
struct TestHeader {
  uint32_t length = 0;
  uint32_t number = 0;
};
TestHeader header_of(std::span<const std::byte> frame);
FrameRules test_rules();
// Error frames have this number; their content is the message.
inline constexpr uint32_t kErrorNumber = 0xffffffff;

class Client {
 public:
  virtual ~Client() = default;
  virtual bool send(std::span<const std::byte>
                        bytes) = 0;  // all of it; false: the server closed, or it does not take it
  virtual size_t receive(std::span<std::byte> out,
                         int timeout_ms) = 0;  // 0: closed, or the time is over
  virtual void end_sending() = 0;
  virtual void close() = 0;

  // One whole frame, or empty.
  std::vector<std::byte> receive_frame(int timeout_ms = 60'000);
  // Reads until the server has closed; the last error frame's message, or "".
  std::string read_to_end(int timeout_ms = 60'000);

 private:
  bool receive_exactly(std::byte* out, size_t n, int timeout_ms);
};

// Where the suite's rows lie: memory that a device can be told of before there are rows. A piece is
// somebody else's after kRowMemoryBytes more.
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

}  // namespace petps::transport
