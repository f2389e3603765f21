/// @file
/// One tier of a `tiered_buffer`: its range, how places are allocated in it, and which copy leaves next.
#pragma once

#include <llmmem/arena/range_arena.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/tiering/detail/chunk_record.hpp>
#include <llmmem/tiering/tier.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether a space allocates ranges of any size as long as their sum fits.
template <class Space>
[[nodiscard]] consteval bool never_fragments() noexcept {
  if constexpr (requires { Space::source_type::never_fragments; }) {
    return Space::source_type::never_fragments;
  } else {
    return false;
  }
}

/// Whether a space may already hold chunks, each in its place.
template <class Space>
[[nodiscard]] consteval bool names_places() noexcept {
  if constexpr (requires { Space::is_read_only; }) {
    return Space::is_read_only;
  } else {
    return persists_chunks<Space>();
  }
}

/// The space of a tier that is taken.
struct place_stats {
  std::uint64_t capacity = 0;
  std::uint64_t used = 0;
  std::uint64_t peak = 0;
  std::uint64_t places = 0;
  std::uint64_t lost = 0;         ///< bytes of retired places, contained in `used`
  std::uint64_t lost_places = 0;  ///< retired places, contained in `places`
  std::uint64_t metadata_bytes = 0;
};

/// Returns how many pieces a tier may have to account for: no two gaps are adjacent, and no piece is smaller
/// than a unit. In addition to the chunks there may be two in transit, and some that a device never released.
template <class Space>
[[nodiscard]] std::uint32_t pieces_of(const tier_place<Space>& place, std::uint64_t chunks) noexcept {
  constexpr std::uint64_t spare = 66;
  if (place.max_pieces != 0) return place.max_pieces;
  const std::uint64_t units = place.granularity == 0 ? 0 : place.budget / place.granularity;
  const std::uint64_t most = 2 * (chunks + spare) + 1;
  const std::uint64_t pieces = units < most ? units : most;
  return pieces > 0xFFFF'FFF0U ? 0xFFFF'FFF0U : static_cast<std::uint32_t>(pieces == 0 ? 1 : pieces);
}

/// The places of copies within one range of the space, allocated by best fit.
template <class Space>
class chunk_places {
 public:
  chunk_places(const tier_place<Space>& place, std::uint64_t chunks, std::string name,
               const metadata_source& metadata)
      : slab_(*place.space, place.budget, std::align_val_t{place.granularity}),
        arena_(slab_.range().data, slab_.bytes(), place.granularity,
               {.max_blocks = pieces_of(place, chunks), .name = std::move(name), .metadata = metadata},
               names_places<Space>() ? piece_lookup::by_address_too : piece_lookup::by_size) {}
  chunk_places(const chunk_places&) = delete;
  chunk_places& operator=(const chunk_places&) = delete;
  /// A range with a retired place stays charged to the space, which gives it to no other user.
  ~chunk_places() {
    if (lost_places_ != 0) static_cast<void>(slab_.release());
  }

  [[nodiscard]] result<void> take(tier_copy& copy, std::uint64_t bytes) noexcept {
    const result<arena_allocation> had = arena_.allocate(bytes);
    if (!had) return told(had.error());
    copy.place = had->handle;
    copy.data = had->data;
    copy.granted = had->granted;
    return {};
  }
  /// Takes the place that begins at `data`, where it was before the space was closed.
  [[nodiscard]] result<void> take_at(tier_copy& copy, std::byte* data, std::uint64_t bytes) noexcept {
    const result<arena_allocation> had = arena_.allocate_at(data, bytes);
    if (!had) return told(had.error());
    copy.place = had->handle;
    copy.data = had->data;
    copy.granted = had->granted;
    return {};
  }
  /// Returns the address `offset` bytes into the whole range.
  [[nodiscard]] std::byte* address_of(std::uint64_t offset) const noexcept {
    return slab_.range().data + offset;
  }
  void give_back(tier_copy& copy) noexcept {
    static_cast<void>(arena_.free(copy.place));
    copy = {};
  }
  /// Never allocates the place again, because a device may still write to it.
  void retire(tier_copy& copy) noexcept {
    lost_ += copy.granted;
    ++lost_places_;
    copy = {};
  }
  [[nodiscard]] std::uint64_t granted_for(std::uint64_t bytes) const noexcept {
    return arena_.granted_for(bytes);
  }
  [[nodiscard]] const char* name() const noexcept { return arena_.name(); }
  [[nodiscard]] place_stats stats() const noexcept {
    const arena_stats s = arena_.stats();
    return {arena_.capacity(), s.granted, s.peak_granted, s.live, lost_, lost_places_, s.metadata_bytes};
  }
  void audit(std::vector<std::string>& found) const {
    for (std::string& each : arena_.audit())
      found.push_back(std::move(each));
  }

 private:
  /// Adds the name of this tier's table, which the arena does not know.
  [[nodiscard]] static failure told(failure why) noexcept {
    if (why.code == errc::table_full) why.index = static_cast<std::uint32_t>(full_table::pieces);
    return why;
  }

  space_buffer<Space> slab_;
  range_arena arena_;
  std::uint64_t lost_ = 0;
  std::uint64_t lost_places_ = 0;
};

