#include "media/calls.h"

#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace petps::media {

const char* call_name(Call call) {
  static constexpr const char* kNames[] = {
      "open",      "close",     "stat",         "fstatfs",     "flock",   "fallocate", "pread",
      "pwrite",    "ftruncate", "mmap",         "munmap",      "madvise", "fadvise",   "mincore",
      "fdatasync", "msync",     "fsync",        "syncfs",      "lseek",   "ioctl",     "unlink",
      "fgetxattr", "fsetxattr", "fremovexattr", "await a sync"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<size_t>(Call::kCount),
                "every call has a name");
  return kNames[static_cast<size_t>(call)];
}

namespace calls {
namespace {

// Ask the test's hook what to do. If it returns neither 0 nor kHalf, the call must fail: errno is
// set.
int ask_hook(Call call) {
  int (*const before)(Call) = file_calls().before;
  const int answer = before == nullptr ? 0 : before(call);
  if (answer > 0) errno = answer;
  return answer;
}

size_t half(size_t bytes) { return std::max<size_t>(bytes / 2, 1); }

}  // namespace

int open(const char* path, int flags, mode_t mode) {
  return ask_hook(Call::kOpen) > 0 ? -1 : ::open(path, flags, mode);
}

// On Linux a failed close has still closed the descriptor: a second close could hit another file.
int close(int file) {
  const int answer = ask_hook(Call::kClose);
  const int result = ::close(file);
  if (answer <= 0) return result;
  errno = answer;
  return -1;
}

int stat(const char* path, struct stat* about) {
  return ask_hook(Call::kStat) > 0 ? -1 : ::stat(path, about);
}

int fstat(int file, struct stat* about) {
  return ask_hook(Call::kStat) > 0 ? -1 : ::fstat(file, about);
}

int fstatfs(int file, struct statfs* about) {
  return ask_hook(Call::kStatFileSystem) > 0 ? -1 : ::fstatfs(file, about);
}

int flock(int file, int how) { return ask_hook(Call::kFlock) > 0 ? -1 : ::flock(file, how); }

int fallocate(int file, int mode, uint64_t from, uint64_t bytes) {
  const int answer = ask_hook(Call::kAllocate);
  if (answer > 0) return -1;
  const uint64_t part = answer == kHalf ? half(bytes) : bytes;
  const int result = ::fallocate(file, mode, static_cast<off_t>(from), static_cast<off_t>(part));
  if (result != 0 || part == bytes) return result;
  errno = ENOSPC;
  return -1;
}

ssize_t pread(int file, void* to, size_t bytes, uint64_t from) {
  const int answer = ask_hook(Call::kRead);
  if (answer > 0) return -1;
  return ::pread(file, to, answer == kHalf ? half(bytes) : bytes, static_cast<off_t>(from));
}

ssize_t pwrite(int file, const void* from, size_t bytes, uint64_t to) {
  const int answer = ask_hook(Call::kWrite);
  if (answer > 0) return -1;
  return ::pwrite(file, from, answer == kHalf ? half(bytes) : bytes, static_cast<off_t>(to));
}

int ftruncate(int file, uint64_t bytes) {
  return ask_hook(Call::kTruncate) > 0 ? -1 : ::ftruncate(file, static_cast<off_t>(bytes));
}

void* mmap(void* at, size_t bytes, int access, int flags, int file, uint64_t from) {
  if (ask_hook(Call::kMap) > 0) return MAP_FAILED;
  return ::mmap(at, bytes, access, flags, file, static_cast<off_t>(from));
}

int munmap(void* at, size_t bytes) { return ask_hook(Call::kUnmap) > 0 ? -1 : ::munmap(at, bytes); }

int madvise(void* at, size_t bytes, int advice) {
  return ask_hook(Call::kAdviseMemory) > 0 ? -1 : ::madvise(at, bytes, advice);
}

int mincore(void* at, size_t bytes, unsigned char* pages) {
  return ask_hook(Call::kResident) > 0 ? -1 : ::mincore(at, bytes, pages);
}

int fadvise(int file, int advice) {
  if (ask_hook(Call::kAdviseFile) > 0) return -1;
  errno = ::posix_fadvise(file, 0, 0, advice);  // returns the error
  return errno == 0 ? 0 : -1;
}

int msync(void* at, size_t bytes) {
  return ask_hook(Call::kSyncRange) > 0 ? -1 : ::msync(at, bytes, MS_SYNC);
}
int fdatasync(int file) { return ask_hook(Call::kSyncData) > 0 ? -1 : ::fdatasync(file); }

int fsync(int file) { return ask_hook(Call::kSync) > 0 ? -1 : ::fsync(file); }

int syncfs(int file) { return ask_hook(Call::kSyncFileSystem) > 0 ? -1 : ::syncfs(file); }

off_t lseek(int file, uint64_t from, int whence) {
  return ask_hook(Call::kSeek) > 0 ? -1 : ::lseek(file, static_cast<off_t>(from), whence);
}

int ioctl(int file, unsigned long request, void* argument) {
  return ask_hook(Call::kControl) > 0 ? -1 : ::ioctl(file, request, argument);
}

int unlink(const char* path) { return ask_hook(Call::kUnlink) > 0 ? -1 : ::unlink(path); }

ssize_t fgetxattr(int file, const char* name, void* value, size_t bytes) {
  return ask_hook(Call::kReadAttribute) > 0 ? -1 : ::fgetxattr(file, name, value, bytes);
}

int fsetxattr(int file, const char* name, const void* value, size_t bytes) {
  return ask_hook(Call::kWriteAttribute) > 0 ? -1 : ::fsetxattr(file, name, value, bytes, 0);
}

int fremovexattr(int file, const char* name) {
  return ask_hook(Call::kRemoveAttribute) > 0 ? -1 : ::fremovexattr(file, name);
}

}  // namespace calls
}  // namespace petps::media
