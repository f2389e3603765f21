#include "support/documented.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/model/presets.hpp>
#include <llmmem/schedule/placement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// Fractions on device and host, of weights, KV and activations.
using point = std::array<double, 6>;

/// The cost model as its comment has it, written down once more: what each part of a step takes, in ns.
std::array<double, 5> naive_parts(const placement_facts& facts, const point& at) {
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  const double weights_host = at[1], weights_nvme = 1 - at[0] - at[1];
  const double kv_host = at[3], kv_nvme = 1 - at[2] - at[3];
  const double activations_host = at[5], activations_nvme = 1 - at[4] - at[5];
  const double moved = number(facts.activation_moved_bytes);
  double to_device = (weights_host + weights_nvme) * number(facts.weight_bytes) +
                     (activations_host + activations_nvme) * moved;
  double compute = number(facts.compute_ns);
  if (facts.attention == offloaded_attention::on_device) {
    to_device += (kv_host + kv_nvme) * number(facts.kv_read_bytes);
  } else {
    compute += (kv_host + kv_nvme) * number(facts.host_attention_ns);
  }
  const double to_host =
      (kv_host + kv_nvme) * number(facts.kv_written_bytes) + (activations_host + activations_nvme) * moved;
  const double from_nvme = weights_nvme * number(facts.weight_bytes) + kv_nvme * number(facts.kv_read_bytes) +
                           activations_nvme * moved;
  const double to_nvme = kv_nvme * number(facts.kv_written_bytes) + activations_nvme * moved;
  return {compute, to_device * 1e9 / number(facts.host_to_device),
          to_host * 1e9 / number(facts.device_to_host), from_nvme * 1e9 / number(facts.nvme_to_host),
          to_nvme * 1e9 / number(facts.host_to_nvme)};
}

double naive_step(const placement_facts& facts, const point& at) {
  const auto parts = naive_parts(facts, at);
  return *std::max_element(parts.begin(), parts.end());
}

/// How far a point is outside the budgets, in shares of all bytes; not above 0 when it keeps them.
double over_budget(const placement_facts& facts, const point& at) {
  const std::array<double, 3> bytes{static_cast<double>(facts.weight_bytes),
                                    static_cast<double>(facts.kv_bytes),
                                    static_cast<double>(facts.activation_bytes)};
  std::array<double, 3> used{};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    used[0] += at[2 * kind] * bytes[kind];
    used[1] += at[2 * kind + 1] * bytes[kind];
    used[2] += (1 - at[2 * kind] - at[2 * kind + 1]) * bytes[kind];
  }
  const double over = std::max({used[0] - static_cast<double>(facts.device_bytes),
                                used[1] - static_cast<double>(facts.host_bytes),
                                used[2] - static_cast<double>(facts.nvme_bytes)});
  return over / (bytes[0] + bytes[1] + bytes[2]);
}

