#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_digest.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/cache_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// By the definition: the digest of the packed block.
std::uint64_t packed_digest(const kv_memory& memory, std::uint64_t block) {
  std::vector<std::byte> bytes(memory.layout.block_bytes());
  copy_kv_block({bytes.data(), 1, memory.layout.packed()}, 0, memory, block, memory.layout.block_tokens);
  return block_digest(bytes);
}

/// A layout whose vectors are whole words; some of them have several tiles.
kv_layout any_layout_of_words(std::mt19937_64& random) {
  kv_layout layout = any_layout(random);
  layout.head_dim = static_cast<std::uint32_t>(4 * (1 + random() % 40));
  if (layout.value_dim != 0) layout.value_dim = static_cast<std::uint32_t>(4 * (1 + random() % 40));
  if (random() % 3 == 0) layout.block_tokens *= 16;
  return layout;
}

std::string told(const result<void>& outcome) {
  return outcome ? "" : outcome.error().message();
}

}  // namespace

TEST_SUITE("kv_digest") {
  TEST_CASE("a block's digest is that of its packed bytes, in any layout") {
    std::uint64_t strays = 0;
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const kv_layout layout = any_layout_of_words(random);
      const std::uint64_t blocks = 1 + random() % 3;
      const std::size_t shift = random() % 2 == 0 ? 0 : random() % 9;
      std::vector<std::byte> bytes(layout.total_bytes(blocks) + shift);
      fill_with(bytes, dtype::bf16, random);
      const kv_memory memory{bytes.data() + shift, blocks, layout};
      const scattered_planes planes(
          layout, blocks, {bytes.begin() + static_cast<std::ptrdiff_t>(shift), bytes.end()}, random() % 17);
      std::vector<std::int32_t> numbers;
      std::vector<std::uint64_t> expected;
      std::uint32_t stray = 0;
      for (std::uint64_t i = random() % 5; i > 0; --i) {
        const auto number = static_cast<std::int32_t>(random() % (blocks + 2)) - 1;
        const bool is_there = number >= 0 && number < static_cast<std::int32_t>(blocks);
        stray |= number >= 0 && !is_there ? 1U : 0U;
        numbers.push_back(number);
        expected.push_back(is_there ? packed_digest(memory, static_cast<std::uint64_t>(number))
                                    : block_digest({}));
      }
      expected.push_back(7);  // beyond: not touched
      const auto check = [&](const auto& run, const kv_memory& cache) {
        std::vector<std::uint64_t> sums(expected.size(), 7);
        std::uint32_t flag = 0;
        digest_kv_blocks(run, cache, numbers, sums, &flag).value();
        CHECK(sums == expected);
        CHECK(flag == stray);
      };
      for (const kv_memory& cache : {memory, planes.memory()}) {
        check(host_executor{}, cache);
        check(grid_executor({.blocks = static_cast<std::uint32_t>(random() % 4)}), cache);
      }
      strays += stray;
    }
    CHECK(strays > 30);
  }

  TEST_CASE("a block's digest equals that of a pool of packed blocks, and detects one changed bit") {
    const kv_layout layout{
        .layers = 3, .heads = 4, .head_dim = 128, .heads_in_block = llmmem::paging::head_order::hnd};
    std::vector<std::byte> bytes(layout.total_bytes(2));
    std::mt19937_64 random(5);
    fill_with(bytes, dtype::bf16, random);
    const kv_memory memory{bytes.data(), 2, layout};
    std::vector<std::byte> packed(layout.total_bytes(2));
    for (std::uint64_t i = 0; i < 2; ++i)
      copy_kv_block({packed.data(), 2, layout.packed()}, i, memory, i, 16);
    std::vector<std::uint64_t> expected(2);
    const std::uint64_t each = layout.block_bytes();
    digest_blocks(grid_executor(), strided_blocks({packed.data(), each, 2}, each), expected).value();
    const std::vector<std::int32_t> numbers{0, 1};
    std::vector<std::uint64_t> sums(2);
    digest_kv_blocks(grid_executor(), memory, numbers, sums).value();
    CHECK(sums == expected);
    bytes[layout.strides(1, 2).offset(2, 1, 15, 3) + 255] ^= std::byte{0x80};
    digest_kv_blocks(grid_executor(), memory, numbers, sums).value();
    CHECK(sums[0] == expected[0]);
    CHECK(sums[1] != expected[1]);
  }

  TEST_CASE("accesses are as wide as vectors and a table's promise allow") {
    alignas(16) std::byte base[32]{};
    std::byte* table[2]{};
    const auto width = [](const kv_memory& memory) { return detail::vector_alignment(memory); };
    kv_layout layout{.layers = 1, .heads = 2, .head_dim = 8};
    CHECK(width({base, 2, layout}) == 16);
    CHECK(width({base + 4, 2, layout}) == 4);
    CHECK(width({.blocks = 2, .layout = layout, .plane_table = table, .plane_alignment = 8}) == 8);
    layout.value_dim = 12;
    CHECK(width({base, 2, layout}) == 8);
  }

  TEST_CASE("what does not fit is refused, and no sum is written") {
    const kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8};
    std::vector<std::byte> bytes(layout.total_bytes(2));
    const kv_memory memory{bytes.data(), 2, layout};
    const std::vector<std::int32_t> numbers{0, 1};
    std::vector<std::uint64_t> sums(2, 7);
    const host_executor run;
    CHECK(told(digest_kv_blocks(run, memory, numbers, std::span(sums).first(1))) ==
          "digest_kv_blocks: sums: 2 entries needed, but 1 given; make it longer");
    CHECK(told(digest_kv_blocks(run, {nullptr, 2, layout}, numbers, sums)) ==
          "digest_kv_blocks: memory: 2048 entries needed, but 0 given; make it longer");
    const std::int32_t* const none = nullptr;
    CHECK(told(digest_kv_blocks(run, memory, std::span(none, 2), sums)) ==
          "digest_kv_blocks: blocks: 2 entries needed, but 0 given; make it longer");
    std::uint64_t* const no_sums = nullptr;
    CHECK(told(digest_kv_blocks(run, memory, numbers, std::span(no_sums, 2))) ==
          "digest_kv_blocks: sums: 2 entries needed, but 0 given; make it longer");
    kv_layout odd = layout;
    odd.value_dim = 6;
    CHECK(told(digest_kv_blocks(run, {bytes.data(), 2, odd}, numbers, sums)) ==
          "digest_kv_blocks: 12 bytes is not a multiple of the granularity, 8 bytes");
    const auto told_of = [&](std::uint32_t kv_layout::* field) {
      kv_layout without = layout;
      without.*field = 0;
      return told(digest_kv_blocks(run, {bytes.data(), 2, without}, numbers, sums));
    };
    const std::string needed = ": 1 entries needed, but 0 given; make it longer";
    CHECK(told_of(&kv_layout::layers) == "digest_kv_blocks: layout.layers" + needed);
    CHECK(told_of(&kv_layout::heads) == "digest_kv_blocks: layout.heads" + needed);
    CHECK(told_of(&kv_layout::block_tokens) == "digest_kv_blocks: layout.block_tokens" + needed);
    // Counts that would not fit: tiles of a plane, and of all planes.
    kv_layout large = layout;
    large.block_tokens = 1U << 26;
    CHECK(digest_kv_blocks(run, {bytes.data(), 2, large}, numbers, sums).error() ==
          failure{errc::past_the_bytes, 0, std::uint64_t{1} << 31, 0x7FFF'FFFF});
    large.block_tokens = 16;
    large.layers = 1U << 30;
    CHECK(digest_kv_blocks(run, {bytes.data(), 2, large}, numbers, sums).error().code ==
          errc::past_the_bytes);
    kv_layout indexed = layout;
    indexed.index_dim = 8;
    CHECK(told(digest_kv_blocks(run, {bytes.data(), 2, indexed}, numbers, sums)) ==
          "digest_kv_blocks: the kernel takes 2 planes, keys and values alone; the layout has 3, with scales "
          "or index keys (dequantize_kv_blocks makes floats of blocks with scales)");
    CHECK(told(digest_kv_blocks(run, {nullptr, 2, layout}, {}, sums)) == "");
    CHECK(sums == std::vector<std::uint64_t>(2, 7));
  }
}
