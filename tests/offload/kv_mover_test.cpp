/// Movers between a cache's memory and slots that do not lie side by side.
#include <llmmem/offload/kv_mover.hpp>

#include <doctest/doctest.h>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/error_text.hpp"

using namespace llmmem;

namespace {

struct traits : paged_traits {
  using observer = offload::tier_link;
};

constexpr std::uint64_t blocks = 6;

kv_layout layout_of(std::uint32_t head_dim, block_order order) {
  return {.layers = 3,
          .heads = 2,
          .head_dim = head_dim,
          .block_tokens = 4,
          .element = dtype::f32,
          .order = order};
}

std::vector<std::byte> numbered(std::size_t count, unsigned first) {
  std::vector<std::byte> out(count);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = static_cast<std::byte>((i * 7 + first) & 0xFF);
  return out;
}

}  // namespace

TEST_CASE("a layout_mover respects the stride of the slots") {
  for (const block_order order : {block_order::layer_first, block_order::block_first}) {
    const kv_layout layout = layout_of(8, order);
    const std::vector<std::byte> before = numbered(layout.total_bytes(blocks), 1);
    std::vector<std::byte> cache = before;
    offload::layout_mover mover(host_executor{}, {.data = cache.data(), .blocks = blocks, .layout = layout});
    const std::uint64_t bytes = mover.block_bytes(0);
    const std::array<offload::slot_pair, 3> pairs{{{block_id{1}, 2}, {block_id{4}, 0}, {block_id{5}, 1}}};
    std::vector<std::byte> packed(bytes * 3);
    mover.save(0, {packed.data(), 3, bytes}, pairs, {}).value();
    const std::uint64_t stride = bytes + 48;
    std::vector<std::byte> apart(stride * 3, std::byte{0xEE});
    const offload::slot_memory slots{apart.data(), 3, stride};
    mover.save(0, slots, pairs, {}).value();
    for (std::size_t slot = 0; slot < 3; ++slot) {
      CHECK(std::equal(&apart[slot * stride], &apart[slot * stride] + bytes, &packed[slot * bytes]));
      for (std::size_t i = bytes; i < stride; ++i)
        CHECK(apart[slot * stride + i] == std::byte{0xEE});
    }
    std::fill(cache.begin(), cache.end(), std::byte{0});
    mover.restore(0, slots, pairs, {.first = 0, .count = 2}).value();
    mover.restore(0, slots, pairs, {.first = 2, .count = 1}).value();
    std::vector<std::byte> expected(cache.size());
    offload::layout_mover other(host_executor{},
                                {.data = expected.data(), .blocks = blocks, .layout = layout});
    other.restore(0, {packed.data(), 3, bytes}, pairs, {.first = 0, .count = 3}).value();
    CHECK(cache == expected);
  }
}

TEST_CASE("a joint_mover keeps a block's bytes of two memories in one slot") {
  const kv_layout codes = layout_of(8, block_order::layer_first);
  const kv_layout scales = layout_of(2, block_order::block_first);
  const std::vector<std::byte> code_bytes = numbered(codes.total_bytes(blocks), 3);
  const std::vector<std::byte> scale_bytes = numbered(scales.total_bytes(blocks), 9);
  std::vector<std::byte> of_codes = code_bytes;
  std::vector<std::byte> of_scales = scale_bytes;
  offload::joint_mover mover(
      offload::layout_mover(host_executor{}, {.data = of_codes.data(), .blocks = blocks, .layout = codes}),
      offload::layout_mover(host_executor{}, {.data = of_scales.data(), .blocks = blocks, .layout = scales}));
  const std::uint64_t bytes = mover.block_bytes(0);
  CHECK(bytes == codes.packed().block_bytes() + scales.packed().block_bytes());
  CHECK(mover.blocks() == blocks);
  std::vector<std::byte> slots(bytes * blocks);
  std::vector<offload::slot_pair> all;
  for (std::uint32_t i = 0; i < blocks; ++i)
    all.push_back({block_id{i}, static_cast<std::uint32_t>(blocks - 1 - i)});
  mover.save(0, {slots.data(), blocks, bytes}, all, {}).value();
  std::fill(of_codes.begin(), of_codes.end(), std::byte{0});
  std::fill(of_scales.begin(), of_scales.end(), std::byte{0});
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    mover.restore(0, {slots.data(), blocks, bytes}, all, {.first = layer, .count = 1}).value();
  CHECK(of_codes == code_bytes);
  CHECK(of_scales == scale_bytes);

  kv_layout deeper = scales;
  deeper.layers = 4;
  std::vector<std::byte> more(deeper.total_bytes(blocks));
  CHECK_THROWS_WITH_AS(
      (offload::joint_mover(
          offload::layout_mover(host_executor{},
                                {.data = of_codes.data(), .blocks = blocks, .layout = codes}),
          offload::layout_mover(host_executor{}, {.data = more.data(), .blocks = blocks, .layout = deeper}))),
      "joint_mover: the first mover has 3 layers, the second 4; both must move the same blocks of the same "
      "layers",
      argument_error);
}

