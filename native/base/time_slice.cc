#include "base/time_slice.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace petps::base {

namespace {

// The first version of the kernel's struct sched_attr; glibc declares it since 2.41.
struct Attributes {
  uint32_t size = sizeof(Attributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};
static_assert(sizeof(Attributes) == 48);

}  // namespace

void set_time_slice(uint64_t ns) {
  Attributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;  // the policy was set on purpose: keep it
  attributes.size = sizeof(attributes);
  attributes.runtime_ns = ns;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

void lower_priority(int niceness) {
  set_time_slice(kLongSliceNs);
  const auto own = static_cast<id_t>(gettid());
  errno = 0;  // -1 is a niceness too
  const int before = getpriority(PRIO_PROCESS, own);
  if (before == -1 && errno != 0) return;
  (void)setpriority(PRIO_PROCESS, own, std::max(niceness, before));
}

}  // namespace petps::base
