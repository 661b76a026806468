#include "media/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include "media/blocks.h"

namespace petps::media {
namespace {

using base::Code;
using base::errno_status;
using base::Result;
using base::Status;

int sync_data_by_call(int file) {
  return errno_of([&] { return calls::fdatasync(file); });
}

// Report whether the kernel may leave out the flush. Per fs/ext4/fsync.c of Linux 5.5 to 6.4:
// without a journal ext4's driver, which also mounts ext2, flushes the disk's cache only if the
// inode has changed, and a store into a block that the file already has changes no inode. If
// anything cannot be determined, assume that it may.
bool may_skip_flush_by_kernel(int file) {
  utsname kernel = {};
  unsigned major_version = 0;
  unsigned minor_version = 0;
  if (uname(&kernel) == 0) std::sscanf(kernel.release, "%u.%u", &major_version, &minor_version);
  const auto version = std::pair(major_version, minor_version);
  if (version >= std::pair(6U, 5U) || (version < std::pair(5U, 5U) && major_version > 0))
    return false;
  struct statfs file_system = {};
  if (calls::fstatfs(file, &file_system) == 0 && file_system.f_type != EXT4_SUPER_MAGIC)
    return false;
  struct stat about = {};
  if (calls::fstat(file, &about) != 0) return true;
  std::error_code none;
  const auto device =
      std::filesystem::read_symlink("/sys/dev/block/" + std::to_string(major(about.st_dev)) + ":" +
                                        std::to_string(minor(about.st_dev)),
                                    none);
  std::string task;  // of the journal; if it cannot be read, there may be none
  std::ifstream("/sys/fs/ext4/" + device.filename().string() + "/journal_task") >> task;
  return task.empty() || task == "<none>";
}

// Read the device's size and alignment. Per the kernel's Documentation/ABI/testing/sysfs-bus-dax,
// /sys/dev/char/MAJOR:MINOR is the device.
std::optional<Device> device_of_sysfs(const std::string& path) {
  struct stat about = {};
  if (calls::stat(path.c_str(), &about) != 0 || !S_ISCHR(about.st_mode)) return std::nullopt;
  const std::filesystem::path folder = "/sys/dev/char/" + std::to_string(major(about.st_rdev)) +
                                       ":" + std::to_string(minor(about.st_rdev));
  std::error_code none;
  const auto subsystem = std::filesystem::read_symlink(folder / "subsystem", none);
  if (none || subsystem.filename() != "dax") return std::nullopt;
  Device device;
  std::ifstream(folder / "size") >> device.bytes;
  std::ifstream(folder / "align") >> device.alignment;
  constexpr uint64_t kUsualAlignment = uint64_t{2} << 20;  // kernels before 5.10 do not report it
  if (device.alignment == 0) device.alignment = kUsualAlignment;
  device.bytes -= device.bytes % device.alignment;
  return device;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Status missing_folder_error(const std::string& path) {
  return Status(Code::kNotFound,
                path + ": folder " + folder_of(path) + " does not exist; create it first");
}

int open_descriptor(const std::string& path, int flags, mode_t mode = 0) {
  return retry_interrupted([&] { return calls::open(path.c_str(), flags, mode); });
}

Status lock_file(int file, const std::string& path, Access access) {
  if (access == Access::kReadBeside) return Status();
  const int operation = (access == Access::kReadWrite ? LOCK_EX : LOCK_SH) | LOCK_NB;
  const int error_number = errno_of([&] { return calls::flock(file, operation); });
  if (error_number == 0) return Status();
  if (error_number != EWOULDBLOCK)
    return errno_status(Code::kIoError, "lock " + path, error_number);
  return Status(Code::kInUse,
                path + (access == Access::kReadWrite
                            ? " is open in another process (or twice in this one): a pool has one "
                              "writer and no reader, or only readers; stop the other process, or "
                              "pull through its server"
                            : " is open for writing in another process (or in this one): stop it, "
                              "pull through its server, or read beside it with petps.open_live"));
}

constexpr const char* kFailedSyncMark = "user.petps.failed_sync";

// Count the file's pages in the page cache.
Result<uint64_t> resident_pages(int file, const std::string& path, uint64_t bytes) {
  constexpr uint64_t kPageBytes = 4096;
  constexpr uint64_t kPieceBytes = uint64_t{1} << 30;
  std::vector<unsigned char> pages(std::min(bytes, kPieceBytes) / kPageBytes + 1);
  uint64_t resident = 0;
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    const uint64_t piece = std::min(bytes - at, kPieceBytes);
    void* const map = calls::mmap(nullptr, piece, PROT_READ, MAP_SHARED, file, at);
    if (map == MAP_FAILED) return errno_status(Code::kIoError, "map " + path, errno);
    const int result = calls::mincore(map, piece, pages.data());
    const int error_number = errno;
    calls::munmap(map, piece);
    if (result != 0)
      return errno_status(Code::kIoError, "find the cached pages of " + path, error_number);
    for (uint64_t i = 0; i < (piece + kPageBytes - 1) / kPageBytes; ++i) resident += pages[i] & 1;
  }
  return resident;
}

}  // namespace

FileCalls system_file_calls() {
  return FileCalls{nullptr, allocate_at_end, sync_data_by_call, may_skip_flush_by_kernel,
                   device_of_sysfs};
}

FileCalls& file_calls() {
  static FileCalls calls = system_file_calls();
  return calls;
}

std::optional<Device> device_at(const std::string& path) { return file_calls().device(path); }

// Rows are read with the pool's file, and whoever may read it may also keep its lock.
constexpr mode_t kPoolMode = 0640;  // readers without the server run in its group

Result<int> create_file(const std::string& path) {
  Descriptor file(open_descriptor(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kPoolMode));
  if (file.number() < 0) {
    if (errno == EEXIST) {
      return Status(Code::kAlreadyExists,
                    path + " already exists: open it, or create the pool under another name");
    }
    if (errno == ENOENT) return missing_folder_error(path);
    const Code code = errno == EACCES || errno == EPERM ? Code::kPermissionDenied : Code::kIoError;
    return errno_status(code, "create " + path, errno);
  }
  Status status = lock_file(file.number(), path, Access::kReadWrite);
  if (status.ok()) status = forbid_copy_on_write(file.number(), path);
  if (status.ok()) return file.release();
  return remove_file(path, status);
}

Result<int> open_file(const std::string& path, Access access) {
  // O_NONBLOCK: open of a named pipe must return and not wait for the other end. Regular files
  // ignore it.
  const int flags = (access == Access::kReadWrite ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;
  Descriptor file(open_descriptor(path, flags));
  if (file.number() < 0) {
    if (errno == ENOENT)
      return Status(Code::kNotFound, path + " does not exist: create the pool first");
    if (errno == EISDIR)
      return Status(Code::kInvalidArgument, path + " is a folder, not a pool file");
    const Code code = errno == EACCES || errno == EPERM || errno == EROFS ? Code::kPermissionDenied
                                                                          : Code::kIoError;
    return errno_status(code, "open " + path, errno);
  }
  struct stat about = {};
  if (calls::fstat(file.number(), &about) != 0)
    return errno_status(Code::kIoError, "stat " + path, errno);
  if (S_ISDIR(about.st_mode))
    return Status(Code::kInvalidArgument, path + " is a folder, not a pool file");
  if (!S_ISREG(about.st_mode) && !device_at(path)) {
    return Status(Code::kInvalidArgument,
                  path +
                      " is not a regular file: a pool lives in a file (on dax, in a file of an "
                      "fsdax mount) or on a device-DAX device (/dev/daxX.Y)");
  }
  if (Status status = lock_file(file.number(), path, access); !status.ok()) return status;
  return file.release();
}

Result<uint64_t> file_bytes(int file, const std::string& path) {
  struct stat about = {};
  if (calls::fstat(file, &about) != 0) return errno_status(Code::kIoError, "stat " + path, errno);
  return static_cast<uint64_t>(about.st_size);
}

Status remove_file(const std::string& path, const Status& reason) {
  if (calls::unlink(path.c_str()) == 0) return reason;
  return Status(reason.code(),
                std::string(reason.message()) +
                    "; the unfinished file is left behind and could not be removed (" +
                    std::strerror(errno) + "): remove it");
}

Result<Folder> Folder::open_of(const std::string& path) {
  const std::string name = folder_of(path);
  const int file = open_descriptor(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file >= 0) return Folder(file, name);
  if (errno == ENOENT) return missing_folder_error(path);
  const Code code = errno == EACCES || errno == EPERM ? Code::kPermissionDenied : Code::kIoError;
  return errno_status(code, "open folder " + name, errno);
}

Status Folder::sync() const {
  const int error_number = errno_of([&] { return calls::fsync(file_.number()); });
  // EINVAL: some network file systems do not sync folders; their servers do.
  if (error_number == 0 || error_number == EINVAL) return Status();
  return errno_status(Code::kIoError, "fsync folder " + name_, error_number);
}

int flush_disk(int file) {
  return errno_of([&] { return calls::syncfs(file); });
}

void mark_failed_sync(int file) {
  struct statfs about = {};
  const bool known = calls::fstatfs(file, &about) == 0;
  // These file systems have no disk that could lose a page, and cannot drop a page.
  if (known && (about.f_type == TMPFS_MAGIC || about.f_type == RAMFS_MAGIC)) return;
  // If there are no attributes, Media::~Media drops the pages that no other process maps.
  [[maybe_unused]] const int ignored = calls::fsetxattr(file, kFailedSyncMark, "1", 1);
}

Status drop_lost_pages(int file, const std::string& path, uint64_t bytes) {
  char value = 0;
  if (calls::fgetxattr(file, kFailedSyncMark, &value, sizeof value) < 0) {
    if (errno != EIO) return Status();  // no mark, or no attributes
    return errno_status(Code::kIoError, "read the attributes of " + path, errno);
  }
  // Dirty pages are not dropped: they are newer than the failure, or the disk failed to write
  // them again.
  if (const int error_number = file_calls().sync_data(file); error_number != 0) {
    return errno_status(Code::kIoError,
                        "fdatasync " + path + " (a write-back of it failed before; check the disk)",
                        error_number);
  }
  // The kernel itself may use a page for a moment, longer on a busy machine.
  constexpr auto kLongestPause = std::chrono::milliseconds(512);  // a second in all
  uint64_t left = 0;
  for (auto pause = std::chrono::milliseconds(1);; pause *= 2) {
    calls::fadvise(file, POSIX_FADV_DONTNEED);
    const Result<uint64_t> resident = resident_pages(file, path, bytes);
    if (!resident.ok()) return resident.status();
    left = resident.value();
    if (left == 0 || pause > kLongestPause) break;
    std::this_thread::sleep_for(pause);
  }
  if (left > 0) {
    return Status(Code::kFailedPrecondition,
                  "a write-back of " + path + " failed while it was open, and " +
                      std::to_string(left) +
                      " pages that the disk may have lost are still shown to other processes: stop "
                      "what reads the pool (`fuser " +
                      path + "` names it), then open it again");
  }
  [[maybe_unused]] const int ignored = calls::fremovexattr(file, kFailedSyncMark);
  return Status();
}

}  // namespace petps::media
