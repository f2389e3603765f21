#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "support/attention_parts_world.hpp"
#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/listed_world.hpp"
#include "support/seeds.hpp"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float no_number = std::numeric_limits<float>::quiet_NaN();

/// The larger of two differences; what is no number is larger than all.
double worse(double worst, double difference) {
  return difference <= worst      ? worst
         : std::isnan(difference) ? std::numeric_limits<double>::infinity()
                                  : difference;
}

/// Outputs as floats, [rows][query_heads][value_dim], with their logarithms.
struct merged_floats {
  std::vector<float> out{};
  std::vector<float> log_sum_exp{};

  friend bool operator==(const merged_floats& a, const merged_floats& b) {
    const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
    return std::ranges::equal(a.out, b.out, {}, bits, bits) &&
           std::ranges::equal(a.log_sum_exp, b.log_sum_exp, {}, bits, bits);
  }
};

struct merge_how {
  const std::int32_t* sequences = nullptr;
  const float* sinks = nullptr;
};

template <log_base Base = log_base::e, class Run = host_executor>
merged_floats merged(const attention_part_shape& shape, std::span<const attention_part> parts,
                     const merge_how& how = {}, const Run& run = {}) {
  merged_floats made{std::vector<float>(shape.rows * shape.query_heads * shape.value_dim, unknown_tokens),
                     std::vector<float>(shape.rows * shape.query_heads, unknown_tokens)};
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  merged_attention<Base> out;
  out.out = {reinterpret_cast<std::byte*>(made.out.data()), vector * shape.query_heads, vector};
  out.log_sum_exp = {made.log_sum_exp.data(), shape.query_heads * sizeof(float), sizeof(float)};
  out.sequences = how.sequences;
  out.sinks = how.sinks;
  merge_attention(run, shape, parts, out).value();
  return made;
}

std::vector<attention_part> views(std::vector<part_memory>& parts) {
  std::vector<attention_part> out;
  for (part_memory& each : parts)
    out.push_back(each.part());
  return out;
}

/// Tokens of one row and head with products of any size, and parts of them as an exact attention leaves them.
struct drawn_parts {
  std::vector<std::vector<float>> products{};  // of each part
  std::vector<std::vector<std::array<float, 8>>> values{};
  std::vector<part_memory> parts{};

  explicit drawn_parts(std::mt19937_64& random) {
    const std::uint64_t count = random() % 9;
    const float reach = std::array{1.0F, 20.0F, 700.0F, 1e5F}[random() % 4];
    std::uniform_real_distribution<float> any(-1, 1);
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t tokens = random() % 3 == 0 ? 0 : 1 + random() % 40;
      const float about = reach * any(random);
      products.emplace_back();
      values.emplace_back();
      for (std::uint64_t t = 0; t < tokens; ++t) {
        products.back().push_back(random() % 9 == 0 ? -infinity : about + 3 * any(random));
        std::array<float, 8> value{};
        for (float& each : value)
          each = any(random);
        values.back().push_back(value);
      }
      parts.emplace_back(attention_part_shape{1, 1, 8}, random());
      fill(i, random);
    }
  }

  void fill(std::uint64_t i, std::mt19937_64& random) {
    float most = -infinity;
    for (const float each : products[i])
      most = std::max(most, each);
    double total = 0;
    std::array<double, 8> sums{};
    for (std::size_t t = 0; t < products[i].size() && most > -infinity; ++t) {
      const double weight = std::exp2(static_cast<double>(products[i][t]) - static_cast<double>(most));
      total += weight;
      for (std::size_t e = 0; e < 8; ++e)
        sums[e] += weight * static_cast<double>(values[i][t][e]);
    }
    if (total == 0) {  // empty, in any of the forms that say so; the sums stay NaNs
      const attention_state forms[] = {{}, {-infinity, 1}, {5, 0}, {no_number, 0}, {infinity, 0}, {3, -1}};
      parts[i].set(0, 0, forms[random() % std::size(forms)]);
      return;
    }
    parts[i].set(0, 0, {most, static_cast<float>(total)});
    for (std::size_t e = 0; e < 8; ++e)
      parts[i].sum(0, 0)[e] = static_cast<float>(sums[e]);
  }

  /// In doubles, of all tokens at once; behind the values the logarithm to base 2.
  [[nodiscard]] std::array<double, 9> whole() const {
    double most = -std::numeric_limits<double>::infinity();
    for (const auto& part : products)
      for (const float each : part)
        most = std::max(most, static_cast<double>(each));
    std::array<double, 9> out{};
    double total = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
      for (std::size_t t = 0; t < products[i].size(); ++t) {
        if (std::isinf(products[i][t])) continue;
        const double weight = std::exp2(static_cast<double>(products[i][t]) - most);
        total += weight;
        for (std::size_t e = 0; e < 8; ++e)
          out[e] += weight * static_cast<double>(values[i][t][e]);
      }
    }
    for (std::size_t e = 0; e < 8 && total != 0; ++e)
      out[e] /= total;
    out[8] = total == 0 ? -std::numeric_limits<double>::infinity() : most + std::log2(total);
    return out;
  }
};

