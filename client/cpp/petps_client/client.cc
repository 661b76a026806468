#include "petps_client/client.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "petps_client/impl.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Deadline of the background thread's own requests. No caller waits for them.
constexpr uint32_t kBackgroundDeadlineMs = 1'000;
constexpr uint32_t kShortestPeriodMs = 10;
// Pauses between checks for a server that came back or switched, while all live ones are too old.
constexpr uint64_t kFirstCheckNs = 2'000'000;
constexpr uint64_t kLongestCheckNs = 100'000'000;

Status check_options(const Options& options) {
  const auto invalid = [](std::string_view name, std::string_view range) {
    return Status(Code::kInvalidArgument,
                  "Options." + std::string(name) + " must be " + std::string(range));
  };
  if (options.name.size() > wire::kMaxNameBytes) return invalid("name", "at most 255 bytes");
  if (options.deadline_ms == 0) return invalid("deadline_ms", "at least 1");
  if (options.keys_per_request == 0 || options.keys_per_request > wire::kMaxKeysPerPull) {
    return invalid("keys_per_request", "1 to " + std::to_string(wire::kMaxKeysPerPull));
  }
  if (options.requests_in_flight == 0 || options.requests_in_flight > wire::kMaxInFlight) {
    return invalid("requests_in_flight", "1 to " + std::to_string(wire::kMaxInFlight));
  }
  if (options.connections == 0 || options.connections > wire::kMaxConnections) {
    return invalid("connections", "1 to " + std::to_string(wire::kMaxConnections));
  }
  if (!options.token.empty() && !options.token_file.empty())
    return invalid("token", "empty if Options.token_file is given");
  if (options.token.size() > wire::kMaxNameBytes) return invalid("token", "at most 255 bytes");
  if (options.zone.size() > wire::kMaxNameBytes) return invalid("zone", "at most 255 bytes");
  if (options.hot_keys > wire::kMaxHotKeys)
    return invalid("hot_keys", "at most " + std::to_string(wire::kMaxHotKeys));
  return {};
}

bool has_tls_options(const TlsOptions& tls) {
  return !tls.ca.empty() || !tls.certificate.empty() || !tls.key.empty() ||
         !tls.server_name.empty();
}

// Read the server's catalogue, and its shard map if it has one.
Status read_names_and_map(Client::Impl& impl, RemoteServer& server, const Deadline& until) {
  bool has_map = false;
  {
    auto leased = server.lease(until);
    if (!leased.ok()) return leased.status();
    has_map = leased->map_version() != 0;
    const auto catalogue = server.read_catalogue(**leased, until);
    if (!catalogue.ok()) return catalogue.status();
    // A URL without a model is no error yet: later calls report it if they need one.
    if (!impl.url.model.empty()) PETPS_RETURN_IF_ERROR(catalogue.value()->model_status());
  }
  return has_map ? impl.read_shard_map(server, until) : Status();
}

// Contact the servers one after another until one knows the model. If none does, the error names
// every server and its reason.
Status find_first_server(Client::Impl& impl, const Deadline& deadline) {
  Status failure;
  std::string reasons;
  const RemoteServers servers = impl.seed_servers();
  for (size_t i = 0; i < servers.size(); ++i) {
    RemoteServer& server = *servers[i];
    const Deadline until = deadline.share(servers.size() - i);
    const Status status = read_names_and_map(impl, server, until);
    if (status.ok()) return {};
    if (status.code() == Code::kUnavailable) server.record_failure();
    reasons.append(reasons.empty() ? "" : "; ").append(status.message());
    if (failure.ok() || is_unreachable(failure.code())) failure = status;
  }
  return Status(failure.code(), reasons);
}

}  // namespace

Status Client::Impl::check_process() const {
  if (getpid() == process) return {};
  return Status(Code::kFailedPrecondition,
                "this client was connected before fork(): its connections belong to the parent; "
                "connect in the child");
}

std::shared_ptr<Host> Client::Impl::make_host(Address address) const {
  const auto resolve = resolver_of(options);
  const auto make = [this, resolve](const Address& of_host, const SocketAddress* at) {
    return std::make_shared<RemoteServer>(of_host, url.model, options, BackoffOptions(), resolve,
                                          tls, at);
  };
  return std::make_shared<Host>(std::move(address), resolve, make);
}

RemoteServers Client::Impl::seed_servers() const {
  RemoteServers servers;
  for (const auto& host : seeds) {
    const RemoteServers of_host = host->servers();
    servers.insert(servers.end(), of_host.begin(), of_host.end());
  }
  return servers;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  // In a forked child the parent's thread cannot be joined, and its locks cannot be trusted.
  if (!impl_->check_process().ok()) {
    impl_->background.detach();
    (void)impl_.release();
    return;
  }
  {
    const std::lock_guard lock(impl_->background_mutex);
    impl_->stopping = true;
  }
  impl_->background_wakes.notify_all();
  impl_->background.join();
}

