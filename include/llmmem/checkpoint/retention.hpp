/// @file
/// Which checkpoints are kept: the concept `retention_policy`, and `keep_last_and_every`.
#pragma once

#include <llmmem/checkpoint/names.hpp>
#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Decides whether a checkpoint is kept. After a commit, the folder asks it about complete checkpoints,
/// newest first; the newest two are always kept.
template <class R>
concept retention_policy = requires(R& policy, const checkpoint_id& id, std::uint64_t newer) {
  { policy.keeps(id, newer) } -> std::convertible_to<bool>;
};

/// Keeps the last few checkpoints, and earlier ones whose step is a multiple of a number.
struct keep_last_and_every {
  std::uint64_t last = 2;
  std::uint64_t every_steps = 0;  ///< keeps checkpoints whose step is a multiple of this; 0: none

  /// @param newer  the number of newer complete checkpoints.
  [[nodiscard]] constexpr bool keeps(const checkpoint_id& id, std::uint64_t newer) const noexcept {
    return newer < last || (every_steps != 0 && id.step % every_steps == 0);
  }
};

static_assert(retention_policy<const keep_last_and_every>);

/// A reference to a retention policy of any type, which must outlive it.
class retention_ref {
 public:
  template <class R>
    requires(!std::same_as<R, retention_ref> && retention_policy<const R>)
  retention_ref(const R& policy) noexcept  // NOLINT(google-explicit-constructor): as a reference
      : policy_(&policy), keeps_([](const void* of, const checkpoint_id& id, std::uint64_t newer) -> bool {
          return static_cast<const R*>(of)->keeps(id, newer);
        }) {}

  [[nodiscard]] bool keeps(const checkpoint_id& id, std::uint64_t newer) const {
    return keeps_(policy_, id, newer);
  }

 private:
  const void* policy_;
  bool (*keeps_)(const void* policy, const checkpoint_id& id, std::uint64_t newer);
};

}  // namespace v0
}  // namespace llmmem
