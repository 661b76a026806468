#include "media/bus_error.h"

#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace petps::media {

// Reused and never freed, because the handler may be reading it. begin is 0 while it is unused.
struct MappedRange {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<int> file{-1};
  std::string path;
  MappedRange* next = nullptr;
};

namespace {

std::atomic<MappedRange*> g_first{nullptr};
std::mutex g_adding;  // guards registration; the handler takes no lock

}  // namespace

Mapped::Mapped(const void* at, size_t bytes, int file, const std::string& path) {
  const std::lock_guard lock(g_adding);
  range_ = g_first.load(std::memory_order_relaxed);
  while (range_ != nullptr && range_->begin.load(std::memory_order_relaxed) != 0)
    range_ = range_->next;
  const bool is_new = range_ == nullptr;
  if (is_new) range_ = new MappedRange();
  const auto begin = reinterpret_cast<uintptr_t>(at);
  range_->path = path;
  range_->file.store(file, std::memory_order_relaxed);
  range_->end.store(begin + bytes, std::memory_order_relaxed);
  // Publishes the fields above. A thread touches the range only after this constructor, so a
  // handler that runs for such an address sees all of them.
  range_->begin.store(begin, std::memory_order_release);
  if (!is_new) return;
  range_->next = g_first.load(std::memory_order_relaxed);
  g_first.store(range_, std::memory_order_release);
}

Mapped::~Mapped() {
  const std::lock_guard lock(g_adding);
  range_->begin.store(0, std::memory_order_release);
}

namespace {

struct sigaction g_previous = {};

// Text that is built without the heap or stdio: a signal handler must use neither.
class Line {
 public:
  Line& add(const char* text) {
    while (*text != '\0' && used_ < text_.size()) text_[used_++] = *text++;
    return *this;
  }
  Line& add(uint64_t number) {
    std::array<char, 20> digits;
    size_t count = 0;
    do {
      digits[count++] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    while (count > 0 && used_ < text_.size()) text_[used_++] = digits[--count];
    return *this;
  }
  void write() const {
    for (size_t done = 0; done < used_;) {
      const ssize_t wrote = ::write(STDERR_FILENO, text_.data() + done, used_ - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return;
      done += static_cast<size_t>(wrote);
    }
  }

 private:
  std::array<char, 6144> text_;  // a path has up to 4,096 bytes
  size_t used_ = 0;
};

// Add what the kernel still knows about the file; fstat and fstatfs are plain system calls.
void add_cause(Line& line, int file, uint64_t offset, int code) {
  if (code == BUS_MCEERR_AR || code == BUS_MCEERR_AO) {
    line.add("the memory there is damaged (a poisoned line)");
    return;
  }
  struct stat about = {};
  if (::fstat(file, &about) != 0) {
    line.add("its file system does not answer (errno ").add(static_cast<uint64_t>(errno)).add(")");
    return;
  }
  const auto bytes = static_cast<uint64_t>(about.st_size);
  if (S_ISREG(about.st_mode) && offset >= bytes) {
    line.add("the file has only ").add(bytes).add(" bytes: it was truncated while it was open");
    return;
  }
  struct statfs room = {};
  if (::fstatfs(file, &room) == 0 && room.f_blocks > 0 &&
      room.f_bavail * room.f_bsize < (1 << 20)) {
    line.add(
        "its disk is full and the page has no block of its own (a reflink or a snapshot that "
        "was made while the pool was open, or a file system that copies on write)");
    return;
  }
  line.add(
      "its disk or its file system failed (an unreadable block, a lost mount, a file system "
      "that was shut down)");
}

[[noreturn]] void stop(const MappedRange& range, uint64_t offset, int code) {
  Line line;
  line.add("petps: SIGBUS at byte ").add(offset).add(" of the pool ").add(range.path.c_str());
  line.add(": ");
  add_cause(line, range.file.load(std::memory_order_relaxed), offset, code);
  line.add(". ").add(kLostPoolRemedy).add(". The process stops with exit status ");
  line.add(static_cast<uint64_t>(kLostPoolExitStatus)).add("\n");
  line.write();
  ::_exit(kLostPoolExitStatus);
}

void pass_on(int number, siginfo_t* about, void* context) {
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(number, about, context);
    return;
  }
  if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(number);
    return;
  }
  // A fault happens again on return, and a signal that was sent is raised again here. Either one
  // now ends the process as it would have without this handler.
  ::signal(number, SIG_DFL);
  if (about->si_code <= 0) ::raise(number);
}

void on_bus_error(int number, siginfo_t* about, void* context) {
  const int kept_errno = errno;
  const auto at = reinterpret_cast<uintptr_t>(about->si_addr);
  const bool is_fault = about->si_code > 0;  // a signal sent by kill() has no address
  MappedRange* range = is_fault ? g_first.load(std::memory_order_acquire) : nullptr;
  for (; range != nullptr; range = range->next) {
    const uintptr_t begin = range->begin.load(std::memory_order_acquire);
    if (begin == 0 || at < begin || at >= range->end.load(std::memory_order_relaxed)) continue;
    // Check that the entry was not reused for another pool between the two loads.
    if (range->begin.load(std::memory_order_acquire) == begin)
      stop(*range, at - begin, about->si_code);
  }
  errno = kept_errno;
  pass_on(number, about, context);
}

}  // namespace

void stop_on_lost_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&ours.sa_mask);
    ::sigaction(SIGBUS, &ours, &g_previous);
  });
}

}  // namespace petps::media
