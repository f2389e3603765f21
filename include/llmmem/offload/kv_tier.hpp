/// @file
/// `kv_tier`: a memory below a paged cache, and the policy by which its blocks move to the next one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/tier.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The maximum number of tiers below a cache.
inline constexpr std::size_t max_kv_tiers = 4;

namespace offload {

/// When blocks move from one memory to the next: a value, made from the policies of `tiered_buffer`.
///
///     .store = write_through{}             // as soon as blocks are complete
///     .store = write_through_selective<2>{}  // when the second request uses them
///     .store = write_back{}                // when they are evicted above
///     .store = demoting<write_through>{}   // when complete, and again when evicted, if the tier below lacks
///                                          // them
struct store_policy {
  bool (*writes_at)(std::uint32_t uses) noexcept = &write_through::writes_at;
  bool on_eviction = false;  ///< whether a block that is evicted goes to the next memory, if that lacks it

  constexpr store_policy() noexcept = default;
  template <write_policy Write>
  constexpr store_policy(Write) noexcept
      : writes_at(&Write::writes_at),
        on_eviction(std::same_as<Write, write_back> || llmmem::detail::demotes<Write>()) {}
};

/// One memory below a cache, its budget, and the policy that picks the blocks to evict.
///
/// @tparam Space     the memory of the blocks; outlives the tiers. The host must be able to access the first
///                   tier's; a `persistent_file_space` keeps its blocks across restarts.
/// @tparam Eviction  `eviction_policy` over slots: one instance for each group of layers.
/// @tparam Codec     the form in which blocks are stored here: `plain_blocks`, or an `offload::block_codec`.
///                   The first tier is plain, because the mover reads it; of the others, the last may be
///                   lossy.
template <memory_space Space, eviction_policy Eviction = lru_eviction, class Codec = plain_blocks>
struct kv_tier {
  using space_type = Space;
  using eviction_type = Eviction;
  using codec_type = Codec;
  /// Makes the eviction policy of one group.
  using eviction_maker = Eviction (*)(slot_count slots, const metadata_source& source);

  Space* space = nullptr;
  std::uint64_t budget = 0;  ///< bytes; the constructor of `kv_tiers` takes all of it from the space
  /// When its blocks go to the next tier; unused in the last. For each tier between the first and the last
  /// that sends down what it evicts, the first tier reserves 1 to 16 slots of each group for these blocks to
  /// pass, so it needs at least one slot more than there are such tiers.
  store_policy down{};
  std::uint64_t granularity = 0;  ///< slots begin at multiples of these bytes; 0: 1 in memory, 4096 in files
  eviction_maker make_eviction = [](slot_count slots, const metadata_source& source) {
    return Eviction(slots, source);
  };
  Codec codec{};
  /// With a codec: the bytes of a slot as a share of a block's, above 0. A stored form that is longer is
  /// declined (`kv_tier_stats::too_long`), so choose the share from forms that were measured: the slots, and
  /// not the bytes written, are what fits into `budget`. 0: the codec's worst case, which declines none, and
  /// saves bytes on the link alone.
  double slot_share = 0;
  /// With a codec: blocks that are encoded, decoded or copied at once. Each takes a worst case of memory,
  /// which counts as metadata.
  std::uint32_t coding_buffers = 8;

  kv_tier(Space& where, std::uint64_t bytes, store_policy then = {}, Codec form = {}) noexcept
    requires std::default_initializable<Codec>
      : space(&where), budget(bytes), down(then), codec(std::move(form)) {}
  kv_tier(Space& where, std::uint64_t bytes, store_policy then, Codec form) noexcept
    requires(!std::default_initializable<Codec>)
      : space(&where), budget(bytes), down(then), codec(std::move(form)) {}
};

/// A tier under LRU.
template <class Space>
kv_tier(Space&, std::uint64_t) -> kv_tier<Space>;
/// The same, with a policy for blocks that move further down.
template <class Space, class Policy>
kv_tier(Space&, std::uint64_t, Policy) -> kv_tier<Space>;
/// The same, with a codec.
template <class Space, class Policy, class Codec>
kv_tier(Space&, std::uint64_t, Policy, Codec) -> kv_tier<Space, lru_eviction, Codec>;
/// The same, with `{}` as policy.
template <class Space, class Codec>
kv_tier(Space&, std::uint64_t, store_policy, Codec) -> kv_tier<Space, lru_eviction, Codec>;

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
