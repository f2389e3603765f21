/// `attention_arithmetic::host_vectors`, on each path that this machine has.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/model/fp8.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "support/attention_parts_world.hpp"
#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/listed_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"
#include "support/small_stack.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// Runs the parts from the last to the first, and counts them.
struct backwards {
  std::uint64_t* parts;
  template <class Run>
  void operator()(std::uint64_t count, const Run& run) const {
    *parts += count;
    for (std::uint64_t part = count; part != 0; --part)
      run(part - 1);
  }
};

attention_world vector_world(std::mt19937_64& random) {
  attention_world world(random);
  world.options.arithmetic = attention_arithmetic::host_vectors;
  return world;
}

std::vector<vector_path> own_paths() {
  std::vector<vector_path> found;
  for (const vector_path path : vector_paths) {
    if (has_vector_path(path)) found.push_back(path);
  }
  return found;
}

/// Merges parts into the outputs of a world.
attended merged(const attention_world& world, std::vector<part_memory>& parts) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
  std::vector<attention_part> views;
  for (part_memory& each : parts)
    views.push_back(each.part());
  merged_attention<> out;
  out.out = {made.out.data(), world.out_strides[0], world.out_strides[1]};
  out.element = world.options.element;
  out.log_sum_exp = {made.log_sum_exp.data(), world.query_heads() * sizeof(float)};
  out.sequences = world.sequences.empty() ? nullptr : world.sequences.data();
  merge_attention(host_executor{}, part_shape_of(world), views, out).value();
  return made;
}

/// One head of `dim` elements, of floats, with tokens in consecutive blocks, and a query.
struct one_head {
  kv_layout layout;
  std::vector<float> cache;
  std::vector<std::int32_t> table;
  std::int32_t length;
  std::vector<float> query;

  one_head(std::uint32_t dim, std::int32_t tokens)
      : layout{.layers = 1, .heads = 1, .head_dim = dim, .block_tokens = 8, .element = dtype::f32},
        cache(layout.total_bytes((static_cast<std::uint64_t>(tokens) + 7) / 8) / sizeof(float)),
        table((static_cast<std::size_t>(tokens) + 7) / 8),
        length(tokens),
        query(dim) {
    std::iota(table.begin(), table.end(), 0);
  }
  float* vector(std::uint32_t plane, std::uint64_t token) {
    return cache.data() +
           layout.strides(plane, table.size()).offset(0, token / 8, token % 8, 0) / sizeof(float);
  }
  template <class Run>
  std::vector<float> attend(const Run& run, attention_options options = {}) {
    std::vector<float> out(layout.head_dim + 1);
    options.query_heads = 1;
    options.element = dtype::f32;
    options.arithmetic = attention_arithmetic::host_vectors;
    options.log_sum_exp = &out[layout.head_dim];
    std::vector<std::byte> workspace(attention_workspace_bytes(1, layout, options));
    const padded_table_view tables{.block_table = table.data(),
                                   .seq_lens = &length,
                                   .num_sequences = 1,
                                   .max_blocks = static_cast<std::int32_t>(table.size()),
                                   .block_tokens = 8};
    const std::uint64_t stride = layout.head_dim * sizeof(float);
    paged_attention(run, tables, {.rows = 1},
                    {reinterpret_cast<const std::byte*>(query.data()), stride, stride},
                    {reinterpret_cast<std::byte*>(out.data()), stride, stride},
                    {reinterpret_cast<std::byte*>(cache.data()), table.size(), layout}, 0, workspace, options)
        .value();
    return out;
  }
};

