/// @file
/// Bodies of kv_split.hpp. Only kv_split.hpp includes it.
#pragma once

#include <llmmem/hash/siphash.hpp>
#include <llmmem/paging/kv_split.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Groups of heads that different ranks hold, and the group of this rank.
[[nodiscard]] inline std::uint32_t head_groups(const paging::kv_part& part) noexcept {
  return part.heads_of_model != 0 && part.heads_of_model < part.tp_size ? part.heads_of_model : part.tp_size;
}
[[nodiscard]] inline std::uint32_t first_head_of(const kv_layout& of) noexcept {
  const std::uint64_t group = std::uint64_t{of.part.tp_rank} * head_groups(of.part) / of.part.tp_size;
  return static_cast<std::uint32_t>(group * of.heads);
}

/// Whether all heads of a token share such a vector. Global scales, which they share too, are refused before.
[[nodiscard]] constexpr bool is_common(paging::plane_role role) noexcept {
  return role == paging::plane_role::index_key || role == paging::plane_role::index_scale;
}

/// Whether two context-parallel ranks hold a token in common: their runs meet in some round.
[[nodiscard]] constexpr bool have_common_tokens(const paging::kv_part& a, const paging::kv_part& b) noexcept {
  if (a.cp_size == 1 || b.cp_size == 1) return true;
  const std::uint64_t round =
      std::gcd(std::uint64_t{a.cp_size} * a.cp_interleave, std::uint64_t{b.cp_size} * b.cp_interleave);
  const std::uint64_t at_a = std::uint64_t{a.cp_rank} * a.cp_interleave % round;
  const std::uint64_t at_b = std::uint64_t{b.cp_rank} * b.cp_interleave % round;
  return (at_b + round - at_a) % round < a.cp_interleave || (at_a + round - at_b) % round < b.cp_interleave;
}

/// The layout of the whole model, for comparison: what splits may change is alike in all of them.
[[nodiscard]] inline kv_layout whole_model(kv_layout of) noexcept {
  of.heads *= head_groups(of.part);
  of.part = {};
  of.block_tokens = 16;
  return of;
}

[[nodiscard]] inline kv_layout without_rank(kv_layout of) noexcept {
  of.part.tp_rank = 0;
  of.part.cp_rank = 0;
  return of;
}

}  // namespace detail

namespace paging {

inline kv_split_plan::kv_split_plan(std::span<const kv_layout> from, std::span<const kv_layout> to,
                                    std::string name)
    : name_(std::move(name)),
      from_(from.begin(), from.end()),
      to_(to.begin(), to.end()),
      sent_heads_(from.size()) {
  check_side(from_, "from");
  check_side(to_, "to");
  check_contents(detail::whole_model(from_[0]), detail::whole_model(to_[0]), name_).value();
  const std::uint32_t context_ranks = from_[0].part.cp_size;
  for (std::uint32_t receiver = 0; receiver < to_.size(); ++receiver)
    for (std::uint32_t context_rank = 0; context_rank < context_ranks; ++context_rank)
      add_shares(receiver, context_rank);
}

inline void kv_split_plan::check_side(std::span<const kv_layout> layouts, const char* name) const {
  const auto refuse = [&](const std::string& why) { throw argument_error(name_ + ": " + name + why); };
  if (layouts.empty()) refuse(" has no ranks; give the layout of each");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const kv_layout& each = layouts[i].checked();
    const auto named = [&] { return "[" + std::to_string(i) + "]"; };
    if (detail::without_rank(each) != detail::without_rank(layouts[0]))
      refuse(named() + " differs from " + name + "[0] in more than part.tp_rank and part.cp_rank");
    if (std::uint64_t{each.heads} * detail::head_groups(each.part) >
        std::numeric_limits<std::uint32_t>::max())
      refuse(named() + " has heads x part.tp_size of 2^32 or more; a model has fewer heads");
    for (const scale_form* scales : {&each.key_scales, &each.value_scales, &each.index_scales})
      if (scales->group == scale_group::channel || scales->has_global)
        refuse(
            named() +
            " has scales of a whole block (by channel, or has_global), which mean nothing in other blocks; "
            "take scales by vector or by run");
  }
}

