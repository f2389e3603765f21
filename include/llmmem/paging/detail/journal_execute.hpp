/// @file
/// Repeats a record's operation, and computes a digest of a cache's state. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns 64 bits computed from counts, blocks, keys and the order of free blocks: equal for caches made by
/// the same operations. O(blocks).
template <class Cache>
[[nodiscard]] std::uint64_t state_digest(const Cache& cache) noexcept {
  siphash_state<2, 4> state{hash_seed{}};
  std::uint64_t words = 0;
  const auto absorb = [&](std::uint64_t word) noexcept {
    state.absorb(word);
    ++words;
  };
  const paged_stats now = cache.stats();
  for (const std::uint64_t each : {now.sequences,
                                   now.tokens,
                                   now.table_blocks,
                                   now.blocks,
                                   now.active_blocks,
                                   now.idle_blocks,
                                   now.free_blocks,
                                   now.retiring_blocks,
                                   now.cached_blocks,
                                   now.deferred,
                                   now.matches,
                                   now.requested_blocks,
                                   now.hit_blocks,
                                   now.hit_tokens,
                                   now.partial_hits,
                                   now.stolen_blocks,
                                   now.allocations,
                                   now.evictions,
                                   now.evicting_allocations,
                                   now.registrations,
                                   now.duplicates,
                                   now.replaced,
                                   now.deduplicated,
                                   now.refused,
                                   now.copies,
                                   now.orphans,
                                   now.invalidated,
                                   now.unchained,
                                   cache.epoch()})
    absorb(each);
  for (std::uint64_t i = 1; i <= cache.pool().block_capacity(); ++i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    const auto& record = cache.pool().record(block);
    absorb((std::uint64_t{record.references()} << 32) | record.generation());
    absorb((std::uint64_t{cache.index().tokens(block)} << 32) | static_cast<std::uint64_t>(record.last()));
    if (!cache.index().contains(block)) continue;
    absorb(cache.index().key(block).low);
    absorb(cache.index().key(block).high);
  }
  cache.pool().for_each_free([&](block_id block) noexcept { absorb(to_index(block)); });
  return state.finish(0, 8 * words).low;
}

/// Accepts as many moves as the original compaction made.
class repeated_copier {
 public:
  explicit repeated_copier(std::uint64_t moves) noexcept : left_(moves) {}
  bool operator()(std::span<const block_move> moves) noexcept {
    if (moves.size() > left_) return false;
    left_ -= moves.size();
    return true;
  }

 private:
  std::uint64_t left_;
};

/// Executes `again` and returns its outcome. Handles have the owner `owner`.
/// @param owner  set by the first `create`.
/// @param passed  the last point that has passed, set by `fences_passed`.
/// @param grown  storage for a batch's results, to which the outcome refers.
template <class Cache>
[[nodiscard]] journal_outcome execute(Cache& cache, owned_record& again, std::uint32_t& owner,
                                      std::uint64_t& passed, std::vector<append_result>& grown) {
  const auto real = [&](sequence_id recorded) noexcept {
    if (recorded.owner == journal_owner) recorded.owner = owner;
    return recorded;
  };
  const journal_arguments& given = again.given;
  const sequence_id sequence = real(given.sequence);
  const recorded_fence after{&passed, given.extra};
  switch (again.op) {
    case journal_op::create: {
      const auto made = cache.create(given.context, given.hints);
      if (made) owner = made->owner;
      return outcome_of(made);
    }
    case journal_op::fork:
      return outcome_of(cache.fork(sequence));
    case journal_op::release:
      return outcome_of(cache.release(sequence));
    case journal_op::release_after:
      return outcome_of(cache.release_after(sequence, after));
    case journal_op::match:
      return outcome_of(cache.match(sequence, given.tokens));
    case journal_op::match_keys:
      return outcome_of(cache.match(sequence, given.keyed));
    case journal_op::append:
      return outcome_of(cache.append(sequence, given.tokens));
    case journal_op::extend:
      return outcome_of(cache.extend(sequence, given.number));
    case journal_op::name_tokens:
      return outcome_of(cache.name_tokens(sequence, given.tokens));
    case journal_op::pin:
      return outcome_of(cache.pin(block_id{static_cast<std::uint32_t>(given.number)}));
    case journal_op::unpin:
      return outcome_of(cache.unpin(block_id{static_cast<std::uint32_t>(given.number)}));
    case journal_op::limit_commits:
      return outcome_of(cache.limit_commits(sequence, given.number));
    case journal_op::append_batch: {
      for (paging::growth& each : again.batch)
        each.sequence = real(each.sequence);
      // The cache refuses an output of the wrong length by its length alone, so one entry too many is enough.
      const std::size_t most = again.batch.size() + 1;
      grown.assign(given.extra < most ? static_cast<std::size_t>(given.extra) : most, append_result{});
      journal_outcome came = outcome_of(cache.append_batch(again.batch, grown, given.number));
      if (came.why.code == errc::ok) came.batch = grown;
      if (came.why.code == errc::size_mismatch) came.why.found = given.extra;
      return came;
    }
    case journal_op::truncate:
      return outcome_of(cache.truncate(sequence, given.number));
    case journal_op::truncate_after:
      return outcome_of(cache.truncate_after(sequence, given.number, after));
    case journal_op::commit:
      return outcome_of(cache.commit(sequence, given.number));
    case journal_op::commit_keys:
      return outcome_of(cache.commit(sequence, given.keyed));
    case journal_op::deduplicate:
      return outcome_of(cache.deduplicate(sequence));
    case journal_op::deduplicate_after:
      return outcome_of(cache.deduplicate_after(sequence, after));
    case journal_op::retain:
      return outcome_of(cache.retain(sequence, given.range, given.hints.keep));
    case journal_op::advance:
      cache.advance(given.number);
      return {};
    case journal_op::expect:
      return outcome_of(result<std::uint64_t>(cache.expect(given.tokens, given.context, given.number)));
    case journal_op::expect_keys:
      return outcome_of(result<std::uint64_t>(cache.expect(given.keyed, given.context, given.number)));
    case journal_op::resize:
      return outcome_of(cache.resize(given.number));
    case journal_op::collect:
      return outcome_of(result<std::uint64_t>(cache.collect()));
    case journal_op::drop_idle:
      return outcome_of(result<std::uint64_t>(cache.drop_idle()));
    case journal_op::reset:
      return outcome_of(cache.reset(given.number));
    case journal_op::invalidate_block:
      return outcome_of(cache.invalidate(block_id{static_cast<std::uint32_t>(given.number)}));
    case journal_op::invalidate:
      return outcome_of(cache.invalidate(sequence, given.number));
    case journal_op::remove:
      return outcome_of(cache.remove(sequence, given.range));
    case journal_op::remove_after:
      return outcome_of(cache.remove_after(sequence, given.range, after));
    case journal_op::compact:
      return outcome_of(cache.compact(given.moves,
                                      repeated_copier(again.numbers.empty() ? 0 : again.numbers[0]),
                                      static_cast<std::size_t>(given.number)));
    case journal_op::fences_passed:
      if (given.number > passed) passed = given.number;
      return {};
    case journal_op::checkpoint:
    case journal_op::pressed:
    case journal_op::relieved:
    case journal_op::outcome:
      return {};
  }
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
