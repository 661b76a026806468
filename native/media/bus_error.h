// SIGBUS: the kernel cannot give a page of a mapped pool. Its disk is full, its file was truncated,
// its file system is gone, or a line of its memory is damaged. Nothing can be answered from such a
// page, so the process stops with a message and an exit status of its own.
//
// Threads: Mapped may be made and destroyed by any thread. The handler takes no lock and allocates
// nothing.
#pragma once

#include <cstddef>
#include <string>

namespace petps::media {

// EX_IOERR of sysexits.h. A supervisor must not restart the process at once: the next start would
// end the same way (deploy/systemd/petps.service: RestartPreventExitStatus).
inline constexpr int kLostPoolExitStatus = 74;
// What the operator can do; also for errors that find the same fault without a signal (EFAULT).
inline constexpr char kLostPoolRemedy[] =
    "Look at `dmesg` and `df`, mend the file system, then start again: every acknowledged row that "
    "reached the disk is recovered";

// From now on a SIGBUS inside a mapped pool ends the process with kLostPoolExitStatus; any other goes
// to the handler that was there before. For programs that own their process (`petps serve` and the
// other commands), never for a library.
void stop_on_lost_pool();

struct MappedRange;
// Says that [at, at + bytes) is the pool `path`, as long as it lives.
class Mapped {
 public:
  Mapped(const void* at, size_t bytes, int file, const std::string& path);
  ~Mapped();
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

 private:
  MappedRange* range_;
};

}  // namespace petps::media
