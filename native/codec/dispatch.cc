#include "base/cpu.h"
#include "codec/kernels.h"

namespace petps::codec {

const char* level_name(Level level) {
  switch (level) {
    case Level::kScalar:
      return "scalar";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool is_supported(Level level) {
  switch (level) {
    case Level::kScalar:
      return true;
    case Level::kAvx2:
      return base::has_avx2() && base::has_f16c();
    case Level::kAvx512:
      return is_supported(Level::kAvx2) && base::has_avx512bw();  // which implies F and VL
  }
  return false;
}

const Kernels& kernels_of(Level level) {
#ifdef __x86_64__
  static const Kernels avx512 = with_avx512(kAvx2Kernels);
  switch (level) {
    case Level::kScalar:
      return kScalarKernels;
    case Level::kAvx2:
      return kAvx2Kernels;
    case Level::kAvx512:
      return avx512;
  }
#else
  static_cast<void>(level);  // the compiler's own vectors, so far
#endif
  return kScalarKernels;
}

const Kernels& best_kernels() {
  static const Kernels& best = kernels_of(is_supported(Level::kAvx512) ? Level::kAvx512
                                          : is_supported(Level::kAvx2) ? Level::kAvx2
                                                                       : Level::kScalar);
  return best;
}

}  // namespace petps::codec
