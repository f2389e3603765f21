/// @file
/// Assigns the elements of a partitioned state to the ranks that save them, each element once.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/balance.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Returns the input of a partition: names, shapes and bytes per element. Types under 8 bits count as 1 byte,
/// because their elements do not fill one.
/// @throws length_error  for shapes past 2^63 - 1.
[[nodiscard]] inline std::vector<tensor_facts> facts_of(std::span<const state_tensor> catalogue) {
  std::vector<tensor_facts> facts;
  facts.reserve(catalogue.size());
  for (const state_tensor& each : catalogue) {
    const std::uint64_t bits = bits_of(each.type);
    facts.push_back(
        {each.name, tensor_shape::of(each.shape), static_cast<std::uint32_t>(bits < 8 ? 1 : bits / 8)});
  }
  return facts;
}

/// The fewest and the most bytes that a rank saves.
struct rank_shares {
  std::uint64_t smallest = 0;  ///< bytes of tensors
  std::uint64_t largest = 0;
};

namespace detail {

/// Distributes a state over the ranks.
template <partition P>
class state_dealer {
 public:
  state_dealer(std::span<const state_tensor> catalogue, const P& split)
      : catalogue_(catalogue),
        split_(&split),
        ranks_(to_number(split.world())),
        written_(ranks_, 0),
        parts_(ranks_, std::vector<element_runs>(catalogue.size())) {
    check();
    for (std::uint32_t i = 0; i < catalogue_.size(); ++i) {
      if (split_->is_replicated(tensor_id{i})) {
        (bits_of(catalogue_[i].type) % 8 == 0 ? cuttable_ : whole_).push_back(i);
        continue;
      }
      for (std::uint32_t rank = 0; rank < ranks_; ++rank)
        give(rank, i, split_->owned(tensor_id{i}, rank_id{rank}));
    }
    // These are not cut, because a cut may fall inside a byte.
    deal_whole(whole_);
    if (!deal_whole_if_even()) cut();
  }

  [[nodiscard]] std::vector<state_tensor> of(std::uint32_t rank) const {
    std::vector<state_tensor> tensors(catalogue_.begin(), catalogue_.end());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const element_runs all = element_runs::all_of(elements_of_tensor(i));
      tensors[i].part = parts_[rank][i];
      if (parts_[rank][i] != all) continue;
      // All ranks hold a tensor without elements; rank 0 records that it exists.
      if (!all.empty() || rank == 0) tensors[i].part.reset();
    }
    return tensors;
  }

 private:
  void check() const {
    if (catalogue_.size() != split_->tensors()) {
      throw argument_error("rank_state: " + std::to_string(catalogue_.size()) +
                           " tensors, but the partition has " + std::to_string(split_->tensors()));
    }
    for (std::uint32_t i = 0; i < catalogue_.size(); ++i) {
      if (catalogue_[i].part)
        throw argument_error("rank_state: tensor '" + catalogue_[i].name +
                             "' is already a part; pass whole tensors");
      if (tensor_shape::of(catalogue_[i].shape) != split_->shape(tensor_id{i})) {
        throw argument_error("rank_state: tensor '" + catalogue_[i].name +
                             "' has a shape other than the partition's");
      }
    }
  }
  [[nodiscard]] std::uint64_t elements_of_tensor(std::size_t i) const {
    return tensor_shape::of(catalogue_[i].shape).elements();
  }
  [[nodiscard]] std::uint64_t bytes_of_part(std::size_t i, const element_runs& part) const {
    return bytes_of(catalogue_[i].type, part.elements(), "rank_state: tensor '" + catalogue_[i].name + "'");
  }
  void give(std::uint32_t rank, std::uint32_t tensor, const element_runs& part) {
    parts_[rank][tensor] = part;
    written_[rank] =
        checked_add(written_[rank], bytes_of_part(tensor, part), "rank_state: bytes of one rank");
  }
  void deal_whole(std::span<const std::uint32_t> tensors) {
    const std::vector<rank_id> writers = writers_of(tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      give(to_index(writers[i]), tensors[i], element_runs::all_of(elements_of_tensor(tensors[i])));
  }
  [[nodiscard]] std::vector<rank_id> writers_of(std::span<const std::uint32_t> tensors) const {
    std::vector<std::uint64_t> bytes;
    for (const std::uint32_t each : tensors)
      bytes.push_back(bytes_of_part(each, element_runs::all_of(elements_of_tensor(each))));
    return assign_writers(bytes, written_);
  }
  /// Whole tensors in one file are easier to read for people and other tools.
  [[nodiscard]] bool deal_whole_if_even() {
    const std::vector<rank_id> writers = writers_of(cuttable_);
    std::vector<std::uint64_t> written = written_;
    for (std::size_t i = 0; i < cuttable_.size(); ++i) {
      written[to_index(writers[i])] +=
          bytes_of_part(cuttable_[i], element_runs::all_of(elements_of_tensor(cuttable_[i])));
    }
    const auto [least, most] = std::ranges::minmax_element(written);
    if (*most - *least > *least / 10) return false;
    deal_whole(cuttable_);
    return true;
  }
  void cut() {
    std::vector<sharding::cuttable_item> items;
    for (const std::uint32_t each : cuttable_) {
      items.push_back(
          {elements_of_tensor(each), static_cast<std::uint32_t>(bits_of(catalogue_[each].type) / 8)});
    }
    for (const sharding::write_share& share : cut_writes(items, written_))
      give(to_index(share.rank), cuttable_[share.item], element_runs::flat_range(share.first, share.count));
  }

  std::span<const state_tensor> catalogue_;
  const P* split_;
  std::uint32_t ranks_;
  std::vector<std::uint64_t> written_;
  std::vector<std::vector<element_runs>> parts_;
  std::vector<std::uint32_t> whole_;
  std::vector<std::uint32_t> cuttable_;
};

}  // namespace detail

