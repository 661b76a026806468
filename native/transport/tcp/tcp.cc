#include "transport/tcp/tcp.h"

#include "transport/tcp/acceptor.h"
#include "transport/tcp/endpoint.h"

namespace petps::transport {

namespace {

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(const TcpOptions& options)
      : options_(options), acceptor_(options_, places_, endpoints_) {}

  base::Status open() {
    for (size_t i = 0; i < options_.endpoints; ++i) {
      endpoints_.push_back(std::make_unique<TcpEndpoint>(options_));
      PETPS_RETURN_IF_ERROR(endpoints_.back()->open());
    }
    return acceptor_.listen();
  }

  size_t endpoints() const override { return endpoints_.size(); }
  Endpoint& endpoint(size_t worker) override { return *endpoints_[worker]; }
  base::Status start() override { return acceptor_.start(); }
  void stop_accepting() override { acceptor_.stop(); }
  void end() override {
    for (const auto& endpoint : endpoints_) endpoint->end();
  }
  uint16_t port() const override { return acceptor_.port(); }
  uint64_t refused() const override {
    uint64_t refused = acceptor_.refused();
    for (const auto& endpoint : endpoints_) refused += endpoint->refused();
    return refused;
  }
  std::vector<std::string> refusals() const override { return acceptor_.refusals(); }
  Handshakes handshakes() const override { return acceptor_.handshakes(); }
  const char* name() const override { return "tcp"; }

 private:
  const TcpOptions options_;
  Places places_;  // outlives the connections
  std::vector<std::unique_ptr<TcpEndpoint>> endpoints_;
  Acceptor acceptor_;  // last: its thread stops before the endpoints are destroyed
};

}  // namespace

base::Result<std::unique_ptr<Transport>> make_tcp(const TcpOptions& options) {
  if (options.endpoints == 0)
    return base::Status(base::Code::kInvalidArgument, "tcp needs at least one endpoint");
  auto tcp = std::make_unique<TcpTransport>(options);
  base::Status status = tcp->open();
  if (!status.ok()) return status;
  return std::unique_ptr<Transport>(std::move(tcp));
}

}  // namespace petps::transport
