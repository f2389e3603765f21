/// @file
/// What a `shared_prefix_cache` should hold, known from what it said it did.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace llmmem_tests {

/// The context's salt, then all tokens up to and with a block's.
using cached_path = std::vector<std::int64_t>;

/// The cached prefixes as a map, and references as a list: the definition of a shared prefix cache.
class shared_model {
 public:
  struct contents {
    llmmem::block_id block = llmmem::null_block;
    std::uint64_t serial = 0;  // tells lives apart
  };

  [[nodiscard]] std::optional<contents> find(const cached_path& path) const {
    const auto at = cached_.find(path);
    return at == cached_.end() ? std::nullopt : std::optional(at->second);
  }
  void insert(const cached_path& path, llmmem::block_id block) { cached_[path] = {block, ++serial_}; }

  void hold(llmmem::block_id block) { ++held_[block]; }
  void let_go(llmmem::block_id block) { --held_[block]; }
  [[nodiscard]] std::uint64_t held(llmmem::block_id block) const {
    const auto at = held_.find(block);
    return at == held_.end() ? 0 : at->second;
  }

  /// Whether the block may be evicted: cached, held by nobody, and nothing cached continues it.
  [[nodiscard]] bool is_idle_leaf(llmmem::block_id block) const {
    const auto at = holder_of(block);
    return at != cached_.end() && held(block) == 0 && !is_continued(at);
  }
  /// @pre `is_idle_leaf`.
  void evict(llmmem::block_id block) { cached_.erase(holder_of(block)); }

  [[nodiscard]] bool is_cached(llmmem::block_id block) const { return holder_of(block) != cached_.end(); }
  [[nodiscard]] std::uint64_t cached() const { return cached_.size(); }

  [[nodiscard]] std::uint64_t idle() const {
    std::uint64_t count = 0;
    for (auto at = cached_.begin(); at != cached_.end(); ++at)
      count += held(at->second.block) == 0 && !is_continued(at) ? 1U : 0U;
    return count;
  }

  /// Cached blocks that could be evicted one after the other: those that nobody holds, nor anything behind
  /// them.
  [[nodiscard]] std::uint64_t evictable() const {
    std::uint64_t count = 0;
    for (const auto& [path, found] : cached_) {
      bool in_use = false;
      for (const auto& [other, behind] : cached_)
        in_use = in_use || (begins_with(other, path) && held(behind.block) != 0);
      count += in_use ? 0 : 1;
    }
    return count;
  }

  /// Blocks that are private or free, of `blocks`, and held.
  [[nodiscard]] std::uint64_t private_blocks() const {
    std::uint64_t count = 0;
    for (const auto& [block, holders] : held_)
      count += holders != 0 && !is_cached(block) ? 1U : 0U;
    return count;
  }

 private:
  using place = std::map<cached_path, contents>::const_iterator;

  [[nodiscard]] static bool begins_with(const cached_path& path, const cached_path& beginning) {
    return path.size() >= beginning.size() && std::equal(beginning.begin(), beginning.end(), path.begin());
  }
  [[nodiscard]] place holder_of(llmmem::block_id block) const {
    auto at = cached_.begin();
    while (at != cached_.end() && at->second.block != block)
      ++at;
    return at;
  }
  [[nodiscard]] bool is_continued(place at) const {
    const auto next = std::next(at);  // paths are ordered: what continues this one comes next
    return next != cached_.end() && begins_with(next->first, at->first);
  }

  std::map<cached_path, contents> cached_;
  std::map<llmmem::block_id, std::uint64_t> held_;
  std::uint64_t serial_ = 0;
};

}  // namespace llmmem_tests