/// Of a scale at which nanoseconds, to which costs are rounded, do not matter.
placement_facts random_facts(random_numbers& random) {
  constexpr std::uint64_t mega = 1'000'000;
  const auto between = [&](std::uint64_t least, std::uint64_t most) {
    return least + random.below(most - least + 1);
  };
  placement_facts facts{.weight_bytes = mega * between(1, 100'000),
                        .kv_bytes = mega * between(1, 100'000),
                        .activation_bytes = mega * between(1, 10'000)};
  facts.kv_read_bytes = between(0, facts.kv_bytes);
  facts.kv_written_bytes = between(0, facts.kv_bytes / 10);
  facts.activation_moved_bytes = between(0, 4 * facts.activation_bytes);
  const std::uint64_t all = facts.weight_bytes + facts.kv_bytes + facts.activation_bytes;
  facts.device_bytes = between(0, all * 2 / 3);
  facts.host_bytes = between(0, all * 2 / 3);
  const std::uint64_t near = facts.device_bytes + facts.host_bytes;
  facts.nvme_bytes = near < all ? all - near + random.below(all) : random.below(all);
  ++facts.nvme_bytes;
  facts.host_to_device = between(10, 30) * 1'000'000'000;
  facts.device_to_host = between(10, 30) * 1'000'000'000;
  facts.nvme_to_host = between(1, 8) * 1'000'000'000;
  facts.host_to_nvme = between(1, 4) * 1'000'000'000;
  facts.compute_ns = random.once_in(3) ? 0 : mega * random.below(std::uint64_t{8000});
  if (random.once_in(2)) {
    facts.attention = offloaded_attention::on_host;
    facts.host_attention_ns = mega * random.below(std::uint64_t{8000});
  }
  return facts;
}

point point_of(const llmmem::schedule::placement& placed) {
  return {placed.weights.device, placed.weights.host,       placed.kv.device,
          placed.kv.host,        placed.activations.device, placed.activations.host};
}

/// The oracle: all corners of the polytope. A linear function with a least value has it in one. Variables:
/// the six fractions and the time; each corner is where seven of the bounds meet.
double best_corner(const placement_facts& facts) {
  constexpr std::size_t n = 7;
  struct bound {
    std::array<double, n> row{};
    double most = 0;
  };
  std::vector<bound> bounds;
  for (std::size_t i = 0; i < 6; ++i) {
    bound each;
    each.row[i] = -1;
    bounds.push_back(each);
  }
  for (std::size_t kind = 0; kind < 3; ++kind) {
    bound each{.row = {}, .most = 1};
    each.row[2 * kind] = each.row[2 * kind + 1] = 1;
    bounds.push_back(each);
  }
  const std::array<double, 3> bytes{static_cast<double>(facts.weight_bytes),
                                    static_cast<double>(facts.kv_bytes),
                                    static_cast<double>(facts.activation_bytes)};
  const double all = bytes[0] + bytes[1] + bytes[2];
  bound device{.row = {}, .most = static_cast<double>(facts.device_bytes) / all};
  bound host{.row = {}, .most = static_cast<double>(facts.host_bytes) / all};
  bound nvme{.row = {}, .most = static_cast<double>(facts.nvme_bytes) / all - 1};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    device.row[2 * kind] = bytes[kind] / all;
    host.row[2 * kind + 1] = bytes[kind] / all;
    nvme.row[2 * kind] = nvme.row[2 * kind + 1] = -bytes[kind] / all;
  }
  bounds.insert(bounds.end(), {device, host, nvme});
  const double unit = naive_step(facts, point{}) + 1;
  const auto nothing = naive_parts(facts, point{});
  for (std::size_t part = 0; part < 5; ++part) {
    bound each{.row = {}, .most = -nothing[part] / unit};
    for (std::size_t i = 0; i < 6; ++i) {
      point at{};
      at[i] = 1;
      each.row[i] = (naive_parts(facts, at)[part] - nothing[part]) / unit;
    }
    each.row[6] = -1;
    bounds.push_back(each);
  }

  double best = std::numeric_limits<double>::infinity();
  std::vector<std::size_t> chosen;
  const auto try_corner = [&] {
    std::array<std::array<double, n + 1>, n> m{};
    for (std::size_t i = 0; i < n; ++i) {
      std::copy(bounds[chosen[i]].row.begin(), bounds[chosen[i]].row.end(), m[i].begin());
      m[i][n] = bounds[chosen[i]].most;
    }
    for (std::size_t column = 0; column < n; ++column) {
      std::size_t pivot = column;
      for (std::size_t i = column; i < n; ++i)
        if (std::abs(m[i][column]) > std::abs(m[pivot][column])) pivot = i;
      if (std::abs(m[pivot][column]) < 1e-10) return;
      std::swap(m[pivot], m[column]);
      for (std::size_t i = 0; i < n; ++i) {
        if (i == column) continue;
        const double factor = m[i][column] / m[column][column];
        for (std::size_t j = column; j <= n; ++j)
          m[i][j] -= factor * m[column][j];
      }
    }
    std::array<double, n> x{};
    for (std::size_t i = 0; i < n; ++i)
      x[i] = m[i][n] / m[i][i];
    for (const auto& each : bounds) {
      double sum = 0;
      for (std::size_t i = 0; i < n; ++i)
        sum += each.row[i] * x[i];
      if (sum > each.most + 1e-9) return;
    }
    best = std::min(best, x[6] * unit);
  };
  const auto choose = [&](const auto& self, std::size_t from) -> void {
    if (chosen.size() == n) return try_corner();
    for (std::size_t i = from; i < bounds.size(); ++i) {
      chosen.push_back(i);
      self(self, i + 1);
      chosen.pop_back();
    }
  };
  choose(choose, 0);
  return best;
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    static_cast<void>(call());
  } catch (const error& refused) {
    return refused.what();
  }
  return "";
}

constexpr const char* no_room =
    "round_placement: no numbers of whole chunks near the fractions fit the budgets; use smaller chunks, or "
    "raise the tiers' bytes";

/// Half the model fits on the device, all of it on device and host.
constexpr placement_facts small{.weight_bytes = 80,
                                .kv_bytes = 40,
                                .activation_bytes = 10,
                                .kv_read_bytes = 40,
                                .kv_written_bytes = 4,
                                .activation_moved_bytes = 10,
                                .device_bytes = 65,
                                .host_bytes = 65,
                                .host_to_device = 1'000'000'000,
                                .device_to_host = 1'000'000'000,
                                .compute_ns = 5};

}  // namespace

TEST_CASE("the solved placement stays within the budgets and is as fast as the best corner") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto facts = random_facts(random);
    const auto placed = solve_placement(facts);
    const auto at = point_of(placed);
    REQUIRE(over_budget(facts, at) <= 1e-9);
    const double best = best_corner(facts);
    const double slack = 1e-8 * naive_step(facts, point{}) + 10;
    REQUIRE(naive_step(facts, at) <= best + slack);
    REQUIRE(naive_step(facts, at) >= best - slack);
  }
}

