/// @file
/// The body of `plan_ownership`.
#pragma once

#include <llmmem/redundancy/part_ownership.hpp>

#include <algorithm>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

class ownership_planner {
 public:
  ownership_planner(const kept_layout& layout, const std::optional<replica_map>& map,
                    const membership_change& change, const damaged_places& damaged)
      : layout_(layout), map_(map), change_(change), damaged_(damaged), load_(change.world, 0) {}

  [[nodiscard]] ownership_plan plan() {
    const rank_set lost = change_.lost();
    std::vector<std::uint64_t> blobs;
    blobs.reserve(layout_.world);
    for (std::uint32_t rank = 0; rank < layout_.world; ++rank)
      blobs.push_back(layout_.blob_bytes(rank_id{rank}));
    if (map_) {
      recovery_ = plan_recovery(*map_, lost, blobs, damaged_);
      plan_.unrecoverable = recovery_.unrecoverable;
    } else {
      plan_.unrecoverable = lost | damaged_.own;
    }
    // The loss of a rank without parts loses no state.
    for (std::uint32_t rank = 0; rank < layout_.world; ++rank) {
      if (blobs[rank] == 0) plan_.unrecoverable.erase(rank_id{rank});
    }
    if (!plan_.unrecoverable.empty()) return std::move(plan_);
    choose_owners();
    for (std::uint32_t i = 0; i < layout_.owners.size(); ++i)
      move(part_id{i});
    return std::move(plan_);
  }

 private:
  [[nodiscard]] std::optional<rank_id> now(rank_id then) const { return change_.now[to_index(then)]; }

  [[nodiscard]] bool has_copy(rank_id holder, rank_id of) const {
    return now(holder) && !damaged_.has_copy(holder, of);
  }

  void choose_owners() {
    const std::size_t parts = layout_.owners.size();
    std::vector<std::optional<rank_id>> chosen(parts);
    for (std::size_t i = 0; i < parts; ++i) {
      chosen[i] = change_.home[i] ? change_.home[i] : now(layout_.owners[i]);
      if (chosen[i]) load_[to_index(*chosen[i])] += layout_.part_bytes[i];
    }
    for (std::size_t i = 0; i < parts; ++i) {
      if (!chosen[i]) {
        chosen[i] = adopter(layout_.owners[i]);
        load_[to_index(*chosen[i])] += layout_.part_bytes[i];
      }
      plan_.owners.push_back(*chosen[i]);
    }
  }

  [[nodiscard]] rank_id adopter(rank_id of) const {
    std::optional<rank_id> best;
    const auto offer = [&](rank_id rank) {
      if (!best || load_[to_index(rank)] < load_[to_index(*best)]) best = rank;
    };
    if (map_ && !map_->scheme().is_coded()) {
      for (const rank_id holder : map_->holders(of)) {
        if (has_copy(holder, of)) offer(*now(holder));
      }
    }
    if (best) return *best;
    for (std::uint32_t rank = 0; rank < change_.world; ++rank)
      offer(rank_id{rank});
    return *best;
  }

  void add(part_transfer transfer) {
    if (transfer.bytes == 0) return;
    if (transfer.source != transfer.target) plan_.moved_bytes += transfer.bytes;
    plan_.transfers.push_back(transfer);
  }

  void move(part_id part) {
    const rank_id then = layout_.owners[to_index(part)];
    const rank_id target = plan_.owners[to_index(part)];
    const std::uint64_t first = layout_.offset_of(part);
    const std::uint64_t bytes = layout_.part_bytes[to_index(part)];
    if (const std::optional<rank_id> owner = now(then); owner && !damaged_.own.contains(then)) {
      add({.part = part,
           .bytes = bytes,
           .source = *owner,
           .target = target,
           .of = then,
           .place_offset = first});
      return;
    }
    for (const recovery_step& step : recovery_.steps) {
      if (step.lost == then) give_back(part, target, first, bytes, step);
    }
  }

  /// Plans the bytes of the part in the step's range.
  void give_back(part_id part, rank_id target, std::uint64_t first, std::uint64_t bytes,
                 const recovery_step& step) {
    const std::uint64_t from = std::max(first, step.range.first);
    const std::uint64_t to = std::min(first + bytes, step.range.first + step.range.count);
    if (from >= to) return;
    if (step.kind == recovery_kind::fetch) {
      // Prefers a copy on the adopting rank.
      rank_id holder = step.sources.front().holder;
      for (const rank_id each : map_->holders(step.lost)) {
        if (now(each) == target && has_copy(each, step.lost)) holder = each;
      }
      add({.part = part,
           .part_offset = from - first,
           .bytes = to - from,
           .source = *now(holder),
           .target = target,
           .place = kept_place::copy,
           .of = step.lost,
           .place_offset = from});
      return;
    }
    const std::uint64_t within = from - step.range.first;
    for (const recovery_source& source : step.sources) {
      if (source.bytes <= within) continue;  // zeros
      const std::uint64_t there = std::min(source.bytes - within, to - from);
      part_transfer transfer{.part = part,
                             .part_offset = from - first,
                             .bytes = there,
                             .source = *now(source.holder),
                             .target = target,
                             .of = source.holder,
                             .codeword = step.codeword,
                             .coefficient = source.coefficient,
                             .is_summed = true};
      place_piece(transfer, source, within);
      add(transfer);
    }
  }

  /// A piece of a codeword is a stripe of its holder's own state, or parity.
  void place_piece(part_transfer& transfer, const recovery_source& source, std::uint64_t within) const {
    const coded_group group = map_->layout(map_->group_of(source.holder));
    if (to_index(source.piece) >= group.shape().data) {
      transfer.place = kept_place::parity;
      transfer.place_offset = within;
      return;
    }
    const std::uint32_t stripe = group.stripe_in(map_->member_of(source.holder), transfer.codeword);
    const std::uint64_t blob = layout_.blob_bytes(source.holder);
    transfer.place_offset = stripe_of(blob, group.shape().data, stripe).first + within;
  }

  const kept_layout& layout_;
  const std::optional<replica_map>& map_;
  const membership_change& change_;
  const damaged_places& damaged_;
  std::vector<std::uint64_t> load_;  // owned bytes, by present rank
  recovery_plan recovery_{};
  ownership_plan plan_{};
};

}  // namespace detail

inline ownership_plan plan_ownership(const kept_layout& layout, const std::optional<replica_map>& map,
                                     const membership_change& change, const damaged_places& damaged) {
  return detail::ownership_planner(layout, map, change, damaged).plan();
}

}  // namespace v0
}  // namespace llmmem
