#include "base/cpu.h"

#include <cpuid.h>

#include <cstdlib>
#include <string_view>

namespace petps::base {
namespace {

constexpr unsigned kExtendedFeaturesLeaf = 7;

// __builtin_cpu_supports also checks that the operating system saves the wide registers. The
// cache-line instructions have no such state, and the builtin does not know them.
CpuFeatures find_features() {
  __builtin_cpu_init();
  CpuFeatures found;
  found.avx2 = __builtin_cpu_supports("avx2");
  found.avx512f = __builtin_cpu_supports("avx512f");
  found.avx512bw =
      found.avx512f && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  found.pclmul = __builtin_cpu_supports("pclmul");
  found.vpclmulqdq = found.avx512bw && __builtin_cpu_supports("vpclmulqdq");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    found.f16c = found.avx2 && (c & bit_F16C) != 0;
  }
  if (__get_cpuid_count(kExtendedFeaturesLeaf, 0, &a, &b, &c, &d)) {
    found.clflushopt = (b & bit_CLFLUSHOPT) != 0;
    found.clwb = (b & bit_CLWB) != 0;
  }
  // PETPS_CPU=avx2 or PETPS_CPU=baseline makes a machine with wide registers run the narrower
  // paths, for tests.
  const char* limit = std::getenv("PETPS_CPU");
  if (limit != nullptr) {
    const std::string_view wanted(limit);
    if (wanted == "avx2" || wanted == "baseline") {
      found.avx512f = found.avx512bw = found.vpclmulqdq = false;
    }
    if (wanted == "baseline") {
      found.avx2 = found.f16c = found.pclmul = false;
    }
  }
  return found;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = find_features();
  return features;
}

}  // namespace petps::base
