// Stored rows of any bytes: every dtype and every quantisation decodes them to some values, inside
// its buffers, and what decodes to finite values can be encoded again.
#include "codec/codec.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstring>
#include <memory>

#include "codec/quantise.h"
#include "tests/fuzz/expect.h"

namespace petps::codec {
namespace {

constexpr size_t kRowsMax = 40;
constexpr uint32_t kDimMax = 300;

// Bytes in memory of exactly their size, at any alignment.
struct Exact {
  Exact(FuzzedDataProvider& input, size_t bytes, size_t skew)
      : memory(new std::byte[bytes + skew]), rows(memory.get() + skew) {
    std::memset(memory.get(), 0x5A, bytes + skew);
    const auto content = input.ConsumeBytes<uint8_t>(bytes);
    if (!content.empty()) std::memcpy(memory.get() + skew, content.data(), content.size());
  }
  std::unique_ptr<std::byte[]> memory;
  std::byte* rows;
};

void decode_dtype(FuzzedDataProvider& input) {
  const auto dtype = static_cast<Dtype>(input.ConsumeIntegralInRange<uint8_t>(0, 3));
  const auto dim = input.ConsumeIntegralInRange<uint32_t>(1, kDimMax);
  const auto n = input.ConsumeIntegralInRange<size_t>(0, kRowsMax);
  const size_t skew = dtype == Dtype::kF32 ? 0 : input.ConsumeIntegralInRange<size_t>(0, 7);
  const Exact stored(input, n * row_bytes(dtype, dim), skew);
  const std::unique_ptr<float[]> values(new float[n * dim]);
  decode(dtype, stored.rows, n, dim, values.get());
  const size_t bad = first_not_finite_stored(dtype, stored.rows, n, dim);
  FUZZ_EXPECT(bad <= first_not_finite(values.get(), n, dim));
  if (bad < n) return;
  const std::unique_ptr<std::byte[]> again(new std::byte[n * row_bytes(dtype, dim)]);
  encode(dtype, values.get(), n, dim, again.get());
  if (dtype != Dtype::kInt8)
    FUZZ_EXPECT(n == 0 || std::memcmp(again.get(), stored.rows, n * row_bytes(dtype, dim)) == 0);
}

void decode_quantised(FuzzedDataProvider& input) {
  Quantisation wanted;
  wanted.method = static_cast<Method>(input.ConsumeIntegralInRange<uint8_t>(0, 3));
  wanted.bits = input.PickValueInArray<uint32_t>({8, 4, 3, 2});
  wanted.bins = input.ConsumeIntegralInRange<uint32_t>(1, 40);
  wanted.ratio = input.ConsumeProbability<double>();
  wanted.seed = input.ConsumeIntegral<uint64_t>();
  FUZZ_EXPECT(check(wanted).ok());
  const auto dim = input.ConsumeIntegralInRange<uint32_t>(1, kDimMax);
  const auto n = input.ConsumeIntegralInRange<size_t>(0, 8);
  const size_t bytes = quantised_row_bytes(wanted, dim);
  const Exact stored(input, n * bytes, input.ConsumeIntegralInRange<size_t>(0, 7));
  const std::unique_ptr<float[]> values(new float[n * dim]);
  dequantise(wanted, stored.rows, n, dim, values.get());
  const std::unique_ptr<std::byte[]> again(new std::byte[n * bytes]);
  FUZZ_EXPECT(quantise(wanted, values.get(), n, dim, again.get()) <= n);
}

}  // namespace
}  // namespace petps::codec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  if (input.ConsumeBool()) {
    petps::codec::decode_dtype(input);
  } else {
    petps::codec::decode_quantised(input);
  }
  return 0;
}
