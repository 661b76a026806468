// In a file of its own, because only a program that opens a device needs libibverbs.
#include "petps_client/client.h"
#include "transport/rdma/verbs.h"

namespace petps::client {

base::Result<std::shared_ptr<transport::Verbs>> open_rdma(const std::string& device) {
  auto opened = transport::open_verbs(device);
  if (!opened.ok()) return opened.status();
  return std::shared_ptr<transport::Verbs>(std::move(opened.value()));
}

}  // namespace petps::client