/// Assigns each element of a state to exactly one rank, which saves it.
///
/// Of a split tensor, a rank saves the part that it owns (`split.owned`). Tensors that every rank holds are
/// distributed so that all ranks save about the same number of bytes: as whole tensors (`assign_writers`), if
/// no rank then saves more than 1.1 times as much as another; otherwise cut (`cut_writes`). Every rank
/// computes the same result.
///
/// The ratio can exceed 1.1 if a rank already owns more of the split tensors than the level, if the level is
/// under 32 elements, and because of tensors of types under 8 bits, which are never cut. `shares_of` returns
/// the shares.
///
/// @param catalogue  the whole state; no tensor has a part.
/// @param split      a partition of the same tensors, in the same order: see `facts_of`.
/// @returns for each rank all tensors, in the catalogue's order, with the parts that it saves, which are
///          often empty.
/// @par Complexity   O(tensors x world + n log n).
/// @throws argument_error  if the two do not match, or a part begins or ends inside a byte.
/// @throws length_error    for sizes past 2^63 - 1.
template <partition P>
[[nodiscard]] std::vector<std::vector<state_tensor>> rank_states(std::span<const state_tensor> catalogue,
                                                                 const P& split) {
  const detail::state_dealer<P> dealt(catalogue, split);
  std::vector<std::vector<state_tensor>> ranks;
  for (std::uint32_t rank = 0; rank < to_number(split.world()); ++rank)
    ranks.push_back(dealt.of(rank));
  return ranks;
}

/// Returns one rank's tensors, for its `async_checkpointer`.
/// @throws argument_error  also for a rank that is not below the world.
template <partition P>
[[nodiscard]] std::vector<state_tensor> rank_state(std::span<const state_tensor> catalogue, const P& split,
                                                   rank_id rank) {
  if (to_index(rank) >= to_number(split.world())) {
    throw argument_error("rank_state: rank " + std::to_string(to_index(rank)) + " of " +
                         std::to_string(to_number(split.world())));
  }
  return detail::state_dealer<P>(catalogue, split).of(to_index(rank));
}

/// Returns the fewest and the most bytes of tensors that a rank saves.
[[nodiscard]] inline rank_shares shares_of(std::span<const std::vector<state_tensor>> ranks) {
  rank_shares shares{max_bytes, 0};
  for (const std::vector<state_tensor>& rank : ranks) {
    std::uint64_t bytes = 0;
    for (const state_tensor& each : rank) {
      const std::uint64_t elements =
          each.part ? each.part->elements() : tensor_shape::of(each.shape).elements();
      bytes = checked_add(bytes, bytes_of(each.type, elements, "shares_of: tensor '" + each.name + "'"),
                          "shares_of: bytes of one rank");
    }
    shares.smallest = std::min(shares.smallest, bytes);
    shares.largest = std::max(shares.largest, bytes);
  }
  return ranks.empty() ? rank_shares{} : shares;
}

/// Returns the range of the elements that a rank saves within the densely stored piece that it holds
/// (`split.local`), if they are one range. The rank then saves one span of its memory, as with all partitions
/// of this library.
/// @param held  the rank's elements of a tensor. @param saved  part of those.
/// @par Complexity   O(1).
[[nodiscard]] constexpr std::optional<index_range> range_within(const element_runs& held,
                                                                const element_runs& saved) noexcept {
  if (saved.empty()) return index_range{0, 0};
  if (!held.contains(saved.begin) || !held.contains(saved.end() - 1)) return std::nullopt;
  const std::uint64_t first = held.position_of(saved.begin);
  const std::uint64_t last = held.position_of(saved.end() - 1);
  if (last - first + 1 != saved.elements()) return std::nullopt;
  return index_range{first, saved.elements()};
}

}  // namespace v0
}  // namespace llmmem