/// Adds what senders of one context-parallel rank send to a receiver.
inline void kv_split_plan::add_shares(std::uint32_t to, std::uint32_t context_rank) {
  const kv_layout& receiver = to_[to];
  const std::uint32_t last = detail::first_head_of(receiver) + receiver.heads;
  std::uint32_t head = detail::first_head_of(receiver);
  bool is_first = true;
  while (head < last) {
    std::vector<std::uint32_t> holders;
    for (std::uint32_t i = 0; i < from_.size(); ++i) {
      const std::uint32_t first = detail::first_head_of(from_[i]);
      if (from_[i].part.cp_rank == context_rank && first <= head && head < first + from_[i].heads)
        holders.push_back(i);
    }
    if (holders.empty()) {
      throw argument_error(name_ + ": no rank of `from` with part.cp_rank " + std::to_string(context_rank) +
                           " has head " + std::to_string(head) + ", which to[" + std::to_string(to) +
                           "] needs; give the layouts of all ranks");
    }
    // The one that has sent the fewest heads so far; of several the first.
    const std::uint32_t sender =
        *std::ranges::min_element(holders, {}, [&](std::uint32_t i) { return sent_heads_[i]; });
    const std::uint32_t first = detail::first_head_of(from_[sender]);
    const std::uint32_t until = std::min(last, first + from_[sender].heads);
    shares_.push_back({.from = sender,
                       .to = to,
                       .from_head = head - first,
                       .to_head = head - detail::first_head_of(receiver),
                       .heads = until - head,
                       .has_common = std::exchange(is_first, false)});
    if (detail::have_common_tokens(from_[sender].part, receiver.part)) sent_heads_[sender] += until - head;
    head = until;
  }
}

inline std::vector<kv_share> kv_split_plan::shares_from(std::uint32_t rank) const {
  std::vector<kv_share> all;
  for (const kv_share& each : shares_)
    if (each.from == rank) all.push_back(each);
  return all;
}

inline std::vector<kv_share> kv_split_plan::shares_to(std::uint32_t rank) const {
  std::vector<kv_share> all;
  for (const kv_share& each : shares_)
    if (each.to == rank) all.push_back(each);
  return all;
}

inline std::uint64_t kv_split_plan::fingerprint() const noexcept {
  detail::siphash_state<2, 4> state(hash_seed{.low = from_.size(), .high = to_.size()});
  // `fingerprint()` of a layout counts ranks with the same heads as one, so the ranks are absorbed too.
  for (const std::vector<kv_layout>* layouts : {&from_, &to_}) {
    for (const kv_layout& each : *layouts) {
      state.absorb(each.fingerprint());
      state.absorb(std::uint64_t{each.part.tp_rank} << 32 | each.part.tp_size);
    }
  }
  return state.finish(0, 16 * (from_.size() + to_.size())).low | 1U;
}

inline std::uint64_t kv_split_plan::tokens(const kv_share& share, token_range range) const noexcept {
  if (range.first >= range.end) return 0;
  const kv_part& from = from_[share.from].part;
  const kv_part& to = to_[share.to].part;
  if (to.cp_size == 1) return from.local_tokens(range.end) - from.local_tokens(range.first);
  if (from.cp_size == 1) return to.local_tokens(range.end) - to.local_tokens(range.first);
  const auto count = [&](std::uint64_t first, std::uint64_t end) {
    std::uint64_t common = 0;
    for (std::uint64_t token = first; token < end; ++token)
      common += from.cp_rank_of(token) == from.cp_rank && to.cp_rank_of(token) == to.cp_rank ? 1U : 0U;
    return common;
  };
  // After a common multiple of both rounds everything repeats.
  const std::uint64_t from_round = std::uint64_t{from.cp_size} * from.cp_interleave;
  const std::uint64_t to_round = std::uint64_t{to.cp_size} * to.cp_interleave;
  const std::uint64_t rounds = to_round / std::gcd(from_round, to_round);
  if (rounds > (range.end - range.first) / from_round) return count(range.first, range.end);
  const std::uint64_t period = rounds * from_round;
  const std::uint64_t periods = (range.end - range.first) / period;
  return periods * count(range.first, range.first + period) +
         count(range.first + periods * period, range.end);
}

inline std::uint64_t kv_split_plan::token_bytes(const kv_share& share) const noexcept {
  const kv_layout& of = from_[share.from];
  std::uint64_t bytes = 0;
  for (std::uint32_t p = 0; p < of.planes(); ++p) {
    const std::uint64_t vectors =
        detail::is_common(of.role_of(p)) ? (share.has_common ? 1U : 0U) : share.heads;
    bytes += of.vector_bytes(p) * vectors;
  }
  return bytes;
}

inline std::uint64_t kv_split_plan::token_vectors(const kv_share& share) const noexcept {
  const kv_layout& of = from_[share.from];
  std::uint64_t vectors = 0;
  for (std::uint32_t p = 0; p < of.planes(); ++p)
    vectors += detail::is_common(of.role_of(p)) ? (share.has_common ? 1U : 0U) : share.heads;
  return vectors;
}

