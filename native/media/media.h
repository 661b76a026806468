// Room media: the mapped bytes of a pool and what makes them durable.
//
// Owns:         the mapping (dax file or device, plain file, anonymous memory), its growth,
//               flush, drain and persist.
// Never does:   interpret the bytes; throw; hide a failed drain.
// Called by:    pool, index and table through Flusher.
// Invariants:   base() never moves while the Media lives (the address range is reserved, the file
//               is mapped into it). Bytes below size() are allocated on the device, except those
//               that free_blocks() gave back, so a full disk is an error from grow and
//               claim_blocks and never a SIGBUS. After drain() returns OK,
//               everything flushed earlier through the same Flusher is durable at the pool's
//               Durability. After a failed drain, failed() stays true and every later drain
//               fails.
// Threads:      Threads share a Media; the caller serialises grow(). A Flusher belongs to one
//               thread.
//
// DURABILITY.md beside this file is the essay: what each medium promises, what it costs, and
// which alternatives were rejected.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/crc32c.h"
#include "base/status.h"
#include "media/bus_error.h"
#include "media/pages.h"
#include "media/site.h"
#include "media/stream.h"

namespace petps::media {

enum class Kind : uint8_t { kDram = 0, kFile = 1, kDax = 2 };
enum class Durability : uint8_t { kPower = 0, kProcess = 1 };
enum class Access : uint8_t {
  kReadWrite,
  kReadOnly,
  // For a reader beside a writer in another process: takes no lock and maps the whole reserved
  // range, so that the bytes by which the file grows are mapped. The caller must not touch a byte
  // beyond the end of the file: that is a SIGBUS.
  kReadBeside,
};

const char* kind_name(Kind kind);                    // "dram", "file", "dax"
const char* durability_name(Durability durability);  // "power", "process"

// A test's view of the medium: it receives every store, flush and drain in program order. There is
// none in production.
class Observer {
 public:
  virtual ~Observer() = default;
  // Called right after the store, so the new bytes are already in memory.
  virtual void on_store(const void* at, size_t bytes) = 0;
  virtual void on_flush(const void* at, size_t bytes, Site site) = 0;
  virtual base::Status on_drain(Site site) = 0;  // an error here is a failed drain
  // [at, at + bytes) was synced to the disk; null stands for everything. An error here is a
  // failed sync. Borrowed media of kind kFile only.
  virtual base::Status on_sync(const void* /*at*/, size_t /*bytes*/, Site /*site*/) {
    return base::Status();
  }
  // The medium grew by [at, at + bytes), which is zero and durable. Borrowed media only.
  virtual void on_grow(const void* /*at*/, size_t /*bytes*/) {}
};

struct Options {
  std::string path;                            // empty: anonymous memory (volatile)
  Durability durability = Durability::kPower;  // of a file pool; dax is always kPower
  Access access = Access::kReadWrite;
  uint64_t reserve_bytes = 0;  // address range to reserve; 0 = kDefaultReserveBytes
  bool hint_huge_pages = true;
  bool replace = false;  // create: discard what a device-DAX device holds
  // open: whether every byte gets a block of its own. Else call own_blocks() before a store.
  bool own_blocks = true;
};

inline constexpr uint64_t kLineBytes = 64;
// Address space costs nothing and a pool never moves, so the default is larger than any one
// socket's memory. TSan leaves a program about 1.5 TiB, and its tests open many pools at once. An
// emulated processor (cmake/aarch64.cmake) takes memory for what is reserved.
#if defined(__SANITIZE_THREAD__) || defined(PETPS_SMALL_RESERVATIONS)
inline constexpr uint64_t kDefaultReserveBytes = uint64_t{32} << 30;
#else
inline constexpr uint64_t kDefaultReserveBytes = uint64_t{4} << 40;
#endif

class Media {
 public:
  // Create a new, zeroed medium of `bytes`. Return kAlreadyExists if the path exists, and
  // kResourceExhausted if the disk is full (the file is removed again). The parent folder is
  // fsynced, so that the file itself survives power loss. A device-DAX device always exists:
  // return kAlreadyExists if its first MiB holds anything but zeros (unless options.replace), and
  // kResourceExhausted if it is too small.
  static base::Result<std::unique_ptr<Media>> create(const Options& options, uint64_t bytes);
  // Open an existing medium; probe dax by MAP_SYNC. A device's size() is the whole device until
  // forget_beyond(). Lock the file, exclusively for kReadWrite and shared for kReadOnly; the
  // kernel releases the lock when the process dies. An error leaves every byte of the file, and
  // its length, unchanged. Errors:
  //   kNotFound            the path does not exist
  //   kInUse               another process holds a conflicting lock
  //   kFailedPrecondition  the file cannot be given blocks of its own, or another process still
  //                        maps pages that a failed sync lost
  //   kResourceExhausted   filling the holes of a sparse copy does not fit the disk
  static base::Result<std::unique_ptr<Media>> open(const Options& options);
  // Undo create(): remove the file, or zero a device's first MiB.
  static base::Status discard(const std::string& path);
  // Wrap the caller's memory, for tests: `bytes` used of `reserved`. grow() zeroes. As kDax it
  // writes lines back; as kFile its syncs go to the observer.
  static std::unique_ptr<Media> borrow(std::byte* memory, uint64_t bytes, uint64_t reserved,
                                       Observer* observer, Kind as = Kind::kDram);

