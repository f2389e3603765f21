/// @file
/// Virtual memory on the host: address space from `mmap`, physical memory from a memfd. Linux.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/memory_file.hpp>
#include <llmmem/space/pages.hpp>
#include <llmmem/space/virtual_memory.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// When physical memory is taken from the system.
enum class backing : std::uint8_t {
  when_touched,  ///< page by page; a system that runs out kills the process, as with any other memory
  at_once,       ///< when a handle is made: a shortage is a value, and making one takes as long as zeroing it
};

/// How a `host_mapper` takes memory.
struct host_mapper_options {
  std::uint64_t granularity = 0;  ///< a multiple of the page size; 0: the page size
  backing take = backing::when_touched;
  huge_pages huge = huge_pages::never;  ///< a hint, which few systems accept for shared memory
};

/// Harmless refusals to a `host_mapper`.
struct host_mapper_report {
  std::uint64_t huge_advised = 0;  ///< mappings for which `madvise(MADV_HUGEPAGE)` succeeded
  std::uint64_t huge_refused = 0;  ///< mappings for which it did not
  std::uint64_t kept_bytes = 0;    ///< destroyed, but the system did not take the pages back
};

namespace detail {

/// A few unused mappings in reserve, to be released when a process is at its limit of mappings. Replacing a
/// mapping by bare addresses temporarily needs one more mapping than are held, and must not fail where it
/// would relieve the shortage.
class spare_mappings {
 public:
  spare_mappings() noexcept = default;
  spare_mappings(spare_mappings&& other) noexcept : pages_(std::exchange(other.pages_, {})) {}
  spare_mappings& operator=(spare_mappings&& other) noexcept {
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~spare_mappings() {
    while (let_go()) {
    }
  }

  /// Maps the missing ones, as far as the system grants it.
  void take(const memory_file& file) noexcept {
    for (std::byte*& each : pages_) {
      // All map the same page, because the system would merge adjacent pages into one mapping.
      if (each == nullptr) each = file.map(nullptr, 0, system_page_bytes(), PROT_NONE);
      if (each == nullptr) return;
    }
  }

  /// Releases one. False when there is none.
  [[nodiscard]] bool let_go() noexcept {
    for (std::byte*& each : pages_) {
      if (each == nullptr) continue;
      ::munmap(std::exchange(each, nullptr), static_cast<std::size_t>(system_page_bytes()));
      return true;
    }
    return false;
  }

 private:
  std::array<std::byte*, 4> pages_{};  // one for the new mapping, two if it splits one in three
};

}  // namespace detail

/// Maps pieces of one memfd. Every handle is its own part of the file, never reused for another, so that
/// handles made consecutively and mapped next to each other cost the kernel one entry, not two.
///
/// @par Thread safety   none of its own.
/// @par Errors          the constructor throws `system_error` without memfd and `argument_error` for a
///   granularity that is not a multiple of the page size; error numbers are `errno`.
class host_mapper {
 public:
  static constexpr bool is_host_accessible = true;

  explicit host_mapper(const host_mapper_options& options = {}) : options_(options), file_("llmmem-virtual") {
    if (!file_.is_open()) {
      const int why = errno;
      throw system_error("host_mapper: memfd_create: " + std::string(std::strerror(why)) + " (errno " +
                         std::to_string(why) +
                         "); Linux has it from 3.17 on, and a sandbox may forbid it: use host_space there");
    }
    const std::uint64_t page = system_page_bytes();
    if (options_.granularity == 0) options_.granularity = page;
    if (options_.granularity % page != 0) {
      throw argument_error("host_mapper: a granularity of " + std::to_string(options_.granularity) +
                           " bytes is not a multiple of the page size, " + std::to_string(page));
    }
    spare_.take(file_);
  }

  [[nodiscard]] std::uint64_t granularity() const noexcept { return options_.granularity; }

  [[nodiscard]] mapper_answer reserve(std::uint64_t bytes) noexcept {
    std::byte* const data = reserve_addresses(bytes, options_.granularity);
    if (data == nullptr) return {.error = last_error()};
    return {.value = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data))};
  }

  void release(std::byte* at, std::uint64_t bytes) noexcept { ::munmap(at, static_cast<std::size_t>(bytes)); }

  [[nodiscard]] mapper_answer create(std::uint64_t bytes) noexcept {
    const std::uint64_t offset = length_;
    if (bytes > max_bytes - offset) return {.error = static_cast<std::uint32_t>(EFBIG)};
    if (const int error = file_.resize(offset + bytes); error != 0) {
      return {.error = static_cast<std::uint32_t>(error)};
    }
    if (options_.take == backing::at_once) {
      if (const int error = file_.fill(offset, bytes); error != 0) {
        static_cast<void>(file_.resize(offset));  // releases the part that was taken
        return {.error = static_cast<std::uint32_t>(error)};
      }
    }
    length_ = offset + bytes;
    return {.value = offset};
  }

  void destroy(std::uint64_t offset, std::uint64_t bytes) noexcept {
    if (file_.punch(offset, bytes) != 0) report_.kept_bytes += bytes;
  }

  [[nodiscard]] std::uint32_t map(std::byte* at, std::uint64_t offset, std::uint64_t bytes) noexcept {
    if (file_.map(at, offset, bytes, PROT_READ | PROT_WRITE) == nullptr) return last_error();
#if defined(MADV_HUGEPAGE)
    if (options_.huge == huge_pages::advise) {
      const bool advised = ::madvise(at, static_cast<std::size_t>(bytes), MADV_HUGEPAGE) == 0;
      ++(advised ? report_.huge_advised : report_.huge_refused);
    }
#endif
    return 0;
  }

  /// Not needed, because `map` did it.
  [[nodiscard]] std::uint32_t allow(std::byte*, std::uint64_t) noexcept { return 0; }

  /// Replaces the mappings by addresses without memory, so that the system gives them to no other mapping.
  [[nodiscard]] std::uint32_t unmap(std::byte* at, std::uint64_t bytes) noexcept {
    while (reserve_addresses_at(at, bytes) == nullptr) {
      const std::uint32_t error = last_error();
      if (error != ENOMEM || !spare_.let_go()) return error;
    }
    spare_.take(file_);
    return 0;
  }

  /// Takes the pages there out of this process's tables: they count for its resident size again once they
  /// are touched. Their contents stay. What the system refuses stays counted. @pre all of it is mapped.
  void set_aside(std::byte* at, std::uint64_t bytes) noexcept {
    static_cast<void>(::madvise(at, static_cast<std::size_t>(bytes), MADV_DONTNEED));
  }

  /// Bytes of the pages that the system holds for it now.
  [[nodiscard]] std::uint64_t held_bytes() const noexcept { return file_.held_bytes(); }
  [[nodiscard]] const host_mapper_report& report() const noexcept { return report_; }

 private:
  [[nodiscard]] static std::uint32_t last_error() noexcept { return static_cast<std::uint32_t>(errno); }

  host_mapper_options options_;
  memory_file file_;
  detail::spare_mappings spare_;
  std::uint64_t length_ = 0;  // of the file; only grows
  host_mapper_report report_;
};

/// Virtual memory of the host: `growable_range` and `stitched_arena` work over it as on a device.
using host_virtual_memory = basic_virtual_memory<host_mapper>;

static_assert(page_mapper<host_mapper>);
static_assert(virtual_memory<host_virtual_memory>);

}  // namespace v0
}  // namespace llmmem
