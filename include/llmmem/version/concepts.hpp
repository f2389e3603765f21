/// @file
/// The concepts of versioned state: version numbers, the views that pin versions, and `retain_policy`.
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

/// The number of a version: 1 for the first published, then one higher each time, never reused.
enum class version_id : std::uint64_t {};

/// No version: the result of `newest` and `oldest` when there is none.
inline constexpr version_id no_version{0};

/// Returns a version's number, to print or to compute with.
[[nodiscard]] constexpr std::uint64_t to_number(version_id version) noexcept {
  return static_cast<std::uint64_t>(version);
}

/// Statistics of a store of complete versions.
struct version_stats {
  std::uint64_t published = 0;
  std::uint64_t refused_publishes = 0;
  std::uint64_t pins = 0;          ///< granted, including snapshots
  std::uint64_t refused_pins = 0;  ///< for versions no longer kept, or never published
  std::uint64_t pinned = 0;        ///< pins held now
  std::uint64_t dropped = 0;       ///< versions no longer kept
  std::uint64_t live = 0;          ///< versions that can be pinned now
  std::uint64_t max_live = 0;      ///< the most that were live at once

  friend constexpr bool operator==(const version_stats&, const version_stats&) noexcept = default;
};

/// A version that stays unchanged while this object lives. Empty when default constructed or moved from.
///
/// @par Thread safety   one thread at a time per object; several threads may hold the same version, each in
///      its own object. Any thread may release it.
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

  /// @pre the object is not empty.
  [[nodiscard]] const value_type& operator*() const noexcept { return store_->value_of(slot_); }
  [[nodiscard]] const value_type* operator->() const noexcept { return &store_->value_of(slot_); }

  [[nodiscard]] version_id version() const noexcept { return store_ == nullptr ? no_version : version_; }

  /// Releases the version now. Does nothing when empty.
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

/// Decides which versions of a `T` stay, and how: `R::state<T>`, also named `versioned<T, R>`, keeps them.
/// All states have the same reading calls:
///
/// - `pin(version)`   a view of that version, which stays while the view lives; `errc::version_expired`, or
///                    `errc::no_such_version` if it was never published.
/// - `snapshot()`     a view of the newest.
/// - `newest()`, `oldest()`   numbers, or `no_version`; the numbers between them may have gaps.
/// - `live()`         how many versions can be pinned.
/// - `stats()`, and `audit()`: one line for each broken invariant.
///
/// States are written in one of two ways. A state of complete versions has `publish(T)` and
/// `publish_in_place(writer)`. A state that is written in place (`copy_on_write`) has `write(offset, bytes)`,
/// and its `snapshot()` makes a version.
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