Result<std::unique_ptr<Client>> Client::connect(std::string_view url, const Options& options) {
  PETPS_RETURN_IF_ERROR(check_options(options));
  auto parsed = parse_url(url);
  if (!parsed.ok()) return parsed.status();
  auto impl = std::make_unique<Impl>(options);
  impl->url = std::move(parsed).value();
  impl->process = getpid();
  if (impl->url.has_tls) {
    auto tls = tls::ClientContext::open({options.tls.ca, options.tls.certificate, options.tls.key});
    if (!tls.ok()) return tls.status();
    impl->tls = std::move(tls).value();
  } else if (has_tls_options(options.tls)) {
    return Status(Code::kInvalidArgument, "Options.tls is given, but '" + std::string(url) +
                                              "' has no TLS: use petps+tls://, or give none");
  }
  for (const Address& address : impl->url.addresses)
    impl->seeds.push_back(impl->make_host(address));
  (void)impl->refresh_hosts(impl->deadline(0));
  {
    const std::lock_guard lock(impl->routing_mutex);
    (void)impl->route_locked({}, "");  // without a map it cannot fail
  }
  PETPS_RETURN_IF_ERROR(find_first_server(*impl, impl->deadline(0)));
  try {
    impl->background = std::thread([raw = impl.get()] { raw->run_background(); });
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted,
                  std::string("cannot start the client's background thread: ") + error.what() +
                      ": raise the limit of threads, or use fewer clients");
  }
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

size_t Client::shards() const {
  // In a forked child the mutex of the routing may stay locked for ever.
  return impl_->check_process().ok() ? impl_->current_routing()->all.size() : 0;
}
size_t Client::servers() const { return impl_->seeds.size(); }

PullCounts Client::pull_counts() const {
  return {impl_->pulls.load(), impl_->partial_pulls.load(), impl_->unavailable_keys.load(),
          impl_->hedges.load(), impl_->hedges_won.load()};
}

std::vector<ServerCounts> Client::server_counts() const {
  std::vector<ServerCounts> counts;
  if (!impl_->check_process().ok()) return counts;  // a thread of the parent may hold the mutexes
  for (const auto& server : impl_->current_routing()->all)
    counts.push_back({server->name(), server->failures(), !server->is_dead()});
  return counts;
}

Result<const CatalogueTable*> find_table(RemoteServer& server, Connection& connection,
                                         std::string_view table, const Deadline& deadline,
                                         std::shared_ptr<const Catalogue>& catalogue,
                                         std::string_view instance) {
  auto kept = server.catalogue(connection, deadline);
  if (!kept.ok()) return kept.status();
  catalogue = kept.value();
  auto entry = catalogue->find(table, instance);
  if (entry.ok()) return entry;
  auto fresh = server.read_catalogue(connection, deadline);
  if (!fresh.ok()) return fresh.status();
  catalogue = fresh.value();
  return catalogue->find(table, instance);
}

void Client::Impl::read_missing_catalogues(const Routing& by, const Deadline& deadline) {
  for (const auto& server : by.all) {
    if (server->last_catalogue() != nullptr || server->backoff_until_ns() > base::monotonic_ns() ||
        server->is_dead())
      continue;
    const Deadline until = deadline.share(by.all.size() + 1);
    (void)read_catalogue_of(*server, until.limited(server->patience_ns()));
  }
}

Status Client::Impl::read_catalogue_of(RemoteServer& server, const Deadline& deadline) {
  auto leased = server.lease(deadline);
  Status status = leased.status();
  if (leased.ok()) status = server.read_catalogue(**leased, deadline).status();
  if (status.ok()) server.record_reply();
  if (status.code() == Code::kUnavailable) server.record_failure();
  return status;
}

void Client::Impl::read_catalogues(const Routing& by, const Deadline& deadline, size_t spare) {
  for (size_t i = 0; i < by.all.size(); ++i) {
    RemoteServer& server = *by.all[i];
    if (server.backoff_until_ns() > base::monotonic_ns()) continue;
    (void)read_catalogue_of(server, deadline.share(by.all.size() - i + spare));
  }
}

Choice Client::Impl::choose_now(const Routing& by) const {
  std::vector<ServerView> servers;
  servers.reserve(by.all.size());
  for (const auto& server : by.all)
    servers.push_back({server->last_catalogue(), server->is_live()});
  return choose(servers, by.owners, newest_answer);
}

