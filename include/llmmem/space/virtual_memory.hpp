/// @file
/// `basic_virtual_memory`: the bookkeeping of a virtual memory, over any system that maps pages.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A system's answer: a value, or an error number (`errno`, a `CUresult`), 0 for none.
struct mapper_answer {
  std::uint64_t value = 0;
  std::uint32_t error = 0;
};

/// The system calls below a virtual memory, without any record of them. `basic_virtual_memory` checks every
/// argument first, and makes only calls that the contract allows.
///
/// - `granularity()`: the unit of sizes and offsets.
/// - `reserve(bytes)`: returns the address, a multiple of the granularity. `release` returns all of it.
/// - `create(bytes)`: returns a token for physical memory (a file offset, a `CUmemGenericAllocationHandle`);
///   `destroy` returns it to the system. Neither `release` nor `destroy` can be refused.
/// - `map(address, token, bytes)`, `unmap(address, bytes)`: return an error number, or 0. `unmap` may span
///   several adjacent mappings.
/// - `allow(address, bytes)`: makes mapped memory readable and writable (`cuMemSetAccess`); 0 if `map` did
///   it.
/// - optional, `set_aside(address, bytes)`: says that mapped memory is not used at these addresses for now.
///   It stays mapped, and keeps its contents. For systems that count memory once for each address that it was
///   touched at.
template <class M>
concept page_mapper = std::movable<M> && requires(M& mapper, const M& read, std::byte* at, std::uint64_t n) {
  { read.granularity() } noexcept -> std::same_as<std::uint64_t>;
  { mapper.reserve(n) } noexcept -> std::same_as<mapper_answer>;
  { mapper.release(at, n) } noexcept;
  { mapper.create(n) } noexcept -> std::same_as<mapper_answer>;
  { mapper.destroy(n, n) } noexcept;
  { mapper.map(at, n, n) } noexcept -> std::same_as<std::uint32_t>;
  { mapper.allow(at, n) } noexcept -> std::same_as<std::uint32_t>;
  { mapper.unmap(at, n) } noexcept -> std::same_as<std::uint32_t>;
  requires std::same_as<std::remove_cv_t<decltype(M::is_host_accessible)>, bool>;
};

/// The construction parameters of a virtual memory.
struct virtual_memory_options {
  std::uint64_t budget = 0;             ///< most physical bytes; there is no default, and 0 is refused
  std::uint32_t max_ranges = 4096;      ///< ranges reserved at once
  std::uint32_t max_handles = 65536;    ///< physical handles at once
  std::uint32_t max_mappings = 131072;  ///< mappings at once
  std::string name = "virtual_memory";  ///< the name in error texts
  metadata_source metadata{};           ///< source of memory for its tables
};

/// A `virtual_memory` over a `page_mapper`: tables of fixed size, a hard budget, and every misuse refused
/// before the system is called.
///
/// Destroying it unmaps and returns everything.
///
/// @par Complexity      O(log n) in the mappings held, per handle mapped or unmapped.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor throws `length_error` and `out_of_memory`; nothing else throws. Error
///                      numbers in a failure are the mapper's.
template <page_mapper Mapper>
class basic_virtual_memory {
 public:
  static constexpr bool is_host_accessible = Mapper::is_host_accessible;

  explicit basic_virtual_memory(virtual_memory_options options)
    requires(std::default_initializable<Mapper>)
      : basic_virtual_memory(Mapper{}, std::move(options)) {}

  basic_virtual_memory(Mapper mapper, virtual_memory_options options)
      : mapper_(std::move(mapper)),
        options_(checked(std::move(options))),
        ranges_(options_.max_ranges, options_.metadata, "virtual_memory: ranges"),
        handles_(options_.max_handles, options_.metadata, "virtual_memory: handles"),
        mappings_(options_.max_mappings, options_.metadata, "virtual_memory: mappings"),
        by_address_(options_.max_mappings, options_.metadata, "virtual_memory: order of mappings") {}

