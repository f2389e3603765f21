/// @file
/// Paged caches with queries over them, of any shape, and what attention comes to by its definition.
#pragma once

#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"
#include "support/small_elements.hpp"

namespace llmmem_tests {

/// What a run needs, in the memory of whoever runs it.
struct attention_pointers {
  const std::byte* queries = nullptr;
  std::byte* out = nullptr;
  std::byte* cache = nullptr;
  std::byte* const* plane_table = nullptr;  // instead
  std::uint32_t plane_alignment = 16;
  std::byte* workspace = nullptr;
  const std::int32_t* indptr = nullptr;
  const std::int32_t* indices = nullptr;
  const std::int32_t* last_page_len = nullptr;
  const std::int32_t* padded = nullptr;
  const std::int32_t* seq_lens = nullptr;
  const std::int32_t* sequences = nullptr;
  const std::int32_t* lengths = nullptr;
  const std::int32_t* begins = nullptr;
  const std::int32_t* ends = nullptr;
  const float* scales[2] = {nullptr, nullptr};
  float* log_sum_exp = nullptr;
  std::uint32_t* flag = nullptr;
};

/// Which tables a run looks places up in.
enum class table_form { csr, padded };

struct attention_world {
  llmmem::kv_layout layout{};
  std::uint64_t blocks = 0;
  std::uint32_t layer = 0;
  std::uint32_t group = 1;
  llmmem::attention_options options{};
  std::vector<std::byte> cache{};
  std::vector<std::vector<std::int32_t>> tables{};
  std::vector<std::int32_t> tokens{};     // of each sequence
  std::vector<std::int32_t> sequences{};  // of each row; empty: rows are sequences
  std::vector<std::int32_t> lengths{};    // of each row; empty: all
  std::uint64_t rows = 0;
  std::uint32_t shared = 1;  // rows that have the tokens of the first of them
  std::vector<std::byte> queries{};
  std::uint64_t query_strides[2]{};  // token, head
  std::vector<std::byte> out{};
  std::uint64_t out_strides[2]{};
  std::vector<float> scales[2];
  // The tables as kernels read them.
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices{};
  std::vector<std::int32_t> last_page_len{};
  std::vector<std::int32_t> padded{};
  std::int32_t columns = 0;

  /// The tokens that a row attends to, first to end - 1 of a sequence, and what multiplies its products.
  struct attended {
    std::int32_t sequence = 0;
    std::int64_t first = 0;
    std::int64_t end = 0;
    double scale = 1;
  };
  [[nodiscard]] attended attended_by(std::uint64_t row) const {
    const std::int32_t sequence = sequences.empty() ? static_cast<std::int32_t>(row) : sequences[row];
    const std::int64_t end = lengths.empty() ? tokens[static_cast<std::size_t>(sequence)] : lengths[row];
    const std::int64_t window = options.window;
    return {.sequence = sequence,
            .first = window == 0 || window > end ? 0 : end - window,
            .end = end,
            .scale = options.scale != 0 ? static_cast<double>(options.scale)
                                        : 1 / std::sqrt(static_cast<double>(layout.vector_elements(0)))};
  }

  explicit attention_world(std::mt19937_64& random, llmmem::attention_arithmetic arithmetic = {}) {
    draw_shape(random);
    if (arithmetic == llmmem::attention_arithmetic::tensor_cores) draw_tensor_shape(random);
    draw_sequences(random);
    draw_rows(random);
    draw_elements(random);
    flatten();
  }

  [[nodiscard]] std::uint32_t query_heads() const { return layout.heads * group; }
  [[nodiscard]] std::uint64_t workspace_bytes() const {
    return llmmem::attention_workspace_bytes(rows, layout, options);
  }

  template <class Run>
  llmmem::result<void> attend(const Run& run, const attention_pointers& at, table_form form) const {
    return with_tables(at, form, [&](const auto& by) {
      return paged_attention(run, by, rows_of(at), {at.queries, query_strides[0], query_strides[1]},
                             {at.out, out_strides[0], out_strides[1]}, memory_of(at), layer,
                             {at.workspace, static_cast<std::size_t>(workspace_bytes())}, options_of(at));
    });
  }

  /// The same to the tokens of lists: rows are as many.
  template <class Run, class Lists>
  llmmem::result<void> attend_to(const Run& run, const attention_pointers& at, table_form form,
                                 const Lists& lists) const {
    return with_tables(at, form, [&](const auto& by) {
      return paged_attention(run, lists.lists_over(by), {.rows = rows},
                             {at.queries, query_strides[0], query_strides[1]},
                             {at.out, out_strides[0], out_strides[1]}, memory_of(at), layer,
                             {at.workspace, static_cast<std::size_t>(workspace_bytes())}, options_of(at));
    });
  }

