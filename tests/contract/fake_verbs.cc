#include "fake_verbs.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace petps::transport {

using base::Code;
using base::Result;
using base::Status;

struct FakeChannel final : CompletionChannel {
  FakeChannel() { file = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }
  ~FakeChannel() override { ::close(file); }
  void drain() override {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(file, &count, sizeof(count));
  }
};

struct FakeRegion final : MemoryRegion {
  explicit FakeRegion(FakeFabric& of) : fabric(of) {}
  ~FakeRegion() override {
    const std::lock_guard lock(fabric.mutex_);
    fabric.regions_.erase(local_key);
  }
  FakeFabric& fabric;
};

struct Completion {
  ibv_wc wc;
  uint32_t pair;
  uint64_t frees;  // work requests of the pair that become free when this one is read
};

struct FakeQueue final : CompletionQueue {
  FakeQueue(FakeVerbs& on, FakeChannel& events, uint32_t size)
      : device(on), channel(events), capacity(size) {}
  int poll(std::span<ibv_wc> out) override;
  int arm() override {
    const std::lock_guard lock(device.fabric_.mutex_);
    armed = true;
    return 0;
  }
  void add(const Completion& completion) {  // mutex held
    if (waiting.size() == capacity) ++device.fabric_.overflows_;
    waiting.push_back(completion);
    if (!std::exchange(armed, false)) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(channel.file, &one, sizeof(one));
  }
  FakeVerbs& device;
  FakeChannel& channel;
  const size_t capacity;
  std::deque<Completion> waiting;
  bool armed = false;
};

struct Request {
  // Copy the content, as the device reads it now.
  void copy_to(uint64_t to) const {
    if (!inlined.empty()) {
      std::memcpy(reinterpret_cast<void*>(to), inlined.data(), inlined.size());
      return;
    }
    for (const ibv_sge& piece : pieces) {
      std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(piece.addr),
                  piece.length);
      to += piece.length;
    }
  }
  uint32_t bytes() const {
    uint32_t sum = 0;
    for (const ibv_sge& piece : pieces) sum += piece.length;
    return sum;
  }
  ibv_send_wr wr;
  std::vector<ibv_sge> pieces;
  std::vector<std::byte> inlined;  // the content of an inline request, read at the post
  uint64_t number;
};

struct FakePair final : QueuePair {
  FakePair(FakeVerbs& on, FakeQueue& completions) : device(on), queue(completions) {}
  ~FakePair() override {
    {
      const std::lock_guard lock(device.fabric_.mutex_);
      device.fabric_.pairs_.erase(number);
      std::erase_if(queue.waiting, [this](const Completion& c) { return c.pair == number; });
    }
    if (device.on_pair_gone) device.on_pair_gone();
  }
  int modify(ibv_qp_attr& attributes, int mask) override;
  int post_send(ibv_send_wr* chain) override;
  int post_receive(ibv_recv_wr* chain) override;

  // The caller of every function below must hold the fabric's mutex.
  int check(const ibv_send_wr& wr) const;
  void run();        // runs what may run now
  bool run_front();  // false: it waits for a receive
  void run_to_signaled();
  ibv_wc_status execute(const Request& request, FakePair& peer);
  ibv_wc_status write(const Request& request, FakePair& peer);
  static bool covers(const FakeFabric::Registered& region, uint64_t address, uint64_t bytes);
  bool readable(const ibv_sge& piece) const;
  void finish_front(ibv_wc_status status);
  void break_down(ibv_wc_status status);  // the front fails with `status`, the others flush
  void complete_receive(const Request& request, uint32_t bytes);

  FakeVerbs& device;
  FakeQueue& queue;
  ibv_qp_state state = IBV_QPS_RESET;
  uint32_t peer_number = 0;
  bool writable = false;
  std::deque<Request> requests;
  std::deque<ibv_recv_wr> receives;
  std::deque<ibv_sge> receive_pieces;
  uint64_t posted = 0;
  uint64_t freed = 0;
  bool counted_not_ready = false;
};

