/// @file
/// The tiers below a replay's cache: host memory and NVMe, with bytes for every block.
#pragma once

#include <llmmem/comm/thread_network.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay_trace/tier_blocks.hpp"

namespace replay_trace {

/// The blocks of the tiers for one prompt.
struct tier_hits {
  std::uint64_t host_blocks = 0;
  std::uint64_t nvme_blocks = 0;
  std::uint64_t host_tokens = 0;
  std::uint64_t nvme_tokens = 0;
};

/// A cache with two tiers below it. Blocks that the cache evicts go to host memory and from there to NVMe.
/// The host evicts the least recently used block, and sends it down again if NVMe has lost it. Every block's
/// bytes follow from its key, so that each block that comes back can be checked.
///
/// @tparam Cache  a `paged_allocator` with the observer `offload::tier_link`.
/// @par Errors   throws `llmmem::error` if a block comes back with different bytes.
template <class Cache>
class cache_tiers {
 public:
  /// @param node   the number of this node, which names the file of the NVMe tier.
  /// @param store  when blocks go from the cache to host memory.
  cache_tiers(Cache& cache, const tier_blocks& tiers, std::uint32_t node = 0,
              llmmem::offload::store_policy store = llmmem::write_back{})
      : cache_(&cache),
        store_(store),
        block_bytes_(tiers.block_bytes),
        memory_(cache.physical_blocks() * block_bytes_),
        host_({.budget = whole_pages(tiers.host * block_bytes_), .name = "host tier"}) {
    if (tiers.folder) {
      const std::string file = *tiers.folder + "/replay_trace.tier" + (node == 0 ? "" : std::to_string(node));
      on_file_ = std::make_unique<file_side>(*this, file, tiers.host * block_bytes_,
                                             tiers.nvme * whole_pages(block_bytes_));
    } else {
      in_memory_ = std::make_unique<memory_side>(*this, tiers.host * block_bytes_, tiers.nvme * block_bytes_);
    }
  }

  /// Makes the tiers a node of a pool.
  void join(llmmem::thread_endpoint& end) {
    on_side([&](auto& side) { side.pool.emplace(side.tiers, end, llmmem::kv_pool_options{}); });
  }
  /// Lets the pool's node answer others.
  void progress() {
    on_side([](auto& side) {
      if (side.pool) side.pool->progress();
    });
  }
  /// Fetches into the host tier the blocks that other nodes have after those of `sequence`, and calls `then`
  /// while they stay there.
  /// @param drive  lets all nodes progress.
  /// @return blocks that arrived.
  template <class Drive, class Then>
  std::uint64_t with_fetched(const llmmem::kv_chain& chain, llmmem::sequence_id sequence, Drive&& drive,
                             Then&& then) {
    std::uint64_t blocks = 0;
    on_side([&](auto& side) {
      auto request = side.pool->ask(chain, cache_->tokens(sequence), llmmem::unlimited).value();
      while (request.where().next == llmmem::offload::answer::pending)
        drive();
      request.fetch();
      while (!request.has_arrived())
        drive();
      then();
      blocks = request.end().blocks;
    });
    return blocks;
  }
  /// Stores the blocks of a sequence that the policy selects, and publishes them to the pool.
  void store(llmmem::sequence_id sequence, const llmmem::kv_chain& chain) {
    on_side([&](auto& side) {
      side.tiers.store(sequence).value();
      if (side.pool) side.pool->publish(chain, chain.tokens());
    });
  }
  /// The counters of the pool's node.
  [[nodiscard]] llmmem::pool::stats pool_stats() {
    llmmem::pool::stats out;
    on_side([&](auto& side) {
      if (side.pool) out = side.pool->stats();
    });
    return out;
  }

  /// Loads the blocks that the tiers have after those of `sequence`, and checks them.
  tier_hits load(llmmem::sequence_id sequence, const llmmem::keyed_blocks& prompt) {
    if (cache_->blocks(sequence).size() == prompt.keys.size()) return {};
    return load(sequence, prompt, llmmem::kv_chain(*cache_, prompt));
  }
  tier_hits load(llmmem::sequence_id sequence, const llmmem::keyed_blocks& prompt,
                 const llmmem::kv_chain& chain) {
    tier_hits out;
    on_side([&](auto& side) { out = load_from(side.tiers, sequence, prompt, chain); });
    return out;
  }
  /// Writes the bytes of a sequence's blocks from `first` to the end, in place of their computation.
  void compute(llmmem::sequence_id sequence, std::span<const llmmem::block_key> keys, std::size_t first) {
    const auto table = cache_->blocks(sequence);
    for (std::size_t i = first; i < keys.size(); ++i)
      each_word(keys[i],
                [&](std::size_t w, std::uint64_t word) { std::memcpy(at(table[i]) + 8 * w, &word, 8); });
  }
  /// Waits until evicted blocks have moved down, so that the hits do not depend on the device's speed.
  void settle() {
    on_side([](auto& side) { side.tiers.flush(); });
  }

