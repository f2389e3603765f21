/// @file
/// A paged cache whose full blocks are quantised: keys by channel over a block's tokens, values by token.
/// Open blocks are in bf16, in a pool with one block for each sequence.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/open_and_closed.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "paged_decode/attention_shares.hpp"
#include "paged_decode/decoder.hpp"
#include "paged_decode/paged_cache.hpp"
#include "paged_decode/stored_form.hpp"

namespace paged_decode {

/// A block closes when its last token is there, and is never written again: forks share it, and a truncation
/// into it reopens it as the sequence's own open block (`quantize_kv_blocks` has the rule). A token attends
/// to closed blocks in their codes and to its own block in bf16, for any number of tokens in a step, because
/// a step goes block by block.
class closing_cache {
 public:
  using sequence = llmmem::sequence_id;

  /// @param how  its `form` is one of `closing_forms`. It has one open block for each possible sequence.
  closing_cache(const model_config& config, const paged_config& how)
      : config_(config),
        how_(how),
        allocator_({.blocks = how.blocks,
                    .block_tokens = how.block_tokens,
                    .max_sequences = static_cast<std::uint32_t>(how.blocks),
                    .max_sequence_tokens = how.most_tokens,
                    .name = "closing_cache"}),
        closed_(closed_layout(config, how), allocator_.physical_blocks()),
        open_(open_layout(config, how), how.blocks) {
    for (std::uint64_t i = how.blocks; i-- > 0;)
      free_.push_back(static_cast<std::int64_t>(i));
  }

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> /*prompt*/) {
    const sequence made = allocator_.create().value();
    open_of_[made.slot] = take_open();
    return made;
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return allocator_.tokens(of); }

