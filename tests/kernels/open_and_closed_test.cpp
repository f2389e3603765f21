/// Attention over closed blocks in codes and open blocks in bf16.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/near_attention.hpp>
#include <llmmem/kernels/open_and_closed.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/seeds.hpp"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::paging::scale_group;

struct alignas(16) sixteen_bytes {
  std::byte of[16];
};
std::byte* bytes_of_words(std::vector<sixteen_bytes>& of) {
  return reinterpret_cast<std::byte*>(of.data());
}

/// Sequences with some closed blocks and some open ones, and one cache with all of them as floats.
struct growing_batch {
  kv_layout values{};  // of the pool, in bf16
  kv_layout codes{};
  kv_layout floats{};
  std::uint32_t group = 2;
  std::vector<std::int32_t> tokens{};
  std::vector<std::int32_t> closed{};      // blocks
  std::vector<std::int32_t> table{};       // [sequences][columns], of the cache in codes
  std::vector<std::int32_t> open_table{};  // [sequences][2]
  std::int32_t columns = 6;
  std::vector<sixteen_bytes> pool{};
  std::vector<sixteen_bytes> cache{};
  std::vector<sixteen_bytes> all{};
  std::vector<std::int32_t> sequences{};
  std::vector<std::int32_t> lengths{};
  std::vector<float> queries{};

  static constexpr std::uint64_t blocks = 24;

  explicit growing_batch(std::mt19937_64& random, bool is_by_channel = true) {
    values = {.layers = 2,
              .heads = static_cast<std::uint32_t>(1 + random() % 2),
              .head_dim = 32,
              .block_tokens = static_cast<std::uint32_t>(random() % 2 == 0 ? 8 : 5)};
    codes = values;
    codes.element = random() % 2 == 0 ? dtype::int8 : dtype::int4;
    codes.order = block_order::block_first;
    codes.key_scales = {.group = is_by_channel ? scale_group::channel : scale_group::vector,
                        .element = dtype::bf16};
    codes.value_scales = {.group = scale_group::vector, .element = dtype::bf16};
    floats = values;
    floats.element = dtype::f32;
    pool.resize(values.total_bytes(blocks) / 16 + 1);
    cache.resize(codes.total_bytes(blocks) / 16 + 1);
    all.resize(floats.total_bytes(blocks) / 16 + 1);
    std::memset(pool.data(), 0xFF, pool.size() * 16);  // NaNs, where no token is
    std::memset(cache.data(), 0xFF, cache.size() * 16);
    std::memset(all.data(), 0xFF, all.size() * 16);
    fill(random);
    const std::uint64_t rows = 5;
    for (std::uint64_t row = 0; row < rows; ++row) {
      sequences.push_back(row == 3 ? -1 : static_cast<std::int32_t>(random() % tokens.size()));
      const std::int32_t most = tokens[static_cast<std::size_t>(std::max(sequences.back(), 0))];
      lengths.push_back(
          row % 2 == 0 ? most : static_cast<std::int32_t>(random() % (static_cast<std::uint64_t>(most) + 1)));
    }
    for (std::uint64_t i = 0; i < rows * query_heads() * 32; ++i)
      queries.push_back(static_cast<float>(random() % 401) / 100 - 2);
  }

  [[nodiscard]] std::uint32_t query_heads() const { return values.heads * group; }
  [[nodiscard]] kv_memory pool_view() { return {bytes_of_words(pool), blocks, values}; }
  [[nodiscard]] kv_memory cache_view() { return {bytes_of_words(cache), blocks, codes}; }
  [[nodiscard]] kv_memory all_view() { return {bytes_of_words(all), blocks, floats}; }
  [[nodiscard]] padded_table_view tables() const {
    return {.block_table = table.data(),
            .seq_lens = tokens.data(),
            .num_sequences = static_cast<std::int32_t>(tokens.size()),
            .max_blocks = columns,
            .block_tokens = static_cast<std::int32_t>(values.block_tokens)};
  }
  [[nodiscard]] padded_table_view open_tables() const {
    padded_table_view out = tables();
    out.block_table = open_table.data();
    out.max_blocks = 2;
    return out;
  }
  [[nodiscard]] attention_rows rows() const {
    return {.rows = 5, .sequences = sequences.data(), .lengths = lengths.data()};
  }
  [[nodiscard]] attention_options options() const {
    return {.query_heads = query_heads(), .element = dtype::f32};
  }
  struct came {
    std::vector<float> out;
    std::vector<float> log_sum_exp;
    std::uint32_t flag = 0;
    friend bool operator==(const came&, const came&) = default;
  };
  [[nodiscard]] came nothing() const {
    return {std::vector<float>(std::size_t{5} * query_heads() * 32, 77.0F),
            std::vector<float>(std::size_t{5} * query_heads(), 77.0F)};
  }
  template <class Run>
  came attend(const Run& run, attention_options how) {
    came made = nothing();
    how.log_sum_exp = made.log_sum_exp.data();
    how.out_of_range = &made.flag;
    std::vector<sixteen_bytes> workspace(open_and_closed_workspace_bytes(5, codes, how) / 16 + 1);
    attend_open_and_closed(run, open_and_closed_tables(tables(), open_tables(), closed.data()), rows(),
                           asked(), output(made.out), cache_view(), pool_view(), 1,
                           {bytes_of_words(workspace), workspace.size() * 16}, how)
        .value();
    return made;
  }
  /// Over all tokens as floats in one cache.
  came attend_floats(attention_options how) {
    came made = nothing();
    how.log_sum_exp = made.log_sum_exp.data();
    how.out_of_range = &made.flag;
    std::vector<sixteen_bytes> workspace(attention_workspace_bytes(5, floats, how) / 16 + 1);
    // As closed blocks, all of them: the same kernels need not be compiled for other tables.
    const std::vector<std::int32_t> all_closed(tokens.size(), columns);
    const auto whole = open_and_closed_tables(tables(), open_tables(), all_closed.data()).closed();
    paged_attention(host_executor{}, whole, rows(), asked(), output(made.out), all_view(), 1,
                    {bytes_of_words(workspace), workspace.size() * 16}, how)
        .value();
    return made;
  }
  [[nodiscard]] batch_vectors asked() const {
    return {std::as_bytes(std::span(queries)).data(), std::uint64_t{query_heads()} * 128, 128};
  }
  [[nodiscard]] batch_output output(std::vector<float>& of) const {
    return {std::as_writable_bytes(std::span(of)).data(), std::uint64_t{query_heads()} * 128, 128};
  }

