/// @file
/// The sources of host memory: the heap for small requests, whole pages of the operating system for the rest,
/// with huge pages and a NUMA node where the system grants them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The source of memory below a host space.
///
/// - `footprint(bytes, alignment)`: the bytes that such a request takes, at least `bytes`; the space charges
///   these to its budget.
/// - `take(bytes, alignment)`: returns an aligned address, or null. Never throws.
/// - `give_back(data, bytes, alignment)`: returns them as they were taken.
///
/// A source whose own release can be refused keeps those bytes, and also has:
/// - `kept_bytes()`: counted like `footprint`; the space charges them to its budget.
/// - `give_back_kept()`: tries again. Neither throws.
///
/// A source that knows in advance that a request is impossible may have `refusal(bytes, alignment)`:
/// returns the `failure`, or nothing, as `std::optional`.
template <class S>
concept byte_source = std::movable<S> && requires(S& source, std::byte* data, std::uint64_t n) {
  { source.footprint(n, n) } noexcept -> std::same_as<std::uint64_t>;
  { source.take(n, n) } noexcept -> std::same_as<std::byte*>;
  { source.give_back(data, n, n) } noexcept;
};

/// Whether to request transparent huge pages.
enum class huge_pages : std::uint8_t { never, advise };

/// How a `page_source` takes memory.
struct page_options {
  std::uint64_t map_from = std::uint64_t{1}
                           << 20;            ///< requests of at least this many bytes get their own pages
  huge_pages huge = huge_pages::advise;      ///< whether to request huge pages, for requests of at least one
  std::optional<std::uint32_t> numa_node{};  ///< preferred node; every request then gets its own pages
};

/// What the operating system granted. Hints are best effort: a refusal costs speed, not correctness.
struct page_report {
  std::uint64_t mapped_bytes = 0;     ///< live bytes in pages of their own
  std::uint64_t huge_advised = 0;     ///< requests for which `madvise(MADV_HUGEPAGE)` succeeded
  std::uint64_t huge_refused = 0;     ///< requests for which it did not
  std::uint64_t numa_bound = 0;       ///< requests for which `mbind` succeeded
  std::uint64_t numa_refused = 0;     ///< requests for which it did not
  int last_errno = 0;                 ///< the `errno` of the last refusal; 0 when there was none
  std::uint64_t page_bytes = 0;       ///< as reported by `sysconf`
  std::uint64_t huge_page_bytes = 0;  ///< as reported by the kernel; 0 without transparent huge pages
};

/// Heap and pages. Small requests go to the aligned `operator new`; requests of at least `map_from` bytes,
/// with an alignment larger than a page, or bound to a NUMA node, get their own pages from `mmap`, which
/// return to the system when released. A request of at least a huge page starts on a huge page boundary and
/// is advised.
///
/// @par Complexity      one to four system calls for a mapped request. The user's first access allocates the
///   pages.
/// @par Thread safety   none; the space holds its lock.
/// @par Errors          the constructor throws `argument_error`; nothing else throws.
class page_source {
 public:
  /// The largest node number that is passed to `mbind`.
  static constexpr std::uint32_t max_numa_node = 1022;