  void grow(std::span<const grown<sequence>> batch) {
    std::vector<llmmem::paging::growth> growths;
    grown_.clear();
    for (const auto& each : batch) {
      growths.push_back({each.sequence, each.tokens});
      grown_.push_back({each.sequence, tokens(each.sequence), each.tokens.size(), {}});
    }
    std::vector<llmmem::append_result> added(batch.size());
    // The copies on write in `added` need no work here: open blocks are written in the pool, and only full
    // ones are stored here.
    allocator_.append_batch(growths, added).value();
    for (growing& each : grown_) {
      const sequence one[] = {each.of};
      const llmmem::table_extent extent = llmmem::measure_tables(allocator_, one).value();
      std::vector<std::int32_t> indptr(2), last(1);
      each.blocks.resize(extent.indices);
      static_cast<void>(llmmem::write_csr(allocator_, one, {indptr, each.blocks, last}).value());
    }
  }

  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    rows_of_floats out(in.queries.rows(), config_.query_elements());
    bool is_any_left = true;
    for (std::uint64_t round = 0; is_any_left; ++round) {
      is_any_left = false;
      step now = step_of(round, is_any_left);
      if (now.rows == 0) break;
      append(layer, in, now);
      attend_rows(layer, in, now, out);
      llmmem::quantize_kv_blocks(llmmem::host_executor{}, closed_.view(), open_.view(), now.full,
                                 {.layers = {layer, 1}})
          .value();
    }
    return out;
  }

  void commit(sequence /*of*/) {}
  [[nodiscard]] sequence fork(sequence parent) {
    const sequence made = allocator_.fork(parent).value();
    open_of_[made.slot] = take_open();
    const llmmem::block_pair pair[] = {{open_of_.at(parent.slot), open_of_.at(made.slot)}};
    llmmem::copy_few_kv_blocks(llmmem::host_executor{}, open_.view(), open_.view(),
                               std::span<const llmmem::block_pair>(pair))
        .value();
    return made;
  }
  void truncate(sequence of, std::uint64_t to) {
    const std::uint64_t before = tokens(of);
    const std::uint64_t block = to / how_.block_tokens;
    const bool is_into_closed = to % how_.block_tokens != 0 && before / how_.block_tokens > block;
    if (is_into_closed) {
      const sequence one[] = {of};
      const llmmem::table_extent extent = llmmem::measure_tables(allocator_, one).value();
      std::vector<std::int32_t> indptr(2), last(1), blocks(extent.indices);
      static_cast<void>(llmmem::write_csr(allocator_, one, {indptr, blocks, last}).value());
      const llmmem::block_pair pair[] = {{blocks[block], open_of_.at(of.slot)}};
      llmmem::dequantize_kv_blocks(llmmem::host_executor{}, open_.view(), closed_.view(),
                                   std::span<const llmmem::block_pair>(pair))
          .value();
    }
    allocator_.truncate(of, to).value();
  }
  void release(sequence of) {
    free_.push_back(open_of_.at(of.slot));
    open_of_.erase(of.slot);
    allocator_.release(of).value();
  }

  /// Bytes of closed blocks, including scales.
  [[nodiscard]] std::uint64_t bytes_per_token() const noexcept {
    return closed_.layout.block_bytes() / how_.block_tokens;
  }

 private:
  /// Blocks in memory, whose bytes begin as NaNs.
  struct blocks_of {
    blocks_of(const llmmem::kv_layout& of, std::uint64_t count) : layout(of.checked()), blocks(count) {
      bytes.assign(layout.total_bytes(count) / sizeof(std::uint64_t) + 1, ~std::uint64_t{0});
    }
    [[nodiscard]] llmmem::kv_memory view() noexcept {
      return {reinterpret_cast<std::byte*>(bytes.data()), blocks, layout};
    }
    llmmem::kv_layout layout;
    std::uint64_t blocks;
    std::vector<std::uint64_t> bytes{};
  };
  /// A sequence in a step: its tokens before, its new tokens, and its blocks afterwards.
  struct growing {
    sequence of{};
    std::uint64_t before = 0;
    std::size_t added = 0;
    std::vector<std::int32_t> blocks{};
  };
  /// The rows of a step in the `round`-th block that their sequence writes.
  struct step {
    std::size_t rows = 0;
    std::vector<std::int64_t> slots{};      // of all rows; -1: belongs to another round
    std::vector<std::int32_t> sequences{};  // of all rows, the same
    std::vector<std::int32_t> lengths{};    // of all rows
    std::vector<std::int32_t> indptr{0};    // tables of all sequences
    std::vector<std::int32_t> indices{};
    std::vector<std::int32_t> last{};
    std::vector<std::int32_t> open{};        // the open block of each sequence
    std::vector<std::int32_t> closed{};      // how many of its first blocks are closed
    std::vector<llmmem::block_pair> full{};  // to close
  };

  [[nodiscard]] static llmmem::kv_layout open_layout(const model_config& config, const paged_config& how) {
    return {.layers = config.layers,
            .heads = config.kv_heads,
            .head_dim = config.head_dim,
            .block_tokens = how.block_tokens,
            .element = llmmem::dtype::bf16,
            .heads_in_block = how.heads_in_block,
            .order = how.order};
  }
  [[nodiscard]] static llmmem::kv_layout closed_layout(const model_config& config, const paged_config& how) {
    llmmem::kv_layout out = open_layout(config, how);
    out.element = element_of_form(how.form);
    out.key_scales = {.group = llmmem::paging::scale_group::channel, .element = llmmem::dtype::bf16};
    out.value_scales = {.group = llmmem::paging::scale_group::vector, .element = llmmem::dtype::bf16};
    return out;
  }

  [[nodiscard]] std::int64_t take_open() {
    if (free_.empty()) throw llmmem::error("closing_cache: every open block is a sequence's");
    const std::int64_t taken = free_.back();
    free_.pop_back();
    return taken;
  }

  [[nodiscard]] step step_of(std::uint64_t round, bool& is_any_left) const {
    const std::uint64_t size = how_.block_tokens;
    step out;
    for (std::size_t i = 0; i < grown_.size(); ++i) {
      const growing& each = grown_[i];
      const std::uint64_t block = each.before / size + round;
      const std::uint64_t end = each.before + each.added;
      bool is_in_round = false;
      for (std::uint64_t at = each.before; at < end; ++at) {
        const bool is_here = at / size == block;
        is_any_left = is_any_left || at / size > block;
        is_in_round = is_in_round || is_here;
        out.rows += is_here ? 1 : 0;
        const std::int64_t open = open_of_.at(each.of.slot);
        out.slots.push_back(
            is_here ? open * static_cast<std::int64_t>(size) + static_cast<std::int64_t>(at % size) : -1);
        out.sequences.push_back(is_here ? static_cast<std::int32_t>(i) : -1);
        out.lengths.push_back(static_cast<std::int32_t>(at + 1));
      }
      const std::uint64_t here = std::min(end, (block + 1) * size);
      out.open.push_back(static_cast<std::int32_t>(open_of_.at(each.of.slot)));
      out.closed.push_back(static_cast<std::int32_t>(block));
      out.indices.insert(out.indices.end(), each.blocks.begin(), each.blocks.end());
      out.indptr.push_back(static_cast<std::int32_t>(out.indices.size()));
      out.last.push_back(static_cast<std::int32_t>((end - 1) % size + 1));
      if (is_in_round && here % size == 0)
        out.full.push_back({open_of_.at(each.of.slot), each.blocks[block]});
    }
    return out;
  }

  void append(std::uint32_t layer, const projected& in, const step& now) {
    const llmmem::slot_front front(now.slots, how_.block_tokens, open_.blocks);
    llmmem::append_kv(llmmem::host_executor{}, front, side_by_side(in.keys.all().data(), open_.layout),
                      side_by_side(in.values.all().data(), open_.layout), open_.view(), layer,
                      {.element = llmmem::dtype::f32})
        .value();
  }

  /// To closed blocks in their codes, and to open ones.
  void attend_rows(std::uint32_t layer, const projected& in, const step& now, rows_of_floats& out) {
    const llmmem::csr_table_view tables{now.indptr.data(), now.indices.data(), now.last.data(),
                                        static_cast<std::int32_t>(grown_.size()),
                                        static_cast<std::int32_t>(how_.block_tokens)};
    const llmmem::padded_table_view open{.block_table = now.open.data(),
                                         .num_sequences = tables.num_sequences,
                                         .max_blocks = 1,
                                         .block_tokens = tables.block_tokens};
    const llmmem::attention_options options = attention_of(config_, layer, how_.most_tokens);
    const std::size_t rows = in.queries.rows();
    const std::uint64_t bytes = llmmem::open_and_closed_workspace_bytes(rows, closed_.layout, options);
    workspace_.resize(bytes / sizeof(chunk) + 1);
    const std::uint64_t vector = config_.head_dim * sizeof(float);
    const std::uint64_t row = config_.query_elements() * sizeof(float);
    llmmem::attend_open_and_closed(
        llmmem::host_executor{}, llmmem::open_and_closed_tables(tables, open, now.closed.data()),
        {rows, now.sequences.data(), now.lengths.data()},
        {std::as_bytes(in.queries.all()).data(), row, vector},
        {std::as_writable_bytes(out.all()).data(), row, vector}, closed_.view(), open_.view(), layer,
        std::as_writable_bytes(std::span(workspace_)), options)
        .value();
  }

  /// Floats of a workspace, aligned as kernels require.
  struct alignas(16) chunk {
    float of[4];
  };

  model_config config_;
  paged_config how_;
  decode_allocator allocator_;
  blocks_of closed_;
  blocks_of open_;
  std::vector<std::int64_t> free_{};                 // open blocks
  std::map<std::uint32_t, std::int64_t> open_of_{};  // by the slot of a living sequence
  std::vector<growing> grown_{};                     // of this step
  std::vector<chunk> workspace_{};
};
static_assert(kv_cache<closing_cache>);

}  // namespace paged_decode
