// Client::pull and pull_many: from the caller's arrays to one exchange and back.
#include <algorithm>
#include <cstring>
#include <limits>

#include "petps_client/impl.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

Status check_arguments(std::span<const TablePull> pulls) {
  for (const TablePull& pull : pulls) {
    const std::string name = "pull from '" + std::string(pull.table) + "': ";
    if (!pull.mask.empty() && pull.mask.size() != pull.keys.size()) {
      return Status(Code::kInvalidArgument, name + "the mask has " +
                                                std::to_string(pull.mask.size()) + " bytes for " +
                                                std::to_string(pull.keys.size()) + " keys");
    }
    if (pull.keys.size() > std::numeric_limits<uint32_t>::max()) {
      return Status(Code::kInvalidArgument, name + "more than 4,294,967,295 keys in one call");
    }
    if (pull.form == Form::kFloat32 &&
        reinterpret_cast<uintptr_t>(pull.out.data()) % alignof(float) != 0) {
      return Status(Code::kInvalidArgument,
                    name + "the array of float32 is not aligned to 4 bytes");
    }
  }
  return {};
}

Status check_size(const TablePull& pull, const PullPart& part) {
  const size_t wanted = pull.keys.size() * part.out_row_bytes();
  if (pull.out.size() == wanted) return {};
  return Status(Code::kInvalidArgument, "pull from '" + std::string(pull.table) +
                                            "': the array has " + std::to_string(pull.out.size()) +
                                            " bytes; " + std::to_string(pull.keys.size()) +
                                            " rows of " + std::to_string(part.out_row_bytes()) +
                                            " bytes (dim " + std::to_string(part.table->table.dim) +
                                            ") need " + std::to_string(wanted));
}

// One table of a call, with what dedup needs to give every position its row.
struct Plan {
  Distinct distinct;
  bool deduped = false;
  std::vector<uint8_t> own_mask;  // to count found keys when the caller has no mask
};

bool wants_dedup(Dedup wish, DedupGauge& gauge, const PullPart& part) {
  if (wish != Dedup::kWhenItPays) return wish == Dedup::kAlways;
  return gauge.pays(part.keys.size(), part.table->table.row_bytes);
}

void plan_dedup(Dedup wish, DedupGauge& gauge, PullPart& part, Plan& plan) {
  if (part.keys.size() < 2 || !wants_dedup(wish, gauge, part)) return;
  const size_t keys = part.keys.size();
  plan.distinct.build(part.keys);
  const size_t distinct = plan.distinct.keys().size();
  gauge.saw(keys, distinct);
  if (distinct == keys) return;
  plan.deduped = true;
  part.keys = plan.distinct.keys();
  if (part.mask == nullptr) {
    plan.own_mask.resize(keys);
    part.mask = plan.own_mask.data();
  }
}

uint64_t finish_dedup(const PullPart& part, const Plan& plan) {
  if (!plan.deduped) return part.found;
  const std::span<const uint32_t> positions = plan.distinct.positions();
  spread(positions, part.out_row_bytes(), part.out);
  uint64_t found = 0;
  for (size_t i = positions.size(); i-- > 0;) {
    part.mask[i] = part.mask[positions[i]];
    found += part.mask[i];
  }
  return found;
}

}  // namespace

Result<PullReport> Client::pull(std::string_view table, std::span<const uint64_t> keys,
                                std::span<float> out, std::span<uint8_t> mask,
                                const PullOptions& options) {
  const TablePull pull{table, keys, std::as_writable_bytes(out), mask, Form::kFloat32};
  return pull_many({&pull, 1}, options);
}

Result<PullReport> Client::pull_many(std::span<const TablePull> pulls, const PullOptions& options) {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  PETPS_RETURN_IF_ERROR(check_arguments(pulls));
  PullReport report;
  const auto attempt = [&](Endpoint& endpoint, const Deadline& deadline) {
    return impl_->pull_from(endpoint, deadline, pulls, options, report);
  };
  PETPS_RETURN_IF_ERROR(
      impl_->try_endpoints("pull", impl_->deadline(options.deadline_ms), attempt));
  const uint32_t every = impl_->options.hot_sample_every;
  if (every != 0 && impl_->calls.fetch_add(1, std::memory_order_relaxed) % every == 0) {
    for (const TablePull& pull : pulls) impl_->memory(pull.table).hot.sample(pull.keys);
  }
  return report;
}

Status Client::Impl::pull_from(Endpoint& endpoint, const Deadline& until,
                               std::span<const TablePull> pulls, const PullOptions& wishes,
                               PullReport& report) {
  auto leased = endpoint.lease(until);
  if (!leased.ok()) return leased.status();
  Connection& connection = **leased;
  const PullLimits limits{leased->limits(), options.keys_per_request, options.requests_in_flight};
  Status status;
  // A table that the server no longer has may have come back under another id, and a dropped instance have a successor: read the
  // catalogue and ask again, for as long as it names another instance each time.
  uint32_t asked = 0;
  for (int round = 0;; ++round) {
    if (round > 0) {
      const auto fresh = endpoint.read_catalogue(connection, until);
      if (!fresh.ok()) return fresh.status();
      if (round > 1 && fresh.value()->instance() == asked) return status;
    }
    std::shared_ptr<const Catalogue> catalogue;
    std::vector<PullPart> parts(pulls.size());
    std::vector<Plan> plans(pulls.size());
    for (size_t i = 0; i < pulls.size(); ++i) {
      const auto found = find_table(endpoint, connection, pulls[i].table, until, catalogue);
      if (!found.ok()) return found.status();
    }
    for (size_t i = 0; i < pulls.size(); ++i) {  // all of one catalogue, so of one instance
      PullPart& part = parts[i];
      const auto found = catalogue->find(pulls[i].table);
      if (!found.ok()) return found.status();
      part = {found.value(), pulls[i].form, pulls[i].keys, pulls[i].out.data(),
              pulls[i].mask.data()};
      PETPS_RETURN_IF_ERROR(check_size(pulls[i], part));
      plan_dedup(wishes.dedup, memory(pulls[i].table).dedup, part, plans[i]);
    }
    asked = pulls.empty() ? 0 : catalogue->instance();
    PullExchange exchange(connection, limits, parts, asked, wishes.min_version);
    status = exchange.run(until);
    if (status.code() == Code::kNotFound && !connection.broken()) continue;
    if (!status.ok()) return status;
    report = {exchange.applied_version(), 0};
    for (size_t i = 0; i < pulls.size(); ++i) report.found += finish_dedup(parts[i], plans[i]);
    return {};
  }
}

}  // namespace petps::client
