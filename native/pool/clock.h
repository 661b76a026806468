// The event time of one partition of a table whose rows expire (table/EXPIRY.md): computed from the
// commits alone, so every server that applies the same commits has the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace petps::pool {

inline constexpr uint32_t kMaxExpireAfter = uint32_t{100} * 366 * 24 * 3600;  // seconds
inline constexpr uint64_t kNsPerSecond = 1'000'000'000;
// A table's expire_after is divided into this many cells: the map from versions to times has one
// version per cell.
inline constexpr uint64_t kExpiryCells = 48;
// A row expires in the second cell after its age, so at the latest 2 / 48 of expire_after late.
inline constexpr uint64_t kExpiryBounds = kExpiryCells + 2;
// One commit advances event time by at most this part of expire_after. What is more is not made up
// for later, so neither a jump of a publisher's clock nor a pause expires a table.
inline constexpr uint64_t kExpirySteps = 4;

// A stamp that is above the last commit's by at most this number belongs to a version that is not
// committed yet; any other one to an older version. So a row stays if its version is 2^32 - 2^30
// versions old.
inline constexpr uint32_t kVersionsAhead = uint32_t{1} << 30;
// Event time begins at most at this time (the year 2116), so that it never overflows.
inline constexpr uint64_t kLatestStart = uint64_t{1} << 62;
// The first version of a table that pushes feed. Stamps up to 2^31 of rows from before count as
// older.
inline constexpr uint64_t kFirstPushVersion = (uint64_t{1} << 32) + (uint64_t{1} << 31);

struct EventClock {
  uint64_t cell_ns = 0;  // 0: the rows never expire
  uint64_t time_ns = 0;  // event time; 0: no commit yet
  uint64_t version = 0;  // of the last commit
  // Every version below bounds[i] was committed i cells before the present one, or earlier.
  std::array<uint64_t, kExpiryBounds> bounds{};
  uint64_t shown_ns = 0;  // the time that the last commit shows
  // By how much commits have gone back in what they show. Their next steps forward pay for it, or
  // two publishers whose clocks differ would push event time at each change.
  uint64_t debt_ns = 0;

  bool operator==(const EventClock&) const = default;

  static uint64_t cell_of(uint32_t expire_after_s) {
    return expire_after_s * kNsPerSecond / kExpiryCells;
  }

  // Count a commit. Return false if it, or a later one, was counted before.
  bool commit(uint64_t committed, uint64_t at_ns) {
    if (time_ns != 0 && committed <= version) return false;
    if (time_ns == 0) {
      time_ns = std::clamp<uint64_t>(at_ns, 1, kLatestStart);
    } else {
      const uint64_t now = time_after(at_ns);
      if (at_ns < shown_ns) {
        debt_ns = std::min(debt_ns + (shown_ns - at_ns), step_ns());
      } else {
        debt_ns -= std::min(debt_ns, at_ns - shown_ns);
      }
      move_on(now / cell_ns - time_ns / cell_ns);
      time_ns = now;
    }
    bounds[0] = committed + 1;
    version = committed;
    shown_ns = at_ns;
    return true;
  }

  // Return the event time after a commit that shows this time.
  uint64_t time_after(uint64_t at_ns) const {
    const uint64_t passed = std::min(at_ns > shown_ns ? at_ns - shown_ns : 0, step_ns());
    return time_ns + passed - std::min(passed, debt_ns);
  }
  // The most by which one commit advances event time.
  uint64_t step_ns() const { return cell_ns * kExpiryCells / kExpirySteps; }

  // Take another expire_after over. Rows may expire later than by either, but not earlier.
  void change_cell(uint64_t to_ns) {
    const std::array<uint64_t, kExpiryBounds> before = bounds;
    for (uint64_t i = 1; i < kExpiryBounds; ++i) {
      // Wide, because a hundred years in nanoseconds fit once, but not fifty times.
      __extension__ typedef unsigned __int128 Wide;
      const uint64_t old = static_cast<uint64_t>((Wide{i} * to_ns + cell_ns - 1) / cell_ns) + 1;
      bounds[i] = old < kExpiryBounds ? before[old] : 0;
    }
    cell_ns = to_ns;
  }

  // Begin again, as if no commit had come; versions go on.
  void forget(uint64_t to_cell_ns) {
    const uint64_t last = version;
    *this = {};
    cell_ns = to_cell_ns;
    version = last;
  }

  // Return whether a row with this stamp, the low 32 bits of its version, has expired.
  bool expires(uint32_t stamp) const {
    const uint32_t ahead = stamp - static_cast<uint32_t>(version);
    if (ahead != 0 && ahead <= kVersionsAhead) return false;  // not committed yet
    const uint32_t age = static_cast<uint32_t>(version) - stamp;
    return age <= version && version - age < bounds[kExpiryBounds - 1];
  }

 private:
  void move_on(uint64_t cells) {
    for (uint64_t i = kExpiryBounds; cells > 0 && i-- > 0;)
      bounds[i] = i >= cells ? bounds[i - cells] : bounds[0];
  }
};

// The commit of a version in a partition of an instance.
struct Commit {
  uint32_t instance = 0;
  uint32_t partition = 0;
  uint64_t version = 0;
  uint64_t time_ns = 0;  // when it was published
};

}  // namespace petps::pool
