/// @file
/// The options, answers and counters of `kv_tiers`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/kv_tier.hpp>
#include <llmmem/offload/load_choice.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/meter.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace llmmem {
inline namespace v0 {

/// How `kv_tiers` is set up.
struct kv_tiers_options {
  offload::store_policy store{};  ///< when blocks go from the cache to the first tier
  /// The deadline of each load, in nanoseconds from `prepare_load` on. It is one deadline of the request, and
  /// never restarts: time in which the engine computes counts, also the kernels of layers that have arrived.
  ///
  /// `wait`, `issue`, `complete` and `has_arrived` look at the clock, after they have taken what has arrived
  /// by then, however late. Blocks that are still not in the first tier are late, and the engine computes
  /// them. Blocks in the first tier are copied to the cache, however long that takes.
  ///
  /// No thread begins reads: an engine that computes without calling `progress` leaves those that had no
  /// transfer or slot at first queued until its next call. Give the time until the first token must be there,
  /// less the time to compute the blocks. Default: no limit.
  std::uint64_t patience_ns = ~std::uint64_t{0};
  /// Transfers in flight at once: this many between the cache and the first tier, and this many again to and
  /// from each lower tier.
  std::uint32_t max_transfers = 256;
  std::uint32_t max_loads = 64;  ///< loads that are prepared and have not ended
  /// How many slots of the first tier stores must leave to loads, in each group. Default: a sixteenth.
  std::uint64_t load_headroom = ~std::uint64_t{0};
  /// A load copies layers together, until it moves this many bytes of each block at once: short runs cost
  /// more than their bytes. `wait` of a layer then also brings the layers after it that are copied with it.
  /// 1: each layer by itself.
  std::uint64_t restore_bytes = 65536;
  /// For how many nanoseconds loads avoid a tier after a read or write failed there: its blocks are `unknown`
  /// meanwhile.
  std::uint64_t quiet_ns = 100'000'000;
  /// The share of each group of layers in the bytes of each tier, as weights of any scale. All 0: in
  /// proportion to the bytes that a token takes in the group.
  std::array<double, max_layer_groups> shares{};
  std::uint64_t (*now_ns)(void* context) noexcept = nullptr;  ///< null: the machine's monotonic clock
  void* clock_context = nullptr;
  std::string name = "kv_tiers";  ///< its name in error texts
  metadata_source metadata{};
};

namespace offload {

/// Whether the tiers have a block that a request needs.
enum class answer : std::uint8_t {
  hit,      ///< a load can bring it now
  pending,  ///< a store or another load moves it: call `progress`, then match and look up again
  miss,     ///< no tier has it
  unknown,  ///< its tier does not answer now: look up again, and record no miss
};

/// The part of a prompt that the tiers have.
struct kv_lookup_result {
  std::uint64_t first = 0;     ///< tokens that the sequence has already
  std::uint64_t tokens = 0;    ///< tokens that it could have after a load; `first` if nothing can be loaded
  answer next = answer::miss;  ///< the answer for the block after `tokens`; hit at the end of the chain
  /// Blocks to load from each tier.
  std::array<std::uint64_t, max_kv_tiers> blocks{};
  std::uint64_t elsewhere = 0;  ///< blocks that other caches have: `kv_pool` counts them

  [[nodiscard]] std::uint64_t loadable() const noexcept { return tokens - first; }
  friend constexpr bool operator==(const kv_lookup_result&, const kv_lookup_result&) noexcept = default;
};

using kv_where [[deprecated("its name is offload::kv_lookup_result")]] = kv_lookup_result;

/// A block in the first tier that cannot be evicted.
struct held_block {
  std::uint32_t group = 0;
  slot_id slot = no_slot;

  friend constexpr bool operator==(const held_block&, const held_block&) noexcept = default;
};

/// What a look at a copy of a block in the first tier has found.
enum class copy_state : std::uint8_t {
  unknown,  ///< there is none with a checksum to verify it by, or it is still on its way
  sound,
  damaged  ///< its bytes no longer had the checksum, so it was dropped
};

/// The limits of one load.
struct load_limits {
  std::uint64_t upto = ~std::uint64_t{0};  ///< the load ends at this token of the chain at the latest
  /// The deadline in nanoseconds from `prepare_load` on, in place of `kv_tiers_options::patience_ns`. A
  /// request that waited in a queue since its admission gets what is left:
  ///
  ///     tiers.prepare_load(sequence, chain, {.patience_ns = limit > waited ? limit - waited : 0});
  std::optional<std::uint64_t> patience_ns{};
  /// With costs the load brings only the tokens that are cheaper to load than to compute. Default: all.
  std::optional<load_costs> costs{};
};

/// The result of a load.
struct load_result {
  std::uint64_t first = 0;          ///< tokens that the sequence had before
  std::uint64_t tokens = 0;         ///< leading tokens that are right: truncate to them, compute the rest
  std::uint64_t wanted = 0;         ///< tokens that the load was to make right, `first` included
  std::uint64_t failed_blocks = 0;  ///< damaged, withdrawn, or refused by their tier
  std::uint64_t late_blocks = 0;    ///< had not arrived when the patience ended or the load was cancelled
  std::array<std::uint64_t, max_kv_tiers> blocks{};  ///< blocks loaded, by the tier that had them
  /// The reason of a failed block; `errc::ok` is possible if blocks were only late or withdrawn.
  failure why{};

  [[nodiscard]] bool is_complete() const noexcept { return tokens == wanted; }
  [[nodiscard, deprecated("call is_complete()")]] bool is_whole() const noexcept { return is_complete(); }
};

/// The contents of one tier, and its counters.
struct kv_tier_stats {
  std::uint64_t slots = 0;   ///< with those of the first tier that are reserved for demotions
  std::uint64_t held = 0;    ///< slots that are filling or ready
  std::uint64_t in_use = 0;  ///< slots that transfers or loads use: they cannot be evicted now
  std::uint64_t bytes = 0;   ///< bytes of all slots, taken at construction
  std::uint64_t stored = 0;  ///< blocks that arrived from above
  std::uint64_t loaded = 0;  ///< blocks that loads took from here
  std::uint64_t evictions = 0;
  std::uint64_t damaged = 0;   ///< blocks whose bytes differed from the stored ones: they were dropped
  std::uint64_t failures = 0;  ///< reads and writes that failed
  std::uint64_t declined = 0;  ///< blocks that found no slot
  std::uint64_t too_long = 0;  ///< of these, blocks whose stored form is longer than a slot
  /// With a codec: bytes of the stored forms of all blocks that arrived.
  std::uint64_t stored_bytes = 0;
  std::uint64_t recovered = 0;  ///< blocks that an earlier process left
};

/// Counters of `kv_tiers`.
struct kv_tiers_stats {
  std::array<kv_tier_stats, max_kv_tiers> tiers{};
  std::uint64_t loads = 0;        ///< in progress, or cancelled and not yet ended
  std::uint64_t saving = 0;       ///< blocks on their way from the cache
  std::uint64_t invalidated = 0;  ///< blocks withdrawn because their contents were wrong
  std::uint64_t metadata_bytes = 0;
  failure last_failure{};  ///< the latest failure of a transfer between tiers, or of a file's index
};

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
