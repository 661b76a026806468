// The key of a stream's own records, as the kernel takes it. RFC 8446, section 7, has the names.
#include <linux/tls.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <array>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "tls/openssl.h"
#include "tls/tls.h"

namespace petps::tls {

namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kSecretBytesMax = 48;
constexpr std::string_view kServerSecret = "SERVER_TRAFFIC_SECRET_0 ";

// Return the 4 bits that a hexadecimal digit stands for.
unsigned digit(char hex) {
  return static_cast<unsigned>(hex <= '9' ? hex - '0' : (hex | 0x20) - 'a' + 10);
}

// HKDF-Expand-Label(secret, label, "", out.size()).
bool expand(const EVP_MD* digest, std::span<const std::byte> secret, std::string_view label,
            std::span<std::byte> out) {
  const std::unique_ptr<EVP_KDF, Free<EVP_KDF_free>> kdf(
      EVP_KDF_fetch(nullptr, OSSL_KDF_NAME_TLS1_3_KDF, nullptr));
  if (kdf == nullptr) return false;
  const std::unique_ptr<EVP_KDF_CTX, Free<EVP_KDF_CTX_free>> context(EVP_KDF_CTX_new(kdf.get()));
  if (context == nullptr) return false;
  // OpenSSL reads these values and declares that it may write them.
  const auto octets = [](const char* name, const void* bytes, size_t n) {
    return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(bytes), n);
  };
  int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
  const OSSL_PARAM params[] = {
      OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST,
                                       const_cast<char*>(EVP_MD_get0_name(digest)), 0),
      octets(OSSL_KDF_PARAM_KEY, secret.data(), secret.size()),
      octets(OSSL_KDF_PARAM_PREFIX, "tls13 ", 6),
      octets(OSSL_KDF_PARAM_LABEL, label.data(), label.size()),
      OSSL_PARAM_construct_end(),
  };
  return EVP_KDF_derive(context.get(), reinterpret_cast<unsigned char*>(out.data()), out.size(),
                        params) == 1;
}

// The record sequence begins at 0: it stays zero, as all of `info` is before.
template <typename Info>
size_t fill(uint16_t cipher, const EVP_MD* digest, std::span<const std::byte> secret,
            KernelKeys& keys) {
  static_assert(sizeof(Info) <= kKernelKeysBytes);
  Info info{};
  info.info.version = TLS_1_3_VERSION;
  info.info.cipher_type = cipher;
  std::array<std::byte, kNonceBytes> nonce;
  const bool is_done = expand(digest, secret, "key", std::as_writable_bytes(std::span(info.key))) &&
                       expand(digest, secret, "iv", nonce);
  // The kernel's salt is the beginning of the nonce; ChaCha20's has no bytes.
  constexpr size_t kSalt = kNonceBytes - sizeof(info.iv);
  if constexpr (kSalt > 0) std::memcpy(info.salt, nonce.data(), kSalt);
  std::memcpy(info.iv, nonce.data() + kSalt, sizeof(info.iv));
  if (is_done) std::memcpy(keys.data(), &info, sizeof(info));
  erase(nonce);
  erase(std::as_writable_bytes(std::span(&info, 1)));
  return is_done ? sizeof(info) : 0;
}

}  // namespace

void erase(std::span<std::byte> key) { OPENSSL_cleanse(key.data(), key.size()); }

// OpenSSL tells a connection's secrets by a line of text: label, random of the client, secret.
struct StreamSecrets {
  static void keep(const SSL* ssl, const char* line) {
    auto* stream = static_cast<Stream*>(SSL_get_app_data(ssl));
    std::string_view text(line);
    if (stream == nullptr || !text.starts_with(kServerSecret)) return;
    text.remove_prefix(text.rfind(' ') + 1);
    if (text.size() > 2 * kSecretBytesMax) return;
    stream->secret_.reserve(kSecretBytesMax);
    for (size_t i = 0; i + 1 < text.size(); i += 2)
      stream->secret_.push_back(static_cast<std::byte>(digit(text[i]) << 4 | digit(text[i + 1])));
  }
};

void keep_secrets(SSL_CTX* context) { SSL_CTX_set_keylog_callback(context, StreamSecrets::keep); }

size_t Stream::take_kernel_keys(KernelKeys& keys) {
  std::vector<std::byte> secret = std::exchange(secret_, {});
  const SSL_CIPHER* cipher = SSL_get_current_cipher(ssl_);
  if (secret.empty() || records_ > 0 || !is_open_ || !failed_.ok() || cipher == nullptr) {
    erase(secret);
    return 0;
  }
  ERR_clear_error();
  const EVP_MD* digest = SSL_CIPHER_get_handshake_digest(cipher);
  size_t n = 0;
  switch (SSL_CIPHER_get_protocol_id(cipher)) {
    case TLS1_3_CK_AES_128_GCM_SHA256 & 0xffff:
      n = fill<tls12_crypto_info_aes_gcm_128>(TLS_CIPHER_AES_GCM_128, digest, secret, keys);
      break;
    case TLS1_3_CK_AES_256_GCM_SHA384 & 0xffff:
      n = fill<tls12_crypto_info_aes_gcm_256>(TLS_CIPHER_AES_GCM_256, digest, secret, keys);
      break;
    case TLS1_3_CK_CHACHA20_POLY1305_SHA256 & 0xffff:
      n = fill<tls12_crypto_info_chacha20_poly1305>(TLS_CIPHER_CHACHA20_POLY1305, digest, secret,
                                                    keys);
      break;
    default:
      break;
  }
  ERR_clear_error();
  erase(secret);
  return n;
}

}  // namespace petps::tls
