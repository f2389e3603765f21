/// @file
/// Cuts a model that is larger than the devices' memory into stages that are swapped between device and host
/// memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>
#include <llmmem/schedule/detail/swap_search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The costs of one layer. Times are of one micro-batch.
struct swap_layer {
  std::uint64_t parameter_bytes = 0;
  std::uint64_t input_bytes = 0;  ///< activations that enter the layer, of one micro-batch
  std::uint64_t forward_ns = 0;
  std::uint64_t backward_ns = 0;  ///< including recomputation
};

/// Equal devices, each with its own full-duplex link to the host.
struct swap_devices {
  std::uint32_t count = 1;
  /// Of each device: a hard limit. Excludes the memory that layers need while they compute, and that of
  /// gradients until they have left.
  std::uint64_t bytes = 0;
  std::uint64_t bytes_per_second = 0;
  std::uint64_t latency_ns = 0;
};

/// Layers `first_layer` to `end_layer` - 1, computed by one device. `cross_mapping` selects the device.
struct swapped_stage {
  std::size_t first_layer = 0;
  std::size_t end_layer = 0;
  std::size_t wave = 0;
  std::uint32_t position = 0;     ///< in the wave
  std::uint64_t bytes = 0;        ///< loaded and held: parameters, and inputs of all micro-batches
  std::uint64_t load_ns = 0;      ///< to load these bytes
  std::uint64_t forward_ns = 0;   ///< of one micro-batch
  std::uint64_t backward_ns = 0;  ///< of one micro-batch

  friend constexpr bool operator==(const swapped_stage&, const swapped_stage&) noexcept = default;
};

/// Stages that are on the devices at the same time, at most one on each.
struct swap_wave {
  std::size_t first_stage = 0;
  std::size_t end_stage = 0;
  std::uint64_t load_ns = 0;      ///< of its largest stage
  std::uint64_t forward_ns = 0;   ///< all micro-batches through all its stages
  std::uint64_t backward_ns = 0;  ///< the same
  bool prefetched = false;        ///< fits next to the previous wave, so it is loaded while that one computes

  friend constexpr bool operator==(const swap_wave&, const swap_wave&) noexcept = default;
};

/// A partition, and the costs of its step.
struct swap_plan {
  std::vector<swapped_stage> stages{};
  std::vector<swap_wave> waves{};
  std::uint64_t step_ns = 0;
  std::uint64_t compute_ns = 0;    ///< forward and backward of all waves
  std::uint64_t stall_ns = 0;      ///< step minus compute: the cost of swapping
  std::uint64_t bytes_loaded = 0;  ///< host to devices
  std::uint64_t bytes_stored = 0;  ///< devices to host: gradients, and inputs kept for the backward pass
};

namespace detail {

inline swap_problem checked_swap(std::span<const swap_layer> layers, const swap_devices& devices,
                                 std::uint32_t micro_batches, const char* who) {
  const auto refuse = [who](const std::string& why) { throw argument_error(std::string(who) + ": " + why); };
  if (layers.empty()) refuse("no layers; a model needs at least one");
  if (devices.count == 0) refuse("count of devices is 0; take at least one");
  if (micro_batches == 0) refuse("micro_batches is 0; a step needs at least one");

  swap_problem problem;
  problem.devices = devices.count;
  problem.device_bytes = devices.bytes;
  problem.micro_batches = micro_batches;
  problem.bytes_per_second = devices.bytes_per_second;
  problem.latency_ns = devices.latency_ns;
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const swap_layer& layer = layers[i];
    const std::uint64_t inputs = checked_multiply(layer.input_bytes, micro_batches, who);
    const std::uint64_t image = checked_add(layer.parameter_bytes, inputs, who);
    if (image > devices.bytes) {
      throw length_error(std::string(who) + ": layer " + std::to_string(i) + " needs " +
                         std::to_string(image) + " bytes, " + std::to_string(layer.parameter_bytes) +
                         " of parameters and " + std::to_string(inputs) + " of inputs; a device has " +
                         std::to_string(devices.bytes) + "; split the layer, or take fewer micro-batches");
    }
    problem.parameter_bytes.push_back(problem.parameter_bytes.back() + layer.parameter_bytes);
    problem.forward_ns.push_back(problem.forward_ns.back() + layer.forward_ns);
    problem.backward_ns.push_back(problem.backward_ns.back() + layer.backward_ns);
    problem.input_bytes.push_back(inputs);
    bytes = checked_add(bytes, image, who);
    time =
        add_ns(time, multiply_ns(add_ns(layer.forward_ns, layer.backward_ns, who), micro_batches, who), who);
  }
  // Each wave is loaded twice and stored once, and there are at most as many waves as layers. So everything,
  // three times for each layer, takes longer than any plan.
  const std::uint64_t load = link_ns(bytes, devices.bytes_per_second, devices.latency_ns, who);
  static_cast<void>(add_ns(time, multiply_ns(load, 3 * std::uint64_t{layers.size()}, who), who));
  return problem;
}

}  // namespace detail

