#include "media/blocks.h"

#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "media/calls.h"

namespace petps::media {
namespace {

using base::Code;
using base::errno_status;
using base::Result;
using base::Status;

// Large enough that the cost of the calls is negligible.
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr uint32_t kExtentsPerCall = 256;
constexpr uint64_t kStatBlockBytes = 512;  // st_blocks' unit on Linux, on every file system

struct Range {
  uint64_t from;
  uint64_t to;
};

// The ranges where a store would need a new block.
struct Blocks {
  std::vector<Range> holes;
  std::vector<Range> shared;
};

bool is_unsupported(int error_number) {
  return error_number == EOPNOTSUPP || error_number == ENOTTY || error_number == ENOSYS ||
         error_number == EINVAL;
}

bool is_full(int error_number) { return error_number == ENOSPC || error_number == EDQUOT; }

Status full_disk_error(int file, const std::string& path, uint64_t wanted, int error_number) {
  struct statfs room = {};
  std::string free_text = "an unknown number of";
  if (calls::fstatfs(file, &room) == 0)
    free_text = std::to_string(uint64_t{room.f_bavail} * static_cast<uint64_t>(room.f_bsize));
  const std::string reason = error_number == EDQUOT ? "disk quota reached" : "disk full";
  return Status(Code::kResourceExhausted,
                path + ": " + reason + ": wanted " + std::to_string(wanted) + " bytes, " +
                    free_text +
                    " bytes free on its file system; free some space or place the pool on a "
                    "larger disk");
}

// Return 0 or an errno.
int fallocate_all(int file, int mode, uint64_t from, uint64_t bytes) {
  return errno_of([&] { return calls::fallocate(file, mode, from, bytes); });
}

// Return 0 or an errno.
int write_zeros(int file, uint64_t from, uint64_t bytes) {
  static const std::vector<std::byte> zeros(kPieceBytes);
  for (uint64_t done = 0; done < bytes;) {
    const size_t piece = static_cast<size_t>(std::min<uint64_t>(bytes - done, zeros.size()));
    const ssize_t count =
        retry_interrupted([&] { return calls::pwrite(file, zeros.data(), piece, from + done); });
    if (count < 0) return errno;
    if (count == 0) return ENOSPC;  // no progress
    done += static_cast<uint64_t>(count);
  }
  return 0;
}

void append(std::vector<Range>* ranges, uint64_t from, uint64_t to) {
  if (from >= to) return;
  if (!ranges->empty() && ranges->back().to == from) {
    ranges->back().to = to;
  } else {
    ranges->push_back({from, to});
  }
}

// Read the extents by FIEMAP (ext4, xfs, btrfs, ext2, and overlayfs above one of them). FIEMAP
// distinguishes preallocated blocks from holes; SEEK_HOLE does not. Return false if this file
// system has no FIEMAP.
Result<bool> read_extents(int file, const std::string& path, Range within, Blocks* blocks) {
  std::vector<std::byte> reply(sizeof(struct fiemap) +
                               kExtentsPerCall * sizeof(struct fiemap_extent));
  auto& head = *reinterpret_cast<struct fiemap*>(reply.data());
  for (uint64_t at = within.from; at < within.to;) {
    std::fill(reply.begin(), reply.end(), std::byte{0});
    head.fm_start = at;
    head.fm_length = within.to - at;
    head.fm_extent_count = kExtentsPerCall;
    const int error_number = errno_of([&] { return calls::ioctl(file, FS_IOC_FIEMAP, &head); });
    if (is_unsupported(error_number)) return false;
    if (error_number != 0)
      return errno_status(Code::kIoError, "read the extents of " + path, error_number);
    const struct fiemap_extent* const extents = head.fm_extents;
    const uint64_t before = at;
    for (uint32_t i = 0; i < head.fm_mapped_extents; ++i) {
      const uint64_t from = std::clamp(uint64_t{extents[i].fe_logical}, at, within.to);
      const uint64_t to =
          std::min<uint64_t>(extents[i].fe_logical + extents[i].fe_length, within.to);
      append(&blocks->holes, at, from);
      if ((extents[i].fe_flags & FIEMAP_EXTENT_SHARED) != 0) append(&blocks->shared, from, to);
      at = std::max(at, to);
    }
    if (head.fm_mapped_extents < kExtentsPerCall || at == before) {  // that was the last batch
      append(&blocks->holes, at, within.to);
      break;
    }
  }
  return true;
}

// Find holes by SEEK_HOLE (tmpfs, NFS 4.2, some FUSE). A file system without it reports the whole
// file as data.
Status seek_holes(int file, const std::string& path, Range within, Blocks* blocks) {
  struct stat about = {};
  if (calls::fstat(file, &about) != 0) return errno_status(Code::kIoError, "stat " + path, errno);
  if (about.st_blocks * static_cast<int64_t>(kStatBlockBytes) >= about.st_size) return Status();
  for (uint64_t at = within.from; at < within.to;) {
    const off_t found = retry_interrupted([&] { return calls::lseek(file, at, SEEK_HOLE); });
    if (found < 0 && (is_unsupported(errno) || errno == ENXIO)) return Status();
    if (found < 0) return errno_status(Code::kIoError, "find the holes of " + path, errno);
    const auto hole = static_cast<uint64_t>(found);
    if (hole >= within.to) return Status();
    const off_t data = retry_interrupted([&] { return calls::lseek(file, hole, SEEK_DATA); });
    if (data < 0 && errno != ENXIO)  // ENXIO: a hole up to the end
      return errno_status(Code::kIoError, "find the data of " + path, errno);
    const uint64_t end = data < 0 ? within.to : std::min(static_cast<uint64_t>(data), within.to);
    append(&blocks->holes, hole, end);
    at = end;
  }
  return Status();
}

Result<Blocks> read_blocks(int file, const std::string& path, Range within) {
  Blocks blocks;
  const Result<bool> has_fiemap = read_extents(file, path, within, &blocks);
  if (!has_fiemap.ok()) return has_fiemap.status();
  if (!has_fiemap.value()) PETPS_RETURN_IF_ERROR(seek_holes(file, path, within, &blocks));
  return blocks;
}

uint64_t total_bytes(const std::vector<Range>& ranges) {
  uint64_t bytes = 0;
  for (const Range& range : ranges) bytes += range.to - range.from;
  return bytes;
}

Status fill_error(int file, const std::string& path, uint64_t wanted, int error_number) {
  if (is_full(error_number)) return full_disk_error(file, path, wanted, error_number);
  return errno_status(
      Code::kIoError,
      "give the holes of " + path + " (" + std::to_string(wanted) + " bytes) blocks of their own",
      error_number);
}

// Write zeros over zeros. If the piece holds anything else, it is not a hole, whatever the file
// system reported, and it stays unchanged. Return 0 or an errno.
int fill_piece(int file, uint64_t from, size_t bytes, std::vector<std::byte>* buffer) {
  buffer->resize(bytes);
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = retry_interrupted(
        [&] { return calls::pread(file, buffer->data() + done, bytes - done, from + done); });
    if (count < 0) return errno;
    if (count == 0) return EIO;  // the file became shorter
    done += static_cast<size_t>(count);
  }
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  if (!std::all_of(buffer->begin(), buffer->end(), is_zero)) return 0;
  return write_zeros(file, from, bytes);
}

// Fill holes on a file system without fallocate.
Status fill_by_writing(int file, const std::string& path, Range within) {
  // A killed process may have left pages that have no block yet. They are data, not holes.
  if (const int error_number = file_calls().sync_data(file); error_number != 0)
    return errno_status(Code::kIoError, "fdatasync " + path, error_number);
  const Result<Blocks> blocks = read_blocks(file, path, within);
  if (!blocks.ok()) return blocks.status();
  const uint64_t wanted = total_bytes(blocks.value().holes);
  std::vector<std::byte> buffer;
  int error_number = 0;
  for (const Range& hole : blocks.value().holes) {
    for (uint64_t at = hole.from; at < hole.to && error_number == 0; at += kPieceBytes) {
      const size_t piece = static_cast<size_t>(std::min<uint64_t>(hole.to - at, kPieceBytes));
      error_number = fill_piece(file, at, piece, &buffer);
    }
    if (error_number != 0) return fill_error(file, path, wanted, error_number);
  }
  // Some file systems allocate blocks only now.
  error_number = file_calls().sync_data(file);
  return error_number == 0 ? Status() : fill_error(file, path, wanted, error_number);
}

Status fill_holes(int file, const std::string& path, Range within,
                  const std::vector<Range>& holes) {
  for (const Range& hole : holes) {
    const int error_number = fallocate_all(file, 0, hole.from, hole.to - hole.from);
    if (error_number == EOPNOTSUPP) return fill_by_writing(file, path, within);
    if (error_number != 0) return fill_error(file, path, total_bytes(holes), error_number);
  }
  return Status();
}

Status unshare(int file, const std::string& path, const std::vector<Range>& shared) {
  for (const Range& range : shared) {
    const int error_number =
        fallocate_all(file, FALLOC_FL_UNSHARE_RANGE, range.from, range.to - range.from);
    if (error_number == 0) continue;
    const uint64_t bytes = total_bytes(shared);
    if (is_full(error_number)) return full_disk_error(file, path, bytes, error_number);
    const std::string fault = path + " shares " + std::to_string(bytes) +
                              " bytes with another file (cp --reflink, a snapshot)";
    if (!is_unsupported(error_number))
      return errno_status(Code::kIoError, fault + " and cannot get a copy of its own",
                          error_number);
    return Status(Code::kFailedPrecondition,
                  fault +
                      ", and its file system cannot unshare them: a store could find the disk "
                      "full. Copy the pool with `cp --reflink=never` and open the copy");
  }
  return Status();
}

Result<bool> is_btrfs(int file, const std::string& path) {
  struct statfs about = {};
  if (calls::fstatfs(file, &about) != 0)
    return errno_status(Code::kIoError, "fstatfs " + path, errno);
  return static_cast<uint64_t>(about.f_type) == BTRFS_SUPER_MAGIC;
}

Status copy_on_write_error(const std::string& path) {
  return Status(Code::kFailedPrecondition,
                path +
                    " lies on btrfs and is copied on write: every store could find the disk full. "
                    "Make a new file, `chattr +C` it while it is empty, `cat` the pool into it and "
                    "open that; or place the pool on ext4 or xfs");
}

// Fail on btrfs, which copies a block whenever it is written, unless the file was made with
// NOCOW.
Status check_written_in_place(int file, const std::string& path) {
  const Result<bool> btrfs = is_btrfs(file, path);
  if (!btrfs.ok()) return btrfs.status();
  if (!btrfs.value()) return Status();
  int flags = 0;
  if (calls::ioctl(file, FS_IOC_GETFLAGS, &flags) != 0)
    return errno_status(Code::kIoError, "read the flags of " + path, errno);
  return (flags & FS_NOCOW_FL) != 0 ? Status() : copy_on_write_error(path);
}

}  // namespace

