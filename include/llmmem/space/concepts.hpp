/// @file
/// The concept of a space of memory: `memory_space`, its ranges, and copies into and out of it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>  // what a space of your own fails with
#include <llmmem/space/fence.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Bytes inside a `Space`: an address in that space's own terms, and a length. Trivially copyable,
/// non-owning; a range of one space does not convert to a range of another.
///
/// The host may dereference the address only if `Space::is_host_accessible`; otherwise it has a meaning for
/// the space's kernels or copies (a device pointer, a file offset).
template <class Space>
struct memory_range {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;

  [[nodiscard]] constexpr bool empty() const noexcept { return bytes == 0; }

  /// Returns `count` bytes from `offset` on, or `errc::past_the_bytes` when they reach past the end.
  [[nodiscard]] constexpr result<memory_range> subrange(std::uint64_t offset,
                                                        std::uint64_t count) const noexcept {
    if (offset > bytes || count > bytes - offset) {
      const std::uint64_t end = count > max_bytes || offset > max_bytes - count ? max_bytes : offset + count;
      return failure{.code = errc::past_the_bytes, .wanted = end, .found = bytes, .where = "memory_range"};
    }
    return memory_range{data + offset, count};
  }

  /// The bytes themselves, if the host may access them.
  [[nodiscard]] constexpr std::span<std::byte> span() const noexcept
    requires(Space::is_host_accessible)
  {
    return {data, static_cast<std::size_t>(bytes)};
  }

  /// The bytes as addresses, for kernels that run where the bytes are: the host must not dereference them,
  /// unless `span` exists too. Useless for a space whose addresses are not memory, such as a file's.
  [[nodiscard]] constexpr std::span<std::byte> addresses() const noexcept {
    return {data, static_cast<std::size_t>(bytes)};
  }

  friend constexpr bool operator==(const memory_range&, const memory_range&) noexcept = default;
};

/// A place where bytes live, with a hard budget.
///
/// - `range_type` is the type of its ranges: `memory_range<S>` (an adaptor passes on its upstream's).
/// - `is_host_accessible` says whether the host may dereference a range.
/// - `try_allocate(bytes, alignment)` returns a range of at least one byte, its address a multiple of
///   `alignment` (a power of two), or a `failure` with the shortage: `errc::out_of_bytes` past the budget,
///   `errc::system_refused` when the budget would allow it but the underlying memory refuses,
///   `errc::zero_bytes`, `errc::bad_alignment`. A refusal changes nothing.
/// - `deallocate(range)` takes back a whole range from `try_allocate`. It does not throw; each space
///   documents what it does with a foreign range. An empty range has no effect. All operations on the range
///   must be after their last fence.
/// - `used() <= capacity()` at all times; both are bytes, without metadata.
/// - `name()` is the name in error texts.
template <class S>
concept memory_space = requires(S& space, const S& seen, typename S::range_type range, std::uint64_t n) {
  { range.data } -> std::convertible_to<std::byte*>;
  { range.bytes } -> std::convertible_to<std::uint64_t>;
  { space.try_allocate(n, n) } noexcept -> std::same_as<result<typename S::range_type>>;
  { space.deallocate(range) } noexcept;
  { seen.capacity() } noexcept -> std::same_as<std::uint64_t>;
  { seen.used() } noexcept -> std::same_as<std::uint64_t>;
  { seen.name() } noexcept -> std::convertible_to<std::string_view>;
  requires std::same_as<std::remove_cv_t<decltype(S::is_host_accessible)>, bool>;
};

/// Runs copies between host memory and a space, and inside that space. The line of execution is an object: a
/// space with only one (`host_space`, `testing::simulated_space`) is its own queue, otherwise it is a stream
/// or a ring that the caller makes. There is no default queue.
///
/// Each call starts when all of `after` have passed, and returns the fence that passes when the copy is done.
/// Until then source and destination belong to the copy: neither may be written, and the destination not
/// read. The span `after` itself need only live during the call. Only `after` orders copies of one queue that
/// use the same bytes.
///
/// A refusal is a value and starts nothing: `errc::size_mismatch` when the two lengths differ,
/// `errc::dead_range` when the range is not inside a live one of the space. Source and destination in one
/// space must not overlap: `errc::overlapping_ranges`.
template <class Q, class Space>
concept copy_queue =
    memory_space<Space> && fence<typename Q::fence_type> &&
    requires(Q& queue, typename Space::range_type range, std::span<std::byte> host,
             std::span<const std::byte> constant, std::span<const typename Q::fence_type> after) {
      { queue.copy_in_async(range, constant, after) } -> std::same_as<result<typename Q::fence_type>>;
      { queue.copy_out_async(host, range, after) } -> std::same_as<result<typename Q::fence_type>>;
      { queue.copy_within_async(range, range, after) } -> std::same_as<result<typename Q::fence_type>>;
    };

/// A space that is its own queue and moves bytes between itself and `Other` without host memory: files that a
/// device reads and writes (GPUDirect Storage), devices with a link. If the host can access neither space,
/// tiers use this path instead of a ring. Both calls are like those of a `copy_queue`; if a machine, file or
/// range does not allow it, the space refuses, or uses another path.
///
/// Tiers pass nothing in `after`: their ranges wait for no copy. Kernels that used a range of `Other` precede
/// its copies only if these use the queue of `Other` (its stream), or wait for a mark of that queue; a space
/// documents whether they do. Otherwise the code that ran the kernels must wait for them on the host before
/// leases end.
template <class S, class Other>
concept straight_queue = copy_queue<S, S> && memory_space<Other> &&
                         requires(S& space, typename S::range_type own, typename Other::range_type other,
                                  std::span<const typename S::fence_type> after) {
                           {
                             space.copy_from_async(own, other, after)
                           } -> std::same_as<result<typename S::fence_type>>;
                           {
                             space.copy_to_async(other, own, after)
                           } -> std::same_as<result<typename S::fence_type>>;
                         };

}  // namespace v0
}  // namespace llmmem