  ~Media();
  Media(const Media&) = delete;
  Media& operator=(const Media&) = delete;

  std::byte* base() const { return base_; }
  uint64_t size() const { return size_.load(std::memory_order_acquire); }
  uint64_t reserved() const { return reserved_; }  // bytes of address space: at least size()
  Kind kind() const { return kind_; }
  Durability durability() const { return durability_; }
  // Set the durability: after reading the superblock, when the pool's durability changes, and at a
  // clean close. No other thread may drain during the call. A change from kProcess to kPower also
  // syncs everything written so far; if that fails, failed() is true. dax stays kPower.
  void set_durability(Durability durability, Site site = Site::kPowerSync);
  // Make [at, at + bytes), or everything, survive a power loss whatever the durability is. Both
  // do nothing on dax, where a drain does that already, and on dram; so does sync_range under
  // kPower. An error is kept: failed() is true from then on. sync_range costs what is dirty in
  // the range (or in the whole file system: FileCalls::may_skip_flush), and it syncs even if
  // failed() is already true.
  base::Status sync_range(const void* at, size_t bytes, Site site);
  base::Status sync_all(Site site);
  bool read_only() const { return read_only_; }
  bool is_read_beside() const { return read_beside_; }  // opened with Access::kReadBeside
  // Update size() of a medium that is read beside its writer, after the file may have grown.
  void refresh_size();
  // Return true for a device-DAX device, whose pages no file system can move.
  bool is_device() const { return device_bytes_ > 0; }
  bool is_volatile() const { return kind_ == Kind::kDram; }
  std::optional<MappedPages> sample_pages() const {  // of what this process has touched
    return media::sample_pages(base_, size());
  }
  const std::string& path() const { return path_; }

  // Make size() at least `bytes`. The new space is zeroed, allocated, mapped and pre-faulted
  // where that is cheap. Under kPower, on dax and in create() it is durable before grow returns.
  // Return kResourceExhausted if the disk or the reserved range is full; size() is then
  // unchanged.
  base::Status grow(uint64_t bytes);
  // Set size() to `bytes`, because nothing lies behind (a device does not know); grow() then
  // zeroes the space before it gives it out. Does nothing on other media, whose new space is zero
  // anyway. Call it before any other thread uses the medium.
  void forget_beyond(uint64_t bytes);

  // Give a file's bytes [from, to) blocks of their own, and change none (DURABILITY.md), so that a
  // store into them finds no full disk. Only while no other thread uses the medium. Errors: those
  // of open().
  base::Status own_blocks(uint64_t from, uint64_t to);
  // Do the same at any time, with bytes that mean nothing, which may become zeros.
  base::Status claim_blocks(uint64_t from, uint64_t to);
  // Give the blocks of whole pages back. They read as zeros, and need claim_blocks() before the
  // next store. Errors: kUnimplemented if the medium cannot do it.
  base::Status free_blocks(uint64_t from, uint64_t to);
  // Return the bytes of disk or memory that the medium takes; size() if that is unknown.
  uint64_t allocated_bytes() const;

  // Announce that [offset, offset + bytes) is about to be read in order, so that a file starts
  // reading ahead. Random reads of a file get no read-ahead, so scans (walk, verify, export) call
  // this before each piece of a few MiB. Any thread may call it.
  void expect_scan(uint64_t offset, uint64_t bytes) const;

  // Announce that all of [at, at + bytes), which is long and dirty, is about to be synced. A file's
  // write-back tells every processor that runs this process of each dirty page that is mapped, by
  // an interrupt that delays reads of other pages by tens of microseconds. So its pages are no
  // longer mapped afterwards; whoever needs one maps it again. Behind the sync, expect_reads() maps
  // all of them at once, so that the first reads need not. sync_range() calls both itself. Any
  // thread may call them.
  void expect_sync(const void* at, size_t bytes) const;
  void expect_reads(const void* at, size_t bytes) const;

  // Return the largest size() possible if everything beside the pool were deleted: the bytes of
  // its file system or device, or of the reserved range of anonymous memory. If unknown, return
  // 2^64 - 1.
  uint64_t largest_size() const;

  // Return true after any drain failed: what was flushed since the last good drain may be lost.
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Report to the observer a store that plain code just made. Costs nothing without an observer.
  void report_store(const void* at, size_t bytes) {
    if (observer_ != nullptr) [[unlikely]]
      observer_->on_store(at, bytes);
  }

  void set_observer(Observer* observer) {  // tests only, before any other thread
    observer_ = observer;
    flush_does_work_ = observer != nullptr || kind_ == Kind::kDax;
  }
  Observer* observer() const { return observer_; }

