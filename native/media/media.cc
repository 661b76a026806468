#include "media/media.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "media/blocks.h"
#include "media/calls.h"
#include "media/file.h"
#include "media/writeback.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // as the next
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels answer EINVAL
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace petps::media {
namespace {

using base::Code;
using base::errno_status;
using base::Result;
using base::Status;

constexpr uint64_t kPageBytes = 4096;
// base() is aligned to it, so that dax and dram can use huge pages.
constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Touching new space at once saves a writer one fault per page. Beyond this size the dirty pages
// would throttle the process instead.
constexpr uint64_t kPrefaultMaxBytes = uint64_t{1} << 30;
// A file system with large folios makes one folio of a write of this size (DURABILITY.md).
constexpr uint64_t kFolioBytes = 65536;
// From this length on, unmapping a range is cheaper than protecting each of its pages.
constexpr uint64_t kUnmappedBytes = uint64_t{1} << 20;

// The part of a device that create() checks and discard() wipes: larger than a pool's two
// superblocks.
constexpr uint64_t kDeviceLabelBytes = uint64_t{1} << 20;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }
uint64_t round_down(uint64_t bytes, uint64_t unit) { return bytes / unit * unit; }

std::string name_of(const std::string& path) { return path.empty() ? "anonymous memory" : path; }

// Return true if the kernel grants MAP_SYNC, which it does on dax only: there a written-back
// store is durable, and so is its block. Probe with a separate page, because a refused MAP_FIXED
// leaves a hole in the range on kernels before 6.12.
bool is_dax(int file) {
  void* page = calls::mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, file, 0);
  if (page == MAP_FAILED) return false;
  calls::munmap(page, kPageBytes);
  return true;
}

Status full_device_error(const std::string& path, uint64_t needed, uint64_t available) {
  return Status(Code::kResourceExhausted,
                path + " is full: " + std::to_string(needed) + " bytes are needed, it has " +
                    std::to_string(available) +
                    "; make a larger namespace (ndctl), or give the tables less capacity");
}

// Write zeros to new space of a file, so that the kernel takes neighbouring memory for
// neighbouring pages. ERRORS: ignored, as in prefault.
void write_zeros(int file, uint64_t from, uint64_t to) {
  static const std::array<std::byte, kFolioBytes> zeros = {};
  for (uint64_t at = round_up(from, kFolioBytes); at + kFolioBytes <= to; at += kFolioBytes) {
    if (calls::pwrite(file, zeros.data(), kFolioBytes, at) < 0) return;
  }
}

// Touch new space, so that a writer does not fault. ERRORS: ignored, because a page that was not
// touched now is touched by its first store.
void prefault(std::byte* base, uint64_t from, uint64_t to, int file) {
  if (to - from > kPrefaultMaxBytes) return;
  if (file >= 0) write_zeros(file, from, to);
  calls::madvise(base + from, to - from, MADV_POPULATE_WRITE);
}

}  // namespace

const char* kind_name(Kind kind) {
  static constexpr const char* kNames[] = {"dram", "file", "dax"};
  return kNames[static_cast<size_t>(kind)];
}

const char* durability_name(Durability durability) {
  return durability == Durability::kPower ? "power" : "process";
}

Result<std::unique_ptr<Media>> Media::create(const Options& options, uint64_t bytes) {
  if (bytes == 0)
    return Status(Code::kInvalidArgument,
                  name_of(options.path) + ": a medium of 0 bytes holds nothing");
  std::unique_ptr<Media> media(new Media());
  media->path_ = options.path;
  media->durability_ = options.durability;
  media->huge_pages_ = options.hint_huge_pages;
  if (options.path.empty()) {
    PETPS_RETURN_IF_ERROR(media->reserve(options, bytes));
    PETPS_RETURN_IF_ERROR(media->grow(bytes));
    return media;
  }
  if (device_at(options.path)) return create_on_device(options, bytes);
  const Result<Folder> folder = Folder::open_of(options.path);
  if (!folder.ok()) return folder.status();
  Result<int> file = create_file(options.path);
  if (!file.ok()) return file.status();
  media->adopt(file.value());
  Status status = media->reserve(options, bytes);
  if (status.ok()) status = media->grow(bytes);
  if (status.ok()) status = folder.value().sync();
  // The file is still locked, so no other process can write it: removing it is safe.
  if (!status.ok()) return remove_file(options.path, status);
  return media;
}

