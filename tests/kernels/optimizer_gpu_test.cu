// Optimizer steps on a device, each against the host's: every byte of weights and state, also replayed from a
// graph.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/model/bf16.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
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

}  // namespace

int main() {
  check_worlds(40, [](std::uint64_t seed, cudaStream_t stream) { check_steps(seed, stream); });
}