int FakeQueue::poll(std::span<ibv_wc> out) {
  const std::lock_guard lock(device.fabric_.mutex_);
  if (device.work_ == Work::kShuffled) {
    std::vector<uint32_t> order = device.pairs_;
    std::shuffle(order.begin(), order.end(), device.random_);
    for (const uint32_t number : order) {
      FakePair* pair = device.fabric_.pair(number);
      if (pair != nullptr && device.random_() % 2 == 0) pair->run_to_signaled();
    }
  }
  size_t n = 0;
  for (; n < out.size() && !waiting.empty(); ++n) {
    out[n] = waiting.front().wc;
    if (FakePair* pair = device.fabric_.pair(waiting.front().pair))
      pair->freed = std::max(pair->freed, waiting.front().frees);
    waiting.pop_front();
  }
  return static_cast<int>(n);
}

int FakePair::modify(ibv_qp_attr& attributes, int mask) {
  const std::lock_guard lock(device.fabric_.mutex_);
  const ibv_qp_state to = attributes.qp_state;
  const bool next = (state == IBV_QPS_RESET && to == IBV_QPS_INIT) ||
                    (state == IBV_QPS_INIT && to == IBV_QPS_RTR) ||
                    (state == IBV_QPS_RTR && to == IBV_QPS_RTS);
  if ((mask & IBV_QP_STATE) == 0 || !next) return EINVAL;
  if (to == IBV_QPS_INIT) writable = (attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0;
  if (to == IBV_QPS_RTR) peer_number = attributes.dest_qp_num;
  state = to;
  return 0;
}

int FakePair::check(const ibv_send_wr& wr) const {
  if (posted - freed >= cap.max_send_wr) return ENOMEM;
  if (wr.num_sge > static_cast<int>(cap.max_send_sge)) return EINVAL;
  size_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) bytes += wr.sg_list[i].length;
  if ((wr.send_flags & IBV_SEND_INLINE) != 0 && bytes > cap.max_inline_data) return EINVAL;
  return 0;
}

int FakePair::post_send(ibv_send_wr* chain) {
  const std::lock_guard lock(device.fabric_.mutex_);
  if (state != IBV_QPS_RTS && state != IBV_QPS_ERR) return EINVAL;
  ++device.fabric_.doorbells_;
  int error = 0;
  for (ibv_send_wr* wr = chain; wr != nullptr; wr = wr->next) {
    error = check(*wr);
    if (error != 0) break;
    Request request{*wr, {}, {}, ++posted};
    request.pieces.assign(wr->sg_list, wr->sg_list + wr->num_sge);
    if ((wr->send_flags & IBV_SEND_INLINE) != 0) {
      for (const ibv_sge& piece : request.pieces) {
        const auto* at = reinterpret_cast<const std::byte*>(piece.addr);
        request.inlined.insert(request.inlined.end(), at, at + piece.length);
      }
    }
    requests.push_back(std::move(request));
  }
  if (state == IBV_QPS_ERR) {
    while (!requests.empty()) finish_front(IBV_WC_WR_FLUSH_ERR);
  } else if (device.work_ == Work::kAtOnce) {
    run();
  }
  return error;
}

int FakePair::post_receive(ibv_recv_wr* chain) {
  const std::lock_guard lock(device.fabric_.mutex_);
  if (state == IBV_QPS_RESET) return EINVAL;
  if (receives.size() == cap.max_recv_wr) return ENOMEM;
  receives.push_back(*chain);
  receive_pieces.push_back(chain->num_sge > 0 ? chain->sg_list[0] : ibv_sge{});
  FakePair* peer = device.fabric_.pair(peer_number);
  // A sender that found no receive tries again.
  if (peer != nullptr && peer->counted_not_ready) peer->run();
  return 0;
}

void FakePair::run() {
  while (!requests.empty() && state == IBV_QPS_RTS && run_front()) {
  }
}

void FakePair::run_to_signaled() {
  bool signaled = false;
  while (!requests.empty() && state == IBV_QPS_RTS && !signaled) {
    signaled = (requests.front().wr.send_flags & IBV_SEND_SIGNALED) != 0;
    if (!run_front()) return;
  }
}

