/// @file
/// Runs one journal under one other configuration. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_replay.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/super_page_types.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The numbers of the matches, from 1, that look for each key: the future that MIN needs.
class key_uses {
 public:
  explicit key_uses(std::span<const std::byte> bytes) {
    std::uint64_t matches = 0;
    for (journal_reader reader(bytes); reader.next();) {
      if (reader.record().op != journal_op::match_keys) continue;
      ++matches;
      for (const block_key& key : reader.record().keys)
        uses_.emplace_back(key.low, matches);
    }
    std::ranges::sort(uses_);
  }

  /// Returns the first use of `key` after match number `now`.
  [[nodiscard]] std::uint64_t next(const block_key& key, std::uint64_t now) const {
    const auto next = std::ranges::upper_bound(uses_, std::pair(key.low, now));
    return next == uses_.end() || next->first != key.low ? access_hint::never : next->second;
  }

 private:
  std::vector<std::pair<std::uint64_t, std::uint64_t>> uses_;  // key and match, ascending
};

/// A sequence of the journal, and its counterpart here. It may hold more tokens than originally: surplus
/// tokens that a match found are *ahead*, and are subtracted from the next append. Over groups of layers it
/// may hold fewer: tokens that a match did not find are *behind*, and are appended with the next ones, as the
/// engine would have appended them. A step of their own would release what leaves the windows.
struct what_if_sequence {
  std::uint32_t generation = 0;  // in the journal
  sequence_id now{};
  bool is_known = false;
  bool is_skipped = false;
  std::uint64_t tokens = 0;        // tokens that it held in the journal
  std::vector<token_id> ahead;     // the surplus tokens, if it matched by tokens
  std::uint64_t untold_ahead = 0;  // their number, if it matched by keys
  std::vector<token_id> behind;
};

template <class Cache>
class what_if_run {
 public:
  static constexpr bool is_hybrid = journaled_hybrid_cache<Cache>;

  /// @param resizes  whether to repeat the journal's `resize` calls.
  /// @param uses  the future uses, for a policy that needs them; or null.
  what_if_run(Cache& cache, std::uint64_t& passed, std::uint32_t sequences, bool resizes,
              const key_uses* uses)
      : cache_(&cache), passed_(&passed), known_(sequences), uses_(uses), resizes_(resizes) {}

  void run(std::span<const std::byte> bytes) {
    std::vector<owned_record> open;
    for (reader_type reader(bytes); reader.next();) {
      owned_record& next = reader.record();
      if (next.is_open) {
        open.push_back(std::move(next));
      } else if (next.op == journal_op::outcome) {
        if (open.empty()) continue;
        open.back().why = next.why;
        open.back().numbers = next.numbers;
        if (next.closes == open.back().op) apply(open.back());
        open.pop_back();
      } else {
        apply(next);
      }
    }
  }

  [[nodiscard]] std::uint64_t sequences() const noexcept { return sequences_; }
  [[nodiscard]] std::uint64_t skipped() const noexcept { return skipped_; }
  [[nodiscard]] std::uint64_t requested_tokens() const noexcept { return requested_tokens_; }

 private:
  using reader_type = paging::basic_journal_reader<typename types_of<Cache>::header>;

  /// An operation that was refused originally is skipped, because the engine reacted to the refusal.
  void apply(owned_record& then) {
    release_dead(then);
    if (then.why.code != errc::ok) return;
    const journal_arguments& given = then.given;
    switch (then.op) {
      case journal_op::create:
        return begin(then, cache_->create(given.context, given.hints), nullptr);
      case journal_op::advance:
        return cache_->advance(given.number);
      case journal_op::expect:
        cache_->expect(given.tokens, given.context, given.number);
        return;
      case journal_op::expect_keys:
        if constexpr (!is_hybrid) cache_->expect(given.keyed, given.context, given.number);
        return;
      case journal_op::resize:
        if (resizes_) static_cast<void>(cache_->resize(given.number));
        return;
      case journal_op::evacuate:
        if constexpr (is_hybrid) {
          moves_.resize(static_cast<std::size_t>(std::min(given.number, cache_->pool().block_ids())));
          cache_->evacuate(moves_);
        }
        return;
      case journal_op::collect:
        cache_->collect();
        return;
      case journal_op::drop_idle:
        cache_->drop_idle();
        return;
      case journal_op::reset:
        static_cast<void>(cache_->reset(given.number));
        return;
      case journal_op::fences_passed:
        *passed_ = std::max(*passed_, given.number);
        return;
      case journal_op::append_batch:
        if (grows_together(then)) return;
        for (const paging::growth& each : then.batch) {
          what_if_sequence* const grown = find(each.sequence);
          if (grown == nullptr) continue;
          append(*grown, each.tokens);
          if (each.unknown_tokens != 0) extend(*grown, each.unknown_tokens);
        }
        return;
      default:
        if (what_if_sequence* const which = find(given.sequence)) apply(then, *which);
    }
  }