  /// The same as a part of the rows' tokens.
  template <class Run>
  llmmem::result<void> attend_part(const Run& run, const attention_pointers& at, table_form form,
                                   const llmmem::attention_part_output& part) const {
    return with_tables(at, form, [&](const auto& by) {
      return paged_attention_part(
          run, by, rows_of(at), {at.queries, query_strides[0], query_strides[1]}, part, memory_of(at), layer,
          {at.workspace, static_cast<std::size_t>(workspace_bytes())}, options_of(at));
    });
  }

  /// Where a vector of a position begins in `cache`.
  [[nodiscard]] std::size_t place(std::uint32_t plane, std::int32_t sequence, std::int64_t position,
                                  std::uint32_t head) const {
    const auto each = static_cast<std::int64_t>(layout.block_tokens);
    const auto block = static_cast<std::uint64_t>(
        tables[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(position / each)]);
    return layout.strides(plane, blocks)
        .offset(layer, block, static_cast<std::uint64_t>(position % each), head);
  }

  /// A table of its planes, in a memory that begins there.
  [[nodiscard]] std::vector<std::byte*> planes_in(std::byte* memory) const {
    std::vector<std::byte*> table;
    for (std::uint32_t p = 0; p < layout.planes(); ++p)
      for (std::uint32_t l = 0; l < layout.layers; ++l)
        table.push_back(memory + layout.strides(p, blocks).offset(l, 0, 0, 0));
    return table;
  }

  /// Each output of a row and query head as its definition says, in doubles; then the logarithm of the sum of
  /// exponentials.
  [[nodiscard]] std::vector<double> expected(std::uint64_t row, std::uint32_t query) const {
    const std::uint32_t head = query / group;
    const auto [sequence, first, end, scale] = attended_by(row);
    const auto vector = [&](std::uint32_t plane, std::int64_t position, std::uint64_t e) {
      const std::byte* const at = cache.data() + place(plane, sequence, position, head);
      const double value = load_element(layout.element, at + e * element_bytes(layout.element));
      const bool is_scaled = !scales[plane].empty() && layout.element != options.element;
      return is_scaled ? value * scales[plane][options.scales.is_by_head ? head : 0] : value;
    };
    const std::byte* const asked = queries.data() + row * query_strides[0] + query * query_strides[1];
    std::vector<double> products;
    double most = -std::numeric_limits<double>::infinity();
    for (std::int64_t position = first; position < end; ++position) {
      double product = 0;
      for (std::uint64_t e = 0; e < layout.vector_elements(0); ++e)
        product +=
            static_cast<double>(load_element(options.element, asked + e * element_bytes(options.element))) *
            vector(0, position, e);
      products.push_back(product * scale);
      most = std::max(most, products.back());
    }
    std::vector<double> sums(layout.vector_elements(1) + 1);
    double total = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
      const double weight = std::exp(products[i] - most);
      total += weight;
      for (std::uint64_t e = 0; e < layout.vector_elements(1); ++e)
        sums[e] += weight * vector(1, first + static_cast<std::int64_t>(i), e);
    }
    for (std::uint64_t e = 0; e < layout.vector_elements(1) && total != 0; ++e)
      sums[e] /= total;
    sums.back() = total == 0 ? -std::numeric_limits<double>::infinity() : most + std::log(total);
    return sums;
  }