/// Returns the costs of a given partition. `waves` has the ends of each wave's stages, in order: `{{2, 4},
/// {7}}` is layers 0-1 and 2-3 on two devices, then 4-6 on one.
///
/// **The model.** Parameters, optimizer and the inputs that each stage keeps for its backward pass live in
/// host memory; a stage is loaded before it computes. The stages of a wave are on different devices, and the
/// m micro-batches pass through them as through a pipeline:
///
///     forward(k) = sum of the stages' times + (m - 1) x the slowest stage's;  backward(k) alike
///     load(k)    = latency + bytes of the largest stage / bandwidth, rounded up: links work in parallel
///
/// Wave k + 1 is loaded while wave k computes if the largest stages of both fit into a device together,
/// otherwise after wave k (not prefetched). Because the largest stage decides, they fit for any assignment of
/// stages to devices. The last wave begins its backward pass at once; the other waves are loaded again, in
/// reverse. Gradients leave while they are computed, over the other direction of the link, and take at most
/// as long as the stage's load:
///
///     step = load(0) + forward(last) + max(backward(0), load(0)) + sum over k > 0 of
///         prefetched(k): max(forward(k-1), load(k)) + max(backward(k), load(k), load(k-1))
///         otherwise:     forward(k-1) + load(k) + max(backward(k), load(k)) + load(k-1)
///
/// The model ignores waves that begin before the previous one has ended on all devices, sends between the
/// stages of a wave, the optimizer on the host, and links that devices share.
///
/// @par Complexity   O(layers).
/// @throws argument_error  for no layers, devices or micro-batches, a bandwidth of 0 or above 2^53, ends that
///                         do not rise to the number of layers, a wave without stages or with more stages
///                         than devices.
/// @throws length_error    when a stage is larger than a device's memory (the text names a layer that is too
///                         large alone), or bytes or times pass 2^63 - 1.
[[nodiscard]] inline swap_plan price_partition(std::span<const swap_layer> layers,
                                               const swap_devices& devices, std::uint32_t micro_batches,
                                               std::span<const std::vector<std::size_t>> waves) {
  static constexpr const char* who = "price_partition";
  const auto problem = detail::checked_swap(layers, devices, micro_batches, who);
  const auto refuse = [](const std::string& why) { throw argument_error(std::string(who) + ": " + why); };
  swap_plan plan;
  std::uint64_t before_bytes = 0;
  std::size_t first = 0;
  for (std::size_t k = 0; k < waves.size(); ++k) {
    if (waves[k].empty() || waves[k].size() > devices.count) {
      refuse("wave " + std::to_string(k) + " has " + std::to_string(waves[k].size()) +
             " stages; it may have 1 to " + std::to_string(devices.count) + ", one a device");
    }
    const std::size_t from = first;
    detail::stage_peaks peaks;
    swap_wave wave{.first_stage = plan.stages.size()};
    for (const std::size_t end : waves[k]) {
      if (end <= first || end > layers.size()) {
        refuse("wave " + std::to_string(k) + " ends a stage at layer " + std::to_string(end) + " after " +
               std::to_string(first) + "; ends must rise, to " + std::to_string(layers.size()));
      }
      const auto stage = problem.stage(first, end);
      if (stage.bytes > devices.bytes) {
        throw length_error(std::string(who) + ": layers " + std::to_string(first) + " to " +
                           std::to_string(end - 1) + " need " + std::to_string(stage.bytes) +
                           " bytes, but a device has " + std::to_string(devices.bytes) +
                           "; split them into more stages");
      }
      plan.stages.push_back({.first_layer = first,
                             .end_layer = end,
                             .wave = k,
                             .position = static_cast<std::uint32_t>(plan.stages.size() - wave.first_stage),
                             .bytes = stage.bytes,
                             .load_ns = problem.load_ns(stage.bytes),
                             .forward_ns = stage.forward_ns,
                             .backward_ns = stage.backward_ns});
      peaks = peaks.with(stage);
      // Every wave is loaded for both passes, except the last, which is loaded once. The inputs of the first
      // stage come from outside.
      plan.bytes_loaded += k + 1 < waves.size() ? 2 * stage.bytes : stage.bytes;
      if (first > 0) plan.bytes_stored += problem.input_bytes[first];
      first = end;
    }
    wave.end_stage = plan.stages.size();
    wave.load_ns = problem.load_ns(peaks.bytes);
    wave.forward_ns = problem.wave_forward_ns(from, first, peaks);
    wave.backward_ns = problem.wave_backward_ns(from, first, peaks);
    wave.prefetched = k > 0 && peaks.bytes <= devices.bytes - before_bytes;
    plan.step_ns += k == 0 ? problem.first_ns(wave.load_ns, wave.backward_ns)
                           : problem.next_ns(plan.waves.back().load_ns, plan.waves.back().forward_ns,
                                             wave.load_ns, wave.backward_ns, wave.prefetched);
    plan.compute_ns += wave.forward_ns + wave.backward_ns;
    plan.waves.push_back(wave);
    before_bytes = peaks.bytes;
  }
  if (first != layers.size()) {
    refuse("the last stage ends at layer " + std::to_string(first) + " of " + std::to_string(layers.size()));
  }
  plan.step_ns += plan.waves.back().forward_ns;
  plan.stall_ns = plan.step_ns - plan.compute_ns;
  plan.bytes_stored += problem.parameter_bytes.back();
  return plan;
}

