#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_metadata.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/kernels/xor_blocks.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"
#include "support/threaded_grid.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::threaded_grid;

/// `run(executor, into)` by the host, and by a grid whose blocks run beside each other: the same bytes.
template <class Run>
void check_both(std::vector<std::byte> into, const Run& run) {
  std::vector<std::byte> expected = into;
  run(host_executor{}, expected).value();
  run(threaded_grid(), into).value();
  CHECK(into == expected);
}

template <class Word>
std::span<Word> words_of(std::vector<std::byte>& bytes, std::size_t count) {
  return {reinterpret_cast<Word*>(bytes.data()), count};
}

}  // namespace

TEST_SUITE("grid_threads") {
  TEST_CASE("concurrent blocks of attention write each output and each share once") {
    const kv_layout layout{.layers = 1, .heads = 2, .head_dim = 64};
    constexpr std::int32_t tokens = 150;
    std::vector<std::byte> cache(layout.total_bytes(10));
    std::vector<std::byte> queries = bytes_of_seed(2 * 8 * 128, 3);
    for (std::byte& each : queries)
      each &= std::byte{0x3F};  // no large number, and none that is no number
    for (std::size_t i = 0; i < cache.size(); ++i)
      cache[i] = queries[i % queries.size()];
    std::vector<std::int32_t> blocks(20);
    std::iota(blocks.begin(), blocks.begin() + 10, 0);
    std::iota(blocks.begin() + 10, blocks.end(), 0);
    const std::int32_t lengths[] = {tokens, tokens - 60};
    std::uint32_t flag = 0;
    const attention_options options{.query_heads = 8, .split = {32, 4}, .out_of_range = &flag};
    const std::size_t needed = attention_workspace_bytes(2, layout, options);
    // The outputs, and behind them the workspace.
    check_both(std::vector<std::byte>(2 * 8 * 128 + needed), [&](const auto& run,
                                                                 std::vector<std::byte>& into) {
      return paged_attention(run, padded_table_view{blocks.data(), lengths, 2, 10, 16}, {.rows = 2},
                             {queries.data(), 8 * 128, 128}, {into.data(), 8 * 128, 128},
                             {cache.data(), 10, layout}, 0, std::span(into).subspan(2 * 8 * 128), options);
    });
    CHECK(flag == 0);
  }

  TEST_CASE("concurrent blocks that append, gather and copy write each byte once") {
    for (const auto seed : llmmem_tests::seeds(4)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const kv_layout layout{.layers = 2,
                             .heads = 3,
                             .head_dim = 40,
                             .element = seed % 2 == 0 ? dtype::bf16 : dtype::fp8_e4m3,
                             .heads_in_block = seed % 3 == 0 ? llmmem::paging::head_order::hnd
                                                             : llmmem::paging::head_order::nhd};
      constexpr std::uint64_t blocks = 40;
      const std::uint64_t capacity = blocks * layout.block_tokens;
      std::vector<std::int64_t> slots(capacity);
      std::iota(slots.begin(), slots.end(), 0);
      std::ranges::shuffle(slots, random);
      slots.resize(500);
      slots[7] = -1;
      slots[9] = static_cast<std::int64_t>(capacity) + 3;
      const slot_front front(slots, layout.block_tokens, blocks);
      const auto batch = bytes_of_seed(slots.size() * 240, random());
      std::uint32_t flag = 0;
      const token_options options{.element = dtype::bf16, .out_of_range = &flag};
      const auto cache = bytes_of_seed(layout.total_bytes(blocks), random());
      check_both(cache, [&](const auto& run, std::vector<std::byte>& into) {
        const batch_vectors vectors{batch.data(), 240, 80};
        return append_kv(run, front, vectors, vectors, {into.data(), blocks, layout}, 1, options);
      });
      CHECK(flag == 1);
      std::vector<std::byte> source = cache;
      check_both(std::vector<std::byte>(2 * batch.size()),
                 [&](const auto& run, std::vector<std::byte>& into) {
                   const batch_output keys{into.data(), 240, 80};
                   const batch_output values{into.data() + batch.size(), 240, 80};
                   return gather_kv(run, front, keys, values, {source.data(), blocks, layout}, 0, options);
                 });
      const std::vector<block_pair> pairs{{0, 30}, {1, 31}, {2, 29}, {-1, 5}, {3, 39}, {900, 1}};
      check_both(cache, [&](const auto& run, std::vector<std::byte>& into) {
        const kv_memory memory{into.data(), blocks, layout};
        return copy_kv_blocks(run, memory, memory, pairs, {.out_of_range = &flag});
      });
    }
  }

  TEST_CASE("concurrent blocks that quantise, split and fill write each byte once") {
    const auto values = bytes_of_seed(256 * 4 * 128 * 2, 1);
    const group_shape shape{.rows = 256, .groups = 4, .elements = 128};
    for (const auto& [code, bytes] : {std::pair{dtype::int8, 512ULL}, {dtype::int4, 256ULL}}) {
      const std::uint64_t stride = bytes + 16;  // the scales behind each row
      check_both(std::vector<std::byte>(256 * stride), [&](const auto& run, std::vector<std::byte>& into) {
        return quantize_groups(run, shape, {values.data(), dtype::bf16, 1024}, {into.data(), code, stride},
                               {into.data() + bytes, stride});
      });
    }
    check_both(std::vector<std::byte>(values.size()), [&](const auto& run, std::vector<std::byte>& into) {
      return split_planes(run, values.data(), values.size() / 2,
                          {into.data(), into.data() + values.size() / 2});
    });
    // Planes whose first and last packets are of different elements.
    check_both(std::vector<std::byte>(values.size()), [&](const auto& run, std::vector<std::byte>& into) {
      const std::uint64_t count = values.size() / 2 - 9;
      return split_planes(run, values.data(), count, {into.data() + 2, into.data() + count + 8});
    });
    check_both(std::vector<std::byte>(100'003), [&](const auto& run, std::vector<std::byte>& into) {
      return fill_memory(run, into, seeded_pattern{.seed = 3});
    });
    std::vector<std::byte> filled(100'003);
    fill_memory(host_executor{}, filled, poison_pattern{}).value();
    for (std::size_t i = 77; i < filled.size(); i += 1000)
      filled[i] = std::byte{1};
    mismatch_report report;
    verify_memory(threaded_grid(), filled, poison_pattern{}, &report).value();
    CHECK(report.count == 100);
    CHECK(report.first == 77);
  }

  TEST_CASE("concurrent blocks that join bits, sums and checksums lose none") {
    const auto before = bytes_of_seed(300'000, 1);
    std::vector<std::byte> now = before;
    for (std::size_t i = 11; i < now.size(); i += 20'000)
      now[i] ^= std::byte{1};
    const std::size_t words = dirty_words(now.size());
    check_both(std::vector<std::byte>(now.size() + 4 * words),
               [&](const auto& run, std::vector<std::byte>& into) {
                 const std::span bits(reinterpret_cast<std::uint32_t*>(into.data() + now.size()), words);
                 return xor_delta(run, before.data(), now.data(), into.data(), now.size(), bits);
               });
    const std::array<const std::byte*, 3> shards{now.data(), before.data(), now.data() + 16};
    check_both(std::vector<std::byte>(200'000), [&](const auto& run, std::vector<std::byte>& into) {
      return xor_parity(run, shards, into.data(), into.size());
    });
    const strided_blocks blocks({now.data(), 100'000, 3}, 99'000);
    check_both(std::vector<std::byte>(3 * 4), [&](const auto& run, std::vector<std::byte>& into) {
      return crc32c_blocks(run, blocks, words_of<std::uint32_t>(into, 3));
    });
    check_both(std::vector<std::byte>(3 * 8), [&](const auto& run, std::vector<std::byte>& into) {
      return digest_blocks(run, blocks, words_of<std::uint64_t>(into, 3));
    });
    std::vector<std::byte> copied(now.size());
    const strided_blocks moved({now.data(), 100'000, 3}, 99'000, {copied.data(), 100'000, 3});
    check_both(std::vector<std::byte>(3 * 8), [&](const auto& run, std::vector<std::byte>& into) {
      return copy_and_digest(run, moved, words_of<std::uint64_t>(into, 3));
    });
  }

  TEST_CASE("concurrent blocks that make a batch's tables write each entry once") {
    const std::vector<std::int32_t> indptr{0, 700, 700, 1900, 3000};
    const batch_tokens batch{indptr.data(), nullptr, 4};
    check_both(std::vector<std::byte>(2 * 4 * 3100), [&](const auto& run, std::vector<std::byte>& into) {
      const auto all = words_of<std::int32_t>(into, 2 * 3100);
      return token_positions(run, batch, all.first(3100), all.subspan(3100));
    });
  }
}
