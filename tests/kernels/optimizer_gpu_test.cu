// Optimizer steps on a device, each against the host's: every byte of weights and state, also replayed from a
// graph. The phases of Adafactor and Muon too.
#include <llmmem/kernels/adafactor_phases.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/muon_phases.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/model/bf16.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/device.cuh"
#include "support/optimizer_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

void check_steps(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const optimizer_form form = all_optimizer_forms[seed % all_optimizer_forms.size()];
  const std::uint64_t count = 1 + random() % 3000;
  const bool is_half = random() % 2 == 0;
  const std::vector<float> start = drawn_floats(count, 0.1, 0, random);
  optimizer_arrays here(form, count);
  require(optimizer_begin(host_executor{}, form, here.whole(form, count), start.data()).has_value(),
          "weights on the host", seed);
  std::array<device_array<std::byte>, 6> there;
  std::array<std::byte*, 6> bases{};
  for (std::size_t i = 0; i < there.size(); ++i) {
    if (here.of[i].empty()) continue;
    there[i] = device_array<std::byte>(std::vector<std::byte>(here.of[i].size(), std::byte{0xA5}));
    bases[i] = there[i].data();
  }
  const device_array<float> start_there(start);
  require(optimizer_begin(device_executor(stream), form, optimizer_arrays::piece(form, bases, 0, count),
                          start_there.data())
              .has_value(),
          "weights on the device", seed);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const std::vector<float> floats = drawn_floats(count, 0.01, seed % 4 == 0 ? 80 : 0, random);
    std::vector<std::byte> gradients(count * (is_half ? 2 : 4));
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(floats[i]);
      const std::uint16_t half = bf16_from_f32_bits(bits);
      if (is_half) {
        std::memcpy(gradients.data() + 2 * i, &half, 2);
      } else {
        std::memcpy(gradients.data() + 4 * i, &bits, 4);
      }
    }
    const device_array<std::byte> gradients_there(gradients);
    const optimizer_hyper by{.weight_decay = 0.1, .step = step, .gradient_scale = 0.5F, .seed = seed};
    // In two pieces, the second of which may begin where no wide access is possible.
    const std::uint64_t unit = cut_multiple(form);
    const std::uint64_t cut = random() % (count / unit + 1) * unit;
    for (const auto& [first, size] : {std::array{std::uint64_t{0}, cut}, std::array{cut, count - cut}}) {
      const auto step_of = [&](const auto& run, const std::array<std::byte*, 6>& at, const std::byte* g) {
        return optimizer_step(run, form, optimizer_arrays::piece(form, at, first, size),
                              {g + first * (is_half ? 2 : 4), is_half ? dtype::bf16 : dtype::f32, size}, by);
      };
      require(step_of(device_executor(stream, {.blocks = static_cast<std::uint32_t>(seed % 3)}), bases,
                      gradients_there.data())
                  .has_value(),
              "a step on the device", seed);
      require(step_of(host_executor{}, here.bases(), gradients.data()).has_value(), "a step on the host",
              seed);
    }
    require(cudaStreamSynchronize(stream) == cudaSuccess, "the stream", seed);
    for (std::size_t i = 0; i < there.size(); ++i)
      require(here.of[i].empty() || there[i].host() == here.of[i], "an array differs from the host's", seed);
  }
  const device_array<float> back_there(std::vector<float>(count, 7.0F));
  std::vector<float> back(count);
  require(optimizer_weights(device_executor(stream), form, optimizer_arrays::piece(form, bases, 0, count),
                            back_there.data())
              .has_value(),
          "weights from the device", seed);
  require(cudaStreamSynchronize(stream) == cudaSuccess, "the stream", seed);
  require(optimizer_weights(host_executor{}, form, here.whole(form, count), back.data()).has_value(),
          "weights from the host", seed);
  const std::vector<float> came = back_there.host();
  require(std::memcmp(came.data(), back.data(), 4 * count) == 0, "weights differ from the host's", seed);
}