/// The places of copies in a space that never fragments: one range for each place.
template <class Space>
  requires(never_fragments<Space>())
class chunk_places<Space> {
 public:
  chunk_places(const tier_place<Space>& place, std::uint64_t, std::string name, const metadata_source&)
      : space_(place.space), unit_(checked(place.granularity, name)), name_(std::move(name)) {
    stats_.capacity = place.budget;
  }
  chunk_places(const chunk_places&) = delete;
  chunk_places& operator=(const chunk_places&) = delete;

  [[nodiscard]] result<void> take(tier_copy& copy, std::uint64_t bytes) noexcept {
    const std::uint64_t taken = granted_for(bytes);
    if (taken > stats_.capacity - stats_.used) {
      return failure{.code = errc::out_of_bytes,
                     .wanted = taken,
                     .found = stats_.capacity - stats_.used,
                     .where = name_.c_str()};
    }
    const auto had = space_->try_allocate(taken, unit_);
    if (!had) return had.error();
    copy.data = had->data;
    copy.granted = taken;
    stats_.used += taken;
    if (stats_.used > stats_.peak) stats_.peak = stats_.used;
    ++stats_.places;
    return {};
  }
  void give_back(tier_copy& copy) noexcept {
    space_->deallocate({copy.data, copy.granted});
    stats_.used -= copy.granted;
    --stats_.places;
    copy = {};
  }
  /// Never allocates the place again, because a device may still write to it. The place stays charged to the
  /// space.
  void retire(tier_copy& copy) noexcept {
    stats_.lost += copy.granted;
    ++stats_.lost_places;
    copy = {};
  }
  /// Returns the bytes that the space charges: whole pieces of its source.
  [[nodiscard]] std::uint64_t granted_for(std::uint64_t bytes) const noexcept {
    return space_->source().footprint(bytes, unit_);
  }
  [[nodiscard]] const char* name() const noexcept { return name_.c_str(); }
  [[nodiscard]] place_stats stats() const noexcept { return stats_; }
  void audit(std::vector<std::string>&) const noexcept {}

 private:
  [[nodiscard]] static std::uint64_t checked(std::uint64_t granularity, const std::string& name) {
    if (granularity == 0 || (granularity & (granularity - 1)) != 0) {
      throw argument_error(name + ": granularity " + std::to_string(granularity) +
                           "; it must be a power of two");
    }
    return granularity;
  }

  Space* space_;
  std::uint64_t unit_;
  std::string name_;
  place_stats stats_;
};

/// A place without a chunk, freed unless a chunk takes it.
template <class Space>
class spare_place {
 public:
  explicit spare_place(chunk_places<Space>& places) noexcept : places_(places) {}
  spare_place(const spare_place&) = delete;
  spare_place& operator=(const spare_place&) = delete;
  ~spare_place() {
    if (place_.granted != 0) places_.give_back(place_);
  }
  [[nodiscard]] tier_copy& place() noexcept { return place_; }
  [[nodiscard]] tier_copy release() noexcept { return std::exchange(place_, tier_copy{}); }
  void retire() noexcept { places_.retire(place_); }

 private:
  chunk_places<Space>& places_;
  tier_copy place_;
};

/// One tier: its places and its eviction policy.
template <class Tier>
struct tier_state {
  using space_type = typename Tier::space_type;
  using range_type = typename space_type::range_type;

  struct setup {
    const tier_place<space_type>& place;
    std::size_t index;
    const std::string& name;
    std::uint32_t max_chunks;
    std::uint64_t largest_chunk_bytes;
    std::uint32_t staging_slots;
    const metadata_source& metadata;
  };

  using codec_type = typename Tier::codec_type;
  static constexpr bool encodes = !std::is_same_v<codec_type, identity_codec>;

  explicit tier_state(const setup& s)
      : space(s.place.space),
        places(s.place, std::uint64_t{s.max_chunks} + s.staging_slots,
               s.name + ": tier " + std::to_string(s.index), s.metadata),
        eviction(slot_count{s.max_chunks}, s.metadata),
        admission(slot_count{s.max_chunks}, s.metadata),
        codec(encodes ? s.largest_chunk_bytes : 1, s.metadata),
        granularity(s.place.granularity) {}

  /// Returns the bytes of the place of a chunk of `bytes`.
  [[nodiscard]] static constexpr std::uint64_t place_bytes(std::uint64_t bytes) noexcept {
    return codec_type::worst_case_bytes(bytes);
  }
  /// Returns `bytes` rounded to whole units of this tier.
  [[nodiscard]] std::uint64_t rounded(std::uint64_t bytes) const noexcept {
    return (bytes + granularity - 1) / granularity * granularity;
  }

  /// Returns the chunk's bytes as the space's range.
  [[nodiscard]] static range_type range(const tier_copy& copy, std::uint64_t bytes) noexcept {
    return {copy.data, bytes};
  }

  space_type* space;
  chunk_places<space_type> places;
  typename Tier::eviction_type eviction;
  typename Tier::admission_type admission;
  codec_type codec;
  std::uint64_t granularity;
  std::uint64_t drops = 0;
  std::uint64_t write_backs = 0;
  std::uint64_t demotions = 0;
  std::uint64_t refusals = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
