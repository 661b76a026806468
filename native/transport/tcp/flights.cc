#include "transport/tcp/flights.h"

#include <algorithm>

namespace petps::transport {

void Flights::add(gather::GatherList&& list, epoch::Pin&& pin, uint32_t first, uint32_t sends,
                  uint64_t now_ns) {
  flights_.push_back({std::move(list), std::move(pin), first, sends, sends, now_ns, false});
}

void Flights::complete(uint32_t low, uint32_t high, std::vector<gather::GatherList>& landed) {
  for (size_t i = 0; i < flights_.size();) {
    Flight& flight = flights_[i];
    // Count both ends from the list's first send: the numbers wrap, their differences do not.
    const int64_t from = std::max<int64_t>(static_cast<int32_t>(low - flight.first), 0);
    const int64_t to = std::min<int64_t>(static_cast<int32_t>(high - flight.first),
                                         static_cast<int64_t>(flight.sends) - 1);
    if (to >= from) flight.open -= std::min(flight.open, static_cast<uint32_t>(to - from + 1));
    if (flight.open > 0) {
      ++i;
      continue;
    }
    flight.list.clear();
    landed.push_back(std::move(flight.list));
    flights_.erase(flights_.begin() + static_cast<ptrdiff_t>(i));  // drops the pin
  }
}

bool Flights::take_overdue(uint64_t since_ns) {
  bool any = false;
  for (Flight& flight : flights_) {
    if (flight.reported || flight.added_ns >= since_ns) continue;
    flight.reported = true;
    any = true;
  }
  return any;
}

}  // namespace petps::transport
