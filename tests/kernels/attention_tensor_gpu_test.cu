// Attention by tensor cores: first that a device's lanes have of a product what the host's have, with
// integers, whose sums have one value; then outputs near the host's, over all shapes, also from a graph; the
// same bits wherever blocks lie; and outputs over codes within their bounds of those over floats.
#include <llmmem/kernels/detail/tensor_tiles.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/model/dtype.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/attention_on_device.cuh"
#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/device.cuh"
#include "support/small_elements.hpp"
#include "support/tensor_bounds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// A product for each item, of what each lane has in memory; then a transposition.
template <dtype Type>
struct product_work {
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 1;

  const detail::tensor_left* left;
  const detail::tensor_right* right;
  detail::tensor_sum* sum;
  std::uint32_t* turned;
  std::uint64_t count;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return count; }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }
  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    typename Group::template held<detail::tensor_left> a;
    typename Group::template held<detail::tensor_right> b;
    typename Group::template held<detail::tensor_sum> c;
    typename Group::template held<std::uint32_t> words;
    group.each([&](std::uint32_t lane) {
      const std::uint64_t at = (item < count ? item : 0) * 32 + lane;
      a[lane] = left[at];
      b[lane] = right[at];
      c[lane] = sum[at];
      words[lane] = left[at].word[0];
    });
    detail::multiply_add<Type>(group, c, a, b);
    detail::transpose(group, words);
    if (item >= count) return;
    group.each([&](std::uint32_t lane) {
      sum[item * 32 + lane] = c[lane];
      turned[item * 32 + lane] = words[lane];
    });
  }
};

template <dtype Type>
void check_products(std::uint64_t seed, cudaStream_t stream) {
  constexpr std::uint64_t count = 5;
  std::mt19937_64 random(seed);
  const auto pair = [&] {
    const auto integer = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
    return detail::nearest_pair<Type>(integer(), integer());
  };
  std::vector<detail::tensor_left> left(count * 32);
  std::vector<detail::tensor_right> right(count * 32);
  std::vector<float> sum(count * 32 * 4);
  std::vector<std::uint32_t> turned(count * 32);
  for (auto& each : left)
    each = {{pair(), pair(), pair(), pair()}};
  for (auto& each : right)
    each = {{pair(), pair()}};
  for (float& each : sum)
    each = static_cast<float>(random() % 100);
  const device_array<detail::tensor_left> on_left(left);
  const device_array<detail::tensor_right> on_right(right);
  const device_array<float> on_sum(sum);
  const device_array<std::uint32_t> on_turned(turned);
  const product_work<Type> there{on_left.data(), on_right.data(),
                                 reinterpret_cast<detail::tensor_sum*>(on_sum.data()), on_turned.data(),
                                 count};
  require(device_executor(stream).each(there).has_value(), "products", seed);
  check(cudaStreamSynchronize(stream), "products");
  const product_work<Type> here{left.data(), right.data(), reinterpret_cast<detail::tensor_sum*>(sum.data()),
                                turned.data(), count};
  require(host_executor{}.each(here).has_value(), "products on the host", seed);
  require(on_sum.host() == sum, "products differ from the host's", seed);
  require(on_turned.host() == turned, "turned matrices differ from the host's", seed);
}

/// Both are as near to the definition as 8 binary digits of weights are, or 11.
void check_near(const attention_world& world, const attention_results& here, const attention_results& host,
                std::uint64_t seed) {
  const double bound = world.layout.element == dtype::bf16 ? 0.03 : 0.004;
  const dtype element = world.options.element;
  const double rounds = element == dtype::f32 ? 0 : (element == dtype::bf16 ? 0x1p-7 : 0x1p-10);
  std::vector<std::byte> left = here.out;
  for (std::uint64_t row = 0; row < world.rows; ++row) {
    for (std::uint32_t query = 0; query < world.query_heads(); ++query) {
      const std::size_t at = row * world.out_strides[0] + query * world.out_strides[1];
      const float told = here.log_sum_exp[row * world.query_heads() + query];
      const float expected = host.log_sum_exp[row * world.query_heads() + query];
      require(told == expected || std::fabs(told - expected) < bound, "logarithms are not near the host's",
              seed);
      for (std::uint64_t e = 0; e < world.layout.vector_elements(1); ++e) {
        const std::size_t place = at + e * element_bytes(element);
        const double a = load_element(element, left.data() + place);
        const double b = load_element(element, host.out.data() + place);
        const bool is_near = std::fabs(a - b) <= bound + rounds * std::fabs(b);
        require(is_near || (std::isnan(a) && std::isnan(b)), "outputs are not near the host's", seed);
        store_element(element, left.data() + place, static_cast<float>(b));
      }
    }
  }
  require(left == host.out, "something else was touched", seed);
  require(here.flag == host.flag, "the flag differs from the host's", seed);
}

/// Codes in all forms, against the host's attention to their floats by plain sums.
void check_codes(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr coded_kind kinds[] = {coded_kind::any, coded_kind::exact, coded_kind::short_runs,
                                  coded_kind::zeros};
  const coded_world world(random, dtype::f32, kinds[seed % 4], attention_arithmetic::tensor_cores);
  alignas(16) static std::byte somewhere[16];
  std::uintptr_t all = 0;
  for (std::byte* const each : world.codes.planes_in(somewhere))
    all |= reinterpret_cast<std::uintptr_t>(each);
  const std::uint64_t how = all % 4 == 0 ? seed : 2 * seed;
  const attention_results here = attend_on_device(world.codes, how, stream);
  const attention_results floats = attend_on_host(world.floats, how);
  require(here.flag == 0, "a flag over codes", seed);
  const auto output = [](const attention_world& of, const std::vector<std::byte>& out, std::uint64_t row,
                         std::uint32_t query, std::uint64_t e) {
    return static_cast<double>(
        load_element(dtype::f32, out.data() + row * of.out_strides[0] + query * of.out_strides[1] + 4 * e));
  };
  for (std::uint64_t row = 0; row < world.codes.rows; ++row) {
    if (!world.codes.sequences.empty() && world.codes.sequences[row] < 0) continue;
    for (std::uint32_t query = 0; query < world.codes.query_heads(); ++query) {
      const tensor_bounds bounds = tensor_bounds_of(world, row, query);
      const double told = here.log_sum_exp[row * world.codes.query_heads() + query];
      const double expected = floats.log_sum_exp[row * world.codes.query_heads() + query];
      require(told == expected || std::fabs(told - expected) <= bounds.product,
              "logarithms over codes are not within their bound", seed);
      for (std::uint64_t e = 0; e < world.codes.layout.vector_elements(1); ++e)
        require(std::fabs(output(world.codes, here.out, row, query, e) -
                          output(world.floats, floats.out, row, query, e)) <= bounds.outputs[e],
                "outputs over codes are not within their bound", seed);
    }
  }
}

void check_world(std::uint64_t seed, cudaStream_t stream) {
  check_products<dtype::bf16>(seed, stream);
  check_products<dtype::f16>(seed, stream);
  check_codes(seed, stream);
  std::mt19937_64 random(seed);
  const attention_world world(random, attention_arithmetic::tensor_cores);
  const attention_results here = attend_on_device(world, seed, stream);
  check_near(world, here, attend_on_host(world, seed), seed);
  const attention_results other = attend_on_device(rearranged(world, random), seed, stream);
  require(other.out == here.out, "outputs differ where blocks lie elsewhere", seed);
  require(other.log_sum_exp == here.log_sum_exp, "logarithms differ where blocks lie elsewhere", seed);
}

}  // namespace

int main() {
  check_worlds(200, check_world);
}