Result<std::unique_ptr<Media>> Media::create_on_device(const Options& options, uint64_t bytes) {
  auto opened = open(options);
  if (!opened.ok()) return opened.status();
  Media& media = *opened.value();
  const std::byte* const label = media.base();
  const uint64_t label_bytes = std::min(kDeviceLabelBytes, media.size());
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  if (!options.replace && !std::all_of(label, label + label_bytes, is_zero)) {
    return Status(Code::kAlreadyExists,
                  options.path +
                      " holds a pool or other data: open it, or overwrite it with `petps create "
                      "--replace`");
  }
  media.forget_beyond(0);
  PETPS_RETURN_IF_ERROR(media.grow(bytes));
  return opened;
}

Status Media::discard(const std::string& path) {
  if (!device_at(path)) {
    if (calls::unlink(path.c_str()) == 0) return Status();
    return errno_status(Code::kIoError, "remove " + path, errno);
  }
  Options options;
  options.path = path;
  auto opened = open(options);
  if (!opened.ok()) return opened.status();
  opened.value()->zero(0, std::min(kDeviceLabelBytes, opened.value()->size()));
  return Status();
}

Result<std::unique_ptr<Media>> Media::open(const Options& options) {
  if (options.path.empty())
    return Status(Code::kInvalidArgument, "anonymous memory cannot be opened: create it");
  Result<int> file = open_file(options.path, options.access);
  if (!file.ok()) return file.status();
  std::unique_ptr<Media> media(new Media());
  media->path_ = options.path;
  media->durability_ = options.durability;
  media->read_only_ = options.access != Access::kReadWrite;
  media->read_beside_ = options.access == Access::kReadBeside;
  media->adopt(file.value());
  Result<uint64_t> bytes = media->is_device() ? Result<uint64_t>(media->device_bytes_)
                                              : file_bytes(media->file_, options.path);
  if (!bytes.ok()) return bytes.status();
  if (bytes.value() == 0) {
    return Status(Code::kInvalidArgument,
                  options.path + " is empty (0 bytes): it is no pool; remove it and create one");
  }
  if (!media->is_device() && !media->read_beside_)
    PETPS_RETURN_IF_ERROR(drop_lost_pages(media->file_, options.path, bytes.value()));
  if (options.own_blocks && !media->read_only_)
    PETPS_RETURN_IF_ERROR(media->own_blocks(0, bytes.value()));
  PETPS_RETURN_IF_ERROR(media->reserve(options, bytes.value()));
  PETPS_RETURN_IF_ERROR(
      media->map(0, media->read_beside_ && !media->is_device() ? media->reserved_ : bytes.value()));
  media->size_.store(bytes.value(), std::memory_order_release);
  return media;
}

std::unique_ptr<Media> Media::borrow(std::byte* memory, uint64_t bytes, uint64_t reserved,
                                     Observer* observer, Kind as) {
  std::unique_ptr<Media> media(new Media());
  media->base_ = memory;
  media->size_.store(bytes, std::memory_order_release);
  media->reserved_ = reserved;
  media->borrowed_ = true;
  media->kind_ = as;
  media->set_observer(observer);
  return media;
}

