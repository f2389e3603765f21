/// @file
/// `journaled`: a cache that records every operation and its outcome, so that a replay reaches the same
/// state.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_digest.hpp>
#include <llmmem/paging/detail/journal_fences.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/detail/journal_reads.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/detail/journal_writer.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// A `paged_allocator` or a `hybrid_allocator` with a journal: the same operations, each recorded with its
/// arguments and its outcome.
///
///     struct traced : llmmem::paged_traits { using fence = llmmem::recorded_fence; };
///     llmmem::paging::journaled<llmmem::paged_allocator<traced>, llmmem::memory_journal> cache(
///         {.blocks = 4096}, llmmem::memory_journal(64 << 20), "lru");
///     auto seq = cache.create().value();                       // and so on, as with the allocator
///     ...
///     auto same = replay<...>(cache.sink().bytes(), factory);  // journal_replay.hpp
///
/// **The same state.** An allocator's state follows from its options and its operations, with one exception:
/// the moments at which fences passed. So the journal keeps the real fences and gives the allocator
/// `recorded_fence`s. Before each operation the journal checks which fences have passed, and records them.
///
/// A `hybrid_allocator` may keep any fence that it was given, so its journal keeps the fences that have not
/// passed: 8 x `max_sequences` of them, consecutive equal ones counted once. A call with one fence more is
/// refused with `errc::deferred_full`, has changed nothing, and is not recorded.
///
/// `batch_scheduler`, `export_sequence` and `import_sequence` take this object in place of its allocator.
///
/// **Pressure.** `options.pressure` may call this object, as it may call the allocator. The journal records
/// these operations inside the operation that caused the pressure, and a replay repeats them there.
///
/// **Contents.** A journal has every token and key, and the hash seed: it is as secret as the prompts.
///
/// **Format.** Eight bytes `llmmem J`, then frames: length, payload, CRC-32C over both and all previous
/// frames. Numbers are LEB128 varints, keys and digests little-endian. Frame 0 is the header, with the
/// format's version (2 for a `paged_allocator`, 3 for a `hybrid_allocator`); each further frame is a record.
/// The journal ends at the first frame that is truncated, changed, missing or out of place.
///
/// @tparam Cache  a `paged_allocator` or `hybrid_allocator` whose `Traits::fence` is `recorded_fence`.
/// @tparam Sink   a `journal_sink`.
/// @tparam Fence  the fence of the engine's kernels, trivially copyable.
///
/// @par Complexity   O(1) per byte in addition to the allocator: about 8 bytes per record, 1 to 5 per token,
///   16 per key. No heap allocation after construction other than the sink's.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Moves   never.
/// @par Errors   as the allocator. When the sink refuses bytes, recording ends permanently (`recording()`),
///   and the cache continues: a failing journal fails no request.
template <class Cache, journal_sink Sink, fence Fence = host_fence>
class journaled : public detail::journal_reads<journaled<Cache, Sink, Fence>, Cache> {
 public:
  using options_type = typename detail::types_of<Cache>::options;
  using append_type = typename detail::types_of<Cache>::grown;  ///< the result of `append`
  using leave_type = typename detail::types_of<Cache>::leave;   ///< the watermark of `append_batch`

  using reads = detail::journal_reads<journaled, Cache>;
  using reads::is_hybrid;

  static_assert(std::is_same_v<typename Cache::fence_type, recorded_fence>,
                "Traits::fence of a journaled cache must be recorded_fence");

  /// @param configuration  for the header: the policies' names, or anything else a replay needs.
  /// @param policies  the arguments of the allocator's constructor after the options: eviction (of a
  ///   `hybrid_allocator`: what makes it), observer.
  template <class... Policies>
  journaled(const options_type& options, Sink sink, std::string_view configuration = {},
            Policies&&... policies)
      : pressure_(pressure_of(options)),
        cache_(watched(options), std::forward<Policies>(policies)...),
        fences_(std::uint64_t{options.max_sequences} * detail::types_of<Cache>::fences, options.metadata),
        journal_(std::move(sink), format) {
    journal_.header(options, configuration);
  }
  journaled(const journaled&) = delete;
  journaled& operator=(const journaled&) = delete;

  // The operations, see `paged_allocator` and `hybrid_allocator`

