#include "bench/pull/tcp_limit.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "bench/common/loaded_table.h"
#include "bench/common/memory.h"
#include "bench/pull/loopback.h"

namespace petps::bench {
namespace {

constexpr uint32_t kRequestRowsMax = 4096;
constexpr size_t kLine = 64;

// Of OpenSSL, each way: it then sends and receives many records at a time.
constexpr int kTlsBufferBytes = 512 << 10;

// The context of all connections of one side of a process.
SSL_CTX* tls_context(const TlsPaths& paths, bool is_server) {
  static SSL_CTX* contexts[2] = {};
  static std::mutex mutex;  // guards contexts
  const std::lock_guard lock(mutex);
  SSL_CTX*& context = contexts[is_server ? 1 : 0];
  if (context != nullptr) return context;
  context = SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method());
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256");
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kTlsBufferBytes);
  const bool is_good =
      is_server ? SSL_CTX_use_certificate_chain_file(context, paths.certificate.c_str()) == 1 &&
                      SSL_CTX_use_PrivateKey_file(context, paths.key.c_str(), SSL_FILETYPE_PEM) == 1
                : SSL_CTX_load_verify_locations(context, paths.certificate.c_str(), nullptr) == 1;
  if (!is_good) fail("the limit cannot use its certificate");
  if (!is_server) SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  return context;
}

class Session {
 public:
  Session(int socket, const std::byte* rows, uint32_t row_bytes, const TlsPaths& tls)
      : channel_(socket),
        tls_(tls),
        rows_(rows),
        row_bytes_(row_bytes),
        inbox_(2 * (kRequestRowsMax + 1)),
        stage_(kLine + size_t{kRequestRowsMax} * row_bytes) {}

  void run() {
    uint32_t setting[2];
    auto* const bytes = reinterpret_cast<std::byte*>(setting);
    if (!tls_.empty() && !channel_.secure(tls_, true)) return;
    if (channel_.receive(bytes, sizeof setting, true) != sizeof setting) return;
    send_rows_ = setting[0];
    ahead_ = setting[1];
    size_t have = 0;  // bytes in the inbox
    auto* inbox = reinterpret_cast<std::byte*>(inbox_.data());
    for (;;) {
      const ssize_t received = channel_.receive(inbox + have, inbox_.size() * 4 - have);
      if (received <= 0) return;
      have += static_cast<size_t>(received);
      size_t at = 0;
      while (have - at >= 4) {
        const uint32_t* request = inbox_.data() + at / 4;
        if (request[0] > kRequestRowsMax * 4) fail("a request of the limit has too many rows");
        if (have - at < size_t{4} + request[0]) break;
        if (!answer(request + 1, request[0] / 4)) return;
        at += size_t{4} + request[0];
      }
      std::memmove(inbox, inbox + at, have - at);
      have -= at;
    }
  }

 private:
  bool answer(const uint32_t* numbers, uint32_t n) {
    std::byte* out = stage_.at() + kLine;  // rows begin on a cache line, behind the length
    const uint32_t bytes = n * row_bytes_;
    std::memcpy(out - 4, &bytes, 4);
    const std::byte* unsent = out - 4;
    for (uint32_t i = 0; i < std::min(ahead_, n); ++i) prefetch(numbers[i]);
    for (uint32_t i = 0; i < n; ++i) {
      if (i + ahead_ < n) prefetch(numbers[i + ahead_]);
      std::memcpy(out, rows_ + size_t{numbers[i]} * row_bytes_, row_bytes_);
      out += row_bytes_;
      if ((i + 1) % send_rows_ != 0 && i + 1 != n) continue;
      if (!channel_.send_whole(unsent, static_cast<size_t>(out - unsent))) return false;
      unsent = out;
    }
    return true;
  }

  void prefetch(uint32_t number) const {
    const std::byte* row = rows_ + size_t{number} * row_bytes_;
    for (uint32_t at = 0; at < row_bytes_; at += kLine) __builtin_prefetch(row + at);
  }

  Channel channel_;
  const TlsPaths& tls_;
  const std::byte* rows_;
  uint32_t row_bytes_;
  uint32_t send_rows_ = 1;
  uint32_t ahead_ = 0;
  std::vector<uint32_t> inbox_;
  Memory stage_;
};

}  // namespace

TlsPaths make_certificate(const std::string& folder) {
  const TlsPaths paths{folder + "/bench.pem", folder + "/bench.key"};
  const std::string command =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=bench"
      " -addext subjectAltName=IP:127.0.0.1 -out " +
      paths.certificate + " -keyout " + paths.key + " 2>/dev/null";
  if (std::system(command.c_str()) != 0) fail("openssl made no certificate in " + folder);
  return paths;
}

