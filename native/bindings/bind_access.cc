// petps._native.Gate and its callers: who may do what, for the doors in Python.
#include <pybind11/stl.h>

#include <algorithm>

#include "access/access.h"
#include "base/peer.h"
#include "bindings/bindings.h"

namespace petps::bindings {

namespace {

using access::Caller;
using access::CallerPointer;
using access::Gate;
using access::Grant;
using access::Mode;
using access::Role;

Role parse_role(const std::string& name) {
  for (const Role role : {Role::kRead, Role::kWrite, Role::kAdmin}) {
    if (name == access::role_name(role)) return role;
  }
  invalid("role '" + name + "' is unknown; write 'read', 'write' or 'admin'");
}

Mode parse_mode(const std::string& name) {
  if (name == "open") return Mode::kOpen;
  if (name == "certificates") return Mode::kCertificates;
  if (name == "grants") return Mode::kGrants;
  invalid("gate mode '" + name + "' is unknown; write 'open', 'certificates' or 'grants'");
}

std::string mode_name(const Gate& gate) {
  switch (gate.mode()) {
    case Mode::kOpen:
      return "open";
    case Mode::kCertificates:
      return "certificates";
    case Mode::kGrants:
      return "grants";
  }
  return "unknown";
}

Grant grant_of(std::string name, const std::string& token_sha256, std::string certificate,
               const std::vector<std::string>& roles, std::vector<std::string> models,
               uint64_t requests_per_second, uint64_t bytes_per_second, uint64_t expires_s) {
  Grant grant;
  grant.name = std::move(name);
  grant.has_token = !token_sha256.empty();
  if (grant.has_token == !certificate.empty())
    invalid("grant '" + grant.name + "' must have either a token's hash or a certificate's name");
  if (grant.has_token && token_sha256.size() != grant.token.size())
    invalid("grant '" + grant.name + "': a SHA-256 has 32 bytes, not " +
            std::to_string(token_sha256.size()));
  std::copy(token_sha256.begin(), token_sha256.end(), grant.token.begin());
  grant.certificate = std::move(certificate);
  for (const std::string& role : roles)
    grant.roles =
        static_cast<access::Roles>(grant.roles | static_cast<access::Roles>(parse_role(role)));
  grant.models = std::move(models);
  grant.requests_per_second = requests_per_second;
  grant.bytes_per_second = bytes_per_second;
  grant.expires_s = expires_s;
  return grant;
}

py::dict counts_of(const Gate& gate) {
  const access::Counts counts = gate.counts();
  py::dict result;
  result["logins_failed"] = counts.logins_failed;
  result["requests_denied"] = counts.requests_denied;
  result["requests_limited"] = counts.requests_limited;
  return result;
}

}  // namespace

void bind_access(py::module_& module) {
  py::class_<Grant>(module, "Grant", "Who may do what: one entry of the access file.")
      .def(
          py::init([](std::string name, const py::bytes& token_sha256, std::string certificate,
                      const std::vector<std::string>& roles, std::vector<std::string> models,
                      uint64_t requests_per_second, uint64_t bytes_per_second, uint64_t expires_s) {
            return grant_of(std::move(name), token_sha256, std::move(certificate), roles,
                            std::move(models), requests_per_second, bytes_per_second, expires_s);
          }),
          py::arg("name"), py::kw_only(), py::arg("token_sha256") = py::bytes(),
          py::arg("certificate") = "", py::arg("roles"),
          py::arg("models") = std::vector<std::string>(), py::arg("requests_per_second") = 0,
          py::arg("bytes_per_second") = 0, py::arg("expires_s") = 0)
      .def_readonly("name", &Grant::name);

  py::class_<Caller, CallerPointer>(module, "Caller", "Whose rights a request has.")
      .def_property_readonly("name", &Caller::name)
      .def_property_readonly("is_anyone", &Caller::is_anyone)
      .def_property_readonly("may_see_all", &Caller::may_see_all)
      .def(
          "may",
          [](const Caller& caller, const std::string& role, const std::string& model) {
            return caller.may(parse_role(role), model);
          },
          py::arg("role"), py::arg("model"))
      .def(
          "may_everywhere",
          [](const Caller& caller, const std::string& role) {
            return caller.may_everywhere(parse_role(role));
          },
          py::arg("role"))
      .def("knows", &Caller::knows, py::arg("model"))
      .def("spend_bytes", &Caller::spend_bytes, py::arg("bytes"));

  module.def("host_of", &base::host_of, py::arg("address"), "See native/base/peer.h.");

  py::class_<Gate, std::shared_ptr<Gate>>(module, "Gate", "The grants in use, for every door.")
      .def(py::init(
               [](const std::string& mode) { return std::make_shared<Gate>(parse_mode(mode)); }),
           py::arg("mode"))
      .def_property_readonly("mode", mode_name)
      .def_property_readonly("generation", &Gate::generation)
      .def("replace", &Gate::replace, py::arg("grants"), py::call_guard<Released>())
      .def(
          "authenticate",
          [](Gate& gate, const std::string& token, const std::vector<std::string>& names,
             const std::string& peer) {
            return unwrap(gate.authenticate({token, names, peer}));
          },
          py::arg("token"), py::arg("certificate_names"), py::arg("peer"))
      .def("renew", &Gate::renew, py::arg("caller"))
      .def(
          "charge",
          [](Gate& gate, Caller& caller, uint64_t bytes) {
            base::Status status = caller.charge(bytes);
            if (!status.ok()) gate.count_limited();
            check(std::move(status));
          },
          py::arg("caller"), py::arg("bytes"))
      .def(
          "require",
          [](Gate& gate, const Caller& caller, const std::string& role, const std::string& model) {
            const Role wanted = parse_role(role);
            if (model.empty() ? caller.may_everywhere(wanted) : caller.may(wanted, model)) return;
            gate.count_denied();
            check(caller.refuse(wanted, model.empty() ? "all models" : "model '" + model + "'"));
          },
          py::arg("caller"), py::arg("role"), py::arg("model"))
      .def(
          "refuse",
          [](Gate& gate, const Caller& caller, const std::string& role, const std::string& what) {
            gate.count_denied();
            check(caller.refuse(parse_role(role), what));
          },
          py::arg("caller"), py::arg("role"), py::arg("what"))
      .def(
          "require_sight",
          [](Gate& gate, const Caller& caller) {
            if (caller.may_see_all()) return;
            gate.count_denied();
            check(caller.refuse(Role::kRead, "all models, which the status shows"));
          },
          py::arg("caller"))
      .def("counts", counts_of);
}

}  // namespace petps::bindings
