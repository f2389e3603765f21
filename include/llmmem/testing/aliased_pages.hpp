/// @file
/// Pages mapped twice: at an address that crashes whoever dereferences it, and at one for the simulator's own
/// use.
#pragma once

#include <llmmem/config.hpp>

#if !defined(__linux__)
#error "llmmem/testing/aliased_pages.hpp needs Linux: it maps one memfd at two addresses."
#endif

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace llmmem::inline v0::testing {

/// One piece of simulated device memory. The address handed out stays PROT_NONE for good, so that there is no
/// moment at which a stray host access goes unseen; the alias is readable and writable.
///
/// A plain record of who maps what; `simulated_space` owns it.
struct aliased_pages {
  std::byte* address = nullptr;  ///< PROT_NONE
  std::byte* alias = nullptr;    ///< the same bytes, for copies
  std::uint64_t length = 0;      ///< of each mapping, whole pages

  /// Maps zeroed pages, the address a multiple of `alignment`; `address` is null when the system refuses.
  /// @pre `alignment` is a power of two, `bytes` not 0.
  [[nodiscard]] static aliased_pages map(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const long size = ::sysconf(_SC_PAGESIZE);
    const std::uint64_t page = size > 0 ? static_cast<std::uint64_t>(size) : 65536;
    const std::uint64_t boundary = alignment > page ? alignment : page;
    constexpr std::uint64_t most = std::uint64_t{1} << 62;
    if (bytes > most || boundary > most) return {};
    const std::uint64_t length = (bytes + page - 1) / page * page;
    const std::uint64_t reserved = length + boundary - page;

    const int file = ::memfd_create("llmmem-simulated", MFD_CLOEXEC);
    if (file < 0) return {};
    aliased_pages pages;
    void* const start =
        ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED) {
      pages = place(file, start, reserved, length, boundary);
      if (pages.address == nullptr) ::munmap(start, reserved);
    }
    ::close(file);
    return pages;
  }

  /// Unmaps both.
  void unmap() noexcept {
    ::munmap(address, length);
    ::munmap(alias, length);
    *this = {};
  }

 private:
  [[nodiscard]] static aliased_pages place(int file, void* start, std::uint64_t reserved,
                                           std::uint64_t length, std::uint64_t boundary) noexcept {
    if (::ftruncate(file, static_cast<off_t>(length)) != 0) return {};
    void* const alias = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (alias == MAP_FAILED) return {};
    const std::uint64_t before = (boundary - reinterpret_cast<std::uintptr_t>(start) % boundary) % boundary;
    std::byte* const address = static_cast<std::byte*>(start) + before;
    if (::mmap(address, length, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
      ::munmap(alias, length);
      return {};
    }
    if (before != 0) ::munmap(start, before);
    if (const std::uint64_t behind = reserved - before - length; behind != 0)
      ::munmap(address + length, behind);
    return {address, static_cast<std::byte*>(alias), length};
  }
};

}  // namespace llmmem::inline v0::testing
