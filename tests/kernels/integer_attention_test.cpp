/// Integer dots on each path of the machine: equal integers, and outputs that do not depend on what is read
/// together.
#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#endif

#include "support/coded_world.hpp"
#include "support/seeds.hpp"
#include "support/small_stack.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::paging::scale_group;

/// Rows that attend to one sequence of random codes, with any number of heads and length of vectors.
struct many_heads {
  kv_layout layout{.layers = 1};
  std::uint64_t rows = 9;
  std::uint32_t length = 1;
  std::uint32_t group = 1;
  std::vector<std::byte> cache{};
  std::vector<std::int32_t> table{};
  std::vector<float> queries{};

  many_heads(std::mt19937_64& random, std::uint32_t tokens) : length(tokens) {
    constexpr std::uint32_t dims[] = {8, 40, 64, 80, 128, 200, 256};
    constexpr std::uint32_t groups[] = {1, 2, 3, 4, 5, 8, 12, 16, 20};
    layout.heads = 1 + static_cast<std::uint32_t>(random() % 12);
    layout.head_dim = dims[random() % std::size(dims)];
    layout.block_tokens = std::uint32_t{8} << random() % 3;
    layout.element = random() % 2 == 0 ? dtype::int8 : dtype::int4;
    if (random() % 2 == 0) layout.value_element = random() % 2 == 0 ? dtype::int8 : dtype::int4;
    layout.key_scales = layout.value_scales = {.group = scale_group::vector};
    group = groups[random() % std::size(groups)];
    table.resize((length - 1) / layout.block_tokens + 1);
    std::iota(table.begin(), table.end(), 0);
    cache.resize(layout.total_bytes(table.size()));
    for (std::byte& each : cache)
      each = static_cast<std::byte>(random() & 0xFFU);
    each_scale(
        [&](std::byte* at) { store_element(dtype::f32, at, 0.001F * static_cast<float>(random() % 9)); });
    queries.resize(std::size_t{layout.heads} * group * layout.head_dim);
    for (float& each : queries)
      each = static_cast<float>(random() % 2048) / 1024 - 1;
  }
  template <class Set>
  void each_scale(const Set& set) {
    const std::uint64_t blocks = table.size();
    for (std::uint32_t p = 0; p < 2; ++p) {
      const plane_strides strides = layout.strides(code_places_of(layout, p).scales, blocks);
      for (std::uint64_t block = 0; block < blocks; ++block) {
        for (std::uint32_t token = 0; token < layout.block_tokens; ++token) {
          for (std::uint32_t head = 0; head < layout.heads; ++head)
            set(cache.data() + strides.offset(0, block, token, head));
        }
      }
    }
  }
  /// Copies all vectors to a layout of the same, from a table's blocks to those of another.
  void copy_to(const kv_layout& to, const std::vector<std::int32_t>& blocks) {
    const std::uint64_t count = table.size();
    std::vector<std::byte> moved(to.total_bytes(count));
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const plane_strides before = layout.strides(p, count);
      const plane_strides after = to.strides(p, count);
      for (std::uint64_t i = 0; i < count; ++i) {
        for (std::uint32_t token = 0; token < layout.block_tokens; ++token) {
          for (std::uint32_t head = 0; head < layout.heads; ++head)
            std::copy_n(cache.data() + before.offset(0, static_cast<std::uint64_t>(table[i]), token, head),
                        layout.vector_bytes(p),
                        moved.data() + after.offset(0, static_cast<std::uint64_t>(blocks[i]), token, head));
        }
      }
    }
    cache = moved;
    layout = to;
    table = blocks;
  }
  void move_blocks(std::mt19937_64& random) {
    std::vector<std::int32_t> blocks = table;
    std::shuffle(blocks.begin(), blocks.end(), random);
    copy_to(layout, blocks);
  }
  void set_order(paging::head_order order) {
    kv_layout to = layout;
    to.heads_in_block = order;
    copy_to(to, table);
  }
  /// The logarithms of the first row, then outputs of all rows, of which all have the same query.
  [[nodiscard]] std::vector<float> attend(vector_path path, const attention_options& options) const {
    return attend_by(host_vector_executor(path), options);
  }
  template <class Executor>
  [[nodiscard]] std::vector<float> attend_by(const Executor& run, const attention_options& options) const {
    const std::uint32_t heads = layout.heads * group;
    const std::vector<std::int32_t> sequences(rows, 0);
    const auto tokens = static_cast<std::int32_t>(length);
    const padded_table_view tables{.block_table = table.data(),
                                   .seq_lens = &tokens,
                                   .num_sequences = 1,
                                   .max_blocks = static_cast<std::int32_t>(table.size()),
                                   .block_tokens = static_cast<std::int32_t>(layout.block_tokens)};
    std::vector<float> asked;
    for (std::uint64_t row = 0; row < rows; ++row)
      asked.insert(asked.end(), queries.begin(), queries.end());
    std::vector<float> out(asked.size());
    std::vector<float> logs(rows * heads);
    attention_options how = options;
    how.query_heads = heads;
    how.element = dtype::f32;
    how.arithmetic = attention_arithmetic::host_integers;
    how.log_sum_exp = logs.data();
    std::vector<std::byte> workspace(attention_workspace_bytes(rows, layout, how));
    const std::uint64_t vector = std::uint64_t{4} * layout.head_dim;
    paged_attention(run, tables, {.rows = rows, .sequences = sequences.data()},
                    {reinterpret_cast<const std::byte*>(asked.data()), heads * vector, vector},
                    {reinterpret_cast<std::byte*>(out.data()), heads * vector, vector},
                    {const_cast<std::byte*>(cache.data()), table.size(), layout}, 0, workspace, how)
        .value();
    for (std::uint64_t row = 0; row < rows; ++row)
      CHECK(std::equal(logs.begin(), logs.begin() + heads,
                       logs.begin() + static_cast<std::ptrdiff_t>(row * heads)));
    out.insert(out.begin(), logs.begin(), logs.begin() + heads);
    return out;
  }
};