struct code_in_fp8 {
  float value;
  float product;  // with a query of 1
};
/// Attends to one token, whose key and value have a code among zeros, by the last of some query heads.
code_in_fp8 attend_to_code(vector_path path, std::uint32_t code, std::uint32_t query_heads) {
  constexpr std::uint32_t dim = 128;
  const kv_layout layout{
      .layers = 1, .heads = 1, .head_dim = dim, .block_tokens = 1, .element = dtype::fp8_e4m3};
  const std::uint32_t at = code % dim;
  std::vector<std::byte> cache(layout.total_bytes(1));
  cache[layout.strides(0, 1).offset(0, 0, 0, 0) + at] = std::byte(code);
  cache[layout.strides(1, 1).offset(0, 0, 0, 0) + at] = std::byte(code);
  std::vector<float> query(query_heads * dim);
  query[(query_heads - 1) * dim + at] = 1;
  std::vector<float> out(query.size());
  std::vector<float> log_sum_exp(query_heads);
  attention_options options{.query_heads = query_heads,
                            .element = dtype::f32,
                            .scale = 1,
                            .arithmetic = attention_arithmetic::host_vectors};
  options.log_sum_exp = log_sum_exp.data();
  const std::int32_t table = 0;
  const std::int32_t length = 1;
  const padded_table_view tables{&table, &length, 1, 1, 1};
  constexpr std::uint64_t stride = dim * sizeof(float);
  paged_attention(host_vector_executor(path), tables, {.rows = 1},
                  {reinterpret_cast<const std::byte*>(query.data()), query_heads * stride, stride},
                  {reinterpret_cast<std::byte*>(out.data()), query_heads * stride, stride},
                  {cache.data(), 1, layout}, 0, {}, options)
      .value();
  return {out[(query_heads - 1) * dim + at], log_sum_exp[query_heads - 1]};
}

}  // namespace

TEST_SUITE("host_vectors") {
  TEST_CASE(
      "each output is near what attention's definition says, on each path, and nothing else is touched") {
    std::uint64_t seen = 0;
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (const auto seed : seeds(150, 60)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const attention_world world = vector_world(random);
        seen += check(world, attend(world, host_vector_executor(path)));
      }
    }
    CHECK(seen > 50'000);
  }

  TEST_CASE("threads, the places and layout of blocks, and the form of tables change no bit") {
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (const auto seed : seeds(40, 20)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const attention_world world = vector_world(random);
        const attended alone = attend(world, host_vector_executor(path));
        std::uint64_t parts = 0;
        CHECK(attend(world, host_vector_executor(path, backwards{&parts})) == alone);
        CHECK((parts != 0 || world.rows == 0));
        CHECK(attend(world, host_vector_executor(path), table_form::padded) == alone);
        const attention_world other = rearranged(world, random);
        CHECK(attend(other, host_vector_executor(path)) == alone);
        const scattered_planes planes(world.layout, world.blocks, world.cache);
        CHECK(attend(world, host_vector_executor(path), table_form::padded, &planes) == alone);
      }
    }
  }

#if defined(__x86_64__)
  TEST_CASE("a thread that takes subnormal floats for zeros still reads each element of half and fp8") {
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (const auto seed : seeds(40, 20)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        attention_world world = vector_world(random);
        // Each element becomes a subnormal one of its type: no digit of the exponent.
        if (world.layout.element == dtype::fp8_e4m3) {
          for (std::byte& each : world.cache)
            each &= std::byte{0x87};
        } else if (world.layout.element == dtype::f16) {
          for (std::size_t i = 1; i < world.cache.size(); i += 2)
            world.cache[i] &= std::byte{0x83};
        }
        const attended exact = attend(world, host_vector_executor(path));
        const unsigned before = _mm_getcsr();
        const unsigned flushes = before | 0x8040;
        _mm_setcsr(flushes);
        const attended flushed = attend(world, host_vector_executor(path));
        const unsigned after = _mm_getcsr();
        _mm_setcsr(before);
        CHECK(flushed == exact);
        CHECK((after & 0x8040) == (flushes & 0x8040));
      }
    }
  }