  /// Over groups of layers, a step or a `shortage` first releases what no later token of its sequences reads,
  /// even if blocks run short then: later operations may have got those blocks.
  void release_dead([[maybe_unused]] const owned_record& then) {
    if constexpr (is_hybrid) {
      const error_code why = then.why.code;
      if (why != errc::ok && why != errc::out_of_group_blocks && why != errc::deferred_full) return;
      const auto release_of = [this](sequence_id id) noexcept {
        const what_if_sequence* const of = find(id);
        if (of == nullptr || of->is_skipped || !of->ahead.empty()) return;
        std::array<group_shortage, max_layer_groups> lacks{};
        static_cast<void>(cache_->shortage(of->now, 0, std::span(lacks).first(cache_->groups().size())));
      };
      switch (then.op) {
        case journal_op::append:
        case journal_op::extend:
        case journal_op::shortage:
          return release_of(then.given.sequence);
        case journal_op::append_batch:
        case journal_op::batch_shortage:
          for (const paging::growth& each : then.batch)
            release_of(each.sequence);
          return;
        default:
          return;
      }
    }
  }
  void apply(owned_record& then, what_if_sequence& which) {
    const journal_arguments& given = then.given;
    const bool ends = then.op == journal_op::release || then.op == journal_op::release_after;
    if (which.is_skipped) {
      if (then.op == journal_op::fork) begin(then, failure{errc::out_of_sequences}, &which);
      if (ends) which = {};
      return;
    }
    const recorded_fence after{passed_, given.extra};
    if (needs_all_tokens(then.op)) catch_up(which);
    if (which.is_skipped) return apply(then, which);
    switch (then.op) {
      case journal_op::fork:
        return begin(then, cache_->fork(which.now), &which);
      case journal_op::read_until:
        if constexpr (is_hybrid) static_cast<void>(cache_->read_until(which.now, after));
        return;
      case journal_op::limit_releases:
        if constexpr (is_hybrid) static_cast<void>(cache_->limit_releases(which.now, given.number));
        return;
      case journal_op::release_after:
        if (!cache_->release_after(which.now, after)) release(which.now);
        which = {};
        return;
      case journal_op::release:
        release(which.now);
        which = {};
        return;
      case journal_op::match:
        return match(then, which);
      case journal_op::match_keys:
        return match_keys(then, which);
      case journal_op::append:
        return append(which, given.tokens);
      case journal_op::extend:
        return extend(which, given.number);
      case journal_op::name_tokens:
        static_cast<void>(cache_->name_tokens(which.now, given.tokens));
        return;
      case journal_op::limit_commits:
        static_cast<void>(cache_->limit_commits(which.now, given.number));
        return;
      case journal_op::truncate:
        return truncate(which, given.number, recorded_fence{});
      case journal_op::truncate_after:
        return truncate(which, given.number, after);
      case journal_op::invalidate:
        static_cast<void>(cache_->invalidate(which.now, given.number));
        return;
      case journal_op::remove:
        return remove(which, given.range, recorded_fence{});
      case journal_op::remove_after:
        return remove(which, given.range, after);
      case journal_op::commit:
        static_cast<void>(cache_->commit(which.now, given.number));
        return;
      case journal_op::commit_keys:
        if constexpr (!is_hybrid) static_cast<void>(cache_->commit(which.now, foretold(given.keyed)));
        return;
      case journal_op::deduplicate:
        static_cast<void>(cache_->deduplicate(which.now));
        return;
      case journal_op::deduplicate_after:
        static_cast<void>(cache_->deduplicate_after(which.now, after));
        return;
      case journal_op::retain:
        static_cast<void>(cache_->retain(which.now, given.range, given.hints.keep));
        return;
      default:  // compactions, pins and invalidations name blocks of the original run
        return;
    }
  }

