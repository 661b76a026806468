// The keys that the kernel is given: OpenSSL reads a record that is encrypted with them, as the
// kernel does it. Does not cover: the kernel (tests/lab).
#include <gtest/gtest.h>
#include <linux/tls.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>

#include <cstring>

#include "pair.h"

namespace petps::tls {
namespace {

// A client of OpenSSL alone, which offers one cipher.
class RawClient {
 public:
  explicit RawClient(const char* cipher)
      : context_(SSL_CTX_new(TLS_client_method())), ssl_(make(cipher)) {
    SSL_set_bio(ssl_, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_connect_state(ssl_);
  }
  ~RawClient() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
  }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool shake(Stream& server) {
    for (int i = 0; i < 4; ++i) {
      const bool is_done = SSL_do_handshake(ssl_) == 1;
      Bytes out;
      Bytes sent(static_cast<size_t>(BIO_pending(SSL_get_wbio(ssl_))));
      if (!sent.empty()) BIO_read(SSL_get_wbio(ssl_), sent.data(), static_cast<int>(sent.size()));
      std::span<const std::byte> arrived = sent;
      if (!server.is_open() && !server.handshake(arrived, out).ok()) return false;
      give(out);
      if (is_done && server.is_open()) return true;
    }
    return false;
  }
  void give(std::span<const std::byte> bytes) {
    BIO_write(SSL_get_rbio(ssl_), bytes.data(), static_cast<int>(bytes.size()));
  }
  Bytes read() {
    Bytes plain(100'000);
    size_t n = 0;
    if (SSL_read_ex(ssl_, plain.data(), plain.size(), &n) != 1) n = 0;
    plain.resize(n);
    return plain;
  }

 private:
  SSL* make(const char* cipher) {
    EXPECT_EQ(SSL_CTX_set_ciphersuites(context_, cipher), 1);
    return SSL_new(context_);
  }
  SSL_CTX* const context_;
  SSL* const ssl_;
};

// Encrypt a record as RFC 8446, section 5.2, says.
template <typename Info>
Bytes seal(const EVP_CIPHER* cipher, const KernelKeys& keys, uint8_t sequence, const Bytes& plain) {
  Info info;
  std::memcpy(&info, keys.data(), sizeof(info));
  EXPECT_EQ(info.info.version, TLS_1_3_VERSION);
  for (const unsigned char byte : info.rec_seq) EXPECT_EQ(byte, 0);
  unsigned char nonce[12];
  constexpr size_t kSalt = sizeof(nonce) - sizeof(info.iv);
  if constexpr (kSalt > 0) std::memcpy(nonce, info.salt, kSalt);
  std::memcpy(nonce + kSalt, info.iv, sizeof(info.iv));
  nonce[11] ^= sequence;
  Bytes inner = plain;
  inner.push_back(std::byte{23});
  const size_t length = inner.size() + 16;
  Bytes record{std::byte{23}, std::byte{3}, std::byte{3}, static_cast<std::byte>(length >> 8),
               static_cast<std::byte>(length & 0xff)};
  record.resize(5 + length);
  const auto* in = reinterpret_cast<const unsigned char*>(inner.data());
  auto* out = reinterpret_cast<unsigned char*>(record.data());
  EVP_CIPHER_CTX* context = EVP_CIPHER_CTX_new();
  int n = 0;
  bool is_good = EVP_EncryptInit_ex(context, cipher, nullptr, info.key, nonce) == 1 &&
                 EVP_EncryptUpdate(context, nullptr, &n, out, 5) == 1 &&
                 EVP_EncryptUpdate(context, out + 5, &n, in, static_cast<int>(inner.size())) == 1;
  is_good = is_good && EVP_EncryptFinal_ex(context, out + 5 + n, &n) == 1 &&
            EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, 16, out + 5 + inner.size()) == 1;
  EVP_CIPHER_CTX_free(context);
  EXPECT_TRUE(is_good);
  return record;
}

using Seal = Bytes (*)(const EVP_CIPHER*, const KernelKeys&, uint8_t, const Bytes&);
struct Suite {
  const char* name;
  const EVP_CIPHER* (*cipher)();
  uint16_t type;
  size_t bytes;
  Seal seal;
};

class KernelTest : public TlsTest, public testing::WithParamInterface<Suite> {};

TEST_P(KernelTest, ThePeerReadsRecordsOfTheseKeys) {
  const Suite& suite = GetParam();
  const auto context = serve(authority_.issue_local());
  const auto server = std::move(context->accept()).value();
  RawClient client(suite.name);
  ASSERT_TRUE(client.shake(*server));
  KernelKeys keys{};
  ASSERT_EQ(server->take_kernel_keys(keys), suite.bytes);
  tls_crypto_info head;
  std::memcpy(&head, keys.data(), sizeof(head));
  EXPECT_EQ(head.cipher_type, suite.type);
  for (uint8_t sequence = 0; sequence < 3; ++sequence) {
    const Bytes plain = pattern(10u + sequence);
    client.give(suite.seal(suite.cipher(), keys, sequence, plain));
    EXPECT_EQ(client.read(), plain);
  }
  client.give(suite.seal(suite.cipher(), keys, 7, pattern(10)));
  EXPECT_TRUE(client.read().empty()) << "the test notices a wrong nonce";
}

INSTANTIATE_TEST_SUITE_P(
    Suites, KernelTest,
    testing::Values(Suite{"TLS_AES_128_GCM_SHA256", EVP_aes_128_gcm, TLS_CIPHER_AES_GCM_128,
                          sizeof(tls12_crypto_info_aes_gcm_128),
                          seal<tls12_crypto_info_aes_gcm_128>},
                    Suite{"TLS_AES_256_GCM_SHA384", EVP_aes_256_gcm, TLS_CIPHER_AES_GCM_256,
                          sizeof(tls12_crypto_info_aes_gcm_256),
                          seal<tls12_crypto_info_aes_gcm_256>},
                    Suite{"TLS_CHACHA20_POLY1305_SHA256", EVP_chacha20_poly1305,
                          TLS_CIPHER_CHACHA20_POLY1305, sizeof(tls12_crypto_info_chacha20_poly1305),
                          seal<tls12_crypto_info_chacha20_poly1305>}),
    [](const testing::TestParamInfo<Suite>& suite) { return std::string(suite.param.name); });

}  // namespace
}  // namespace petps::tls
