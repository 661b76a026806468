#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "tls/openssl.h"
#include "tls/tls.h"

namespace petps::tls {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::byte kAlertRecord{21};
constexpr std::byte kHandshakeRecord{22};
// How often a peer may change its keys at once, and how many bytes it must send for each further
// time. A change costs both sides as much as hundreds of bytes, and an honest peer changes its keys
// after gigabytes.
constexpr uint64_t kKeysAtOnce = 16;
constexpr uint64_t kBytesPerKey = 64 << 10;
// OpenSSL reports alert N of the peer as reason 1000 + N.
constexpr int kFirstAlertReason = SSL_AD_REASON_OFFSET;

bool is_certificate_alert(int alert) {
  return (alert >= SSL_AD_BAD_CERTIFICATE && alert <= SSL_AD_CERTIFICATE_UNKNOWN) ||
         alert == SSL_AD_UNKNOWN_CA || alert == SSL_AD_ACCESS_DENIED ||
         alert == SSL_AD_CERTIFICATE_REQUIRED;
}

bool is_address(const std::string& name) {
  in6_addr address{};
  return inet_pton(AF_INET, name.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, name.c_str(), &address) == 1;
}

// Demand that the server's certificate has this name, and ask the server for that certificate.
bool expect_name(SSL* ssl, const std::string& name) {
  if (is_address(name))
    return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name.c_str()) == 1;
  SSL_set_hostflags(ssl,
                    X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
  return SSL_set1_host(ssl, name.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, name.c_str()) == 1;
}

}  // namespace

// OpenSSL's view of the caller's buffers.
struct StreamBio {
  static Stream& stream(BIO* bio) { return *static_cast<Stream*>(BIO_get_data(bio)); }

  static int read(BIO* bio, char* to, int length) {
    BIO_clear_retry_flags(bio);
    if (stream(bio).changes_keys_too_often()) return -1;
    std::span<const std::byte>* in = stream(bio).in_;
    if (in == nullptr || in->empty()) {
      BIO_set_retry_read(bio);
      return -1;
    }
    const size_t n = std::min(in->size(), static_cast<size_t>(std::max(length, 0)));
    std::memcpy(to, in->data(), n);
    *in = in->subspan(n);
    return static_cast<int>(n);
  }
  static int write(BIO* bio, const char* from, int length) {
    BIO_clear_retry_flags(bio);
    // The kernel uses this side's key: a second record with one of its nonces would reveal it.
    if (stream(bio).writes_by_kernel_) return length;
    std::vector<std::byte>* out = stream(bio).out_;
    if (out == nullptr || length <= 0) return 0;
    const auto* bytes = reinterpret_cast<const std::byte*>(from);
    out->insert(out->end(), bytes, bytes + length);
    return length;
  }
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  static BIO_METHOD* method() {
    static BIO_METHOD* const method = [] {
      BIO_METHOD* bio_method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "petps");
      BIO_meth_set_read(bio_method, read);
      BIO_meth_set_write(bio_method, write);
      BIO_meth_set_ctrl(bio_method, control);
      return bio_method;
    }();
    return method;
  }
};

// Remembers what is wrong with the peer's certificate: OpenSSL's own error has no names.
struct StreamVerify {
  static int check(int is_good, X509_STORE_CTX* store) {
    if (is_good == 1) return 1;
    auto* ssl =
        static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto* stream = static_cast<Stream*>(SSL_get_app_data(ssl));
    stream->certificate_ = certificate_error(store, stream->expected_name_, stream->authorities_);
    return 0;
  }
};