  void begin(const owned_record& then, const result<sequence_id>& made, const what_if_sequence* parent) {
    if (then.numbers[0] >= known_.size()) return;  // cannot occur in a journal that a cache wrote
    what_if_sequence fresh;
    if (parent != nullptr) fresh = *parent;
    fresh.generation = static_cast<std::uint32_t>(then.numbers[1]);
    fresh.now = *made;
    fresh.is_known = true;
    fresh.is_skipped = !made;
    ++sequences_;
    skipped_ += made ? 0U : 1U;
    what_if_sequence& place = known_[static_cast<std::size_t>(then.numbers[0])];
    if (place.is_known && !place.is_skipped) release(place.now);
    place = std::move(fresh);
  }

  [[nodiscard]] what_if_sequence* find(sequence_id then) noexcept {
    if (then.owner != journal_owner || then.slot >= known_.size()) return nullptr;
    what_if_sequence& found = known_[then.slot];
    return found.is_known && found.generation == then.generation ? &found : nullptr;
  }

  /// Releases a sequence, if necessary as if no kernel read its blocks.
  void release(sequence_id now) noexcept {
    if (cache_->release(now)) return;
    if constexpr (is_hybrid) {
      static_cast<void>(cache_->read_until(now, recorded_fence{}));
      static_cast<void>(cache_->release(now));
    }
  }

  /// Whether an operation works on tokens that a match may not have found here; `append` brings them itself.
  [[nodiscard]] static bool needs_all_tokens(journal_op op) noexcept {
    switch (op) {
      case journal_op::append:
      case journal_op::release:
      case journal_op::release_after:
      case journal_op::read_until:
      case journal_op::limit_releases:
      case journal_op::limit_commits:
      case journal_op::retain:
      case journal_op::shortage:
        return false;
      default:
        return true;
    }
  }

  template <class T>
  bool kept(what_if_sequence& which, const result<T>& done) {
    if (done) return true;
    release(which.now);
    which.is_skipped = true;
    ++skipped_;
    return false;
  }

  void match(const owned_record& then, what_if_sequence& which) {
    const std::uint64_t found_then = std::min<std::uint64_t>(then.numbers[0], then.tokens.size());
    requested_tokens_ += then.tokens.size();
    const auto hit = cache_->match(which.now, then.given.tokens);
    if (!kept(which, hit)) return;
    which.tokens = found_then;
    const auto from = static_cast<std::ptrdiff_t>(std::min(found_then, hit->tokens));
    const auto to = static_cast<std::ptrdiff_t>(std::max(found_then, hit->tokens));
    if (hit->tokens < found_then) {
      which.behind.assign(then.tokens.begin() + from, then.tokens.begin() + to);
      if constexpr (!is_hybrid) catch_up(which);
    } else {
      which.ahead.assign(then.tokens.begin() + from, then.tokens.begin() + to);
    }
  }

  /// Appends the tokens that a match did not find.
  void catch_up(what_if_sequence& which) {
    if (which.is_skipped || which.behind.empty()) return;
    kept(which, cache_->append(which.now, which.behind));
    which.behind.clear();
  }

  void match_keys(const owned_record& then, what_if_sequence& which) {
    if constexpr (!is_hybrid) {
      ++matches_;
      requested_tokens_ += then.given.keyed.tokens;
      const auto hit = cache_->match(which.now, foretold(then.given.keyed));
      if (!kept(which, hit)) return;
      which.tokens = then.numbers[0];
      if (hit->tokens < which.tokens) {
        kept(which, cache_->extend(which.now, which.tokens - hit->tokens));
      } else {
        which.untold_ahead = hit->tokens - which.tokens;
      }
    }
  }

