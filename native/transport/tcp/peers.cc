#include "transport/tcp/peers.h"

#include <iterator>
#include <utility>

namespace petps::transport {

namespace {

constexpr const char* kReasons[] = {
    "the server had its limit of connections already",
    "the peer had its connections already (limits.connections_per_peer)",
    "too many TLS handshakes at once; the oldest of the peer with the most was closed",
    "the peer had too many TLS handshakes at once",
    "no memory for a TLS handshake (limits.memory_bytes)",
    "no file descriptor left",
};
static_assert(std::size(kReasons) == static_cast<size_t>(Refusals::Reason::kEnd));

}  // namespace

std::unique_ptr<Places::Place> Places::take(const std::string& host, uint32_t of_one_peer) {
  {
    const std::lock_guard lock(mutex_);
    const auto at = by_host_.find(host);
    if (of_one_peer != 0 && at != by_host_.end() && at->second >= of_one_peer) return nullptr;
    ++by_host_[host];
  }
  return std::make_unique<Place>(*this, host);
}

void Places::release(const std::string& host) {
  const std::lock_guard lock(mutex_);
  const auto at = by_host_.find(host);
  if (--at->second == 0) by_host_.erase(at);
}

void Refusals::count(Reason reason, const std::string& host) {
  const std::lock_guard lock(mutex_);
  Last& last = last_[static_cast<size_t>(reason)];
  ++last.count;
  last.host = host;
}

std::vector<std::string> Refusals::lines() const {
  std::vector<std::string> lines;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < last_.size(); ++i) {
    const auto& [count, host] = last_[i];
    if (count == 0) continue;
    lines.push_back("refused " + std::to_string(count) + (count == 1 ? " peer: " : " peers: ") +
                    kReasons[i] + "; the last one was " + (host.empty() ? "unknown" : host));
  }
  return lines;
}

}  // namespace petps::transport