TEST_CASE("no point of a grid over all fractions is faster than the solved placement") {
  constexpr int steps = 6;
  std::vector<std::array<double, 2>> shares;
  for (int device = 0; device <= steps; ++device)
    for (int host = 0; device + host <= steps; ++host)
      shares.push_back({double{1} * device / steps, double{1} * host / steps});
  for (const auto seed : seeds(15)) {
    CAPTURE(seed);
    random_numbers random(seed + 5000);
    const auto facts = random_facts(random);
    const double solved = naive_step(facts, point_of(solve_placement(facts)));
    double best = std::numeric_limits<double>::infinity();
    for (const auto& w : shares) {
      for (const auto& k : shares) {
        for (const auto& a : shares) {
          const point at{w[0], w[1], k[0], k[1], a[0], a[1]};
          if (over_budget(facts, at) <= 0) best = std::min(best, naive_step(facts, at));
        }
      }
    }
    REQUIRE(solved <= best + 1e-8 * naive_step(facts, point{}) + 10);
  }
}

TEST_CASE("fractions are shares, and times those of the cost model, rounded up") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto facts = random_facts(random);
    const auto placed = solve_placement(facts);
    for (const auto& each : {placed.weights, placed.kv, placed.activations}) {
      REQUIRE(each.device >= 0);
      REQUIRE(each.host >= 0);
      REQUIRE(each.nvme >= 0);
      REQUIRE(std::abs(each.device + each.host + each.nvme - 1) < 1e-12);
    }
    const auto parts = naive_parts(facts, point_of(placed));
    const std::array<std::uint64_t, 5> times{placed.times.compute_ns, placed.times.host_to_device_ns,
                                             placed.times.device_to_host_ns, placed.times.nvme_to_host_ns,
                                             placed.times.host_to_nvme_ns};
    std::uint64_t longest = 0;
    for (std::size_t i = 0; i < 5; ++i) {
      // Up to three terms, each rounded up twice.
      REQUIRE(static_cast<double>(times[i]) >= parts[i] - 0.01);
      REQUIRE(static_cast<double>(times[i]) <= parts[i] + 6.01);
      longest = std::max(longest, times[i]);
    }
    REQUIRE(placed.times.step_ns() == longest);
  }
}

TEST_CASE("the most moved data per byte stays on the device") {
  // Of 130 bytes 65 fit. Activations save 10 ns a direction for 10 bytes, KV 1 for 1 and its writing, weights
  // 1 for 1.
  const auto placed = solve_placement(small);
  CHECK(placed.activations.device == doctest::Approx(1));
  CHECK(placed.times.step_ns() == 65);
  CHECK(placed.weights.nvme + placed.kv.nvme + placed.activations.nvme == doctest::Approx(0));
}