 private:
  void fill(std::mt19937_64& random) {
    std::vector<std::int32_t> free(blocks);
    for (std::size_t i = 0; i < blocks; ++i)
      free[i] = static_cast<std::int32_t>(i);
    std::shuffle(free.begin(), free.end(), random);
    const auto take = [&] {
      const std::int32_t taken = free.back();
      free.pop_back();
      return taken;
    };
    std::int32_t next_open = 0;
    for (int s = 0; s < 4; ++s) {
      const auto size = static_cast<std::int32_t>(values.block_tokens);
      // None closed, or all of its tokens; a full block may be still open.
      const auto all_closed = static_cast<std::int32_t>(random() % 4);
      const auto open = static_cast<std::int32_t>(random() % (2 * values.block_tokens + 1U));
      closed.push_back(all_closed);
      tokens.push_back(all_closed * size + open);
      for (std::int32_t b = 0; b < columns; ++b)
        table.push_back(b * size < tokens.back() ? take() : -1);
      for (std::int32_t b = 0; b < 2; ++b)
        open_table.push_back(next_open++);
      for (std::int32_t t = 0; t < tokens.back(); ++t)
        put_token(random, s, t);
      close(s);
    }
  }
  void put_token(std::mt19937_64& random, int s, std::int32_t t) {
    const auto size = static_cast<std::int32_t>(values.block_tokens);
    const std::int32_t in_open = t / size - closed.back();
    // Closed blocks are written through the pool's last blocks.
    const std::uint64_t pool_block =
        in_open >= 0 ? static_cast<std::uint64_t>(open_table[static_cast<std::size_t>(2 * s + in_open)])
                     : blocks - 1 - static_cast<std::uint64_t>(t / size);
    const auto all_block =
        static_cast<std::uint64_t>(table[static_cast<std::size_t>(s * columns + t / size)]);
    const auto token = static_cast<std::uint64_t>(t % size);
    for (std::uint32_t p = 0; p < 2; ++p) {
      for (std::uint64_t h = 0; h < values.heads; ++h) {
        std::byte* const to =
            bytes_of_words(pool) + values.strides(p, blocks).offset(1, pool_block, token, h);
        std::byte* const there =
            bytes_of_words(all) + floats.strides(p, blocks).offset(1, all_block, token, h);
        for (std::uint64_t i = 0; i < 32; ++i) {
          store_element(dtype::bf16, to + 2 * i, static_cast<float>(random() % 401) / 200 - 1);
          store_element(dtype::f32, there + 4 * i, load_element(dtype::bf16, to + 2 * i));
        }
      }
    }
  }
  void close(int s) {
    std::vector<block_pair> pairs;
    std::vector<block_pair> back;
    for (std::int32_t b = 0; b < closed.back(); ++b) {
      const std::int64_t to = table[static_cast<std::size_t>(s * columns + b)];
      pairs.push_back({static_cast<std::int64_t>(blocks) - 1 - b, to});
      back.push_back({to, to});
    }
    quantize_kv_blocks(host_executor{}, cache_view(), pool_view(), pairs, {.layers = {1, 1}}).value();
    dequantize_kv_blocks(host_executor{}, all_view(), cache_view(), back, {.layers = {1, 1}}).value();
  }
};

