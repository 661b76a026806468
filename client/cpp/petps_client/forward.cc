#include "petps_client/forward.h"

#include "petps_client/impl.h"

namespace petps::client {

using base::Status;

Status Forwarder::read_names(uint32_t deadline_ms) const {
  Client::Impl& impl = *client_.impl_;
  PETPS_RETURN_IF_ERROR(impl.check_process());
  const Deadline deadline = impl.deadline(deadline_ms);
  const auto attempt = [](RemoteServer& server, const Deadline& until) -> Status {
    auto leased = server.lease(until);
    if (!leased.ok()) return leased.status();
    return server.read_catalogue(**leased, until).status();
  };
  PETPS_RETURN_IF_ERROR(impl.try_any("tables", deadline, attempt));
  Client::Impl::read_missing_catalogues(*impl.current_routing(), deadline);
  return {};
}

ClusterView Forwarder::view() const {
  const auto by = client_.impl_->current_routing();
  ClusterView view;
  for (const auto& server : by->all)
    view.servers.push_back({server->last_catalogue(), server->is_live()});
  view.groups = by->owners;
  view.map_version = by->version;
  return view;
}

// The shard map is the shortest answer that no role is needed for.
Status Forwarder::check_caller(uint32_t deadline_ms) const {
  Client::Impl& impl = *client_.impl_;
  PETPS_RETURN_IF_ERROR(impl.check_process());
  const auto attempt = [](RemoteServer& server, const Deadline& until) {
    return server.read_shard_map(until).status();
  };
  return impl.try_any("shard map", impl.deadline(deadline_ms), attempt);
}

Status Forwarder::check_pull(std::string_view table, std::string_view instance,
                             uint32_t deadline_ms) const {
  Client::Impl& impl = *client_.impl_;
  PETPS_RETURN_IF_ERROR(impl.check_process());
  const auto attempt = [&](RemoteServer& server, const Deadline& until) -> Status {
    auto leased = server.lease(until);
    if (!leased.ok()) return leased.status();
    Connection& connection = **leased;
    std::shared_ptr<const Catalogue> catalogue;
    const auto ask = [&]() -> Status {
      const auto entry = find_table(server, connection, table, until, catalogue, instance);
      if (!entry.ok()) return entry.status();
      const wire::PullSection section{entry.value()->id, 0};
      wire::PullRequest pull;
      pull.sections = {&section, 1};
      wire::encode_pull(connection.next_request_id(), pull, connection.frame());
      return connection.exchange(until, [](const wire::FrameHeader& header, auto body) {
        wire::PullReplyPrefix prefix;
        return wire::decode_pull_reply_prefix(header, body, prefix);
      });
    };
    Status status = ask();
    if (status.code() != base::Code::kNotFound || connection.is_broken()) return status;
    const auto fresh = server.read_catalogue(connection, until);  // the table may have another id
    return fresh.ok() ? ask() : fresh.status();
  };
  return impl.try_any("pull", impl.deadline(deadline_ms), attempt);
}

Status Forwarder::push(const ForwardedPush& push, PushReport& report) const {
  alignas(8) static constexpr std::byte kNoRows{};  // marks `stored` as set when there are no rows
  PushWork work{.table = push.table, .keys = push.keys, .deletes = push.deletes};
  if (!push.deletes)
    work.stored = push.rows.empty() ? std::span<const std::byte>(&kNoRows, 0) : push.rows;
  work.options.allow_not_finite = true;  // the servers' native ports take any value
  work.options.stamp = push.stamp;
  work.options.instance = push.instance;
  work.options.report = &report;
  if (push.order.client != 0) work.order = &push.order;
  return client_.impl_->push(std::move(work)).status();
}

Status Forwarder::send_hot_keys(std::string_view table, std::string_view instance,
                                std::span<const uint64_t> keys) const {
  PETPS_RETURN_IF_ERROR(client_.impl_->check_process());
  return client_.impl_->send_hot_keys(table, instance, keys);
}

}  // namespace petps::client
