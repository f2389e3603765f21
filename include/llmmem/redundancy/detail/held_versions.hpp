/// @file
/// `redundant_replica`: the versions that a rank holds, and which of them is valid.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/kept_damage.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/replica_types.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {

struct testing_access;

namespace detail {

/// A rank's knowledge of earlier versions, for the case that no rank holds any. The highest value of any rank
/// is true. Messages carry these numbers.
enum class known_past : std::uint32_t { unknown, never_kept, forgotten, kept };

/// The committed version, which is valid, and the pending one, which is not valid until it is committed. Each
/// may be absent; the next version that is kept reuses the memory of an absent one.
///
/// @par Complexity      O(1), except `begin_recovery`: O(parts), plus a pass over all bytes if the version is
///                      doubted.
/// @par Thread safety   one thread at a time. @par Errors   none.
class held_versions {
 public:
  /// @name Two phases
  /// @{
  /// Returns a version for the caller to fill; drops the pending one.
  [[nodiscard]] kept_version& begin() noexcept {
    has_pending_ = false;
    return pending_;
  }
  /// Makes the filled version the pending one.
  void finish() noexcept {
    pending_.seal();
    has_pending_ = true;
  }
  /// Makes the pending version the committed one. @return false if there is none.
  bool commit() noexcept;
  void drop() noexcept { has_pending_ = false; }
  /// Drops both versions, and their memory.
  void forget() noexcept;
  /// @}

  /// Returns the committed version, or null.
  [[nodiscard]] const kept_version* committed() const noexcept {
    return has_committed_ ? &committed_ : nullptr;
  }
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept {
    return has_committed_ ? std::optional(committed_.facts().version) : std::nullopt;
  }
  /// Adds the memory of both versions to the counters.
  void count(replica_stats& stats) const noexcept;

  /// @name When an epoch begins
  /// @{ Drops the pending version, and the committed one if its facts are damaged: these are short, and all
  /// ranks rely on them, so they are verified each time.
  ///
  /// Most bytes of the version are never requested, and the receiver verifies those that are sent. If a
  /// recovery from this version has begun before, it may have failed because of damage, so all bytes are
  /// verified here.
  /// @param epoch  in the first epoch, this rank knows the whole past.
  /// @return the damaged places of the committed version if it is doubted; otherwise no places
  [[nodiscard]] kept_damage begin_recovery(std::uint64_t epoch);
  /// Drops the committed version, because the ranks continue from another one.
  void discard_committed() noexcept { has_committed_ = false; }
  [[nodiscard]] known_past past() const noexcept { return past_; }
  void learn(known_past past) noexcept { past_ = std::max(past_, past); }
  /// @}

 private:
  friend struct llmmem::testing_access;

  kept_version committed_{};
  kept_version pending_{};
  bool has_committed_ = false;
  bool has_pending_ = false;
  bool is_doubted_ = false;  // a recovery from the committed version has begun before
  known_past past_ = known_past::unknown;
};

inline bool held_versions::commit() noexcept {
  if (!has_pending_) return false;
  std::swap(committed_, pending_);
  has_committed_ = true;
  has_pending_ = false;
  is_doubted_ = false;
  past_ = known_past::kept;
  return true;
}

inline void held_versions::forget() noexcept {
  committed_ = {};
  pending_ = {};
  has_committed_ = false;
  has_pending_ = false;
  past_ = known_past::forgotten;
}

inline void held_versions::count(replica_stats& stats) const noexcept {
  for (const kept_version* const each : {&committed_, &pending_}) {
    stats.own_bytes += each->own_capacity();
    stats.kept_bytes += each->kept_capacity();
  }
}

inline kept_damage held_versions::begin_recovery(std::uint64_t epoch) {
  has_pending_ = false;
  if (has_committed_ && !committed_.tells_the_truth()) has_committed_ = false;
  kept_damage damage;
  if (has_committed_ && is_doubted_) damage = committed_.damage();
  is_doubted_ = true;
  if (epoch == 1 && past_ == known_past::unknown) past_ = known_past::never_kept;
  return damage;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
