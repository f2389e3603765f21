/// @file
/// The bytes of one tier: the positions of its slots, and the copies from and to them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/offload/detail/block_coding.hpp>
#include <llmmem/offload/detail/tier_slots.hpp>
#include <llmmem/offload/kv_mover.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/tier.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Where the slots of one group are in a tier.
struct slot_region {
  std::uint64_t first = 0;  ///< first byte in the tier's range
  std::uint64_t slots = 0;
  std::uint64_t stride = 0;
  std::uint64_t bytes = 0;       ///< of a block
  std::uint64_t most_bytes = 0;  ///< of a stored form: `bytes` without a codec

  [[nodiscard]] constexpr std::uint64_t offset(slot_id slot) const noexcept {
    return first + to_index(slot) * stride;
  }
};
using slot_regions = std::array<slot_region, max_layer_groups>;

/// Divides a tier's bytes among groups.
/// @throws length_error  if a group gets no slot.
[[nodiscard]] inline slot_regions divide_tier(std::uint64_t budget, std::uint64_t granularity,
                                              std::span<const std::uint64_t> block_bytes,
                                              std::span<const double> shares, const std::string& who) {
  slot_regions out{};
  double whole = 0;
  for (std::size_t g = 0; g < block_bytes.size(); ++g)
    whole += shares[g];
  std::uint64_t first = 0;
  for (std::size_t g = 0; g < block_bytes.size(); ++g) {
    slot_region& region = out[g];
    region.bytes = region.most_bytes = block_bytes[g];
    region.stride = (block_bytes[g] + granularity - 1) / granularity * granularity;
    const std::uint64_t part =
        block_bytes.size() == 1
            ? budget
            : static_cast<std::uint64_t>(static_cast<double>(budget) * (shares[g] / whole));
    region.first = first;
    region.slots = part / region.stride;
    if (region.slots > max_blocks) region.slots = max_blocks;
    if (region.slots == 0) {
      throw length_error(who + ": " + std::to_string(part) + " bytes for group " + std::to_string(g) +
                         " hold no block of " + std::to_string(region.stride) +
                         " bytes; give the tier a larger budget, or the group a larger share");
    }
    first += region.slots * region.stride;
  }
  return out;
}

/// A copy under way between a tier's slot and the first tier.
template <class Fence>
struct medium_copy {
  Fence fence{};
  std::uint32_t checksum = 0;               ///< of the bytes written, if they leave memory
  std::uint32_t stored = 0;                 ///< bytes of the stored form, with a codec
  std::uint32_t buffer = no_coding_buffer;  ///< in use until `release`
};

/// One tier's range, and its copies. If the space has an index, the slots are recorded there.
template <memory_space Space, class Codec = offload::plain_blocks>
class tier_medium {
 public:
  using fence_type = typename Space::fence_type;
  using copy_type = medium_copy<fence_type>;
  using coding_type = block_coding<Codec>;
  static constexpr bool is_host_accessible = Space::is_host_accessible;
  /// Whether blocks are verified when they come back.
  static constexpr bool leaves_memory = detail::leaves_memory<Space>();
  static constexpr bool persists = detail::persists_chunks<Space>();
  /// Whether the checksum of a copy is that of the block itself.
  static constexpr bool sums_blocks = leaves_memory && coding_type::is_plain;
  /// Whether a copy has the block's own bytes, which nothing verifies here: a known checksum stays with it.
  static constexpr bool passes_sums = !leaves_memory && coding_type::is_plain;
  static_assert(copy_queue<Space, Space>, "the space of a kv_tier must be the queue of its own copies");

  tier_medium(Space& space, const slot_regions& regions, std::size_t groups, coding_type coding)
      : space_(&space),
        regions_(regions),
        groups_(groups),
        coding_(std::move(coding)),
        buffer_(space, total(), std::align_val_t{alignment()}) {
    if constexpr (persists) {
      std::uint64_t slots = 0;
      for (std::size_t g = 0; g < groups; ++g)
        slots += regions[g].slots;
      if (space.index().capacity() < slots) {
        throw argument_error(std::string(space.name()) + ": its index keeps " +
                             std::to_string(space.index().capacity()) + " blocks, the tier has " +
                             std::to_string(slots) + "; raise persistent_file_options::max_chunks to that");
      }
    }
  }

