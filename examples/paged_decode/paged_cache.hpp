/// @file
/// A paged cache on a host or a device: a `paged_allocator`, the memory of its blocks, and the kernels that
/// copy, append and attend through its tables.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/offload/tier_link.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "paged_decode/attention_shares.hpp"
#include "paged_decode/decoder.hpp"
#include "paged_decode/kv_stores.hpp"
#include "paged_decode/row_ranges.hpp"
#include "paged_decode/stored_form.hpp"

namespace paged_decode {

struct paged_config {
  kv_form form = kv_form::bf16;
  std::uint64_t blocks = 0;
  std::uint32_t block_tokens = 16;
  std::uint64_t most_tokens = 0;  ///< most tokens of a sequence
  llmmem::paging::head_order heads_in_block = llmmem::paging::head_order::nhd;
  llmmem::block_order order = llmmem::block_order::layer_first;
  std::uint64_t permutation = 0;  ///< if not 0, it determines the order in which free blocks are handed out
  std::uint32_t threads = 1;      ///< that attend, each to some of a step's rows; 1 on a device
  /// Of a model with latents: their record, in the place of `form`.
  std::optional<llmmem::paging::latent_record> record{};
  std::string_view record_name{};
};

[[nodiscard]] constexpr std::string_view name_of(const paged_config& how) noexcept {
  return how.record ? how.record_name : name_of(how.form);
}

struct paged_counts {
  std::uint64_t block_capacity = 0;   ///< most blocks in use at once
  std::uint64_t most_unshared = 0;    ///< blocks that these sequences would have taken without sharing
  std::uint64_t prompt_tokens = 0;    ///< tokens that sequences began with
  std::uint64_t shared_tokens = 0;    ///< prompt tokens found in the cache
  std::uint64_t copies_on_write = 0;  ///< blocks
  std::uint64_t rolled_back = 0;      ///< tokens
};

/// A cache that can have tiers below it, at the cost of one branch per evicted block while it has none.
struct decode_traits : llmmem::paged_traits {
  using observer = llmmem::offload::tier_link;
};
using decode_allocator = llmmem::paged_allocator<decode_traits>;

/// @tparam Place  `host_place`, or `device_place`. It outlives the cache.
template <class Place>
class paged_cache {
 public:
  using sequence = llmmem::sequence_id;

  /// @throws llmmem::length_error, llmmem::out_of_memory
  paged_cache(const model_config& config, const paged_config& how, Place& place)
      : config_(config),
        how_(how),
        place_(&place),
        allocator_({.blocks = how.blocks,
                    .block_tokens = how.block_tokens,
                    .max_sequences = static_cast<std::uint32_t>(std::max<std::uint64_t>(how.blocks, 256)),
                    .max_sequence_tokens = how.most_tokens,
                    .name = "paged_decode"}),
        store_(store_of(place)) {
    if (how.permutation != 0) shuffle_free_blocks();
  }

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> prompt) {
    const sequence made = allocator_.create().value();
    // The last token is always computed, because its logits are needed.
    counts_.shared_tokens += allocator_.match(made, prompt.first(prompt.size() - 1)).value().tokens;
    counts_.prompt_tokens += prompt.size();
    return made;
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return allocator_.tokens(of); }