  explicit page_source(const page_options& options = {}) : options_(options) {
    if (options.numa_node && *options.numa_node > max_numa_node) {
      throw argument_error("page_source: NUMA node " + std::to_string(*options.numa_node) +
                           " exceeds the largest, " + std::to_string(max_numa_node));
    }
    const long page = ::sysconf(_SC_PAGESIZE);
    report_.page_bytes = page > 0 ? static_cast<std::uint64_t>(page) : 65536;
    report_.huge_page_bytes = read_huge_page_bytes();
  }

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    return maps(bytes, alignment) ? round_up(bytes, report_.page_bytes) : bytes;
  }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (maps(bytes, alignment)) return map(round_up(bytes, report_.page_bytes), alignment);
    return static_cast<std::byte*>(
        ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{alignment}, std::nothrow));
  }

  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (!maps(bytes, alignment)) {
      ::operator delete(data, std::align_val_t{alignment});
      return;
    }
    const std::uint64_t length = round_up(bytes, report_.page_bytes);
    ::munmap(data, static_cast<std::size_t>(length));
    report_.mapped_bytes -= length;
  }

  /// What was granted so far.
  [[nodiscard]] const page_report& report() const noexcept { return report_; }

 private:
  [[nodiscard]] static constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t to) noexcept {
    return (bytes + to - 1) / to * to;
  }

  [[nodiscard]] bool maps(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    return bytes >= options_.map_from || alignment > report_.page_bytes || options_.numa_node.has_value();
  }

  [[nodiscard]] static std::uint64_t read_huge_page_bytes() noexcept {
#if defined(MADV_HUGEPAGE)
    const int file = ::open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    char text[24];
    const auto length = ::read(file, text, sizeof text);
    ::close(file);
    std::uint64_t value = 0;
    for (int i = 0; i < length && text[i] >= '0' && text[i] <= '9'; ++i) {
      value = value * 10 + static_cast<std::uint64_t>(text[i] - '0');
    }
    const bool power_of_two = value != 0 && (value & (value - 1)) == 0;
    return power_of_two ? value : 0;
#else
    return 0;
#endif
  }

  /// Maps more than needed if the alignment requires it, and unmaps the excess.
  [[nodiscard]] std::byte* map(std::uint64_t length, std::uint64_t alignment) noexcept {
    const std::uint64_t page = report_.page_bytes;
    const bool huge = options_.huge == huge_pages::advise && report_.huge_page_bytes != 0 &&
                      length >= report_.huge_page_bytes;
    std::uint64_t boundary = alignment > page ? alignment : page;
    if (huge && report_.huge_page_bytes > boundary) boundary = report_.huge_page_bytes;
    if (length > max_bytes - boundary) return nullptr;
    const std::uint64_t reserved = length + boundary - page;
    void* const start = ::mmap(nullptr, static_cast<std::size_t>(reserved), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    const std::uint64_t before = (boundary - address % boundary) % boundary;
    auto* const data = static_cast<std::byte*>(start) + before;
    if (before != 0) ::munmap(start, static_cast<std::size_t>(before));
    if (const std::uint64_t behind = reserved - before - length; behind != 0) {
      ::munmap(data + length, static_cast<std::size_t>(behind));
    }
    report_.mapped_bytes += length;
    if (huge) advise_huge(data, length);
    if (options_.numa_node) bind(data, length, *options_.numa_node);
    return data;
  }

  void advise_huge([[maybe_unused]] std::byte* data, [[maybe_unused]] std::uint64_t length) noexcept {
#if defined(MADV_HUGEPAGE)
    count(::madvise(data, static_cast<std::size_t>(length), MADV_HUGEPAGE) == 0, report_.huge_advised,
          report_.huge_refused);
#endif
  }

  void bind([[maybe_unused]] std::byte* data, [[maybe_unused]] std::uint64_t length,
            [[maybe_unused]] std::uint32_t node) noexcept {
#if defined(__linux__) && defined(SYS_mbind)
    constexpr int prefer = 1;  // MPOL_PREFERRED: falls back to other nodes when this one is full
    constexpr unsigned bits = 8 * sizeof(unsigned long);
    unsigned long nodes[(max_numa_node + 2) / bits] = {};
    nodes[node / bits] |= 1UL << (node % bits);
    count(::syscall(SYS_mbind, data, length, prefer, nodes, static_cast<unsigned long>(max_numa_node) + 2,
                    0U) == 0,
          report_.numa_bound, report_.numa_refused);
#else
    errno = ENOSYS;
    count(false, report_.numa_bound, report_.numa_refused);
#endif
  }

  void count(bool granted, std::uint64_t& yes, std::uint64_t& no) noexcept {
    if (granted) {
      ++yes;
    } else {
      ++no;
      report_.last_errno = errno;
    }
  }

  page_options options_;
  page_report report_;
};

static_assert(byte_source<page_source>);

}  // namespace v0
}  // namespace llmmem
