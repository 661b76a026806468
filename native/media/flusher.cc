#include <cstring>

#include "base/crc32c.h"
#include "media/media.h"
#include "media/writeback.h"

namespace petps::media {
namespace {

// Measured (DURABILITY.md): copies of whole lines gain from two lines on; other copies pay for
// the partial lines at both ends and gain from four lines on. Shorter objects (entries, headers,
// 64-byte records) are better kept in the cache, because they are read again.
constexpr size_t kStreamWholeLinesBytes = 128;
constexpr size_t kStreamBytes = 256;

size_t bytes_to_line_boundary(const std::byte* at) {
  return (kLineBytes - reinterpret_cast<uintptr_t>(at) % kLineBytes) % kLineBytes;
}

bool is_worth_streaming(const std::byte* to, size_t bytes) {
  const bool whole_lines = (reinterpret_cast<uintptr_t>(to) | bytes) % kLineBytes == 0;
  return bytes >= (whole_lines ? kStreamWholeLinesBytes : kStreamBytes);
}

// Sanitizers cannot see streamed stores, so their builds use the plain copy.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr base::StreamWithCrc32c g_stream_with_crc32c = nullptr;
#else
const base::StreamWithCrc32c g_stream_with_crc32c = base::stream_with_crc32c();
#endif

}  // namespace

Flusher::Flusher(Media& media)
    : media_(&media), stream_(media.observer_ == nullptr ? g_stream_with_crc32c : nullptr) {}

void Flusher::write_back(const void* at, size_t bytes, Site site) {
  if (bytes == 0) return;
  if (media_->kind_ == Kind::kDax) write_back_lines(at, bytes);
  if (media_->observer_ != nullptr) media_->observer_->on_flush(at, bytes, site);
}

void Flusher::copy(void* to, const void* from, size_t bytes, Site site) {
  if (bytes == 0) return;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  if (!is_worth_streaming(target, bytes)) {
    std::memcpy(target, source, bytes);
    media_->report_store(target, bytes);
    flush(target, bytes, site);
    return;
  }
  // Partial lines at both ends go through the cache: streaming part of a line costs a
  // read-modify-write of memory.
  const size_t head = bytes_to_line_boundary(target);
  const size_t lines = (bytes - head) / kLineBytes;
  const size_t tail = bytes - head - lines * kLineBytes;
  std::memcpy(target, source, head);
  stream_lines(target + head, source + head, lines);
  std::memcpy(target + bytes - tail, source + bytes - tail, tail);
  if (media_->kind_ == Kind::kDax) {  // streamed lines need only the fence
    write_back_lines(target, head);
    write_back_lines(target + bytes - tail, tail);
  }
  report_stream(target, bytes, site);
}

void Flusher::report_stream(const void* at, size_t bytes, Site site) {
  dirty_ = true;
  if (media_->observer_ != nullptr) [[unlikely]] {
    // This thread sees its own streamed stores in program order, so on_store reads the new bytes.
    media_->observer_->on_store(at, bytes);
    media_->observer_->on_flush(at, bytes, site);
  }
}

void Flusher::copy_16_and_report(void* to, const void* from, Site site) {
  stream_16(to, from);
  report_stream(to, 16, site);
}

uint32_t Flusher::copy_then_crc32c(void* to, const void* from, size_t bytes, Site site) {
  copy(to, from, bytes, site);
  return base::crc32c(from, bytes);
}

base::Status Flusher::drain(Site site) {
  store_fence();
  if (media_->failed()) [[unlikely]]
    return media_->sticky_failure();
  if (media_->observer_ != nullptr) [[unlikely]] {
    base::Status status = media_->observer_->on_drain(site);
    if (!status.ok()) {
      media_->failed_.store(true, std::memory_order_release);
      return status;
    }
  }
  if (dirty_ && media_->kind_ == Kind::kFile && media_->durability_ == Durability::kPower)
    PETPS_RETURN_IF_ERROR(media_->sync_all(site));
  dirty_ = false;
  return base::Status();
}

}  // namespace petps::media
