#include "transport/tcp/measure.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <vector>

#include "base/clock.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

// Only the beginning of a longer reply is measured: beyond this size, each further row costs as
// much as the last.
constexpr size_t kMeasuredBytesMax = size_t{1} << 20;
constexpr size_t kHeaderBytes = 64;
// The first figure may include page faults and a growing socket buffer.
constexpr int kRoundsMin = 2;
constexpr int kRoundsMax = 20;
constexpr uint64_t kOpenNs = 10'000'000'000;
constexpr uint64_t kStuckNs = 1'000'000'000;  // a loopback connection that moves nothing

// A server's endpoint of one mode, and a client that discards what it receives.
class Lane {
 public:
  Lane(GatherMode mode, std::span<const std::byte> memory) : mode_(mode), memory_(memory) {}
  ~Lane() {
    if (client_ >= 0) ::close(client_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Status open() {
    TcpOptions options;
    options.gather = std::make_shared<const GatherChoice>(mode_);
    options.rules.header_bytes = kHeaderBytes;
    options.rules.frame_bytes_max = kHeaderBytes;
    auto transport = make_tcp(options);
    if (!transport.ok()) return transport.status();
    transport_ = std::move(transport.value());
    PETPS_RETURN_IF_ERROR(transport_->start());
    client_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(transport_->port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (client_ < 0 ||
        ::connect(client_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      return base::errno_status(Code::kUnavailable,
                                "measure gather modes: cannot open a loopback connection", errno);
    }
    const uint64_t until = base::monotonic_ns() + kOpenNs;
    bool is_late = false;  // it looks once more: this thread itself may have waited for a processor
    while (endpoint().connections().empty()) {
      if (is_late)
        return Status(Code::kUnavailable,
                      "measure gather modes: a loopback connection was not accepted");
      is_late = base::monotonic_ns() > until;
      endpoint().poll(10);
    }
    connection_ = endpoint().connections().front();
    transport_->stop_accepting();
    return {};
  }

  // Return the nanoseconds that the server's side spent on one reply, or 0 if the reply was not
  // sent in this lane's mode.
  uint64_t send(size_t row_bytes, size_t rows, std::mt19937_64& random) {
    draw(row_bytes, rows, random);
    const Counters& counters = endpoint().counters();
    const uint64_t zerocopy = counters.lists_zerocopy;
    uint64_t start = base::monotonic_ns();
    gather(row_bytes);
    const size_t bytes = list_.bytes();
    endpoint().post(connection_, std::move(list_), epoch::Pin());
    endpoint().flush();
    uint64_t spent = base::monotonic_ns() - start;
    const uint64_t until = start + kStuckNs;
    size_t received = 0;
    while (received < bytes || endpoint().pending_posts() > 0) {
      // Call the kernel directly: a sanitizer's recv would assume that the discarded bytes go to
      // address 0.
      const long n = ::syscall(SYS_recvfrom, client_, nullptr, bytes, MSG_TRUNC | MSG_DONTWAIT,
                               nullptr, nullptr);
      if (n > 0) received += static_cast<size_t>(n);
      start = base::monotonic_ns();
      if (start > until) return 0;
      endpoint().poll(0);
      spent += base::monotonic_ns() - start;
    }
    return mode_ == GatherMode::kZerocopy && counters.lists_zerocopy == zerocopy ? 0 : spent;
  }
  bool has_copied() const { return transport_->endpoint(0).counters().zerocopy_copied > 0; }

 private:
  Endpoint& endpoint() { return transport_->endpoint(0); }

  void draw(size_t row_bytes, size_t rows, std::mt19937_64& random) {
    addresses_.clear();
    for (size_t i = 0; i < rows; ++i)
      addresses_.push_back(memory_.data() + random() % (memory_.size() / row_bytes) * row_bytes);
  }

  // Gather as server/pull.cc does, without the lookup.
  void gather(size_t row_bytes) {
    constexpr size_t kAhead = 8;
    list_.clear();
    const bool copy = mode_ == GatherMode::kCopy;
    list_.header(kHeaderBytes, copy ? addresses_.size() * row_bytes : 0);
    for (size_t i = 0; i < addresses_.size(); ++i) {
      if (!copy) {
        list_.add(addresses_[i], row_bytes);
        continue;
      }
      if (i + kAhead < addresses_.size()) {
        for (size_t at = 0; at < row_bytes; at += 64)
          __builtin_prefetch(addresses_[i + kAhead] + at, 0, 0);
      }
      list_.append(addresses_[i], row_bytes);
    }
  }

  const GatherMode mode_;
  const std::span<const std::byte> memory_;
  std::unique_ptr<Transport> transport_;
  int client_ = -1;
  ConnectionId connection_ = 0;
  gather::GatherList list_;
  std::vector<const std::byte*> addresses_;
};

}  // namespace

base::Result<GatherCosts> measure_gather(std::span<const std::byte> memory, uint64_t limit_ms,
                                         const std::atomic<bool>& stop) {
  const uint64_t start = base::monotonic_ns();
  const uint64_t until = start + limit_ms * 1'000'000;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (const GatherMode mode : kGatherModes) {
    lanes.push_back(std::make_unique<Lane>(mode, memory));
    PETPS_RETURN_IF_ERROR(lanes.back()->open());
  }
  GatherCosts costs;
  std::mt19937_64 random(1);
  const auto measure_round = [&] {
    for (size_t r = 0; r < costs.cells.size(); ++r) {
      for (size_t b = 0; b < costs.cells[r].size(); ++b) {
        const size_t row_bytes = GatherCosts::kRowBytes[r];
        const size_t rows = std::min(GatherCosts::kBatches[b], kMeasuredBytesMax / row_bytes);
        for (size_t m = 0; m < lanes.size(); ++m) {
          if (stop.load(std::memory_order_relaxed) || base::monotonic_ns() > until) return false;
          // Zero-copy that copies never wins, so one figure for the status is enough.
          if (lanes[m]->has_copied() && costs.cells[r][b].ns[m] > 0) continue;
          const uint64_t ns =
              lanes[m]->send(row_bytes, rows, random) * GatherCosts::kBatches[b] / rows;
          uint64_t& lowest = costs.cells[r][b].ns[m];
          if (ns > 0 && (lowest == 0 || ns < lowest)) lowest = ns;
        }
      }
    }
    return true;
  };
  for (int done = 0; done < kRoundsMax && measure_round();) costs.complete = ++done >= kRoundsMin;
  for (auto& row : costs.cells) {
    for (GatherCosts::Cell& cell : row)
      cell.zerocopy_copied = cell.ns[2] > 0 && lanes[2]->has_copied();
  }
  costs.milliseconds = static_cast<double>(base::monotonic_ns() - start) / 1e6;
  return costs;
}

}  // namespace petps::transport
