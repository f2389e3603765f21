/// @file
/// A block on its way from the cache to the first tier.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/errors.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Waits for a copy of a mover, and returns its outcome if the fence reports one.
template <class Fence>
[[nodiscard]] result<void> settled(const Fence& fence) noexcept {
  if constexpr (requires { fence.settled(); }) {
    return fence.settled();
  } else {
    try {
      fence.wait();
      return {};
    } catch (...) {  // a device that is lost, say: what it did is not known
      return failure{.code = errc::completion_lost, .where = "kv_tiers: a copy of the mover"};
    }
  }
}

/// What is remembered of it.
template <class Fence>
struct pending_save {
  block_key key{};  ///< by which the cache finds it
  std::uint32_t group = 0;
  block_id block = null_block;
  slot_id slot = no_slot;  ///< of the first tier, filling
  bool is_pinned = false;  ///< in the cache: of evicted contents the block is another's already
  bool has_begun = false;
  bool has_failed = false;
  Fence after{};
  Fence fence{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