  void grow(std::span<const grown<sequence>> batch) {
    std::vector<llmmem::paging::growth> growths;
    for (const auto& each : batch)
      growths.push_back({each.sequence, each.tokens});
    std::vector<llmmem::append_result> added(batch.size());
    allocator_.append_batch(growths, added).value();
    copy_before_writing(added);
    put_tables(batch, added);
    const llmmem::paged_stats now = allocator_.stats();
    counts_.block_capacity = std::max(counts_.block_capacity, now.active_blocks);
    counts_.most_unshared = std::max(counts_.most_unshared, now.table_blocks);
  }

  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    const float* const keys = place_->template put<float>(keys_, in.keys.all());
    const float* const values = place_->template put<float>(values_, in.values.all());
    const float* const queries = place_->template put<float>(queries_, in.queries.all());
    store_.append(step_, keys, values, layer);
    const attended_cache cache = store_.attended(step_, layer);
    llmmem::attention_options options = attention_of(config_, layer, how_.most_tokens);
    options.scales = cache.scales;
    if (how_.record) options.latents = &*how_.record;
    const std::size_t rows = in.queries.rows();
    // Each thread's part begins at a multiple of 16, also with an odd number of heads.
    const std::uint64_t of_row =
        (llmmem::attention_workspace_bytes(1, cache.memory.layout, options) + 15) / 16 * 16;
    const std::span<std::byte> workspace(place_->make_room(workspace_, rows * of_row), rows * of_row);
    const std::uint64_t vector = config_.cached_key_dim() * sizeof(float);
    const std::uint64_t row = config_.query_elements() * sizeof(float);
    const std::uint64_t out_vector = config_.cached_value_dim() * sizeof(float);
    const std::uint64_t out_row = config_.attended_elements() * sizeof(float);
    rows_of_floats out(rows, config_.attended_elements());
    std::byte* const attended = place_->make_room(out_, rows * out_row);
    // No row needs another one, so threads take ranges of them.
    run_ranges(row_cuts_, [&](std::size_t first, std::size_t end) {
      llmmem::paged_attention(place_->run(), cache.tables,
                              {end - first, sequences_of_rows_ + first, lengths_of_rows_ + first},
                              {reinterpret_cast<const std::byte*>(queries) + first * row, row, vector},
                              {attended + first * out_row, out_row, out_vector}, cache.memory, cache.layer,
                              workspace.subspan(first * of_row, (end - first) * of_row), options)
          .value();
    });
    place_->template get<float>(out.all(), out_);
    return out;
  }

  void commit(sequence of) { allocator_.commit(of).value(); }
  [[nodiscard]] sequence fork(sequence parent) { return allocator_.fork(parent).value(); }
  void truncate(sequence of, std::uint64_t tokens) {
    counts_.rolled_back += allocator_.tokens(of) - tokens;
    allocator_.truncate(of, tokens).value();
  }
  void release(sequence of) { allocator_.release(of).value(); }

  /// Bytes of keys and values in all layers, including scales.
  [[nodiscard]] std::uint64_t bytes_per_token() const {
    return store_.memories()[0].layout.block_bytes() / how_.block_tokens;
  }

  [[nodiscard]] const paged_counts& counts() const noexcept { return counts_; }
  [[nodiscard]] const decode_allocator& allocator() const noexcept { return allocator_; }
  [[nodiscard]] decode_allocator& allocator() noexcept { return allocator_; }
  [[nodiscard]] const element_store<Place>& store() const noexcept { return store_; }

 private:
  [[nodiscard]] element_store<Place> store_of(Place& place) const {
    const llmmem::kv_layout shape{.layers = config_.layers,
                                  .heads = config_.kv_heads,
                                  .head_dim = config_.head_dim,
                                  .block_tokens = how_.block_tokens,
                                  .heads_in_block = how_.heads_in_block,
                                  .order = how_.order};
    const llmmem::kv_layout layout =
        how_.record ? llmmem::paging::latent_layout(shape, *how_.record) : layout_of_form(shape, how_.form);
    return element_store<Place>(place, layout, allocator_.physical_blocks(), how_.record);
  }

  /// Takes all blocks and returns them in a random order, so that the cache later hands them out in another
  /// one.
  void shuffle_free_blocks() {
    std::vector<sequence> each;
    for (std::uint64_t i = 0; i < how_.blocks; ++i) {
      each.push_back(allocator_.create().value());
      allocator_.extend(each.back(), 1).value();
    }
    for (std::size_t i = each.size(); i > 1; --i)
      std::swap(each[i - 1], each[made_up(how_.permutation, i) % i]);
    for (const sequence one : each)
      allocator_.release(one).value();
  }

  /// Sequences that share their last block and now write to it get their own copies.
  void copy_before_writing(std::span<const llmmem::append_result> added) {
    std::vector<llmmem::block_pair> pairs;
    for (const llmmem::append_result& each : added) {
      if (each.copy) pairs.push_back(llmmem::pair_of(each.copy));
    }
    counts_.copies_on_write += pairs.size();
    store_.copy(pairs);
  }

  /// Slots, tables and lengths for the place's kernels.
  void put_tables(std::span<const grown<sequence>> batch, std::span<const llmmem::append_result> added) {
    std::vector<sequence> all;
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> sequences, lengths;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      all.push_back(batch[i].sequence);
      const std::uint64_t tokens = allocator_.tokens(all[i]);
      const std::size_t first = slots.size();
      slots.resize(first + batch[i].tokens.size());
      llmmem::write_slot_mapping(allocator_, all[i], added[i].first, std::span(slots).subspan(first)).value();
      for (std::uint64_t at = added[i].first; at < tokens; ++at) {
        sequences.push_back(static_cast<std::int32_t>(i));
        lengths.push_back(static_cast<std::int32_t>(at + 1));  // a draft attends to nothing after itself
      }
    }
    const llmmem::table_extent extent = llmmem::measure_tables(allocator_, all).value();
    std::vector<std::int32_t> indptr(all.size() + 1), indices(extent.indices), last(all.size());
    const auto blocks = llmmem::write_csr(allocator_, all, {indptr, indices, last}).value();
    const auto put = [&](std::size_t which, const std::vector<std::int32_t>& from) {
      return place_->template put<std::int32_t>(tables_[which], from);
    };
    step_ = {
        .rows = slots.size(),
        .slots = {place_->template put<std::int64_t>(slots_, slots), slots.size()},
        .blocks = {put(0, indptr), put(1, indices), put(2, last), blocks.num_sequences, blocks.block_tokens}};
    sequences_of_rows_ = put(3, sequences);
    lengths_of_rows_ = put(4, lengths);
    row_cuts_ = equal_cuts(lengths, how_.threads);
  }

  model_config config_;
  paged_config how_;
  Place* place_;
  decode_allocator allocator_;
  element_store<Place> store_;
  paged_counts counts_{};
  step_tables step_{};
  const std::int32_t* sequences_of_rows_ = nullptr;
  const std::int32_t* lengths_of_rows_ = nullptr;
  std::vector<std::size_t> row_cuts_{};
  typename Place::memory tables_[5]{};
  typename Place::memory slots_{};
  typename Place::memory keys_{};
  typename Place::memory values_{};
  typename Place::memory queries_{};
  typename Place::memory workspace_{};
  typename Place::memory out_{};
};

}  // namespace paged_decode