#if defined(__OPTIMIZE__)
constexpr std::size_t small_stack = std::size_t{is_watched ? 1024 : 128} << 10;
#elif defined(__clang__)
constexpr std::size_t small_stack = std::size_t{is_watched ? 1024 : 240} << 10;
#else
constexpr std::size_t small_stack = std::size_t{is_watched ? 1024 : 176} << 10;
#endif
using thread_of_small_stack = small_stack_team<small_stack>;

#if defined(__linux__)
/// Lets the calling thread's calls of arch_prctl fail, as a sandbox does. Returns false if Linux has no such
/// filter.
bool refuse_tiles() {
  sock_filter steps[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 158},  // arch_prctl of x86-64
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog program{4, steps};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}
#endif

/// Whether outputs after the first `from` floats differ by at most 1/50 of the largest: a code of a weight
/// may be rounded to the next.
bool is_near(const std::vector<float>& a, const std::vector<float>& b, std::size_t from) {
  float largest = 0;
  float off = 0;
  for (std::size_t i = from; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(b[i]));
    off = std::max(off, std::fabs(a[i] - b[i]));
  }
  return off <= largest / 50;
}

}  // namespace

TEST_SUITE("integer_attention") {
  TEST_CASE("integers are equal on each path, whatever the vectors' lengths and the number of heads") {
    for (const auto seed : seeds(40, 10)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const many_heads world(random, 1);
      const std::vector<float> made = world.attend(vector_path::baseline, {});
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path)) continue;
        CAPTURE(to_text(path));
        CHECK(world.attend(path, {}) == made);
      }
    }
  }

  TEST_CASE(
      "outputs of integer dots do not depend on the heads that are read together, nor on blocks' order") {
    for (const auto seed : seeds(8, 4)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const many_heads world(random, 1 + static_cast<std::uint32_t>(random() % 200));
      const std::uint32_t count = 1 + static_cast<std::uint32_t>(random() % 3);
      const attention_options how{.split = {(world.length / count / 8 + 1) * 8, count}};
      many_heads one = world;
      one.rows = 1;
      many_heads moved = world;
      moved.move_blocks(random);
      many_heads apart = world;
      apart.set_order(paging::head_order::hnd);
      const std::vector<float> expected = one.attend(vector_path::baseline, how);
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path)) continue;
        CAPTURE(to_text(path));
        const std::vector<float> made = world.attend(path, how);
        CHECK(moved.attend(path, how) == made);
        CHECK(apart.attend(path, how) == made);
        const std::vector<float> first = one.attend(path, how);
        CHECK(std::equal(first.begin(), first.end(), made.begin()));
        CHECK(is_near(first, expected, world.layout.heads * world.group));
      }
    }
  }

  TEST_CASE("integer dots need a stack of 128 KiB when they are optimised") {
    for (const auto seed : seeds(20, 10)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const many_heads world(random, 100);
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path)) continue;
        CAPTURE(to_text(path));
        const host_vector_executor<thread_of_small_stack> run(path);
        CHECK(world.attend_by(run, {}) == world.attend(path, {}));
      }
    }
  }

#if defined(__linux__)
  TEST_CASE("a machine has no AMX where Linux refuses its tiles") {
    std::thread([] {
      if (!refuse_tiles()) return;
      CHECK(!has_vector_path(vector_path::amx));
      CHECK(best_vector_path() != vector_path::amx);
      CHECK_THROWS_WITH_AS(host_vector_executor{vector_path::amx},
                           (std::string("vector_path: this machine has no amx, or the system refuses it; use "
                                        "best_vector_path(), here ") +
                            to_text(best_vector_path()))
                               .c_str(),
                           argument_error);
    }).join();
  }
#endif
}