  [[nodiscard]] std::uint64_t verified_blocks() const noexcept { return verified_; }
  [[nodiscard]] llmmem::offload::kv_tiers_stats stats() const {
    return on_file_ ? on_file_->tiers.stats() : in_memory_->tiers.stats();
  }

 private:
  [[nodiscard]] static std::uint64_t whole_pages(std::uint64_t bytes) noexcept {
    constexpr std::uint64_t page = 4096;
    return (bytes + page - 1) / page * page;
  }
  using mover = llmmem::offload::layout_mover<llmmem::host_executor>;
  template <class Space>
  using tiers_over = llmmem::kv_tiers<Cache, mover, llmmem::offload::kv_tier<llmmem::host_space>,
                                      llmmem::offload::kv_tier<Space>>;

  /// The lower tier, and all tiers over it.
  struct memory_side {
    memory_side(cache_tiers& of, std::uint64_t host, std::uint64_t nvme)
        : below({.budget = whole_pages(nvme), .name = "nvme tier"}),
          tiers(of.make_tiers(below, host, nvme)) {}
    llmmem::host_space below;
    tiers_over<llmmem::host_space> tiers;
    std::optional<llmmem::kv_pool<tiers_over<llmmem::host_space>, llmmem::thread_endpoint>> pool{};
  };
  struct file_side {
    file_side(cache_tiers& of, const std::string& path, std::uint64_t host, std::uint64_t nvme)
        : below(path, {.budget = nvme}), tiers(of.make_tiers(below, host, nvme)) {}
    llmmem::file_space<> below;
    tiers_over<llmmem::file_space<>> tiers;
    std::optional<llmmem::kv_pool<tiers_over<llmmem::file_space<>>, llmmem::thread_endpoint>> pool{};
  };

  template <class F>
  void on_side(F&& f) {
    on_file_ ? f(*on_file_) : f(*in_memory_);
  }
  template <class Space>
  [[nodiscard]] tiers_over<Space> make_tiers(Space& below, std::uint64_t host, std::uint64_t nvme) {
    const llmmem::kv_layout layout{.layers = 1,
                                   .heads = 1,
                                   .head_dim = static_cast<std::uint32_t>(block_bytes_),
                                   .block_tokens = 1,
                                   .has_values = false,
                                   .element = llmmem::dtype::int8};
    return {*cache_,
            mover({}, {.data = memory_.data(), .blocks = cache_->physical_blocks(), .layout = layout}),
            {.store = store_, .load_headroom = 0, .name = "replay tiers"},
            llmmem::offload::kv_tier(host_, host, llmmem::demoting<llmmem::write_through>{}),
            llmmem::offload::kv_tier(below, nvme)};
  }
  template <class Tiers>
  tier_hits load_from(Tiers& tiers, llmmem::sequence_id sequence, const llmmem::keyed_blocks& prompt,
                      const llmmem::kv_chain& chain) {
    const std::size_t first = cache_->blocks(sequence).size();
    if (first == prompt.keys.size()) return {};
    // The last block of a prompt may be short.
    const bool ends_in_host = tiers.lookup_block(chain, 0, prompt.keys.size() - 1).second == 0;
    auto load = tiers.prepare_load(sequence, chain).value();
    const llmmem::offload::load_result came = load.complete();
    if (!came.is_complete()) throw llmmem::error("replay tiers: a load failed: " + came.why.message());
    const auto table = cache_->blocks(sequence);
    for (std::size_t i = first; i < table.size(); ++i)
      verify(prompt.keys[i], at(table[i]));
    tier_hits out{.host_blocks = came.blocks[0], .nvme_blocks = came.blocks[1]};
    out.host_tokens = out.host_blocks * cache_->block_tokens();
    out.nvme_tokens = out.nvme_blocks * cache_->block_tokens();
    (ends_in_host ? out.host_tokens : out.nvme_tokens) -=
        out.host_tokens + out.nvme_tokens - (came.tokens - came.first);
    return out;
  }
  void verify(const llmmem::block_key& key, const std::byte* block) {
    each_word(key, [&](std::size_t w, std::uint64_t word) {
      if (std::memcmp(block + 8 * w, &word, 8) != 0)
        throw llmmem::error("replay tiers: a block came back with other contents than it left with");
    });
    ++verified_;
  }
  template <class F>
  void each_word(const llmmem::block_key& key, F&& f) const {
    for (std::size_t w = 0; w < block_bytes_ / 8; ++w)
      f(w, (w % 2 == 0 ? key.low : key.high) + w);
  }
  [[nodiscard]] std::byte* at(llmmem::block_id block) noexcept {
    return memory_.data() + llmmem::to_index(block) * block_bytes_;
  }

  Cache* cache_;
  llmmem::offload::store_policy store_;
  std::uint64_t block_bytes_;
  std::vector<std::byte> memory_;
  llmmem::host_space host_;
  std::unique_ptr<memory_side> in_memory_;
  std::unique_ptr<file_side> on_file_;
  std::uint64_t verified_ = 0;
};

}  // namespace replay_trace
