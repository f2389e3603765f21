/// @file
/// What a test carries plans out on: it notes each call, and answers as it was told.
#pragma once

#include <llmmem/schedule/detail/step_window.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace llmmem_tests {

/// Notes the chunks of the steps that begin and of those that are prefetched, in their order.
struct noting_target {
  struct notes {
    std::vector<llmmem::chunk_id> begun{};
    std::vector<llmmem::chunk_id> unneeded{};
    std::vector<llmmem::chunk_id> prefetched{};
    std::vector<std::size_t> tiers{};
    std::uint64_t progressed = 0;
  };
  struct answers {
    std::vector<llmmem::chunk_id> later{};     ///< chunks whose steps must wait
    std::vector<llmmem::chunk_id> unneeded{};  ///< chunks whose steps are unneeded
    std::vector<llmmem::chunk_id> throwing{};
    llmmem::tiering::step_blocker blocker = llmmem::tiering::step_blocker::transfer;
    std::uint64_t now_ns = 0;
  };
  notes* noted;
  const answers* told;

  void progress() const { ++noted->progressed; }
  [[nodiscard]] llmmem::tiering::step_outcome execute(llmmem::chunk_id chunk, llmmem::plan_operation,
                                                      std::size_t tier) const {
    const auto is_in = [&](const auto& chunks) { return std::ranges::find(chunks, chunk) != chunks.end(); };
    if (is_in(told->throwing)) throw std::runtime_error("the target cannot");
    if (is_in(told->later)) return llmmem::tiering::step_outcome::deferred;
    (is_in(told->unneeded) ? noted->unneeded : noted->begun).push_back(chunk);
    noted->tiers.push_back(tier);
    return is_in(told->unneeded) ? llmmem::tiering::step_outcome::unneeded
                                 : llmmem::tiering::step_outcome::done;
  }
  [[nodiscard]] llmmem::tiering::step_blocker blocker() const noexcept { return told->blocker; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return told->now_ns; }
  void prefetch(llmmem::chunk_id chunk) const { noted->prefetched.push_back(chunk); }
};
static_assert(llmmem::detail::plan_target<noting_target>);

}  // namespace llmmem_tests
