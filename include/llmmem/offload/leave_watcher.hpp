/// @file
/// `offload::leave_watcher`: what is called when blocks leave the first tier.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// Called when a block leaves its slot of a first tier, because it is evicted, withdrawn, or did not arrive:
/// before other contents are written there. A pool whose blocks other processes read without asking takes
/// them out of its index in time.
///
/// @par Thread safety   called in the thread of the tiers, within their functions; it must call none of them.
struct leave_watcher {
  /// @param name  `kv_tiers::name_of` the block
  void (*left)(void* context, const block_key& name) noexcept = nullptr;
  void* context = nullptr;
};

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