  [[nodiscard]] const slot_region& region(std::size_t group) const noexcept { return regions_[group]; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return buffer_.range().bytes; }
  [[nodiscard]] std::string_view name() const noexcept { return space_->name(); }

  [[nodiscard]] std::span<std::byte> bytes_of(std::size_t group, slot_id slot) const noexcept
    requires(is_host_accessible)
  {
    return {buffer_.range().data + regions_[group].offset(slot),
            static_cast<std::size_t>(regions_[group].bytes)};
  }
  [[nodiscard]] offload::slot_memory slots_of(std::size_t group) const noexcept
    requires(is_host_accessible)
  {
    return {buffer_.range().data + regions_[group].first, regions_[group].slots, regions_[group].stride};
  }

  /// Begins to write a block. `errc::table_full`: all buffers of the codec are in use; `errc::too_short`: the
  /// stored form is longer than the slot; `errc::checksum_differs`: the block was damaged, and its coded form
  /// would hide that.
  /// @param sum  the block's checksum, if it is known: damage since then is found when the block comes back.
  result<copy_type> write(std::size_t group, slot_id slot, std::span<const std::byte> from,
                          std::optional<std::uint32_t> sum = {}) noexcept {
    copy_type out;
    std::span<const std::byte> bytes = from;
    if constexpr (!coding_type::is_plain) {
      if (sum) {
        if (const std::uint32_t found = crc32c(0, from); found != *sum)
          return failure{errc::checksum_differs, to_index(slot), *sum, found, name()};
      }
      out.buffer = coding_.take();
      if (out.buffer == no_coding_buffer) return all_in_use();
      const auto stored = coding_.encode(group, from, out.buffer);
      const std::uint64_t most = regions_[group].most_bytes;
      if (!stored || *stored > most) {
        coding_.give(out.buffer);
        if (!stored) return stored.error();
        return failure{errc::too_short, to_index(slot), *stored, most, name()};
      }
      out.stored = *stored;
      bytes = coding_.buffer(out.buffer).first(out.stored);
    }
    if constexpr (leaves_memory) out.checksum = sum && coding_type::is_plain ? *sum : crc32c(0, bytes);
    const auto fence = space_->copy_in_async(range_of(group, slot, bytes.size()), bytes, {});
    return begun(out, fence);
  }
  /// Begins to read a block, of which `accept` makes `to` when the fence has passed.
  /// @param stored  bytes of its stored form, with a codec
  result<copy_type> read(std::size_t group, slot_id slot, std::uint32_t stored,
                         std::span<std::byte> to) noexcept {
    copy_type out{.stored = stored};
    std::span<std::byte> bytes = to;
    if constexpr (!coding_type::is_plain) {
      out.buffer = coding_.take();
      if (out.buffer == no_coding_buffer) return all_in_use();
      bytes = coding_.buffer(out.buffer).first(stored);
    }
    return begun(out, space_->copy_out_async(bytes, range_of(group, slot, bytes.size()), {}));
  }
  /// Verifies the bytes that a successful read has brought, and restores the block.
  /// @param checksum  of the bytes that were written
  result<void> accept(std::size_t group, slot_id slot, const copy_type& copy, std::uint32_t checksum,
                      std::span<std::byte> to) noexcept {
    std::span<const std::byte> bytes = to;
    if constexpr (!coding_type::is_plain) bytes = coding_.buffer(copy.buffer).first(copy.stored);
    if constexpr (leaves_memory) {
      if (const std::uint32_t found = crc32c(0, bytes); found != checksum)
        return failure{errc::checksum_differs, to_index(slot), checksum, found, name()};
    }
    if constexpr (!coding_type::is_plain) return coding_.decode(group, copy.buffer, copy.stored, to);
    return {};
  }
  /// Ends a copy whose fence has passed.
  void release(copy_type& copy) noexcept {
    coding_.give(copy.buffer);
    copy.buffer = no_coding_buffer;
  }
  [[nodiscard]] std::uint64_t coding_bytes() const noexcept { return coding_.memory_bytes(); }
  [[nodiscard]] bool are_buffers_free() const noexcept { return coding_.is_idle(); }
  /// Returns the outcome of a copy whose fence has passed, and clears its failure.
  [[nodiscard]] static result<void> outcome_of(const fence_type& fence) noexcept {
    if constexpr (requires { fence.conclude(); }) {
      return fence.conclude();
    } else {
      return {};
    }
  }
  /// Advances copies of a space without its own threads.
  void poll() noexcept {
    if constexpr (requires { space_->queue().poll(); }) space_->queue().poll();
  }

