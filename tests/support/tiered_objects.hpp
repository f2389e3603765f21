/// @file
/// The objects of a tiered buffer, wired for tests of one of them.
#pragma once

#include <llmmem/space/host.hpp>
#include <llmmem/tiering/detail/tiered_parts.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem_tests {

inline constexpr std::uint64_t object_page = 256;

/// `Tiers` of host memory. Chunks are records with a place in the last tier, as the desk makes them.
template <class... Tiers>
struct tiered_objects {
  using parts_type = llmmem::detail::tiered_parts<llmmem::tiered_traits, Tiers...>;
  static constexpr std::size_t last = sizeof...(Tiers) - 1;

  llmmem::host_space memory{{.budget = 1 << 20}};
  parts_type parts;

  /// @param pages  of each tier.
  template <class... Pages>
  explicit tiered_objects(llmmem::tiered_options options, Pages... pages)
      : parts({}, {}, options,
              llmmem::tier_place<llmmem::host_space>(memory, static_cast<std::uint64_t>(pages) * object_page,
                                                     64)...) {}

  /// The slot of a chunk of one page.
  std::uint32_t make() { return parts.chunks.record_of(parts.desk.create(object_page).value()); }
  llmmem::detail::tier_copy& copy(std::uint32_t slot, std::size_t tier) {
    return parts.chunks[slot].copies[tier];
  }
  [[nodiscard]] std::vector<std::string> audit() const { return parts.audit(); }
};

}  // namespace llmmem_tests