TEST_CASE("if computation takes longest, as much as fits is still on the device") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    auto facts = random_facts(random);
    facts.compute_ns = 1'000'000'000'000'000;
    facts.host_attention_ns = 100'000'000'000'000;
    // With attention on the host, KV comes first, and all of it is on the device.
    if (facts.attention == offloaded_attention::on_host) facts.device_bytes += facts.kv_bytes;
    const auto placed = solve_placement(facts);
    REQUIRE(placed.times.step_ns() <= facts.compute_ns + facts.compute_ns / 100'000'000);
    const double bytes[]{static_cast<double>(facts.weight_bytes), static_cast<double>(facts.kv_bytes),
                         static_cast<double>(facts.activation_bytes)};
    const double all = bytes[0] + bytes[1] + bytes[2];
    const auto used = [&](double tier_fractions::* tier) {
      return placed.weights.*tier * bytes[0] + placed.kv.*tier * bytes[1] +
             placed.activations.*tier * bytes[2];
    };
    const double on_device = std::min(all, static_cast<double>(facts.device_bytes));
    const double on_host = std::min(all - on_device, static_cast<double>(facts.host_bytes));
    REQUIRE(used(&tier_fractions::device) >= on_device - 1e-8 * all);
    REQUIRE(used(&tier_fractions::host) >= on_host - 1e-8 * all);
  }
}

TEST_CASE("attention on the host keeps KV there if that is faster than sending it") {
  auto facts = small;
  facts.attention = offloaded_attention::on_host;
  facts.host_attention_ns = 20;
  const auto placed = solve_placement(facts);
  CHECK(placed.kv.host == doctest::Approx(1));
  CHECK(placed.times.compute_ns == 25);
  CHECK(placed.times.host_to_device_ns == 25);
}

TEST_CASE("an empty placement is on the device and takes the time of computation") {
  const auto placed = solve_placement({.host_to_device = 1, .device_to_host = 1, .compute_ns = 7});
  CHECK(placed.weights.device == 1);
  CHECK(placed.kv.device == 1);
  CHECK(placed.times.step_ns() == 7);
}

TEST_CASE("few whole chunks are placed as fast as the best possibility, within the budgets") {
  for (const auto seed : seeds(120)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto facts = random_facts(random);
    const llmmem::schedule::chunk_counts counts{
        .weights = 1 + random.below(6U), .kv = 1 + random.below(6U), .activations = 1 + random.below(3U)};
    const std::array<std::uint32_t, 3> count{counts.weights, counts.kv, counts.activations};
    const std::array<std::uint64_t, 3> bytes{facts.weight_bytes, facts.kv_bytes, facts.activation_bytes};
    const auto fits = [&](const std::array<tier_chunks, 3>& at) {
      std::array<std::uint64_t, 3> used{};
      for (std::size_t kind = 0; kind < 3; ++kind) {
        const std::uint64_t chunk = (bytes[kind] + count[kind] - 1) / count[kind];
        used[0] += chunk * at[kind].device;
        used[1] += chunk * at[kind].host;
        used[2] += chunk * at[kind].nvme;
      }
      return used[0] <= facts.device_bytes && used[1] <= facts.host_bytes && used[2] <= facts.nvme_bytes;
    };
    const auto step = [&](const std::array<tier_chunks, 3>& at) {
      point shares{};
      for (std::size_t kind = 0; kind < 3; ++kind) {
        shares[2 * kind] = double{1} * at[kind].device / count[kind];
        shares[2 * kind + 1] = double{1} * at[kind].host / count[kind];
      }
      return naive_step(facts, shares);
    };
    double best = std::numeric_limits<double>::infinity();
    std::array<tier_chunks, 3> at{};
    const auto choose = [&](const auto& self, std::size_t kind) -> void {
      if (kind == 3) {
        if (fits(at)) best = std::min(best, step(at));
        return;
      }
      for (std::uint32_t device = 0; device <= count[kind]; ++device) {
        for (std::uint32_t host = 0; device + host <= count[kind]; ++host) {
          at[kind] = {.device = device, .host = host, .nvme = count[kind] - device - host};
          self(self, kind + 1);
        }
      }
    };
    choose(choose, 0);
    if (best == std::numeric_limits<double>::infinity()) {
      REQUIRE(refusal([&] { return round_placement(facts, solve_placement(facts), counts); }) == no_room);
      continue;
    }
    const auto rounded = round_placement(facts, solve_placement(facts), counts);
    at = {rounded.weights, rounded.kv, rounded.activations};
    for (std::size_t kind = 0; kind < 3; ++kind)
      REQUIRE(at[kind].device + at[kind].host + at[kind].nvme == count[kind]);
    REQUIRE(fits(at));
    REQUIRE(step(at) >= best - 1);
    REQUIRE(step(at) <= best + 7);
    REQUIRE(static_cast<double>(rounded.times.step_ns()) >= step(at) - 1);
    REQUIRE(static_cast<double>(rounded.times.step_ns()) <= step(at) + 7);
  }
}