// Counts how often the peer changes its keys, and keeps what the kernel must send.
struct StreamMessages {
  static void see(int is_sent, int, int type, const void* message, size_t bytes, SSL*, void* of) {
    Stream& stream = *static_cast<Stream*>(of);
    const auto* data = static_cast<const std::byte*>(message);
    if (is_sent != 0) {
      if (stream.writes_by_kernel_ && type == SSL3_RT_ALERT)
        stream.notices_.push_back({SSL3_RT_ALERT, {data, data + bytes}});
    } else if (type == SSL3_RT_HANDSHAKE && bytes > 0 && data[0] == std::byte{SSL3_MT_KEY_UPDATE}) {
      ++stream.keys_received_;
      const std::byte request = data[bytes - 1];
      if (request == std::byte{SSL_KEY_UPDATE_REQUESTED}) stream.is_asked_for_keys_ = true;
    }
  }
};

bool Stream::changes_keys_too_often() const {
  return keys_received_ > kKeysAtOnce + plain_received_ / kBytesPerKey;
}

Stream::Stream(ssl_st* ssl, std::string expected_name, std::string authorities)
    : ssl_(ssl), expected_name_(std::move(expected_name)), authorities_(std::move(authorities)) {}

Stream::~Stream() {
  erase(secret_);
  SSL_free(ssl_);
}

Result<std::unique_ptr<Stream>> Stream::make(ssl_ctx_st* context, std::string expected_name,
                                             std::string authorities) {
  ERR_clear_error();
  SSL* ssl = SSL_new(context);
  if (ssl == nullptr)
    return Status(Code::kResourceExhausted, "no TLS connection can be made: " + take_error_text());
  std::unique_ptr<Stream> stream(new Stream(ssl, std::move(expected_name), std::move(authorities)));
  BIO* bio = BIO_new(StreamBio::method());
  if (bio == nullptr)
    return Status(Code::kResourceExhausted, "no TLS connection can be made: " + take_error_text());
  BIO_set_data(bio, stream.get());
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);  // takes the bio
  SSL_set_app_data(ssl, stream.get());
  SSL_set_msg_callback(ssl, StreamMessages::see);
  SSL_set_msg_callback_arg(ssl, stream.get());
  SSL_set_verify(ssl, SSL_get_verify_mode(ssl), StreamVerify::check);
  if (stream->expected_name_.empty()) {
    SSL_set_accept_state(ssl);
    return stream;
  }
  SSL_set_connect_state(ssl);
  if (!expect_name(ssl, stream->expected_name_)) {
    take_error_text();
    return Status(Code::kInvalidArgument, "'" + stream->expected_name_ +
                                              "' is no DNS name or IP address that a certificate "
                                              "can have: set server_name");
  }
  return stream;
}

Status Stream::handshake(std::span<const std::byte>& arrived, std::vector<std::byte>& out) {
  if (!failed_.ok()) return failed_;
  if (!has_started_ && !arrived.empty()) {
    has_started_ = true;
    if (arrived[0] != kHandshakeRecord && arrived[0] != kAlertRecord) {
      is_plain_text_ = true;
      failed_ = Status(Code::kFailedPrecondition, "the peer does not speak TLS");
      return failed_;
    }
  }
  in_ = &arrived;
  out_ = &out;
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_);
  if (done != 1 && SSL_get_error(ssl_, done) != SSL_ERROR_WANT_READ) return fail();
  in_ = nullptr;
  out_ = nullptr;
  if (done != 1) return {};
  is_open_ = true;
  if (const X509* certificate = SSL_get0_peer_certificate(ssl_))
    peer_names_ = names_of(certificate);
  return {};
}

Status Stream::read(std::span<const std::byte>& arrived, std::span<std::byte> plain, size_t& n,
                    std::vector<std::byte>& out) {
  n = 0;
  if (!failed_.ok()) return failed_;
  in_ = &arrived;
  out_ = &out;
  while (n < plain.size() && !has_ended_) {
    size_t part = 0;
    ERR_clear_error();
    const int done = SSL_read_ex(ssl_, plain.data() + n, plain.size() - n, &part);
    n += part;
    plain_received_ += part;
    if (done == 1) continue;
    const int error = SSL_get_error(ssl_, done);
    if (error == SSL_ERROR_WANT_READ) break;
    if (error != SSL_ERROR_ZERO_RETURN) return fail();
    has_ended_ = true;
  }
  in_ = nullptr;
  out_ = nullptr;
  if (writes_by_kernel_ && is_asked_for_keys_)
    failed_ = Status(Code::kUnavailable,
                     "TLS failed: the peer asks for new keys of this side, which the kernel cannot "
                     "change: connect again");
  return failed_;
}

