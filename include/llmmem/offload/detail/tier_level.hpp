/// @file
/// One tier beneath a cache: its bytes, its slots, and the transfers to and from it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/offload/detail/tier_medium.hpp>
#include <llmmem/offload/detail/tier_slots.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The load, and its block, that wait for a read; generation 0: none does.
struct load_cookie {
  std::uint32_t load = 0;
  std::uint32_t generation = 0;
  std::uint32_t entry = 0;
};

/// One tier: its bytes, its slots by group, and its transfers from and to the first tier.
template <class Tier>
struct tier_level {
  using medium_type = tier_medium<typename Tier::space_type, typename Tier::codec_type>;
  using slots_type = tier_slots<typename Tier::eviction_type>;

  struct transfer {
    typename medium_type::copy_type copy{};
    std::uint32_t group = 0;
    slot_id upper = no_slot;  ///< slot in the first tier
    slot_id lower = no_slot;  ///< here
    bool goes_down = false;
    bool for_room = false;  ///< the upper slot must become free afterwards
    bool demotes = false;   ///< the block moves to the next tier, by way of a reserved slot of the first one
    bool has_arrived = false;  ///< of a demotion: its bytes are in the reserved slot, and right
    slot_id source = no_slot;  ///< of a demotion's write: the block's slot in the tier above
    load_cookie waiting{};
  };
  struct owed_write {
    std::uint32_t group = 0;
    slot_id upper = no_slot;
  };

  tier_level(const Tier& tier, const slot_regions& regions, std::size_t groups,
             const kv_tiers_options& options, typename medium_type::coding_type coding)
      : medium(*tier.space, regions, groups, std::move(coding)),
        down(tier.down),
        transfers(options.max_transfers, options.metadata, "kv_tiers: transfers"),
        owed(std::uint64_t{options.max_transfers} * 4, options.metadata, "kv_tiers: writes to come") {
    slots.reserve(groups);
    for (std::size_t g = 0; g < groups; ++g) {
      slots.emplace_back(regions[g].slots, tier.make_eviction(slot_count{regions[g].slots}, options.metadata),
                         options.metadata);
    }
  }

  medium_type medium;
  offload::store_policy down;
  std::vector<slots_type> slots;
  fixed_array<transfer> transfers;
  std::size_t transfer_count = 0;
  fixed_array<owed_write> owed;  // writes to this tier that have not begun: a ring
  std::size_t owed_first = 0;
  std::size_t owed_count = 0;
  std::array<std::uint64_t, max_layer_groups> demoting{};  // slots here whose blocks move to the next tier
  // Slots of the first tier through which blocks pass from here to the next tier, and that none uses now.
  std::array<std::vector<slot_id>, max_layer_groups> passage;
  std::uint64_t quiet_until = 0;
  offload::kv_tier_stats counted{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
