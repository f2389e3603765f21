/// @file
/// Pages mapped twice: at an address that crashes a host access, and at one for the simulator's own use.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/space/memory_file.hpp>

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// One piece of simulated device memory. The address given out stays PROT_NONE permanently, so every stray
/// host access crashes; the alias is readable and writable.
///
/// A plain record of the mappings; `simulated_space` owns it.
struct aliased_pages {
  std::byte* address = nullptr;  ///< PROT_NONE
  std::byte* alias = nullptr;    ///< the same bytes, for copies
  std::uint64_t length = 0;      ///< bytes of each mapping, whole pages

  /// Maps zeroed pages, the address a multiple of `alignment`; `address` is null if the system refuses.
  /// @pre `alignment` is a power of two, `bytes` not 0.
  [[nodiscard]] static aliased_pages map(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::uint64_t page = system_page_bytes();
    constexpr std::uint64_t most = std::uint64_t{1} << 62;
    if (bytes > most) return {};
    const std::uint64_t length = (bytes + page - 1) / page * page;

    memory_file file("llmmem-simulated");
    if (!file.is_open() || file.resize(length) != 0) return {};
    std::byte* const reserved = reserve_addresses(length, alignment > page ? alignment : page);
    if (reserved == nullptr) return {};
    std::byte* const alias = file.map(nullptr, 0, length, PROT_READ | PROT_WRITE);
    std::byte* const address = alias == nullptr ? nullptr : file.map(reserved, 0, length, PROT_NONE);
    if (address == nullptr) {
      if (alias != nullptr) ::munmap(alias, length);
      ::munmap(reserved, length);
      return {};
    }
    return {address, alias, length};
  }

  /// Unmaps both.
  void unmap() noexcept {
    ::munmap(address, length);
    ::munmap(alias, length);
    *this = {};
  }
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