/// Returns the partition with the shortest step in the model of `price_partition`, among all that meet the
/// budget: any number of waves, each of at most one stage per device. After Mobius (Feng et al., ASPLOS
/// 2023), which finds its partition by a mixed-integer program; this model is simple enough for an exact
/// solution.
///
/// *How.* The cost of a wave depends on its slowest forward, its slowest backward and its largest stage. For
/// each range of layers, the search keeps the ways to cut it into stages that no other way beats in all
/// three. A dynamic program over these decides where each wave ends. Of the plans up to a wave's end, it
/// keeps those that no other plan beats in time so far, in forward time of the last wave and in its largest
/// stage, because later waves depend on nothing else. A good plan, found first, bounds the search.
///
/// @par Complexity   for L layers, at most w of which fit in a wave on G devices: O(L w^2 G P), with P the
///                   ways kept, mostly few: 1 for G = 1 or equal layers. docs/pipelines.md has times.
/// @throws argument_error, length_error as `price_partition`; the text names a layer that does not fit.
[[nodiscard]] inline swap_plan min_comm_partition(std::span<const swap_layer> layers,
                                                  const swap_devices& devices, std::uint32_t micro_batches) {
  const auto problem = detail::checked_swap(layers, devices, micro_batches, "min_comm_partition");
  const auto waves = detail::best_waves(problem);
  return price_partition(layers, devices, micro_batches, waves);
}

}  // namespace v0
}  // namespace llmmem