TEST_CASE("many whole chunks stay within the budgets, close to the time of the fractions") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    auto facts = random_facts(random);
    facts.nvme_bytes += 1'000'000'000'000;  // so that there is a way
    const llmmem::schedule::chunk_counts counts{.weights = 40 + random.below(60U),
                                                .kv = 40 + random.below(60U),
                                                .activations = 40 + random.below(60U)};
    const auto solved = solve_placement(facts);
    const auto rounded = round_placement(facts, solved, counts);
    std::array<std::uint64_t, 3> used{};
    const auto add = [&](const tier_chunks& at, std::uint64_t bytes, std::uint32_t count) {
      REQUIRE(at.device + at.host + at.nvme == count);
      const std::uint64_t chunk = (bytes + count - 1) / count;
      used[0] += chunk * at.device;
      used[1] += chunk * at.host;
      used[2] += chunk * at.nvme;
    };
    add(rounded.weights, facts.weight_bytes, counts.weights);
    add(rounded.kv, facts.kv_bytes, counts.kv);
    add(rounded.activations, facts.activation_bytes, counts.activations);
    REQUIRE(used[0] <= facts.device_bytes);
    REQUIRE(used[1] <= facts.host_bytes);
    REQUIRE(used[2] <= facts.nvme_bytes);
    const double slowest = naive_step(facts, point{});
    const double solved_ns = static_cast<double>(solved.times.step_ns());
    const double rounded_ns = static_cast<double>(rounded.times.step_ns());
    REQUIRE(rounded_ns >= solved_ns - 1e-8 * slowest - 10);
    // One chunk in forty of everything, each way, and once more for what it pushes aside.
    REQUIRE(rounded_ns <= solved_ns + slowest / 10);
  }
}

TEST_CASE("of 80 layers, half of which fit, 40 are on the device") {
  auto facts = small;
  facts.kv_bytes = facts.kv_read_bytes = facts.kv_written_bytes = 0;
  facts.activation_bytes = facts.activation_moved_bytes = 0;
  facts.device_bytes = 43;
  const auto solved = solve_placement(facts);
  const auto rounded = round_placement(facts, solved, {.weights = 20});
  // A chunk is 4 bytes: ten of them, and one byte too few for the eleventh.
  CHECK(rounded.weights == tier_chunks{.device = 10, .host = 10});
  CHECK(rounded.times.host_to_device_ns == 40);
}

TEST_CASE("rounding starts from any fractions and moves chunks as long as that helps") {
  auto facts = small;
  for (auto* bytes : {&facts.weight_bytes, &facts.kv_bytes, &facts.activation_bytes, &facts.kv_read_bytes,
                      &facts.kv_written_bytes, &facts.activation_moved_bytes, &facts.host_bytes})
    *bytes *= 10;
  facts.device_bytes = 700;
  // More ways than are all looked at, and room for five chunks more on the device than these fractions put
  // there.
  const auto rounded = round_placement(facts,
                                       {.weights = {.device = 0.5, .host = 0.5},
                                        .kv = {.device = 0.5, .host = 0.5},
                                        .activations = {.device = 0.5, .host = 0.5}},
                                       {.weights = 80, .kv = 40, .activations = 10});
  CHECK(rounded.weights.device + rounded.kv.device + rounded.activations.device == 70);
  CHECK(rounded.times.step_ns() == 600);
}

