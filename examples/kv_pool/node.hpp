/// @file
/// One node: a cache, the tiers below it, and its part in the pool. An engine would write this code.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kv_pool/board.hpp"
#include "kv_pool/command_line.hpp"
#include "kv_pool/prompts.hpp"

namespace kv_pool_example {

/// A cache with tiers and a pool. The keys and values of a block follow from the key of its prefix, so that
/// each block from elsewhere can be checked.
///
/// @tparam Space      of the host tier: host memory, or memory that a mover lets other processes read.
/// @tparam Directory  the pool's own, or a reference to the one that the constructor is given.
/// @tparam Mover      messages, or a reference to the mover that the constructor is given.
template <class Space = llmmem::host_space, class Directory = llmmem::pool::embedded_directory,
          class Mover = llmmem::pool::message_mover>
class node {
 public:
  template <class... Parts>
  node(const command_line& asked, llmmem::socket_endpoint& end, node_figures& figures, Space& host,
       Parts&... directory_or_mover)
      : asked_(&asked),
        figures_(&figures),
        cache_(
            {.blocks = 1024, .block_tokens = block_tokens, .max_sequences = 4, .max_sequence_tokens = 4096}),
        memory_(cache_.physical_blocks() * asked.block_bytes),
        tiers_(
            cache_,
            mover_type({}, {.data = memory_.data(), .blocks = cache_.physical_blocks(), .layout = layout()}),
            {.store = llmmem::write_through{}},
            llmmem::offload::kv_tier(host, asked.host_blocks * asked.block_bytes)),
        pool_(
            tiers_, end, directory_or_mover...,
            llmmem::kv_pool_options{.patience_ns = 20'000'000'000, .model = layout().content_fingerprint()}) {
  }

  void progress(std::uint64_t wait_ns = 0) { pool_.progress(wait_ns); }
  [[nodiscard]] std::uint32_t peers() const noexcept { return pool_.peers(); }
  [[nodiscard]] bool is_announced() const noexcept { return pool_.is_announced(); }

  /// Matches, fetches and loads the known part of a prompt, computes the rest, generates `answer` more
  /// tokens, and stores all of it for others.
  void serve(std::uint32_t number, std::uint32_t answer) {
    std::vector<llmmem::token_id> tokens = prompt_of(*asked_, number);
    const std::span<const llmmem::token_id> known = std::span(tokens).first(tokens.size() - 1);
    const llmmem::sequence_id sequence = cache_.create().value();
    llmmem::kv_chain chain(cache_, known);
    const std::uint64_t matched = cache_.match(sequence, known).value().tokens;

    auto request = pool_.ask(chain, matched).value();
    request.wait_for_answers();
    std::uint64_t upto = llmmem::unlimited;
    if (asked_->costs) {
      upto = request.fetched_upto(request.fetch(costs()));
    } else {
      request.fetch();
    }
    request.wait();  // an engine with other requests calls `progress` in its steps instead
    auto load = tiers_.prepare_load(sequence, chain, upto).value();
    const llmmem::pool::fetch_result fetched = request.end();
    for (std::uint32_t layer = 0; layer < layers; ++layer)
      load.wait(layer).value();  // and attends with it
    const llmmem::offload::load_result loaded = load.complete();
    if (!loaded.is_complete()) cache_.truncate(sequence, loaded.tokens).value();
    const std::uint64_t have = cache_.tokens(sequence);
    verify(sequence, chain, matched, have);

    for (std::uint32_t i = 0; i < answer; ++i)
      tokens.push_back(static_cast<llmmem::token_id>(number + i));
    cache_.append(sequence, std::span(tokens).subspan(have)).value();
    chain = llmmem::kv_chain(cache_, tokens);
    compute(sequence, chain, have / block_tokens);
    cache_.commit(sequence).value();
    tiers_.store(sequence).value();
    pool_.publish(chain, tokens.size());
    cache_.release(sequence).value();

    const std::uint64_t from_nodes = std::min(fetched.blocks * block_tokens, have - matched);
    ++figures_->requests;
    figures_->matched += matched;
    figures_->fetched += from_nodes;
    figures_->loaded += have - matched - from_nodes;
    figures_->computed += tokens.size() - have;
    figures_->costly += fetched.costly_tokens;
  }
  /// Copies the pool's counters to the board.
  void report() noexcept {
    const std::uint64_t served = pool_.stats().served_blocks;
    figures_->served += served - reported_;
    reported_ = served;
    const std::uint64_t read = pool_.stats().read_blocks;
    figures_->read += read - reported_reads_;
    reported_reads_ = read;
  }

 private:
  struct traits : llmmem::paged_traits {
    using observer = llmmem::offload::tier_link;
  };
  using cache_type = llmmem::paged_allocator<traits>;
  using mover_type = llmmem::offload::layout_mover<llmmem::host_executor>;
  using tiers_type = llmmem::kv_tiers<cache_type, mover_type, llmmem::offload::kv_tier<Space>>;

  [[nodiscard]] llmmem::kv_layout layout() const {
    return {.layers = layers,
            .heads = 1,
            .head_dim = static_cast<std::uint32_t>(asked_->block_bytes / layers / block_tokens),
            .block_tokens = block_tokens,
            .has_values = false,
            .element = llmmem::dtype::int8,
            .order = llmmem::block_order::block_first};
  }
  [[nodiscard]] llmmem::pool::fetch_costs costs() const {
    const llmmem::link_model link{.bytes_per_second = asked_->costs->link,
                                  .latency_ns = asked_->costs->latency};
    return {.load = {.prefill_ns = asked_->costs->compute}, .message = link, .read = link};
  }
  template <class F>
  void each_word(const llmmem::block_key& key, F&& f) const {
    for (std::uint64_t w = 0; w < asked_->block_bytes / 8; ++w)
      f(w * 8, (w % 2 == 0 ? key.low : key.high) + w);
  }
  [[nodiscard]] std::byte* bytes_of(llmmem::block_id block) noexcept {
    return memory_.data() + llmmem::to_index(block) * asked_->block_bytes;
  }
  /// Replaces the kernels of a prefill.
  void compute(llmmem::sequence_id sequence, const llmmem::kv_chain& chain, std::uint64_t first) {
    const auto table = cache_.blocks(sequence);
    for (std::uint64_t i = first; i < chain.keys().size(); ++i) {
      each_word(chain.keys()[static_cast<std::size_t>(i)], [&](std::uint64_t at, std::uint64_t word) {
        std::memcpy(bytes_of(table[static_cast<std::size_t>(i)]) + at, &word, sizeof(word));
      });
    }
  }
  void verify(llmmem::sequence_id sequence, const llmmem::kv_chain& chain, std::uint64_t first,
              std::uint64_t end) {
    const auto table = cache_.blocks(sequence);
    for (std::uint64_t i = first / block_tokens; i < end / block_tokens; ++i) {
      bool is_right = true;
      each_word(chain.keys()[static_cast<std::size_t>(i)], [&](std::uint64_t at, std::uint64_t word) {
        is_right = is_right &&
                   std::memcmp(bytes_of(table[static_cast<std::size_t>(i)]) + at, &word, sizeof(word)) == 0;
      });
      ++figures_->verified;
      figures_->wrong += is_right ? 0U : 1U;
    }
  }

  const command_line* asked_;
  node_figures* figures_;
  cache_type cache_;
  std::vector<std::byte> memory_;
  tiers_type tiers_;
  llmmem::kv_pool<tiers_type, llmmem::socket_endpoint, Directory, Mover> pool_;
  std::uint64_t reported_ = 0;
  std::uint64_t reported_reads_ = 0;
};

}  // namespace kv_pool_example