Channel::~Channel() {
  SSL_free(ssl_);
  close(socket_);
}

bool Channel::secure(const TlsPaths& paths, bool is_server) {
  ssl_ = SSL_new(tls_context(paths, is_server));
  BIO* const buffer = BIO_new(BIO_f_buffer());
  BIO_set_write_buffer_size(buffer, kTlsBufferBytes);
  BIO* const reader = BIO_new_socket(socket_, BIO_NOCLOSE);
  BIO* const writer = BIO_push(buffer, BIO_new_socket(socket_, BIO_NOCLOSE));
  SSL_set_bio(ssl_, reader, writer);
  return (is_server ? SSL_accept(ssl_) : SSL_connect(ssl_)) == 1;
}

bool Channel::send_whole(const std::byte* bytes, size_t n) {
  if (ssl_ != nullptr) {
    size_t written = 0;
    return SSL_write_ex(ssl_, bytes, n, &written) == 1 && written == n &&
           BIO_flush(SSL_get_wbio(ssl_)) == 1;
  }
  while (n > 0) {
    const ssize_t sent = send(socket_, bytes, n, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    n -= static_cast<size_t>(sent);
  }
  return true;
}

ssize_t Channel::receive(std::byte* out, size_t n, bool wait_all) {
  if (ssl_ == nullptr) return recv(socket_, out, n, wait_all ? MSG_WAITALL : 0);
  size_t taken = 0;
  return SSL_read_ex(ssl_, out, n, &taken) == 1 ? static_cast<ssize_t>(taken) : -1;
}

int listen_on_loopback(uint16_t* port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail("the limit cannot listen on 127.0.0.1");
  }
  *port = ntohs(address.sin_port);
  return listener;
}

void serve_rows(int listener, const std::byte* rows, uint32_t row_bytes, const TlsPaths& tls) {
  for (;;) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) fail("the limit cannot accept");
    set_no_delay(socket);
    std::thread([=, &tls] { Session(socket, rows, row_bytes, tls).run(); }).detach();
  }
}

LimitClient::LimitClient(uint16_t port, const LimitSetting& setting, uint32_t request_rows,
                         uint32_t row_bytes, const TlsPaths& tls)
    : channel_(connect_to_loopback(port)),
      request_rows_(request_rows),
      reply_bytes_(request_rows * row_bytes),
      wait_all_(setting.wait_all),
      request_(request_rows + 1) {
  if (request_rows > kRequestRowsMax) fail("requests of more than 4096 keys are not compared");
  if (!tls.empty() && !channel_.secure(tls, false)) fail("the limit's handshake failed");
  const uint32_t head[2] = {setting.send_rows, setting.ahead};
  if (!channel_.send_whole(reinterpret_cast<const std::byte*>(head), sizeof head)) {
    fail("the limit's server is gone");
  }
  request_[0] = request_rows * 4;
}

void LimitClient::ask(const uint32_t* numbers) {
  std::memcpy(request_.data() + 1, numbers, size_t{request_rows_} * 4);
  if (!channel_.send_whole(reinterpret_cast<const std::byte*>(request_.data()),
                           request_.size() * 4)) {
    fail("the limit's server is gone");
  }
}

void LimitClient::take(std::byte* out) {
  uint32_t bytes = 0;
  size_t have = 0;
  const size_t wanted = 4 + size_t{reply_bytes_};
  while (have < wanted) {
    const size_t rows_have = have < 4 ? 0 : have - 4;
    if (!channel_.is_plain()) {
      auto* const length = reinterpret_cast<std::byte*>(&bytes);
      const ssize_t received = have < 4
                                   ? channel_.receive(length + have, 4 - have)
                                   : channel_.receive(out + rows_have, reply_bytes_ - rows_have);
      if (received <= 0) fail("the limit's server is gone");
      have += static_cast<size_t>(received);
      continue;
    }
    iovec parts[2] = {{reinterpret_cast<std::byte*>(&bytes) + std::min<size_t>(have, 4),
                       4 - std::min<size_t>(have, 4)},
                      {out + rows_have, reply_bytes_ - rows_have}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t received = recvmsg(channel_.socket(), &message, wait_all_ ? MSG_WAITALL : 0);
    if (received <= 0) fail("the limit's server is gone");
    have += static_cast<size_t>(received);
  }
  if (bytes != reply_bytes_) fail("a reply of the limit has the wrong length");
}

}  // namespace petps::bench
