// How the kernel schedules workers. Internal to server.
#pragma once

#include <cstdint>

namespace petps::server {

// The shortest that Linux gives. What a worker does between two waits is about as long.
inline constexpr uint64_t kWorkerSliceNs = 100'000;

// The calling thread takes turns of kWorkerSliceNs from now on. Since Linux 6.12 who wakes up with a
// shorter turn than what runs on its processor takes it at once; otherwise it waits until that turn,
// milliseconds, is over, whatever their niceness. Its share of a busy processor stays the same, and
// no privilege is needed. Does nothing in real time, and where the kernel does not know it.
void take_short_turns();

}  // namespace petps::server
