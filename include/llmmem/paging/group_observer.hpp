/// @file
/// Observers of caches with several groups of layers: notified, with the group, of what is cached and
/// dropped.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A type whose `noexcept` calls report which contents of which group become cached and which are dropped. An
/// observer with `on_evicted` or `on_invalidated` receives those losses separately. `on_invalidated` receives
/// the null block if the cache no longer holds the first wrong chunk of a sequence: that chunk is reported in
/// either case. `event_log` is such an observer; `each_group` makes one from any `cache_observer`.
template <class O>
concept group_cache_observer =
    std::movable<O> && requires(O& observer, const stored_block& stored, block_id block, const block_key& key,
                                std::size_t group) {
      { observer.on_cached(stored, group) } noexcept;
      { observer.on_dropped(block, key, group) } noexcept;
    };

/// An observer that also receives each block that a `match` shares.
template <class O>
concept group_sharing_observer =
    group_cache_observer<O> &&
    requires(O& observer, block_id block, const block_key& key, std::size_t group) {
      { observer.on_shared(block, key, group) } noexcept;
    };

/// An observer that ignores all events, at no cost.
struct ignore_group_cache_events {
  void on_cached(const stored_block&, std::size_t) const noexcept {}
  void on_dropped(block_id, const block_key&, std::size_t) const noexcept {}
  void on_cleared(std::uint64_t) const noexcept {}
};

static_assert(group_cache_observer<ignore_group_cache_events>);

/// One `cache_observer` per group, notified of that group alone: for example to keep metrics by group.
///
///     using observer = llmmem::each_group<llmmem::cache_metrics<>>;
///     observer by_group(groups.size(), [&](std::size_t) {
///       return llmmem::cache_metrics<>({.blocks = llmmem::block_ids(options) - 1});
///     });
///
/// @par Thread safety   that of `Observer`.
/// @par Errors   the constructor throws `length_error`, and what `make` throws.
template <cache_observer Observer>
class each_group {
 public:
  /// @param groups  1 to `max_layer_groups`, the number of groups of the cache.
  /// @param make  called with each group's number, returns its observer.
  template <class Make>
  each_group(std::size_t groups, Make&& make) {
    static_assert(std::is_invocable_r_v<Observer, Make&, std::size_t>, "make(group) must return an Observer");
    if (groups == 0 || groups > max_layer_groups) {
      throw length_error("each_group: " + std::to_string(groups) + " groups; use 1 to " +
                         std::to_string(max_layer_groups));
    }
    for (std::size_t g = 0; g < groups; ++g)
      all_[g].emplace(make(g));
  }

  void on_cached(const stored_block& stored, std::size_t group) noexcept { all_[group]->on_cached(stored); }
  void on_dropped(block_id block, const block_key& key, std::size_t group) noexcept {
    all_[group]->on_dropped(block, key);
  }
  void on_evicted(block_id block, const block_key& key, std::size_t group) noexcept {
    detail::tell_loss<detail::loss::evicted>(*all_[group], block, key);
  }
  void on_invalidated(block_id block, const block_key& key, std::size_t group) noexcept {
    if constexpr (!invalidating_observer<Observer>) {
      if (block == null_block) return;  // contents that the cache no longer holds
    }
    detail::tell_loss<detail::loss::invalidated>(*all_[group], block, key);
  }
  void on_shared(block_id block, const block_key& key, std::size_t group) noexcept {
    if constexpr (sharing_observer<Observer>) all_[group]->on_shared(block, key);
  }

  void on_cleared(std::uint64_t epoch) noexcept
    requires clearing_observer<Observer>
  {
    for (std::optional<Observer>& each : all_) {
      if (each) each->on_cleared(epoch);
    }
  }

  /// Returns the observer of one group. @pre the group exists.
  [[nodiscard]] Observer& of(std::size_t group) noexcept { return *all_[group]; }
  [[nodiscard]] const Observer& of(std::size_t group) const noexcept { return *all_[group]; }

 private:
  std::array<std::optional<Observer>, max_layer_groups> all_{};
};

static_assert(group_sharing_observer<each_group<ignore_cache_events>>);

}  // namespace v0
}  // namespace llmmem