/// The bytes of numbers, to compare also NaNs.
template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void check_adafactor(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  // Rows of whole packets or not, more bands than one, or a vector of more segments than one.
  const std::uint64_t most_rows = seed % 4 == 1 ? 90 : 20;
  const adafactor_shape shape =
      seed % 4 == 0 ? adafactor_shape{1, 1 + random() % 2200}
                    : adafactor_shape{2 + random() % most_rows, (2 + random() % 9) * (seed % 2 == 0 ? 4 : 1)};
  const std::uint64_t count = shape.elements();
  const std::uint64_t width = random() % 2 == 0 ? 2 : 4;  // of a gradient
  std::vector<float> weights = drawn_floats(count, 0.1, 0, random);
  std::vector<float> factors(shape.factors());
  const device_array<float> weights_there(weights);
  const device_array<float> factors_there(factors);
  const device_array<unordered_sum> sums_there(std::vector<unordered_sum>(adafactor_sums(shape)));
  const device_array<adafactor_terms> terms_there(std::vector<adafactor_terms>(1));
  const adafactor_arrays arrays{factors_there.data(), sums_there.data(), terms_there.data()};
  const device_executor run(stream, {.blocks = static_cast<std::uint32_t>(seed % 3)});
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const std::vector<float> floats = drawn_floats(count, 0.01, seed % 4 == 2 ? 80 : 0, random);
    std::vector<std::byte> gradients(count * width);
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(floats[i]);
      const std::uint32_t as_stored = width == 2 ? bf16_from_f32_bits(bits) : bits;
      std::memcpy(gradients.data() + width * i, &as_stored, width);
    }
    const device_array<std::byte> gradients_there(gradients);
    const adafactor_hyper by{.rate = 0.05, .weight_decay = 0.1, .step = step, .gradient_scale = 0.5F};
    const std::uint64_t cut = random() % (count + 1) / (seed % 2 == 0 ? 1 : 4) * (seed % 2 == 0 ? 1 : 4);
    const auto in_pieces = [&](const char* what, const auto& call) {
      for (const auto& [first, size] : {std::array{std::uint64_t{0}, cut}, std::array{cut, count - cut}}) {
        const auto piece = [&](float* of) {
          return optimizer_piece{
              .weights = reinterpret_cast<std::byte*>(of + first), .first = first, .count = size};
        };
        const auto part = [&](const std::byte* of) {
          return gradient_piece{of + first * width, width == 2 ? dtype::bf16 : dtype::f32, size};
        };
        require(call(piece(weights_there.data()), part(gradients_there.data()), piece(weights.data()),
                     part(gradients.data())),
                what, seed);
      }
    };
    std::vector<unordered_sum> sums(shape.sums());
    unordered_sum updates;
    require(adafactor_begin(run, shape, arrays).has_value(), "sums are cleared", seed);
    in_pieces("squares", [&](const auto& there, const auto& g_there, const auto& here, const auto& g_here) {
      return adafactor_add(run, shape, there, g_there, by, arrays).has_value() &&
             adafactor_add(shape, here, g_here, by, sums).has_value();
    });
    require(adafactor_factors(run, shape, by, arrays).has_value(), "factors", seed);
    const adafactor_terms terms = adafactor_factors(shape, sums, by, factors).value();
    in_pieces("updates", [&](const auto& there, const auto& g_there, const auto& here, const auto& g_here) {
      return adafactor_add_updates(run, shape, there, g_there, by, arrays).has_value() &&
             adafactor_add_updates(shape, here, g_here, by, factors, terms, updates).has_value();
    });
    in_pieces("weights", [&](const auto& there, const auto& g_there, const auto& here, const auto& g_here) {
      return adafactor_apply(run, shape, there, g_there, by, arrays).has_value() &&
             adafactor_apply(shape, here, g_here, by, factors, terms, updates).has_value();
    });
    require(cudaStreamSynchronize(stream) == cudaSuccess, "the stream", seed);
    const std::vector<unordered_sum> summed = sums_there.host();
    sums.push_back(updates);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const std::array both{sums[i].value(), summed[i].value()};
      require(std::memcmp(&both[0], &both[1], sizeof(double)) == 0, "a sum differs from the host's", seed);
    }
    require(same_bytes(factors_there.host(), factors), "factors differ from the host's", seed);
    require(same_bytes(weights_there.host(), weights), "adafactor's weights differ from the host's", seed);
  }
}

void check_muon(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t unit = seed % 2 == 0 ? 4 : 1;  // with wide accesses, and without
  const muon_shape shape{(2 + random() % 2) * unit, (2 + random() % 6) * unit};
  const muon_shape turned{shape.columns, shape.rows};
  const muon_shape of = seed % 3 == 0 ? turned : shape;
  const muon_hyper by{.weight_decay = 0.1, .gradient_scale = 0.5F};
  const std::uint64_t count = of.elements();
  std::vector<float> gradients = drawn_floats(count, 0.01, 0, random);
  if (seed % 7 == 3) gradients[count / 2] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> momentum = drawn_floats(count, 0.01, 0, random);
  std::vector<float> weights = drawn_floats(count, 0.1, 0, random);
  std::vector<float> updates(count);
  std::vector<float> scratch(of.scratch(), 7.0F);
  const device_array<float> gradients_there(gradients);
  const device_array<float> momentum_there(momentum);
  const device_array<float> weights_there(weights);
  const device_array<float> updates_there(updates);
  const device_array<float> scratch_there(scratch);
  const auto there = [](const device_array<float>& array, std::uint64_t size) {
    return std::span<float>(array.data(), size);
  };
  const device_executor run(stream, {.blocks = static_cast<std::uint32_t>(seed % 3)});
  const std::span<float> updated = there(updates_there, count);
  require(muon_momentum(run, there(gradients_there, count), there(momentum_there, count), updated, by)
                  .has_value() &&
              orthogonalize(run, of, updated, there(scratch_there, of.scratch()), by).has_value() &&
              muon_apply(run, of, there(weights_there, count), updated, by).has_value(),
          "muon on the device", seed);
  require(muon_momentum(gradients, momentum, updates, by).has_value() &&
              orthogonalize(of, updates, scratch, by).has_value() &&
              muon_apply(of, weights, updates, by).has_value(),
          "muon on the host", seed);
  require(cudaStreamSynchronize(stream) == cudaSuccess, "the stream", seed);
  require(same_bytes(momentum_there.host(), momentum), "momentum differs from the host's", seed);
  require(same_bytes(updates_there.host(), updates), "an update of muon differs from the host's", seed);
  require(same_bytes(weights_there.host(), weights), "muon's weights differ from the host's", seed);
}

}  // namespace

int main() {
  check_worlds(40, [](std::uint64_t seed, cudaStream_t stream) { check_steps(seed, stream); });
  check_worlds(12, [](std::uint64_t seed, cudaStream_t stream) { check_adafactor(seed, stream); });
  check_worlds(8, [](std::uint64_t seed, cudaStream_t stream) { check_muon(seed, stream); });
}
