// Owning pointers to OpenSSL's objects, and what the files of this room share. Internal to tls.
#pragma once

#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace petps::tls {

template <auto free>
struct Free {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using ContextPointer = std::unique_ptr<SSL_CTX, Free<SSL_CTX_free>>;
using CertificatePointer = std::unique_ptr<X509, Free<X509_free>>;
using KeyPointer = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
using BioPointer = std::unique_ptr<BIO, Free<BIO_free_all>>;

// Return the text of the newest error in this thread's queue, and empty the queue.
std::string take_error_text();

// ---- files.cc

// Return a context with what both sides share. `method`: TLS_server_method() or
// TLS_client_method().
base::Result<ContextPointer> make_context(const SSL_METHOD* method);
// Use the certificate chain and the key. Errors: see ServerContext::open.
base::Status use_certificate(SSL_CTX* context, const std::string& certificate_path,
                             const std::string& key_path);
// Trust the authorities of a file. `option` names the setting in errors.
base::Status use_authorities(SSL_CTX* context, const std::string& path, const char* option);
base::Status use_system_authorities(SSL_CTX* context);

// ---- certificate.cc

// Return the DNS names and URIs of the certificate, else its common name.
std::vector<std::string> names_of(const X509* certificate);
// Return "2026-11-27 18:00:00 UTC".
std::string time_text(const ASN1_TIME* time);
// Describe why a certificate of the chain is not accepted. `expected_name` is empty on the server's
// side.
base::Status certificate_error(X509_STORE_CTX* store, const std::string& expected_name,
                               const std::string& authorities);

// ---- kernel.cc

// Let the streams of a server's context keep the secret of the records that they write.
void keep_secrets(SSL_CTX* context);

}  // namespace petps::tls
