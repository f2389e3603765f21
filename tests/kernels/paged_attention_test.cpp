#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// One sequence, one head, one layer of floats, and a query of zeros.
struct one_head {
  kv_layout layout;
  std::uint64_t blocks;
  std::vector<float> cache;
  std::vector<std::int32_t> table;
  std::int32_t length;
  std::int32_t sequence = 0;
  std::vector<float> query;
  std::uint32_t flag = 0;

  one_head(const kv_layout& of, std::int32_t tokens)
      : layout(of),
        blocks((static_cast<std::uint64_t>(tokens) - 1) / of.block_tokens + 1),
        cache(of.total_bytes(blocks) / sizeof(float)),
        table(blocks),
        length(tokens),
        query(of.head_dim) {
    std::iota(table.begin(), table.end(), 0);
  }
  float* vector(std::uint32_t plane, std::uint64_t token) {
    const plane_strides strides = layout.strides(plane, blocks);
    return cache.data() +
           strides.offset(0, token / layout.block_tokens, token % layout.block_tokens, 0) / sizeof(float);
  }
  float* key(std::uint64_t token) { return vector(0, token); }
  float* value(std::uint64_t token) { return vector(1, token); }

  struct came {
    std::vector<float> out;
    float log_sum_exp;
  };
  came attend(attention_options options) {
    flag = 0;
    came made{std::vector<float>(layout.head_dim, unknown_tokens), unknown_tokens};
    options.query_heads = 1;
    options.element = dtype::f32;
    options.log_sum_exp = &made.log_sum_exp;
    options.out_of_range = &flag;
    std::vector<std::byte> workspace(attention_workspace_bytes(1, layout, options));
    const padded_table_view tables{.block_table = table.data(),
                                   .seq_lens = &length,
                                   .num_sequences = 1,
                                   .max_blocks = static_cast<std::int32_t>(table.size()),
                                   .block_tokens = static_cast<std::int32_t>(layout.block_tokens)};
    const std::uint64_t stride = layout.head_dim * sizeof(float);
    paged_attention(grid_executor(), tables, {.rows = 1, .sequences = &sequence},
                    {reinterpret_cast<const std::byte*>(query.data()), stride, stride},
                    {reinterpret_cast<std::byte*>(made.out.data()), stride, stride},
                    {reinterpret_cast<std::byte*>(cache.data()), blocks, layout}, 0, workspace, options)
        .value();
    return made;
  }
};

/// Two blocks for each sequence, in the wrong order, of which it has nine tokens.
struct reversed_blocks {
  std::int32_t num_sequences = 0;
  std::int32_t block_tokens = 8;
  bool* strange = nullptr;

  [[nodiscard]] std::int64_t tokens(std::int32_t sequence) const noexcept {
    *strange = *strange || sequence < 0 || sequence >= num_sequences;
    return 9;
  }
};
std::uint64_t blocks_in(const reversed_blocks& /*of*/, std::int32_t /*sequence*/) noexcept {
  return 2;
}
std::int32_t block_in(const reversed_blocks& of, std::int32_t sequence, std::uint64_t i) noexcept {
  *of.strange = *of.strange || sequence < 0 || sequence >= of.num_sequences;
  return i < 2 ? static_cast<std::int32_t>(1 - i) : -1;
}

}  // namespace

