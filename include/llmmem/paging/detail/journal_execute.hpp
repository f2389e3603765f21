/// @file
/// Repeats a record's operation. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

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

/// Executes records, one after the other.
template <class Cache>
class record_executor {
 public:
  /// @param passed  the last point that has passed; `fences_passed` sets it.
  record_executor(Cache& cache, std::uint64_t& passed) noexcept : cache_(&cache), passed_(&passed) {}

  /// The owner of the cache's handles; 0 before the first `create`.
  [[nodiscard]] std::uint32_t owner() const noexcept { return owner_; }

  /// Executes `again` and returns its outcome.
  /// @param results  the outcome may refer to them.
  [[nodiscard]] journal_outcome execute(owned_record& again, journal_results<Cache>& results) {
    Cache& cache = *cache_;
    const journal_arguments& given = again.given;
    const sequence_id sequence = real(given.sequence);
    const recorded_fence after{passed_, given.extra};
    switch (again.op) {
      case journal_op::create: {
        const auto made = cache.create(given.context, given.hints);
        if (made) owner_ = made->owner;
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
      case journal_op::append:
        return grown(cache.append(sequence, given.tokens), results);
      case journal_op::extend:
        return grown(cache.extend(sequence, given.number), results);
      case journal_op::append_batch:
        return append_batch(again, results);
      case journal_op::name_tokens:
        return outcome_of(cache.name_tokens(sequence, given.tokens));
      case journal_op::pin:
        return outcome_of(cache.pin(block_id{static_cast<std::uint32_t>(given.number)}));
      case journal_op::unpin:
        return outcome_of(cache.unpin(block_id{static_cast<std::uint32_t>(given.number)}));
      case journal_op::limit_commits:
        return outcome_of(cache.limit_commits(sequence, given.number));
      case journal_op::truncate:
        return outcome_of(cache.truncate(sequence, given.number));
      case journal_op::truncate_after:
        return outcome_of(cache.truncate_after(sequence, given.number, after));
      case journal_op::commit:
        return outcome_of(cache.commit(sequence, given.number));
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
      case journal_op::resize:
        return outcome_of(cache.resize(given.number));
      case journal_op::remove:
        return outcome_of(cache.remove(sequence, given.range));
      case journal_op::remove_after:
        return outcome_of(cache.remove_after(sequence, given.range, after));
      case journal_op::fences_passed:
        if (given.number > *passed_) *passed_ = given.number;
        return {};
      default:
        return execute_own(again, results);
    }
  }

 private:
  [[nodiscard]] sequence_id real(sequence_id recorded) const noexcept {
    if (recorded.owner == journal_owner) recorded.owner = owner_;
    return recorded;
  }

  template <class Grown>
  [[nodiscard]] journal_outcome grown(const Grown& done, journal_results<Cache>& results) {
    results.grown.assign(1, *done);
    journal_outcome came = outcome_of(done);
    if constexpr (journaled_hybrid_cache<Cache>) came.grown = results.grown;
    return came;
  }

  [[nodiscard]] journal_outcome append_batch(owned_record& again, journal_results<Cache>& results) {
    bind(again);
    // The cache refuses an output of the wrong length by its length alone, so one entry too many is enough.
    results.grown.assign(few(again.given.extra, again.batch.size()), {});
    const auto done = [&] {
      if constexpr (journaled_hybrid_cache<Cache>) {
        return cache_->append_batch(again.batch, results.grown, again.given.leave);
      } else {
        return cache_->append_batch(again.batch, results.grown, again.given.number);
      }
    }();
    journal_outcome came = outcome_of(done);
    if (done) {
      if constexpr (journaled_hybrid_cache<Cache>) {
        came.grown = results.grown;
      } else {
        came.batch = results.grown;
      }
    }
    if (came.why.code == errc::size_mismatch && again.given.extra != again.batch.size())
      came.why.found = again.given.extra;
    return came;
  }

  void bind(owned_record& again) const noexcept {
    for (paging::growth& each : again.batch)
      each.sequence = real(each.sequence);
  }
  /// A recorded length, as long as it is no longer than one more than `most`.
  [[nodiscard]] static std::size_t few(std::uint64_t recorded, std::uint64_t most) noexcept {
    return static_cast<std::size_t>(recorded <= most ? recorded : most + 1);
  }

  /// The operations that only one of the allocators has.
  [[nodiscard]] journal_outcome execute_own(owned_record& again, journal_results<Cache>& results) {
    const journal_arguments& given = again.given;
    const sequence_id sequence = real(given.sequence);
    if constexpr (journaled_hybrid_cache<Cache>) {
      const auto lacking = [&](const result<bool>& is_short) {
        journal_outcome came{.why = is_short.error(), .numbers = {*is_short ? 1U : 0U}};
        came.lacks = results.lacks;
        if (came.why.code == errc::size_mismatch) came.why.wanted = given.extra;
        return came;
      };
      results.lacks.assign(few(given.extra, max_layer_groups), {});
      switch (again.op) {
        case journal_op::read_until:
          return outcome_of(cache_->read_until(sequence, recorded_fence{passed_, given.extra}));
        case journal_op::limit_releases:
          return outcome_of(cache_->limit_releases(sequence, given.number));
        case journal_op::evacuate:
          // No call moves more than all blocks, so a longer output makes no difference.
          results.moves.resize(few(given.number, cache_->pool().block_ids()));
          return outcome_of(result<std::uint64_t>(cache_->evacuate(results.moves)));
        case journal_op::shortage:
          return lacking(cache_->shortage(sequence, given.number, results.lacks));
        case journal_op::batch_shortage:
          bind(again);
          return lacking(cache_->shortage(std::span<const paging::growth>(again.batch), results.lacks));
        default:
          return {};
      }
    } else {
      switch (again.op) {
        case journal_op::match_keys:
          return outcome_of(cache_->match(sequence, given.keyed));
        case journal_op::commit_keys:
          return outcome_of(cache_->commit(sequence, given.keyed));
        case journal_op::expect_keys:
          return outcome_of(result<std::uint64_t>(cache_->expect(given.keyed, given.context, given.number)));
        case journal_op::compact:
          return outcome_of(cache_->compact(given.moves,
                                            repeated_copier(again.numbers.empty() ? 0 : again.numbers[0]),
                                            static_cast<std::size_t>(given.number)));
        default:
          return {};
      }
    }
  }

  Cache* cache_;
  std::uint64_t* passed_;
  std::uint32_t owner_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
