#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/split_decode.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

constexpr std::uint64_t never = ~std::uint64_t{0};

struct step {
  std::vector<split_sequence> sequences{};
  split_rates rates{};
  std::uint64_t device_blocks = 0;

  [[nodiscard]] split_plan plan() const { return split_decode(sequences, rates, device_blocks); }
};

/// Small numbers, so that ties, full budgets and idle sides are frequent.
step any_step(random_numbers& random, std::uint64_t most_sequences) {
  step out;
  const auto side = [&] {
    return decode_rates{.fixed_ns = random.below(std::uint64_t{30}),
                        .sequence_ns = random.below(std::uint64_t{6}),
                        .token_ps = 1 + random.below(std::uint64_t{4000})};
  };
  out.rates = {.device = side(), .host = side(), .link_ns = random.below(std::uint64_t{4})};
  std::uint64_t fixed_blocks = 0;
  std::uint64_t all_blocks = 0;
  out.sequences.resize(static_cast<std::size_t>(random.below(most_sequences + 1)));
  for (split_sequence& each : out.sequences) {
    each.tokens = random.below(std::uint64_t{40});
    each.blocks = random.once_in(8) ? random.below(std::uint64_t{12}) : (each.tokens + 3) / 4;
    if (random.once_in(5)) each.fixed = random.once_in(2) ? decode_side::host : decode_side::device;
    all_blocks += each.blocks;
    if (each.fixed == decode_side::device) fixed_blocks += each.blocks;
  }
  out.device_blocks = fixed_blocks + random.below(all_blocks - fixed_blocks + 2);
  return out;
}

/// The model as its comment has it, written down once more, rounded at the end.
std::uint64_t naive_step_ns(const step& of, const std::vector<decode_side>& sides) {
  std::uint64_t device = of.rates.device.fixed_ns * 1000;
  std::uint64_t host = 0;
  std::uint64_t blocks = 0;
  bool is_used = false;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const split_sequence& each = of.sequences[i];
    if (each.fixed && *each.fixed != sides[i]) return never;
    if (sides[i] == decode_side::device) {
      device += of.rates.device.sequence_ns * 1000 + each.tokens * of.rates.device.token_ps;
      blocks += each.blocks;
    } else {
      host += (of.rates.host.sequence_ns + of.rates.link_ns) * 1000 + each.tokens * of.rates.host.token_ps;
      is_used = true;
    }
  }
  if (blocks > of.device_blocks) return never;
  if (is_used) host += of.rates.host.fixed_ns * 1000;
  return (std::max(device, host) + 999) / 1000;
}

std::uint64_t least_step_ns(const step& of) {
  std::uint64_t least = never;
  for (std::uint32_t which = 0; which < 1U << of.sequences.size(); ++which) {
    std::vector<decode_side> sides;
    for (std::size_t i = 0; i < of.sequences.size(); ++i)
      sides.push_back((which >> i & 1U) != 0 ? decode_side::host : decode_side::device);
    least = std::min(least, naive_step_ns(of, sides));
  }
  return least;
}

/// What holds of every plan.
void check_plan(const step& of, const split_plan& plan) {
  REQUIRE(plan.sides.size() == of.sequences.size());
  CHECK(plan.step_ns == naive_step_ns(of, plan.sides));
  CHECK(plan.step_ns == std::max(plan.device_ns, plan.host_ns));
  CHECK(plan.lower_bound_ns <= plan.step_ns);
  CHECK(plan.device_blocks <= of.device_blocks);
  split_plan priced = price_split(of.sequences, of.rates, of.device_blocks, plan.sides);
  priced.is_exact = plan.is_exact;
  CHECK(priced == plan);
}

/// The longest host time of a free sequence.
std::uint64_t longest_host_ns(const step& of) {
  std::uint64_t longest = 0;
  for (const split_sequence& each : of.sequences) {
    if (!each.fixed)
      longest = std::max(longest, of.rates.host.sequence_ns + of.rates.link_ns +
                                      (each.tokens * of.rates.host.token_ps + 999) / 1000);
  }
  return longest;
}