TEST_CASE("slots of a first tier with a granularity move down and come up complete") {
  const kv_layout layout = layout_of(8, block_order::layer_first);
  paged_allocator<traits> cache({.blocks = 5, .block_tokens = 4, .max_sequences = 2, .name = "kv"});
  std::vector<std::byte> memory(layout.total_bytes(cache.physical_blocks()));
  const kv_memory of_cache{.data = memory.data(), .blocks = cache.physical_blocks(), .layout = layout};
  host_space host({.budget = 1 << 16});
  host_space below({.budget = 1 << 16});
  offload::kv_tier first(host, 4 * 2048, demoting<write_through>{});
  first.granularity = 1024;
  REQUIRE(layout.packed().block_bytes() % 1024 != 0);
  kv_tiers tiers(cache, offload::layout_mover(host_executor{}, of_cache), {.store = write_through{}}, first,
                 offload::kv_tier(below, 1 << 15));
  const auto serve = [&](token_id family, bool must_load) {
    std::vector<token_id> prompt(17);
    for (std::size_t i = 0; i < prompt.size(); ++i)
      prompt[i] = family * 1000 + static_cast<token_id>(i);
    const auto sequence = cache.create().value();
    const kv_chain chain(cache, prompt);
    cache.match(sequence, std::span(prompt).first(16)).value();
    auto load = tiers.prepare_load(sequence, chain, 16).value();
    const auto came = load.complete();
    CHECK(came.is_complete());
    const std::uint64_t tokens = cache.tokens(sequence);
    CHECK(tokens == (must_load ? 16 : 0));
    const auto table = cache.blocks(sequence);
    const auto word = [&](std::size_t i) {
      return static_cast<std::byte>(family * 16 + static_cast<int>(i));
    };
    const auto bytes_of = [&](block_id block) {
      std::vector<std::byte> out(layout.packed().block_bytes());
      offload::layout_mover reader(host_executor{}, of_cache);
      const std::array<offload::slot_pair, 1> pair{{{block, 0}}};
      reader.save(0, {out.data(), 1, out.size()}, pair, {}).value();
      return out;
    };
    for (std::size_t i = 0; i < tokens / 4; ++i)
      CHECK(bytes_of(table[i]) == std::vector<std::byte>(layout.packed().block_bytes(), word(i)));
    cache.append(sequence, std::span(prompt).subspan(tokens, 16 - tokens)).value();
    for (std::size_t i = tokens / 4; i < 4; ++i) {
      std::vector<std::byte> made(layout.packed().block_bytes(), word(i));
      offload::layout_mover writer(host_executor{}, of_cache);
      const std::array<offload::slot_pair, 1> pair{{{cache.blocks(sequence)[i], 0}}};
      writer.restore(0, {made.data(), 1, made.size()}, pair, {.first = 0, .count = 3}).value();
    }
    cache.commit(sequence).value();
    tiers.store(sequence).value();
    cache.release(sequence).value();
    tiers.flush();
  };
  for (token_id family = 1; family <= 3; ++family)
    serve(family, false);
  for (token_id family = 1; family <= 3; ++family)
    serve(family, true);
}
