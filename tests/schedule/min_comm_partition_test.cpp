#include "support/documented.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/min_comm_partition.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

using wave_ends = std::vector<std::vector<std::size_t>>;

struct case_of_swap {
  std::vector<swap_layer> layers;
  swap_devices devices{};
  std::uint32_t micro_batches = 1;
};

case_of_swap random_case(random_numbers& random, std::size_t most_layers, std::uint32_t most_devices) {
  case_of_swap each{.layers = std::vector<swap_layer>(
                        static_cast<std::size_t>(1 + random.below(std::uint64_t{most_layers})))};
  each.micro_batches = 1 + random.below(4U);
  std::uint64_t largest = 0;
  std::uint64_t all = 0;
  for (auto& layer : each.layers) {
    layer = {.parameter_bytes = random.below(std::uint64_t{30}),
             .input_bytes = random.below(std::uint64_t{4}),
             .forward_ns = random.below(std::uint64_t{20}),
             .backward_ns = random.below(std::uint64_t{40})};
    const auto image = layer.parameter_bytes + each.micro_batches * layer.input_bytes;
    largest = std::max(largest, image);
    all += image;
  }
  each.devices = {.count = 1 + random.below(most_devices),
                  .bytes = largest + random.below(all + 1),
                  .bytes_per_second = 500'000'000 + random.below(std::uint64_t{2'000'000'000}),
                  .latency_ns = random.below(std::uint64_t{5})};
  return each;
}

/// The model as its comment has it, written down once more.
std::uint64_t naive_step_ns(const case_of_swap& each, const wave_ends& waves) {
  struct wave {
    std::uint64_t forward = 0, backward = 0, load = 0, bytes = 0;
  };
  std::vector<wave> all;
  std::size_t first = 0;
  for (const auto& ends : waves) {
    wave now;
    std::uint64_t slowest_forward = 0;
    std::uint64_t slowest_backward = 0;
    for (const auto end : ends) {
      std::uint64_t forward = 0;
      std::uint64_t backward = 0;
      std::uint64_t bytes = each.layers[first].input_bytes * each.micro_batches;
      for (; first < end; ++first) {
        forward += each.layers[first].forward_ns;
        backward += each.layers[first].backward_ns;
        bytes += each.layers[first].parameter_bytes;
      }
      if (bytes > each.devices.bytes) return ~std::uint64_t{0};
      now.forward += forward;
      now.backward += backward;
      now.bytes = std::max(now.bytes, bytes);
      slowest_forward = std::max(slowest_forward, forward);
      slowest_backward = std::max(slowest_backward, backward);
    }
    now.forward += (each.micro_batches - 1) * slowest_forward;
    now.backward += (each.micro_batches - 1) * slowest_backward;
    const std::uint64_t bandwidth = each.devices.bytes_per_second;
    now.load = (now.bytes * 1'000'000'000 + bandwidth - 1) / bandwidth;
    if (now.bytes > 0) now.load += each.devices.latency_ns;
    all.push_back(now);
  }
  std::uint64_t step = all[0].load + all.back().forward + std::max(all[0].backward, all[0].load);
  for (std::size_t k = 1; k < all.size(); ++k) {
    const bool together = all[k].bytes + all[k - 1].bytes <= each.devices.bytes;
    if (together) {
      step += std::max(all[k - 1].forward, all[k].load);
      step += std::max(std::max(all[k].backward, all[k].load), all[k - 1].load);
    } else {
      step += all[k - 1].forward + all[k].load;
      step += std::max(all[k].backward, all[k].load) + all[k - 1].load;
    }
  }
  return step;
}

/// Every way to cut the layers: between two layers nothing, a stage's end, or a wave's end too.
template <class Visit>
void each_partition(std::size_t layers, std::uint32_t devices, const Visit& visit) {
  wave_ends waves(1);
  const auto extend = [&](const auto& self, std::size_t layer) -> void {
    if (layer == layers) {
      waves.back().push_back(layers);
      visit(waves);
      waves.back().pop_back();
      return;
    }
    self(self, layer + 1);
    waves.back().push_back(layer);
    if (waves.back().size() < devices) self(self, layer + 1);
    waves.emplace_back();
    self(self, layer + 1);
    waves.pop_back();
    waves.back().pop_back();
  };
  extend(extend, 1);
}

wave_ends ends_of(const swap_plan& plan) {
  wave_ends waves(plan.waves.size());
  for (const auto& stage : plan.stages)
    waves[stage.wave].push_back(stage.end_layer);
  return waves;
}

std::string refusal(const case_of_swap& each, const wave_ends& waves = {}) {
  try {
    if (waves.empty()) {
      static_cast<void>(min_comm_partition(each.layers, each.devices, each.micro_batches));
    } else {
      static_cast<void>(price_partition(each.layers, each.devices, each.micro_batches, waves));
    }
  } catch (const error& refused) {
    return refused.what();
  }
  return "";
}

void check_is_best(const case_of_swap& each) {
  std::uint64_t best = ~std::uint64_t{0};
  each_partition(each.layers.size(), each.devices.count,
                 [&](const wave_ends& waves) { best = std::min(best, naive_step_ns(each, waves)); });
  const auto plan = min_comm_partition(each.layers, each.devices, each.micro_batches);
  REQUIRE(plan.step_ns == best);
  REQUIRE(naive_step_ns(each, ends_of(plan)) == best);
}

}  // namespace

TEST_CASE("on one device the step is the minimum over all 2^(L-1) partitions") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    check_is_best(random_case(random, 12, 1));
  }
}

