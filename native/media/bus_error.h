// SIGBUS: the kernel cannot provide a page of a mapped pool. The disk is full, the file was
// truncated, the file system is gone, or a line of the memory is damaged. The process cannot
// answer from such a page, so it prints a message and stops with its own exit status.
//
// Threads: any thread may make and destroy a Mapped. The handler takes no lock and allocates
// nothing.
#pragma once

#include <cstddef>
#include <string>

namespace petps::media {

// EX_IOERR of sysexits.h. A supervisor must not restart the process at once: the next start would
// fail the same way (deploy/systemd/petps@.service: RestartPreventExitStatus).
inline constexpr int kLostPoolExitStatus = 74;
// The remedy for the operator. Errors that find the same fault without a signal (EFAULT) use it
// too.
inline constexpr char kLostPoolRemedy[] =
    "Look at `dmesg` and `df`, repair the file system, then start again: every acknowledged row "
    "that reached the disk is recovered";

// Install the handler: from now on a SIGBUS inside a mapped pool terminates the process with
// kLostPoolExitStatus, and any other SIGBUS goes to the previous handler. Only a program that owns
// its process (`petps serve` and the other commands) may call this, never a library.
void stop_on_lost_pool();

struct MappedRange;
// The registration of [at, at + bytes) as the pool `path`, for as long as this object lives.
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