 private:
  friend class Flusher;
  friend class SecondMapping;
  Media() = default;
  static base::Result<std::unique_ptr<Media>> create_on_device(const Options& options,
                                                               uint64_t bytes);
  void adopt(int file);
  void zero(uint64_t from, uint64_t to);  // whole pages of a device; durable
  base::Status reserve(const Options& options, uint64_t bytes);
  // Map [from, to) of the file or of fresh memory at base_ + from.
  base::Status map(uint64_t from, uint64_t to);
  // Run fdatasync on the file, shared with other threads, and remember a failure.
  base::Status sync();
  void advise_long(const void* at, size_t bytes, int advice) const;
  void remember_failed_sync(int error_number);
  base::Status sticky_failure() const;  // the status of a drain once failed() is true

  std::byte* base_ = nullptr;
  std::atomic<uint64_t> size_{0};
  uint64_t reserved_ = 0;
  uint64_t device_bytes_ = 0;      // 0 if the medium is not a device
  uint64_t device_alignment_ = 0;  // of the device's mappings
  Kind kind_ = Kind::kDram;
  std::atomic<Durability> durability_ = Durability::kPower;
  bool read_only_ = false;
  bool read_beside_ = false;
  bool borrowed_ = false;
  bool huge_pages_ = false;
  int file_ = -1;
  std::optional<Mapped> mapped_;   // the range of base_ and reserved_, if there is a file
  bool syncs_skip_flush_ = false;  // of file_: see FileCalls::may_skip_flush
  std::mutex sync_mutex_;          // guards syncs_begun_, newest_good_sync_, sync_is_running_
  std::condition_variable sync_ended_;
  uint64_t syncs_begun_ = 0;
  uint64_t newest_good_sync_ = 0;  // the number of that sync
  bool sync_is_running_ = false;
  std::atomic<bool> failed_{false};
  std::atomic<int> failed_errno_{0};  // of the first failed sync; 0 if an observer failed the drain
  Observer* observer_ = nullptr;
  // A dax medium or an observer is present; otherwise a flush only sets Flusher::dirty_.
  bool flush_does_work_ = false;
  std::string path_;
};

// A second, read-only mapping of a medium's first bytes, for a measurement that needs something to
// read. A SIGBUS in it is a lost pool, as in the first mapping. The medium must outlive it.
class SecondMapping {
 public:
  // Map min(bytes, medium.size()) bytes.
  SecondMapping(const Media& medium, size_t bytes);
  ~SecondMapping();
  SecondMapping(const SecondMapping&) = delete;
  SecondMapping& operator=(const SecondMapping&) = delete;

  // Return what is mapped: nothing if the medium has no file or the kernel refuses.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
  std::optional<Mapped> mapped_;
};

// The lines that one writer has flushed since its last drain. On dax a flush is one clwb (or
// clflushopt, clflush) per line and a drain is sfence. On a file with power durability a flush
// only remembers that something is dirty, and a drain is one fdatasync. On a file with process
// durability and on dram a drain is sfence, because streamed rows must be visible before the
// entry that publishes them.
class Flusher {
 public:
  explicit Flusher(Media& media);

  // Start the write-back of every line that [at, at + bytes) touches.
  void flush(const void* at, size_t bytes, Site site) {
    dirty_ = true;
    if (media_->flush_does_work_) write_back(at, bytes, site);
  }
  // Copy and flush; long aligned copies go past the cache. Report the store and the flush to the
  // observer.
  void copy(void* to, const void* from, size_t bytes, Site site);
  // Copy 16 bytes to a 16-byte boundary past the cache, whatever else is in the line; memory does
  // not read the line for it. Use it for data that comes one item per line and is not read again
  // soon.
  void copy_16(void* to, const void* from, Site site) {
    if (stream_ == nullptr) [[unlikely]] {
      copy_16_and_report(to, from, site);
      return;
    }
    dirty_ = true;
    copy_16_past_cache(to, from);
  }
  // Copy like copy() and return the CRC-32C of the copied bytes.
  uint32_t copy_with_crc32c(void* to, const void* from, size_t bytes, Site site) {
    constexpr size_t kLeast = 256;  // see base/crc32c.h
    const bool whole_lines = (reinterpret_cast<uintptr_t>(to) | bytes) % kLineBytes == 0;
    if (stream_ == nullptr || !whole_lines || bytes < kLeast) [[unlikely]]
      return copy_then_crc32c(to, from, bytes, site);
    dirty_ = true;
    return stream_(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  }
  // Make everything flushed so far durable. After an error, media.failed() is true.
  base::Status drain(Site site);

  Media& media() const { return *media_; }

 private:
  void write_back(const void* at, size_t bytes, Site site);
  void report_stream(const void* at, size_t bytes, Site site);
  void copy_16_and_report(void* to, const void* from, Site site);
  uint32_t copy_then_crc32c(void* to, const void* from, size_t bytes, Site site);

  Media* media_;
  base::StreamWithCrc32c stream_;  // null: the processor lacks it, or there is an observer
  bool dirty_ = false;
};

}  // namespace petps::media
