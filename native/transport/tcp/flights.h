// Lists of one connection that the kernel reads by itself (MSG_ZEROCOPY). Internal to transport/tcp.
//
// Each such send has a number, counted by the kernel from 0; completions name ranges of numbers, in
// any order. A list may take several sends and shares none, so its numbers follow one another. The
// list (its header bytes are read too) and its pin stay here until the last of them has completed.
//
// ASSUMPTIONS: one thread; a number completes once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "epoch/epoch.h"
#include "gather/gather.h"

namespace petps::transport {

class Flights {
 public:
  // The list was given to the kernel by sends first .. first + sends - 1 (mod 2^32).
  void add(gather::GatherList&& list, epoch::Pin&& pin, uint32_t first, uint32_t sends,
           uint64_t now_ns);
  // Sends low .. high have completed. Lists that nobody reads any more are emptied and moved to
  // `landed`; their pins end here.
  void complete(uint32_t low, uint32_t high, std::vector<gather::GatherList>& landed);

  bool empty() const { return flights_.empty(); }
  size_t size() const { return flights_.size(); }
  // True once for each list that was added before `since_ns`.
  bool take_overdue(uint64_t since_ns);

 private:
  struct Flight {
    gather::GatherList list;
    epoch::Pin pin;
    uint32_t first;
    uint32_t sends;
    uint32_t open;  // of those: not completed
    uint64_t added_ns;
    bool reported;
  };
  std::vector<Flight> flights_;  // few: see kZerocopyListsPerConnection
};

}  // namespace petps::transport
