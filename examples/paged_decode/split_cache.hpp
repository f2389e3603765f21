/// @file
/// A cache in two parts: some sequences attend on a device, the others on the host, at the same time.
#pragma once

#include <llmmem/paging/ids.hpp>
#include <llmmem/schedule/split_decode.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <span>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/paged_cache.hpp"

namespace paged_decode {

/// Both sides. The device is a thread team with blocks of its own, so that any machine runs this.
struct split_config {
  std::uint32_t device_threads = 1;
  std::uint32_t host_threads = 1;
  std::uint64_t device_blocks = 0;
  /// Of the sequences in the order in which they begin: blocks at their end, with all samples that fork from
  /// them. They are reserved on one side from the beginning.
  std::vector<std::uint64_t> sequence_blocks{};
};

/// What a run did, with sequences counted once a step.
struct split_counts {
  std::uint64_t steps = 0;
  std::array<std::uint64_t, 2> sequences{};  ///< of steps, on the device and on the host
  std::array<std::uint64_t, 2> tokens{};     ///< that rows attended to, the same
  std::uint64_t link_bytes = 0;              ///< queries, keys and values to the host, and results back
  std::uint64_t predicted_ns = 0;            ///< from the second step on
  std::uint64_t measured_ns = 0;             ///< of the same steps, attention of all layers
};

/// A `kv_cache`. A sequence begins where `split_decode` places it, with all others fixed where their keys and
/// values lie, and stays there; samples that fork from it share its blocks.
class split_cache {
 public:
  using sequence = std::size_t;

  /// @param how  of the host's part, with blocks for all sequences
  split_cache(const model_config& config, const paged_config& how, const split_config& split,
              host_place& device_place, host_place& host_place)
      : split_(split),
        block_tokens_(how.block_tokens),
        row_bytes_(elements_of_row(config) * sizeof(float) * config.layers),
        attended_elements_(config.attended_elements()),
        device_(config, part_of(how, split.device_blocks, split.device_threads), device_place),
        host_(config, part_of(how, how.blocks, split.host_threads), host_place) {
    // Both sides run the same kernel, so that a thread of each takes as long; the unit is measured.
    constexpr std::uint64_t unit = 1'000'000;
    rates_.device.token_ps = std::max<std::uint64_t>(unit / split.device_threads, 1);
    rates_.host.token_ps = std::max<std::uint64_t>(unit / split.host_threads, 1);
  }

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> prompt) {
    const std::uint64_t blocks = split_.sequence_blocks.at(families_.size());
    const llmmem::decode_side side = side_of_new(blocks);
    families_.push_back({.side = side, .blocks = blocks});
    return add(families_.size() - 1, part(side).create(prompt));
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const {
    return part(side_of(of)).tokens(sequences_[of].where);
  }

  void grow(std::span<const grown<sequence>> batch) {
    std::array<std::vector<grown<llmmem::sequence_id>>, 2> of_side;
    std::vector<llmmem::split_sequence> step;
    for (std::vector<std::size_t>& each : rows_)
      each.clear();
    std::size_t row = 0;
    for (const auto& each : batch) {
      const std::size_t side = index_of(side_of(each.sequence));
      of_side[side].push_back({sequences_[each.sequence].where, each.tokens});
      std::uint64_t attended = 0;
      for (std::uint64_t at = tokens(each.sequence); at < tokens(each.sequence) + each.tokens.size(); ++at)
        attended += at + 1;
      // Blocks count where sequences begin, as they are reserved until the end.
      step.push_back({.tokens = attended, .fixed = side_of(each.sequence)});
      counts_.tokens[side] += attended;
      ++counts_.sequences[side];
      for (std::size_t i = 0; i < each.tokens.size(); ++i)
        rows_[side].push_back(row++);
    }
    for (const llmmem::decode_side side : both) {
      const auto& mine = of_side[index_of(side)];
      if (!mine.empty()) part(side).grow(mine);
    }
    counts_.link_bytes += rows_[index_of(llmmem::decode_side::host)].size() * row_bytes_;
    end_of_step();
    planned_ns_ = llmmem::split_decode(step, rates_, split_.device_blocks).step_ns;
    ++counts_.steps;
  }

  /// Both parts attend at the same time.
  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    const auto began = std::chrono::steady_clock::now();
    rows_of_floats out(in.queries.rows(), attended_elements_);
    const auto attend_part = [&](llmmem::decode_side side) {
      const std::vector<std::size_t>& rows = rows_[index_of(side)];
      if (rows.empty()) return;
      const projected mine{rows_in(in.queries, rows), rows_in(in.keys, rows), rows_in(in.values, rows)};
      const rows_of_floats attended = part(side).attend(layer, mine);
      for (std::size_t i = 0; i < rows.size(); ++i)
        std::ranges::copy(attended[i], out[rows[i]].begin());
    };
    std::future<void> device =
        std::async(std::launch::async, [&] { attend_part(llmmem::decode_side::device); });
    attend_part(llmmem::decode_side::host);
    device.get();
    const auto took = std::chrono::steady_clock::now() - began;
    step_ns_ +=
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    return out;
  }