Status Client::Impl::choose_instance(const Routing& by, const Deadline& deadline, Choice& choice) {
  choice = {};
  if (by.all.size() == 1) return {};
  if (by.groups.size() > 1) read_missing_catalogues(by, deadline);
  for (uint64_t pause_ns = kFirstCheckNs;; pause_ns = std::min(pause_ns * 2, kLongestCheckNs)) {
    choice = choose_now(by);
    if (choice.too_old.empty()) return {};
    if (deadline.left_ns() <= pause_ns) break;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
    read_catalogues(by, deadline, 1);
  }
  return Status(Code::kStale, "the live servers resolve the model to " + choice.too_old +
                                  ", which is older than '" + newest_answer.instance() +
                                  "': this client has already returned rows of that instance, and "
                                  "all servers that have it are gone. Start one of them, or switch "
                                  "the live servers to it");
}

void Client::Impl::record_answer(const Routing& by, const std::string& instance) {
  std::vector<CataloguePointer> known;
  if (newest_answer.is(instance)) return;
  for (const auto& server : by.all) known.push_back(server->last_catalogue());
  newest_answer.record(instance, known);
}

const RemoteServers& Client::Impl::replicas_with(const RemoteServers& replicas,
                                                 const Choice& choice, RemoteServers& able) {
  if (choice.all_agree || choice.instance.empty()) return replicas;
  able.clear();
  for (const auto& server : replicas) {
    const auto catalogue = server->last_catalogue();
    if (catalogue == nullptr || catalogue->can_serve(choice.instance)) able.push_back(server);
  }
  return able.empty() ? replicas : able;
}

Result<Table> Client::describe(std::string_view table, uint32_t deadline_ms) {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  const auto by = impl_->current_routing();
  const Deadline until = impl_->deadline(deadline_ms);
  Choice choice;
  PETPS_RETURN_IF_ERROR(impl_->choose_instance(*by, until, choice));
  for (const auto& server : by->all) {
    const auto catalogue = server->last_catalogue();
    if (catalogue == nullptr) continue;
    const auto entry = catalogue->find(table, choice.instance);
    if (entry.ok()) return entry.value()->table;
  }
  Table description;
  const auto attempt = [&](RemoteServer& server, const Deadline& deadline) -> Status {
    auto leased = server.lease(deadline);
    if (!leased.ok()) return leased.status();
    std::shared_ptr<const Catalogue> catalogue;
    const auto entry = find_table(server, **leased, table, deadline, catalogue, choice.instance);
    if (entry.ok()) description = entry.value()->table;
    return entry.status();
  };
  PETPS_RETURN_IF_ERROR(impl_->try_any("describe", until, attempt));
  return description;
}

Result<std::vector<Table>> Client::tables(uint32_t deadline_ms) {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  std::vector<Table> tables;
  const auto attempt = [&](RemoteServer& server, const Deadline& deadline) -> Status {
    auto leased = server.lease(deadline);
    if (!leased.ok()) return leased.status();
    const auto catalogue = server.read_catalogue(**leased, deadline);
    if (catalogue.ok()) tables = catalogue.value()->tables();
    return catalogue.status();
  };
  PETPS_RETURN_IF_ERROR(impl_->try_any("tables", impl_->deadline(deadline_ms), attempt));
  return tables;
}

Result<std::string> Client::status(int server, uint32_t deadline_ms) {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  const auto servers = static_cast<int>(impl_->seeds.size());
  if (server < -1 || server >= servers) {
    return Status(Code::kInvalidArgument, "server " + std::to_string(server) + " is outside 0.." +
                                              std::to_string(servers - 1));
  }
  std::string text;
  const auto attempt = [&](RemoteServer& remote, const Deadline& deadline) -> Status {
    auto leased = remote.lease(deadline);
    if (!leased.ok()) return leased.status();
    Connection& connection = **leased;
    wire::encode_status(connection.next_request_id(), connection.frame());
    return connection.exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
      std::string_view json;
      const Status decoded = wire::decode_status_reply(header, body, json);
      text = json;
      return decoded;
    });
  };
  const Deadline deadline = impl_->deadline(deadline_ms);
  if (server < 0) {
    const RemoteServers all = impl_->seed_servers();
    PETPS_RETURN_IF_ERROR(impl_->try_servers("status", *route_to_all(all), all, deadline, attempt));
  } else {
    const RemoteServers named = impl_->seeds[static_cast<size_t>(server)]->servers();
    PETPS_RETURN_IF_ERROR(named.size() > 1 ? impl_->try_servers("status", *route_to_all(named),
                                                                named, deadline, attempt)
                                           : Impl::try_once(*named[0], deadline, 1, attempt));
  }
  return text;
}

// ---- Hot sets and catalogues, in the background

