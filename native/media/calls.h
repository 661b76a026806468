// Every system call of room media goes through this file, so that a test can count the calls and
// make one of them fail. Private to room media.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace petps::media {

// A device-DAX device: persistent memory without a file system, mapped whole.
struct Device {
  uint64_t bytes = 0;      // a multiple of `alignment`
  uint64_t alignment = 0;  // of every mapping's address and length
};

enum class Call : uint8_t {
  kOpen,
  kClose,
  kStat,  // stat and fstat
  kStatFileSystem,
  kFlock,
  kAllocate,
  kRead,
  kWrite,
  kTruncate,
  kMap,
  kUnmap,
  kAdviseMemory,
  kAdviseFile,
  kResident,
  kSyncData,
  kSyncRange,
  kSync,
  kSyncFileSystem,
  kSeek,
  kControl,
  kUnlink,
  kReadAttribute,
  kWriteAttribute,
  kRemoveAttribute,
  // Not a system call: a flusher is about to wait for a sync that another thread runs.
  kAwaitSync,
  kCount
};
const char* call_name(Call call);

// The calls that a test can replace.
struct FileCalls {
  // Called before each system call. 0: make the call. kHalf: do half of the requested read, write
  // or allocation (an allocation then fails with ENOSPC). Any other value: make no call and fail
  // with this errno.
  int (*before)(Call call);
  // The two most important calls, replaceable as a whole. Each returns 0 or an errno, and repeats
  // the call after EINTR.
  int (*allocate)(int file, uint64_t from, uint64_t bytes);
  int (*sync_data)(int file);
  // Return true if sync_data of this file may leave out the flush of the disk's cache.
  bool (*may_skip_flush)(int file);
  std::optional<Device> (*device)(const std::string& path);
};
inline constexpr int kHalf = -1;
FileCalls& file_calls();        // the calls in use; assign to replace them
FileCalls system_file_calls();  // the real calls, to restore them

// Each function behaves like the call of this name in section 2 of the manual: -1 and errno on
// failure.
namespace calls {

int open(const char* path, int flags, mode_t mode = 0);
int close(int file);
int stat(const char* path, struct stat* about);
int fstat(int file, struct stat* about);
int fstatfs(int file, struct statfs* about);
int flock(int file, int how);
int fallocate(int file, int mode, uint64_t from, uint64_t bytes);
ssize_t pread(int file, void* to, size_t bytes, uint64_t from);
ssize_t pwrite(int file, const void* from, size_t bytes, uint64_t to);
int ftruncate(int file, uint64_t bytes);
void* mmap(void* at, size_t bytes, int access, int flags, int file, uint64_t from);
int munmap(void* at, size_t bytes);
int madvise(void* at, size_t bytes, int advice);
int mincore(void* at, size_t bytes, unsigned char* pages);
int fadvise(int file, int advice);
int fdatasync(int file);
int msync(void* at, size_t bytes);
int fsync(int file);
int syncfs(int file);
off_t lseek(int file, uint64_t from, int whence);
int ioctl(int file, unsigned long request, void* argument);
int unlink(const char* path);
ssize_t fgetxattr(int file, const char* name, void* value, size_t bytes);
int fsetxattr(int file, const char* name, const void* value, size_t bytes);
int fremovexattr(int file, const char* name);

}  // namespace calls

// Repeat the call while a signal interrupts it. Return its result.
template <typename Function>
auto retry_interrupted(Function call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}
// Do the same. Return 0 or an errno.
template <typename Function>
int errno_of(Function call) {
  return retry_interrupted(call) < 0 ? errno : 0;
}

}  // namespace petps::media
