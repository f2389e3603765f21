/// Attention over caches in codes with scales in their blocks.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// Whether planes of a memory aligned to 16 begin where no float can.
bool has_odd_planes(const attention_world& world) {
  std::vector<std::byte> cache = world.cache;
  std::uintptr_t all = 0;
  for (std::byte* const each : world.planes_in(cache.data()))
    all |= reinterpret_cast<std::uintptr_t>(each);
  return all % 4 != 0;
}

/// Attends where a table says where planes begin.
attended attend_by_planes(const attention_world& world) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
  std::vector<std::byte> workspace(world.workspace_bytes());
  std::vector<std::byte> cache = world.cache;
  const std::vector<std::byte*> planes = world.planes_in(cache.data());
  std::uintptr_t all = 16;
  for (std::byte* const each : planes)
    all |= reinterpret_cast<std::uintptr_t>(each);
  world
      .attend(host_executor{},
              {.queries = world.queries.data(),
               .out = made.out.data(),
               .plane_table = planes.data(),
               .plane_alignment = std::uint32_t{1} << std::countr_zero(all),
               .workspace = workspace.data(),
               .padded = world.padded.data(),
               .seq_lens = world.tokens.data(),
               .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
               .lengths = world.lengths.empty() ? nullptr : world.lengths.data(),
               .scales = {world.scales[0].data(), world.scales[1].data()},
               .log_sum_exp = made.log_sum_exp.data(),
               .flag = &made.flag},
              table_form::padded)
      .value();
  return made;
}

}  // namespace

TEST_SUITE("coded_attention") {
  TEST_CASE("attention over codes of any form has the bits of attention over their dequantised floats") {
    for (const auto seed : seeds(150, 60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
      const coded_world world(random, types[seed % 3]);
      const attended codes = attend(world.codes, host_executor{});
      const attended floats = attend(world.floats, host_executor{});
      CHECK(are_rounded(world, codes.out, floats.out));
      CHECK(codes.log_sum_exp == floats.log_sum_exp);
      CHECK(codes.flag == 0);
    }
  }

  TEST_CASE("a grid, tables of either form and a table of planes give the same bits") {
    std::uint64_t by_planes = 0;
    for (const auto seed : seeds(40, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const coded_world world(random);
      const attended host = attend(world.codes, host_executor{});
      CHECK(attend(world.codes, grid_executor({.blocks = 2})) == host);
      CHECK(attend(world.codes, grid_executor(), table_form::padded) == host);
      // A table says one alignment for all planes: here one of bytes or of bf16 may leave less than floats need.
      if (world.codes.layout.key_scales.element == dtype::f32 &&
          world.codes.layout.value_scales.element == dtype::f32 && !has_odd_planes(world.codes)) {
        ++by_planes;
        CHECK(attend_by_planes(world.codes) == host);
      }
    }
    CHECK(by_planes > 0);
  }
}