Status Client::send_hot_sets() {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  return impl_->send_hot_sets();
}

Status Client::Impl::send_hot_sets() {
  Status first;
  for (const auto& [table, keys] : statistics.take_hot_sets()) {
    const Status status = send_hot_keys(table, {}, keys);
    if (first.ok()) first = status;
  }
  return first;
}

Status Client::Impl::send_hot_keys(std::string_view table, std::string_view instance,
                                   std::span<const uint64_t> keys) {
  Status first;
  const auto by = current_routing();
  std::vector<std::vector<uint64_t>> owned(by->all.size());
  for (const uint64_t key : keys) {
    for (const uint32_t owner : by->owners[by->group(key)]) owned[owner].push_back(key);
  }
  for (size_t i = 0; i < owned.size(); ++i) {
    const Status status = send_hot_set(*by->all[i], table, instance, owned[i]);
    if (first.ok()) first = status;
  }
  return first;
}

Status Client::Impl::send_hot_set(RemoteServer& server, std::string_view table,
                                  std::string_view instance, std::span<const uint64_t> keys) {
  if (keys.empty() || server.backoff_until_ns() > base::monotonic_ns()) return {};
  const Deadline deadline = Deadline::in_ms(kBackgroundDeadlineMs);
  auto leased = server.lease(deadline);
  if (!leased.ok()) return leased.status();
  Connection& connection = **leased;
  std::shared_ptr<const Catalogue> catalogue;
  const auto entry = find_table(server, connection, table, deadline, catalogue, instance);
  if (!entry.ok()) return entry.status();
  const size_t limit = std::min<size_t>(keys.size(), leased->limits().hot_keys);
  wire::encode_hot_keys(connection.next_request_id(), {entry.value()->id, keys.first(limit)},
                        connection.frame());
  return connection.exchange(deadline, wire::decode_hot_keys_reply);
}

void Client::Impl::run_background() {
  uint64_t catalogue_at = base::monotonic_ns() + uint64_t{options.catalogue_ms} * 1'000'000;
  uint64_t hot_at = base::monotonic_ns();
  for (bool first = true;; first = false) {
    uint32_t hot_ms = options.hot_set_ms;
    const auto by = current_routing();
    for (const auto& server : by->all) hot_ms = hot_ms != 0 ? hot_ms : server->hot_set_ms();
    const uint64_t now = base::monotonic_ns();
    if (now >= hot_at) {
      if (!first && options.hot_sample_every != 0)
        (void)send_hot_sets();  // a lost set is replaced by the next one
      statistics.forget_unused();
      hot_at = now + uint64_t{std::max(hot_ms, kShortestPeriodMs)} * 1'000'000;
    }
    if (options.catalogue_ms != 0 && now >= catalogue_at) {
      for (const auto& server : by->all) {
        // A server that is gone may be silent for long. Probes run at the same time.
        if (server->is_dead()) {
          want_probe(*server);
        } else if (!read_catalogue_in_background(*server)) {
          return;
        }
      }
      if (by->version != 0) (void)find_newer_map(*by, {}, Deadline::in_ms(kBackgroundDeadlineMs));
      catalogue_at = base::monotonic_ns() +
                     uint64_t{std::max(options.catalogue_ms, kShortestPeriodMs)} * 1'000'000;
    }
    uint64_t next = std::min(hot_at, probe_servers());
    next = std::min(next, refresh_hosts(Deadline::in_ms(kBackgroundDeadlineMs)));
    if (options.catalogue_ms != 0) next = std::min(next, catalogue_at);
    if (!pause_background(next, true)) return;
  }
}

// Wait until the moment, or if `ends_with_probes` until a probe is wanted. Return false when the
// client is stopping.
bool Client::Impl::pause_background(uint64_t until_ns, bool ends_with_probes) {
  std::unique_lock lock(background_mutex);
  const uint64_t pause = until_ns - std::min(until_ns, base::monotonic_ns());
  background_wakes.wait_for(lock, std::chrono::nanoseconds(pause),
                            [&] { return stopping || (ends_with_probes && has_wanted_probes); });
  return !stopping;
}

// Read the catalogue of one server. Retry a live server until it replies or counts as gone, so that
// one round finds out. Try a gone server once, after its backoff.
bool Client::Impl::read_catalogue_in_background(RemoteServer& server) {
  do {
    if (server.is_dead() && server.backoff_until_ns() > base::monotonic_ns()) return true;
    if (!pause_background(server.backoff_until_ns())) return false;
    const Status status = read_catalogue_of(server, Deadline::in_ms(kBackgroundDeadlineMs));
    if (!is_unreachable(status.code())) return true;
  } while (!server.is_dead());
  return true;
}

}  // namespace petps::client