  /// Records in the index that a block is in a slot, or no longer is.
  result<void> keep(std::size_t group, slot_id slot, const block_key& key, parent_digest parent,
                    const copy_type& copy) noexcept {
    if constexpr (persists) {
      return space_->index().keep({.key = key,
                                   .offset = base_offset() + regions_[group].offset(slot),
                                   .bytes = regions_[group].bytes,
                                   .stored = coding_type::is_plain ? regions_[group].bytes : copy.stored,
                                   .format = static_cast<std::uint64_t>(parent),
                                   .checksum = copy.checksum});
    } else {
      return {};
    }
  }
  result<void> forget(const block_key& key) noexcept {
    if constexpr (persists) {
      return space_->index().drop(key);
    } else {
      return {};
    }
  }
  result<void> sync() noexcept {
    if constexpr (requires { space_->sync(); }) {
      return space_->sync();
    } else {
      return {};
    }
  }

  /// Calls `take(group, slot, extent)` for each extent that an earlier process left; the call returns whether
  /// it could use the extent. Removes unusable extents from the index, and returns how many were used.
  template <class Take>
  std::uint64_t recover(Take&& take) {
    std::uint64_t taken = 0;
    if constexpr (persists) {
      std::vector<chunk_key> useless;
      space_->index().for_each([&](const chunk_extent& extent) {
        const std::uint64_t at = extent.offset - base_offset();
        for (std::size_t g = 0; g < groups_; ++g) {
          const slot_region& region = regions_[g];
          if (extent.offset < base_offset() || at < region.first ||
              at >= region.first + region.slots * region.stride)
            continue;
          const std::uint64_t slot = (at - region.first) / region.stride;
          const bool fits = (at - region.first) % region.stride == 0 && extent.bytes == region.bytes &&
                            is_of_this_kind(region, extent.stored);
          if (fits && take(g, slot_id{static_cast<std::uint32_t>(slot)}, extent)) {
            ++taken;
            return;
          }
        }
        useless.push_back(extent.key);
      });
      for (const chunk_key& each : useless)
        static_cast<void>(space_->index().drop(each));
    }
    return taken;
  }

 private:
  using range_type = typename Space::range_type;

  [[nodiscard]] std::uint64_t total() const noexcept {
    const slot_region& last = regions_[groups_ - 1];
    return last.first + last.slots * last.stride;
  }
  /// Returns the page size if slots are whole pages, because files then bypass the page cache for them.
  [[nodiscard]] std::size_t alignment() const noexcept {
    constexpr std::size_t page = 4096;
    constexpr std::size_t line = 64;
    for (std::size_t g = 0; g < groups_; ++g) {
      if (regions_[g].stride % page != 0) return line;
    }
    return page;
  }
  [[nodiscard]] range_type range_of(std::size_t group, slot_id slot, std::uint64_t bytes) const noexcept {
    range_type out = buffer_.range();
    out.data += regions_[group].offset(slot);
    out.bytes = bytes;
    return out;
  }
  /// Returns whether a block stored in so many bytes is in this tier's form, or in another codec's, which
  /// `accept` refuses.
  [[nodiscard]] static bool is_of_this_kind(const slot_region& region, std::uint64_t stored) noexcept {
    if constexpr (coding_type::is_plain) return stored == region.bytes;
    return stored != region.bytes && stored <= region.most_bytes;
  }
  [[nodiscard]] failure all_in_use() const noexcept { return {.code = errc::table_full, .where = name()}; }
  result<copy_type> begun(copy_type& copy, const result<fence_type>& fence) noexcept {
    if (!fence) {
      release(copy);
      return fence.error();
    }
    copy.fence = *fence;
    return copy;
  }
  [[nodiscard]] std::uint64_t base_offset() const noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(buffer_.range().data));
  }
  Space* space_;
  slot_regions regions_;
  std::size_t groups_;
  coding_type coding_;
  space_buffer<Space> buffer_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