/// Contexts of an inference service at work, in the middle of their answers: the Azure trace, or numbers of
/// its kind.
std::vector<std::uint64_t> served_contexts() {
  std::vector<std::uint64_t> out;
  const char* const folder = std::getenv("LLMMEM_DATA_DIR");
  std::ifstream trace(std::string(folder == nullptr ? "" : folder) + "/azure_llm_inference_2023_conv.csv");
  std::string line;
  std::getline(trace, line);
  while (std::getline(trace, line) && out.size() < 4000) {
    const std::size_t first = line.find(',');
    const std::size_t second = line.find(',', first + 1);
    out.push_back(std::stoull(line.substr(first + 1)) + std::stoull(line.substr(second + 1)) / 2);
  }
  random_numbers random(1);
  while (out.size() < 4000)
    out.push_back(20 + random.below(100 + random.below(std::uint64_t{4000})));
  return out;
}

/// A device, its host and a model, by published peak rates.
struct machine {
  const char* name = "";
  std::uint64_t weights_ns = 0;   ///< to read all weights
  std::uint64_t multiply_ns = 0;  ///< of all weights with a sequence's row, on the device
  split_rates rates{};
  std::uint64_t device_blocks = 0;
};

/// Llama-2-7B: 13.5 GB of weights, 512 KiB of KV a token. 320 GB/s, 65 Tflop/s and 16 GB; a host of 141 GB/s
/// (6 channels of DDR4-2933); a link of 16 GB/s. Host and link start in 0.8 ms, as in NEO.
constexpr machine t4{.name = "T4, 7B",
                     .weights_ns = 42'000'000,
                     .multiply_ns = 207'000,
                     .rates = {.device = {.token_ps = 1'638'000},
                               .host = {.fixed_ns = 800'000, .token_ps = 3'718'000},
                               .link_ns = 80'000},
                     .device_blocks = 178};
/// Llama-3.1-8B: 16 GB of weights, 128 KiB of KV a token. 3.35 TB/s, 989 Tflop/s and 80 GB; a host of 307
/// GB/s (8 channels of DDR5-4800); a link of 64 GB/s.
constexpr machine h100{.name = "H100, 8B",
                       .weights_ns = 4'800'000,
                       .multiply_ns = 16'000,
                       .rates = {.device = {.token_ps = 39'000},
                                 .host = {.fixed_ns = 800'000, .token_ps = 427'000},
                                 .link_ns = 14'000},
                       .device_blocks = 26'700};

/// A step with the first sequences of a queue.
struct served_step {
  std::size_t sequences = 0;
  std::uint64_t ns = 0;
  [[nodiscard]] double per_second() const {
    return static_cast<double>(sequences) * 1e9 / static_cast<double>(ns);
  }
};

struct queue {
  const machine* of = nullptr;
  std::vector<split_sequence> waiting{};

  /// The device multiplies all sequences, also those that attend on the host.
  [[nodiscard]] split_rates rates(std::size_t sequences) const {
    split_rates out = of->rates;
    out.device.fixed_ns = std::max(of->weights_ns, sequences * of->multiply_ns);
    return out;
  }
  [[nodiscard]] std::span<const split_sequence> first(std::size_t count) const {
    return std::span(waiting).first(count);
  }
  [[nodiscard]] split_plan price(const std::vector<decode_side>& sides) const {
    return price_split(first(sides.size()), rates(sides.size()), of->device_blocks, sides);
  }

  /// First come, first served, until the device's blocks are taken.
  [[nodiscard]] std::vector<decode_side> device_alone() const {
    std::uint64_t blocks = 0;
    std::vector<decode_side> sides;
    while (blocks + waiting[sides.size()].blocks <= of->device_blocks) {
      blocks += waiting[sides.size()].blocks;
      sides.push_back(decode_side::device);
    }
    return sides;
  }
  /// NEO's rule: then each further one attends on the host, as long as the host ends no later than the
  /// device. The first that breaks this ends the batch. The device alone, if that serves more in a second.
  [[nodiscard]] std::vector<decode_side> neo() const {
    const std::vector<decode_side> alone = device_alone();
    std::vector<decode_side> sides = alone;
    while (true) {
      sides.push_back(decode_side::host);
      const split_plan plan = price(sides);
      if (plan.host_ns > plan.device_ns) break;
    }
    sides.pop_back();
    return served(sides).per_second() > served(alone).per_second() ? sides : alone;
  }
  [[nodiscard]] served_step served(const std::vector<decode_side>& sides) const {
    return {sides.size(), price(sides).step_ns};
  }
  [[nodiscard]] served_step planned(std::size_t count) const {
    return {count, split_decode(first(count), rates(count), of->device_blocks).step_ns};
  }
  /// As many as serve the most in a second, looked for from a count on.
  [[nodiscard]] served_step planned_from(std::size_t count) const {
    served_step best = planned(count);
    for (std::size_t after = 1; after < 6; ++after) {
      const served_step next = planned(count + after);
      if (next.per_second() > best.per_second()) best = next;
    }
    return best;
  }
};

}  // namespace

TEST_CASE("up to twelve sequences the split is the best of all choices") {
  std::uint64_t split = 0;
  std::uint64_t short_of_blocks = 0;
  for (const auto seed : seeds(600)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const step of = any_step(random, seed % 20 == 0 ? 12 : 8);
    const split_plan plan = of.plan();
    check_plan(of, plan);
    CHECK(plan.is_exact);
    const std::uint64_t least = least_step_ns(of);
    REQUIRE(plan.step_ns == least);
    split += plan.host_sequences != 0 && plan.host_sequences != of.sequences.size() ? 1U : 0U;
    step roomy = of;
    roomy.device_blocks = never / 4;
    short_of_blocks += roomy.plan().step_ns < least ? 1U : 0U;
  }
  CHECK(split > 200);
  CHECK(short_of_blocks > 50);
}

TEST_CASE("the search for many sequences is near the best, and its bound below every choice") {
  std::uint64_t best = 0;
  std::uint64_t all = 0;
  for (const auto seed : seeds(600)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const step of = any_step(random, seed % 20 == 0 ? 12 : 8);
    const auto items = detail::split_items(of.sequences, of.rates, "test");
    const auto problem = detail::problem_of(of.sequences, items, of.rates, of.device_blocks, "test");
    const auto relaxed = detail::relax_split(problem);
    const auto sums = detail::sums_of(problem, detail::near_best_split(problem, relaxed));
    REQUIRE(sums.blocks <= problem.blocks);
    const std::uint64_t found = detail::ns_of_ps(detail::step_time(problem, sums));
    const std::uint64_t least = least_step_ns(of);
    REQUIRE(detail::ns_of_ps(relaxed.bound) <= least);
    REQUIRE(found >= least);
    CHECK(found <= detail::ns_of_ps(relaxed.bound) + 2 * longest_host_ns(of) + 1);
    best += found == least ? 1U : 0U;
    ++all;
  }
  MESSAGE(best << " of " << all << " are the best choice");
  CHECK(best * 100 > all * 90);
}

TEST_CASE("200 sequences of served lengths are split within a thousandth of the bound") {
  const std::vector<std::uint64_t> contexts = served_contexts();
  std::uint64_t split = 0;
  for (const auto seed : seeds(24)) {
    CAPTURE(seed);
    random_numbers random(seed);
    step of;
    of.rates = {.device = {.fixed_ns = random.below(std::uint64_t{20'000'000}),
                           .sequence_ns = random.below(std::uint64_t{20'000}),
                           .token_ps = 40'000 + random.below(std::uint64_t{400'000})},
                .host = {.fixed_ns = random.below(std::uint64_t{800'000}),
                         .sequence_ns = random.below(std::uint64_t{20'000}),
                         .token_ps = 400'000 + random.below(std::uint64_t{2'000'000})},
                .link_ns = random.below(std::uint64_t{20'000})};
    std::uint64_t blocks = 0;
    for (int i = 0; i < 200; ++i) {
      split_sequence each{.tokens = contexts[random.below(contexts.size())]};
      each.blocks = (each.tokens + 16) / 16;
      blocks += each.blocks;
      of.sequences.push_back(each);
    }
    of.device_blocks = blocks * (20 + random.below(std::uint64_t{100})) / 100;
    const split_plan plan = of.plan();
    check_plan(of, plan);
    CHECK(plan.step_ns <= plan.lower_bound_ns + plan.lower_bound_ns / 1000);
    split += plan.host_sequences != 0 ? 1U : 0U;
    // Equal sequences: each weight of the relaxation has all of them on one side.
    for (split_sequence& each : of.sequences)
      each = of.sequences.front();
    of.device_blocks = of.sequences.front().blocks * 150;
    check_plan(of, of.plan());
    CHECK(of.plan().step_ns <= of.plan().lower_bound_ns + longest_host_ns(of));
  }
  CHECK(split > 12);
}

TEST_CASE("a split follows from both sides' rates") {
  // Device: 10 + 1 a token. Host: 2 a token.
  step of{
      .sequences = {{.tokens = 30, .blocks = 3}, {.tokens = 20, .blocks = 2}, {.tokens = 10, .blocks = 1}},
      .rates = {.device = {.fixed_ns = 10, .token_ps = 1000}, .host = {.token_ps = 2000}},
      .device_blocks = 6};
  using enum decode_side;
  split_plan plan = of.plan();
  CHECK(plan.sides == std::vector{device, host, device});
  CHECK(plan.device_ns == 50);
  CHECK(plan.host_ns == 40);
  CHECK(plan.step_ns == 50);
  CHECK(plan.lower_bound_ns == 47);  // 70 - 2/3 x 35, with a sequence cut in two
  CHECK(plan.device_blocks == 4);
  CHECK(plan.host_sequences == 1);
  // The link's time of each sequence makes the host too slow for any.
  of.rates.link_ns = 60;
  plan = of.plan();
  CHECK(plan.host_sequences == 0);
  CHECK(plan.host_ns == 0);
  CHECK(plan.step_ns == 70);
  CHECK(plan.lower_bound_ns <= 70);
  // Without blocks for all, the host has to take part.
  of.device_blocks = 5;
  CHECK(of.plan().sides == std::vector{device, device, host});
  CHECK(of.plan().step_ns == 80);
  // Where keys and values lie may be given.
  of.sequences[0].fixed = host;
  CHECK(of.plan().sides == std::vector{host, device, device});
  CHECK(of.plan().step_ns == 120);
  // A step without sequences.
  of.sequences.clear();
  CHECK(of.plan().step_ns == 10);
  CHECK(of.plan().lower_bound_ns == 10);
}

TEST_CASE("a split that cannot be is refused with what to change") {
  step of{.sequences = {{.tokens = 30, .blocks = 3, .fixed = decode_side::device}},
          .rates = {.device = {.token_ps = 1}, .host = {.token_ps = 1}},
          .device_blocks = 2};
  CHECK_THROWS_WITH_AS(
      static_cast<void>(of.plan()),
      "split_decode: the sequences fixed on the device take 3 blocks, but its budget is 2; move "
      "some of them to the host first, or raise the budget",
      length_error);
  of.device_blocks = 3;
  const std::vector<decode_side> wrong(2, decode_side::host);
  const auto price = [&](std::size_t count) {
    static_cast<void>(price_split(of.sequences, of.rates, of.device_blocks, std::span(wrong).first(count)));
  };
  CHECK_THROWS_WITH_AS(price(2), "price_split: 2 sides for 1 sequences; give one for each", argument_error);
  CHECK_THROWS_WITH_AS(price(1),
                       "price_split: sequence 0 is fixed on the other side; leave `fixed` empty to move it",
                       argument_error);
  const std::vector<decode_side> there(1, decode_side::device);
  of.sequences[0].fixed = {};
  of.device_blocks = 2;
  CHECK_THROWS_WITH_AS(static_cast<void>(price_split(of.sequences, of.rates, 2, there)),
                       "price_split: the sequences on the device take 3 blocks, but its budget is 2; give "
                       "more of them to the host",
                       length_error);
  of.rates.host.token_ps = 0;
  CHECK_THROWS_WITH_AS(
      static_cast<void>(of.plan()),
      "split_decode: the host's token_ps is 0; measure what a token of context takes there, at least 1 ps",
      argument_error);
  of.rates = {.device = {}, .host = {.token_ps = 1}};
  CHECK_THROWS_WITH_AS(
      static_cast<void>(of.plan()),
      "split_decode: the device's token_ps is 0; measure what a token of context takes there, at least 1 ps",
      argument_error);
  constexpr const char* too_long =
      "split_decode: the times of all sequences exceed 2^63 - 1 ps, 106 days; rates are in ns for a sequence "
      "and "
      "in ps for a token; lower them";
  constexpr std::uint64_t half = std::uint64_t{1} << 62;
  const std::vector<split_rates> late{
      {.device = {.fixed_ns = half, .token_ps = 1}, .host = {.token_ps = 1}},
      {.device = {.token_ps = 1}, .host = {.fixed_ns = never, .token_ps = 1}},
      {.device = {.token_ps = half}, .host = {.token_ps = 1}},
      {.device = {.token_ps = 1}, .host = {.token_ps = 1}, .link_ns = half / 499},
      {.device = {.sequence_ns = half / 1000, .token_ps = half / 29}, .host = {.token_ps = 1}}};
  for (const split_rates& each : late) {
    of.rates = each;
    CHECK_THROWS_WITH_AS(static_cast<void>(of.plan()), too_long, length_error);
  }
  of.rates = {.device = {.token_ps = 1}, .host = {.token_ps = 1}};
  of.sequences = {{.blocks = half}, {.blocks = half}};
  CHECK_THROWS_WITH_AS(
      static_cast<void>(of.plan()),
      "split_decode: sequence 1 has 4611686018427387904 blocks, and all together exceed 2^63 - 1",
      length_error);
}

TEST_CASE("a split serves at least as many sequences in a second as the device alone and as NEO's rule") {
  const std::vector<std::uint64_t> contexts = served_contexts();
  for (const machine* const of : {&t4, &h100}) {
    double alone = 0;
    double neo = 0;
    double same = 0;
    double ours = 0;
    std::uint64_t alone_ns = 0;
    std::uint64_t neo_ns = 0;
    std::uint64_t same_ns = 0;
    std::size_t alone_sequences = 0;
    std::size_t neo_sequences = 0;
    constexpr std::uint64_t queues = 12;
    for (std::uint64_t seed = 0; seed < queues; ++seed) {
      CAPTURE(seed);
      queue all{.of = of};
      for (std::size_t i = 0; i < 800; ++i) {
        const std::uint64_t tokens = contexts[(seed * 300 + i) % contexts.size()];
        all.waiting.push_back({.tokens = tokens, .blocks = (tokens + 16) / 16});
      }
      const served_step device = all.served(all.device_alone());
      const served_step rule = all.served(all.neo());
      const served_step plan = all.planned(rule.sequences);
      const served_step best = all.planned_from(rule.sequences);
      CHECK(plan.ns <= rule.ns);
      CHECK(best.per_second() >= rule.per_second());
      CHECK(rule.per_second() >= device.per_second());
      alone += device.per_second() / queues;
      neo += rule.per_second() / queues;
      same += plan.per_second() / queues;
      ours += best.per_second() / queues;
      alone_ns += device.ns / queues;
      neo_ns += rule.ns / queues;
      same_ns += plan.ns / queues;
      alone_sequences += device.sequences;
      neo_sequences += rule.sequences;
    }
    CHECK(ours > 1.05 * alone);
    MESSAGE(std::string(of->name) << ": device alone " << static_cast<double>(alone_sequences) / queues
                                  << " sequences, " << alone_ns / 1000 << " us, " << alone
                                  << "/s; NEO's rule " << static_cast<double>(neo_sequences) / queues << ", "
                                  << neo_ns / 1000 << " us, " << neo << "/s; the same sequences by plan "
                                  << same_ns / 1000 << " us, " << same << "/s; as many as pay " << ours
                                  << "/s");
  }
}
