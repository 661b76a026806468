#include "tests/support/certificates/certificates.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace petps::tests {

namespace {

void check(bool is_good, const char* what) {
  if (is_good) return;
  std::fprintf(stderr, "certificates: %s failed\n", what);
  std::abort();
}

// Return a certificate for `key`, signed by `issuer_key`.
X509* make_certificate(EVP_PKEY* key, const CertificateSpec& spec, X509* issuer,
                       EVP_PKEY* issuer_key) {
  static std::atomic<long> serial{1};
  X509* certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate), spec.valid_from_s);
  X509_gmtime_adj(X509_getm_notAfter(certificate), spec.valid_until_s);
  X509_set_pubkey(certificate, key);
  if (!spec.common_name.empty()) {
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(spec.common_name.c_str()), -1,
                               -1, 0);
  }
  X509* by = issuer == nullptr ? certificate : issuer;
  X509_set_issuer_name(certificate, X509_get_subject_name(by));
  X509V3_CTX context;
  X509V3_set_ctx(&context, by, certificate, nullptr, nullptr, 0);
  const auto extend = [&](int kind, const std::string& value) {
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
    check(extension != nullptr, value.c_str());
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  };
  extend(NID_basic_constraints, issuer == nullptr ? "critical,CA:TRUE" : "critical,CA:FALSE");
  std::string names;
  for (const std::string& name : spec.names) names.append(names.empty() ? "" : ",").append(name);
  if (!names.empty()) extend(NID_subject_alt_name, names);
  check(X509_sign(certificate, issuer_key, EVP_sha256()) > 0, "X509_sign");
  return certificate;
}

void write_pem(const std::string& path, X509* certificate, EVP_PKEY* key) {
  // Replaced at once, so that a reader finds a whole file.
  const std::string temporary = path + ".new";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  check(file != nullptr, path.c_str());
  check(certificate != nullptr
            ? PEM_write_X509(file, certificate) == 1
            : PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr) == 1,
        "PEM_write");
  std::fclose(file);
  std::filesystem::rename(temporary, path);
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "petps-test-XXXXXX").string();
  check(mkdtemp(path_.data()) != nullptr, "mkdtemp");
}
TemporaryFolder::~TemporaryFolder() { std::filesystem::remove_all(path_); }

std::string TemporaryFolder::write(const std::string& name, const std::string& content) const {
  const std::string path = path_ + "/" + name;
  std::ofstream(path, std::ios::trunc) << content;
  return path;
}

Authority::Authority(const std::string& name) : ca_(folder_.path() + "/ca.crt") {
  CertificateSpec spec;
  spec.common_name = name;
  EVP_PKEY* key = EVP_EC_gen("P-256");
  check(key != nullptr, "EVP_EC_gen");
  X509* certificate = make_certificate(key, spec, nullptr, key);
  write_pem(ca_, certificate, nullptr);
  certificate_ = certificate;
  key_ = key;
}

Authority::~Authority() {
  X509_free(static_cast<X509*>(certificate_));
  EVP_PKEY_free(static_cast<EVP_PKEY*>(key_));
}

KeyPair Authority::issue(const std::string& name, const CertificateSpec& spec) const {
  const KeyPair files{folder_.path() + "/" + name + ".crt", folder_.path() + "/" + name + ".key"};
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate =
      make_certificate(key, spec, static_cast<X509*>(certificate_), static_cast<EVP_PKEY*>(key_));
  write_pem(files.certificate, certificate, nullptr);
  write_pem(files.key, nullptr, key);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return files;
}

KeyPair Authority::issue_local(const std::string& name) const {
  CertificateSpec spec;
  spec.names = {"DNS:localhost", "IP:127.0.0.1"};
  return issue(name, spec);
}

}  // namespace petps::tests
