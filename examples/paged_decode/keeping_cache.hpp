/// @file
/// A paged cache that keeps only some tokens of each sequence: sinks, recent ones, and those that were
/// attended to most.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "paged_decode/attention_shares.hpp"
#include "paged_decode/decoder.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/kv_stores.hpp"
#include "paged_decode/paged_cache.hpp"
#include "paged_decode/stored_form.hpp"
#include "train_gpt/exact_math.hpp"

namespace paged_decode {

/// The score of a token is the sum of its attention weights since it was stored (Zhang et al., "H2O", 2023),
/// for each layer and query head. Before a step in which a sequence would have a block more than its budget,
/// each layer and KV head chooses its own tokens by `select_tokens`, and `copy_kept_tokens` copies them into
/// fresh blocks, in the form they are in. A sequence's next position counts all of its tokens, also those
/// that were dropped.
///
/// Sequences do not fork, and their steps are not taken back: scores would have to follow.
class keeping_cache {
 public:
  using sequence = std::uint32_t;

  /// @param how  of a cache with room for all tokens: sequences have the same shares in attention.
  keeping_cache(const model_config& config, const paged_config& how, const llmmem::token_budget& budget)
      : config_(config),
        how_(how),
        budget_(budget),
        capacity_(static_cast<std::uint32_t>(
            std::min<std::uint64_t>(how.most_tokens, budget.budget + how.block_tokens))),
        allocator_({.blocks = how.blocks + capacity_ / how.block_tokens + 1,
                    .block_tokens = how.block_tokens,
                    .max_sequences = static_cast<std::uint32_t>(std::max<std::uint64_t>(how.blocks, 256)),
                    .max_sequence_tokens = how.most_tokens,
                    .name = "keeping_cache"}),
        store_(place_, layout_of(config, how), allocator_.physical_blocks()) {}

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> /*prompt*/) {
    held made{.blocks = allocator_.create().value()};
    made.scores.resize(std::size_t{config_.layers} * config_.query_heads * capacity_);
    sequences_.push_back(std::move(made));
    return static_cast<sequence>(sequences_.size() - 1);
  }
  /// Returns the tokens that the sequence has had.
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return sequences_[of].seen; }

  /// @pre one token for each sequence
  void grow(std::span<const grown<sequence>> batch) {
    step_of_.clear();
    std::vector<llmmem::sequence_id> all;
    std::vector<std::int64_t> slots(batch.size());
    std::vector<std::int32_t> rows, lengths;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].tokens.size() != 1)
        throw llmmem::argument_error("keeping_cache: a step has one token for each sequence");
      held& each = sequences_[batch[i].sequence];
      if (allocator_.tokens(each.blocks) == capacity_ && capacity_ > budget_.budget) keep_best(each);
      allocator_.extend(each.blocks, 1).value();
      const std::uint64_t now = allocator_.tokens(each.blocks);
      llmmem::write_slot_mapping(allocator_, each.blocks, now - 1, std::span(slots).subspan(i, 1)).value();
      ++each.seen;
      most_held_ = std::max(most_held_, now);
      all.push_back(each.blocks);
      rows.push_back(static_cast<std::int32_t>(i));
      lengths.push_back(static_cast<std::int32_t>(now));
      step_of_.push_back(batch[i].sequence);
    }
    tables_ = tables_of(all);
    slots_ = std::move(slots);
    rows_ = std::move(rows);
    lengths_ = std::move(lengths);
  }

  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    const step_tables step{.rows = slots_.size(), .slots = slots_, .blocks = tables_.view};
    store_.append(step, in.keys.all().data(), in.values.all().data(), layer);
    const attended_cache cache = store_.attended(step, layer);
    llmmem::attention_options options = attention_of(config_, layer, how_.most_tokens);
    options.scales = cache.scales;
    const std::size_t rows = in.queries.rows();
    const std::uint64_t bytes = llmmem::attention_workspace_bytes(rows, cache.memory.layout, options);
    const std::span<std::byte> workspace(host_place::make_room(workspace_, bytes), bytes);
    const std::uint64_t vector = config_.head_dim * sizeof(float);
    const std::uint64_t row = config_.query_elements() * sizeof(float);
    rows_of_floats out(rows, config_.query_elements());
    llmmem::paged_attention(host_place::run(), cache.tables, {rows, rows_.data(), lengths_.data()},
                            {std::as_bytes(in.queries.all()).data(), row, vector},
                            {std::as_writable_bytes(out.all()).data(), row, vector}, cache.memory,
                            cache.layer, workspace, options)
        .value();
    for (std::size_t r = 0; r < rows; ++r)
      add_weights(sequences_[step_of_[r]], layer, in.queries[r], cache);
    return out;
  }

  void commit(sequence /*of*/) {}
  [[nodiscard]] sequence fork(sequence /*parent*/) {
    throw llmmem::error("keeping_cache: sequences do not fork, because their scores would have to");
  }
  void truncate(sequence /*of*/, std::uint64_t /*tokens*/) {
    throw llmmem::error("keeping_cache: a sequence is not cut, because dropped tokens would have to return");
  }
  void release(sequence of) {
    allocator_.release(sequences_[of].blocks).value();
    sequences_[of].scores = {};
  }

  /// Returns the most tokens that a sequence had in the cache at once.
  [[nodiscard]] std::uint64_t most_held() const noexcept { return most_held_; }
  [[nodiscard]] std::uint64_t bytes_per_token() const {
    return store_.memories()[0].layout.block_bytes() / how_.block_tokens;
  }

 private:
  struct held {
    llmmem::sequence_id blocks{};
    std::uint64_t seen = 0;
    std::vector<float> scores{};  // [layers][query heads][capacity]
  };
  /// Tables, and the memory that their view shows.
  struct held_tables {
    std::vector<std::int32_t> indptr{}, indices{}, last{};
    llmmem::csr_table_view view{};
  };

  [[nodiscard]] static llmmem::kv_layout layout_of(const model_config& config, const paged_config& how) {
    return layout_of_form({.layers = config.layers,
                           .heads = config.kv_heads,
                           .head_dim = config.head_dim,
                           .block_tokens = how.block_tokens,
                           .heads_in_block = how.heads_in_block,
                           .order = how.order},
                          how.form);
  }
  [[nodiscard]] held_tables tables_of(std::span<const llmmem::sequence_id> of) const {
    const llmmem::table_extent extent = llmmem::measure_tables(allocator_, of).value();
    held_tables out;
    out.indptr.resize(of.size() + 1);
    out.indices.resize(extent.indices);
    out.last.resize(of.size());
    out.view = llmmem::write_csr(allocator_, of, {out.indptr, out.indices, out.last}).value();
    return out;
  }
  [[nodiscard]] std::span<float> scores_of(held& of, std::uint32_t layer, std::uint32_t query_head) const {
    const std::size_t at = (std::size_t{layer} * config_.query_heads + query_head) * capacity_;
    return std::span(of.scores).subspan(at, capacity_);
  }

  /// Adds the attention weights of a sequence's newest token, over the keys as the cache restores them.
  void add_weights(held& of, std::uint32_t layer, std::span<const float> queries,
                   const attended_cache& cache) {
    const auto count = static_cast<std::size_t>(allocator_.tokens(of.blocks));
    std::vector<std::int64_t> slots(count);
    llmmem::write_slot_mapping(allocator_, of.blocks, 0, slots).value();
    rows_of_floats keys(count, config_.kv_elements());
    rows_of_floats values(count, config_.kv_elements());
    const std::uint64_t vector = config_.head_dim * sizeof(float);
    const std::uint64_t row = config_.kv_elements() * sizeof(float);
    llmmem::gather_kv(host_place::run(),
                      llmmem::slot_front(slots, cache.memory.layout.block_tokens, cache.memory.blocks),
                      {std::as_writable_bytes(keys.all()).data(), row, vector},
                      {std::as_writable_bytes(values.all()).data(), row, vector}, cache.memory, layer,
                      {.element = llmmem::dtype::f32, .scales = cache.scales})
        .value();
    const float scale = 1 / std::sqrt(static_cast<float>(config_.head_dim));
    std::vector<float> weights(count);
    for (std::uint32_t head = 0; head < config_.query_heads; ++head) {
      const std::span<const float> query =
          queries.subspan(std::size_t{head} * config_.head_dim, config_.head_dim);
      const std::size_t first =
          std::size_t{head} / (config_.query_heads / config_.kv_heads) * config_.head_dim;
      float most = 0;
      for (std::size_t t = 0; t < count; ++t) {
        float dot = 0;
        for (std::size_t d = 0; d < query.size(); ++d)
          dot += query[d] * keys[t][first + d];
        weights[t] = dot * scale;
        most = t == 0 ? weights[t] : std::max(most, weights[t]);
      }
      float sum = 0;
      for (float& each : weights) {
        each = static_cast<float>(train_gpt::exact_exp(static_cast<double>(each - most)));
        sum += each;
      }
      const std::span<float> scores = scores_of(of, layer, head);
      for (std::size_t t = 0; t < count; ++t)
        scores[t] += weights[t] / sum;
    }
  }

  /// Leaves the budget's tokens of a sequence, in fresh blocks.
  void keep_best(held& of) {
    const llmmem::sequence_id fresh = allocator_.create().value();
    allocator_.extend(fresh, budget_.budget).value();
    const llmmem::sequence_id from[] = {of.blocks};
    const llmmem::sequence_id to[] = {fresh};
    const held_tables old_tables = tables_of(from);
    const held_tables fresh_tables = tables_of(to);
    const llmmem::kv_memory memory = store_.memories()[0];
    std::vector<std::int32_t> listed(std::size_t{config_.kv_heads} * budget_.budget);
    std::vector<float> moved(budget_.budget);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      llmmem::select_tokens(host_place::run(),
                            {.scores = scores_of(of, layer, 0).data(),
                             .sequences = 1,
                             .query_heads = config_.query_heads,
                             .kv_heads = config_.kv_heads,
                             .tokens = capacity_,
                             .stride = capacity_},
                            budget_, listed.data(), budget_.budget)
          .value();
      llmmem::copy_kept_tokens(host_place::run(), memory, fresh_tables.view, memory, old_tables.view,
                               {.listed = listed.data(),
                                .sequences = 1,
                                .heads = config_.kv_heads,
                                .budget = budget_.budget,
                                .stride = budget_.budget},
                               layer)
          .value();
      for (std::uint32_t head = 0; head < config_.query_heads; ++head) {
        const std::span<float> scores = scores_of(of, layer, head);
        const std::size_t list =
            std::size_t{head} / (config_.query_heads / config_.kv_heads) * budget_.budget;
        for (std::size_t i = 0; i < moved.size(); ++i)
          moved[i] = scores[static_cast<std::size_t>(listed[list + i])];
        std::ranges::fill(scores, 0.0F);
        std::ranges::copy(moved, scores.begin());
      }
    }
    allocator_.release(of.blocks).value();
    of.blocks = fresh;
  }

  model_config config_;
  paged_config how_;
  llmmem::token_budget budget_;
  std::uint32_t capacity_;  // tokens of a sequence at once
  decode_allocator allocator_;
  host_place place_{};
  element_store<host_place> store_;
  std::vector<held> sequences_{};
  std::uint64_t most_held_ = 0;
  // Of this step:
  std::vector<sequence> step_of_{};
  held_tables tables_{};
  std::vector<std::int64_t> slots_{};
  std::vector<std::int32_t> rows_{};
  std::vector<std::int32_t> lengths_{};
  host_place::memory workspace_{};
};
static_assert(kv_cache<keeping_cache>);

}  // namespace paged_decode
