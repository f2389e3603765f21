/// @file
/// Which checkpoints stay: `retention_policy` and the usual one.
#pragma once

#include <llmmem/checkpoint/names.hpp>
#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Says whether a checkpoint stays. Asked after a commit, of whole checkpoints, the newest first; whatever it
/// says, the newest two stay.
template <class R>
concept retention_policy = requires(R& policy, const checkpoint_id& id, std::uint64_t newer) {
  { policy.keeps(id, newer) } -> std::convertible_to<bool>;
};

/// The last few, and of those before one every so many steps, for looking back.
struct keep_last_and_every {
  std::uint64_t last = 2;
  std::uint64_t every_steps = 0;  ///< those whose step is a multiple of it; 0: none

  /// @param newer  how many whole checkpoints are newer.
  [[nodiscard]] constexpr bool keeps(const checkpoint_id& id, std::uint64_t newer) const noexcept {
    return newer < last || (every_steps != 0 && id.step % every_steps == 0);
  }
};

static_assert(retention_policy<const keep_last_and_every>);

/// A retention policy of any type, by reference: it outlives this.
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
