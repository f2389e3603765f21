/// @file
/// Runs conversations over a cache for all of them, over a small one, and over the small one with tiers.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/text.hpp"
#include "paged_decode/comparison.hpp"
#include "paged_decode/conversations.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/latent_model.hpp"
#include "paged_decode/paged_cache.hpp"
#include "paged_decode/tiered_cache.hpp"

namespace paged_decode {

struct tiers_experiment {
  conversation_plan plan{};
  tier_sizes sizes{};
  std::uint64_t device_blocks = 0;  ///< 0: a tenth of all contexts, or the need of one conversation
};

struct tiers_finding {
  conversation_result whole{};  ///< with a cache for everything
  conversation_result small{};  ///< with a small cache, which computes evicted blocks again
  conversation_result tiered{};
  tier_counts tiers{};
  std::uint64_t context_blocks = 0;
  std::uint64_t device_blocks = 0;

  [[nodiscard]] bool is_identical() const noexcept {
    return tiered.digest == whole.digest && small.digest == whole.digest;
  }
};

/// Runs the conversations with a model that `make(positions)` returns.
template <class Make>
[[nodiscard]] tiers_finding compare_tiers_of(const experiment& what, const tiers_experiment& asked,
                                             const Make& make) {
  const std::uint64_t longest = asked.plan.most_tokens();
  const std::uint64_t most_tokens = (longest + share_tokens - 1) / share_tokens * share_tokens;
  const std::uint64_t each = (longest + what.cache.block_tokens - 1) / what.cache.block_tokens;
  tiers_finding out{.context_blocks = each * asked.plan.conversations};
  const std::uint64_t tenth = out.context_blocks / 10;
  out.device_blocks = asked.device_blocks != 0 ? asked.device_blocks : tenth > each ? tenth : each;
  if (out.device_blocks < each) {
    throw llmmem::error(
        fmt::format("--device-blocks {}: one conversation needs {} blocks of {} tokens at its end",
                    out.device_blocks, each, what.cache.block_tokens));
  }
  const auto made = make(most_tokens);
  host_place place;
  paged_config how = what.cache;
  how.most_tokens = most_tokens;
  how.blocks = out.context_blocks;
  {
    paged_cache<host_place> cache(what.shape, how, place);
    out.whole = run_conversations(made, cache, asked.plan);
  }
  how.blocks = out.device_blocks;
  {
    paged_cache<host_place> cache(what.shape, how, place);
    out.small = run_conversations(made, cache, asked.plan);
  }
  paged_cache<host_place> cache(what.shape, how, place);
  auto mover = mover_of(cache.store());
  tiered_cache<decltype(mover)> tiered(cache, std::move(mover), asked.sizes);
  out.tiered = run_conversations(made, tiered, asked.plan);
  out.tiers = tiered.counts();
  return out;
}

/// With a `latent_model` if the cache keeps records of latents.
[[nodiscard]] inline tiers_finding compare_tiers(const experiment& what, const tiers_experiment& asked) {
  if (what.cache.record) {
    return compare_tiers_of(what, asked, [&](std::uint64_t positions) {
      return latent_model(what.shape, positions, what.plan.seed);
    });
  }
  return compare_tiers_of(
      what, asked, [&](std::uint64_t positions) { return model(what.shape, positions, what.plan.seed); });
}

[[nodiscard]] inline std::string to_report(const tiers_experiment& asked, const experiment& what,
                                           const tiers_finding& found) {
  const auto line = [](const char* name, const conversation_result& of) {
    return fmt::format("  {:<18} digest {:016x}, {:>7} tokens computed\n", name, of.digest,
                       example::grouped(of.computed));
  };
  const double times = static_cast<double>(found.context_blocks) / static_cast<double>(found.device_blocks);
  std::string text = fmt::format(
      "{} conversations of {} turns, {} blocks of {} tokens in {}; the cache has {} blocks: the contexts are "
      "{:.1f} times as large, the prompts have {} tokens in all\n",
      asked.plan.conversations, asked.plan.turns, found.context_blocks, what.cache.block_tokens,
      name_of(what.cache), found.device_blocks, times, example::grouped(found.whole.context));
  text += line("room for all", found.whole);
  text += line("small cache", found.small);
  text += line("small, with tiers", found.tiered);
  text += fmt::format(
      "  {}\n  loaded             {} blocks from {} of host memory, {} from {} of the file; {} a block\n",
      found.is_identical() ? "identical: every token, every bit of every logit" : "NOT IDENTICAL",
      example::grouped(found.tiers.host_blocks), example::grouped(asked.sizes.host),
      example::grouped(found.tiers.file_blocks), example::grouped(asked.sizes.file),
      example::bytes_text(static_cast<double>(found.tiers.block_bytes)));
  return text;
}

[[nodiscard]] inline std::string to_json(const tiers_finding& found) {
  return fmt::format(
      R"({{"identical": {}, "digest": "{:016x}", "small_digest": "{:016x}", "tiered_digest": "{:016x}", )"
      R"("context_blocks": {}, "device_blocks": {}, "context_tokens": {}, "computed_tokens": {}, )"
      R"("computed_small": {}, "computed_tiered": {}, "host_blocks": {}, "file_blocks": {}, )"
      R"("failed_blocks": {}, "block_bytes": {}}})"
      "\n",
      found.is_identical(), found.whole.digest, found.small.digest, found.tiered.digest, found.context_blocks,
      found.device_blocks, found.whole.context, found.whole.computed, found.small.computed,
      found.tiered.computed, found.tiers.host_blocks, found.tiers.file_blocks, found.tiers.failed_blocks,
      found.tiers.block_bytes);
}

}  // namespace paged_decode
