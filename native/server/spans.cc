#include "server/spans.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace petps::server {

namespace {

constexpr double kTwoTo64 = 18446744073709551616.0;

template <size_t N>
void put_random(std::array<uint8_t, N>& id, size_t at, uint64_t number) {
  std::memcpy(id.data() + at, &number, sizeof(number));
}

}  // namespace

SpanRecorder::SpanRecorder(double sample)
    : threshold_(sample >= 1 ? ~uint64_t{0} : static_cast<uint64_t>(sample * kTwoTo64)),
      state_(base::monotonic_ns()) {
  // If it fails, which it does not after the boot, the clock and the address must do.
  uint64_t seed = 0;
  if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != static_cast<ssize_t>(sizeof(seed)))
    seed = reinterpret_cast<uintptr_t>(this) * 0x9E3779B97F4A7C15u;
  state_ ^= seed;
}

// SplitMix64. Ids need no secrecy, only to be distinct.
uint64_t SpanRecorder::random() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void SpanRecorder::begin(const wire::PullRequest& pull, uint64_t start_ns, uint8_t source,
                         Front& front) {
  is_open_ = false;
  const bool has_parent = pull.trace.is_sampled();
  if (front.arrived_ns == 0) {
    // Draw once a request, also if it is retried until its version is applied.
    front.is_sampled = !has_parent && threshold_ != 0 && random() <= threshold_;
    front.looked_ns = start_ns;
    front.arrived_ns = std::min(start_ns, polled_ns_ == 0 ? start_ns : polled_ns_);
  }
  if (!has_parent && !front.is_sampled) return;
  is_open_ = true;
  open_ = {};
  open_.began_ns = front.arrived_ns;
  Span& span = open_.span;
  if (has_parent) {
    span.trace_id = pull.trace.trace_id;
    span.parent_id = pull.trace.span_id;
  } else {
    put_random(span.trace_id, 0, random() | 1);  // not zeros
    put_random(span.trace_id, 8, random());
  }
  put_random(span.span_id, 0, random() | 1);
  span.queued_ns = front.looked_ns - front.arrived_ns;
  span.waited_ns = start_ns - front.looked_ns;
  span.keys = static_cast<uint32_t>(pull.keys.size());
  span.sections = static_cast<uint32_t>(pull.sections.size());
  for (size_t i = 0; i < std::min(pull.sections.size(), kSpanTables); ++i)
    span.tables[i] = pull.sections[i].table;
  span.source = source;
}

void SpanRecorder::begin_lookup() {
  if (is_open_) looking_ns_ = base::monotonic_ns();
}

void SpanRecorder::begin_send(uint64_t version, uint32_t instance, uint64_t rows_found) {
  if (!is_open_) return;
  open_.sending_ns = base::monotonic_ns();
  open_.span.lookup_ns = open_.sending_ns - looking_ns_;
  open_.span.version = version;
  open_.span.instance = instance;
  open_.span.rows_found = static_cast<uint32_t>(rows_found);
}

void SpanRecorder::end(const base::Status& refusal) {
  if (!is_open_) return;
  is_open_ = false;
  open_.span.code = refusal.code();
  if (open_.sending_ns == 0) open_.sending_ns = base::monotonic_ns();
  if (ended_ == ended_spans_.size()) push_ended();
  ended_spans_[ended_++] = open_;
}

// Wall-clock times come from one reading of both clocks, so a jump of the wall clock changes no
// duration.
void SpanRecorder::push_ended() {
  const uint64_t now = base::monotonic_ns();
  const uint64_t wall = base::wall_ns();
  for (size_t i = 0; i < ended_; ++i) {
    Ended& ended = ended_spans_[i];
    ended.span.duration_ns = now - ended.began_ns;
    ended.span.send_ns = now - ended.sending_ns;
    ended.span.start_ns = wall - std::min(wall, ended.span.duration_ns);
    ring_.push(ended.span);
  }
  ended_ = 0;
}

}  // namespace petps::server
