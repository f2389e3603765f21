/// @file
/// `tier_link`: the observer through which a cache reports evicted and wrong blocks to its tiers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// Is notified when a cache loses contents. The cache makes these calls while it changes, so an
/// implementation must not change the cache.
class loss_listener {
 public:
  loss_listener() = default;
  loss_listener(const loss_listener&) = delete;
  loss_listener& operator=(const loss_listener&) = delete;

  /// The cache evicts contents; they remain in the block during the call.
  virtual void evicted(block_id block, const block_key& key, std::size_t group) noexcept = 0;
  /// The contents are wrong, and so are all contents computed from them.
  virtual void invalidated(const block_key& key, std::size_t group) noexcept = 0;
  /// All contents are outdated, because the cache begins another epoch.
  virtual void cleared() noexcept = 0;

 protected:
  ~loss_listener() = default;
};

/// The observer of a cache that has tiers. While no tiers are attached, each loss costs one branch.
///
///     struct my_traits : llmmem::paged_traits { using observer = llmmem::offload::tier_link; };
///
/// Combine it with other observers by `paging::observers<event_log, offload::tier_link>`.
class tier_link {
 public:
  template <class... Group>
  void on_cached(const stored_block&, Group...) const noexcept {}
  void on_dropped(block_id, const block_key&, std::size_t = 0) const noexcept {}
  void on_evicted(block_id block, const block_key& key, std::size_t group = 0) const noexcept {
    if (listener_ != nullptr) listener_->evicted(block, key, group);
  }
  void on_invalidated(block_id, const block_key& key, std::size_t group = 0) const noexcept {
    if (listener_ != nullptr) listener_->invalidated(key, group);
  }
  void on_cleared(std::uint64_t) const noexcept {
    if (listener_ != nullptr) listener_->cleared();
  }

  /// Replaces the listener; null: reports nothing. The constructor of `kv_tiers` attaches the tiers, and its
  /// destructor attaches null, so a cache has at most one `kv_tiers`.
  void attach(loss_listener* listener) noexcept { listener_ = listener; }
  [[nodiscard]] bool is_attached() const noexcept { return listener_ != nullptr; }

 private:
  loss_listener* listener_ = nullptr;
};

static_assert(cache_observer<tier_link> && evicting_observer<tier_link> && invalidating_observer<tier_link>);

}  // namespace offload

namespace detail {

template <class Observer>
struct link_finder {
  static constexpr bool has_link = std::is_same_v<Observer, offload::tier_link>;
  [[nodiscard]] static offload::tier_link& of(Observer& observer) noexcept { return observer; }
};
template <class... Observers>
struct link_finder<paging::observers<Observers...>> {
  static constexpr std::size_t count =
      (std::size_t{0} + ... + (std::is_same_v<Observers, offload::tier_link> ? 1U : 0U));
  static constexpr bool has_link = count == 1;

  [[nodiscard]] static consteval std::size_t place() noexcept {
    std::size_t i = 0;
    std::size_t found = 0;
    ((std::is_same_v<Observers, offload::tier_link> ? (found = i++) : i++), ...);
    return found;
  }
  [[nodiscard]] static offload::tier_link& of(paging::observers<Observers...>& all) noexcept {
    return all.template get<place()>();
  }
};

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
