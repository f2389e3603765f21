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
[[nodiscard]] result<void> settled(const Fence& fence,
                                   const char* where = "kv_tiers: a copy of the mover") noexcept {
  if constexpr (requires { fence.settled(); }) {
    return fence.settled();
  } else {
    try {
      fence.wait();
      return {};
    } catch (...) {  // for example, the device is lost, and the outcome of the copy unknown
      return failure{.code = errc::completion_lost, .where = where};
    }
  }
}

/// The record of a block on its way down.
template <class Fence>
struct pending_save {
  block_key key{};  ///< its key in the cache
  std::uint32_t group = 0;
  block_id block = null_block;
  slot_id slot = no_slot;  ///< its slot in the first tier, which the save fills
  bool is_pinned = false;  ///< whether the block is pinned in the cache; evicted contents are not, because
                           ///< their block already has another use
  bool has_begun = false;
  bool has_failed = false;
  Fence after{};
  Fence fence{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
