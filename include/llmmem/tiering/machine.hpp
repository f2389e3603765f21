/// @file
/// The machine a schedule is planned for: tiers with byte budgets, and the links between them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Tiers, the fastest first, and the links between neighbours. A plain value.
///
/// The program accesses chunks in tier 0. Chunks come from the last tier: it holds all of them, each keeps
/// its place there, and the tier has no budget. Chunks move between neighbours only.
///
///     schedule_machine one{.budgets = {8'000'000'000},                             // a GPU over its host
///                          .links = {{.bytes_per_second = 25'000'000'000}}};
///     schedule_machine two{.budgets = {8'000'000'000, 64'000'000'000},             // and an NVMe drive
///                          .links = {{.bytes_per_second = 25'000'000'000},
///                                    {.bytes_per_second = 6'000'000'000, .duplex = link_duplex::half}}};
struct schedule_machine {
  static constexpr std::size_t max_tiers = 8;

  /// Bytes of every tier except the last, which is unbounded.
  std::vector<std::uint64_t> budgets;
  /// The links.
  std::vector<link_model> links;
  /// The index of the link that joins tier i to tier i + 1, for every i. Empty: link i. Two edges with the
  /// same link share its bandwidth: their transfers queue together.
  std::vector<std::uint32_t> edges{};

  /// Returns the number of tiers, including the unbounded one.
  [[nodiscard]] std::size_t tiers() const noexcept { return budgets.size() + 1; }
  /// Returns the link between `tier` and the one below it. @pre `check()` passed, `tier + 1 < tiers()`.
  [[nodiscard]] std::uint32_t link_below(std::size_t tier) const noexcept {
    return edges.empty() ? static_cast<std::uint32_t>(tier) : edges[tier];
  }

  friend bool operator==(const schedule_machine&, const schedule_machine&) noexcept = default;

  /// Refuses a machine for which no planner can plan.
  /// @throws argument_error  naming the tier or link and its number.
  void check() const {
    const auto refuse = [](const std::string& why) { throw argument_error("schedule_machine: " + why); };
    if (budgets.empty()) refuse("no tier has a budget; there must be one above the unbounded tier");
    if (tiers() > max_tiers) {
      refuse(std::to_string(tiers()) + " tiers; the most is " + std::to_string(max_tiers));
    }
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      if (budgets[i] == 0 || budgets[i] > max_bytes) {
        refuse("tier " + std::to_string(i) + " has a budget of " + std::to_string(budgets[i]) +
               " bytes; it must be 1 to 2^63 - 1");
      }
    }
    for (std::size_t i = 0; i < links.size(); ++i)
      check_link(links[i], ("schedule_machine: link " + std::to_string(i)).c_str());
    if (!edges.empty() && edges.size() != budgets.size()) {
      refuse(std::to_string(edges.size()) + " edges name a link; there are " +
             std::to_string(budgets.size()) + " between the tiers");
    }
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      if (link_below(i) >= links.size()) {
        refuse("the edge below tier " + std::to_string(i) + " has link " + std::to_string(link_below(i)) +
               ", of " + std::to_string(links.size()) + " given; give one for each of the " +
               std::to_string(budgets.size()) + " pairs of neighbours, or name theirs in edges");
      }
    }
  }
};

}  // namespace v0
}  // namespace llmmem
