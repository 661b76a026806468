#include "media/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <vector>

namespace petps::media {
namespace {

using base::Code;
using base::errno_status;
using base::Result;
using base::Status;

// File systems without fallocate (NFS 4.1, some FUSE): writing zeros is the only way to own the
// blocks.
int allocate_by_writing(int file, uint64_t from, uint64_t bytes) {
  constexpr size_t kPieceBytes = size_t{1}
                                 << 20;  // large enough that the call's cost does not show
  const std::vector<std::byte> zeros(static_cast<size_t>(std::min<uint64_t>(bytes, kPieceBytes)));
  for (uint64_t done = 0; done < bytes;) {
    const size_t piece = static_cast<size_t>(std::min<uint64_t>(bytes - done, zeros.size()));
    const ssize_t wrote = pwrite(file, zeros.data(), piece, static_cast<off_t>(from + done));
    if (wrote < 0 && errno != EINTR) return errno;
    if (wrote > 0) done += static_cast<uint64_t>(wrote);
  }
  return 0;
}

int allocate_by_call(int file, uint64_t from, uint64_t bytes) {
  while (fallocate(file, 0, static_cast<off_t>(from), static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP) return allocate_by_writing(file, from, bytes);
    if (errno != EINTR) return errno;
  }
  return 0;
}

int sync_data_by_call(int file) {
  while (fdatasync(file) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// By the kernel's Documentation/ABI/testing/sysfs-bus-dax: /sys/dev/char/MAJOR:MINOR is the device.
std::optional<Device> device_of_sysfs(const std::string& path) {
  struct stat about = {};
  if (stat(path.c_str(), &about) != 0 || !S_ISCHR(about.st_mode)) return std::nullopt;
  const std::filesystem::path folder = "/sys/dev/char/" + std::to_string(major(about.st_rdev)) +
                                       ":" + std::to_string(minor(about.st_rdev));
  std::error_code none;
  const auto subsystem = std::filesystem::read_symlink(folder / "subsystem", none);
  if (none || subsystem.filename() != "dax") return std::nullopt;
  Device device;
  std::ifstream(folder / "size") >> device.bytes;
  std::ifstream(folder / "align") >> device.alignment;
  constexpr uint64_t kUsualAlignment = uint64_t{2} << 20;  // kernels before 5.10 do not tell
  if (device.alignment == 0) device.alignment = kUsualAlignment;
  device.bytes -= device.bytes % device.alignment;
  return device;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Status full_disk(int file, const std::string& path, uint64_t wanted, int error_number) {
  struct statvfs room = {};
  std::string free_text = "an unknown number of";
  if (fstatvfs(file, &room) == 0)
    free_text = std::to_string(uint64_t{room.f_bavail} * room.f_frsize);
  const std::string reason = error_number == EDQUOT ? "disk quota reached" : "disk full";
  return Status(Code::kResourceExhausted,
                path + ": " + reason + ": wanted " + std::to_string(wanted) + " bytes, " +
                    free_text +
                    " bytes free on its file system; free some space or place "
                    "the pool on a larger disk");
}

Status lock_file(int file, const std::string& path, Access access) {
  if (access == Access::kReadBeside) return Status();
  const int how = access == Access::kReadWrite ? LOCK_EX : LOCK_SH;
  while (flock(file, how | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return errno_status(Code::kIoError, "lock " + path, errno);
    return access == Access::kReadWrite
               ? Status(Code::kFailedPrecondition,
                        path +
                            " is open in another process (or twice in this one): one writer and no "
                            "reader may hold "
                            "a pool; stop the other, or pull through its server")
               : Status(Code::kFailedPrecondition,
                        path +
                            " is open for writing in another process (or in this one): "
                            "stop it, pull through its server, or beside it with petps.open_live");
  }
  return Status();
}

// Closes the descriptor unless it was released.
class Descriptor {
 public:
  explicit Descriptor(int file) : file_(file) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (file_ >= 0) close(file_);
  }
  int get() const { return file_; }
  int release() { return std::exchange(file_, -1); }

 private:
  int file_;
};

}  // namespace

FileCalls system_file_calls() {
  return FileCalls{allocate_by_call, sync_data_by_call, device_of_sysfs};
}

FileCalls& file_calls() {
  static FileCalls calls = system_file_calls();
  return calls;
}

std::optional<Device> device_at(const std::string& path) { return file_calls().device(path); }

Result<int> create_file(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) {
    if (errno == EEXIST) {
      return Status(Code::kAlreadyExists,
                    path + " already exists: open it, or create the pool under another name");
    }
    if (errno == ENOENT) {
      return Status(Code::kNotFound,
                    path + ": folder " + folder_of(path) + " does not exist; create it first");
    }
    const Code code = errno == EACCES || errno == EPERM ? Code::kPermissionDenied : Code::kIoError;
    return errno_status(code, "create " + path, errno);
  }
  if (Status status = lock_file(file.get(), path, Access::kReadWrite); !status.ok()) return status;
  return file.release();
}

Result<int> open_file(const std::string& path, Access access) {
  // O_NONBLOCK: opening a named pipe must answer, not wait for its other end. Regular files ignore
  // it.
  const int how = (access == Access::kReadWrite ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;
  Descriptor file(::open(path.c_str(), how));
  if (file.get() < 0) {
    if (errno == ENOENT)
      return Status(Code::kNotFound, path + " does not exist: create the pool first");
    if (errno == EISDIR)
      return Status(Code::kInvalidArgument, path + " is a folder, not a pool file");
    const Code code = errno == EACCES || errno == EPERM || errno == EROFS ? Code::kPermissionDenied
                                                                          : Code::kIoError;
    return errno_status(code, "open " + path, errno);
  }
  struct stat about = {};
  if (fstat(file.get(), &about) != 0) return errno_status(Code::kIoError, "stat " + path, errno);
  if (S_ISDIR(about.st_mode))
    return Status(Code::kInvalidArgument, path + " is a folder, not a pool file");
  if (!S_ISREG(about.st_mode) && !device_at(path)) {
    return Status(Code::kInvalidArgument,
                  path +
                      " is not a regular file: a pool lives in a file (on dax, in a file of an "
                      "fsdax mount) or on a device-DAX device (/dev/daxX.Y)");
  }
  if (Status status = lock_file(file.get(), path, access); !status.ok()) return status;
  return file.release();
}

Result<uint64_t> file_bytes(int file, const std::string& path) {
  struct stat about = {};
  if (fstat(file, &about) != 0) return errno_status(Code::kIoError, "stat " + path, errno);
  return static_cast<uint64_t>(about.st_size);
}

Status allocate_range(int file, const std::string& path, uint64_t from, uint64_t to) {
  const int error_number = file_calls().allocate(file, from, to - from);
  if (error_number == 0) return Status();
  Status status = error_number == ENOSPC || error_number == EDQUOT
                      ? full_disk(file, path, to - from, error_number)
                      : errno_status(Code::kIoError,
                                     "allocate " + std::to_string(to - from) + " bytes for " + path,
                                     error_number);
  // Part of the range may have been given: hand it back. If even that fails the file is longer than
  // it says, which costs space and nothing else.
  [[maybe_unused]] const int ignored = ftruncate(file, static_cast<off_t>(from));
  return status;
}

Result<bool> has_holes(int file, const std::string& path) {
  struct stat about = {};
  if (fstat(file, &about) != 0) return errno_status(Code::kIoError, "stat " + path, errno);
  constexpr uint64_t kStatBlockBytes = 512;  // st_blocks' unit on Linux, whatever the file system's
  return static_cast<uint64_t>(about.st_blocks) * kStatBlockBytes <
         static_cast<uint64_t>(about.st_size);
}

Status sync_folder_of(const std::string& path) {
  const std::string folder = folder_of(path);
  Descriptor handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (handle.get() < 0) return errno_status(Code::kIoError, "open folder " + folder, errno);
  // Some network file systems do not sync folders; their servers do.
  while (fsync(handle.get()) != 0) {
    if (errno == EINVAL) break;
    if (errno != EINTR) return errno_status(Code::kIoError, "fsync folder " + folder, errno);
  }
  return Status();
}

}  // namespace petps::media
