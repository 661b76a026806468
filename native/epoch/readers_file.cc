#include "epoch/readers_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

namespace petps::epoch {

using base::Code;
using base::errno_status;
using base::Result;
using base::Status;

namespace {

constexpr uint64_t kSignature = 0x5344524453505450;  // "PTPSDRDS"
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kPageBytes = 4096;
constexpr size_t kFileBytes = (1 + kMaxOutsideReaders) * kPageBytes;
constexpr mode_t kMode = 0664;  // less the umask; a reader must be able to write the file
// The bytes that are locked. kPresence is a byte of the pool, kInUse a byte of the readers file:
// every reader locks both shared. Record i has byte kFirstRecord + i of the readers file.
constexpr off_t kPresence = 0;
constexpr off_t kInUse = 0;
constexpr off_t kFirstRecord = 1;
// How long server and reader retry: a server keeps readers out only while it creates the file, and
// a reader that is refused releases its lock at once.
constexpr auto kPatience = std::chrono::seconds(3);
constexpr auto kPause = std::chrono::milliseconds(1);

struct flock range_of(short kind, off_t byte) {
  struct flock range = {};
  range.l_type = kind;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return range;
}

// Lock one byte; return false if another open file has a conflicting lock. F_OFD locks belong to
// the open file: they end with the process, and not when the process closes another descriptor of
// the file.
Result<bool> try_lock(int file, short kind, off_t byte) {
  struct flock range = range_of(kind, byte);
  int result = 0;
  do {
    result = fcntl(file, F_OFD_SETLK, &range);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  return errno_status(Code::kUnimplemented, "its file system has no locks of open files", errno);
}

// Do the same; an error counts as false.
bool lock_now(int file, short kind, off_t byte) {
  const Result<bool> result = try_lock(file, kind, byte);
  return result.ok() && result.value();
}

void unlock(int file, off_t byte) { static_cast<void>(lock_now(file, F_UNLCK, byte)); }

// Return true if another open file has a lock on the byte.
bool is_locked_elsewhere(int file, off_t byte) {
  struct flock range = range_of(F_WRLCK, byte);
  return fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

// Return true if the conflicting lock is the pool's own lock. The writer holds the pool by flock
// (media/file.cc), which NFS turns into a write lock of all bytes. A reader's lock is a read lock
// of one byte.
bool is_lock_of_all_bytes(int file, off_t byte) {
  struct flock range = range_of(F_WRLCK, byte);
  return fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type == F_WRLCK && range.l_start == 0 &&
         range.l_len == 0;
}

bool is_same_file(int file, const std::string& path) {
  struct stat by_file = {};
  struct stat by_path = {};
  return fstat(file, &by_file) == 0 && stat(path.c_str(), &by_path) == 0 &&
         by_file.st_ino == by_path.st_ino && by_file.st_dev == by_path.st_dev;
}

Code code_of(int error) {
  if (error == ENOENT) return Code::kNotFound;
  return error == EACCES || error == EROFS || error == EPERM ? Code::kPermissionDenied
                                                             : Code::kIoError;
}

void close_file(int* file) {
  if (*file >= 0) ::close(*file);
  *file = -1;
}

}  // namespace

// All ReadersFile objects of this process. A forked child cuts them off: otherwise it would keep
// the locks of a parent that has died, and write to the parent's pins.
struct OpenFiles {
  std::mutex mutex;
  std::vector<ReadersFile*> files;

  static OpenFiles& of_this_process() {
    static OpenFiles* const all = [] {
      pthread_atfork([] { of_this_process().mutex.lock(); },
                     [] { of_this_process().mutex.unlock(); },
                     [] {
                       for (ReadersFile* file : of_this_process().files) file->cut_off();
                       of_this_process().mutex.unlock();
                     });
      return new OpenFiles();
    }();
    return *all;
  }
};

std::string readers_path(const std::string& pool) {
  char* const real = ::realpath(pool.c_str(), nullptr);
  std::string path = (real == nullptr ? pool : std::string(real)) + ".readers";
  std::free(real);
  return path;
}

struct ReadersFile::Header {
  base::Atomic<uint64_t> signature;  // create() stores it last
  uint32_t format_version;
  uint32_t records;
  uint8_t pool[16];
  alignas(64) base::Atomic<uint64_t> global;
  alignas(64) base::Atomic<uint64_t> used;  // records [0, used) were ever claimed
};

static_assert(sizeof(Places) <= kPageBytes, "a record is a page");

ReadersFile::Header& ReadersFile::header() const { return *reinterpret_cast<Header*>(at_); }
Places& ReadersFile::record(size_t i) const {
  return *reinterpret_cast<Places*>(at_ + (1 + i) * kPageBytes);
}
size_t ReadersFile::used_records() const {
  return std::min<size_t>(header().used.load(std::memory_order_relaxed), kMaxOutsideReaders);
}
base::Atomic<uint64_t>& ReadersFile::global() const { return header().global; }

ReadersFile::ReadersFile(const std::string& pool_path, int pool_file, bool serves)
    : pool_path_(pool_path),
      path_(readers_path(pool_path)),
      serves_(serves),
      pool_file_(pool_file) {
  OpenFiles& all = OpenFiles::of_this_process();
  const std::lock_guard guard(all.mutex);
  all.files.push_back(this);
}

ReadersFile::~ReadersFile() {
  OpenFiles& all = OpenFiles::of_this_process();
  const std::lock_guard guard(all.mutex);
  all.files.erase(std::find(all.files.begin(), all.files.end(), this));
  close();
  close_file(&pool_file_);
}

// Unmap and close the readers file; this also releases its locks.
void ReadersFile::close() {
  if (at_ != nullptr) munmap(at_, kFileBytes);
  at_ = nullptr;
  close_file(&file_);
}

void ReadersFile::cut_off() {
  forked_.store(true, std::memory_order_relaxed);
  close_file(&file_);
  close_file(&pool_file_);
  if (at_ == nullptr) return;
  void* const own =
      mmap(at_, kFileBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (own == MAP_FAILED) std::abort();  // otherwise it would write to its parent's pins
}

Status ReadersFile::map() {
  void* at = mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (at == MAP_FAILED) return errno_status(Code::kIoError, "map " + path_, errno);
  at_ = static_cast<std::byte*>(at);
  return {};
}

Status ReadersFile::open_existing() {
  close();
  file_ = ::open(path_.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (file_ < 0) {
    const int error = errno;
    return errno_status(code_of(error),
                        "open " + path_ + " for writing (it holds the pins of readers)", error);
  }
  struct stat about = {};
  if (fstat(file_, &about) != 0) return errno_status(Code::kIoError, "stat " + path_, errno);
  const std::string remedy = serves_ ? "; end the processes that read the pool, then try again"
                                     : "; start a server on the pool, which creates the file again";
  const bool long_enough = static_cast<size_t>(about.st_size) >= kFileBytes;
  if (long_enough) PETPS_RETURN_IF_ERROR(map());
  if (!long_enough || header().signature.load(std::memory_order_acquire) != kSignature) {
    return Status(Code::kDataLoss,
                  path_ + " is not a readers file, or its creation was interrupted" + remedy);
  }
  if (header().format_version != kFormatVersion || header().records != kMaxOutsideReaders) {
    return Status(Code::kUnimplemented,
                  path_ + " has format version " + std::to_string(header().format_version) +
                      ", this build has " + std::to_string(kFormatVersion) + remedy);
  }
  return {};
}

Status ReadersFile::belongs_to(const Uuid& pool) const {
  if (!is_same_file(pool_file_, pool_path_)) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + pool_path_ + "' has been moved or replaced: open it again");
  }
  if (std::equal(pool.begin(), pool.end(), header().pool)) return {};
  return Status(Code::kFailedPrecondition,
                path_ +
                    " belongs to another pool; start a server on this one, which creates the file "
                    "again");
}

// Create the file; no process reads the pool. Allocate all of it, so that a full disk is an error
// here and not a SIGBUS later.
Status ReadersFile::create(const Uuid& pool) {
  unlink(path_.c_str());
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode);
  if (file_ < 0) return errno_status(code_of(errno), "create " + path_, errno);
  const int error = posix_fallocate(file_, 0, kFileBytes);
  Status status =
      error == 0 ? map() : errno_status(Code::kResourceExhausted, "allocate " + path_, error);
  if (!status.ok()) {
    unlink(path_.c_str());
    close();
    return status;
  }
  header().format_version = kFormatVersion;
  header().records = kMaxOutsideReaders;
  std::copy(pool.begin(), pool.end(), header().pool);
  header().global.store(1, std::memory_order_relaxed);
  header().signature.store(kSignature, std::memory_order_release);
  return {};
}

// Take over the file; some process reads the pool. Fail if its pins are not in this file, because
// then the server must not write to the pool.
Status ReadersFile::take_over(const Uuid& pool) {
  const Status status = open_existing();
  if (status.ok()) PETPS_RETURN_IF_ERROR(belongs_to(pool));
  if (status.ok() && is_locked_elsewhere(file_, kInUse)) return {};
  if (!status.ok() && status.code() != Code::kNotFound) return status;
  return Status(Code::kFailedPrecondition,
                "a process reads the pool, but not through " + path_ +
                    " (the pool was renamed, or the file replaced): end that process, then try "
                    "again");
}

Result<std::unique_ptr<ReadersFile>> ReadersFile::serve(const std::string& pool_path,
                                                        const Uuid& pool) {
  const int pool_file = ::open(pool_path.c_str(), O_RDWR | O_CLOEXEC);
  if (pool_file < 0) return errno_status(code_of(errno), "open " + pool_path, errno);
  std::unique_ptr<ReadersFile> served(new ReadersFile(pool_path, pool_file, true));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const Result<bool> alone = try_lock(pool_file, F_WRLCK, kPresence);
    if (!alone.ok() || alone.value()) {
      const Status status = alone.ok() ? served->create(pool) : alone.status();
      if (status.ok()) {
        unlock(pool_file, kPresence);
      } else {
        served->refused_ = status.message();  // keep the lock: it keeps readers out
      }
      return served;
    }
    if (is_lock_of_all_bytes(pool_file, kPresence)) {
      served->refused_ =
          "its file system (NFS) makes the writer's lock of the pool a lock of all bytes, which "
          "shuts out the locks of readers";
      return served;
    }
    const Status status = served->take_over(pool);
    if (status.ok()) return served;
    // A reader that is being refused releases its lock in a moment: retry.
    if (std::chrono::steady_clock::now() > deadline) return status;
    std::this_thread::sleep_for(kPause);
  }
}

Result<std::unique_ptr<ReadersFile>> ReadersFile::join(const std::string& pool_path) {
  const int pool_file = ::open(pool_path.c_str(), O_RDONLY | O_CLOEXEC);
  if (pool_file < 0) return errno_status(code_of(errno), "open " + pool_path, errno);
  std::unique_ptr<ReadersFile> joined(new ReadersFile(pool_path, pool_file, false));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const Result<bool> present = try_lock(pool_file, F_RDLCK, kPresence);
    if (!present.ok()) return present.status();
    if (present.value()) break;
    if (std::chrono::steady_clock::now() > deadline) {
      return Status(Code::kFailedPrecondition,
                    "the server that has " + pool_path +
                        " open keeps readers out, because it could not create " + joined->path_ +
                        " (petps status shows the reason): pull through the server");
    }
    std::this_thread::sleep_for(kPause);
  }
  // From here on no server replaces the file.
  const Status status = joined->open_existing();
  if (status.code() == Code::kNotFound) {
    return Status(Code::kFailedPrecondition,
                  joined->path_ + " does not exist: start a server on the pool, which creates it");
  }
  PETPS_RETURN_IF_ERROR(status);
  if (!lock_now(joined->file_, F_RDLCK, kInUse))
    return Status(Code::kIoError, joined->path_ + " cannot be locked");
  return joined;
}

