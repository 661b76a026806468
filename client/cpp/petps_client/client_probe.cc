// Probes: the background thread contacts dead servers, so that no call waits for one.
#include <algorithm>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "petps_client/impl.h"

namespace petps::client {

namespace {

constexpr uint32_t kMapDeadlineMs = 1'000;
constexpr uint32_t kLongestProbeMs = 60'000;  // patience_ns is shorter
// Limit of the probes at the same time, each on a thread of its own; the others come next.
constexpr size_t kProbesAtOnce = 16;

void probe(RemoteServer& server) {
  server.begin_probe();
  const Deadline until = Deadline::in_ms(kLongestProbeMs).limited(server.patience_ns());
  const auto status = Client::Impl::read_catalogue_of(server, until);
  // An error reply is a reply too: calls shall ask this server, and return its error.
  if (is_reply(status.code())) server.record_reply();
}

void probe_all(const std::vector<RemoteServer*>& servers) {
  std::vector<std::thread> threads;
  for (size_t i = 1; i < servers.size(); ++i) {
    try {
      threads.emplace_back([server = servers[i]] { probe(*server); });
    } catch (const std::system_error&) {  // no thread: one after another
      probe(*servers[i]);
    }
  }
  if (!servers.empty()) probe(*servers[0]);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void Client::Impl::want_probe(RemoteServer& server) {
  if (!server.want_probe()) return;
  {
    const std::lock_guard lock(background_mutex);
    has_wanted_probes = true;
  }
  background_wakes.notify_all();
}

uint64_t Client::Impl::probe_servers() {
  {
    const std::lock_guard lock(background_mutex);
    has_wanted_probes = false;
  }
  const auto by = current_routing();
  std::vector<RemoteServer*> due;
  uint64_t next_ns = UINT64_MAX;
  for (const auto& server : by->all) {
    if (!server->is_probe_wanted()) continue;
    const uint64_t at_ns = server->backoff_until_ns();
    if (at_ns <= base::monotonic_ns() && due.size() < kProbesAtOnce) {
      due.push_back(server.get());
    } else {
      next_ns = std::min(next_ns, at_ns);
    }
  }
  // One that is only doubtful answers soon, and waits for no dead one. But a dead one waits once.
  const auto first_dead =
      std::partition(due.begin(), due.end(), [](const RemoteServer* of) { return !of->is_dead(); });
  puts_off_dead = !puts_off_dead && first_dead != due.begin() && first_dead != due.end();
  if (puts_off_dead) {
    due.erase(first_dead, due.end());
    next_ns = 0;
  }
  probe_all(due);
  const bool has_silent = std::any_of(due.begin(), due.end(),
                                      [](const RemoteServer* server) { return server->is_dead(); });
  // The keys of a server that does not come back may have another one by now.
  if (has_silent && by->version != 0)
    (void)find_newer_map(*by, {}, Deadline::in_ms(kMapDeadlineMs));
  return next_ns;
}

}  // namespace petps::client
