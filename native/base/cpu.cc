#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#else
#error "petps runs on x86-64 and aarch64"
#endif

#include <cstdlib>
#include <string_view>

namespace petps::base {
namespace {

#ifdef __aarch64__

CpuFeatures find_features() {
  CpuFeatures features;
  features.dcpop = (getauxval(AT_HWCAP) & HWCAP_DCPOP) != 0;
  return features;
}

#else

constexpr unsigned kExtendedFeaturesLeaf = 7;

// __builtin_cpu_supports also checks that the operating system saves the wide registers. The
// cache-line instructions have no such state, and the builtin does not know them.
CpuFeatures find_features() {
  __builtin_cpu_init();
  CpuFeatures features;
  features.avx2 = __builtin_cpu_supports("avx2");
  features.avx512f = __builtin_cpu_supports("avx512f");
  features.avx512bw =
      features.avx512f && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  features.pclmul = __builtin_cpu_supports("pclmul");
  features.vpclmulqdq = features.avx512bw && __builtin_cpu_supports("vpclmulqdq");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) features.f16c = features.avx2 && (c & bit_F16C) != 0;
  if (__get_cpuid_count(kExtendedFeaturesLeaf, 0, &a, &b, &c, &d)) {
    features.clflushopt = (b & bit_CLFLUSHOPT) != 0;
    features.clwb = (b & bit_CLWB) != 0;
  }
  // PETPS_CPU=avx2 or PETPS_CPU=baseline makes a machine with wide registers run the narrower
  // paths, for tests.
  const char* variable = std::getenv("PETPS_CPU");
  const std::string_view widest = variable == nullptr ? "" : variable;
  if (widest == "avx2" || widest == "baseline")
    features.avx512f = features.avx512bw = features.vpclmulqdq = false;
  if (widest == "baseline") features.avx2 = features.f16c = features.pclmul = false;
  return features;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = find_features();
  return features;
}

}  // namespace petps::base