bool Stream::has_plain() const { return SSL_pending(ssl_) > 0; }
bool Stream::has_partial_record() const {
  if (SSL_pending(ssl_) > 0) return false;
  // "RB": the head of a record has been read and its body has not.
  return SSL_has_pending(ssl_) != 0 || std::string_view(SSL_rstate_string(ssl_)) == "RB";
}

Status Stream::write(std::span<const std::byte> plain, std::vector<std::byte>& out) {
  if (!failed_.ok()) return failed_;
  if (plain.empty()) return {};
  if (writes_by_kernel_) return Status(Code::kUnavailable, "TLS failed: the kernel encrypts");
  if (records_ >= kRecordsPerKey) PETPS_RETURN_IF_ERROR(update_keys(false));
  const size_t records = (plain.size() + kRecordBytes - 1) / kRecordBytes;
  records_ += records;
  out_ = &out;
  size_t written = 0;
  ERR_clear_error();
  if (SSL_write_ex(ssl_, plain.data(), plain.size(), &written) != 1) return fail();
  out_ = nullptr;
  return {};
}

void Stream::end(std::vector<std::byte>& out) {
  if (!failed_.ok() || !is_open_) return;
  out_ = &out;
  ERR_clear_error();
  (void)SSL_shutdown(ssl_);
  ERR_clear_error();
  out_ = nullptr;
}

Status Stream::update_keys(bool both) {
  if (!failed_.ok()) return failed_;
  records_ = 0;
  ERR_clear_error();
  return SSL_key_update(ssl_, both ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED) == 1
             ? Status()
             : fail();
}

// End the call in progress. Keep and return its error.
Status Stream::fail() {
  in_ = nullptr;
  out_ = nullptr;
  failed_ = failure();
  ERR_clear_error();
  return failed_;
}

Status Stream::failure() {
  if (!certificate_.ok()) return certificate_;
  if (changes_keys_too_often())
    return Status(Code::kUnavailable, "TLS failed: the peer changed its keys " +
                                          std::to_string(keys_received_) + " times within " +
                                          std::to_string(plain_received_) + " bytes");
  const unsigned long error = ERR_peek_error();  // the first cause
  const int reason = ERR_GET_LIB(error) == ERR_LIB_SSL ? ERR_GET_REASON(error) : 0;
  const char* const known = ERR_reason_error_string(error);
  const std::string text = known == nullptr ? "unknown error" : known;
  const int alert = reason - kFirstAlertReason;
  if (alert >= 0 && is_certificate_alert(alert)) {
    const bool is_missing = alert == SSL_AD_CERTIFICATE_REQUIRED;
    if (expected_name_.empty())
      return Status(Code::kUnauthenticated, "the client refuses the server's certificate: " + text);
    return Status(Code::kUnauthenticated,
                  is_missing ? "the server requires a client certificate, and none was given: set "
                               "certificate and key"
                             : "the server refuses this client's certificate (" + text +
                                   "): use one that an authority of its client_ca has issued");
  }
  if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE)
    return Status(Code::kUnauthenticated, "the client has no certificate");
  if (alert == SSL_AD_PROTOCOL_VERSION || reason == SSL_R_UNSUPPORTED_PROTOCOL ||
      reason == SSL_R_WRONG_VERSION_NUMBER) {
    return Status(Code::kFailedPrecondition, "the peer does not speak TLS 1.3 (" + text + ")");
  }
  return Status(Code::kUnavailable, "TLS failed: " + text);
}

}  // namespace petps::tls