TEST_CASE("docs/pipelines.md shows how a large model is placed on a small device") {
  constexpr auto& model = models::llama2_70b;
  constexpr std::uint64_t giga = 1'000'000'000;
  std::string table =
      "| sequences | weights: device, host, NVMe (%) | KV (%) | step (s) | tokens a second | longest | step "
      "in whole "
      "layers (s) |\n|---|---|---|---|---|---|---|\n";
  for (const std::uint64_t sequences : std::array<std::uint64_t, 6>{1, 16, 64, 256, 1024, 4096}) {
    const std::uint64_t kv_token = model.kv_bytes_per_token();
    const std::uint64_t hidden = sequences * model.hidden * 2;
    const placement_facts facts{.weight_bytes = 2 * model.parameters(),
                                .kv_bytes = sequences * 544 * kv_token,
                                .activation_bytes = hidden,
                                .kv_read_bytes = sequences * 528 * kv_token,
                                .kv_written_bytes = sequences * kv_token,
                                .activation_moved_bytes = hidden * model.layers,
                                .device_bytes = 14 * giga,
                                .host_bytes = 200 * giga,
                                .nvme_bytes = 1500 * giga,
                                .host_to_device = 12 * giga,
                                .device_to_host = 12 * giga,
                                .nvme_to_host = 2 * giga,
                                .host_to_nvme = 1 * giga,
                                .compute_ns = sequences * (2 * model.parameters() / 30'000)};
    const auto placed = solve_placement(facts);
    const auto whole = round_placement(facts, placed, {.weights = 80, .kv = 80, .activations = 1});
    const auto percent = [](double share) { return llmmem_tests::decimal(100 * share, 0); };
    const auto shares = [&](const tier_fractions& each) {
      return percent(each.device) + ", " + percent(each.host) + ", " + percent(each.nvme);
    };
    const auto seconds = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e9; };
    const auto& t = placed.times;
    const char* longest = t.step_ns() == t.compute_ns          ? "compute"
                          : t.step_ns() == t.host_to_device_ns ? "host to device"
                          : t.step_ns() == t.nvme_to_host_ns   ? "NVMe to host"
                                                               : "writes";
    table += "| " + std::to_string(sequences) + " | " + shares(placed.weights) + " | " + shares(placed.kv) +
             " | " + llmmem_tests::decimal(seconds(t.step_ns()), 2) + " | " +
             llmmem_tests::decimal(static_cast<double>(sequences) / seconds(t.step_ns()), 2) + " | " +
             longest + " | " + llmmem_tests::decimal(seconds(whole.times.step_ns()), 2) + " |\n";
  }
  llmmem_tests::check_documented("pipelines.md", table);
}

TEST_CASE("tiers that are too small in total, and chunks that do not fit, are refused") {
  auto facts = small;
  facts.host_bytes = 64;
  CHECK(refusal([&] { return solve_placement(facts); }) ==
        "solve_placement: 130 bytes of weights, KV and activations are needed, but all tiers together have "
        "129; use a smaller block, or raise the tiers' bytes");
  const auto solved = solve_placement(small);
  CHECK(refusal([&] { return round_placement(small, solved, {.weights = 1, .kv = 1, .activations = 1}); }) ==
        "round_placement: no numbers of whole chunks near the fractions fit the budgets; use smaller chunks, "
        "or raise the tiers' bytes");
  CHECK(refusal([&] { return round_placement(small, solved, {.weights = 1, .kv = 0}); }) ==
        "round_placement: kv in 0 chunks; it must be 1 to 1048576");
  CHECK(refusal([&] { return round_placement(small, {}, {}); }) ==
        "round_placement: fractions of weights must be 0 or more and add up to 1");
  auto wrong = solved;
  wrong.kv = {.device = -1, .host = 2};
  CHECK(refusal([&] { return round_placement(small, wrong, {}); }) ==
        "round_placement: fractions of kv must be 0 or more and add up to 1");
  wrong.kv = {.device = std::numeric_limits<double>::quiet_NaN(), .host = 1};
  CHECK(refusal([&] { return round_placement(small, wrong, {}); }) ==
        "round_placement: fractions of kv must be 0 or more and add up to 1");
}

TEST_CASE("bandwidths must be given, except those of an absent NVMe") {
  auto facts = small;
  facts.host_to_device = 0;
  CHECK(refusal([&] { return solve_placement(facts); }) ==
        "solve_placement: bytes_per_second is 0; it must be 1 to 2^53");
  facts = small;
  facts.nvme_bytes = 1;
  CHECK(refusal([&] { return solve_placement(facts); }) ==
        "solve_placement: bytes_per_second is 0; it must be 1 to 2^53");
  facts = small;
  facts.weight_bytes = facts.kv_bytes = max_bytes;
  CHECK_THROWS_AS(static_cast<void>(solve_placement(facts)), length_error);
}
