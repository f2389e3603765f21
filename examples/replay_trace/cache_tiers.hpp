/// @file
/// The tiers beneath a replay's cache: host memory and NVMe, with bytes behind every block.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/offload/kv_tiers.hpp>
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

/// What came out of the tiers for one prompt.
struct tier_hits {
  std::uint64_t host_blocks = 0;
  std::uint64_t nvme_blocks = 0;
  std::uint64_t host_tokens = 0;
  std::uint64_t nvme_tokens = 0;
};

/// A cache with two tiers beneath it. What the cache evicts goes to host memory and from there to NVMe; host
/// evicts what was unused for longest, and sends down again what NVMe has lost. Every block has bytes that
/// follow from its key, so that each that comes back can be checked.
///
/// @tparam Cache  a `paged_allocator` with the observer `offload::tier_link`.
/// @par Errors   throws `llmmem::error` when a block comes back with other bytes than it left with.
template <class Cache>
class cache_tiers {
 public:
  cache_tiers(Cache& cache, const tier_blocks& tiers)
      : cache_(&cache),
        block_bytes_(tiers.block_bytes),
        memory_(cache.physical_blocks() * block_bytes_),
        host_({.budget = whole_pages(tiers.host * block_bytes_), .name = "host tier"}) {
    if (tiers.folder) {
      on_file_ =
          std::make_unique<file_side>(*this, *tiers.folder + "/replay_trace.tier", tiers.host * block_bytes_,
                                      tiers.nvme * whole_pages(block_bytes_));
    } else {
      in_memory_ = std::make_unique<memory_side>(*this, tiers.host * block_bytes_, tiers.nvme * block_bytes_);
    }
  }

  /// Brings what the tiers have of a prompt behind what `sequence` holds, and checks it.
  tier_hits load(llmmem::sequence_id sequence, const llmmem::keyed_blocks& prompt) {
    return on_file_ ? load_from(on_file_->tiers, sequence, prompt)
                    : load_from(in_memory_->tiers, sequence, prompt);
  }
  /// Writes the bytes of blocks `first` to the end of a sequence, as computing them would.
  void compute(llmmem::sequence_id sequence, std::span<const llmmem::block_key> keys, std::size_t first) {
    const auto table = cache_->blocks(sequence);
    for (std::size_t i = first; i < keys.size(); ++i)
      each_word(keys[i],
                [&](std::size_t w, std::uint64_t word) { std::memcpy(at(table[i]) + 8 * w, &word, 8); });
  }
  /// Waits until what was evicted has gone down: the same hits at any speed of the device.
  void settle() { on_file_ ? on_file_->tiers.flush() : in_memory_->tiers.flush(); }

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
  };
  struct file_side {
    file_side(cache_tiers& of, const std::string& path, std::uint64_t host, std::uint64_t nvme)
        : below(path, {.budget = nvme}), tiers(of.make_tiers(below, host, nvme)) {}
    llmmem::file_space<> below;
    tiers_over<llmmem::file_space<>> tiers;
  };

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
            {.store = llmmem::write_back{}, .load_headroom = 0, .name = "replay tiers"},
            llmmem::offload::kv_tier(host_, host, llmmem::demoting<llmmem::write_through>{}),
            llmmem::offload::kv_tier(below, nvme)};
  }
  template <class Tiers>
  tier_hits load_from(Tiers& tiers, llmmem::sequence_id sequence, const llmmem::keyed_blocks& prompt) {
    const std::size_t first = cache_->blocks(sequence).size();
    if (first == prompt.keys.size()) return {};
    const llmmem::kv_chain chain(*cache_, prompt);
    // The last block of a prompt may be short.
    const bool ends_in_host = tiers.lookup_block(chain, 0, prompt.keys.size() - 1).second == 0;
    auto load = tiers.prepare_load(sequence, chain).value();
    const llmmem::offload::load_result came = load.complete();
    if (!came.is_whole()) throw llmmem::error("replay tiers: a load failed: " + came.why.message());
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
  std::uint64_t block_bytes_;
  std::vector<std::byte> memory_;
  llmmem::host_space host_;
  std::unique_ptr<memory_side> in_memory_;
  std::unique_ptr<file_side> on_file_;
  std::uint64_t verified_ = 0;
};

}  // namespace replay_trace