int allocate_at_end(int file, uint64_t from, uint64_t bytes) {
  const int error_number = fallocate_all(file, 0, from, bytes);
  // File systems without fallocate (ext2, NFS before 4.2, some FUSE) allocate only when written.
  return error_number == EOPNOTSUPP ? write_zeros(file, from, bytes) : error_number;
}

Status append_blocks(int file, const std::string& path, uint64_t from, uint64_t to) {
  const int error_number = file_calls().allocate(file, from, to - from);
  if (error_number == 0) return Status();
  Status status = is_full(error_number)
                      ? full_disk_error(file, path, to - from, error_number)
                      : errno_status(Code::kIoError,
                                     "allocate " + std::to_string(to - from) + " bytes for " + path,
                                     error_number);
  cut_back(file, from);
  return status;
}

void cut_back(int file, uint64_t bytes) {
  // If this fails, the file stays longer than size(), which only costs space.
  retry_interrupted([&] { return calls::ftruncate(file, bytes); });
}

Status own_blocks(int file, const std::string& path, uint64_t from, uint64_t to) {
  PETPS_RETURN_IF_ERROR(check_written_in_place(file, path));
  const Result<Blocks> blocks = read_blocks(file, path, {from, to});
  if (!blocks.ok()) return blocks.status();
  PETPS_RETURN_IF_ERROR(unshare(file, path, blocks.value().shared));
  return fill_holes(file, path, {from, to}, blocks.value().holes);
}