  /// The tables as kernels read them, of `tables`.
  void flatten() {
    indptr = {0};
    indices.clear();
    last_page_len.clear();
    columns = 0;
    const auto each = static_cast<std::int32_t>(layout.block_tokens);
    for (std::size_t i = 0; i < tables.size(); ++i) {
      indices.insert(indices.end(), tables[i].begin(), tables[i].end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last_page_len.push_back(tokens[i] == 0 ? 0 : (tokens[i] - 1) % each + 1);
      columns = std::max(columns, static_cast<std::int32_t>(tables[i].size()));
    }
    padded.assign(tables.size() * static_cast<std::size_t>(columns), 0);
    for (std::size_t i = 0; i < tables.size(); ++i)
      std::copy(tables[i].begin(), tables[i].end(),
                padded.begin() + static_cast<std::ptrdiff_t>(i * static_cast<std::size_t>(columns)));
  }

  /// Names a block that does not exist, in a table that has any.
  void name_no_block(std::mt19937_64& random) {
    for (auto& table : tables) {
      if (table.empty()) continue;
      table[random() % table.size()] =
          random() % 2 == 0 ? -1 : static_cast<std::int32_t>(blocks + random() % 9);
      break;
    }
    flatten();
  }

  /// Makes `count` rows of each, with queries of their own.
  void share_rows(std::mt19937_64& random, std::uint32_t count) {
    const auto repeat = [&](std::vector<std::int32_t>& of) {
      std::vector<std::int32_t> all;
      for (const std::int32_t each : of)
        all.insert(all.end(), count, each);
      of = all;
    };
    if (sequences.empty()) {
      for (std::uint64_t row = 0; row < rows; ++row)
        sequences.push_back(static_cast<std::int32_t>(row));
    }
    repeat(sequences);
    repeat(lengths);
    rows *= count;
    queries.resize(query_strides[0] * rows);
    for (std::size_t i = 0; i + element_bytes(options.element) <= queries.size();
         i += element_bytes(options.element))
      store_element(options.element, queries.data() + i,
                    static_cast<float>(static_cast<std::int64_t>(random() % 401) - 200) / 100);
    out.assign(out_strides[0] * rows, poison);
  }

 private:
  [[nodiscard]] llmmem::attention_rows rows_of(const attention_pointers& at) const {
    return {.rows = rows,
            .sequences = at.sequences,
            .lengths = at.lengths,
            .begins = at.begins,
            .ends = at.ends,
            .shared = shared};
  }
  [[nodiscard]] llmmem::kv_memory memory_of(const attention_pointers& at) const {
    return {at.cache, blocks, layout, at.plane_table, at.plane_alignment};
  }
  [[nodiscard]] llmmem::attention_options options_of(const attention_pointers& at) const {
    llmmem::attention_options how = options;
    if (!scales[0].empty()) {
      how.scales.keys = at.scales[0];
      how.scales.values = at.scales[1];
    }
    how.log_sum_exp = at.log_sum_exp;
    how.out_of_range = at.flag;
    return how;
  }
  template <class Attend>
  llmmem::result<void> with_tables(const attention_pointers& at, table_form form,
                                   const Attend& attend_by) const {
    using namespace llmmem;
    const auto sequence_count = static_cast<std::int32_t>(tables.size());
    const auto block_tokens = static_cast<std::int32_t>(layout.block_tokens);
    if (form == table_form::csr) {
      return attend_by(csr_table_view{.indptr = at.indptr,
                                      .indices = at.indices,
                                      .last_page_len = at.last_page_len,
                                      .num_sequences = sequence_count,
                                      .block_tokens = block_tokens});
    }
    return attend_by(padded_table_view{.block_table = at.padded,
                                       .seq_lens = at.seq_lens,
                                       .num_sequences = sequence_count,
                                       .max_blocks = columns,
                                       .block_tokens = block_tokens});
  }

  static std::uint32_t one_of(std::mt19937_64& random, std::initializer_list<std::uint32_t> of) {
    return of.begin()[random() % of.size()];
  }

  void draw_shape(std::mt19937_64& random) {
    using namespace llmmem;
    layout = {
        .layers = 1 + one_of(random, {0, 1}),
        .heads = one_of(random, {1, 2, 3}),
        .head_dim = one_of(random, {64, 128, 128, 80, 8, 256}),
        .value_dim = one_of(random, {0, 0, 0, 64, 40, 136}),
        .block_tokens = one_of(random, {16, 16, 8, 32, 5, 1, 12}),
        .element = static_cast<dtype>(one_of(
            random, {static_cast<std::uint32_t>(dtype::bf16), static_cast<std::uint32_t>(dtype::f16),
                     static_cast<std::uint32_t>(dtype::f32), static_cast<std::uint32_t>(dtype::fp8_e4m3)})),
        .heads_in_block =
            random() % 2 == 0 ? llmmem::paging::head_order::nhd : llmmem::paging::head_order::hnd,
        .order = static_cast<block_order>(random() % block_order_count)};
    layer = static_cast<std::uint32_t>(random() % layout.layers);
    group = one_of(random, {1, 1, 2, 3, 4, 5, 8});
    options.query_heads = query_heads();
    const dtype half = random() % 2 == 0 ? dtype::bf16 : dtype::f16;
    options.element = layout.element == dtype::fp8_e4m3 ? half : layout.element;
    if (random() % 3 == 0) options.element = dtype::f32;
    if (random() % 3 == 0) options.scale = 0.25F;
    if (random() % 3 == 0) options.window = one_of(random, {1, 7, 8, 9, 50});
    if (random() % 2 == 0) options.split = {8 * one_of(random, {1, 2, 4}), one_of(random, {2, 3, 8})};
    if (random() % 2 == 0) {
      options.scales.is_by_head = random() % 2 == 0;
      for (auto& each : scales) {
        for (std::uint32_t h = 0; h < layout.heads; ++h)
          each.push_back(static_cast<float>(1 + random() % 8) / 8);
      }
    }
  }

  void draw_tensor_shape(std::mt19937_64& random) {
    using namespace llmmem;
    options.arithmetic = attention_arithmetic::tensor_cores;
    layout.head_dim = one_of(random, {64, 128});
    layout.value_dim = 0;
    if (layout.element == dtype::f32) {
      layout.element = random() % 2 == 0 ? dtype::bf16 : dtype::f16;
      options.element = layout.element;
    }
    group = one_of(random, {1, 2, 4, 5, 7, 8, 8, 9, 16, 19});
    options.query_heads = query_heads();
  }

  void draw_sequences(std::mt19937_64& random) {
    std::vector<std::int32_t> free;
    const std::uint64_t count = random() % 5;
    std::uint64_t needed = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random() % 4 == 0 ? random() % 3 : random() % 120));
      needed += (static_cast<std::uint64_t>(tokens.back()) + layout.block_tokens - 1) / layout.block_tokens;
    }
    blocks = needed + 1 + random() % 4;
    for (std::uint64_t i = 0; i < blocks; ++i)
      free.push_back(static_cast<std::int32_t>(i));
    std::shuffle(free.begin(), free.end(), random);
    for (const std::int32_t each : tokens) {
      const std::uint64_t length =
          (static_cast<std::uint64_t>(each) + layout.block_tokens - 1) / layout.block_tokens;
      tables.emplace_back(free.end() - static_cast<std::ptrdiff_t>(length), free.end());
      free.resize(free.size() - length);
    }
  }

  void draw_rows(std::mt19937_64& random) {
    rows = tables.size();
    if (random() % 2 == 0 || tables.empty()) return;
    rows = 1 + random() % 6;
    for (std::uint64_t i = 0; i < rows; ++i)
      sequences.push_back(random() % 6 == 0 ? -1 : static_cast<std::int32_t>(random() % tables.size()));
    if (random() % 2 == 0) return;
    for (const std::int32_t sequence : sequences)
      lengths.push_back(
          sequence < 0
              ? 3
              : static_cast<std::int32_t>(
                    random() % (static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(sequence)]) + 1)));
  }

  void draw_elements(std::mt19937_64& random) {
    const auto fill = [&](std::vector<std::byte>& bytes, llmmem::dtype element) {
      for (std::size_t i = 0; i + element_bytes(element) <= bytes.size(); i += element_bytes(element))
        store_element(element, bytes.data() + i,
                      static_cast<float>(static_cast<std::int64_t>(random() % 401) - 200) / 100);
    };
    cache.resize(layout.total_bytes(blocks));
    fill(cache, layout.element);
    const auto lay = [&](std::vector<std::byte>& bytes, std::uint64_t(&strides)[2], std::uint64_t elements) {
      const std::uint64_t unit = 8 * element_bytes(options.element);
      strides[1] = elements * element_bytes(options.element) + unit * (random() % 2);
      strides[0] = strides[1] * query_heads() + unit * (random() % 3);
      bytes.assign(strides[0] * rows, poison);
    };
    lay(queries, query_strides, layout.vector_elements(0));
    fill(queries, options.element);
    lay(out, out_strides, layout.vector_elements(1));
  }
};

