/// @file
/// What keeps versions of a piece of state: version numbers, the views that pin them, and `retain_policy`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Number of a version: 1 for the first that is published, then one more each time, never used twice.
enum class version_id : std::uint64_t {};

/// No version: what `newest` and `oldest` say where there is none.
inline constexpr version_id no_version{0};

/// The number in it, to print or compute with.
[[nodiscard]] constexpr std::uint64_t to_number(version_id version) noexcept {
  return static_cast<std::uint64_t>(version);
}

/// What a store of whole versions has done.
struct version_stats {
  std::uint64_t published = 0;
  std::uint64_t refused_publishes = 0;
  std::uint64_t pins = 0;          ///< given, snapshots among them
  std::uint64_t refused_pins = 0;  ///< of versions that are gone, or never were
  std::uint64_t pinned = 0;        ///< held now
  std::uint64_t dropped = 0;       ///< versions gone
  std::uint64_t live = 0;          ///< versions that can be pinned now
  std::uint64_t most_live = 0;     ///< the most there ever were at once

  friend constexpr bool operator==(const version_stats&, const version_stats&) noexcept = default;
};

/// A version that stays, as it is, for as long as this lives. Empty when default constructed or moved from.
///
/// @par Thread safety   one thread at a time each; several of one version may be in several threads. It may
///      be released by another thread than the one that pinned.
template <class Store>
class pinned_version {
 public:
  using value_type = typename Store::value_type;

  pinned_version() noexcept = default;
  pinned_version(pinned_version&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)), slot_(other.slot_), version_(other.version_) {}
  pinned_version& operator=(pinned_version&& other) noexcept {
    if (this != &other) {
      release();
      store_ = std::exchange(other.store_, nullptr);
      slot_ = other.slot_;
      version_ = other.version_;
    }
    return *this;
  }
  ~pinned_version() { release(); }

  [[nodiscard]] explicit operator bool() const noexcept { return store_ != nullptr; }

  /// @pre it is not empty.
  [[nodiscard]] const value_type& operator*() const noexcept { return store_->value_of(slot_); }
  [[nodiscard]] const value_type* operator->() const noexcept { return &store_->value_of(slot_); }

  [[nodiscard]] version_id version() const noexcept { return store_ == nullptr ? no_version : version_; }

  /// Lets go of it now. Nothing when empty.
  void release() noexcept {
    if (store_ != nullptr) std::exchange(store_, nullptr)->unpin(slot_);
  }

 private:
  friend Store;
  pinned_version(Store* store, std::uint32_t slot, version_id version) noexcept
      : store_(store), slot_(slot), version_(version) {}

  Store* store_ = nullptr;
  std::uint32_t slot_ = 0;
  version_id version_ = no_version;
};

/// Says which versions of a `T` stay, and how they are kept: `R::state<T>` keeps them, and `versioned<T, R>`
/// is its name. All of them read alike:
///
/// - `pin(version)`   a view of that version, which stays for as long as the view lives;
///                    `errc::version_gone`, or `errc::no_such_version` when there was never one.
/// - `snapshot()`     a view of the newest.
/// - `newest()`, `oldest()`   numbers, or `no_version`; what lies between may have gaps.
/// - `live()`         how many versions can be pinned.
/// - `stats()`, and `audit()`: one line for each invariant that is broken.
///
/// They are written in one of two ways. A state of whole versions has `publish(T)` and
/// `publish_in_place(writer)`; a state that is written where it lies (`copy_on_write`) has
/// `write(offset, bytes)`, and its `snapshot()` is what makes a version.
template <class R, class T>
concept retain_policy = requires(typename R::template state<T>& state,
                                 const typename R::template state<T>& seen, version_id version) {
  { state.pin(version) } noexcept -> std::same_as<result<typename R::template state<T>::pinned>>;
  { state.snapshot() } noexcept -> std::same_as<result<typename R::template state<T>::pinned>>;
  { seen.newest() } noexcept -> std::same_as<version_id>;
  { seen.oldest() } noexcept -> std::same_as<version_id>;
  { seen.live() } noexcept -> std::same_as<std::uint64_t>;
  seen.stats();
  { seen.audit() } -> std::same_as<std::vector<std::string>>;
};

}  // namespace v0
}  // namespace llmmem
