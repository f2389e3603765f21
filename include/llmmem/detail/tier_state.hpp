/// @file
/// One tier of a `tiered_buffer`: its range, how it is carved, and who leaves next.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/range_arena.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/transfer/tier.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem::inline v0::detail {

/// How far a tier has a copy of a chunk.
enum class residence : std::uint8_t {
  absent,    ///< no copy; in the last tier the place is kept all the same
  reserved,  ///< it has a place, and nothing on its way there
  arriving,  ///< a transfer fills it
  valid,     ///< as it was when last written or brought; the topmost such copy is the newest
};

/// A chunk's copy in a tier.
struct tier_copy {
  arena_handle place{};
  std::byte* data = nullptr;
  std::uint64_t granted = 0;
  residence at = residence::absent;
  bool has_checksum = false;
  std::uint32_t checksum = 0;
  std::uint32_t pins = 0;  // leases and transfers
  dirty_ranges dirty;      // what the next copy beneath does not have

  [[nodiscard]] bool is_valid() const noexcept { return at == residence::valid; }
};

template <class Tier>
struct tier_state {
  using space_type = typename Tier::space_type;
  using range_type = typename space_type::range_type;

  struct setup {
    const tier_place<space_type>& place;
    std::size_t index;
    const std::string& name;
    std::uint32_t max_chunks;
    const metadata_source& metadata;
  };

  explicit tier_state(const setup& s)
      : space(s.place.space),
        slab(*s.place.space, s.place.budget, s.place.granularity),
        arena(slab.range().data, slab.bytes(), s.place.granularity,
              {.max_blocks = s.place.max_pieces,
               .name = s.name + ": tier " + std::to_string(s.index),
               .metadata = s.metadata}),
        eviction(slot_count{s.max_chunks}, s.metadata),
        granularity(s.place.granularity) {}

  /// The chunk's bytes as the space names them.
  [[nodiscard]] static range_type range(const tier_copy& copy, std::uint64_t bytes) noexcept {
    return {copy.data, bytes};
  }

  /// Takes a place for a copy.
  [[nodiscard]] result<void> take(tier_copy& copy, std::uint64_t bytes) noexcept {
    const result<arena_allocation> had = arena.allocate(bytes);
    if (!had) return had.error();
    copy.place = had->handle;
    copy.data = had->data;
    copy.granted = had->granted;
    return {};
  }

  void give_back(tier_copy& copy) noexcept {
    static_cast<void>(arena.free(copy.place));
    copy = {};
  }

  space_type* space;
  space_buffer<space_type> slab;
  range_arena arena;
  typename Tier::eviction_type eviction;
  std::uint64_t granularity;
  std::uint64_t drops = 0;
  std::uint64_t write_backs = 0;
};

}  // namespace llmmem::inline v0::detail
