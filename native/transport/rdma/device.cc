// The real device, through libibverbs.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "transport/rdma/verbs.h"

namespace petps::transport {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr uint8_t kPort = 1;

struct RealRegion final : MemoryRegion {
  ~RealRegion() override { ibv_dereg_mr(region); }
  ibv_mr* region = nullptr;
};

struct RealChannel final : CompletionChannel {
  ~RealChannel() override { ibv_destroy_comp_channel(channel); }
  void drain() override {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    while (ibv_get_cq_event(channel, &queue, &context) == 0) ibv_ack_cq_events(queue, 1);
  }
  ibv_comp_channel* channel = nullptr;
};

struct RealQueue final : CompletionQueue {
  ~RealQueue() override { ibv_destroy_cq(queue); }
  int poll(std::span<ibv_wc> out) override {
    return ibv_poll_cq(queue, static_cast<int>(out.size()), out.data());
  }
  int arm() override { return ibv_req_notify_cq(queue, 0); }
  ibv_cq* queue = nullptr;
};

struct RealPair final : QueuePair {
  ~RealPair() override { ibv_destroy_qp(pair); }
  int modify(ibv_qp_attr& attributes, int mask) override {
    return ibv_modify_qp(pair, &attributes, mask);
  }
  int post_send(ibv_send_wr* chain) override {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(pair, chain, &bad);
  }
  int post_receive(ibv_recv_wr* chain) override {
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(pair, chain, &bad);
  }
  ibv_qp* pair = nullptr;
};

class RealVerbs final : public Verbs {
 public:
  ~RealVerbs() override {
    if (domain_ != nullptr) ibv_dealloc_pd(domain_);
    if (context_ != nullptr) ibv_close_device(context_);
  }

  // Open `device`. Return false if it has no active port. Errors: kUnavailable (a call failed).
  Result<bool> open(ibv_device* device) {
    device_.name = ibv_get_device_name(device);
    context_ = ibv_open_device(device);
    if (context_ == nullptr) return failure("cannot be opened");
    ibv_device_attr attributes{};
    if (ibv_query_device(context_, &attributes) != 0) return failure("cannot report its limits");
    device_.sge_max = static_cast<uint32_t>(std::max(attributes.max_sge, 1));
    device_.work_requests_max = static_cast<uint32_t>(std::max(attributes.max_qp_wr, 1));
    device_.completions_max = static_cast<uint32_t>(std::max(attributes.max_cqe, 1));
    device_.region_bytes_max = attributes.max_mr_size;
    ibv_port_attr port{};
    if (ibv_query_port(context_, kPort, &port) != 0) return failure("cannot report its port");
    if (port.state != IBV_PORT_ACTIVE) return false;
    device_.lid = port.lid;
    device_.mtu = static_cast<uint8_t>(port.active_mtu);
    device_.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (device_.ethernet && !choose_gid(port.gid_tbl_len)) return false;
    domain_ = ibv_alloc_pd(context_);
    if (domain_ == nullptr) return failure("cannot allocate a protection domain");
    return true;
  }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const void* address, size_t bytes,
                                                        int access) override {
    // Without an access flag the device may only read; libibverbs has no const form.
    ibv_mr* region = ibv_reg_mr(domain_, const_cast<void*>(address), bytes, access);
    if (region == nullptr) {
      const int error = errno;
      if (error == EOPNOTSUPP || error == EFAULT || error == EINVAL) {
        return base::errno_status(
            Code::kFailedPrecondition,
            "rdma device " + device_.name +
                " cannot keep this memory registered, because a file's pages may move: use a "
                "device-DAX or anonymous pool, or serve without rdma",
            error);
      }
      return base::errno_status(Code::kResourceExhausted,
                                "rdma device " + device_.name + " cannot register " +
                                    std::to_string(bytes) +
                                    " bytes: raise the locked-memory limit (ulimit -l)",
                                error);
    }
    auto owner = std::make_unique<RealRegion>();
    owner->region = region;
    owner->local_key = region->lkey;
    owner->remote_key = region->rkey;
    return std::unique_ptr<MemoryRegion>(std::move(owner));
  }

