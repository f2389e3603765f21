/// @file
/// Conversations whose contexts together exceed the cache: each turn needs the blocks of earlier turns.
#pragma once

#include <llmmem/kernels/block_digest.hpp>
#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/model.hpp"

namespace paged_decode {

struct conversation_plan {
  std::uint32_t conversations = 12;
  std::uint32_t turns = 4;
  std::uint32_t message_tokens = 40;  ///< tokens that the user adds per turn
  std::uint32_t answer_tokens = 24;   ///< tokens that the model adds
  std::uint32_t chunk_tokens = 24;    ///< unknown tokens computed per step
  std::uint64_t seed = 1;

  /// The state of one conversation at its end.
  [[nodiscard]] constexpr std::uint64_t most_tokens() const noexcept {
    return std::uint64_t{turns} * (message_tokens + answer_tokens);
  }
};

struct conversation_result {
  std::uint64_t digest = 0;    ///< of all tokens and all bits of all logits
  std::uint64_t computed = 0;  ///< tokens that the model computed
  std::uint64_t context = 0;   ///< tokens at the beginning of the turns, including messages
};

/// Runs the turns one after another, alternating between conversations, so that each finds the cache full of
/// the others' blocks.
template <decoder_model Model, kv_cache Cache>
[[nodiscard]] conversation_result run_conversations(const Model& of, Cache& cache,
                                                    const conversation_plan& plan) {
  conversation_result out;
  std::vector<std::vector<llmmem::token_id>> all(plan.conversations);
  std::vector<std::uint64_t> digests;
  for (std::uint32_t turn = 0; turn < plan.turns; ++turn) {
    for (std::uint32_t which = 0; which < plan.conversations; ++which) {
      std::vector<llmmem::token_id>& tokens = all[which];
      for (std::uint32_t i = 0; i < plan.message_tokens; ++i) {
        const std::uint64_t drawn = made_up(plan.seed + which * 104'729 + turn * 1'299'709, i);
        tokens.push_back(static_cast<llmmem::token_id>(drawn % of.config().vocabulary));
      }
      out.context += tokens.size();
      const auto where = cache.create(tokens);
      std::vector<float> seen;
      const std::uint64_t end = tokens.size() + plan.answer_tokens;
      while (tokens.size() < end) {
        const std::uint64_t known = cache.tokens(where);
        const std::size_t chunk = std::min<std::size_t>(tokens.size() - known, plan.chunk_tokens);
        const grown<typename Cache::sequence> batch{where, std::span(tokens).subspan(known, chunk)};
        const rows_of_floats logits = decode(of, cache, std::span(&batch, 1));
        out.computed += chunk;
        cache.commit(where);
        if (cache.tokens(where) != tokens.size()) continue;
        const std::span<const float> last = logits[chunk - 1];
        seen.insert(seen.end(), last.begin(), last.end());
        tokens.push_back(static_cast<llmmem::token_id>(std::ranges::max_element(last) - last.begin()));
      }
      cache.release(where);
      digests.push_back(llmmem::block_digest(std::as_bytes(std::span(seen))));
    }
  }
  for (const auto& tokens : all)
    digests.push_back(llmmem::block_digest(std::as_bytes(std::span(tokens))));
  out.digest = llmmem::block_digest(std::as_bytes(std::span(digests)));
  return out;
}

}  // namespace paged_decode