bool FakePair::run_front() {
  FakePair* const other = device.fabric_.pair(peer_number);
  if (other == nullptr || other->state < IBV_QPS_RTR || other->state > IBV_QPS_RTS) {
    break_down(IBV_WC_RETRY_EXC_ERR);
    return true;
  }
  FakePair& peer = *other;
  const Request& request = requests.front();
  if (request.wr.opcode != IBV_WR_RDMA_WRITE && peer.receives.empty()) {
    if (!counted_not_ready) ++device.fabric_.not_ready_;
    counted_not_ready = true;
    return false;
  }
  counted_not_ready = false;
  const ibv_wc_status status = execute(request, peer);
  if (status == IBV_WC_SUCCESS) {
    finish_front(status);
  } else {
    if (status != IBV_WC_LOC_PROT_ERR) peer.break_down(IBV_WC_WR_FLUSH_ERR);
    break_down(status);
  }
  return true;
}

bool FakePair::covers(const FakeFabric::Registered& region, uint64_t address, uint64_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(region.begin);
  return address >= begin && address + bytes <= begin + region.bytes;
}

bool FakePair::readable(const ibv_sge& piece) const {
  const auto region = device.fabric_.regions_.find(piece.lkey);
  return region != device.fabric_.regions_.end() && region->second.device == &device &&
         covers(region->second, piece.addr, piece.length);
}

ibv_wc_status FakePair::write(const Request& request, FakePair& peer) {
  ++device.fabric_.writes_;
  const uint64_t to = request.wr.wr.rdma.remote_addr;
  const auto region = device.fabric_.regions_.find(request.wr.wr.rdma.rkey);
  if (!request.pieces.empty()) {
    if (!peer.writable || region == device.fabric_.regions_.end() ||
        (region->second.access & IBV_ACCESS_REMOTE_WRITE) == 0 ||
        !covers(region->second, to, request.bytes())) {
      return IBV_WC_REM_ACCESS_ERR;
    }
  }
  request.copy_to(to);
  return IBV_WC_SUCCESS;
}

ibv_wc_status FakePair::execute(const Request& request, FakePair& peer) {
  if ((request.wr.send_flags & IBV_SEND_INLINE) == 0) {
    for (const ibv_sge& piece : request.pieces) {
      if (!readable(piece)) return IBV_WC_LOC_PROT_ERR;
    }
  }
  if (request.wr.opcode == IBV_WR_RDMA_WRITE) return write(request, peer);
  if (request.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
    const ibv_wc_status status = write(request, peer);
    if (status == IBV_WC_SUCCESS) peer.complete_receive(request, 0);
    return status;
  }
  const ibv_sge into = peer.receive_pieces.front();
  const uint32_t bytes = request.bytes();
  if (bytes > into.length || !(bytes == 0 || peer.readable(into))) return IBV_WC_REM_INV_REQ_ERR;
  request.copy_to(into.addr);
  peer.complete_receive(request, bytes);
  return IBV_WC_SUCCESS;
}

void FakePair::complete_receive(const Request& request, uint32_t bytes) {
  ibv_wc wc{};
  wc.wr_id = receives.front().wr_id;
  receives.pop_front();
  receive_pieces.pop_front();
  wc.status = IBV_WC_SUCCESS;
  wc.opcode =
      request.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
  wc.byte_len = bytes;
  if (request.wr.opcode != IBV_WR_SEND) {
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.imm_data = request.wr.imm_data;
  }
  queue.add({wc, number, 0});
}

void FakePair::finish_front(ibv_wc_status status) {
  const Request& request = requests.front();
  if (status != IBV_WC_SUCCESS || (request.wr.send_flags & IBV_SEND_SIGNALED) != 0) {
    ibv_wc wc{};
    wc.wr_id = request.wr.wr_id;
    wc.status = status;
    wc.opcode = IBV_WC_RDMA_WRITE;
    queue.add({wc, number, request.number});
  }
  requests.pop_front();
}

void FakePair::break_down(ibv_wc_status status) {
  state = IBV_QPS_ERR;
  while (!requests.empty()) {
    finish_front(status);
    status = IBV_WC_WR_FLUSH_ERR;
  }
  for (; !receives.empty(); receives.pop_front()) {
    ibv_wc wc{};
    wc.wr_id = receives.front().wr_id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    queue.add({wc, number, 0});
  }
  receive_pieces.clear();
}

FakeVerbs::FakeVerbs(FakeFabric& fabric, const FakeLimits& limits)
    : fabric_(fabric), limits_(limits) {
  device_.name = "fake";
  device_.sge_max = limits.sge_max;
  device_.work_requests_max = limits.work_requests_max;
  device_.completions_max = limits.completions_max;
  device_.region_bytes_max = uint64_t{1} << 48;
  device_.mtu = IBV_MTU_4096;
  device_.ethernet = true;
}

