// Lists of one connection that the kernel reads asynchronously (MSG_ZEROCOPY). Internal to
// transport/tcp.
//
// The kernel numbers such sends from 0, and completions name ranges of numbers in any order. A list
// may take several sends and shares none with another list, so its numbers are consecutive. The
// list (its header bytes are read too) and its pin stay here until its last send has completed.
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
  // Record that sends first .. first + sends - 1 (mod 2^32) gave the list to the kernel.
  void add(gather::GatherList&& list, epoch::Pin&& pin, uint32_t first, uint32_t sends,
           uint64_t now_ns);
  // Record that sends low .. high have completed. Empty the lists that nothing reads any more,
  // move them to `landed` and drop their pins.
  void complete(uint32_t low, uint32_t high, std::vector<gather::GatherList>& landed);

  bool empty() const { return flights_.empty(); }
  size_t size() const { return flights_.size(); }
  // Return true if a list was added before `since_ns`; each list is reported once.
  bool take_overdue(uint64_t since_ns);

 private:
  struct Flight {
    gather::GatherList list;
    epoch::Pin pin;
    uint32_t first;
    uint32_t sends;
    uint32_t open;  // sends that have not completed
    uint64_t added_ns;
    bool reported;
  };
  std::vector<Flight> flights_;  // short: see kZerocopyListsPerConnection
};

}  // namespace petps::transport