TEST_CASE("on several devices the step is the minimum over all stages and waves") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    check_is_best(random_case(random, 7, 4));
  }
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    random_numbers random(seed + 1000);
    auto each = random_case(random, 1, 3);
    each.layers.resize(10, each.layers[0]);
    for (auto& layer : each.layers)
      layer.parameter_bytes = random.below(each.devices.bytes / 2 + 1);
    each.devices.count = 3;
    each.devices.bytes *= 2;
    check_is_best(each);
  }
}

TEST_CASE("times near the largest are still compared") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    auto each = random_case(random, 6, 4);
    for (auto& layer : each.layers) {
      layer.forward_ns <<= 53;
      layer.backward_ns <<= 52;
    }
    each.devices.count = 1U << 31;  // by which the search multiplies, where it can
    check_is_best(each);
  }
}

TEST_CASE("a plan has the stages, waves and sums of its partition") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto each = random_case(random, 9, 3);
    wave_ends waves(1);
    for (std::size_t end = 1; end <= each.layers.size(); ++end) {
      if (end < each.layers.size() && random.once_in(3)) continue;
      if (waves.back().size() == each.devices.count || (!waves.back().empty() && random.once_in(2))) {
        waves.emplace_back();
      }
      waves.back().push_back(end);
    }
    const auto expected = naive_step_ns(each, waves);
    if (expected == ~std::uint64_t{0}) {
      CHECK(refusal(each, waves).find("; split them into more stages") != std::string::npos);
      continue;
    }
    const auto plan = price_partition(each.layers, each.devices, each.micro_batches, waves);
    REQUIRE(plan.step_ns == expected);
    REQUIRE(ends_of(plan) == waves);
    REQUIRE(plan.stall_ns + plan.compute_ns == plan.step_ns);
    std::uint64_t compute = 0;
    std::uint64_t loaded = 0;
    std::uint64_t stored = 0;
    std::size_t first = 0;
    for (const auto& wave : plan.waves) {
      REQUIRE(wave.first_stage == first);
      first = wave.end_stage;
      compute += wave.forward_ns + wave.backward_ns;
    }
    REQUIRE(first == plan.stages.size());
    REQUIRE(plan.compute_ns == compute);
    first = 0;
    for (const auto& stage : plan.stages) {
      REQUIRE(stage.first_layer == first);
      std::uint64_t forward = 0;
      std::uint64_t backward = 0;
      const std::uint64_t inputs = each.layers[first].input_bytes * each.micro_batches;
      std::uint64_t bytes = inputs;
      for (; first < stage.end_layer; ++first) {
        forward += each.layers[first].forward_ns;
        backward += each.layers[first].backward_ns;
        bytes += each.layers[first].parameter_bytes;
        stored += each.layers[first].parameter_bytes;
      }
      REQUIRE(stage.forward_ns == forward);
      REQUIRE(stage.backward_ns == backward);
      REQUIRE(stage.bytes == bytes);
      REQUIRE(stage.bytes <= each.devices.bytes);
      REQUIRE(stage.load_ns <= plan.waves[stage.wave].load_ns);
      REQUIRE(stage.position == &stage - &plan.stages[plan.waves[stage.wave].first_stage]);
      loaded += bytes * (stage.wave + 1 == plan.waves.size() ? 1 : 2);
      if (stage.first_layer > 0) stored += inputs;
    }
    REQUIRE(plan.bytes_loaded == loaded);
    REQUIRE(plan.bytes_stored == stored);
    // The budget: a wave that is prefetched stands beside any stage of the wave before it.
    for (std::size_t k = 1; k < plan.waves.size(); ++k) {
      std::uint64_t most = 0;
      for (const auto& a : plan.stages) {
        for (const auto& b : plan.stages) {
          if (a.wave + 1 == k && b.wave == k) most = std::max(most, a.bytes + b.bytes);
        }
      }
      REQUIRE(plan.waves[k].prefetched == (most <= each.devices.bytes));
    }
    REQUIRE_FALSE(plan.waves[0].prefetched);
  }
}