/// One sequence of floats whose products with the query are exact but for one rounding, which the oracle has
/// too: up to 300 where it is steep, near each other where it is flat.
struct long_row {
  kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 16, .element = dtype::f32};
  std::int32_t length;
  std::vector<std::int32_t> table;
  std::vector<float> cache;
  std::vector<float> query = std::vector<float>(8);
  std::array<double, 8> expected{};

  long_row(std::mt19937_64& random, std::int32_t tokens)
      : length(tokens),
        table((static_cast<std::size_t>(tokens) - 1) / 16 + 1),
        cache(layout.total_bytes(table.size()) / sizeof(float)) {
    for (std::size_t i = 0; i < table.size(); ++i)
      table[i] = static_cast<std::int32_t>(i);
    const float reach = random() % 2 == 0 ? 300.0F : 2.0F;
    std::uniform_real_distribution<float> any(0, 1);  // of one sign: sums grow
    query[0] = 1;
    std::vector<double> products;
    double most = -std::numeric_limits<double>::infinity();
    for (std::int32_t t = 0; t < tokens; ++t) {
      vector(0, t)[0] = reach * any(random);
      products.push_back(static_cast<double>(vector(0, t)[0] * std::numbers::log2e_v<float>));
      most = std::max(most, products.back());
      std::generate_n(vector(1, t), 8, [&] { return any(random); });
    }
    double total = 0;
    for (std::int32_t t = 0; t < tokens; ++t) {
      const double weight = std::exp2(products[static_cast<std::size_t>(t)] - most);
      total += weight;
      for (std::size_t e = 0; e < 8; ++e)
        expected[e] += weight * static_cast<double>(vector(1, t)[e]);
    }
    for (double& each : expected)
      each /= total;
  }

  float* vector(std::uint32_t plane, std::int32_t token) {
    const plane_strides strides = layout.strides(plane, table.size());
    const auto at = static_cast<std::uint64_t>(token);
    return cache.data() + strides.offset(0, at / 16, at % 16, 0) / sizeof(float);
  }

  void attend(part_memory& part, const std::int32_t* begins, const std::int32_t* ends) {
    const attention_options options{
        .query_heads = 1, .element = dtype::f32, .scale = 1, .split = {.tokens = 1024, .count = 30}};
    std::vector<std::byte> workspace(attention_workspace_bytes(1, layout, options));
    const padded_table_view tables{.block_table = table.data(),
                                   .seq_lens = &length,
                                   .num_sequences = 1,
                                   .max_blocks = static_cast<std::int32_t>(table.size()),
                                   .block_tokens = 16};
    paged_attention_part(host_executor{}, tables, {.rows = 1, .begins = begins, .ends = ends},
                         {reinterpret_cast<const std::byte*>(query.data()), 32, 32}, part.output(),
                         {reinterpret_cast<std::byte*>(cache.data()), table.size(), layout}, 0, workspace,
                         options)
        .value();
  }
};

/// Floats side by side, one part of one row and head.
part_memory one_part(const attention_state& state, float value) {
  part_memory out({1, 1, 8});
  out.set(0, 0, state);
  std::fill_n(out.sum(0, 0), 8, value);
  return out;
}

merged_floats merged_of(std::vector<part_memory> parts, const merge_how& how = {}) {
  return merged({1, 1, 8}, views(parts), how);
}

}  // namespace

