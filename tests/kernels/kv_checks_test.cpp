#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/cache_world.hpp"
#include "support/scattered_planes.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

constexpr kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8};  // vectors of 16 bytes
constexpr kv_layout mla{.layers = 1, .heads = 1, .head_dim = 8, .has_values = false};

/// A cache of two blocks, and three tokens of a batch.
struct small_world {
  std::vector<std::byte> cache = std::vector<std::byte>(layout.total_bytes(2), poison);
  std::vector<std::byte> batch = std::vector<std::byte>(2048);
  std::vector<std::int64_t> slots{0, 17, 5};

  [[nodiscard]] slot_front front() const { return {slots, 16, 2}; }
  [[nodiscard]] kv_memory memory() { return {cache.data(), 2, layout}; }
  [[nodiscard]] batch_vectors vectors(std::uint64_t token, std::uint64_t head) const {
    return {batch.data(), token, head};
  }
  [[nodiscard]] batch_output output(std::uint64_t token, std::uint64_t head) {
    return {batch.data(), token, head};
  }
};

std::string told(const result<void>& outcome) {
  return outcome ? "" : outcome.error().message();
}

}  // namespace

TEST_SUITE("kv_checks") {
  TEST_CASE("missing memory is refused by name if there are tokens") {
    small_world world;
    const host_executor run;
    const batch_vectors good = world.vectors(32, 16);
    const batch_vectors none{nullptr, 32, 16};
    const auto append = [&](const batch_vectors& keys, const batch_vectors& values, const kv_memory& cache) {
      return told(append_kv(run, world.front(), keys, values, cache, 0));
    };
    CHECK(append(none, good, world.memory()) ==
          "append_kv: keys: 32 entries needed, but 0 given; make it longer");
    CHECK(append(good, none, world.memory()) ==
          "append_kv: values: 32 entries needed, but 0 given; make it longer");
    CHECK(append(good, good, {nullptr, 2, layout}) ==
          "append_kv: cache: 2048 entries needed, but 0 given; make it longer");
    const batch_output no_output{nullptr, 32, 16};
    const batch_output output = world.output(32, 16);
    CHECK(told(gather_kv(run, world.front(), output, no_output, world.memory(), 0)) ==
          "gather_kv: values: 32 entries needed, but 0 given; make it longer");
    CHECK(told(gather_kv(run, world.front(), output, output, {nullptr, 2, layout}, 0)) ==
          "gather_kv: cache: 2048 entries needed, but 0 given; make it longer");
    const kv_memory latents{world.cache.data(), 2, mla};
    CHECK(told(append_mla(run, world.front(), good, none, 4, latents, 0)) ==
          "append_mla: rotary: 8 entries needed, but 0 given; make it longer");
    CHECK(told(append_mla(run, world.front(), {world.batch.data(), 0, 0}, good, 4, latents, 0)) ==
          "append_mla: latent.token_stride: 8 entries needed, but 0 given; make it longer");
    CHECK(told(gather_mla(run, world.front(), no_output, output, 4, latents, 0)) ==
          "gather_mla: latent: 8 entries needed, but 0 given; make it longer");
    CHECK(std::ranges::count(world.cache, poison) == static_cast<std::ptrdiff_t>(world.cache.size()));
  }

  TEST_CASE("a call that moves nothing needs no memory") {
    small_world world;
    const std::vector<std::int64_t> none;
    CHECK(told(append_kv(grid_executor(), slot_front(none, 16, 2), {}, {}, {nullptr, 2, layout}, 0)) == "");
    CHECK(told(gather_kv(grid_executor(), slot_front(none, 16, 2), {}, {}, {nullptr, 2, layout}, 1)) == "");
    // A cache without blocks has no memory, and no place for any token.
    std::uint32_t flag = 0;
    for (const block_order order : {block_order::layer_first, block_order::layer_first_paired}) {
      kv_layout other = layout;
      other.order = order;
      flag = 0;
      CHECK(told(append_kv(grid_executor(), slot_front(world.slots, 16, 0), world.vectors(32, 16),
                           world.vectors(32, 16), {nullptr, 0, other}, 1, {.out_of_range = &flag})) == "");
      CHECK(flag == 1);
    }
    kv_layout keys = layout;
    keys.has_values = false;
    CHECK(told(append_kv(grid_executor(), world.front(), world.vectors(32, 16), {},
                         {world.cache.data(), 2, keys}, 0)) == "");
  }

  TEST_CASE("forms that a kernel would neither read nor write are refused by name, before anything runs") {
    using llmmem::paging::scale_group;
    small_world world;
    const auto calls = [&](const kv_layout& of) {
      const kv_memory cache{world.cache.data(), 2, of};
      return std::vector<std::string>{told(append_kv(host_executor{}, world.front(), world.vectors(32, 16),
                                                     world.vectors(32, 16), cache, 0)),
                                      told(gather_kv(host_executor{}, world.front(), world.output(32, 16),
                                                     world.output(32, 16), cache, 0))};
    };
    const auto both = [](const std::string& text) {
      return std::vector<std::string>{"append_kv: " + text, "gather_kv: " + text};
    };
    const std::string one_scale =
        "the kernel takes keys and values both in codes (int8, int4, fp8_e4m3 or fp4_e2m1), each with one "
        "scale of f32 or bf16, or of fp8_e4m3 for fp4_e2m1, for a vector, run or channel (scale_group 1 to "
        "3), and for int8 and int4 by vector or run a zero point (numbers = 2); ";
    kv_layout scaled = layout;
    scaled.key_scales.group = scale_group::vector;
    CHECK(calls(scaled) ==
          both(one_scale + "plane 0 of the layout has other elements or scales (scale_group 1)"));
    scaled = layout;
    scaled.value_scales = {.group = scale_group::channel, .has_global = true};
    CHECK(calls(scaled) ==
          both(one_scale + "plane 0 of the layout has other elements or scales (scale_group 0)"));
    kv_layout mixed = layout;
    mixed.value_element = dtype::fp8_e4m3;
    CHECK(calls(mixed) ==
          both("the kernel takes values of the keys' type, but the layout has another value_element"));
    kv_layout rotated = layout;
    rotated.rotary_dim = 4;
    CHECK(
        calls(rotated) ==
        both("the kernel reads a rotary part of the keys' type only, but the layout has a rotary_dim of 4"));
    // A part of the tokens is as good as all where slots say where they go; so are index keys beside.
    kv_layout part = layout;
    part.part = {.cp_rank = 1, .cp_size = 2};
    part.order = block_order::layer_first_joined;
    CHECK(calls(part) == std::vector<std::string>{"", ""});
    kv_layout latents = mla;
    latents.index_dim = 4;
    std::vector<std::byte> bytes(latents.total_bytes(2));
    CHECK(told(append_mla(host_executor{}, world.front(), world.vectors(16, 0), world.vectors(16, 0), 4,
                          {bytes.data(), 2, latents}, 0)) == "");
  }

  TEST_CASE("distances shorter than a vector, as those in elements are, are refused by name") {
    small_world world;
    const auto append = [&](std::uint64_t token, std::uint64_t head) {
      return told(append_kv(host_executor{}, world.front(), world.vectors(32, 16), world.vectors(token, head),
                            world.memory(), 0));
    };
    CHECK(append(0, 16) == "append_kv: values.token_stride: 16 entries needed, but 0 given; make it longer");
    CHECK(append(32, 0) == "append_kv: values.head_stride: 16 entries needed, but 0 given; make it longer");
    CHECK(append(16, 8) == "append_kv: values.head_stride: 16 entries needed, but 8 given; make it longer");
    CHECK(append(15, 16) ==
          "append_kv: values.token_stride: 16 entries needed, but 15 given; make it longer");
    // What is read may share bytes: a head of one token with another of the next.
    CHECK(append(16, 16) == "");
    // One token needs no distance to another, nor does one head.
    world.slots = {3};
    CHECK(append(0, 16) == "");
    kv_layout one_head = layout;
    one_head.heads = 1;
    CHECK(told(append_kv(host_executor{}, world.front(), world.vectors(0, 0), world.vectors(0, 0),
                         {world.cache.data(), 2, one_head}, 0)) == "");
  }

  TEST_CASE("outputs whose vectors overlap are refused by name, and no others") {
    small_world world;
    const auto gather = [&](std::uint64_t token, std::uint64_t head) {
      return told(gather_kv(host_executor{}, world.front(), world.output(token, head),
                            batch_output{world.batch.data() + 1024, 32, 16}, world.memory(), 0));
    };
    CHECK(gather(32, 15) == "gather_kv: keys.head_stride: 16 entries needed, but 15 given; make it longer");
    CHECK(gather(15, 48) == "gather_kv: keys.token_stride: 16 entries needed, but 15 given; make it longer");
    CHECK(gather(31, 16) == "gather_kv: keys.token_stride: 32 entries needed, but 31 given; make it longer");
    CHECK(gather(32, 18) == "gather_kv: keys.token_stride: 34 entries needed, but 32 given; make it longer");
    CHECK(gather(16, 16) == "gather_kv: keys.token_stride: 32 entries needed, but 16 given; make it longer");
    // Heads outermost: three tokens of each.
    CHECK(gather(16, 46) == "gather_kv: keys.head_stride: 48 entries needed, but 46 given; make it longer");
    CHECK(gather(16, 48) == "");
    CHECK(gather(32, 16) == "");
    CHECK(gather(34, 18) == "");
    constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
    CHECK(gather(all / 2, all) == "gather_kv: keys.head_stride: 18446744073709551615 entries needed, but " +
                                      std::to_string(all) + " given; make it longer");
    world.slots = {3};
    CHECK(gather(0, 16) == "");
    CHECK(gather(4, 16) == "");
  }

  TEST_CASE("a promise of an invalid alignment is refused by name") {
    small_world world;
    const scattered_planes planes(layout, 2, world.cache);
    kv_memory cache = planes.memory();
    for (const std::uint32_t wrong : {0U, 12U}) {
      cache.plane_alignment = wrong;
      CHECK(told(append_kv(host_executor{}, world.front(), world.vectors(32, 16), world.vectors(32, 16),
                           cache, 0)) == "append_kv: cache.plane_alignment: alignment " +
                                             std::to_string(wrong) + " is not a power of two");
    }
    cache.plane_alignment = 8;
    CHECK(told(append_kv(host_executor{}, world.front(), world.vectors(32, 16), world.vectors(32, 16), cache,
                         0)) == "");
    CHECK(planes.image() != world.cache);
  }

  TEST_CASE("a part of a vector that begins in a table's plane has the alignment of its place there") {
    const kv_layout wide{.layers = 1, .heads = 1, .head_dim = 40, .has_values = false};
    const std::vector<std::byte> untouched(wide.total_bytes(2), poison);
    const scattered_planes planes(wide, 2, untouched);
    alignas(16) std::byte batch[160];
    for (std::size_t i = 0; i < sizeof(batch); ++i)
      batch[i] = std::byte(i);
    const std::vector<std::int64_t> slots{9, 20};
    append_mla(grid_executor(), slot_front(slots, 16, 2), {batch, 80, 80}, {batch + 64, 16, 16}, 36,
               planes.memory(), 0)
        .value();
    const std::vector<std::byte> image = planes.image();
    for (std::size_t i = 0; i < 2; ++i) {
      const std::byte* const there = image.data() + static_cast<std::size_t>(slots[i]) * 80;
      CHECK(std::equal(there, there + 72, batch + i * 80));
      CHECK(std::equal(there + 72, there + 80, batch + 64 + i * 16));
    }
  }
}