TEST_SUITE("paged_attention") {
  TEST_CASE("each output follows the definition of attention for any shape, and nothing else is written") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(300, 100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      seen += check(world, attend(world, host_executor{}));
    }
    CHECK(seen > 50'000);
  }

  TEST_CASE("a grid of any size and tables of either form give the same bits as the host") {
    for (const auto seed : seeds(100, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      const attended host = attend(world, host_executor{});
      const grid_executor grid({.blocks = static_cast<std::uint32_t>(random() % 4)});
      CHECK(attend(world, grid) == host);
      CHECK(attend(world, grid, table_form::padded) == host);
    }
  }

  TEST_CASE("the places, layout and length of blocks change no bit") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      const attention_world other = rearranged(world, random);
      CHECK(attend(other, host_executor{}) == attend(world, host_executor{}));
    }
  }

  TEST_CASE("a cache in several allocations gives the same bits as one in a single allocation") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world(random);
      const scattered_planes planes(world.layout, world.blocks, world.cache);
      CHECK(attend(world, host_executor{}, table_form::padded, &planes) == attend(world, host_executor{}));
      CHECK(attend(world, grid_executor{}, table_form::csr, &planes) == attend(world, host_executor{}));
    }
  }

  TEST_CASE("rows that share their tokens get the bits of separate rows") {
    for (const auto seed : seeds(40, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      attention_world world(random,
                            seed % 4 == 0 ? attention_arithmetic::tensor_cores : attention_arithmetic{});
      const auto shared = static_cast<std::uint32_t>(2 + random() % 6);
      world.share_rows(random, shared);
      const attended alone = attend(world, host_executor{});
      world.shared = shared;
      CHECK(attend(world, host_executor{}) == alone);
      CHECK(attend(world, grid_executor({.blocks = 2}), table_form::padded) == alone);
    }
  }

  TEST_CASE("turns without tokens of a row change none of its bits, not even a zero's sign") {
    one_head world({.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32}, 16);
    world.query.assign(8, 1.0F);
    for (std::uint64_t token = 0; token < 16; ++token) {
      // The first eight sum up to what the weights of the others bring down to -0, and these add -0.
      std::fill_n(world.key(token), 8, token < 8 ? 0.0F : 1.0F);
      std::fill_n(world.value(token), 8, token < 8 ? -std::numeric_limits<float>::denorm_min() : -0.0F);
    }
    for (const float each : world.attend({.scale = 1}).out)
      CHECK(std::bit_cast<std::uint32_t>(each) == 0x8000'0000U);
  }

  TEST_CASE("keys whose exponentials exceed all floats, and products of any magnitude, keep their weights") {
    // Products from -20,000 to 20,000: without the largest subtracted nothing of it is a number.
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .element = dtype::f32};
    one_head world(layout, 40);
    for (std::uint64_t t = 0; t < 40; ++t) {
      world.key(t)[0] = static_cast<float>(t) * 1000 - 20'000;
      world.value(t)[3] = static_cast<float>(t);
    }
    world.query[0] = 1;
    for (const std::uint32_t count : {1U, 3U}) {
      const auto [out, log_sum_exp] = world.attend({.scale = 1, .split = {16, count}});
      CHECK(out[3] == 39);
      CHECK(log_sum_exp == 19'000);
      CHECK(out[2] == 0);
    }
  }

  TEST_CASE("a NaN key makes only its own rows NaN") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .element = dtype::f32};
    one_head world(layout, 40);
    world.key(20)[1] = std::numeric_limits<float>::quiet_NaN();
    world.query[1] = 1;
    const auto is_number = [&](const attention_options& options) {
      return !std::isnan(world.attend(options).out[0]);
    };
    CHECK(!is_number({}));
    CHECK(!is_number({.split = {8, 5}}));
    CHECK(!is_number({.window = 20}));
    CHECK(is_number({.window = 19}));  // tokens 21 to 39
    CHECK(is_number({.window = 19, .split = {8, 5}}));
    // Whoever merges by the logarithm sees it too, and not the sum of what is left, or of nothing.
    CHECK(std::isnan(world.attend({}).log_sum_exp));
    CHECK(std::isnan(world.attend({.split = {8, 5}}).log_sum_exp));
    CHECK(!std::isnan(world.attend({.window = 19}).log_sum_exp));
    world.query[1] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(world.attend({}).log_sum_exp));
    CHECK(std::isnan(world.attend({.split = {8, 5}}).log_sum_exp));
  }

  TEST_CASE("tokens without a place in the table are left out and flagged, and the others stay") {
    for (const std::uint32_t block_tokens : {8U, 4U}) {  // tiles inside of blocks, and across
      CAPTURE(block_tokens);
      const kv_layout layout{
          .layers = 1, .heads = 1, .head_dim = 8, .block_tokens = block_tokens, .element = dtype::f32};
      one_head world(layout, 24);
      for (std::uint64_t t = 0; t < 24; ++t)
        world.value(t)[0] = static_cast<float>(t);
      CHECK(world.attend({}).out[0] == doctest::Approx(11.5));
      CHECK(world.flag == 0);
      for (const std::int32_t none : {-1, static_cast<std::int32_t>(24 / block_tokens), 1 << 30}) {
        one_head other = world;
        other.table[1] = none;
        const float left =
            (276.0F - (block_tokens == 8 ? 92.0F : 22.0F)) / (block_tokens == 8 ? 16.0F : 20.0F);
        CHECK(other.attend({}).out[0] == doctest::Approx(left));
        CHECK(other.flag == 1);
        CHECK(other.attend({.split = {8, 3}}).out[0] == doctest::Approx(left));
      }
      one_head longer = world;
      longer.length = 30;  // more than its table has blocks for
      CHECK(longer.attend({}).out[0] == doctest::Approx(11.5));
      CHECK(longer.flag == 1);
      one_head negative = world;
      negative.length = -3;
      CHECK(negative.attend({}).out[0] == 0);
      CHECK(negative.flag == 1);
      one_head stranger = world;
      stranger.sequence = 1;
      CHECK(stranger.attend({}).out[0] == unknown_tokens);
      CHECK(stranger.flag == 1);
    }
  }

  TEST_CASE("a row without tokens in the cache gives zeros, and a logarithm of -infinity") {
    one_head world({.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32}, 5);
    std::ranges::fill(world.query, 1.0F);
    std::ranges::fill(world.cache, 1.0F);
    world.table[0] = 99;
    const auto made = world.attend({});
    CHECK(made.out == std::vector<float>(8, 0.0F));
    CHECK(made.log_sum_exp == -std::numeric_limits<float>::infinity());
    CHECK(world.flag == 1);
  }

  TEST_CASE("tables may be an engine's own, and are read only for existing sequences") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    one_head world(layout, 16);
    for (std::uint64_t t = 0; t < 16; ++t)
      world.value(t)[0] = static_cast<float>(t);
    bool was_strange = false;
    const reversed_blocks tables{.num_sequences = 2, .strange = &was_strange};
    const std::int32_t sequences[] = {-1, 1, 2, 0, -7};
    const std::vector<float> query(5 * 8);
    std::vector<float> out(5 * 8, unknown_tokens);
    std::uint32_t flag = 0;
    paged_attention(host_executor{}, tables, {.rows = 5, .sequences = sequences},
                    {reinterpret_cast<const std::byte*>(query.data()), 32, 32},
                    {reinterpret_cast<std::byte*>(out.data()), 32, 32},
                    {reinterpret_cast<std::byte*>(world.cache.data()), 2, layout}, 0, {},
                    {.query_heads = 1, .element = dtype::f32, .out_of_range = &flag})
        .value();
    CHECK(!was_strange);
    CHECK(flag == 1);
    const std::vector<float> came{out[0], out[8], out[16], out[24], out[32]};
    // Sequence 1 has blocks 1 and 0, of which it has nine tokens: 8 to 15 and 0.
    CHECK(came == std::vector<float>{unknown_tokens, 92.0F / 9, unknown_tokens, 92.0F / 9, unknown_tokens});
  }

  TEST_CASE("a row longer than its planned shares is attended to completely") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    one_head world(layout, 100);
    for (std::uint64_t t = 0; t < 100; ++t)
      world.value(t)[0] = static_cast<float>(t);
    CHECK(world.attend({.split = {8, 2}}).out[0] == doctest::Approx(49.5));
    CHECK(world.attend({.split = {1 << 20, 7}}).out[0] == world.attend({}).out[0]);  // one share has all
  }

  TEST_CASE("a cache larger than 32 bits can count is read at its end") {
    // 6 GiB of addresses, of which two blocks are ever touched.
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 64, .block_tokens = 16};
    const std::uint64_t blocks = (std::uint64_t{6} << 30U) / layout.block_bytes();
    const auto size = static_cast<std::size_t>(layout.total_bytes(blocks));
    void* const at =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at != MAP_FAILED);
    auto* const bytes = static_cast<std::byte*>(at);
    const auto last = static_cast<std::int32_t>(blocks - 1);
    const plane_strides values = layout.strides(1, blocks);
    store_element(dtype::bf16, bytes + values.offset(0, blocks - 1, 2, 0), 3);
    const std::int32_t indptr[] = {0, 1};
    const std::int32_t last_page_len[] = {3};
    const csr_table_view tables{indptr, &last, last_page_len, 1, 16};
    alignas(16) const std::byte query[128]{};
    alignas(16) std::byte out[128]{};
    paged_attention(host_executor{}, tables, {.rows = 1}, {query, 128, 128}, {out, 128, 128},
                    {bytes, blocks, layout}, 0, {}, {.query_heads = 1})
        .value();
    CHECK(load_element(dtype::bf16, out) == 1);
    ::munmap(at, size);
  }

  TEST_CASE("what does not fit is refused before anything runs") {
    alignas(16) std::byte bytes[4096]{};
    const std::int32_t indptr[] = {0, 1};
    const std::int32_t block = 0;
    const std::int32_t last_page_len[] = {3};
    const csr_table_view tables{indptr, &block, last_page_len, 1, 4};
    const kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8, .block_tokens = 4};
    struct call {
      attention_rows rows{.rows = 1};
      batch_vectors queries;
      batch_output out;
      kv_memory cache;
      std::uint32_t layer = 1;
      std::span<std::byte> workspace;
      attention_options options{};
    };
    const call well{.queries = {bytes, 128, 16},
                    .out = {bytes + 1024, 128, 16},
                    .cache = {bytes + 2048, 1, layout},
                    .workspace = {bytes + 3072, 1024},
                    .options = {.query_heads = 4, .split = {8, 2}}};
    const auto told = [&](auto&& change) {
      call of = well;
      change(of);
      const auto done = paged_attention(host_executor{}, tables, of.rows, of.queries, of.out, of.cache,
                                        of.layer, of.workspace, of.options);
      return done ? failure{} : done.error();
    };
    CHECK(told([](call&) {}) == failure{});
    CHECK(told([](call& of) { of.options.element = dtype::fp8_e4m3; }) ==
          failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::fp8_e4m3),
                  static_cast<std::uint64_t>(dtype::bf16)});
    CHECK(told([](call& of) { of.cache.layout.element = dtype::int8; }).code == errc::no_conversion);
    for (const dtype batch : {dtype::f32, dtype::bf16, dtype::f16, dtype::int8}) {
      for (const dtype cache : {dtype::f32, dtype::bf16, dtype::f16, dtype::fp8_e4m3}) {
        CAPTURE(name_of(batch));
        CAPTURE(name_of(cache));
        call of = well;
        of.rows.rows = 0;
        of.options.element = batch;
        of.cache.layout.element = cache;
        const auto done = paged_attention(host_executor{}, tables, of.rows, of.queries, of.out, of.cache,
                                          of.layer, of.workspace, of.options);
        const bool goes =
            batch != dtype::int8 && (batch == cache || batch == dtype::f32 || cache == dtype::fp8_e4m3);
        CHECK(done.has_value() == goes);
        if (!goes) CHECK(done.code() == errc::no_conversion);
      }
    }
    CHECK(told([](call& of) { of.cache.layout.head_dim = 0; }) == failure{errc::out_of_range, 0, 0, 256});
    const auto told_of_tables = [&](const auto& other, const std::int32_t* lengths) {
      const auto done = paged_attention(host_executor{}, other, {.rows = 1, .lengths = lengths}, well.queries,
                                        well.out, well.cache, well.layer, well.workspace, well.options);
      return done ? std::string() : done.error().message();
    };
    const std::string needed = ": 1 entries needed, but 0 given; make it longer";
    const std::int32_t one = 1;
    CHECK(told_of_tables(csr_table_view{nullptr, &block, last_page_len, 1, 4}, nullptr) ==
          "tables.indptr" + needed);
    CHECK(told_of_tables(csr_table_view{indptr, &block, nullptr, 1, 4}, nullptr) ==
          "tables.last_page_len" + needed);
    CHECK(told_of_tables(csr_table_view{indptr, &block, nullptr, 1, 4}, &one).empty());
    CHECK(told_of_tables(padded_table_view{nullptr, &one, 1, 1, 4}, nullptr) ==
          "tables.block_table" + needed);
    CHECK(told_of_tables(padded_table_view{&block, nullptr, 1, 1, 4}, nullptr) == "tables.seq_lens" + needed);
    CHECK(told_of_tables(padded_table_view{&block, &one, 1, 1, 0}, nullptr) ==
          "paged_attention: blocks hold 0 tokens there and 4 here; build both with the same block_tokens");
    call blockless = well;
    blockless.cache.layout.block_tokens = 0;
    CHECK(paged_attention(host_executor{}, padded_table_view{&block, &one, 1, 1, 0}, blockless.rows,
                          blockless.queries, blockless.out, blockless.cache, 1, blockless.workspace,
                          blockless.options)
              .code() == errc::block_tokens_differ);
    CHECK(told([](call& of) { of.options.query_heads = 0; }) == failure{errc::size_mismatch, 0, 0, 2});
    CHECK(told([](call& of) { of.layer = 2; }) == failure{errc::out_of_range, 0, 2, 1});
    CHECK(told([](call& of) { of.cache.layout.has_values = false; }) ==
          failure{errc::size_mismatch, 0, 2, 1});
    CHECK(told([](call& of) { of.cache.layout.head_dim = 264; }) == failure{errc::out_of_range, 0, 264, 256});
    CHECK(told([](call& of) { of.cache.layout.head_dim = 12; }) == failure{errc::bad_granularity, 0, 24, 16});
    CHECK(told([](call& of) { of.cache.layout.value_dim = 20; }) ==
          failure{errc::bad_granularity, 0, 40, 16});
    CHECK(told([](call& of) { of.options.query_heads = 3; }) == failure{errc::size_mismatch, 0, 3, 2});
    CHECK(told([](call& of) { of.cache.data += 8; }).code == errc::bad_granularity);
    CHECK(told([](call& of) { of.queries.data += 8; }).code == errc::bad_granularity);
    CHECK(told([](call& of) { of.queries.head_stride = 24; }) == failure{errc::bad_granularity, 0, 24, 16});
    CHECK(told([](call& of) { of.out.token_stride = 72; }) == failure{errc::bad_granularity, 0, 72, 16});
    CHECK(
        told([](call& of) { of.rows = {.rows = 3, .shared = 2}; }).message() ==
        "paged_attention: rows.shared does not divide the rows: two lengths must be equal, but are 3 and 2");
    CHECK(told([](call& of) { of.rows.shared = 0; }) == failure{errc::size_mismatch, 0, 1, 0});
    CHECK(told([](call& of) { of.rows = {.rows = 1U << 30, .shared = 1U << 30}; }).code ==
          errc::out_of_range);
    CHECK(told([](call& of) { of.options.split.count = 0; }) == failure{errc::too_short, 0, 1, 0});
    CHECK(told([](call& of) { of.options.split.tokens = 0; }) == failure{errc::size_mismatch, 0, 0, 8});
    CHECK(told([](call& of) { of.options.split.tokens = 12; }) == failure{errc::size_mismatch, 0, 12, 8});
    // 4 heads, 2 shares, 8 sums and 2 numbers beside.
    CHECK(told([](call& of) { of.workspace = of.workspace.first(319); }) ==
          failure{errc::too_short, 0, 320, 319});
    CHECK(told([](call& of) { of.workspace = of.workspace.first(320); }) == failure{});
    CHECK(told([](call& of) { of.workspace = of.workspace.subspan(8); }).code == errc::bad_granularity);
    CHECK(told([](call& of) { of.cache.layout.block_tokens = 8; }) ==
          failure{errc::block_tokens_differ, 0, 4, 8});
    CHECK(told([](call& of) { of.queries.data = nullptr; }) == failure{errc::too_short, 0, 64, 0});
    CHECK(told([](call& of) { of.out.data = nullptr; }) == failure{errc::too_short, 0, 64, 0});
    CHECK(told([](call& of) { of.queries.head_stride = 0; }) == failure{errc::too_short, 0, 16, 0});
    CHECK(told([](call& of) {
            of.options.element = dtype::f32;
            of.queries.head_stride = 16;
          }) == failure{errc::too_short, 0, 32, 16});
    CHECK(told([](call& of) { of.out.head_stride = 0; }) == failure{errc::too_short, 0, 16, 0});
    CHECK(told([](call& of) { of.cache.layout.heads = 0; }) == failure{errc::size_mismatch, 0, 4, 0});
    CHECK(told([](call& of) { of.cache.data = nullptr; }) ==
          failure{errc::too_short, 0, layout.block_bytes(), 0});
    std::byte* planes[] = {bytes + 2048, bytes + 2176, bytes + 2304, bytes + 2432};
    const auto told_of_planes = [&](std::uint32_t alignment) {
      return told([&](call& of) {
        of.cache.data = nullptr;
        of.cache.plane_table = planes;
        of.cache.plane_alignment = alignment;
      });
    };
    CHECK(told_of_planes(16) == failure{});
    CHECK(told_of_planes(128) == failure{});
    CHECK(told_of_planes(8) == failure{errc::bad_granularity, 0, 8, 16});
    CHECK(told_of_planes(48) == failure{errc::bad_alignment, 0, 48, 0});
    CHECK(told_of_planes(0) == failure{errc::bad_alignment, 0, 0, 0});
    CHECK(told([](call& of) {
            of.rows.rows = 0;
            of.cache.data = nullptr;
          }) == failure{});
    CHECK(told([](call& of) { of.cache.layout.part.cp_size = 2; }).message() ==
          "paged_attention: cache.layout: the kernel needs all tokens of a sequence; the layout holds the "
          "part of one of 2 context-parallel ranks (part.cp_size): have each rank make a part "
          "(paged_attention_part), "
          "and merge them");
    CHECK(told([](call& of) { of.cache.layout.value_element = dtype::fp8_e4m3; }).message() ==
          "paged_attention: cache.layout: the kernel takes values of the keys' type, but the layout has "
          "another value_element");
    CHECK(
        told([](call& of) {
          of.cache.layout.value_scales.group = llmmem::paging::scale_group::vector;
        }).message() ==
        "paged_attention: cache.layout: the kernel takes keys and values both in codes (int8, int4, fp8_e4m3 "
        "or fp4_e2m1), each with one scale of f32 or bf16, or of fp8_e4m3 for fp4_e2m1, for a vector, run or "
        "channel (scale_group 1 to 3), and for int8 and int4 by vector or run a zero point (numbers = 2); "
        "plane 0 of the layout has other elements or scales (scale_group 0)");
    CHECK(
        told([](call& of) { of.options.query_heads = 3; }).message() ==
        "paged_attention: query_heads is not a multiple of the cache's heads: two lengths must be equal, but "
        "are 3 and 2");
  }

  TEST_CASE("for a length past its table, attention covers the table's tokens and sets the flag") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    one_head world(layout, 16);
    for (std::uint64_t t = 0; t < 16; ++t)
      world.value(t)[0] = static_cast<float>(t);
    for (const attention_split split : {attention_split{}, attention_split{8, 2}, attention_split{8, 5}}) {
      world.length = 16;
      CHECK(world.attend({.split = split}).out[0] == doctest::Approx(7.5));
      CHECK(world.flag == 0);
      world.length = std::numeric_limits<std::int32_t>::max();  // token by token: a minute, or for ever
      CHECK(world.attend({.split = split}).out[0] == doctest::Approx(7.5));
      CHECK(world.flag == 1);
    }
    world.table.clear();
    CHECK(world.attend({}).out[0] == 0);
    CHECK(world.flag == 1);
  }

  TEST_CASE("the numbers of a damaged indptr are computed in 64 bits") {
    constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    const std::int32_t indptr[] = {least, most};
    const std::int32_t last_page_len[] = {1};
    const csr_table_view tables{indptr, nullptr, last_page_len, 1, 16};
    CHECK(tables.tokens(0) == ((std::int64_t{1} << 32) - 2) * 16 + 1);
  }

  TEST_CASE("shares are planned to keep a device busy, and cover all tokens") {
    const kv_layout layout{.layers = 1, .heads = 8, .head_dim = 128};
    CHECK(plan_attention(1, 32, layout, 32) == attention_split{});   // nothing to gain
    CHECK(plan_attention(1, 32, {}, 100'000) == attention_split{});  // nothing to attend to
    // A row has no more than 31 bits count, whatever is asked for.
    for (const std::uint64_t tokens : {std::uint64_t{1} << 32, std::uint64_t{1} << 36, ~std::uint64_t{0}}) {
      const attention_split split = plan_attention(300, 32, layout, tokens);
      CHECK(split == plan_attention(300, 32, layout, 0x7FFF'FFF0));
      CHECK((split.count == 1 || split.tokens % 8 == 0));
    }
    const attention_options many{.query_heads = 1U << 30, .split = {8, 1U << 31}};
    CHECK(attention_workspace_bytes(1, layout, many) == ~std::uint64_t{0});
    CHECK(plan_attention(4096, 32, layout, 100'000) == attention_split{});  // busy as it is
    const attention_split one = plan_attention(1, 32, layout, 100'000);
    CHECK(one.count > 100);
    // As many rows or heads as nobody has are no number to divide by that is none.
    CHECK(plan_attention(std::uint64_t{1} << 61, 64, layout, 1024) == attention_split{});
    CHECK(plan_attention(1, ~0U, {.layers = 1, .heads = 1, .head_dim = 128}, 1024, {},
                         attention_arithmetic::tensor_cores) == attention_split{});
    // Where half of the device would have nothing to do, shares may be shorter.
    CHECK(plan_attention(1, 32, layout, 1024) == attention_split{32, 32});
    CHECK(plan_attention(1, 32, layout, 8192).tokens < 128);
    CHECK(plan_attention(64, 32, layout, 1024) == attention_split{128, 8});
    for (const std::uint64_t rows : {1U, 3U, 17U, 128U}) {
      for (const std::uint64_t tokens : {1U, 128U, 129U, 1000U, 65'536U, 1'000'001U}) {
        const attention_split split = plan_attention(rows, 32, layout, tokens, {.multiprocessors = 78});
        CHECK(split.count >= 1);
        if (split.count == 1) continue;
        CHECK(split.tokens % 8 == 0);
        CHECK(split.tokens >= 32);
        CHECK(std::uint64_t{split.tokens} * split.count >= tokens);
        CHECK(std::uint64_t{split.tokens} * (split.count - 1) < tokens);  // none is empty
      }
    }
  }

  TEST_CASE("powers and logarithms are close to those of doubles, for all floats") {
    double worst = 0;
    for (std::uint32_t bits = 0x8000'0000U; bits <= std::bit_cast<std::uint32_t>(-126.0F); bits += 997) {
      const auto x = std::bit_cast<float>(bits);
      const double exact = std::exp2(static_cast<double>(x));
      int exponent = 0;
      static_cast<void>(std::frexp(exact, &exponent));
      worst = std::max(worst, std::abs(detail::power_of_two(x) - exact) / std::ldexp(1, exponent - 24));
    }
    CHECK(worst < 1);
    CHECK(detail::power_of_two(0) == 1);
    CHECK(detail::power_of_two(-126) == 0x1p-126F);
    CHECK(detail::power_of_two(-126.001F) == 0);
    CHECK(detail::power_of_two(detail::lowest()) == 0);
    CHECK(std::isnan(detail::power_of_two(std::numeric_limits<float>::quiet_NaN())));
    worst = 0;
    for (std::uint32_t bits = 0x0080'0000U; bits < 0x7F80'0000U; bits += 9973) {
      const auto x = std::bit_cast<float>(bits);
      const double exact = std::log(static_cast<double>(x));
      worst = std::max(worst, std::abs(detail::logarithm_of(x) - exact) / std::max(1.0, std::abs(exact)));
    }
    CHECK(worst < 2e-7);
    CHECK(detail::logarithm_of(1) == 0);
  }
}
