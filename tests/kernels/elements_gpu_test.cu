// Every conversion of elements on a device against the host's: all codes and halves in pairs, and floats of
// all signs, exponents and first mantissa bits, with each of the last bits that rounding turns on.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/host_executor.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// Floats of which each group of eight has the upper 20 bits in common.
struct any_float {
  static constexpr std::uint64_t count = std::uint64_t{8} << 20U;

  [[nodiscard]] static LLMMEM_HD float at(std::uint64_t number) {
    constexpr std::uint32_t lasts[] = {0, 1, 0x7FF, 0x800, 0x801, 0xFFE, 0xFFF, 0xABC};
    const std::uint32_t last = lasts[number % 8];
    return detail::float_of_bits(static_cast<std::uint32_t>(number / 8) << 12U | last);
  }
};

/// A sum of the results of 64 items, each times an odd number that tells its place: what differs shows, and
/// the results need not come back one by one.
template <class Results>
struct sums_of {
  std::uint64_t* sums;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return Results::count / 64; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < 64; ++i)
      sum += Results::of(item * 64 + i) * (2 * i + 0x9E37'79B9'7F4A'7C15U);
    store_packet<8>(reinterpret_cast<std::byte*>(sums + item),
                    {{static_cast<std::uint32_t>(sum), static_cast<std::uint32_t>(sum >> 32U)}});
  }
};

/// A NaN is any: what becomes of it is held below.
[[nodiscard]] LLMMEM_HD std::uint64_t of_pair(const detail::float_pair& both) {
  const auto bits = [](float x) -> std::uint64_t { return x == x ? detail::bits_of_float(x) : 0x7FC0'0000U; };
  return bits(both.first) | bits(both.second) << 32U;
}

/// Two codes as floats, and as halves.
struct floats_of_codes {
  static constexpr std::uint64_t count = 65536;
  [[nodiscard]] static LLMMEM_HD std::uint64_t of(std::uint64_t number) {
    return of_pair(detail::floats_of_pair<dtype::fp8_e4m3>(static_cast<std::uint16_t>(number)));
  }
};
struct halves_of_codes {
  static constexpr std::uint64_t count = 65536;
  [[nodiscard]] static LLMMEM_HD std::uint64_t of(std::uint64_t number) {
    return detail::halves_of_pair(static_cast<std::uint16_t>(number));
  }
};
/// A half or a bf16 as a float, beside another one.
template <dtype E>
struct floats_of_words {
  static constexpr std::uint64_t count = 65536;
  [[nodiscard]] static LLMMEM_HD std::uint64_t of(std::uint64_t number) {
    return of_pair(detail::floats_of_pair<E>(static_cast<std::uint32_t>(number | (number ^ 0x5555U) << 16U)));
  }
};
/// A float as an element, alone and in both places of a pair.
template <dtype E>
struct nearest_to_floats {
  static constexpr std::uint64_t count = any_float::count;
  [[nodiscard]] static LLMMEM_HD std::uint64_t of(std::uint64_t number) {
    const float one = any_float::at(number);
    const float other = any_float::at(count - 1 - number);
    return nearest_of<E>(one) | std::uint64_t{detail::nearest_pair<E>(one, other)} << 32U;
  }
};

template <class Results>
void check_all(const char* what, cudaStream_t stream) {
  std::vector<std::uint64_t> expected(Results::count / 64);
  const device_array<std::uint64_t> there(expected);
  require(device_executor(stream).each(sums_of<Results>{there.data()}).has_value(), what, 0);
  require(host_executor{}.each(sums_of<Results>{expected.data()}).has_value(), what, 0);
  check(cudaStreamSynchronize(stream), what);
  const std::vector<std::uint64_t> found = there.host();
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] != expected[i]) require(false, what, i * 64);
  }
  std::printf("%s: %llu\n", what, static_cast<unsigned long long>(Results::count));
}

}  // namespace

int main() {
  check_worlds(1, [](std::uint64_t, cudaStream_t stream) {
    check_all<floats_of_codes>("e4m3 to floats", stream);
    check_all<halves_of_codes>("e4m3 to halves", stream);
    check_all<floats_of_words<dtype::bf16>>("bf16 to floats", stream);
    check_all<floats_of_words<dtype::f16>>("halves to floats", stream);
    check_all<nearest_to_floats<dtype::fp8_e4m3>>("floats to e4m3", stream);
    check_all<nearest_to_floats<dtype::bf16>>("floats to bf16", stream);
    check_all<nearest_to_floats<dtype::f16>>("floats to halves", stream);
  });
}