  result<sequence_id> create(const prefix_context& context = {}, const request_hints& hints = {}) noexcept {
    return run(journal_op::create, {.context = context, .hints = hints}, [&]() noexcept {
      const auto made = cache_.create(context, hints);
      if (made) owner_ = made->owner;
      return made;
    });
  }
  result<sequence_id> fork(sequence_id parent) noexcept {
    return run(journal_op::fork, {.sequence = parent}, [&]() noexcept { return cache_.fork(parent); });
  }
  result<void> release(sequence_id sequence) noexcept {
    return run(journal_op::release, {.sequence = sequence},
               [&]() noexcept { return cache_.release(sequence); });
  }
  result<void> release_after(sequence_id sequence, const Fence& after) noexcept {
    const bool waits = blocks_held(sequence) != 0;
    return run_after(journal_op::release_after, {.sequence = sequence}, after,
                     [&](const recorded_fence& point) noexcept {
                       const auto done = cache_.release_after(sequence, point);
                       return std::pair(done, done && waits);
                     });
  }
  std::uint64_t collect() noexcept {
    return *run(journal_op::collect, {}, [&]() noexcept { return result<std::uint64_t>(cache_.collect()); });
  }

  result<match_result> match(sequence_id sequence, std::span<const token_id> tokens) noexcept {
    return run(journal_op::match, {.sequence = sequence, .tokens = tokens},
               [&]() noexcept { return cache_.match(sequence, tokens); });
  }
  result<match_result> match(sequence_id sequence, const keyed_blocks& prompt) noexcept
    requires(!is_hybrid)
  {
    return run(journal_op::match_keys, {.sequence = sequence, .keyed = prompt},
               [&]() noexcept { return cache_.match(sequence, prompt); });
  }
  result<append_type> append(sequence_id sequence, std::span<const token_id> tokens) noexcept {
    return run(journal_op::append, {.sequence = sequence, .tokens = tokens},
               [&]() noexcept { return cache_.append(sequence, tokens); });
  }
  result<append_type> extend(sequence_id sequence, std::uint64_t count) noexcept {
    return run(journal_op::extend, {.sequence = sequence, .number = count},
               [&]() noexcept { return cache_.extend(sequence, count); });
  }
  result<void> name_tokens(sequence_id sequence, std::span<const token_id> tokens) noexcept {
    return run(journal_op::name_tokens, {.sequence = sequence, .tokens = tokens},
               [&]() noexcept { return cache_.name_tokens(sequence, tokens); });
  }
  result<void> append_batch(std::span<const growth> batch, std::span<append_type> out,
                            leave_type leave = {}) noexcept {
    detail::journal_arguments given{.extra = out.size(), .batch = batch};
    if constexpr (is_hybrid) {
      given.leave = leave;
    } else {
      given.number = leave;
    }
    interruptible now(*this, journal_op::append_batch, given);
    const auto done = cache_.append_batch(batch, out, leave);
    detail::journal_outcome came = detail::outcome_of(done);
    if (done) {
      if constexpr (is_hybrid) {
        came.grown = out;
      } else {
        came.batch = out;
      }
    }
    now.end(came);
    return done;
  }
  result<void> truncate(sequence_id sequence, std::uint64_t tokens) noexcept {
    return run(journal_op::truncate, {.sequence = sequence, .number = tokens},
               [&]() noexcept { return cache_.truncate(sequence, tokens); });
  }
  result<void> truncate_after(sequence_id sequence, std::uint64_t tokens, const Fence& after) noexcept {
    return run_after(journal_op::truncate_after, {.sequence = sequence, .number = tokens}, after,
                     [&](const recorded_fence& point) noexcept {
                       const std::size_t before = blocks_held(sequence);
                       const auto done = cache_.truncate_after(sequence, tokens, point);
                       return std::pair(done, done && blocks_held(sequence) != before);
                     });
  }

  result<std::uint64_t> commit(sequence_id sequence) noexcept {
    return commit(sequence, cache_.tokens(sequence));
  }
  result<std::uint64_t> commit(sequence_id sequence, std::uint64_t written) noexcept {
    return run(journal_op::commit, {.sequence = sequence, .number = written},
               [&]() noexcept { return cache_.commit(sequence, written); });
  }
  result<std::uint64_t> commit(sequence_id sequence, const keyed_blocks& contents) noexcept
    requires(!is_hybrid)
  {
    return run(journal_op::commit_keys, {.sequence = sequence, .keyed = contents},
               [&]() noexcept { return cache_.commit(sequence, contents); });
  }
  result<std::uint64_t> deduplicate(sequence_id sequence) noexcept {
    return run(journal_op::deduplicate, {.sequence = sequence},
               [&]() noexcept { return cache_.deduplicate(sequence); });
  }
  result<std::uint64_t> deduplicate_after(sequence_id sequence, const Fence& after) noexcept {
    return run_after(journal_op::deduplicate_after, {.sequence = sequence}, after,
                     [&](const recorded_fence& point) noexcept {
                       const auto done = cache_.deduplicate_after(sequence, point);
                       return std::pair(done, done && *done != 0);
                     });
  }

