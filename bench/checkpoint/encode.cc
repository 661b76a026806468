// codec.encode8: encoding of 8-bit asymmetric rows, in input bytes a second, against a copy of the
// same rows. Windows of both alternate, and walk over rows that are in no cache.
#include <cstring>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/measure.h"
#include "bench/common/memory.h"
#include "bench/common/random.h"
#include "codec/quantise.h"

namespace petps::bench {
namespace {

constexpr size_t kWindowRows = 4096;

void run(uint64_t rows, uint32_t dim, uint32_t rounds) {
  const codec::Quantisation wanted{codec::Method::kAsymmetric, 8};
  const size_t row_bytes = dim * sizeof(float);
  const Memory source(rows * row_bytes);
  const Memory copied(rows * row_bytes);
  const Memory encoded(rows * codec::quantised_row_bytes(wanted, dim));
  auto* values = reinterpret_cast<float*>(source.at());
  Random random(1);
  for (uint64_t i = 0; i < rows * dim; ++i) values[i] = static_cast<float>(random.unit() - 0.5);

  const uint64_t windows = rows / kWindowRows;
  uint64_t encoding = 0;
  // Half the rows apart, so that neither side finds what the other has just read.
  uint64_t copying = windows / 2;
  const Compared compared = compare(
      {.rounds = rounds},
      [&] {
        const uint64_t first = encoding++ % windows * kWindowRows;
        codec::quantise(wanted, values + first * dim, kWindowRows, dim,
                        encoded.at() + first * codec::quantised_row_bytes(wanted, dim));
        return kWindowRows * row_bytes;
      },
      [&] {
        const uint64_t first = copying++ % windows * kWindowRows;
        std::memcpy(copied.at() + first * row_bytes, source.at() + first * row_bytes,
                    kWindowRows * row_bytes);
        return kWindowRows * row_bytes;
      });
  Line("codec.encode8")
      .text("unit", "bytes/s")
      .text("ratio_to", "memcpy")
      .number("dim", dim)
      .compared(compared);
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  petps::bench::Arguments arguments(count, values);
  const uint64_t rows = arguments.number("rows", 1'000'000);
  const auto dim = arguments.small_number("dim", 64);
  const auto rounds = arguments.small_number("rounds", 5);
  arguments.finish();
  petps::bench::run(rows, dim, rounds);
}