  void commit(sequence of) { part(side_of(of)).commit(sequences_[of].where); }
  [[nodiscard]] sequence fork(sequence parent) {
    const std::size_t family = sequences_[parent].family;
    return add(family, part(side_of(parent)).fork(sequences_[parent].where));
  }
  void truncate(sequence of, std::uint64_t tokens) {
    part(side_of(of)).truncate(sequences_[of].where, tokens);
  }
  void release(sequence of) {
    part(side_of(of)).release(sequences_[of].where);
    --families_[sequences_[of].family].alive;
  }

  [[nodiscard]] split_counts counts() {
    end_of_step();
    return counts_;
  }
  [[nodiscard]] const paged_cache<host_place>& part(llmmem::decode_side side) const noexcept {
    return side == llmmem::decode_side::device ? device_ : host_;
  }
  [[nodiscard]] paged_cache<host_place>& part(llmmem::decode_side side) noexcept {
    return side == llmmem::decode_side::device ? device_ : host_;
  }

 private:
  static constexpr std::array both{llmmem::decode_side::device, llmmem::decode_side::host};
  /// A sequence and the samples that fork from it.
  struct sequence_family {
    llmmem::decode_side side{};
    std::uint64_t blocks = 0;  // reserved
    std::size_t alive = 0;
  };
  struct kept {
    std::size_t family = 0;
    llmmem::sequence_id where{};
  };

  [[nodiscard]] static std::size_t index_of(llmmem::decode_side side) noexcept {
    return static_cast<std::size_t>(side);
  }
  [[nodiscard]] static paged_config part_of(paged_config how, std::uint64_t blocks, std::uint32_t threads) {
    how.blocks = blocks;
    how.threads = threads;
    return how;
  }
  /// A query of each head, what a token leaves in the cache, and the results.
  [[nodiscard]] static std::uint64_t elements_of_row(const model_config& config) noexcept {
    const std::uint64_t stored = config.has_latents() ? config.cached_key_dim() : config.kv_elements() * 2;
    return config.query_elements() + stored + config.attended_elements();
  }
  /// Nothing of records, which have no values apart from their keys.
  [[nodiscard]] static rows_of_floats rows_in(const rows_of_floats& from, std::span<const std::size_t> rows) {
    if (from.columns() == 0) return {};
    rows_of_floats out(rows.size(), from.columns());
    for (std::size_t i = 0; i < rows.size(); ++i)
      std::ranges::copy(from[rows[i]], out[i].begin());
    return out;
  }
  [[nodiscard]] llmmem::decode_side side_of(sequence of) const noexcept {
    return families_[sequences_[of].family].side;
  }
  sequence add(std::size_t family, llmmem::sequence_id where) {
    ++families_[family].alive;
    sequences_.push_back({family, where});
    return sequences_.size() - 1;
  }

  /// The new one is free, and all others are fixed. Samples count as one sequence that attends to more. What
  /// each attends to at its end decides, since it stays where it begins.
  [[nodiscard]] llmmem::decode_side side_of_new(std::uint64_t blocks) const {
    std::vector<llmmem::split_sequence> all;
    for (const sequence_family& each : families_) {
      if (each.alive != 0)
        all.push_back({.tokens = each.blocks * block_tokens_, .blocks = each.blocks, .fixed = each.side});
    }
    all.push_back({.tokens = blocks * block_tokens_, .blocks = blocks});
    return llmmem::split_decode(all, rates_, split_.device_blocks).sides.back();
  }

  /// The unit of both rates comes from the steps so far, so the first has no prediction.
  void end_of_step() {
    if (step_ns_ == 0) return;
    if (all_planned_ns_ != 0) {
      const double unit = static_cast<double>(all_step_ns_) / static_cast<double>(all_planned_ns_);
      counts_.predicted_ns += static_cast<std::uint64_t>(unit * static_cast<double>(planned_ns_));
      counts_.measured_ns += step_ns_;
    }
    all_planned_ns_ += planned_ns_;
    all_step_ns_ += step_ns_;
    step_ns_ = 0;
  }

  split_config split_;
  llmmem::split_rates rates_{};
  std::uint64_t block_tokens_;
  std::uint64_t row_bytes_;  // of a row that attends on the host, over the link
  std::size_t attended_elements_;
  paged_cache<host_place> device_;
  paged_cache<host_place> host_;
  std::vector<sequence_family> families_{};
  std::vector<kept> sequences_{};
  std::array<std::vector<std::size_t>, 2> rows_{};  // of the step's batch, on each side
  split_counts counts_{};
  std::uint64_t planned_ns_ = 0;  // of this step, in units
  std::uint64_t step_ns_ = 0;     // of this step, measured
  std::uint64_t all_planned_ns_ = 0;
  std::uint64_t all_step_ns_ = 0;
};
static_assert(kv_cache<split_cache>);

}  // namespace paged_decode
