// What the PEM files of a configuration hold, and the contexts made of them.
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "tls/openssl.h"

namespace petps::tls {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A pair that is being replaced, one file after the other, is read again.
constexpr int kPairTries = 6;
constexpr auto kPairPause = std::chrono::milliseconds(20);
// No chain of certificates is as long as this.
constexpr size_t kFileBytesMax = size_t{4} << 20;
// Where distributions keep their authorities, for an OpenSSL that was built on another one.
constexpr const char* kSystemAuthorities[] = {"/etc/ssl/certs/ca-certificates.crt",
                                              "/etc/pki/tls/certs/ca-bundle.crt",
                                              "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"};

// The bytes of a file, which may be a key.
struct Content {
  std::string bytes;
  ~Content() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
  BioPointer bio() const {
    return BioPointer(BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
  }
};

Status read_file(const std::string& path, const char* option, Content& content) {
  const std::string what = std::string(option) + " '" + path + "'";
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    Status status = base::errno_status(Code::kIoError, what + " cannot be opened", errno);
    return Status(Code::kIoError, std::string(status.message()) +
                                      ": correct the path, or let this process read the file");
  }
  content.bytes.resize(kFileBytesMax);  // so that no copy of a key remains from growing
  size_t length = 0;
  ssize_t n = 0;
  while (length < kFileBytesMax &&
         ((n = ::read(fd, content.bytes.data() + length, kFileBytesMax - length)) > 0 ||
          (n < 0 && errno == EINTR))) {
    length += n > 0 ? static_cast<size_t>(n) : 0;
  }
  const int error = errno;
  ::close(fd);
  if (n < 0) return base::errno_status(Code::kIoError, what + " cannot be read", error);
  if (length == kFileBytesMax)
    return Status(Code::kInvalidArgument, what + " is longer than 4 MiB: it is no PEM file");
  content.bytes.resize(length);
  return {};
}

Result<std::vector<CertificatePointer>> certificates_of(const Content& content,
                                                        const std::string& path,
                                                        const char* option) {
  const BioPointer bio = content.bio();
  std::vector<CertificatePointer> certificates;
  ERR_clear_error();
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr))
    certificates.emplace_back(certificate);
  const unsigned long error = ERR_peek_last_error();
  const bool is_at_end =
      ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  const std::string text = take_error_text();
  if (!certificates.empty() && is_at_end) return certificates;
  return Status(Code::kInvalidArgument,
                std::string(option) + " '" + path + "' holds no certificate in PEM form" +
                    (is_at_end ? "" : " (" + text + ")") +
                    ": its parts must begin with -----BEGIN CERTIFICATE-----");
}

Result<std::vector<CertificatePointer>> read_certificates(const std::string& path,
                                                          const char* option) {
  Content content;
  PETPS_RETURN_IF_ERROR(read_file(path, option, content));
  return certificates_of(content, path, option);
}

// Refuse an encrypted key instead of asking the terminal for its password.
int no_password(char*, int, int, void*) { return -1; }

Result<KeyPointer> key_of(const Content& content, const std::string& path) {
  const BioPointer bio = content.bio();
  ERR_clear_error();
  KeyPointer key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  if (key != nullptr) return key;
  take_error_text();
  const bool is_encrypted = content.bytes.find("ENCRYPTED") != std::string::npos;
  return Status(Code::kInvalidArgument,
                "key '" + path + "' " +
                    (is_encrypted ? "is encrypted: decrypt it (openssl pkey -in OLD -out NEW) and "
                                    "protect the file by its mode"
                                  : "holds no private key in PEM form: it must begin with "
                                    "-----BEGIN PRIVATE KEY-----"));
}

Status check_dates(const X509* certificate, const std::string& path) {
  const std::string what = "certificate '" + path + "' ";
  if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
    return Status(Code::kFailedPrecondition,
                  what + "expired at " + time_text(X509_get0_notAfter(certificate)) + ": renew it");
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
    return Status(Code::kFailedPrecondition, what + "is not valid before " +
                                                 time_text(X509_get0_notBefore(certificate)) +
                                                 ": check this machine's clock");
  }
  return {};
}

struct Pair {
  std::vector<CertificatePointer> chain;
  KeyPointer key;
  bool is_one() const { return X509_check_private_key(chain.front().get(), key.get()) == 1; }
};

