#include <arpa/inet.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <ctime>
#include <string_view>

#include "base/printable.h"
#include "tls/openssl.h"

namespace petps::tls {

using base::Code;
using base::Status;

namespace {

// No grant can have a longer name (petps/server/access_file.py).
constexpr size_t kNameBytesMax = 255;

// Return the text, or "" if it is no name: empty, too long, or not printable. Names are shown in
// errors and in the status.
std::string text_of(const ASN1_STRING* string) {
  const std::string_view text(reinterpret_cast<const char*>(ASN1_STRING_get0_data(string)),
                              static_cast<size_t>(ASN1_STRING_length(string)));
  return text.size() <= kNameBytesMax && text == base::printable(text) ? std::string(text)
                                                                       : std::string();
}

std::string address_text(const ASN1_OCTET_STRING* address) {
  char text[INET6_ADDRSTRLEN] = "";
  const int family = ASN1_STRING_length(address) == 4 ? AF_INET : AF_INET6;
  if (family == AF_INET6 && ASN1_STRING_length(address) != 16) return "";
  inet_ntop(family, ASN1_STRING_get0_data(address), text, sizeof(text));
  return text;
}

// Return the subject's alternative names whose type is one of `types`.
std::vector<std::string> alternative_names(const X509* certificate, bool with_addresses) {
  std::vector<std::string> names;
  auto* all = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; all != nullptr && i < sk_GENERAL_NAME_num(all); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(all, i);
    std::string text;
    if (name->type == GEN_DNS || name->type == GEN_URI) text = text_of(name->d.ia5);
    if (name->type == GEN_IPADD && with_addresses) text = address_text(name->d.iPAddress);
    if (!text.empty()) names.push_back(std::move(text));
  }
  GENERAL_NAMES_free(all);
  return names;
}

std::string name_text(const X509_NAME* name) {
  const BioPointer bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_RFC2253) < 0) return "?";
  const char* data = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(length));
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

}  // namespace

std::vector<std::string> names_of(const X509* certificate) {
  std::vector<std::string> names = alternative_names(certificate, false);
  if (!names.empty()) return names;
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return names;
  std::string name = text_of(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
  if (!name.empty()) names.push_back(std::move(name));
  return names;
}

std::string time_text(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "?";
  char text[32];
  return std::string(text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts));
}

Status certificate_error(X509_STORE_CTX* store, const std::string& expected_name,
                         const std::string& authorities) {
  const bool is_server = !expected_name.empty();
  int error = X509_STORE_CTX_get_error(store);
  const X509* certificate = X509_STORE_CTX_get_current_cert(store);
  const bool is_unknown = error == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN;
  // An authority that is sent along and unknown: the peer's own certificate says more.
  if (is_unknown) certificate = X509_STORE_CTX_get0_cert(store);
  if (certificate == nullptr) error = X509_V_ERR_UNSPECIFIED;
  std::string text = is_server ? "the server's " : "the client's ";
  if (!is_unknown && X509_STORE_CTX_get_error_depth(store) > 0) text += "authority's ";
  text += "certificate";
  if (certificate != nullptr) text += " (" + name_text(X509_get_subject_name(certificate)) + ")";
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      text += " expired at " + time_text(X509_get0_notAfter(certificate)) + ": renew it";
      break;
    case X509_V_ERR_CERT_NOT_YET_VALID:
      text += " is not valid before " + time_text(X509_get0_notBefore(certificate)) +
              ": check the clocks of both machines";
      break;
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH: {
      const std::string names = join(alternative_names(certificate, true));
      text += " is for " + (names.empty() ? "no DNS name or IP address" : names) + ", not for '" +
              expected_name + "': connect to a name that it has, or set server_name";
      break;
    }
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      text += " was issued by " + name_text(X509_get_issuer_name(certificate)) +
              ", which is unknown to " + authorities + ": set " + (is_server ? "ca" : "client_ca") +
              " to the file of its authority";
      break;
    default:
      text += std::string(" is not accepted: ") + X509_verify_cert_error_string(error);
  }
  return Status(Code::kUnauthenticated, std::move(text));
}

}  // namespace petps::tls