  result<void> retain(sequence_id sequence, token_range range, retention keep) noexcept {
    return run(journal_op::retain, {.sequence = sequence, .hints = {.keep = keep}, .range = range},
               [&]() noexcept { return cache_.retain(sequence, range, keep); });
  }
  void advance(std::uint64_t now) noexcept {
    static_cast<void>(run(journal_op::advance, {.number = now}, [&]() noexcept {
      cache_.advance(now);
      return result<void>();
    }));
  }
  std::uint64_t expect(std::span<const token_id> tokens, const prefix_context& context,
                       std::uint64_t next_use) noexcept {
    return *run(journal_op::expect, {.context = context, .tokens = tokens, .number = next_use},
                [&]() noexcept { return result<std::uint64_t>(cache_.expect(tokens, context, next_use)); });
  }
  std::uint64_t expect(const keyed_blocks& prompt, const prefix_context& context,
                       std::uint64_t next_use) noexcept
    requires(!is_hybrid)
  {
    return *run(journal_op::expect_keys, {.context = context, .keyed = prompt, .number = next_use},
                [&]() noexcept { return result<std::uint64_t>(cache_.expect(prompt, context, next_use)); });
  }

  std::uint64_t drop_idle() noexcept {
    return *run(journal_op::drop_idle, {},
                [&]() noexcept { return result<std::uint64_t>(cache_.drop_idle()); });
  }
  result<std::uint64_t> reset(std::uint64_t epoch) noexcept {
    return run(journal_op::reset, {.number = epoch}, [&]() noexcept { return cache_.reset(epoch); });
  }
  std::uint64_t reset() noexcept { return reset(cache_.epoch() + 1).value(); }
  result<std::uint64_t> invalidate(block_id block) noexcept {
    return run(journal_op::invalidate_block, {.number = to_index(block)},
               [&]() noexcept { return cache_.invalidate(block); });
  }
  result<std::uint64_t> invalidate(sequence_id sequence, std::uint64_t from) noexcept {
    return run(journal_op::invalidate, {.sequence = sequence, .number = from},
               [&]() noexcept { return cache_.invalidate(sequence, from); });
  }
  result<std::uint64_t> remove(sequence_id sequence, token_range range) noexcept {
    return run(journal_op::remove, {.sequence = sequence, .range = range},
               [&]() noexcept { return cache_.remove(sequence, range); });
  }
  result<std::uint64_t> remove_after(sequence_id sequence, token_range range, const Fence& after) noexcept {
    return run_after(journal_op::remove_after, {.sequence = sequence, .range = range}, after,
                     [&](const recorded_fence& point) noexcept {
                       const auto done = cache_.remove_after(sequence, range, point);
                       return std::pair(done, done && *done != 0);
                     });
  }
  result<void> pin(block_id block) noexcept {
    return run(journal_op::pin, {.number = to_index(block)}, [&]() noexcept { return cache_.pin(block); });
  }
  result<void> unpin(block_id block) noexcept {
    return run(journal_op::unpin, {.number = to_index(block)},
               [&]() noexcept { return cache_.unpin(block); });
  }
  result<void> limit_commits(sequence_id sequence, std::uint64_t tokens) noexcept {
    return run(journal_op::limit_commits, {.sequence = sequence, .number = tokens},
               [&]() noexcept { return cache_.limit_commits(sequence, tokens); });
  }
  /// To a number of blocks; of a `hybrid_allocator`, to a budget in bytes.
  result<std::uint64_t> resize(std::uint64_t size) noexcept {
    return run(journal_op::resize, {.number = size}, [&]() noexcept { return cache_.resize(size); });
  }
  template <move_copier Copy>
    requires(!is_hybrid)
  result<std::uint64_t> compact(std::span<const block_move> moves, Copy&& copy, std::size_t group = 0) {
    const detail::journal_arguments given{.number = group, .moves = moves};
    interruptible now(*this, journal_op::compact, given);
    const auto done = cache_.compact(moves, copy, group);
    now.end(detail::outcome_of(done));
    return done;
  }

  // The operations that only a `hybrid_allocator` has

  result<void> read_until(sequence_id sequence, const Fence& after) noexcept
    requires is_hybrid
  {
    return run_after(journal_op::read_until, {.sequence = sequence}, after,
                     [&](const recorded_fence& point) noexcept {
                       return std::pair(cache_.read_until(sequence, point), true);
                     });
  }
  result<void> limit_releases(sequence_id sequence, std::uint64_t tokens) noexcept
    requires is_hybrid
  {
    return run(journal_op::limit_releases, {.sequence = sequence, .number = tokens},
               [&]() noexcept { return cache_.limit_releases(sequence, tokens); });
  }
  std::uint64_t evacuate(std::span<group_copy> moves) noexcept
    requires is_hybrid
  {
    return *run(journal_op::evacuate, {.number = moves.size()},
                [&]() noexcept { return result<std::uint64_t>(cache_.evacuate(moves)); });
  }
  /// Recorded, because it releases blocks that no later token reads.
  result<bool> shortage(sequence_id sequence, std::uint64_t count, std::span<group_shortage> out) noexcept
    requires is_hybrid
  {
    return run_shortage(journal_op::shortage, {.sequence = sequence, .number = count, .extra = out.size()},
                        out, [&]() noexcept { return cache_.shortage(sequence, count, out); });
  }
  result<bool> shortage(std::span<const growth> batch, std::span<group_shortage> out) noexcept
    requires is_hybrid
  {
    return run_shortage(journal_op::batch_shortage, {.extra = out.size(), .batch = batch}, out,
                        [&]() noexcept { return cache_.shortage(batch, out); });
  }

