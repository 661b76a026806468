// libibverbs, loaded when the first device is opened: a machine without it runs everything else.
//
// The functions below have the names and signatures of <infiniband/verbs.h>, and forward to the
// loaded library. So the inline functions of that header work too, and the linker needs no
// libibverbs. They are hidden: a provider that libibverbs loads finds the library's own functions.
#include <dlfcn.h>

#include <string>

#include "base/check.h"
#include "transport/rdma/verbs.h"

// The header hides these two functions behind macros of the same names.
#undef ibv_query_port
#undef ibv_reg_mr

namespace petps::transport {

namespace {

constexpr const char* kLibrary = "libibverbs.so.1";

struct Library {
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  std::string error = handle == nullptr ? dlerror() : "";
};

const Library& library() {
  static const Library loaded;  // never closed: providers keep threads and devices
  return loaded;
}

// Return the library's function. ASSUMPTIONS: load_verbs_library() returned OK.
template <typename Function>
Function* find(const char* name) {
  void* symbol = dlsym(library().handle, name);
  PETPS_CHECK(symbol != nullptr, name);
  return reinterpret_cast<Function*>(symbol);
}

}  // namespace

base::Status load_verbs_library() {
  if (library().handle != nullptr) return {};
  return base::Status(base::Code::kFailedPrecondition,
                      std::string("RDMA is unavailable: ") + kLibrary + " cannot be loaded (" +
                          library().error +
                          "): install rdma-core's libibverbs1 and ibverbs-providers");
}

}  // namespace petps::transport

extern "C" {

#define PETPS_FORWARD(result, name, parameters, arguments)                         \
  __attribute__((visibility("hidden"))) result name parameters {                   \
    static auto* const forward = petps::transport::find<result parameters>(#name); \
    return forward arguments;                                                      \
  }

PETPS_FORWARD(void, ibv_ack_cq_events, (ibv_cq * queue, unsigned count), (queue, count))
PETPS_FORWARD(ibv_pd*, ibv_alloc_pd, (ibv_context * context), (context))
PETPS_FORWARD(int, ibv_close_device, (ibv_context * context), (context))
PETPS_FORWARD(ibv_comp_channel*, ibv_create_comp_channel, (ibv_context * context), (context))
PETPS_FORWARD(ibv_cq*, ibv_create_cq,
              (ibv_context * context, int entries, void* user, ibv_comp_channel* channel,
               int vector),
              (context, entries, user, channel, vector))
PETPS_FORWARD(ibv_qp*, ibv_create_qp, (ibv_pd * domain, ibv_qp_init_attr* init), (domain, init))
PETPS_FORWARD(int, ibv_dealloc_pd, (ibv_pd * domain), (domain))
PETPS_FORWARD(int, ibv_dereg_mr, (ibv_mr * region), (region))
PETPS_FORWARD(int, ibv_destroy_comp_channel, (ibv_comp_channel * channel), (channel))
PETPS_FORWARD(int, ibv_destroy_cq, (ibv_cq * queue), (queue))
PETPS_FORWARD(int, ibv_destroy_qp, (ibv_qp * pair), (pair))
PETPS_FORWARD(void, ibv_free_device_list, (ibv_device * *list), (list))
PETPS_FORWARD(int, ibv_get_cq_event, (ibv_comp_channel * channel, ibv_cq** queue, void** user),
              (channel, queue, user))
PETPS_FORWARD(ibv_device**, ibv_get_device_list, (int* count), (count))
PETPS_FORWARD(const char*, ibv_get_device_name, (ibv_device * device), (device))
PETPS_FORWARD(int, ibv_modify_qp, (ibv_qp * pair, ibv_qp_attr* attributes, int mask),
              (pair, attributes, mask))
PETPS_FORWARD(ibv_context*, ibv_open_device, (ibv_device * device), (device))
PETPS_FORWARD(int, ibv_query_device, (ibv_context * context, ibv_device_attr* attributes),
              (context, attributes))
PETPS_FORWARD(int, _ibv_query_gid_ex,
              (ibv_context * context, uint32_t port, uint32_t index, ibv_gid_entry* entry,
               uint32_t flags, size_t entry_bytes),
              (context, port, index, entry, flags, entry_bytes))
PETPS_FORWARD(int, ibv_query_port,
              (ibv_context * context, uint8_t port, _compat_ibv_port_attr* attributes),
              (context, port, attributes))
PETPS_FORWARD(ibv_mr*, ibv_reg_mr, (ibv_pd * domain, void* address, size_t bytes, int access),
              (domain, address, bytes, access))
PETPS_FORWARD(ibv_mr*, ibv_reg_mr_iova2,
              (ibv_pd * domain, void* address, size_t bytes, uint64_t offset, unsigned access),
              (domain, address, bytes, offset, access))

#undef PETPS_FORWARD

// Called for a device in memory too (tests), which needs no library.
__attribute__((visibility("hidden"))) const char* ibv_wc_status_str(ibv_wc_status status) {
  if (!petps::transport::load_verbs_library().ok()) return "a failed work request";
  static auto* const forward =
      petps::transport::find<const char*(ibv_wc_status)>("ibv_wc_status_str");
  return forward(status);
}

}  // extern "C"
