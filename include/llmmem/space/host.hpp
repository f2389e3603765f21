/// @file
/// `host_space`: ordinary host memory under a hard budget, with detection of misused ranges.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/pages.hpp>
#include <llmmem/space/space_ledger.hpp>
#include <llmmem/space/space_stats.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of a host space.
struct host_options {
  std::uint64_t budget = 0;                     ///< most bytes it may hold; there is no default, and 0 is
                                                ///< refused
  std::string name = "host_space";              ///< the name in error texts
  misuse_handler on_misuse = &abort_on_misuse;  ///< called instead of deallocating a wrong range
  void* misuse_context = nullptr;               ///< passed to the handler
};

/// Host memory from a `byte_source`, under a hard budget.
///
/// For arenas, slabs and staging buffers: hundreds of ranges, which their users divide further. For millions
/// of small objects use an allocator that divides ranges of this space.
///
/// The budget is charged with the bytes that the source takes (`footprint`): whole pages for mapped requests.
/// Every range is recorded, and `deallocate` finds the record before it touches memory: a range deallocated
/// twice, with another length, from its middle or from another space goes to the misuse handler, which aborts
/// by default. Destroying the space returns all live ranges to the source.
///
/// @par Complexity      O(log n) look-up and O(n) bookkeeping in the number of live ranges, plus the source.
/// @par Thread safety   any number of threads; one mutex. Copies run on the calling thread, outside the
///   mutex.
/// @par Errors          the constructor throws `length_error`; nothing else throws.
/// @tparam Source  the source of bytes: `page_source`, `pmr_source` (space/pmr.hpp), or a user-defined one.
template <byte_source Source>
class basic_host_space {
 public:
  using range_type = memory_range<basic_host_space>;
  using fence_type = host_fence;
  using source_type = Source;
  static constexpr bool is_host_accessible = true;

  explicit basic_host_space(host_options options)
    requires(std::default_initializable<Source>)
      : basic_host_space(Source{}, std::move(options)) {}

  basic_host_space(Source source, host_options options) : ledger_(std::move(source), std::move(options)) {}

  /// Allocates at least `bytes` bytes at a multiple of `alignment`; their contents are undefined.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const result<std::byte*> data = ledger_.take(bytes, alignment);
    if (!data) return data.error();
    return range_type{*data, bytes};
  }

  /// Deallocates a range exactly as `try_allocate` returned it; an empty one has no effect. See the class for
  /// wrong ranges.
  void deallocate(range_type range) noexcept { ledger_.give_back(range.data, range.bytes); }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return ledger_.options().budget; }
  [[nodiscard]] std::uint64_t used() const noexcept { return ledger_.used(); }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return ledger_.options().name; }

  /// @name Copies
  /// These run on the calling thread: they wait for `after`, copy, and return a fence that has passed.
  /// @{
  [[nodiscard]] result<host_fence> copy_in_async(range_type destination, std::span<const std::byte> source,
                                                 std::span<const host_fence> after) noexcept {
    return copy(destination, destination.data, destination.bytes, source.data(), source.size(), after);
  }
  [[nodiscard]] result<host_fence> copy_out_async(std::span<std::byte> destination, range_type source,
                                                  std::span<const host_fence> after) noexcept {
    return copy(source, destination.data(), destination.size(), source.data, source.bytes, after);
  }
  [[nodiscard]] result<host_fence> copy_within_async(range_type destination, range_type source,
                                                     std::span<const host_fence> after) noexcept {
    if (destination.bytes != 0 && !holds(destination))
      return failure{.code = errc::dead_range, .wanted = destination.bytes, .where = ledger_.name()};
    return copy(source, destination.data, destination.bytes, source.data, source.bytes, after);
  }
  /// @}

  /// Whether all of `range` is inside one live range.
  [[nodiscard]] bool holds(range_type range) const noexcept { return ledger_.holds(range.data, range.bytes); }

  [[nodiscard]] space_stats stats() const noexcept { return ledger_.stats(); }

  /// Proves that the live ranges do not overlap and that their bytes add up to the charged budget. Returns
  /// one sentence for each violation; an empty result means proven. O(ranges); allocates.
  [[nodiscard]] std::vector<std::string> audit() { return ledger_.audit(); }

  /// The source, for its report. Not while another thread allocates.
  [[nodiscard]] const Source& source() const noexcept { return ledger_.source(); }

 private:
  [[nodiscard]] result<host_fence> copy(range_type ours, std::byte* to, std::uint64_t to_bytes,
                                        const std::byte* from, std::uint64_t from_bytes,
                                        std::span<const host_fence> after) const noexcept {
    const auto may = detail::check_copy(*this, ledger_.name(), ours, to, to_bytes, from, from_bytes);
    if (!may) return may.error();
    wait_all(after);
    if (to_bytes != 0) std::memmove(to, from, static_cast<std::size_t>(to_bytes));
    return host_fence{};
  }

  detail::space_ledger<Source, host_options> ledger_;
};

/// Host memory from the heap and the operating system's pages.
using host_space = basic_host_space<page_source>;

static_assert(memory_space<host_space>);
static_assert(copy_queue<host_space, host_space>);

}  // namespace v0
}  // namespace llmmem