Status claim_blocks(int file, const std::string& path, uint64_t from, uint64_t to) {
  Blocks blocks;
  const Result<bool> has_fiemap = read_extents(file, path, {from, to}, &blocks);
  if (!has_fiemap.ok()) return has_fiemap.status();
  PETPS_RETURN_IF_ERROR(unshare(file, path, blocks.shared));
  // Also where nothing reports holes (hugetlbfs). What has blocks stays as it is.
  const int error_number = allocate_at_end(file, from, to - from);
  return error_number == 0 ? Status() : fill_error(file, path, to - from, error_number);
}

Status free_blocks(int file, const std::string& path, uint64_t from, uint64_t to) {
  // Can it fill holes? The first page of the file has a block, so this does nothing.
  int error_number = fallocate_all(file, 0, 0, 1);
  if (error_number == 0) {
    error_number = fallocate_all(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from);
  }
  if (error_number == 0) return Status();
  if (is_unsupported(error_number)) {
    return Status(Code::kUnimplemented,
                  path +
                      ": its file system cannot take back a part of a file: export the model "
                      "(petps export) into a new pool, which has no free space");
  }
  return errno_status(Code::kIoError, "free " + std::to_string(to - from) + " bytes of " + path,
                      error_number);
}

uint64_t allocated_bytes(int file) {
  struct stat about = {};
  if (calls::fstat(file, &about) != 0) return 0;
  return static_cast<uint64_t>(about.st_blocks) * kStatBlockBytes;
}

Status forbid_copy_on_write(int file, const std::string& path) {
  int flags = 0;
  if (calls::ioctl(file, FS_IOC_GETFLAGS, &flags) == 0) {
    flags = (flags | FS_NOCOW_FL) & ~FS_COMPR_FL;  // btrfs refuses both at once
    // Every other file system refuses the flag and writes in place.
    [[maybe_unused]] const int ignored = calls::ioctl(file, FS_IOC_SETFLAGS, &flags);
  }
  return check_written_in_place(file, path);
}

uint64_t file_system_bytes(int file) {
  struct statfs about = {};
  if (calls::fstatfs(file, &about) != 0) return 0;
  return uint64_t{about.f_blocks} * static_cast<uint64_t>(about.f_bsize);
}

}  // namespace petps::media
