/// @file
/// A paged cache with tiers below it: evicted blocks go to host memory and a file, and come back instead of
/// being computed again.
#pragma once

#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "paged_decode/host_place.hpp"
#include "paged_decode/paged_cache.hpp"

namespace paged_decode {

/// The sizes of the tiers below a cache.
struct tier_sizes {
  std::uint64_t host = 0;  ///< blocks
  std::uint64_t file = 0;  ///< blocks
  std::string folder{};    ///< of the file
};

struct tier_counts {
  std::uint64_t host_blocks = 0;  ///< blocks loaded from each tier
  std::uint64_t file_blocks = 0;
  std::uint64_t failed_blocks = 0;
  std::uint64_t block_bytes = 0;
};

/// The copies between a store's memories and the slots of the first tier.
[[nodiscard]] inline auto mover_of(const element_store<host_place>& store) {
  return llmmem::offload::layout_mover(llmmem::host_executor{}, store.memories()[0]);
}

/// A `kv_cache`.
/// @tparam Mover  the mover that `mover_of` makes for the cache's store.
template <class Mover>
class tiered_cache {
 public:
  using sequence = llmmem::sequence_id;

  tiered_cache(paged_cache<host_place>& cache, Mover mover, const tier_sizes& sizes)
      : cache_(&cache),
        layers_(mover.layers(0)),
        bytes_(mover.block_bytes(0)),
        host_({.budget = whole_pages(sizes.host * bytes_), .name = "host tier"}),
        file_(sizes.folder + "/paged_decode.tier", {.budget = sizes.file * whole_pages(bytes_)}),
        tiers_(
            cache.allocator(), std::move(mover), {.store = llmmem::write_through{}, .load_headroom = 0},
            llmmem::offload::kv_tier(host_, sizes.host * bytes_, llmmem::demoting<llmmem::write_through>{}),
            llmmem::offload::kv_tier(file_, sizes.file * whole_pages(bytes_))) {}

  /// Finds the cached part of a prompt, and loads the tiers' blocks after it, layer by layer.
  [[nodiscard]] sequence create(std::span<const llmmem::token_id> prompt) {
    const sequence made = cache_->create(prompt);
    // The last token is computed in any case: its logits are wanted.
    const llmmem::kv_chain chain(cache_->allocator(), prompt.first(prompt.size() - 1));
    auto load = tiers_.prepare_load(made, chain).value();
    for (std::uint32_t layer = 0; layer < layers_; ++layer)
      load.wait(layer).value();  // an engine attends with the layer here
    const llmmem::offload::load_result came = load.complete();
    if (!came.is_complete()) cache_->allocator().truncate(made, came.tokens).value();
    counts_.host_blocks += came.blocks[0];
    counts_.file_blocks += came.blocks[1];
    counts_.failed_blocks += came.failed_blocks;
    return made;
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return cache_->tokens(of); }
  void grow(std::span<const grown<sequence>> batch) { cache_->grow(batch); }
  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    return cache_->attend(layer, in);
  }
  void commit(sequence of) {
    cache_->commit(of);
    tiers_.store(of).value();
  }
  [[nodiscard]] sequence fork(sequence parent) { return cache_->fork(parent); }
  void truncate(sequence of, std::uint64_t tokens) { cache_->truncate(of, tokens); }
  /// Blocks that found no slot, because the file was behind, are stored once it has caught up: so every run
  /// computes the same tokens, at any speed of the file. An engine that cannot wait computes such blocks
  /// again.
  void release(sequence of) {
    tiers_.flush();
    tiers_.store(of).value();
    cache_->release(of);
    tiers_.progress();
  }

  [[nodiscard]] tier_counts counts() const noexcept {
    tier_counts out = counts_;
    out.block_bytes = bytes_;
    return out;
  }

 private:
  [[nodiscard]] static std::uint64_t whole_pages(std::uint64_t bytes) noexcept {
    constexpr std::uint64_t page = 4096;
    return (bytes + page - 1) / page * page;
  }

  paged_cache<host_place>* cache_;
  std::uint32_t layers_;
  std::uint64_t bytes_;
  llmmem::host_space host_;
  llmmem::file_space<> file_;
  llmmem::kv_tiers<decode_allocator, Mover, llmmem::offload::kv_tier<llmmem::host_space>,
                   llmmem::offload::kv_tier<llmmem::file_space<>>>
      tiers_;
  tier_counts counts_{};
};

}  // namespace paged_decode
