// Room media: the mapped bytes of a pool and what makes them durable.
//
// Owns:         the mapping (dax file or device, plain file, anonymous memory), its growth, flush /
//               drain / persist.
// Never does:   know what the bytes mean; throw; lose a failed drain.
// Called by:    pool, index and table through Flusher.
// Invariants:   base() never moves while the Media lives (the address range is reserved, the file
//               mapped into it); bytes below size() are allocated on the device (a full disk is an
//               error from grow, never a SIGBUS); after drain() returned OK everything flushed
//               before through the same Flusher is durable at the pool's Durability; after a failed
//               drain failed() stays true and every later drain fails.
// Threads:      Media is shared; grow() is serialised by the caller; a Flusher belongs to one
//               thread.
//
// DURABILITY.md beside this file is the essay: what each medium promises, what it costs, what was
// rejected.
#pragma once

#include <emmintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/crc32c.h"
#include "base/status.h"
#include "media/bus_error.h"
#include "media/site.h"

namespace petps::media {

enum class Kind : uint8_t { kDram = 0, kFile = 1, kDax = 2 };
enum class Durability : uint8_t { kPower = 0, kProcess = 1 };
enum class Access : uint8_t {
  kReadWrite,
  kReadOnly,
  // While another process writes: no lock, and the whole reserved range is mapped, so that what the
  // file grows by is there. Touch no byte that the file has not got yet: that is a SIGBUS.
  kReadBeside,
};

const char* kind_name(Kind kind);                    // "dram", "file", "dax"
const char* durability_name(Durability durability);  // "power", "process"

// Test double's ear: hears every store, flush and drain in program order. Null in production.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_store(const void* at,
                        size_t bytes) = 0;  // called right after the store: read the bytes there
  virtual void on_flush(const void* at, size_t bytes, Site site) = 0;
  virtual base::Status on_drain(Site site) = 0;  // an error here is a failed drain
  // [at, at + bytes) was synced to the disk; null: everything. An error here is a failed sync.
  // Borrowed media of kind kFile only.
  virtual base::Status on_sync(const void* /*at*/, size_t /*bytes*/, Site /*site*/) {
    return base::Status();
  }
  // The medium grew by [at, at + bytes): zero and durable. Borrowed media only.
  virtual void on_grow(const void* /*at*/, size_t /*bytes*/) {}
};

struct Options {
  std::string path;                            // empty: anonymous memory (volatile)
  Durability durability = Durability::kPower;  // of a file pool; dax is always kPower
  Access access = Access::kReadWrite;
  uint64_t reserve_bytes = 0;  // address range to reserve; 0 = kDefaultReserveBytes
  bool hint_huge_pages = true;
  bool replace = false;  // create: give up what a device-DAX device holds
};

inline constexpr uint64_t kLineBytes = 64;
// Address space costs nothing and a pool never moves, so the default is more than any one socket's
// memory. TSan leaves a program about 1.5 TiB, and its tests open many pools at once.
#if defined(__SANITIZE_THREAD__)
inline constexpr uint64_t kDefaultReserveBytes = uint64_t{32} << 30;
#else
inline constexpr uint64_t kDefaultReserveBytes = uint64_t{4} << 40;
#endif

class Media {
 public:
  // A new, zeroed medium of `bytes`. kAlreadyExists when the path is there; kResourceExhausted when
  // the disk is full (the file is removed again). The parent folder is fsynced, so that the file itself
  // survives power loss. A device-DAX device is always there: kAlreadyExists when its first MiB holds
  // anything but zeros (unless options.replace), kResourceExhausted when it is too small.
  static base::Result<std::unique_ptr<Media>> create(const Options& options, uint64_t bytes);
  // An existing one. kNotFound; kFailedPrecondition when another process holds it for writing
  // (exclusive lock for kReadWrite, shared for kReadOnly; released by the kernel when the process
  // dies), when the file cannot be given blocks of its own, or when another process still shows pages
  // that a failed sync lost; kResourceExhausted when a sparse copy does not fit the disk. An error
  // leaves every byte of the file, and its length, as they were. Probes dax by MAP_SYNC. A device's size() is the whole device until forget_beyond().
  static base::Result<std::unique_ptr<Media>> open(const Options& options);
  // Undoes create(): removes the file; a device's first MiB is zero again.
  static base::Status discard(const std::string& path);
  // Somebody else's memory, for tests: `bytes` used of `reserved`. grow() zeroes. As kDax it writes
  // lines back; as kFile its syncs are the observer's.
  static std::unique_ptr<Media> borrow(std::byte* memory, uint64_t bytes, uint64_t reserved,
                                       Observer* observer, Kind as = Kind::kDram);

  ~Media();
  Media(const Media&) = delete;
  Media& operator=(const Media&) = delete;

  std::byte* base() const { return base_; }
  uint64_t size() const { return size_.load(std::memory_order_acquire); }
  uint64_t reserved() const { return reserved_; }  // bytes of address space: size() stays below
  Kind kind() const { return kind_; }
  Durability durability() const { return durability_; }
  // Before use only: after reading the superblock. From kProcess to kPower everything written so
  // far is synced first; when that fails, failed() is true. dax stays kPower.
  void set_durability(Durability durability, Site site = Site::kPowerSync);
  // Make [at, at + bytes), or everything, survive a power loss whatever the durability. Return at once
  // where a drain does that already (dax; everything under kPower) and for dram. An error is kept:
  // failed() is true from then on. sync_range costs what is dirty in the range
  // (in the file system: FileCalls::may_skip_flush), and is tried even then.
  base::Status sync_range(const void* at, size_t bytes, Site site);
  base::Status sync_all(Site site);
  bool read_only() const { return read_only_; }
  bool beside() const { return beside_; }  // Access::kReadBeside
  // Of a medium that is read beside its writer: takes up what the file has grown by.
  void look_again();
  // A device-DAX device: no file system can move its pages.
  bool is_device() const { return device_bytes_ > 0; }
  bool is_volatile() const { return kind_ == Kind::kDram; }
  const std::string& path() const { return path_; }