Media::~Media() {
#if defined(__SANITIZE_ADDRESS__)
  // The pool poisoned freed slots. munmap does not lift that, and the next mapping may get the
  // same addresses.
  if (base_ != nullptr) ASAN_UNPOISON_MEMORY_REGION(base_, size());
#endif
  if (!borrowed_ && base_ != nullptr && calls::munmap(base_, reserved_) != 0) {
    // A mapping would keep the file open, and with it the lock. This replacement wastes only
    // address space.
    calls::mmap(base_, reserved_, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  mapped_.reset();
  if (file_ < 0) return;
  // After a failed sync Linux calls the lost pages clean and keeps showing them. Dropping them
  // makes the next open see what is on the disk, and recovery must start from that. If the
  // failure could be marked on the file, the next open checks that the pages are gone.
  if (failed()) calls::fadvise(file_, POSIX_FADV_DONTNEED);
  calls::close(file_);
}

SecondMapping::SecondMapping(const Media& medium, size_t bytes) {
  if (medium.file_ < 0) return;
  const size_t length = std::min<uint64_t>(bytes, medium.size());
  void* const at = calls::mmap(nullptr, length, PROT_READ, MAP_SHARED, medium.file_, 0);
  if (at == MAP_FAILED) return;
  bytes_ = {static_cast<const std::byte*>(at), length};
  mapped_.emplace(at, length, medium.file_, medium.path_);
}

SecondMapping::~SecondMapping() {
  if (mapped_) calls::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void Media::adopt(int file) {
  file_ = file;
  if (const std::optional<Device> device = device_at(path_)) {
    device_bytes_ = device->bytes;
    device_alignment_ = device->alignment;
  }
  kind_ = is_device() || is_dax(file) ? Kind::kDax : Kind::kFile;
  syncs_skip_flush_ = kind_ == Kind::kFile && file_calls().may_skip_flush(file);
  // A new descriptor reports errors of the file system that no descriptor has reported yet. This
  // call consumes them, so that a later sync does not report an old error.
  if (syncs_skip_flush_ && !read_only_) static_cast<void>(flush_disk(file));
  if (kind_ == Kind::kDax) durability_ = Durability::kPower;
  set_observer(nullptr);
}

Status Media::reserve(const Options& options, uint64_t bytes) {
  if (const long page = ::sysconf(_SC_PAGE_SIZE); page != static_cast<long>(kPageBytes)) {
    return Status(Code::kUnimplemented,
                  "open " + name_of(path_) + ": this kernel has pages of " + std::to_string(page) +
                      " bytes; boot one with pages of " + std::to_string(kPageBytes));
  }
  const uint64_t wanted = options.reserve_bytes != 0 ? options.reserve_bytes : kDefaultReserveBytes;
  const uint64_t alignment = std::max(kHugePageBytes, device_alignment_);
  reserved_ = round_up(std::max(wanted, bytes), alignment);
  const uint64_t with_slack = reserved_ + alignment;
  void* range = calls::mmap(nullptr, with_slack, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return errno_status(Code::kResourceExhausted,
                        "reserve " + std::to_string(reserved_) + " bytes of address space for " +
                            name_of(path_) + " (lower reserve_bytes, or raise `ulimit -v`)",
                        errno);
  }
  const auto start = reinterpret_cast<uintptr_t>(range);
  const uintptr_t aligned = round_up(start, alignment);
  const uintptr_t end = start + with_slack;
  if (aligned > start) calls::munmap(range, aligned - start);
  if (end > aligned + reserved_)
    calls::munmap(reinterpret_cast<void*>(aligned + reserved_), end - aligned - reserved_);
  base_ = reinterpret_cast<std::byte*>(aligned);
  if (file_ >= 0) mapped_.emplace(base_, reserved_, file_, path_);
  return Status();
}

Status Media::map(uint64_t from, uint64_t to) {
  const uint64_t first = round_down(from, kPageBytes);
  const uint64_t length = round_up(to, kPageBytes) - first;
  const int access = read_only_ ? PROT_READ : PROT_READ | PROT_WRITE;
  std::byte* at = base_ + first;
  void* mapped = MAP_FAILED;
  if (file_ < 0) {
    mapped = calls::mmap(at, length, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (mapped != MAP_FAILED && huge_pages_)
      calls::madvise(at, length, MADV_HUGEPAGE);  // if refused: small pages
  } else {
    const bool on_fsdax = kind_ == Kind::kDax && !is_device();
    const int sharing = on_fsdax ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED;
    mapped = calls::mmap(at, length, access, sharing | MAP_FIXED, file_, first);
  }
  if (mapped == MAP_FAILED) {
    return errno_status(errno == ENOMEM ? Code::kResourceExhausted : Code::kIoError,
                        "map " + std::to_string(length) + " bytes of " + name_of(path_), errno);
  }
  // A pull of cold rows reads single pages. With read-around each row would drag 128 KiB of other
  // rows through the page cache: 300 us instead of 60, and 30 pages evicted. Scans call
  // expect_scan().
  if (kind_ == Kind::kFile) calls::madvise(at, length, MADV_RANDOM);
  return Status();
}

Status Media::grow(uint64_t bytes) {
  const uint64_t old_bytes = size();
  if (bytes <= old_bytes) return Status();
  if (read_only_)
    return Status(Code::kFailedPrecondition, path_ + " is open read-only: it cannot grow");
  const uint64_t new_bytes = borrowed_ ? bytes : round_up(bytes, kPageBytes);
  if (new_bytes > reserved_) {
    return Status(Code::kResourceExhausted, name_of(path_) + ": " + std::to_string(new_bytes) +
                                                " bytes do not fit the reserved address range of " +
                                                std::to_string(reserved_) +
                                                "; reopen with a larger reserve_bytes");
  }
  if (borrowed_) {
    std::memset(base_ + old_bytes, 0, new_bytes - old_bytes);
    if (observer_ != nullptr) observer_->on_grow(base_ + old_bytes, new_bytes - old_bytes);
    size_.store(new_bytes, std::memory_order_release);
    return Status();
  }
  if (failed()) return sticky_failure();
  if (is_device()) {
    if (new_bytes > device_bytes_) return full_device_error(path_, new_bytes, device_bytes_);
    zero(old_bytes, new_bytes);
    size_.store(new_bytes, std::memory_order_release);
    return Status();
  }
  if (file_ >= 0) PETPS_RETURN_IF_ERROR(append_blocks(file_, path_, old_bytes, new_bytes));
  if (Status status = map(old_bytes, new_bytes); !status.ok()) {
    if (file_ >= 0) cut_back(file_, old_bytes);
    return status;
  }
  // Do not prefault a file that is synced: the sync writes the zeros out and protects every page
  // again, so the space would be written twice and no fault saved.
  const bool synced_file = kind_ == Kind::kFile && durability_ == Durability::kPower;
  if (!synced_file)
    prefault(base_, round_up(old_bytes, kPageBytes), new_bytes, kind_ == Kind::kFile ? file_ : -1);
  // The new length must survive a power loss before any record says that something lives there.
  if (file_ >= 0 && (durability_ == Durability::kPower || old_bytes == 0))
    PETPS_RETURN_IF_ERROR(sync());
  size_.store(new_bytes, std::memory_order_release);
  return Status();
}

void Media::refresh_size() {
  const Result<uint64_t> bytes =
      is_device() ? Result<uint64_t>(device_bytes_) : file_bytes(file_, path_);
  if (bytes.ok()) size_.store(std::min(bytes.value(), reserved_), std::memory_order_release);
}

void Media::zero(uint64_t from, uint64_t to) {
  static constexpr std::array<std::byte, kPageBytes> zeros = {};
  for (uint64_t at = from; at < to; at += kPageBytes)
    stream_lines(base_ + at, zeros.data(), kPageBytes / kLineBytes);
  store_fence();
}

void Media::forget_beyond(uint64_t bytes) {
  if (is_device()) size_.store(std::min(size(), bytes), std::memory_order_release);
}

Status Media::own_blocks(uint64_t from, uint64_t to) {
  if (borrowed_ || file_ < 0 || is_device() || from >= to) return Status();
  return media::own_blocks(file_, path_, from, to);
}

Status Media::claim_blocks(uint64_t from, uint64_t to) {
  if (borrowed_ || file_ < 0 || is_device()) return Status();
  return media::claim_blocks(file_, path_, from, to);
}

Status Media::free_blocks(uint64_t from, uint64_t to) {
  if (read_only_) return Status(Code::kFailedPrecondition, path_ + " is open read-only");
  if (is_device()) {
    return Status(Code::kUnimplemented, path_ +
                                            " is a device, which has its bytes always: there "
                                            "is nothing to give back");
  }
  if (!borrowed_ && file_ >= 0) return media::free_blocks(file_, path_, from, to);
  std::byte* const at = base_ + from;
  const bool is_given = !borrowed_ && calls::madvise(at, to - from, MADV_DONTNEED) == 0;
  if (!is_given) std::memset(at, 0, to - from);
  report_store(at, to - from);
  return Status();
}

uint64_t Media::allocated_bytes() const {
  const uint64_t bytes = borrowed_ || file_ < 0 || is_device() ? 0 : media::allocated_bytes(file_);
  return bytes == 0 ? size() : bytes;
}

void Media::expect_scan(uint64_t offset, uint64_t bytes) const {
  if (kind_ != Kind::kFile || borrowed_ || offset >= size()) return;
  const uint64_t first = round_down(offset, kPageBytes);
  const uint64_t end = std::min(offset + bytes, size());
  calls::madvise(base_ + first, end - first, MADV_WILLNEED);  // a hint: nothing depends on it
}

// The pages, with all stores, stay in the page cache: the mapping is shared.
void Media::expect_sync(const void* at, size_t bytes) const {
  advise_long(at, bytes, MADV_DONTNEED);
}

void Media::expect_reads(const void* at, size_t bytes) const {
  advise_long(at, bytes, MADV_POPULATE_READ);
}

void Media::advise_long(const void* at, size_t bytes, int advice) const {
  if (kind_ != Kind::kFile || borrowed_ || bytes < kUnmappedBytes) return;
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - base_);
  const uint64_t first = round_down(offset, kPageBytes);
  calls::madvise(base_ + first, offset + bytes - first, advice);
}

void Media::set_durability(Durability durability, Site site) {
  if (kind_ == Kind::kDax) return;
  const bool must_sync =
      !read_only_ && durability_ == Durability::kProcess && durability == Durability::kPower;
  // Set this first: a writer's next drain then syncs, and the sync below covers every earlier
  // store.
  durability_ = durability;
  if (must_sync) [[maybe_unused]]
    const Status remembered = sync_all(site);  // failed() remembers an error
}

Status Media::sync_all(Site site) {
  if (failed()) return sticky_failure();
  if (kind_ != Kind::kFile) return Status();
  if (!borrowed_) return sync();
  Status status = observer_ == nullptr ? Status() : observer_->on_sync(nullptr, 0, site);
  if (!status.ok()) failed_.store(true, std::memory_order_release);
  return status;
}

Status Media::sync_range(const void* at, size_t bytes, Site site) {
  const Status earlier_failure = failed() ? sticky_failure() : Status();
  if (kind_ != Kind::kFile || durability_ == Durability::kPower) return earlier_failure;
  if (borrowed_) {
    Status status = observer_ == nullptr ? Status() : observer_->on_sync(at, bytes, site);
    if (!status.ok()) failed_.store(true, std::memory_order_release);
    return earlier_failure.ok() ? status : earlier_failure;
  }
  // On a mapped file, msync(MS_SYNC) is an fdatasync of a range: Linux writes the range's dirty
  // pages, then the metadata needed to read them back, and flushes the disk's cache.
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - base_);
  const uint64_t first = round_down(offset, kPageBytes);
  expect_sync(at, bytes);
  // msync takes the descriptor's error, so it must not overlap sync() (see the proof there).
  std::unique_lock lock(sync_mutex_);
  sync_ended_.wait(lock, [this] { return !sync_is_running_; });
  int error_number = errno_of([&] { return calls::msync(base_ + first, offset + bytes - first); });
  if (error_number == 0 && syncs_skip_flush_) error_number = flush_disk(file_);
  if (error_number != 0) {
    remember_failed_sync(error_number);
    return sticky_failure();
  }
  lock.unlock();
  expect_reads(at, bytes);
  return earlier_failure;
}

// Run one sync at a time, because the kernel reports a failed write-back once per open file: if
// two ran, the first could receive the error for pages that the other thread lost. The sync
// number and the failure flag change under one mutex.
//
// Which stores sync number s covers: every store that happens before `syncs_begun_` becomes s.
// fdatasync writes each page that is dirty when the call starts, waits for pages in flight, and
// returns any error since the last report to this open file. This object makes every sync of the
// file's descriptor, so an error that was not reported to sync s was reported to an earlier one,
// and that one set failed_. Hence: sync s returned 0 and failed_ is false => everything that s
// covers is on the disk.
//
// A caller that finds `syncs_begun_` == n under the mutex has already made its stores. So sync
// number n + 1 covers them, whichever thread runs it. Sync n may still be running and may have
// passed their pages, so it is not enough. All callers that wait for sync n to finish share sync
// n + 1 (group commit).
Status Media::sync() {
  std::unique_lock lock(sync_mutex_);
  const uint64_t needed = syncs_begun_ + 1;
  while (newest_good_sync_ < needed && !failed()) {
    if (sync_is_running_) {
      if (file_calls().before != nullptr) file_calls().before(Call::kAwaitSync);
      sync_ended_.wait(lock);
      continue;
    }
    sync_is_running_ = true;
    const uint64_t number = ++syncs_begun_;
    lock.unlock();
    int error_number = file_calls().sync_data(file_);
    if (error_number == 0 && syncs_skip_flush_) error_number = flush_disk(file_);
    lock.lock();
    sync_is_running_ = false;
    if (error_number == 0) {
      newest_good_sync_ = number;
    } else {
      remember_failed_sync(error_number);
    }
    sync_ended_.notify_all();
  }
  return failed() ? sticky_failure() : Status();
}

void Media::remember_failed_sync(int error_number) {
  int expected = 0;
  failed_errno_.compare_exchange_strong(expected, error_number);
  failed_.store(true, std::memory_order_release);
  mark_failed_sync(file_);
}

uint64_t Media::largest_size() const {
  if (borrowed_) return ~uint64_t{0};
  if (is_device()) return device_bytes_;
  if (file_ < 0) return reserved_;
  const uint64_t disk = file_system_bytes(file_);
  return disk == 0 ? ~uint64_t{0} : disk;
}

Status Media::sticky_failure() const {
  const int error_number = failed_errno_.load(std::memory_order_acquire);
  const std::string remedy =
      ": what was written since the last good drain may be lost; the pool is read-only until it is "
      "reopened";
  if (error_number == 0)
    return Status(Code::kIoError, "a drain of " + name_of(path_) + " failed" + remedy);
  return Status(Code::kIoError, "sync " + path_ + ": " + std::strerror(error_number) + " (errno " +
                                    std::to_string(error_number) + ")" + remedy);
}

}  // namespace petps::media
