/// @file
/// Bodies of paged_allocator.hpp: moving blocks that are in use, and pinning them. Only
/// paged_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits>
compaction_facts paged_allocator<Traits>::compaction_facts_now() const {
  compaction_facts facts;
  facts.blocks.resize(max_physical_blocks(), block_use::idle);
  for (std::uint64_t i = 1; i < facts.blocks.size(); ++i) {
    const block_record& block = pool_.record(block_id{static_cast<std::uint32_t>(i)});
    if (block.is_active()) facts.blocks[i] = block.references() == 1 ? block_use::owned : block_use::shared;
  }
  pool_.for_each_free([&](block_id block) { facts.blocks[to_index(block)] = block_use::free; });
  for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
    if (records_[slot].alive() && records_[slot].blocks != 0)
      facts.tables.emplace_back(row(slot), row(slot) + records_[slot].blocks);
  }
  return facts;
}

template <class Traits>
template <move_copier Copy>
result<std::uint64_t> paged_allocator<Traits>::compact(std::span<const block_move> moves, Copy&& copy,
                                                       std::size_t group) {
  // By source; null_block: the block stays. Allocated before anything changes.
  detail::fixed_array<block_id> moved_to(max_physical_blocks(), null_block, metadata_, "compact: new places");
  if (const auto fit = check_moves(moves, moved_to); !fit) return fit.error();
  if (group == 0) group = moves.size();
  std::uint64_t done = 0;
  while (!moves.empty()) {
    const auto part = moves.first(moves.size() < group ? moves.size() : group);
    if (!copy(part)) break;
    for (const block_move& each : part)
      moved_to[to_index(each.source)] = each.destination;
    relocate(part, moved_to);
    for (const block_move& each : part)
      moved_to[to_index(each.source)] = null_block;
    done += part.size();
    moves = moves.subspan(part.size());
  }
  return done;
}

template <class Traits>
result<void> paged_allocator<Traits>::pin(block_id block) noexcept {
  if (block == null_block || to_index(block) > pool_.block_capacity())
    return refusal(errc::no_such_block, to_index(block), to_index(block), max_physical_blocks());
  if (!pins_.can_add(block)) return refusal(errc::too_many_shares, to_index(block), 1, pins_.of(block));
  if (const auto shared = pool_.share(block); !shared) return shared.error();
  pins_.add(block);
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::limit_commits(sequence_id sequence, std::uint64_t tokens) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  at(sequence).limit = tokens;
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::unpin(block_id block) noexcept {
  if (block == null_block || to_index(block) > pool_.block_capacity())
    return refusal(errc::no_such_block, to_index(block), to_index(block), max_physical_blocks());
  if (pins_.of(block) == 0) return refusal(errc::double_free, to_index(block), 0, 0);
  pins_.remove(block);
  static_cast<void>(pool_.release(block));  // cannot fail: the pin held this reference
  trim_idle();
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::check_moves(std::span<const block_move> moves,
                                                  detail::fixed_array<block_id>& seen) const noexcept {
  failure refused{};
  std::size_t looked = 0;
  const auto is_block = [&](block_id block) noexcept {
    return block != null_block && to_index(block) < seen.size();
  };
  // Marks each named block, because a block may be named at most once.
  for (; looked < moves.size(); ++looked) {
    const auto [source, destination] = moves[looked];
    const bool is_known = is_block(source) && is_block(destination) && source != destination;
    if (!is_known || seen[to_index(source)] != null_block || seen[to_index(destination)] != null_block ||
        !pool_.record(source).is_active() || pool_.record(destination).is_active() ||
        pool_.record(destination).is_cached() || pool_.is_retiring(destination) || pins_.of(source) != 0) {
      refused = refusal(errc::stale_plan, to_index(source), to_index(destination), looked);
      break;
    }
    seen[to_index(source)] = source;
    seen[to_index(destination)] = destination;
  }
  for (std::size_t i = 0; i < looked; ++i)
    seen[to_index(moves[i].source)] = seen[to_index(moves[i].destination)] = null_block;
  if (refused.code != errc::ok) return refused;
  return {};
}

/// Updates everything that names a source to name its destination.
template <class Traits>
void paged_allocator<Traits>::relocate(std::span<const block_move> moves,
                                       const detail::fixed_array<block_id>& moved_to) noexcept {
  pool_.relocate(moves);
  for (const auto [source, destination] : moves) {
    const std::uint32_t tokens = index_.tokens(source);
    index_.stage(index_.key(source), destination);
    if (index_.contains(source)) {
      index_.erase(source);
      index_.insert(destination, tokens);
      followers_.move(source, destination);
    }
    verification_.move(source, destination);
    if constexpr (moving_observer<observer_type>) observer_.on_moved(source, destination);
  }
  const auto renamed = [&](block_id& block) noexcept {
    if (const block_id now = moved_to[to_index(block)]; now != null_block) block = now;
  };
  const auto reparented = [&](chain_link& link) noexcept {
    const block_id now = moved_to[to_index(link.block)];
    if (now != null_block && verification_.link(link.block) == link) link = verification_.link(now);
  };
  verification_.each_parent(reparented);
  deferred_.each_block(renamed);
  for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
    record& sequence = records_[slot];
    if (!sequence.alive()) continue;
    reparented(sequence.parent);
    for (std::uint32_t i = 0; i < sequence.blocks; ++i)
      renamed(row(slot)[i]);
  }
}

}  // namespace v0
}  // namespace llmmem
