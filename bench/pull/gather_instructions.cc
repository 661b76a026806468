// Sends `lists` replies of `keys` rows from random addresses over one loopback connection, and
// exits. bench.report runs it under callgrind for two values of `lists`. The difference of the
// counts is the cost of gathering in user space, from row addresses to the system call. The
// lookup is left out, because it is the same for every mode.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <vector>

#include "base/prefetch.h"
#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/memory.h"
#include "bench/common/random.h"
#include "bench/pull/loopback.h"
#include "transport/tcp/tcp.h"

namespace petps::bench {
namespace {

constexpr size_t kHeaderBytes = 64;
constexpr size_t kMemoryBytes = size_t{16} << 20;
constexpr size_t kAhead = 8;

class Sender {
 public:
  explicit Sender(transport::GatherMode mode) : copy_(mode == transport::GatherMode::kCopy) {
    transport::TcpOptions options;
    options.gather = std::make_shared<const transport::GatherChoice>(mode);
    options.rules.header_bytes = options.rules.frame_bytes_max = kHeaderBytes;
    transport_ = value_of(transport::make_tcp(options));
    check_ok(transport_->start());
    client_ = connect_to_loopback(transport_->port());
    while (endpoint().connections().empty()) endpoint().poll(10);
    connection_ = endpoint().connections().front();
  }
  ~Sender() { ::close(client_); }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  void send(const std::vector<const std::byte*>& rows, size_t row_bytes) {
    list_.clear();
    list_.header(kHeaderBytes, copy_ ? rows.size() * row_bytes : 0);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (copy_) {
        if (i + kAhead < rows.size()) base::prefetch(rows[i + kAhead], row_bytes);
        list_.append(rows[i], row_bytes);
      } else {
        list_.add(rows[i], row_bytes);
      }
    }
    const size_t bytes = list_.bytes();
    endpoint().post(connection_, std::move(list_), epoch::Pin());
    endpoint().flush();
    for (size_t received = 0; received < bytes || endpoint().pending_posts() > 0;) {
      const ssize_t n = ::recv(client_, nullptr, bytes, MSG_TRUNC | MSG_DONTWAIT);
      if (n > 0) received += static_cast<size_t>(n);
      if (endpoint().pending_posts() > 0) endpoint().poll(0);
    }
  }

 private:
  transport::Endpoint& endpoint() { return transport_->endpoint(0); }

  const bool copy_;
  std::unique_ptr<transport::Transport> transport_;
  int client_ = -1;
  transport::ConnectionId connection_ = 0;
  gather::GatherList list_;
};

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps;
  using namespace petps::bench;
  Arguments arguments(count, values);
  transport::GatherMode mode;
  if (!transport::parse_gather_mode(arguments.text("mode", "copy"), mode)) fail("unknown mode");
  const uint64_t lists = arguments.number("lists", 100);
  const uint64_t row_bytes = arguments.number("row_bytes", 512);
  const uint64_t keys = arguments.number("keys", 500);
  arguments.finish();
  const Memory memory(kMemoryBytes);
  Random random(1);
  std::array<std::vector<const std::byte*>, 16> drawn;
  for (auto& rows : drawn) {
    for (uint64_t i = 0; i < keys; ++i)
      rows.push_back(memory.at() + random.below(kMemoryBytes / row_bytes) * row_bytes);
  }
  Sender sender(mode);
  for (uint64_t i = 0; i < lists; ++i) sender.send(drawn[i % drawn.size()], row_bytes);
}
