/// @file
/// `share_packer`: moves shares of a split between the memory of a cache and messages; `host_packer` for host
/// memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_memory.hpp>
#include <llmmem/paging/kv_split.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// One layer of a share, and the memory of this rank that has or gets it.
struct layer_share {
  const paging::kv_split_plan& plan;
  const paging::kv_share& share;
  std::uint32_t layer = 0;
  token_range range{};
  const kv_memory& memory;
  std::span<const block_id> table{};
};

/// What the slots of a packer must hold.
struct packer_needs {
  std::uint64_t message_bytes = 0;  ///< of the largest message
  std::uint64_t vectors = 0;        ///< of the share with the most
  metadata_source metadata{};       ///< for staging that the packer takes itself
  std::string name{};               ///< in error texts
};

/// Packs shares into the slots of its staging memory, and unpacks them from there. `kv_handover` sends and
/// receives the slots.
///
/// - `reserve(needs)`: called once, before all others. Throws if not even one slot fits.
/// - `slots()`, and `slot(i)`: the host may access a slot while no copy of it is under way.
/// - `pack(what, i, after)`: begins after the fence `after`; its fence passes when the share is in the slot.
/// - `unpack(what, i)`: its fence passes when the share is in the memory, and after all fences before it.
/// - `wait(fence)`: returns when it has passed, or the failure that it reports.
/// - A call that fails has begun nothing.
template <class P>
concept share_packer = std::movable<P> && fence<typename P::fence_type> &&
                       requires(P& packer, const P& seen, const packer_needs& needs, const layer_share& what,
                                std::uint32_t i, const typename P::fence_type& after) {
                         packer.reserve(needs);
                         { seen.slots() } noexcept -> std::same_as<std::uint32_t>;
                         { seen.staging_bytes() } noexcept -> std::same_as<std::uint64_t>;
                         { packer.slot(i) } noexcept -> std::same_as<std::span<std::byte>>;
                         {
                           packer.pack(what, i, after)
                         } noexcept -> std::same_as<result<typename P::fence_type>>;
                         { packer.unpack(what, i) } noexcept -> std::same_as<result<typename P::fence_type>>;
                         { seen.wait(after) } noexcept -> std::same_as<result<void>>;
                       };

/// Packs from host memory, on the calling thread, through one slot.
///
/// @par Thread safety   one thread at a time.
class host_packer {
 public:
  using fence_type = host_fence;

  void reserve(const packer_needs& needs) {
    staging_ = {needs.message_bytes, needs.metadata, "kv_handover: staging"};
  }
  [[nodiscard]] std::uint32_t slots() const noexcept { return 1; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return staging_.size(); }
  [[nodiscard]] std::span<std::byte> slot(std::uint32_t) noexcept LLMMEM_LIFETIMEBOUND {
    return {staging_.data(), staging_.size()};
  }
  result<host_fence> pack(const layer_share& what, std::uint32_t i, const host_fence& after) noexcept {
    after.wait();
    return host_fence_of(what.plan.pack(what.share, what.layer, what.range, what.memory, what.table,
                                        slot(i).first(bytes_of(what))));
  }
  result<host_fence> unpack(const layer_share& what, std::uint32_t i) noexcept {
    return host_fence_of(what.plan.unpack(what.share, what.layer, what.range, what.memory, what.table,
                                          slot(i).first(bytes_of(what))));
  }
  [[nodiscard]] result<void> wait(const host_fence& fence) const noexcept {
    fence.wait();
    return {};
  }

 private:
  [[nodiscard]] static std::size_t bytes_of(const layer_share& what) noexcept {
    return static_cast<std::size_t>(what.plan.bytes(what.share, what.range));
  }
  [[nodiscard]] static result<host_fence> host_fence_of(const result<void>& done) noexcept {
    if (!done) return done.error();
    return host_fence{};
  }

  detail::fixed_array<std::byte> staging_{};
};
static_assert(share_packer<host_packer>);

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
