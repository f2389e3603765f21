/// @file
/// Addresses separate from the memory behind them: the concept of a virtual memory, and operations on any of
/// them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Reserved addresses. Trivially copyable, non-owning; the handle in it becomes stale when it is released.
struct virtual_range {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const virtual_range&, const virtual_range&) noexcept = default;
};

/// Physical memory of a fixed size, mapped nowhere, at one place, or at several.
struct physical_handle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const physical_handle&, const physical_handle&) noexcept = default;
};

/// Counters of a virtual memory.
struct virtual_stats {
  std::uint64_t used = 0;            ///< physical bytes charged to the budget now, mapped or not
  std::uint64_t peak = 0;            ///< most physical bytes at once
  std::uint64_t reserved_bytes = 0;  ///< bytes of reserved address space
  std::uint64_t mapped_bytes = 0;    ///< bytes of addresses with memory behind them; aliases count each time
  std::uint64_t ranges = 0;
  std::uint64_t handles = 0;
  std::uint64_t mappings = 0;
  std::uint64_t peak_mappings = 0;
  std::uint64_t map_calls = 0;       ///< pieces mapped since construction
  std::uint64_t unmap_calls = 0;     ///< calls to the system that unmapped
  std::uint64_t create_calls = 0;    ///< handles created since construction
  std::uint64_t stuck_mappings = 0;  ///< mapped by a refused call that could not be undone
  std::uint64_t refusals = 0;        ///< calls refused for any reason
  std::uint64_t metadata_bytes = 0;  ///< bytes of bookkeeping, outside the budget
};

/// Address space and physical memory, allocated and released separately, the second under a hard budget.
///
/// The model is that of CUDA's virtual memory management (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`
/// with `cuMemSetAccess`, `cuMemUnmap`, `cuMemRelease`, `cuMemAddressFree`), whose rules apply everywhere:
/// sizes and offsets are multiples of `granularity()`, a handle is mapped whole, and unmapping removes whole
/// mappings.
///
/// - `try_reserve(bytes)`: reserves addresses without memory. Touching them faults.
/// - `release(range)`: releases addresses. Refused while anything is mapped there.
/// - `try_create(bytes)`: allocates memory without an address, charged to the budget. `errc::out_of_bytes`
///   past it.
/// - `destroy(handle)`: releases memory. Refused while it is mapped.
/// - `map(range, offset, handles)`: maps `handles` next to each other from `offset` on. The same handle may
///   be mapped at several places, which then are the same bytes. Refused where something is mapped.
/// - `unmap(range, offset, bytes)`: removes all mappings there. Refused where it would split one or meet a
///   hole.
/// - `decommit(range, offset, bytes)`: the same, and releases the memory that is mapped nowhere else.
/// - `mapped_at(range, offset)`: returns the handle whose mapping begins there.
/// - `bytes_of(handle)`, `mappings_of(handle)`: 0 for an invalid handle.
///
/// A refusal is a value and changes nothing. (One exception: if a system refuses to map the n-th of several
/// handles, and then to unmap the earlier ones, these stay mapped; `stats().stuck_mappings` counts them.)
/// Work that uses a range must finish before it is unmapped.
template <class V>
concept virtual_memory =
    requires(V& memory, const V& read, const virtual_range& range, const physical_handle& handle,
             std::span<const physical_handle> handles, std::uint64_t n) {
      { memory.try_reserve(n) } noexcept -> std::same_as<result<virtual_range>>;
      { memory.release(range) } noexcept -> std::same_as<result<void>>;
      { memory.try_create(n) } noexcept -> std::same_as<result<physical_handle>>;
      { memory.destroy(handle) } noexcept -> std::same_as<result<void>>;
      { memory.map(range, n, handles) } noexcept -> std::same_as<result<void>>;
      { memory.unmap(range, n, n) } noexcept -> std::same_as<result<void>>;
      { memory.decommit(range, n, n) } noexcept -> std::same_as<result<void>>;
      { read.mapped_at(range, n) } noexcept -> std::same_as<result<physical_handle>>;
      { read.bytes_of(handle) } noexcept -> std::same_as<std::uint64_t>;
      { read.mappings_of(handle) } noexcept -> std::same_as<std::uint64_t>;
      { read.granularity() } noexcept -> std::same_as<std::uint64_t>;
      { read.capacity() } noexcept -> std::same_as<std::uint64_t>;
      { read.used() } noexcept -> std::same_as<std::uint64_t>;
      { read.stats() } noexcept -> std::same_as<virtual_stats>;
      { read.name() } noexcept -> std::convertible_to<std::string_view>;
      requires std::same_as<std::remove_cv_t<decltype(V::is_host_accessible)>, bool>;
    };

/// Returns `bytes` rounded up to a multiple of `granularity`. @pre the sum does not exceed 2^63 - 1.
[[nodiscard]] constexpr std::uint64_t round_up_to(std::uint64_t granularity, std::uint64_t bytes) noexcept {
  return (bytes + granularity - 1) / granularity * granularity;
}

/// Maps new memory behind `[offset, offset + bytes)`, as one handle. A refusal changes nothing.
template <virtual_memory V>
[[nodiscard]] result<physical_handle> commit(V& memory, const virtual_range& range, std::uint64_t offset,
                                             std::uint64_t bytes) noexcept {
  result<physical_handle> made = memory.try_create(bytes);
  if (!made) return made;
  if (const result<void> mapped = memory.map(range, offset, std::span(&*made, 1)); !mapped) {
    static_cast<void>(memory.destroy(*made));  // it is mapped nowhere: cannot be refused
    return mapped.error();
  }
  return made;
}

/// Makes a new range in which `handles` are adjacent: scattered memory as one piece (GMLake, arXiv
/// 2401.08156). A refusal changes nothing.
template <virtual_memory V>
[[nodiscard]] result<virtual_range> stitch(V& memory, std::span<const physical_handle> handles) noexcept {
  std::uint64_t bytes = 0;
  for (const physical_handle& each : handles)
    bytes += memory.bytes_of(each);
  result<virtual_range> range = memory.try_reserve(bytes);
  if (!range) return range;
  if (const result<void> mapped = memory.map(*range, 0, handles); !mapped) {
    static_cast<void>(memory.release(*range));
    return mapped.error();
  }
  return range;
}

}  // namespace v0
}  // namespace llmmem
