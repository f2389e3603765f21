/// @file
/// A generated trace like an hour of a chat service, for use without a real one.
#pragma once

#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "replay_trace/random.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

struct generator_options {
  std::uint64_t seed = 1;
  std::uint64_t requests = 12'031;   ///< 1 to 10 million
  std::uint32_t block_tokens = 512;  ///< tokens per id
};

namespace detail {

/// Tokens that a conversation's first message adds to the system prompt (and document, if it has one).
inline constexpr quantile_table<12> first_message_tokens{{{{0, 380},
                                                           {50, 385},
                                                           {100, 400},
                                                           {200, 700},
                                                           {300, 2'400},
                                                           {400, 3'600},
                                                           {500, 5'200},
                                                           {700, 10'700},
                                                           {800, 16'300},
                                                           {900, 25'500},
                                                           {980, 44'000},
                                                           {1000, 90'000}}}};
/// Tokens that each later message adds to the history.
inline constexpr quantile_table<8> next_message_tokens{{{{0, 10},
                                                         {400, 90},
                                                         {600, 350},
                                                         {700, 900},
                                                         {800, 2'800},
                                                         {900, 6'500},
                                                         {980, 15'000},
                                                         {1000, 40'000}}}};
inline constexpr quantile_table<9> answer_tokens{{{{0, 1},
                                                   {50, 10},
                                                   {100, 24},
                                                   {250, 156},
                                                   {500, 345},
                                                   {750, 462},
                                                   {900, 580},
                                                   {990, 1'050},
                                                   {1000, 2'000}}}};
/// Tokens of a document that many conversations share.
inline constexpr quantile_table<5> document_tokens{
    {{{0, 600}, {500, 3'000}, {900, 12'000}, {990, 30'000}, {1000, 60'000}}}};
/// Requests of other conversations between two of the same one.
inline constexpr quantile_table<12> think_requests{{{{0, 20},
                                                     {50, 90},
                                                     {100, 130},
                                                     {200, 210},
                                                     {300, 270},
                                                     {400, 340},
                                                     {500, 440},
                                                     {700, 800},
                                                     {800, 1'150},
                                                     {900, 1'750},
                                                     {980, 3'000},
                                                     {1000, 6'000}}}};

inline constexpr std::uint64_t system_prompt_tokens = 512;
inline constexpr std::size_t documents = 512;
inline constexpr std::uint64_t document_per_mille = 40;   ///< conversations that begin with a document
inline constexpr std::uint64_t continue_per_mille = 380;  ///< answers that are followed by another message
inline constexpr std::uint64_t longest_prompt = 126'000;
inline constexpr std::uint64_t mean_arrival_us = 294'000;

}  // namespace detail

/// Makes a trace of conversations: the same for the same options, on every platform.
///
/// A conversation begins with the one system prompt (512 tokens), 4 % of them with one of 512 documents,
/// drawn Zipf-like (1/rank), and a first message. After 38 % of the answers another message follows, 20 to
/// 6,000 requests of others later (median 440); its prompt is the whole history, so its blocks except the
/// last are those of the previous turn. Lengths are heavy-tailed. The quantiles are in the tables above; they
/// were fitted to the Mooncake conversation trace.
///
/// @par Statistics   with the default options, for seeds 1 to 8 (the tests assert them); in brackets those of
/// the Mooncake conversation trace:
///
///     requests                                12,031            (12,031)
///     mean prompt, tokens                     12,150 +- 450     (12,035)
///     mean answer, tokens                     345 +- 5          (343)
///     blocks of 512 tokens a request          24.2 +- 0.8       (24.0)
///     hit ratio, unlimited capacity           0.372 +- 0.010    (0.366)
///     hit ratio of LRU at 1,000 blocks        0.048 +- 0.004    (0.045)
///     hit ratio of LRU at 10,000 blocks       0.218 +- 0.010    (0.211)
///     hit ratio of LRU at 30,000 blocks       0.337 +- 0.011    (0.326)
///
/// @par Complexity   O(block ids log conversations).
/// @throws llmmem::length_error  `requests` or `block_tokens` out of range.
[[nodiscard]] inline trace generate_trace(const generator_options& options = {}) {
  if (options.requests < 1 || options.requests > 10'000'000) {
    throw llmmem::length_error("generator: " + std::to_string(options.requests) +
                               " requests; it makes 1 to 10000000");
  }
  if (options.block_tokens == 0) throw llmmem::length_error("generator: a block must hold at least 1 token");

  struct conversation {
    std::uint64_t tokens = 0;
    std::vector<std::uint64_t> blocks;  // of the last prompt
  };
  using due = std::pair<std::uint64_t, std::size_t>;  // request number, conversation
  std::priority_queue<due, std::vector<due>, std::greater<>> waiting;
  std::vector<conversation> conversations;
  std::vector<std::vector<std::uint64_t>> library(detail::documents);
  std::vector<std::uint64_t> library_tokens(detail::documents);
  std::vector<std::uint64_t> system_prompt;
  const zipf_ranks popularity(detail::documents);

  splitmix64 random(options.seed);
  std::uint64_t next_block = 0;
  std::uint64_t now_us = 0;
  const std::uint64_t block = options.block_tokens;
  // Full blocks keep their ids as a history grows; the short last one becomes a different block.
  const auto grow = [&](std::vector<std::uint64_t>& blocks, std::uint64_t full_tokens,
                        std::uint64_t to_tokens) {
    blocks.resize(std::min<std::uint64_t>(blocks.size(), full_tokens / block));
    while (blocks.size() * block < to_tokens)
      blocks.push_back(next_block++);
  };
  grow(system_prompt, 0, detail::system_prompt_tokens);

  trace result("generated (seed " + std::to_string(options.seed) + ")", trace_format::generated,
               options.block_tokens);
  for (std::uint64_t number = 0; number < options.requests; ++number) {
    const bool continues = !waiting.empty() && waiting.top().first <= number;
    const std::size_t which = continues ? waiting.top().second : conversations.size();
    std::uint64_t message = 0;
    if (continues) {
      waiting.pop();
      message = detail::next_message_tokens.sample(random);
    } else {
      conversation& made =
          conversations.emplace_back(conversation{detail::system_prompt_tokens, system_prompt});
      if (random.below(1000) < detail::document_per_mille) {
        const std::size_t document = popularity.sample(random);
        if (library[document].empty()) {
          library_tokens[document] = detail::system_prompt_tokens + detail::document_tokens.sample(random);
          library[document] = system_prompt;
          grow(library[document], detail::system_prompt_tokens, library_tokens[document]);
        }
        made = {library_tokens[document], library[document]};
      }
      message = detail::first_message_tokens.sample(random);
    }
    conversation& speaker = conversations[which];
    const std::uint64_t prompt = std::min(speaker.tokens + message, detail::longest_prompt);
    const std::uint64_t answer = detail::answer_tokens.sample(random);
    grow(speaker.blocks, speaker.tokens, prompt);
    result.add(now_us, prompt, answer, speaker.blocks);
    now_us += random.below(2 * detail::mean_arrival_us);

    speaker.blocks.resize(prompt / block);  // the short last block will become a different one
    speaker.tokens = prompt + answer;
    if (speaker.tokens < detail::longest_prompt && random.below(1000) < detail::continue_per_mille) {
      waiting.push({number + 1 + detail::think_requests.sample(random), which});
    } else {
      speaker.blocks = {};
    }
  }
  return result;
}

}  // namespace replay_trace