  basic_virtual_memory(const basic_virtual_memory&) = delete;
  basic_virtual_memory& operator=(const basic_virtual_memory&) = delete;

  ~basic_virtual_memory() {
    for (std::uint32_t at = by_address_.first(); at != none; at = by_address_.next(at)) {
      static_cast<void>(mapper_.unmap(pointer(by_address_.key(at)), mappings_[at].bytes));
    }
    for (std::uint32_t slot = 0; slot < ranges_.touched(); ++slot) {
      if (ranges_.is_live(slot)) mapper_.release(ranges_[slot].data, ranges_[slot].bytes);
    }
    for (std::uint32_t slot = 0; slot < handles_.touched(); ++slot) {
      if (handles_.is_live(slot)) mapper_.destroy(handles_[slot].token, handles_[slot].bytes);
    }
  }

  /// @name The concept   see `virtual_memory`
  /// @{
  [[nodiscard]] result<virtual_range> try_reserve(std::uint64_t bytes) noexcept;
  [[nodiscard]] result<void> release(const virtual_range& range) noexcept;
  [[nodiscard]] result<physical_handle> try_create(std::uint64_t bytes) noexcept;
  [[nodiscard]] result<void> destroy(const physical_handle& handle) noexcept;
  [[nodiscard]] result<void> map(const virtual_range& range, std::uint64_t offset,
                                 std::span<const physical_handle> handles) noexcept;
  [[nodiscard]] result<void> unmap(const virtual_range& range, std::uint64_t offset,
                                   std::uint64_t bytes) noexcept {
    return take_away(range, offset, bytes, false);
  }
  [[nodiscard]] result<void> decommit(const virtual_range& range, std::uint64_t offset,
                                      std::uint64_t bytes) noexcept {
    return take_away(range, offset, bytes, true);
  }
  [[nodiscard]] result<physical_handle> mapped_at(const virtual_range& range,
                                                  std::uint64_t offset) const noexcept;
  [[nodiscard]] std::uint64_t bytes_of(const physical_handle& handle) const noexcept {
    return handles_.check(handle, "").code == errc::ok ? handles_[handle.slot].bytes : 0;
  }
  [[nodiscard]] std::uint64_t mappings_of(const physical_handle& handle) const noexcept {
    return handles_.check(handle, "").code == errc::ok ? handles_[handle.slot].mappings : 0;
  }
  [[nodiscard]] std::uint64_t granularity() const noexcept { return mapper_.granularity(); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return options_.budget; }
  [[nodiscard]] std::uint64_t used() const noexcept { return stats_.used; }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return options_.name; }
  [[nodiscard]] virtual_stats stats() const noexcept {
    virtual_stats now = stats_;
    now.ranges = ranges_.live();
    now.handles = handles_.live();
    now.mappings = by_address_.size();
    now.metadata_bytes = ranges_.bytes() + handles_.bytes() + mappings_.bytes() + by_address_.bytes();
    return now;
  }
  /// @}

  /// Says that the bytes there are not used at these addresses for now: they no longer count for the resident
  /// size of the process, stay mapped, and keep their contents. @pre all of them are mapped.
  void set_aside(std::byte* at, std::uint64_t bytes) noexcept
    requires requires(Mapper& mapper) {
      { mapper.set_aside(at, bytes) } noexcept;
    }
  {
    mapper_.set_aside(at, bytes);
  }

  /// The underlying system, for facts that only it knows.
  [[nodiscard]] const Mapper& mapper() const noexcept { return mapper_; }
  [[nodiscard]] Mapper& mapper() noexcept { return mapper_; }

  /// Returns one sentence for each broken invariant; an empty result means all hold. O(n log n); allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  static constexpr std::uint32_t none = detail::no_index;

  struct range_record {
    std::byte* data;
    std::uint64_t bytes;
    std::uint64_t mappings;
  };
  struct handle_record {
    std::uint64_t token;
    std::uint64_t bytes;
    std::uint64_t mappings;
  };
  struct mapping_record {
    std::uint64_t bytes;
    std::uint32_t handle;
    std::uint32_t range;
  };

  [[nodiscard]] static virtual_memory_options checked(virtual_memory_options options) {
    if (options.budget == 0) {
      throw length_error(options.name + ": the budget is 0 bytes; set the bytes that it may hold");
    }
    if (options.budget > max_bytes) {
      throw length_error(options.name + ": a budget of " + std::to_string(options.budget) +
                         " bytes exceeds the limit of 2^63 - 1");
    }
    if (options.max_ranges == 0 || options.max_handles == 0 || options.max_mappings == 0) {
      throw length_error(options.name + ": max_ranges, max_handles and max_mappings must each be at least 1");
    }
    return options;
  }

  [[nodiscard]] static std::uint64_t address(const std::byte* at) noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at));
  }
  [[nodiscard]] static std::byte* pointer(std::uint64_t at) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): addresses are what this is about
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(at));
  }

  [[nodiscard]] failure refuse(failure why) noexcept {
    ++stats_.refusals;
    why.where = options_.name.c_str();
    return why;
  }
  [[nodiscard]] failure why_not(error_code code, std::uint64_t wanted, std::uint64_t found,
                                std::uint32_t index = 0) const noexcept {
    return {.code = code, .index = index, .wanted = wanted, .found = found, .where = options_.name.c_str()};
  }

  /// Checks whether `bytes` is a valid size or offset; `errc::ok` if so.
  [[nodiscard]] failure check_multiple(std::uint64_t bytes) const noexcept {
    const std::uint64_t unit = mapper_.granularity();
    return bytes % unit == 0 ? failure{} : why_not(errc::bad_granularity, bytes, unit);
  }
  [[nodiscard]] failure check_size(std::uint64_t bytes) const noexcept {
    if (bytes == 0) return why_not(errc::zero_bytes, 0, 0);
    return check_multiple(bytes);
  }
  /// Checks whether `[offset, offset + bytes)` is inside the live range, on the grid.
  [[nodiscard]] failure check_piece(const virtual_range& range, std::uint64_t offset,
                                    std::uint64_t bytes) const noexcept {
    if (const failure wrong = ranges_.check(range_id(range), options_.name.c_str()); wrong.code != errc::ok) {
      return wrong;
    }
    if (const failure wrong = check_multiple(offset); wrong.code != errc::ok) return wrong;
    const std::uint64_t length = ranges_[range.slot].bytes;
    if (offset > length || bytes > length - offset) {
      const bool wraps = offset > max_bytes || bytes > max_bytes - offset;
      return why_not(errc::past_the_bytes, wraps ? max_bytes : offset + bytes, length);
    }
    return {};
  }

  struct range_key {  // the part of a `virtual_range` or a mapping that a table needs
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t owner = 0;
  };
  [[nodiscard]] static range_key range_id(const virtual_range& range) noexcept {
    return {range.slot, range.generation, range.owner};
  }

  [[nodiscard]] result<void> take_away(const virtual_range& range, std::uint64_t offset, std::uint64_t bytes,
                                       bool destroy_too) noexcept;
  void enter(std::uint32_t range, std::uint64_t at, std::uint32_t handle) noexcept;
  void forget(std::uint32_t mapping) noexcept;
  void destroy_slot(std::uint32_t handle) noexcept {
    mapper_.destroy(handles_[handle].token, handles_[handle].bytes);
    stats_.used -= handles_[handle].bytes;
    handles_.release(handle);
  }

  Mapper mapper_;
  virtual_memory_options options_;
  detail::handle_table<range_key, range_record> ranges_;
  detail::handle_table<physical_handle, handle_record> handles_;
  detail::handle_table<range_key, mapping_record> mappings_;
  detail::ordered_slots<std::uint64_t> by_address_;  // of mappings
  virtual_stats stats_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/space/detail/virtual_memory_body.hpp>
