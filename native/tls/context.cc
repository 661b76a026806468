#include <openssl/err.h>
#include <sys/stat.h>

#include <utility>

#include "tls/openssl.h"
#include "tls/tls.h"

namespace petps::tls {

using base::Code;
using base::Result;
using base::Status;

namespace {

Result<ContextPointer> load(const ServerFiles& files) {
  if (files.certificate.empty() || files.key.empty()) {
    return Status(Code::kInvalidArgument, std::string("TLS needs a certificate and a key, but ") +
                                              (files.certificate.empty() ? "certificate" : "key") +
                                              " is empty: give the paths of both");
  }
  const bool wants_clients = files.client_certificates != ClientCertificates::kOff;
  if (wants_clients && files.client_ca.empty()) {
    return Status(Code::kInvalidArgument,
                  "client certificates need client_ca, the file of the authorities that issue "
                  "them: give it, or set client_certificates to 'off'");
  }
  auto context = make_context(TLS_server_method());
  if (!context.ok()) return context;
  keep_secrets(context->get());
  PETPS_RETURN_IF_ERROR(use_certificate(context->get(), files.certificate, files.key));
  if (!wants_clients) return context;
  PETPS_RETURN_IF_ERROR(use_authorities(context->get(), files.client_ca, "client_ca"));
  const int required = files.client_certificates == ClientCertificates::kRequired
                           ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT
                           : 0;
  SSL_CTX_set_verify(context->get(), SSL_VERIFY_PEER | required, nullptr);
  return context;
}

Result<ContextPointer> load(const ClientFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    return Status(Code::kInvalidArgument,
                  std::string(files.key.empty() ? "a certificate was given without its key"
                                                : "a key was given without its certificate") +
                      ": give the paths of both, or of neither");
  }
  auto context = make_context(TLS_client_method());
  if (!context.ok()) return context;
  PETPS_RETURN_IF_ERROR(files.ca.empty() ? use_system_authorities(context->get())
                                         : use_authorities(context->get(), files.ca, "ca"));
  if (!files.certificate.empty())
    PETPS_RETURN_IF_ERROR(use_certificate(context->get(), files.certificate, files.key));
  SSL_CTX_set_verify(context->get(), SSL_VERIFY_PEER, nullptr);
  return context;
}

}  // namespace

ServerContext::ServerContext(ServerFiles files) : files_(std::move(files)) {}
ServerContext::~ServerContext() { SSL_CTX_free(context_); }

Result<std::shared_ptr<ServerContext>> ServerContext::open(ServerFiles files) {
  const std::shared_ptr<ServerContext> context(new ServerContext(std::move(files)));
  PETPS_RETURN_IF_ERROR(context->reload());
  return context;
}

Status ServerContext::reload() {
  ServerFiles files;
  {
    const std::lock_guard lock(mutex_);
    files = files_;
  }
  return reload(std::move(files));
}

Status ServerContext::reload(ServerFiles files) {
  auto loaded = load(files);
  if (!loaded.ok()) return loaded.status();
  SSL_CTX* old = loaded->release();
  {
    const std::lock_guard lock(mutex_);
    std::swap(old, context_);
    files_ = std::move(files);
  }
  SSL_CTX_free(old);  // the streams that use it have their own references
  return {};
}

Result<std::unique_ptr<Stream>> ServerContext::accept() const {
  const std::lock_guard lock(mutex_);
  return Stream::make(context_, "", "client_ca '" + files_.client_ca + "'");
}

ClientContext::ClientContext(ClientFiles files) : files_(std::move(files)) {}
ClientContext::~ClientContext() { SSL_CTX_free(context_); }

ClientContext::Stamps ClientContext::stamps() const {
  Stamps stamps;
  const std::string* const paths[] = {&files_.ca, &files_.certificate, &files_.key};
  for (size_t i = 0; i < stamps.size(); ++i) {
    struct stat status {};
    if (paths[i]->empty() || ::stat(paths[i]->c_str(), &status) != 0) continue;
    stamps[i] = {status.st_ino, status.st_size,
                 int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
  }
  return stamps;
}

Result<std::shared_ptr<ClientContext>> ClientContext::open(ClientFiles files) {
  const std::shared_ptr<ClientContext> context(new ClientContext(std::move(files)));
  context->stamps_ = context->stamps();
  auto loaded = load(context->files_);
  if (!loaded.ok()) return loaded.status();
  context->context_ = loaded->release();
  return context;
}

Result<std::unique_ptr<Stream>> ClientContext::connect(const std::string& server_name) {
  if (server_name.empty())
    return Status(Code::kInvalidArgument, "server_name is empty: give a DNS name or an IP address");
  const std::lock_guard lock(mutex_);
  if (const Stamps now = stamps(); now != stamps_) {
    // Files that do not fit together are perhaps being replaced: look at them again next time.
    if (auto loaded = load(files_); loaded.ok()) {
      SSL_CTX_free(std::exchange(context_, loaded->release()));
      stamps_ = now;
    }
  }
  return Stream::make(context_, server_name,
                      files_.ca.empty() ? "the system's authorities" : "ca '" + files_.ca + "'");
}

}  // namespace petps::tls
