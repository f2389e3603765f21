/// @file
/// Finds the prefixes in tiers that provably do not build on a wrong one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/offload/detail/tier_keys.hpp>
#include <llmmem/paging/outside_keys.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The chunks that tiers hold, and the chunk before each. A chunk is *sound* if its chain back to the
/// beginning of a prompt is known without a gap and does not contain the wrong chunk. With a gap, it is
/// unknown what the block was computed from.
///
/// @par Complexity   `judge` O(n log n) for n chunks; `is_sound` O(log n).
class prefix_links {
 public:
  void add(const block_key& own, parent_digest parent) {
    links_.push_back({paging::key_digest(own), parent});
  }

  void judge(const block_key& wrong) {
    // If a chunk has several copies, a copy with a known parent comes first.
    std::ranges::sort(links_, [](const link& a, const link& b) {
      return a.own != b.own ? a.own < b.own
                            : a.parent != parent_digest::unknown && b.parent == parent_digest::unknown;
    });
    const auto copies = std::ranges::unique(links_, {}, &link::own);
    links_.erase(copies.begin(), copies.end());
    if (link* const bad = find(paging::key_digest(wrong))) bad->state = verdict::wrong;
    std::vector<link*> path;
    for (link& each : links_) {
      path.clear();
      link* at = &each;
      while (at != nullptr && at->state == verdict::open) {
        at->state = verdict::asked;  // a second visit would mean a cycle, which no chain has
        path.push_back(at);
        at = at->parent == parent_digest::none ? nullptr : find(static_cast<std::uint64_t>(at->parent));
      }
      const bool begins = at == nullptr && !path.empty() && path.back()->parent == parent_digest::none;
      const bool sound = begins || (at != nullptr && at->state == verdict::sound);
      for (link* const passed : path)
        passed->state = sound ? verdict::sound : verdict::wrong;
    }
  }

  [[nodiscard]] bool is_sound(const block_key& own) noexcept {
    const link* const found = find(paging::key_digest(own));
    return found != nullptr && found->state == verdict::sound;
  }

 private:
  enum class verdict : std::uint8_t { open, asked, sound, wrong };
  struct link {
    std::uint64_t own = 0;
    parent_digest parent = parent_digest::unknown;
    verdict state = verdict::open;
  };

  [[nodiscard]] link* find(std::uint64_t digest) noexcept {
    const auto at = std::ranges::lower_bound(links_, digest, {}, &link::own);
    return at == links_.end() || at->own != digest ? nullptr : &*at;
  }

  std::vector<link> links_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