Places* ReadersFile::claim() {
  for (size_t i = 0; i < kMaxOutsideReaders; ++i) {
    if (held_[i] || !lock_now(file_, F_WRLCK, kFirstRecord + static_cast<off_t>(i))) continue;
    held_[i] = true;
    Places& places = record(i);
    // Any epochs here are those of a dead process: its lock is free, and it reads no more.
    for (base::Atomic<uint64_t>& epoch : places.epochs) epoch.store(0, std::memory_order_relaxed);
    places.window.store(0, std::memory_order_relaxed);
    uint64_t used = header().used.load(std::memory_order_relaxed);
    // The fence of the first pin makes this visible to scans, like the window.
    while (used < i + 1 && !header().used.compare_exchange_weak(used, i + 1)) {
    }
    return &places;
  }
  return nullptr;
}

uint64_t ReadersFile::oldest() const {
  uint64_t oldest = std::numeric_limits<uint64_t>::max();
  if (at_ == nullptr) return oldest;
  const size_t used = used_records();
  for (size_t i = 0; i < used; ++i) {
    const Places& places = record(i);
    const size_t window = std::min(places.window.load(std::memory_order_relaxed), kPinsPerReader);
    for (size_t place = 0; place < window; ++place) {
      // acquire: pairs with Pin::drop, as in Domain::oldest_locked.
      const uint64_t epoch = places.epochs[place].load(std::memory_order_acquire);
      if (epoch != 0) oldest = std::min(oldest, epoch);
    }
  }
  return oldest;
}

void ReadersFile::drop_dead() {
  if (at_ == nullptr) return;
  const size_t used = used_records();
  for (size_t i = 0; i < used; ++i) {
    const off_t byte = kFirstRecord + static_cast<off_t>(i);
    Places& places = record(i);
    if (places.window.load(std::memory_order_relaxed) == 0) continue;
    // A process that has the lock lives. If this thread gets the lock, the owner is dead, and no
    // process can claim the record until the unlock below.
    if (!lock_now(file_, F_WRLCK, byte)) continue;
    for (base::Atomic<uint64_t>& epoch : places.epochs) epoch.store(0, std::memory_order_release);
    places.window.store(0, std::memory_order_relaxed);
    unlock(file_, byte);
  }
}

void ReadersFile::remove() {
  if (at_ == nullptr || !lock_now(pool_file_, F_WRLCK, kPresence)) return;
  if (is_same_file(file_, path_)) unlink(path_.c_str());
}

}  // namespace petps::epoch