  void append(what_if_sequence& which, std::span<const token_id> tokens) {
    if (which.is_skipped || tokens.empty()) return;
    if (!which.behind.empty()) {
      which.tokens += tokens.size();
      which.behind.insert(which.behind.end(), tokens.begin(), tokens.end());
      return catch_up(which);
    }
    const std::size_t same = std::min(which.ahead.size(), tokens.size());
    const auto end = which.ahead.begin() + static_cast<std::ptrdiff_t>(same);
    if (which.untold_ahead != 0 || !std::equal(which.ahead.begin(), end, tokens.begin())) {
      if (!fall_back(which)) return;
    } else {
      which.ahead.erase(which.ahead.begin(), end);
      which.tokens += same;
      tokens = tokens.subspan(same);
    }
    which.tokens += tokens.size();
    if (!tokens.empty()) kept(which, cache_->append(which.now, tokens));
  }

  /// Over groups of layers, repeats a batch as a whole, because one growth leaves the pages that the others
  /// need. Returns false, and has grown none, if a sequence holds other tokens than the original's, or if the
  /// batch does not fit.
  bool grows_together([[maybe_unused]] const owned_record& then) {
    if constexpr (is_hybrid) {
      batch_.clear();
      for (const paging::growth& each : then.batch) {
        const what_if_sequence* const grown = find(each.sequence);
        if (grown == nullptr || grown->is_skipped) continue;
        if (!grown->ahead.empty() || !grown->behind.empty()) return false;
        batch_.push_back(each);
        batch_.back().sequence = grown->now;
      }
      grown_.resize(batch_.size());
      if (!cache_->append_batch(batch_, grown_, then.given.leave)) return false;
      for (const paging::growth& each : then.batch) {
        what_if_sequence* const grown = find(each.sequence);
        if (grown != nullptr && !grown->is_skipped) grown->tokens += each.tokens.size() + each.unknown_tokens;
      }
      return true;
    } else {
      return false;
    }
  }
  void extend(what_if_sequence& which, std::uint64_t count) {
    if (which.is_skipped || count == 0) return;
    catch_up(which);
    if (which.is_skipped) return;
    if (!which.ahead.empty() && !fall_back(which)) return;
    const std::uint64_t same = std::min(which.untold_ahead, count);
    which.untold_ahead -= same;
    which.tokens += count;
    if (count != same) kept(which, cache_->extend(which.now, count - same));
  }

  /// Returns to the original position, because the next tokens differ from the surplus ones. Where a group of
  /// layers cannot, the sequence is dropped.
  bool fall_back(what_if_sequence& which) {
    which.ahead.clear();
    which.untold_ahead = 0;
    return kept(which, cache_->truncate(which.now, which.tokens));
  }

  void truncate(what_if_sequence& which, std::uint64_t tokens, const recorded_fence& after) {
    which.tokens = tokens;
    which.ahead.clear();
    which.untold_ahead = 0;
    if (cache_->truncate_after(which.now, tokens, after)) return;
    kept(which, cache_->truncate(which.now, tokens));
  }

  void remove(what_if_sequence& which, token_range range, const recorded_fence& after) {
    if (!fall_back(which)) return;
    if (!cache_->remove_after(which.now, range, after)) static_cast<void>(cache_->remove(which.now, range));
    which.tokens = cache_->tokens(which.now);
  }

  /// Returns the same keys with hints about their next uses.
  [[nodiscard]] keyed_blocks foretold(const keyed_blocks& told) {
    if (uses_ == nullptr) return told;
    hints_.clear();
    for (std::size_t i = 0; i < told.keys.size(); ++i) {
      hints_.push_back(told.hints.empty() ? access_hint{} : told.hints[i]);
      hints_.back().next_use = uses_->next(told.keys[i], matches_);
    }
    return {.keys = told.keys, .tokens = told.tokens, .hints = hints_};
  }

  Cache* cache_;
  std::uint64_t* passed_;
  std::vector<what_if_sequence> known_;  // by slot in the journal
  const key_uses* uses_;
  std::vector<access_hint> hints_;
  bool resizes_;
  std::vector<group_copy> moves_;
  std::vector<paging::growth> batch_;
  std::vector<hybrid_append> grown_;
  std::uint64_t matches_ = 0;
  std::uint64_t sequences_ = 0;
  std::uint64_t skipped_ = 0;
  std::uint64_t requested_tokens_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
