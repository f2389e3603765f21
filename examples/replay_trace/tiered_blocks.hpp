/// @file
/// Blocks that left the paged cache, kept in two slower tiers of a `tiered_buffer`.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace replay_trace {

/// How many blocks each slower tier holds.
struct tier_blocks {
  std::uint64_t host = 0;
  std::uint64_t nvme = 0;
};

/// Keeps the keys of blocks that a cache dropped, for whoever moves their contents.
struct dropped_blocks {
  std::vector<llmmem::block_key>* keys = nullptr;

  void on_cached(const llmmem::stored_block&) const noexcept {}
  void on_dropped(llmmem::block_id, const llmmem::block_key& key) const noexcept { keys->push_back(key); }
};

/// The tiers beneath a paged cache. A block is a chunk; what stands for its keys and values is its key, 16
/// bytes, so that a replay of terabytes fits in memory, and so that what comes back can be checked. Host
/// holds copies of the blocks it was last asked for, NVMe all of them; the one unused for longest goes when
/// it is full.
///
/// @par Errors   throws `llmmem::error` when what comes back is not what left.
class tiered_blocks {
 public:
  enum class found_in : std::uint8_t { nowhere, host, nvme };

  explicit tiered_blocks(const tier_blocks& blocks)
      : host_({.budget = blocks.host * chunk_bytes + slack}),
        nvme_({.budget = blocks.nvme * chunk_bytes + slack}),
        buffer_({.max_chunks = static_cast<std::uint32_t>(blocks.nvme + 1), .name = "replay tiers"},
                place(host_, blocks.host), place(nvme_, blocks.nvme)) {}

  /// Takes a block that the cache dropped. No change for one it has.
  void offload(const llmmem::block_key& key) {
    if (const auto known = chunks_.find(key); known != chunks_.end()) return touch(known->second);
    auto made = buffer_.create(chunk_bytes);
    while (made.code() == llmmem::errc::out_of_bytes && !order_.empty()) {
      drop_oldest();
      made = buffer_.create(chunk_bytes);
    }
    const llmmem::chunk_handle chunk = made.value();
    const auto lease = buffer_.write(chunk).value();
    std::memcpy(lease.span().data(), &key, sizeof key);
    order_.push_back(key);
    chunks_.emplace(key, entry{chunk, std::prev(order_.end())});
  }

  /// Brings a block up, and says from where.
  [[nodiscard]] found_in onboard(const llmmem::block_key& key) {
    const auto known = chunks_.find(key);
    if (known == chunks_.end()) return found_in::nowhere;
    const std::size_t tier = buffer_.tier_of(known->second.chunk).value();
    const auto lease = buffer_.read(known->second.chunk).value();
    if (std::memcmp(lease.span().data(), &key, sizeof key) != 0) {
      throw llmmem::error("replay tiers: a block came back with other contents than it left with");
    }
    touch(known->second);
    return tier == 0 ? found_in::host : found_in::nvme;
  }

 private:
  static constexpr std::uint64_t chunk_bytes = 64;
  static constexpr std::uint64_t slack = 4096;

  struct key_hash {
    [[nodiscard]] std::size_t operator()(const llmmem::block_key& key) const noexcept {
      return static_cast<std::size_t>(key.low ^ key.high);
    }
  };
  struct entry {
    llmmem::chunk_handle chunk;
    std::list<llmmem::block_key>::iterator place;
  };

  [[nodiscard]] static llmmem::tier_place<llmmem::host_space> place(llmmem::host_space& space,
                                                                    std::uint64_t blocks) {
    llmmem::tier_place<llmmem::host_space> made(space, blocks * chunk_bytes, chunk_bytes);
    made.max_pieces = static_cast<std::uint32_t>(2 * blocks + 2);
    return made;
  }

  void touch(entry& known) { order_.splice(order_.end(), order_, known.place); }
  void drop_oldest() {
    const auto oldest = chunks_.find(order_.front());
    buffer_.remove(oldest->second.chunk).value();
    chunks_.erase(oldest);
    order_.pop_front();
  }

  llmmem::host_space host_;
  llmmem::host_space nvme_;
  llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space> buffer_;
  std::list<llmmem::block_key> order_;  // the one unused for longest first
  std::unordered_map<llmmem::block_key, entry, key_hash> chunks_;
};

}  // namespace replay_trace