Result<Pair> read_pair(const std::string& certificate_path, const std::string& key_path) {
  for (int tries_left = kPairTries - 1;; --tries_left) {
    Content certificate;
    Content other;
    PETPS_RETURN_IF_ERROR(read_file(certificate_path, "certificate", certificate));
    const bool is_one_file = certificate_path == key_path;  // then read once
    if (!is_one_file) PETPS_RETURN_IF_ERROR(read_file(key_path, "key", other));
    auto chain = certificates_of(certificate, certificate_path, "certificate");
    if (!chain.ok()) return chain.status();
    auto key = key_of(is_one_file ? certificate : other, key_path);
    if (!key.ok()) return key.status();
    Pair pair{std::move(chain).value(), std::move(key).value()};
    if (pair.is_one()) return pair;
    ERR_clear_error();
    if (tries_left == 0) break;
    std::this_thread::sleep_for(kPairPause);
  }
  return Status(Code::kInvalidArgument,
                "key '" + key_path + "' does not belong to certificate '" + certificate_path +
                    "': give the two files of one pair; the server's own certificate must be "
                    "the first of its file");
}

}  // namespace

std::string take_error_text() {
  const char* text = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return text == nullptr ? "unknown error" : text;
}

Result<ContextPointer> make_context(const SSL_METHOD* method) {
  ERR_clear_error();
  ContextPointer context(SSL_CTX_new(method));
  // AES-128 first: it is the fastest cipher of processors with AES instructions.
  const bool is_set = context != nullptr &&
                      SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_max_proto_version(context.get(), TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_ciphersuites(context.get(),
                                               "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:"
                                               "TLS_CHACHA20_POLY1305_SHA256") == 1 &&
                      SSL_CTX_set_num_tickets(context.get(), 0) == 1;
  if (!is_set)
    return Status(Code::kResourceExhausted, "TLS cannot be set up: " + take_error_text());
  SSL_CTX_set_security_level(context.get(), 2);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION |
                                         SSL_OP_NO_TICKET | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  // An idle connection holds no record buffers: 34 KB less.
  SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS);
  return context;
}

Status use_certificate(SSL_CTX* context, const std::string& certificate_path,
                       const std::string& key_path) {
  const auto read = read_pair(certificate_path, key_path);
  if (!read.ok()) return read.status();
  const Pair& pair = read.value();
  X509* const own = pair.chain.front().get();
  PETPS_RETURN_IF_ERROR(check_dates(own, certificate_path));
  const auto refused = [&](const std::string& path) {
    return Status(Code::kInvalidArgument, "'" + path + "' cannot be used: " + take_error_text() +
                                              ": make a key of at least 2048 bits (RSA) or 224 "
                                              "bits (EC)");
  };
  if (SSL_CTX_use_certificate(context, own) != 1) return refused(certificate_path);
  if (SSL_CTX_use_PrivateKey(context, pair.key.get()) != 1) return refused(key_path);
  for (size_t i = 1; i < pair.chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context, pair.chain[i].get()) != 1)
      return refused(certificate_path);
  }
  return {};
}

Status use_authorities(SSL_CTX* context, const std::string& path, const char* option) {
  const auto authorities = read_certificates(path, option);
  if (!authorities.ok()) return authorities.status();
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  for (const CertificatePointer& authority : authorities.value()) {
    if (X509_STORE_add_cert(store, authority.get()) != 1 ||
        SSL_CTX_add_client_CA(context, authority.get()) != 1) {
      return Status(Code::kInvalidArgument,
                    std::string(option) + " '" + path + "' cannot be used: " + take_error_text());
    }
  }
  return {};
}

Status use_system_authorities(SSL_CTX* context) {
  SSL_CTX_set_default_verify_paths(context);
  ERR_clear_error();
  struct stat status {};
  if (::stat(X509_get_default_cert_file(), &status) == 0 ||
      ::stat(X509_get_default_cert_dir(), &status) == 0) {
    return {};
  }
  for (const char* path : kSystemAuthorities) {
    if (::stat(path, &status) == 0) return use_authorities(context, path, "ca");
  }
  return {};  // no server is trusted then, and the error says so
}

}  // namespace petps::tls