  Result<std::unique_ptr<CompletionChannel>> make_channel() override {
    ibv_comp_channel* channel = ibv_create_comp_channel(context_);
    if (channel == nullptr) return failure("cannot create a completion channel");
    auto owner = std::make_unique<RealChannel>();
    owner->channel = channel;
    owner->file = channel->fd;
    if (fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK) != 0)
      return failure("cannot create a completion channel");
    return std::unique_ptr<CompletionChannel>(std::move(owner));
  }

  Result<std::unique_ptr<CompletionQueue>> make_queue(uint32_t completions,
                                                      CompletionChannel& channel) override {
    ibv_cq* queue = ibv_create_cq(context_, static_cast<int>(completions), nullptr,
                                  static_cast<RealChannel&>(channel).channel, 0);
    if (queue == nullptr) return failure("cannot create a completion queue");
    auto owner = std::make_unique<RealQueue>();
    owner->queue = queue;
    return std::unique_ptr<CompletionQueue>(std::move(owner));
  }

  Result<std::unique_ptr<QueuePair>> make_pair(const ibv_qp_cap& wanted,
                                               CompletionQueue& queue) override {
    ibv_cq* completions = static_cast<RealQueue&>(queue).queue;
    ibv_qp_init_attr init{};
    ibv_qp* pair = nullptr;
    // No device reports its inline limit before a queue pair is made, so halve the request until it
    // succeeds.
    for (uint32_t bytes = wanted.max_inline_data;; bytes /= 2) {
      init = {};
      init.send_cq = init.recv_cq = completions;
      init.qp_type = IBV_QPT_RC;
      init.cap = wanted;
      init.cap.max_inline_data = bytes;
      pair = ibv_create_qp(domain_, &init);
      if (pair != nullptr || bytes == 0) break;
    }
    if (pair == nullptr) return failure("cannot create a queue pair");
    auto owner = std::make_unique<RealPair>();
    owner->pair = pair;
    owner->number = pair->qp_num;
    owner->cap = init.cap;
    return std::unique_ptr<QueuePair>(std::move(owner));
  }

 private:
  Status failure(const char* problem) const {
    return base::errno_status(Code::kUnavailable, "rdma device " + device_.name + " " + problem,
                              errno);
  }

  // Prefer RoCE v2 over IPv4, which routers and soft-RoCE carry; any other gid is better than none.
  bool choose_gid(int entries) {
    int best = -1;
    for (int i = 0; i < std::min(entries, 256); ++i) {
      ibv_gid_entry entry{};
      if (ibv_query_gid_ex(context_, kPort, static_cast<uint32_t>(i), &entry, 0) != 0) continue;
      const uint8_t* raw = entry.gid.raw;
      const bool ipv4 =
          std::all_of(raw, raw + 10, [](uint8_t b) { return b == 0; }) && raw[10] == 0xff;
      const int rank = (entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? 2 : 0) + (ipv4 ? 1 : 0);
      if (rank <= best) continue;
      best = rank;
      device_.gid_index = static_cast<uint8_t>(i);
      std::copy(raw, raw + 16, device_.gid.begin());
    }
    return best >= 0;
  }

  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
};

struct DeviceList {
  ibv_device** devices = ibv_get_device_list(nullptr);
  ~DeviceList() {
    if (devices != nullptr) ibv_free_device_list(devices);
  }
};

}  // namespace

Result<std::unique_ptr<Verbs>> open_verbs(const std::string& device) {
  PETPS_RETURN_IF_ERROR(load_verbs_library());
  const DeviceList list;
  std::string seen;
  Status failure;  // of the first device that could not be opened
  for (size_t i = 0; list.devices != nullptr && list.devices[i] != nullptr; ++i) {
    const std::string name = ibv_get_device_name(list.devices[i]);
    seen += seen.empty() ? name : ", " + name;
    if (!device.empty() && name != device) continue;
    auto verbs = std::make_unique<RealVerbs>();
    auto opened = verbs->open(list.devices[i]);
    if (!opened.ok() && !device.empty()) return opened.status();
    if (!opened.ok()) {
      if (failure.ok()) failure = opened.status();
      continue;
    }
    if (opened.value()) return std::unique_ptr<Verbs>(std::move(verbs));
    if (!device.empty())
      return Status(Code::kFailedPrecondition,
                    "rdma device " + device + " has no active port: bring its link up");
  }
  if (seen.empty()) {
    return Status(Code::kFailedPrecondition,
                  "this machine has no RDMA device: load its driver and rdma-core's libibverbs "
                  "providers, or add soft-RoCE (rdma link add rxe0 type rxe netdev <interface>)");
  }
  if (!failure.ok()) return failure;
  if (!device.empty())
    return Status(Code::kFailedPrecondition,
                  "there is no RDMA device '" + device + "'; this machine has " + seen);
  return Status(Code::kFailedPrecondition,
                "no port of the RDMA devices " + seen + " is active: bring a link up");
}

}  // namespace petps::transport