  // Makes size() at least `bytes` (zeroed, allocated, mapped, pre-faulted where cheap); durable
  // before it returns. kResourceExhausted when the disk or the reserved range is full; size() is
  // then unchanged.
  base::Status grow(uint64_t bytes);
  // Says that nothing lies behind `bytes` (a device does not know): size() is that, and grow() gives the
  // space zeroed. Nothing for the others, whose new space is zero anyway. Before any other thread.
  void forget_beyond(uint64_t bytes);

  // Says that [offset, offset + bytes) is about to be read in order: a file starts reading it ahead.
  // Random reads of a file get no read-ahead, so scans (walk, verify, export) call this before each
  // piece of a few MiB. Any thread.
  void expect_scan(uint64_t offset, uint64_t bytes) const;

  // The most that size() could become if everything beside the pool were deleted: the bytes of its
  // file system or device, or of the reserved range of anonymous memory. Unknown: 2^64 - 1.
  uint64_t largest_size() const;

  // True after any drain failed: what was flushed since the last good one may be lost.
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Tells the observer of a store that was just made by plain code. Free when there is none.
  void stored(const void* at, size_t bytes) {
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
  Media() = default;
  static base::Result<std::unique_ptr<Media>> create_on_device(const Options& options,
                                                               uint64_t bytes);
  void adopt(int file);
  void zero(uint64_t from, uint64_t to);  // whole pages of a device; durable
  base::Status reserve(const Options& options, uint64_t bytes);
  base::Status map(uint64_t from,
                   uint64_t to);  // [from, to) of the file or of fresh memory, at base_ + from
  base::Status sync();            // file: fdatasync, shared with other threads; remembers failure
  void remember_failed_sync(int error_number);
  base::Status sticky_failure() const;  // what a drain answers once failed() is true

  std::byte* base_ = nullptr;
  std::atomic<uint64_t> size_{0};
  uint64_t reserved_ = 0;
  uint64_t device_bytes_ = 0;      // 0: no device
  uint64_t device_alignment_ = 0;  // of its mappings
  Kind kind_ = Kind::kDram;
  Durability durability_ = Durability::kPower;
  bool read_only_ = false;
  bool beside_ = false;
  bool borrowed_ = false;
  bool huge_pages_ = false;
  int file_ = -1;
  std::optional<Mapped> mapped_;   // base_ and reserved_, of a file
  bool syncs_skip_flush_ = false;  // of file_: see FileCalls::may_skip_flush
  std::mutex sync_mutex_;          // of the next three
  std::condition_variable sync_ended_;
  uint64_t syncs_begun_ = 0;
  uint64_t newest_good_sync_ = 0;  // its number
  bool sync_runs_ = false;
  std::atomic<bool> failed_{false};
  std::atomic<int> failed_errno_{
      0};  // of the first failed sync; 0 when an observer failed the drain
  Observer* observer_ = nullptr;
  bool flush_does_work_ =
      false;  // a dax medium or an observer: else a flush only sets Flusher::dirty_
  std::string path_;
};

// What one writer has flushed since its last drain. dax: clwb (clflushopt, clflush) per line, drain
// is sfence. file with power durability: flush only remembers that something is dirty, drain is one
// fdatasync. file with process durability and dram: drain is sfence (streamed rows must be visible
// before the entry that publishes them, on every medium).
class Flusher {
 public:
  explicit Flusher(Media& media);

  // Starts the write-back of every line that [at, at + bytes) touches.
  void flush(const void* at, size_t bytes, Site site) {
    dirty_ = true;
    if (media_->flush_does_work_) write_back(at, bytes, site);
  }
  // Copies and flushes; long aligned copies go past the cache. Tells the observer of the store and
  // the flush.
  void copy(void* to, const void* from, size_t bytes, Site site);
  // Copies 16 bytes to a 16-byte boundary past the cache, whatever else is in the line: the line is not
  // read for it. For what comes one a line and is not soon read again.
  void copy_16(void* to, const void* from, Site site) {
    if (stream_ == nullptr) [[unlikely]] {
      copy_16_told(to, from, site);
      return;
    }
    dirty_ = true;
    _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  // As copy; returns the CRC-32C of what it copied.
  uint32_t copy_with_crc32c(void* to, const void* from, size_t bytes, Site site) {
    constexpr size_t kLeast = 256;  // see base/crc32c.h
    const bool whole_lines = (reinterpret_cast<uintptr_t>(to) | bytes) % kLineBytes == 0;
    if (stream_ == nullptr || !whole_lines || bytes < kLeast) [[unlikely]]
      return copy_then_crc32c(to, from, bytes, site);
    dirty_ = true;
    return stream_(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  }
  // Everything flushed so far is durable, or an error (then media.failed()).
  base::Status drain(Site site);

  Media& media() const { return *media_; }

 private:
  void write_back(const void* at, size_t bytes, Site site);
  void streamed(const void* at, size_t bytes, Site site);
  void copy_16_told(void* to, const void* from, Site site);
  uint32_t copy_then_crc32c(void* to, const void* from, size_t bytes, Site site);

  Media* media_;
  base::StreamWithCrc32c stream_;  // null: the processor has none, or an observer listens
  bool dirty_ = false;
};

}  // namespace petps::media