Result<std::unique_ptr<MemoryRegion>> FakeVerbs::register_memory(const void* address, size_t bytes,
                                                                 int access) {
  if (const int error = refusal_; error != 0)
    return base::errno_status(Code::kFailedPrecondition, "fake: this memory is refused", error);
  const std::lock_guard lock(fabric_.mutex_);
  auto region = std::make_unique<FakeRegion>(fabric_);
  region->local_key = region->remote_key = fabric_.next_key_++;
  fabric_.regions_[region->local_key] = {static_cast<const std::byte*>(address), bytes, access,
                                         this};
  return std::unique_ptr<MemoryRegion>(std::move(region));
}

Result<std::unique_ptr<CompletionChannel>> FakeVerbs::make_channel() {
  return std::unique_ptr<CompletionChannel>(std::make_unique<FakeChannel>());
}

Result<std::unique_ptr<CompletionQueue>> FakeVerbs::make_queue(uint32_t completions,
                                                               CompletionChannel& channel) {
  if (completions > limits_.completions_max)
    return Status(Code::kUnavailable, "fake: the device has fewer completions");
  return std::unique_ptr<CompletionQueue>(
      std::make_unique<FakeQueue>(*this, static_cast<FakeChannel&>(channel), completions));
}

Result<std::unique_ptr<QueuePair>> FakeVerbs::make_pair(const ibv_qp_cap& wanted,
                                                        CompletionQueue& queue) {
  if (wanted.max_send_sge > limits_.sge_max || wanted.max_recv_sge > limits_.sge_max ||
      wanted.max_send_wr > limits_.work_requests_max ||
      wanted.max_recv_wr > limits_.work_requests_max) {
    return Status(Code::kUnavailable, "fake: more than the device's limits");
  }
  auto pair = std::make_unique<FakePair>(*this, static_cast<FakeQueue&>(queue));
  pair->cap = wanted;
  pair->cap.max_inline_data = std::min(wanted.max_inline_data, limits_.inline_max);
  const std::lock_guard lock(fabric_.mutex_);
  pair->number = fabric_.next_pair_++;
  fabric_.pairs_[pair->number] = pair.get();
  pairs_.push_back(pair->number);
  return std::unique_ptr<QueuePair>(std::move(pair));
}

void FakeVerbs::set_work(Work work, uint64_t seed) {
  const std::lock_guard lock(fabric_.mutex_);
  work_ = work;
  random_.seed(seed);
}

FakePair* FakeFabric::pair(uint32_t number) const {
  const auto entry = pairs_.find(number);
  return entry == pairs_.end() ? nullptr : entry->second;
}

bool FakeVerbs::has_pair(size_t pair) const {
  const std::lock_guard lock(fabric_.mutex_);
  return pair < pairs_.size() && fabric_.pair(pairs_[pair]) != nullptr;
}

size_t FakeVerbs::held() const {
  const std::lock_guard lock(fabric_.mutex_);
  size_t n = 0;
  for (const uint32_t number : pairs_) {
    const FakePair* pair = fabric_.pair(number);
    if (pair == nullptr) continue;
    const auto& requests = pair->requests;
    n += static_cast<size_t>(std::count_if(requests.begin(), requests.end(), [](const Request& r) {
      return (r.wr.send_flags & IBV_SEND_SIGNALED) != 0;
    }));
  }
  return n;
}

bool FakeVerbs::run_one(size_t pair) {
  const std::lock_guard lock(fabric_.mutex_);
  FakePair* chosen = fabric_.pair(pairs_.at(pair));
  if (chosen == nullptr || chosen->requests.empty()) return false;
  chosen->run_to_signaled();
  return true;
}

void FakeVerbs::run_all() {
  const std::lock_guard lock(fabric_.mutex_);
  for (const uint32_t number : pairs_) {
    if (FakePair* pair = fabric_.pair(number)) pair->run();
  }
}

void FakeVerbs::fail(size_t pair, ibv_wc_status status) {
  const std::lock_guard lock(fabric_.mutex_);
  if (FakePair* chosen = fabric_.pair(pairs_.at(pair))) chosen->break_down(status);
}

}  // namespace petps::transport
