// What this processor can do, detected once at run time, so that one binary runs on all processors
// of its kind: x86-64 or aarch64.
#pragma once

namespace petps::base {

struct CpuFeatures {
  bool avx2 = false;
  bool f16c = false;  // half-precision conversion
  bool avx512f = false;
  bool avx512bw = false;    // implies avx512f and avx512vl here
  bool pclmul = false;      // carry-less multiply, 128 bits
  bool vpclmulqdq = false;  // carry-less multiply, 512 bits; implies avx512bw here
  bool clflushopt = false;
  bool clwb = false;
  bool dcpop = false;  // aarch64: write a line back to the point of persistence
};

// Return the features that both the processor and the operating system support.
const CpuFeatures& cpu_features();

inline bool has_avx2() { return cpu_features().avx2; }
inline bool has_f16c() { return cpu_features().f16c; }
inline bool has_avx512bw() { return cpu_features().avx512bw; }
inline bool has_clwb() { return cpu_features().clwb; }
inline bool has_clflushopt() { return cpu_features().clflushopt; }
inline bool has_dcpop() { return cpu_features().dcpop; }

}  // namespace petps::base