TEST_SUITE("merge_attention") {
  TEST_CASE("rows cut into any parts give the whole row's result, within 1e-6 of the largest value") {
    double worst = 0;
    std::uint64_t seen = 0;
    for (const auto seed : seeds(200, 40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      const attention_part_shape shape = part_shape_of(world);
      part_memory whole(shape);
      CHECK(attend_part(world, host_executor{}, table_form::csr, whole) == 0);
      const std::vector<attention_part> only{whole.part()};
      const merged_floats expected = merged(shape, only);
      const auto count = static_cast<std::uint32_t>(1 + random() % 8);
      const row_cuts cuts(random, world.rows, count);
      std::vector<part_memory> parts;
      for (std::uint32_t i = 0; i < count; ++i) {
        parts.emplace_back(shape, random());
        CHECK(attend_part(world, host_executor{}, i % 2 == 0 ? table_form::csr : table_form::padded,
                          parts.back(), cuts.begins[i].data(), cuts.ends[i].data()) == 0);
      }
      const merged_floats made = merged(shape, views(parts));
      constexpr double largest = 2;  // of the world's values, scales of at most 1 included
      for (std::size_t i = 0; i < made.out.size(); ++i)
        worst = std::max(
            worst,
            std::abs(static_cast<double>(made.out[i]) - static_cast<double>(expected.out[i])) / largest);
      for (std::size_t i = 0; i < made.log_sum_exp.size(); ++i) {
        const bool is_empty = std::isinf(expected.log_sum_exp[i]);
        CHECK(std::isinf(made.log_sum_exp[i]) == is_empty);
        if (!is_empty) CHECK(std::abs(made.log_sum_exp[i] - expected.log_sum_exp[i]) < 3e-6F);
      }
      seen += made.out.size();
    }
    CHECK(worst <= 1e-6);
    CHECK(seen > 40'000);
  }

  TEST_CASE("long rows with products in the hundreds, cut anywhere, are within 1e-6 of sums of doubles") {
    double worst = 0;
    for (const auto seed : seeds(4, 2)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      long_row row(random, 30'000);
      for (std::uint32_t count = 1; count <= 8; ++count) {
        const row_cuts cuts(random, 1, count, 30'000);
        std::vector<part_memory> parts;
        for (std::uint32_t i = 0; i < count; ++i) {
          parts.emplace_back(attention_part_shape{1, 1, 8}, random());
          row.attend(parts.back(), cuts.begins[i].data(), cuts.ends[i].data());
        }
        const merged_floats made = merged({1, 1, 8}, views(parts));
        for (std::size_t e = 0; e < 8; ++e)
          worst = worse(worst, std::abs(static_cast<double>(made.out[e]) - row.expected[e]));
      }
    }
    CHECK(worst <= 1e-6);
  }

  TEST_CASE("a row in one part has the bits of attention, and a cut one is within the definition's bound") {
    for (const auto seed : seeds(50, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world(random);
      world.scales[0].clear();
      world.scales[1].clear();
      const attended whole = attend(world, host_executor{});
      const attention_part_shape shape = part_shape_of(world);
      const auto merge = [&](std::vector<part_memory>& parts) {
        attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
        merged_attention<> out;
        out.out = {made.out.data(), world.out_strides[0], world.out_strides[1]};
        out.element = world.options.element;
        out.log_sum_exp = {made.log_sum_exp.data(), world.query_heads() * sizeof(float)};
        out.sequences = world.sequences.empty() ? nullptr : world.sequences.data();
        merge_attention(grid_executor{}, shape, views(parts), out).value();
        return made;
      };
      std::vector<part_memory> one;
      one.emplace_back(shape, random());
      attend_part(world, grid_executor{}, table_form::padded, one.back());
      CHECK(merge(one) == whole);
      const row_cuts cuts(random, world.rows, 3);
      std::vector<part_memory> three;
      for (std::uint32_t i = 0; i < 3; ++i) {
        three.emplace_back(shape, random());
        attend_part(world, grid_executor{}, table_form::csr, three.back(), cuts.begins[i].data(),
                    cuts.ends[i].data());
      }
      check(world, merge(three));
    }
  }

  TEST_CASE("parts from tensor cores merge within the rounding of their weights") {
    for (const auto seed : seeds(16, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random, attention_arithmetic::tensor_cores);
      const attention_part_shape shape = part_shape_of(world);
      const row_cuts cuts(random, world.rows, 4);
      std::vector<part_memory> parts;
      for (std::uint32_t i = 0; i < 4; ++i) {
        parts.emplace_back(shape, random());
        attend_part(world, host_executor{}, table_form::csr, parts.back(), cuts.begins[i].data(),
                    cuts.ends[i].data());
      }
      attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
      merged_attention<> out;
      out.out = {made.out.data(), world.out_strides[0], world.out_strides[1]};
      out.element = world.options.element;
      out.log_sum_exp = {made.log_sum_exp.data(), world.query_heads() * sizeof(float)};
      out.sequences = world.sequences.empty() ? nullptr : world.sequences.data();
      merge_attention(host_executor{}, shape, views(parts), out).value();
      check(world, made, world.layout.element == dtype::bf16 ? 0.03 : 0.004);
    }
  }

  TEST_CASE(
      "products of any magnitude merge within 4e-7 of the largest value, also empty parts and infinities") {
    double worst = 0;
    double worst_logarithm = 0;
    std::uint64_t empty = 0;
    for (const auto seed : seeds(4000, 400)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      drawn_parts drawn(random);
      const std::array<double, 9> expected = drawn.whole();
      const merged_floats made = merged<log_base::two>({1, 1, 8}, views(drawn.parts));
      for (std::size_t e = 0; e < 8; ++e)
        worst = worse(worst, std::abs(static_cast<double>(made.out[e]) - expected[e]));
      if (std::isinf(expected[8])) {
        ++empty;
        CHECK(made.out == std::vector<float>(8, 0.0F));
        CHECK(made.log_sum_exp[0] == -infinity);
      } else {
        worst_logarithm =
            worse(worst_logarithm, std::abs(static_cast<double>(made.log_sum_exp[0]) - expected[8]) /
                                       std::max(1.0, std::abs(expected[8])));
      }
    }
    CHECK(worst <= 4e-7);
    CHECK(worst_logarithm <= 4e-7);
    CHECK(empty > 40);
  }

  TEST_CASE("neither the order of the parts nor the launch changes a bit; the parts' places may") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      const attention_part_shape shape = part_shape_of(world);
      const row_cuts cuts(random, world.rows, 5);
      std::vector<part_memory> first;
      for (std::uint32_t i = 0; i < 5; ++i)
        first.emplace_back(shape, random());
      std::vector<part_memory> second = first;
      for (std::uint32_t i = 0; i < 5; ++i) {
        attend_part(world, host_executor{}, table_form::csr, first[i], cuts.begins[i].data(),
                    cuts.ends[i].data());
        attend_part(world, grid_executor({.blocks = 3}), table_form::padded, second[4 - i],
                    cuts.begins[4 - i].data(), cuts.ends[4 - i].data());
      }
      const merged_floats made = merged(shape, views(first));
      CHECK(merged(shape, views(second)) == made);
      CHECK(merged(shape, views(second), {}, grid_executor({.blocks = 1})) == made);
    }
  }

  TEST_CASE("a merged part merges with the rest to the result of one merge, within 4e-7") {
    for (const auto seed : seeds(300, 60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      drawn_parts drawn(random);
      const attention_part_shape shape{1, 1, 8};
      const std::vector<attention_part> all = views(drawn.parts);
      const merged_floats at_once = merged(shape, all);
      std::vector<part_memory> rounds;
      rounds.emplace_back(shape, random());
      rounds.emplace_back(shape, random());
      const std::size_t cut = all.size() / 2;
      for (std::size_t i = 0; i < 2; ++i)
        merge_attention(host_executor{}, shape,
                        i == 0 ? std::span(all).first(cut) : std::span(all).subspan(cut), rounds[i].output())
            .value();
      const merged_floats made = merged(shape, views(rounds));
      for (std::size_t e = 0; e < 8; ++e)
        CHECK(std::abs(made.out[e] - at_once.out[e]) <= 4e-7F);
    }
  }

  TEST_CASE("a part without weight is not read, and a NaN product stays visible") {
    const part_memory one = one_part({10, 2}, 6);
    const part_memory none = one_part({10 - 127, 1}, no_number);  // 2^-127 of the largest
    CHECK(merged_of({one, none}).out[0] == 3);
    CHECK(merged_of({none, one}).out[0] == 3);
    CHECK(merged_of({none}).out[0] != merged_of({none}).out[0]);  // alone it has all the weight
    for (const attention_state& state : {attention_state{-infinity, no_number}, attention_state{1, no_number},
                                         attention_state{no_number, 1}, attention_state{infinity, 1}}) {
      CAPTURE(state.most);
      CAPTURE(state.total);
      const merged_floats made = merged_of({one, one_part(state, 1)});
      CHECK(std::isnan(made.out[0]));
      CHECK(std::isnan(made.log_sum_exp[0]));
    }
    // A part again carries it on.
    part_memory all({1, 1, 8});
    std::vector<part_memory> parts{one, one_part({-infinity, no_number}, 1)};
    merge_attention(host_executor{}, {1, 1, 8}, views(parts), all.output()).value();
    CHECK(std::isnan(all.state(0, 0).total));
    CHECK(std::isnan(merged_of({all, one}).out[0]));
  }

  TEST_CASE(
      "zero parts give zeros and a logarithm of -infinity; one part keeps its bits, including a zero's "
      "sign") {
    const merged_floats nothing = merged_of({});
    CHECK(nothing.out == std::vector<float>(8, 0.0F));
    CHECK(nothing.log_sum_exp[0] == -infinity);
    const merged_floats negative = merged_of({one_part({3, 1}, -0.0F)});
    CHECK(std::bit_cast<std::uint32_t>(negative.out[0]) == 0x8000'0000U);
    CHECK(merged_of({one_part({3, 1}, 0.1F), one_part({}, no_number)}).out[0] == 0.1F);
    part_memory all({1, 1, 8});
    merge_attention(host_executor{}, {1, 1, 8}, {}, all.output()).value();
    CHECK(all.state(0, 0) == attention_state{});
    CHECK(all.sum(0, 0)[7] == 0);
  }

  TEST_CASE("logarithms have the base that their type says") {
    std::vector<part_memory> parts{one_part({3, 1}, 1), one_part({3, 3}, 1)};
    CHECK(merged<log_base::two>({1, 1, 8}, views(parts)).log_sum_exp[0] == 5);
    CHECK(merged<log_base::e>({1, 1, 8}, views(parts)).log_sum_exp[0] ==
          doctest::Approx(5 * std::numbers::ln2));
  }

  TEST_CASE("a sink takes weight once, has no value, and counts in the logarithm") {
    // Weights 2, 2 and, of the sink, 4.
    const part_memory part = one_part({0, 2}, 6);
    const float sink = 2 * std::numbers::ln2_v<float>;
    CHECK(merged_of({part, part}, {.sinks = &sink}).out[0] == doctest::Approx(1.5));
    CHECK(merged_of({part, part}, {.sinks = &sink}).log_sum_exp[0] == doctest::Approx(3 * std::numbers::ln2));
    CHECK(merged_of({}, {.sinks = &sink}).out[0] == 0);
    CHECK(merged_of({}, {.sinks = &sink}).log_sum_exp[0] == doctest::Approx(sink));
    const float none = -infinity;
    CHECK(merged_of({part}, {.sinks = &none}) == merged_of({part}));
    CHECK(merged_of({}, {.sinks = &none}).log_sum_exp[0] == -infinity);
    const float large = 800;
    CHECK(merged_of({part}, {.sinks = &large}).out[0] == 0);
  }

  TEST_CASE("a merge does not write padding, which counts as an empty part") {
    const std::int32_t sequences[] = {-1, 0};
    std::vector<part_memory> parts;
    parts.emplace_back(attention_part_shape{2, 1, 8});
    parts[0].set(1, 0, {0, 1});
    std::fill_n(parts[0].sum(1, 0), 8, 2.0F);
    const merged_floats made = merged({2, 1, 8}, views(parts), {.sequences = sequences});
    CHECK(made.out[0] == unknown_tokens);
    CHECK(made.log_sum_exp[0] == unknown_tokens);
    CHECK(made.out[8] == 2);
    for (const auto seed : seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world(random);
      if (world.rows == 0) continue;
      world.sequences.assign(world.rows, -1);
      world.sequences.back() = static_cast<std::int32_t>(world.tables.size());  // none
      part_memory part(part_shape_of(world), seed);
      CHECK(attend_part(world, grid_executor{}, table_form::csr, part) == 1);
      for (std::uint64_t row = 0; row < world.rows; ++row)
        for (std::uint32_t head = 0; head < world.query_heads(); ++head) {
          CHECK(part.state(row, head) == attention_state{});
          CHECK(part.sum(row, head)[part.shape.value_dim - 1] == 0);
        }
    }
  }

  TEST_CASE("parts of other kernels are imported, for both bases and any form of an empty part") {
    // Two rows of two heads; the second head of row 0 and all of row 1 are empty.
    const attention_part_shape shape{2, 2, 8};
    std::vector<float> out(32, 3.0F);
    std::fill_n(out.begin() + 8, 24, no_number);
    for (const float nothing : {infinity, -infinity, no_number}) {
      const std::vector<float> logarithms{2.0F, nothing, 7.0F, nothing};
      const std::int32_t tokens[] = {5, 0};
      const auto imported = [&](auto base) {
        foreign_attention<base()> of;
        of.out = {reinterpret_cast<const std::byte*>(out.data()), 64, 32};
        of.log_sum_exp = {logarithms.data(), 8, 4};
        of.tokens = tokens;
        part_memory made(shape, 1);
        import_attention(host_executor{}, shape, of, made.output()).value();
        part_memory states(shape, 2);  // in place: the outputs are the sums
        attention_part_output in_place = states.output();
        in_place.sums = {};
        import_attention(grid_executor{}, shape, of, in_place).value();
        const std::vector<attention_part> both{{of.out, attention_part(states.output()).states}};
        std::vector<part_memory> copied{made};
        CHECK(merged<base()>(shape, both) == merged<base()>(shape, views(copied)));
        CHECK(made.state(0, 1) == attention_state{});
        CHECK(made.state(1, 0) == attention_state{});
        CHECK(made.sum(1, 1)[0] == 0);
        const merged_floats all = merged<base()>(shape, views(copied));
        CHECK(all.out[0] == 3);
        CHECK(all.log_sum_exp[0] == doctest::Approx(2));
        CHECK(all.log_sum_exp[3] == -infinity);
        return made.state(0, 0).most;
      };
      CHECK(imported(std::integral_constant<log_base, log_base::two>{}) == 2);
      CHECK(imported(std::integral_constant<log_base, log_base::e>{}) ==
            doctest::Approx(2 * std::numbers::log2e));
    }
  }

  TEST_CASE("outputs of half width are imported with their values") {
    const attention_part_shape shape{1, 1, 8};
    alignas(16) std::byte halves[16];
    for (std::size_t i = 0; i < 8; ++i)
      store_element(dtype::f16, halves + 2 * i, 0.1F);
    const float logarithm = 0;
    foreign_attention<log_base::e> of;
    of.out = {halves, 16, 16};
    of.element = dtype::f16;
    of.log_sum_exp = {&logarithm, 4, 4};
    std::vector<part_memory> parts;
    parts.emplace_back(shape);
    import_attention(host_executor{}, shape, of, parts[0].output()).value();
    CHECK(merged(shape, views(parts)).out[3] == load_element(dtype::f16, halves));
    attention_part_output in_place = parts[0].output();
    in_place.sums = {};
    CHECK(import_attention(host_executor{}, shape, of, in_place).code() == errc::no_conversion);
  }

  TEST_CASE("ranks that share the tokens give the result of the whole, with windows and cut ranges") {
    double worst = 0;
    std::uint64_t seen = 0;
    for (const auto seed : seeds(120, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world(random);
      if (world.tables.empty()) continue;
      if (world.lengths.empty()) {
        if (world.sequences.empty()) {
          world.lengths = world.tokens;
        } else {
          for (const std::int32_t sequence : world.sequences)
            world.lengths.push_back(sequence < 0 ? 3 : world.tokens[static_cast<std::size_t>(sequence)]);
        }
      }
      const attention_part_shape shape = part_shape_of(world);
      std::vector<std::int32_t> begins(world.rows), ends(world.rows);
      for (std::uint64_t row = 0; row < world.rows; ++row) {
        begins[row] = static_cast<std::int32_t>(random() % 3 == 0 ? random() % 60 : 0);
        ends[row] = static_cast<std::int32_t>(random() % 3 == 0 ? random() % 120 : 1 << 30);
      }
      std::vector<part_memory> whole;
      whole.emplace_back(shape);
      CHECK(attend_part(world, host_executor{}, table_form::csr, whole[0], begins.data(), ends.data()) == 0);
      const auto size = static_cast<std::uint32_t>(2 + random() % 4);
      std::vector<part_memory> parts;
      const std::uint32_t interleave = random() % 3 == 0   ? 1
                                       : random() % 2 == 0 ? world.layout.block_tokens
                                                           : 4;
      for (std::uint32_t rank = 0; rank < size; ++rank) {
        const attention_world local =
            dealt(world, {.cp_rank = rank, .cp_size = size, .cp_interleave = interleave});
        parts.emplace_back(shape, random());
        CHECK(attend_part(local, grid_executor{}, table_form::padded, parts.back(), begins.data(),
                          ends.data()) == 0);
      }
      const merged_floats made = merged(shape, views(parts));
      const merged_floats expected = merged(shape, views(whole));
      for (std::size_t i = 0; i < made.out.size(); ++i)
        worst = std::max(
            worst, std::abs(static_cast<double>(made.out[i]) - static_cast<double>(expected.out[i])) / 2);
      for (std::size_t i = 0; i < made.log_sum_exp.size(); ++i)
        CHECK(std::isinf(made.log_sum_exp[i]) == std::isinf(expected.log_sum_exp[i]));
      seen += made.out.size();
    }
    CHECK(worst <= 1e-6);
    CHECK(seen > 10'000);
  }

  TEST_CASE("the parts of the first tokens and of a window merge to attention to a list of both") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world(random);
      if (world.options.element != dtype::f32 || world.tables.empty()) continue;
      world.sequences.clear();
      world.lengths.clear();
      world.rows = world.tables.size();
      world.queries.resize(world.query_strides[0] * world.rows);
      world.out.assign(world.out_strides[0] * world.rows, poison);
      const auto sinks = static_cast<std::int32_t>(1 + random() % 6);
      const auto window = static_cast<std::int32_t>(1 + random() % 40);
      const attention_part_shape shape = part_shape_of(world);
      const std::vector<std::int32_t> cut(world.rows, sinks);
      std::vector<part_memory> parts;
      parts.emplace_back(shape, random());
      parts.emplace_back(shape, random());
      world.options.window = 0;
      attend_part(world, host_executor{}, table_form::csr, parts[0], nullptr, cut.data());
      attention_world recent = world;
      recent.options.window = static_cast<std::uint32_t>(window);
      attend_part(recent, grid_executor{}, table_form::csr, parts[1], cut.data());
      std::vector<std::int32_t> listed;
      const std::int32_t stride = sinks + window;
      for (const std::int32_t tokens : world.tokens) {
        const std::size_t begin = listed.size();
        for (std::int32_t t = 0; t < tokens; ++t)
          if (t < sinks || t >= tokens - window) listed.push_back(t);
        listed.resize(begin + static_cast<std::size_t>(stride), -1);
      }
      const attended expected =
          attend_listed(world, listed_rows{listed, stride}, host_executor{}, table_form::csr);
      const merged_floats made = merged(shape, views(parts));
      for (std::uint64_t row = 0; row < world.rows; ++row)
        for (std::uint32_t head = 0; head < shape.query_heads; ++head)
          for (std::uint32_t e = 0; e < shape.value_dim; ++e) {
            const float of = load_element(dtype::f32, expected.out.data() + row * world.out_strides[0] +
                                                          head * world.out_strides[1] + std::uint64_t{e} * 4);
            const float is = made.out[(row * shape.query_heads + head) * shape.value_dim + e];
            CHECK(std::abs(of - is) <= 2e-6F);  // 1e-6 of the largest value
            ++seen;
          }
    }
    CHECK(seen > 1'000);
  }

  TEST_CASE("a part's bytes and places follow its vectors and states, side by side") {
    static_assert(attention_part_bytes({3, 4, 128}) == 3 * 4 * (512 + 8));
    static_assert(attention_part_bytes({~std::uint64_t{0}, 4, 128}) == ~std::uint64_t{0});
    static_assert(attention_part_bytes({std::uint64_t{1} << 40, ~0U, ~0U}) == ~std::uint64_t{0});
    static_assert(attention_part_bytes({7, 0, 128}) == 0);
    alignas(16) std::byte memory[240]{};
    const auto part = attention_part_in(memory, {3, 2, 8}).value();
    CHECK(part.sums.data == memory);
    CHECK(part.sums.token_stride == 64);
    CHECK(part.states.data == memory + 192);
    CHECK(part.states.token_stride == 16);
    CHECK(attention_part_of(memory, {3, 2, 8}).value().states.data == memory + 192);
    CHECK(attention_part_in(std::span(memory).first(239), {3, 2, 8}).error() ==
          failure{errc::too_short, 0, 240, 239});
    CHECK(attention_part_in(std::span(memory).subspan(8), {1, 2, 8}).code() == errc::bad_granularity);
    CHECK(attention_part_in(memory, {1, 2, 12}).code() == errc::bad_granularity);
  }

  TEST_CASE("mismatched parts are refused with what is wrong and why") {
    const attention_part_shape shape{2, 2, 8};
    std::vector<part_memory> parts;
    parts.emplace_back(shape);
    part_memory made(shape);
    alignas(16) std::byte out[256];
    struct call {
      attention_part_shape shape;
      std::vector<attention_part> parts;
      merged_attention<> out;
    };
    const call well{shape, views(parts), {.out = {out, 64, 32}}};
    const auto told = [&](auto&& change) {
      call of = well;
      change(of);
      const auto done = merge_attention(host_executor{}, of.shape, of.parts, of.out);
      return done ? failure{} : done.error();
    };
    CHECK(told([](call&) {}) == failure{});
    CHECK(told([](call& of) { of.parts.resize(33, of.parts[0]); }) == failure{errc::out_of_range, 0, 33, 32});
    CHECK(told([](call& of) { of.parts.resize(32, of.parts[0]); }) == failure{});
    CHECK(told([](call& of) { of.shape.query_heads = 0; }).message() ==
          "merge_attention: query_heads: two lengths must be equal, but are 0 and 1");
    CHECK(told([](call& of) { of.shape.value_dim = 0; }) == failure{errc::size_mismatch, 0, 0, 8});
    CHECK(told([](call& of) { of.shape.value_dim = 4; }) == failure{errc::bad_granularity, 0, 4, 8});
    CHECK(told([](call& of) { of.parts[0].sums.data += 8; }).code == errc::bad_granularity);
    CHECK(told([](call& of) { of.parts[0].states.token_stride += 4; }).code == errc::bad_granularity);
    CHECK(told([](call& of) { of.parts[0].sums.data = nullptr; }) == failure{errc::too_short, 0, 64, 0});
    CHECK(told([](call& of) { of.parts[0].sums.head_stride = 16; }) == failure{errc::too_short, 0, 32, 16});
    CHECK(told([](call& of) { of.parts[0].states.head_stride = 0; }) == failure{errc::too_short, 0, 8, 0});
    CHECK(told([](call& of) { of.out.element = dtype::fp8_e4m3; }).code == errc::no_conversion);
    CHECK(told([](call& of) { of.out.out.token_stride = 32; }) == failure{errc::too_short, 0, 64, 32});
    float logarithms[4];
    CHECK(told([&](call& of) { of.out.log_sum_exp = {logarithms, 8}; }) == failure{});
    CHECK(told([&](call& of) { of.out.log_sum_exp = {logarithms, 4}; }) == failure{errc::too_short, 0, 8, 4});
    CHECK(told([](call& of) {
            of.shape.rows = 0;
            of.parts[0].sums.data = nullptr;
          }) == failure{});
    attention_part_output bad = made.output();
    bad.states.data = nullptr;
    CHECK(merge_attention(host_executor{}, shape, well.parts, bad).code() == errc::too_short);
    bad = made.output();
    bad.sums.data += 4;
    CHECK(merge_attention(host_executor{}, shape, well.parts, bad).code() == errc::bad_granularity);
    foreign_attention<log_base::e> of;
    of.out = {out, 64, 32};
    CHECK(import_attention(host_executor{}, shape, of, made.output()).error().message() ==
          "import_attention: of.log_sum_exp: 8 entries needed, but 0 given; make it longer");
  }

  TEST_CASE("a part of attention is refused if it does not fit, and invalid ranges are flagged") {
    std::mt19937_64 random(3);
    attention_world world(random);
    while (world.rows == 0 || !world.sequences.empty())
      world = attention_world(random);
    part_memory part(part_shape_of(world));
    const auto told = [&](const attention_part_output& to, const attention_world& of) {
      std::vector<std::byte> cache = of.cache;
      std::vector<std::byte> workspace(of.workspace_bytes());
      const auto done = of.attend_part(host_executor{},
                                       {.queries = of.queries.data(),
                                        .cache = cache.data(),
                                        .workspace = workspace.data(),
                                        .padded = of.padded.data(),
                                        .seq_lens = of.tokens.data()},
                                       table_form::padded, to);
      return done ? std::string() : done.error().message();
    };
    CHECK(told(part.output(), world).empty());
    attention_part_output bad = part.output();
    bad.states.data = nullptr;
    CHECK(told(bad, world).find("paged_attention: part.states: ") == 0);
    bad = part.output();
    bad.sums.token_stride += 4;
    CHECK(told(bad, world).find("paged_attention: part.sums: ") == 0);
    attention_world dealt = world;
    dealt.layout.part = {.cp_rank = 1, .cp_size = 2};
    CHECK(told(part.output(), dealt)
              .find("paged_attention: rows.lengths, of a cache of one context-parallel "
                    "rank: ") == 0);
    dealt.layout.part.cp_rank = 2;
    CHECK(told(part.output(), dealt).find("paged_attention: part.cp_rank: ") == 0);
    dealt.layout.part = {.cp_size = 2, .cp_interleave = 0};
    CHECK(told(part.output(), dealt).find("paged_attention: part.cp_size x part.cp_interleave: ") == 0);
    const std::vector<std::int32_t> negative(world.rows, -1);
    CHECK(attend_part(world, host_executor{}, table_form::csr, part, negative.data()) == 1);
    CHECK(attend_part(world, host_executor{}, table_form::csr, part, nullptr, negative.data()) == 1);
    for (std::uint64_t row = 0; row < world.rows; ++row)
      CHECK(part.state(row, 0) == attention_state{});
  }
}
