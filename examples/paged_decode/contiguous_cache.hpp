/// @file
/// The reference for the paged cache: each sequence's keys and values in its own run of memory, in floats.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "paged_decode/attention_shares.hpp"
#include "paged_decode/decoder.hpp"
#include "paged_decode/kv_stores.hpp"
#include "paged_decode/stored_form.hpp"

namespace paged_decode {

/// It has no blocks, tables, sharing or conversions: a fork copies everything, a truncation lowers a number,
/// and a store assigns floats that were rounded before. The attention kernel is the same; its tables name one
/// block per sequence, as long as a sequence may become.
class contiguous_cache {
 public:
  using sequence = std::size_t;

  contiguous_cache(const model_config& config, kv_form form, std::uint64_t most_tokens)
      : config_(config),
        form_(form),
        layout_{.layers = config.layers,
                .heads = config.kv_heads,
                .head_dim = config.head_dim,
                .block_tokens = static_cast<std::uint32_t>(most_tokens),
                .element = llmmem::dtype::f32,
                .order = llmmem::block_order::block_first} {}
  /// Of a model with latents: each sequence's records in its own run of memory.
  contiguous_cache(const model_config& config, const llmmem::paging::latent_record& record,
                   std::uint64_t most_tokens)
      : contiguous_cache(config, kv_form::f32, most_tokens) {
    record_ = record;
    layout_ = llmmem::paging::latent_layout(layout_, record);
  }

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> /*prompt*/) {
    sequences_.push_back({std::vector<float>(layout_.block_bytes() / sizeof(float)), 0, true});
    return sequences_.size() - 1;
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return sequences_[of].tokens; }

  void grow(std::span<const grown<sequence>> batch) {
    rows_ = {};
    for (const auto& each : batch) {
      kept& of = sequences_[each.sequence];
      for (std::size_t i = 0; i < each.tokens.size(); ++i) {
        rows_.of.push_back(each.sequence);
        rows_.lengths.push_back(static_cast<std::int32_t>(++of.tokens));
      }
    }
  }

  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    rows_of_floats out(in.queries.rows(), config_.attended_elements());
    for (std::size_t row = 0; row < in.queries.rows(); ++row)
      store(row, layer, in);
    for (std::size_t row = 0; row < in.queries.rows(); ++row)
      attend_row(row, layer, in.queries[row], out[row]);
    return out;
  }

  void commit(sequence /*of*/) {}
  [[nodiscard]] sequence fork(sequence parent) {
    kept copy = sequences_[parent];
    sequences_.push_back(std::move(copy));
    return sequences_.size() - 1;
  }
  void truncate(sequence of, std::uint64_t tokens) { sequences_[of].tokens = tokens; }
  void release(sequence of) { sequences_[of] = {}; }

 private:
  struct kept {
    std::vector<float> floats{};
    std::uint64_t tokens = 0;
    bool is_alive = false;
  };
  struct batch_rows {
    std::vector<sequence> of{};
    std::vector<std::int32_t> lengths{};  // including each row's own token
  };

  void store(std::size_t row, std::uint32_t layer, const projected& in) {
    const auto position = static_cast<std::size_t>(rows_.lengths[row] - 1);
    if (record_) {
      const auto slot = static_cast<std::int64_t>(position);
      const llmmem::kv_memory memory{
          std::as_writable_bytes(std::span(sequences_[rows_.of[row]].floats)).data(), 1, layout_};
      return append_records(llmmem::host_executor{},
                            llmmem::slot_front(std::span(&slot, 1), layout_.block_tokens, 1),
                            in.keys[row].data(), *record_, memory, layer);
    }
    for (std::uint32_t p = 0; p < 2; ++p) {
      const std::span<const float> from = p == 0 ? in.keys[row] : in.values[row];
      std::vector<float> rounded(from.begin(), from.end());
      round_to(form_, rounded, config_.head_dim);
      const std::size_t plane = (std::size_t{layer} * 2 + p) * layout_.block_tokens;
      const std::size_t place = (plane + position) * config_.kv_elements();
      std::ranges::copy(rounded,
                        sequences_[rows_.of[row]].floats.begin() + static_cast<std::ptrdiff_t>(place));
    }
  }

  void attend_row(std::size_t row, std::uint32_t layer, std::span<const float> query, std::span<float> out) {
    kept& of = sequences_[rows_.of[row]];
    const std::int32_t block = 0;
    const auto tokens = static_cast<std::int32_t>(of.tokens);
    const llmmem::padded_table_view tables{&block, &tokens, 1, 1,
                                           static_cast<std::int32_t>(layout_.block_tokens)};
    const llmmem::kv_memory memory{std::as_writable_bytes(std::span(of.floats)).data(), 1, layout_};
    llmmem::attention_options options = attention_of(config_, layer, layout_.block_tokens);
    if (record_) options.latents = &*record_;
    workspace_.resize(llmmem::attention_workspace_bytes(1, layout_, options) / sizeof(float));
    const std::uint64_t vector = config_.cached_key_dim() * sizeof(float);
    const std::uint64_t out_vector = config_.cached_value_dim() * sizeof(float);
    llmmem::paged_attention(llmmem::host_executor{}, tables, {.rows = 1, .lengths = &rows_.lengths[row]},
                            {std::as_bytes(query).data(), query.size_bytes(), vector},
                            {std::as_writable_bytes(out).data(), out.size_bytes(), out_vector}, memory, layer,
                            std::as_writable_bytes(std::span(workspace_)), options)
        .value();
  }

  model_config config_;
  kv_form form_;
  llmmem::kv_layout layout_;
  std::optional<llmmem::paging::latent_record> record_{};
  std::vector<kept> sequences_{};
  batch_rows rows_{};
  std::vector<float> workspace_{};
};
static_assert(kv_cache<contiguous_cache>);

}  // namespace paged_decode