inline result<void> kv_split_plan::check(side of, const kv_share& share, std::uint32_t layer,
                                         token_range range, const kv_memory& memory,
                                         std::span<const block_id> table,
                                         std::uint64_t packed) const noexcept {
  const auto refusal = [&](error_code code, std::uint64_t wanted, std::uint64_t found) {
    return failure{code, 0, wanted, found, name_.c_str()};
  };
  if (std::ranges::find(shares_, share) == shares_.end())
    return refusal(errc::out_of_range, share.from, from_.size() - 1);
  const kv_layout& layout = of == side::sender ? from_[share.from] : to_[share.to];
  if (layer >= layout.layers) return refusal(errc::out_of_range, layer, layout.layers - 1);
  if (memory.layout != layout)
    return refusal(errc::layout_mismatch, memory.layout.fingerprint(), layout.fingerprint());
  const std::uint64_t held = layout.part.local_tokens(range.end);
  if (held > table.size() * layout.block_tokens)
    return refusal(errc::past_the_end, held, table.size() * layout.block_tokens);
  if (packed != bytes(share, range)) return refusal(errc::size_mismatch, packed, bytes(share, range));
  const std::uint64_t before = layout.part.local_tokens(range.first);
  if (before >= held) return {};  // blocks without a token of the range may be null
  for (std::uint64_t i = before / layout.block_tokens; i * layout.block_tokens < held; ++i) {
    const std::uint32_t block = to_index(table[static_cast<std::size_t>(i)]);
    if (block == 0 || block >= memory.blocks) return refusal(errc::no_such_block, block, memory.blocks);
  }
  return {};
}

/// Calls `move(address, bytes)` for each run of the share in the memory of one side, in the packed order.
template <class Move>
void kv_split_plan::each_run(side of, const kv_share& share, std::uint32_t layer, token_range range,
                             const kv_memory& memory, std::span<const block_id> table,
                             Move&& move) const noexcept {
  const kv_layout& layout = memory.layout;
  const kv_part& from = from_[share.from].part;
  const kv_part& to = to_[share.to].part;
  const std::uint32_t first_head = of == side::sender ? share.from_head : share.to_head;
  for (std::uint64_t token = range.first; token < range.end; ++token) {
    if (from.cp_rank_of(token) != from.cp_rank || to.cp_rank_of(token) != to.cp_rank) continue;
    const std::uint64_t local = layout.part.local_of(token);
    const std::uint64_t block = to_index(table[static_cast<std::size_t>(local / layout.block_tokens)]);
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const kv_plane plane = kv_plane_of(memory, p);
      std::byte* const base = plane_base(plane, layer);
      const std::uint64_t vector = layout.vector_bytes(p);
      const auto at = [&](std::uint64_t head) {
        return base + plane.strides.offset(0, block, local % layout.block_tokens, head);
      };
      if (detail::is_common(layout.role_of(p))) {
        if (share.has_common) move(at(0), vector);
      } else if (share.heads == 1 || at(first_head + 1) == at(first_head) + vector) {
        move(at(first_head), vector * share.heads);
      } else {
        for (std::uint32_t head = first_head; head < first_head + share.heads; ++head)
          move(at(head), vector);
      }
    }
  }
}

template <class Visit>
result<void> kv_split_plan::each_packed(const kv_share& share, std::uint32_t layer, token_range range,
                                        const kv_memory& memory, std::span<const block_id> table,
                                        Visit&& visit) const noexcept {
  if (auto fits = check(side::sender, share, layer, range, memory, table, bytes(share, range)); !fits)
    return fits;
  each_run(side::sender, share, layer, range, memory, table, visit);
  return {};
}
template <class Visit>
result<void> kv_split_plan::each_unpacked(const kv_share& share, std::uint32_t layer, token_range range,
                                          const kv_memory& memory, std::span<const block_id> table,
                                          Visit&& visit) const noexcept {
  if (auto fits = check(side::receiver, share, layer, range, memory, table, bytes(share, range)); !fits)
    return fits;
  each_run(side::receiver, share, layer, range, memory, table, visit);
  return {};
}

inline result<void> kv_split_plan::pack(const kv_share& share, std::uint32_t layer, token_range range,
                                        const kv_memory& memory, std::span<const block_id> table,
                                        std::span<std::byte> out) const noexcept {
  if (auto fits = check(side::sender, share, layer, range, memory, table, out.size()); !fits) return fits;
  std::byte* to = out.data();
  each_run(side::sender, share, layer, range, memory, table, [&](const std::byte* from, std::uint64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    to += bytes;
  });
  return {};
}

inline result<void> kv_split_plan::unpack(const kv_share& share, std::uint32_t layer, token_range range,
                                          const kv_memory& memory, std::span<const block_id> table,
                                          std::span<const std::byte> in) const noexcept {
  if (auto fits = check(side::receiver, share, layer, range, memory, table, in.size()); !fits) return fits;
  const std::byte* from = in.data();
  each_run(side::receiver, share, layer, range, memory, table, [&](std::byte* to, std::uint64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    from += bytes;
  });
  return {};
}

}  // namespace paging
}  // namespace v0
}  // namespace llmmem