TEST_CASE("four equal layers on one device: compute hides all loads except the first") {
  const case_of_swap each{
      .layers = std::vector<swap_layer>(
          4, {.parameter_bytes = 10, .input_bytes = 0, .forward_ns = 10, .backward_ns = 20}),
      .devices = {.count = 1, .bytes = 20, .bytes_per_second = 1'000'000'000}};
  const auto plan = min_comm_partition(each.layers, each.devices, 1);
  CHECK(plan.stages.size() == 4);
  CHECK(plan.compute_ns == 4 * 30);
  CHECK(plan.stall_ns == 10);
  CHECK(plan.bytes_loaded == 40 + 30);
  CHECK(plan.bytes_stored == 40);
  // Two layers a stage fill the device: nothing can be prefetched.
  const auto coarse = price_partition(each.layers, each.devices, 1, wave_ends{{2}, {4}});
  CHECK_FALSE(coarse.waves[1].prefetched);
  CHECK(coarse.stall_ns == 20 + 20 + 20);
}

TEST_CASE("docs/pipelines.md shows what partitions of 40 layers take") {
  const std::vector<swap_layer> layers(40, {.parameter_bytes = 634'000'000,
                                            .input_bytes = 20'000'000,
                                            .forward_ns = 10'000'000,
                                            .backward_ns = 30'000'000});
  std::string table =
      "| devices | partition | waves | stages | step (s) | stall (s) | loaded (GB) "
      "|\n|---|---|---|---|---|---|---|\n";
  for (const std::uint32_t count : {1U, 2U, 4U}) {
    const swap_devices devices{
        .count = count, .bytes = 10'000'000'000, .bytes_per_second = 12'000'000'000, .latency_ns = 10'000};
    const auto line = [&](const char* name, const swap_plan& plan) {
      const auto seconds = [](std::uint64_t ns) {
        return llmmem_tests::decimal(static_cast<double>(ns) / 1e9, 3);
      };
      table += "| " + std::to_string(count) + " | " + name + " | " + std::to_string(plan.waves.size()) +
               " | " + std::to_string(plan.stages.size()) + " | " + seconds(plan.step_ns) + " | " +
               seconds(plan.stall_ns) + " | " +
               llmmem_tests::decimal(static_cast<double>(plan.bytes_loaded) / 1e9, 1) + " |\n";
    };
    const auto equal = [&](std::size_t layers_a_stage) {
      wave_ends waves(1);
      for (std::size_t end = layers_a_stage; end - layers_a_stage < layers.size(); end += layers_a_stage) {
        if (waves.back().size() == count) waves.emplace_back();
        waves.back().push_back(std::min(end, layers.size()));
      }
      return price_partition(layers, devices, 4, waves);
    };
    line("one layer a stage", equal(1));
    line("as many layers as fit, 15", equal(15));
    line("as many as fit twice, 7", equal(7));
    line("`min_comm_partition`", min_comm_partition(layers, devices, 4));
  }
  llmmem_tests::check_documented("pipelines.md", table);
}

TEST_CASE("a layer that fits no device is named with its bytes") {
  case_of_swap each{.layers = {{.parameter_bytes = 5}, {.parameter_bytes = 9, .input_bytes = 2}},
                    .devices = {.count = 2, .bytes = 12, .bytes_per_second = 1},
                    .micro_batches = 2};
  CHECK(refusal(each) ==
        "min_comm_partition: layer 1 needs 13 bytes, 9 of parameters and 4 of inputs; a device has 12; split "
        "the "
        "layer, or take fewer micro-batches");
  each.devices.bytes = 13;
  CHECK(refusal(each, {{2}}) ==
        "price_partition: layers 0 to 1 need 14 bytes, but a device has 13; split them into more stages");
}

TEST_CASE("meaningless facts and partitions are refused") {
  const case_of_swap good{.layers = std::vector<swap_layer>(3, {.parameter_bytes = 1}),
                          .devices = {.count = 2, .bytes = 9, .bytes_per_second = 1}};
  auto bad = good;
  bad.layers.clear();
  CHECK(refusal(bad) == "min_comm_partition: no layers; a model needs at least one");
  bad = good;
  bad.devices.count = 0;
  CHECK(refusal(bad) == "min_comm_partition: count of devices is 0; take at least one");
  bad = good;
  bad.micro_batches = 0;
  CHECK(refusal(bad) == "min_comm_partition: micro_batches is 0; a step needs at least one");
  bad = good;
  bad.devices.bytes_per_second = 0;
  CHECK(refusal(bad) == "min_comm_partition: bytes_per_second is 0; it must be 1 to 2^53");
  bad = good;
  bad.layers[0].forward_ns = std::uint64_t{1} << 62;
  bad.micro_batches = 2;
  CHECK(refusal(bad) ==
        "min_comm_partition: 4611686018427387904 x 2 exceeds the latest time, 2^63 - 1 ns; lower the times");
  bad = good;
  bad.layers[0].input_bytes = std::uint64_t{1} << 62;
  bad.micro_batches = 2;
  CHECK(refusal(bad) ==
        "min_comm_partition: 4611686018427387904 x 2 exceeds the limit of 2^63 - 1 bytes; lower one of the "
        "two");

  CHECK(refusal(good, {{1, 2, 3}}) ==
        "price_partition: wave 0 has 3 stages; it may have 1 to 2, one a device");
  CHECK(refusal(good, {{1}, {}}) == "price_partition: wave 1 has 0 stages; it may have 1 to 2, one a device");
  CHECK(refusal(good, {{1}, {1}}) ==
        "price_partition: wave 1 ends a stage at layer 1 after 1; ends must rise, to 3");
  CHECK(refusal(good, {{4}}) ==
        "price_partition: wave 0 ends a stage at layer 4 after 0; ends must rise, to 3");
  CHECK(refusal(good, {{1}, {2}}) == "price_partition: the last stage ends at layer 2 of 3");
}
