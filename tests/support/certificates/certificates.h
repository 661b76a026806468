// Certificates for tests: an authority that writes PEM files into a folder of its own.
#pragma once

#include <string>
#include <vector>

namespace petps::tests {

// A folder that is removed with its files.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  // Write a file and return its path.
  std::string write(const std::string& name, const std::string& content) const;

 private:
  std::string path_;
};

struct CertificateSpec {
  std::string common_name = "test";
  std::vector<std::string> names;  // "DNS:localhost", "IP:127.0.0.1", "URI:spiffe://x/y"
  long valid_from_s = -3'600;      // from now
  long valid_until_s = 86'400;
};

struct KeyPair {
  std::string certificate;  // path
  std::string key;
};

class Authority {
 public:
  explicit Authority(const std::string& name = "test authority");
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  const TemporaryFolder& folder() const { return folder_; }
  const std::string& ca() const { return ca_; }  // path
  // Write NAME.crt and NAME.key, over those that exist.
  KeyPair issue(const std::string& name, const CertificateSpec& spec = {}) const;
  // Issue a certificate for 127.0.0.1 and localhost.
  KeyPair issue_local(const std::string& name = "server") const;

 private:
  TemporaryFolder folder_;
  std::string ca_;
  void* certificate_ = nullptr;  // X509
  void* key_ = nullptr;          // EVP_PKEY
};

}  // namespace petps::tests