  // The journal

  /// Records a digest of the whole state, for a replay to compare. O(blocks).
  void checkpoint() noexcept {
    static_cast<void>(run(journal_op::checkpoint, {.number = detail::state_digest(cache_)},
                          []() noexcept { return result<void>(); }));
  }

  /// Whether the journal holds every operation so far. Once false, it stays false.
  [[nodiscard]] bool recording() const noexcept { return journal_.recording(); }
  /// The number of records that reached the sink.
  [[nodiscard]] std::uint64_t records() const noexcept { return journal_.records(); }
  [[nodiscard]] std::uint64_t unrecorded() const noexcept { return journal_.unrecorded(); }
  [[nodiscard]] Sink& sink() noexcept { return journal_.sink(); }
  [[nodiscard]] const Sink& sink() const noexcept { return journal_.sink(); }

  // The state of the cache

  /// Gives access to all calls that change nothing. Those that an engine makes in each step, such as `cost`
  /// and `tokens`, can be made on this object, too.
  [[nodiscard]] const Cache& cache() const noexcept { return cache_; }
  [[nodiscard]] typename Cache::observer_type& observer() noexcept { return cache_.observer(); }

 private:
  class interruptible;
  static constexpr detail::journal_format format = detail::format_of<Cache>;

  template <class Operation>
  auto run(journal_op op, const detail::journal_arguments& given, Operation&& operation) noexcept {
    interruptible now(*this, op, given);
    const auto done = operation();
    now.end(detail::outcome_of(done));
    return done;
  }

  /// @param operation  takes the recorded fence; returns its result, and whether blocks wait for the fence.
  template <class Operation>
  auto run_after(journal_op op, detail::journal_arguments given, const Fence& after,
                 Operation&& operation) noexcept {
    if constexpr (is_hybrid) {
      interruptible now(*this, op, given);
      using outcome = decltype(operation(recorded_fence{}).first);
      const auto point = fences_.keep(after);
      if (!point) return outcome(failure{errc::deferred_full, 0, 1, 0, cache_.name().c_str()});
      given.extra = *point;
      const outcome done = operation(recorded_fence{fences_.passed(), given.extra}).first;
      now.end(detail::outcome_of(done));
      return done;
    } else {
      given.extra = fences_.issue();
      interruptible now(*this, op, given);
      const auto [done, waits] = operation(recorded_fence{fences_.passed(), given.extra});
      if (waits) fences_.wait_for(after, given.extra);
      now.end(detail::outcome_of(done));
      return done;
    }
  }

  template <class Operation>
  result<bool> run_shortage(journal_op op, const detail::journal_arguments& given,
                            std::span<group_shortage> out, Operation&& operation) noexcept {
    interruptible now(*this, op, given);
    const result<bool> done = operation();
    now.end({.why = done.error(), .numbers = {*done ? 1U : 0U}, .lacks = out});
    return done;
  }

  [[nodiscard]] std::size_t blocks_held(sequence_id sequence) const noexcept {
    if constexpr (is_hybrid) {
      return 0;  // the fence is kept in any case
    } else {
      return cache_.blocks(sequence).size();
    }
  }
  [[nodiscard]] static pressure_callback pressure_of(const options_type& options) noexcept {
    if constexpr (is_hybrid) {
      return {};  // `shortage` reports what each group lacks
    } else {
      return options.pressure;
    }
  }
  [[nodiscard]] options_type watched(options_type options) noexcept;
  static bool on_pressure(void* context, const block_shortage& shortage) noexcept;

  /// @param encode  called with the encoder of the record.
  template <class Encode>
  void write(Encode&& encode) noexcept {
    journal_.record(owner_, encode);
  }

  pressure_callback pressure_;
  Cache cache_;
  detail::journal_fences<Fence> fences_;
  detail::journal_writer<Sink> journal_;
  std::uint32_t owner_ = 0;
  std::uint32_t depth_ = 0;
  interruptible* current_ = nullptr;
};
}  // namespace paging

template <class Cache, journal_sink Sink, fence Fence = host_fence>
using journaled [[deprecated("its name is paging::journaled")]] = paging::journaled<Cache, Sink, Fence>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/journal_body.hpp>