/// The same sequences in other blocks of another size and layout; where there is no token there are NaNs.
inline attention_world rearranged(const attention_world& world, std::mt19937_64& random) {
  attention_world other = world;
  other.layout.block_tokens = static_cast<std::uint32_t>(1 + random() % 40);
  other.layout.order = static_cast<llmmem::block_order>(random() % llmmem::block_order_count);
  other.layout.heads_in_block =
      random() % 2 == 0 ? llmmem::paging::head_order::nhd : llmmem::paging::head_order::hnd;
  other.tables.clear();
  std::uint64_t needed = 0;
  const auto length = [&](std::int32_t tokens) {
    return (static_cast<std::uint64_t>(tokens) + other.layout.block_tokens - 1) / other.layout.block_tokens;
  };
  for (const std::int32_t tokens : other.tokens)
    needed += length(tokens);
  other.blocks = needed + 1 + random() % 3;
  std::vector<std::int32_t> free(other.blocks);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  for (const std::int32_t tokens : other.tokens) {
    other.tables.emplace_back(free.end() - static_cast<std::ptrdiff_t>(length(tokens)), free.end());
    free.resize(free.size() - length(tokens));
  }
  other.cache.assign(other.layout.total_bytes(other.blocks), std::byte{0xFF});  // NaNs, where no token is
  for (std::size_t s = 0; s < other.tables.size(); ++s) {
    const auto sequence = static_cast<std::int32_t>(s);
    for (std::int32_t t = 0; t < other.tokens[s]; ++t)
      for (std::uint32_t p = 0; p < 2; ++p)
        for (std::uint32_t h = 0; h < other.layout.heads; ++h)
          std::copy_n(world.cache.data() + world.place(p, sequence, t, h), other.layout.vector_bytes(p),
                      other.cache.data() + other.place(p, sequence, t, h));
  }
  other.flatten();
  return other;
}

}  // namespace llmmem_tests