void check_near(const growing_batch::came& one, const growing_batch::came& other) {
  double worst = 0;
  for (std::size_t i = 0; i < one.out.size(); ++i)
    worst = std::max(worst, std::fabs(static_cast<double>(one.out[i]) - static_cast<double>(other.out[i])));
  CHECK(worst <= 1e-6);  // values are up to 1
  for (std::size_t i = 0; i < one.log_sum_exp.size(); ++i) {
    CAPTURE(i);
    const float a = one.log_sum_exp[i];
    const float b = other.log_sum_exp[i];
    CHECK((a == b || std::fabs(a - b) < 1e-5F));
  }
}

}  // namespace

TEST_SUITE("open_and_closed") {
  TEST_CASE("attention over open and closed blocks is near that over all of them as floats") {
    for (const auto seed : seeds(60, 40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      growing_batch batch(random, seed % 3 != 0);
      attention_options how = batch.options();
      if (seed % 2 == 0) how.split = {8, 3};
      if (seed % 5 == 1) how.window = 1 + static_cast<std::uint32_t>(random() % 20);
      const growing_batch::came both = batch.attend(host_executor{}, how);
      check_near(both, batch.attend_floats(how));
      CHECK(both.flag == 0);
    }
  }

  TEST_CASE("holders of the open and of the closed blocks give the same bits as the one call") {
    for (const auto seed : seeds(12, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      growing_batch batch(random);
      const growing_batch::came both = batch.attend(host_executor{}, batch.options());
      growing_batch::came near = batch.nothing();
      const open_and_closed_tables tables(batch.tables(), batch.open_tables(), batch.closed.data());
      table_holder closed(host_executor{}, tables.closed(), batch.cache_view());
      table_holder open(host_executor{}, tables.opened(), batch.pool_view());
      near_query query;
      query.rows = 5;
      query.layer = 1;
      query.query_heads = batch.query_heads();
      query.head_dim = query.value_dim = 32;
      query.element = dtype::f32;
      query.sequences = batch.sequences.data();
      query.lengths = batch.lengths.data();
      std::vector<sixteen_bytes> queries(batch.queries.size() / 4);
      std::memcpy(queries.data(), batch.queries.data(), batch.queries.size() * 4);
      query.queries = bytes_of_words(queries);
      merged_attention<> to;
      to.out = batch.output(near.out);
      to.log_sum_exp = {near.log_sum_exp.data(), batch.query_heads() * sizeof(float)};
      to.sequences = batch.sequences.data();
      std::vector<sixteen_bytes> workspace(near_workspace_bytes(query.shape(), 2) / 16 + 1);
      attend_near(host_executor{}, query, {bytes_of_words(workspace), workspace.size() * 16}, to, closed,
                  open)
          .value();
      near.flag = both.flag;
      CHECK(near == both);
    }
  }

  TEST_CASE("an open block that is missing is flagged, and a pool of another shape is refused") {
    std::mt19937_64 random(4);
    growing_batch batch(random);
    batch.tokens[0] = 4 * static_cast<std::int32_t>(batch.values.block_tokens);
    batch.closed[0] = 1;  // three open ones, of which the table has two
    batch.sequences.assign(5, 0);
    batch.lengths.assign(5, batch.tokens[0]);
    CHECK(batch.attend(host_executor{}, batch.options()).flag == 1);

    kv_memory pool = batch.pool_view();
    std::vector<sixteen_bytes> workspace(
        open_and_closed_workspace_bytes(5, batch.codes, batch.options()) / 16 + 1);
    growing_batch::came made = batch.nothing();
    const auto told = [&](const kv_memory& open, std::size_t bytes, const std::int32_t* closed) {
      const auto done = attend_open_and_closed(
          host_executor{}, open_and_closed_tables(batch.tables(), batch.open_tables(), closed), batch.rows(),
          batch.asked(), batch.output(made.out), batch.cache_view(), open, 1,
          {bytes_of_words(workspace), bytes}, batch.options());
      return done ? std::string() : std::string(done.error().message());
    };
    const std::size_t enough = workspace.size() * 16;
    pool.layout.block_tokens = 9;
    CHECK(told(pool, enough, batch.closed.data()).starts_with("attend_open_and_closed: open.layout"));
    pool = batch.pool_view();
    pool.layout.heads = 7;
    CHECK(told(pool, enough, batch.closed.data()).starts_with("attend_open_and_closed: open.layout"));
    pool = batch.pool_view();
    pool.layout.head_dim = 64;
    CHECK(told(pool, enough, batch.closed.data()).starts_with("attend_open_and_closed: open.layout"));
    pool = batch.pool_view();
    CHECK(told(pool, 16, batch.closed.data()).starts_with("attend_open_and_closed: workspace (bytes)"));
    CHECK(told(pool, enough, nullptr).starts_with("tables.closed_blocks"));
    CHECK(told(pool, enough, batch.closed.data()).empty());
  }
}