#endif

  TEST_CASE("rows that share their tokens get the bits that they have alone") {
    for (const auto seed : seeds(40, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world = vector_world(random);
      const auto shared = static_cast<std::uint32_t>(2 + random() % 6);
      world.share_rows(random, shared);
      const attended alone = attend(world, host_vector_executor());
      world.shared = shared;
      CHECK(attend(world, host_vector_executor()) == alone);
    }
  }

  TEST_CASE("parts of the rows, and parts of context-parallel ranks, merge to the whole") {
    for (const auto seed : seeds(60, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world = vector_world(random);
      const attention_part_shape shape = part_shape_of(world);
      const auto count = static_cast<std::uint32_t>(2 + random() % 3);
      const row_cuts cuts(random, world.rows, count);
      std::vector<part_memory> parts;
      for (std::uint32_t i = 0; i < count; ++i) {
        parts.emplace_back(shape, random());
        CHECK(attend_part(world, host_vector_executor(), table_form::csr, parts.back(), cuts.begins[i].data(),
                          cuts.ends[i].data()) == 0);
      }
      check(world, merged(world, parts));
      if (world.lengths.empty()) {
        if (!world.sequences.empty()) continue;
        world.lengths = world.tokens;
      }
      std::vector<part_memory> of_ranks;
      for (std::uint32_t rank = 0; rank < count; ++rank) {
        const attention_world local = dealt(world, {.cp_rank = rank, .cp_size = count, .cp_interleave = 4});
        of_ranks.emplace_back(shape, random());
        CHECK(attend_part(local, host_vector_executor(), table_form::padded, of_ranks.back()) == 0);
      }
      check(world, merged(world, of_ranks));
    }
  }

  TEST_CASE("attention to listed tokens has the bits of attention to a sequence of these alone") {
    for (const auto seed : seeds(60, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      listed_world world(random);
      world.world.options.arithmetic = world.dense.options.arithmetic = attention_arithmetic::host_vectors;
      CHECK(attend_listed(world.world, world, host_vector_executor(), table_form::csr) ==
            attend(world.dense, host_vector_executor()));
    }
  }

  TEST_CASE("each code of fp8 is its number in a key and in a value") {
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (std::uint32_t query_heads = 1; query_heads <= 16; query_heads *= 4) {
        for (std::uint32_t code = 0; code < 256; ++code) {
          CAPTURE(code);
          const float number = std::bit_cast<float>(f32_from_e4m3_bits(static_cast<std::uint8_t>(code)));
          const code_in_fp8 made = attend_to_code(path, code, query_heads);
          CHECK(std::isnan(made.value) == std::isnan(number));
          CHECK(std::isnan(made.product) == std::isnan(number));
          if (std::isnan(number)) continue;
          CHECK(made.value == number);
          CHECK(made.product == doctest::Approx(number).epsilon(1e-6));
        }
      }
    }
  }

  TEST_CASE("each half is its number in a value, and in a key") {
    constexpr std::uint32_t dim = 256;
    constexpr std::uint32_t rows = 256;
    const kv_layout layout{
        .layers = 1, .heads = 1, .head_dim = dim, .block_tokens = 1, .element = dtype::f16};
    std::vector<std::byte> cache(layout.total_bytes(2 * rows));
    std::vector<std::int32_t> table(rows);
    const std::vector<std::int32_t> lengths(rows, 1);
    for (std::uint32_t row = 0; row < rows; ++row) {
      table[row] = static_cast<std::int32_t>(row);
      for (std::uint32_t e = 0; e < dim; ++e) {
        const auto bits = static_cast<std::uint16_t>(row * dim + e);
        std::memcpy(cache.data() + layout.strides(1, 2 * rows).offset(0, row, 0, 0) + 2 * e, &bits, 2);
      }
      // A key with one number, the row's, at its element.
      const auto key = static_cast<std::uint16_t>(row * 257);
      std::memcpy(cache.data() + layout.strides(0, 2 * rows).offset(0, row, 0, 0) + 2 * row, &key, 2);
    }
    const std::vector<float> query(rows * dim, 1.0F);
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      std::vector<float> out(query.size());
      std::vector<float> log_sum_exp(rows);
      attention_options options{.query_heads = 1,
                                .element = dtype::f32,
                                .scale = 1,
                                .arithmetic = attention_arithmetic::host_vectors};
      options.log_sum_exp = log_sum_exp.data();
      const padded_table_view tables{table.data(), lengths.data(), rows, 1, 1};
      constexpr std::uint64_t stride = dim * sizeof(float);
      paged_attention(host_vector_executor(path), tables, {.rows = rows},
                      {reinterpret_cast<const std::byte*>(query.data()), stride, stride},
                      {reinterpret_cast<std::byte*>(out.data()), stride, stride},
                      {cache.data(), 2 * rows, layout}, 0, {}, options)
          .value();
      for (std::uint32_t row = 0; row < rows; ++row) {
        CAPTURE(row);
        const float key = float_of<dtype::f16>(static_cast<std::uint16_t>(row * 257));
        if (std::isfinite(key)) {
          CHECK(log_sum_exp[row] == doctest::Approx(key).epsilon(1e-6));
          std::uint32_t wrong = 0;
          for (std::uint32_t e = 0; e < dim; ++e) {
            const float number = float_of<dtype::f16>(static_cast<std::uint16_t>(row * dim + e));
            const float made = out[row * dim + e];
            wrong += std::isnan(number) ? !std::isnan(made) : made != number;
          }
          CHECK(wrong == 0);
        } else {
          CHECK(!std::isfinite(log_sum_exp[row]));
        }
      }
    }
  }

  TEST_CASE("vectors of any length are read to their end and not past it") {
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (std::uint32_t dim = 8; dim <= 256; dim += 8) {
        CAPTURE(dim);
        one_head world(dim, 41);
        for (std::uint64_t t = 0; t < 41; ++t) {
          world.vector(0, t)[dim - 1] = t == 40 ? 100.0F : 0.0F;
          for (std::uint32_t e = 0; e < dim; ++e)
            world.vector(1, t)[e] = static_cast<float>(t * 1000 + e);
        }
        world.query[dim - 1] = 1;
        const std::vector<float> made = world.attend(host_vector_executor(path), {.scale = 1});
        for (std::uint32_t e = 0; e < dim; ++e)
          CHECK(made[e] == static_cast<float>(40'000 + e));
      }
    }
  }

  TEST_CASE("products of any size keep their weights, and one that is no number is seen") {
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      const host_vector_executor run(path);
      one_head world(8, 40);
      for (std::uint64_t t = 0; t < 40; ++t) {
        world.vector(0, t)[0] = static_cast<float>(t) * 1000 - 20'000;
        world.vector(1, t)[3] = static_cast<float>(t);
      }
      world.query[0] = 1;
      for (const std::uint32_t count : {1U, 3U}) {
        const std::vector<float> made = world.attend(run, {.scale = 1, .split = {16, count}});
        CHECK(made[3] == 39);
        CHECK(made[8] == 19'000);
      }
      world.vector(0, 20)[1] = std::numeric_limits<float>::quiet_NaN();
      world.query[1] = 1;
      const auto is_number = [&](const attention_options& options) {
        const std::vector<float> made = world.attend(run, options);
        CHECK(std::isnan(made[0]) == std::isnan(made[8]));
        return !std::isnan(made[0]);
      };
      CHECK(!is_number({}));
      CHECK(!is_number({.split = {8, 5}}));
      CHECK(!is_number({.window = 20}));
      CHECK(is_number({.window = 19}));  // tokens 21 to 39
    }
  }

#if defined(__OPTIMIZE__)
  TEST_CASE("dots of floats need a stack of 128 KiB when they are optimised") {
    constexpr std::size_t small_stack = std::size_t{is_watched ? 1024 : 128} << 10;
    for (const vector_path path : own_paths()) {
      CAPTURE(to_text(path));
      for (const auto seed : seeds(20, 10)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const attention_world world = vector_world(random);
        const host_vector_executor<small_stack_team<small_stack>> run(path);
        CHECK(attend(world, run) == attend(world, host_vector_executor(path)));
      }
    }
  }
#endif

  TEST_CASE("a row without tokens gives zeros, and a logarithm of -infinity") {
    one_head world(16, 8);
    world.length = 0;
    const std::vector<float> made = world.attend(host_vector_executor());
    CHECK(std::vector<float>(made.begin(), made.end() - 1) == std::vector<float>(16, 0.0F));
    CHECK(made[16] == -std::numeric_limits<float>::infinity());
  }

  TEST_CASE("other executors refuse it, and this one runs the reproducible arithmetic as they do") {
    std::mt19937_64 random(1);
    attention_world world(random);
    CHECK(attend(world, host_vector_executor()) == attend(world, host_executor{}));
    one_head head(8, 8);
    CHECK_THROWS_WITH_AS(head.attend(host_executor{}),
                         doctest::Contains("host_vectors needs a host_vector_executor"), std::exception);
    CHECK_THROWS_AS(head.attend(testing::grid_executor{}), std::exception);
  }

  TEST_CASE("shares are planned for as many threads as are given") {
    const kv_layout layout{.layers = 1, .heads = 8, .head_dim = 128, .block_tokens = 16};
    const auto plan = [&](std::uint64_t rows, std::uint64_t tokens, std::uint32_t threads) {
      return plan_attention(rows, 64, layout, tokens, {.multiprocessors = threads},
                            attention_arithmetic::host_vectors)
          .count;
    };
    CHECK(plan(1, 100'000, 1) == 4);
    CHECK(plan(1, 100'000, 16) == 64);
    CHECK(plan(64, 100'000, 16) == 1);
    CHECK(plan(1, 1'000, 64) == 1);  // too short to divide
    CHECK(plan(1, 2'048, 64) == 4);
    // A token's heads are read together, if these are neighbours.
    for (const auto arithmetic : {attention_arithmetic::host_vectors, attention_arithmetic::host_integers}) {
      const auto plan_in = [&](std::uint64_t rows, paging::head_order order) {
        kv_layout cache = layout;
        cache.heads_in_block = order;
        return plan_attention(rows, 64, cache, 100'000, {.multiprocessors = 16}, arithmetic).count;
      };
      CHECK(plan_in(1, paging::head_order::nhd) == 64);
      CHECK(plan_in(8, paging::head_order::nhd) == 8);
      CHECK(plan_in(1, paging::head_order::hnd) == 8);
    }
  }

  TEST_CASE("a path that the machine does not have is refused, and the best one is taken") {
    CHECK(has_vector_path(best_vector_path()));
    CHECK(host_vector_executor().path() == best_vector_path());
    CHECK(best_vector_path() != vector_path::amx);  // subnormal bf16 are numbers
    const bool has_tiles = has_vector_path(vector_path::amx);
    CHECK(host_vector_executor().integer_path() == (has_tiles ? vector_path::amx : best_vector_path()));
    CHECK(host_vector_executor(vector_path::baseline).integer_path() == vector_path::baseline);
    for (const vector_path path : vector_paths) {
      if (has_vector_path(path)) {
        CHECK(host_vector_executor(path).path() == path);
        CHECK((path == vector_path::amx || best_vector_path() >= path));
      } else {
        CHECK_THROWS_WITH_AS(host_vector_executor{path},
                             (std::string("vector_path: this machine has no ") + to_text(path) +
                              (path == vector_path::amx ? ", or the system refuses it" : "") +
                              "; use best_vector_path(), here " + to_text(best_vector_path()))
                                 .c_str(),
                             argument_error);
      }
    }
  }
}
