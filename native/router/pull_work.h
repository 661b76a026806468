// A pull on its way through the router. Internal to router.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "petps_client/client.h"
#include "petps_client/forward.h"
#include "router/names.h"
#include "wire/wire.h"

namespace petps::router {

// One section of a pull: its table, or null if the caller's list does not have it.
struct PullSection {
  const wire::TableInfo* table = nullptr;
  uint32_t keys = 0;
  size_t first = 0;  // number of its first key in the pull
  std::byte* rows = nullptr;
};

// ASSUMPTION: the job of the pull outlives it, and keeps its frame, mask and reply.
struct PullWork {
  bool is_prepared = false;  // the members below are set, but `started` may be null
  wire::PullRequest request;
  ListingPointer listing;
  const wire::InstanceInfo* instance = nullptr;
  std::vector<PullSection> sections;
  size_t known_keys = 0;      // of tables that the list has
  size_t head_bytes = 0;      // of the reply
  size_t rows_bytes_max = 0;  // of the reply, if all rows are found
  std::span<std::byte> head;  // of the reply
  std::vector<client::TablePull> pulls;
  client::PullTrace trace;
  client::PullOptions options;
  uint64_t wait_until_ns = 0;  // for the version
  uint64_t left_ms = 0;        // of this wait, when the servers were asked last
  std::unique_ptr<client::StartedPull> started;
  base::Status refusal;  // of a pull that is wrong, or too large for the memory

  // Forget the pull; keep memory.
  void clear() {
    started.reset();
    refusal = {};
    is_prepared = false;
    instance = nullptr;
    listing.reset();
    sections.clear();
    known_keys = head_bytes = rows_bytes_max = 0;
    pulls.clear();
    options = {};
    trace = {};
  }
};

}  // namespace petps::router
