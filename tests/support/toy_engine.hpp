/// @file
/// An engine small enough to check: its next token is a digest of the KV it reads through the block table, so
/// a token or a block that is lost, stale or somebody else's changes the text.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

struct toy_request {
  std::vector<llmmem::token_id> tokens{};  // prompt and answer so far
  std::size_t prompt = 0;
  std::vector<std::uint64_t> saved{};  // KV, while swapped out
  bool is_saved = false;
  bool is_exhausted = false;
};

[[nodiscard]] inline std::uint64_t toy_mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

/// KV of a token behind one whose KV is `before`, and the token that a model would then say.
[[nodiscard]] inline std::uint64_t toy_kv(std::uint64_t before, llmmem::token_id token) noexcept {
  return toy_mix(before + static_cast<std::uint64_t>(token) * std::uint64_t{0x9E37'79B9'7F4A'7C15} + 1);
}
[[nodiscard]] inline llmmem::token_id toy_next(std::uint64_t kv) noexcept {
  return static_cast<llmmem::token_id>(toy_mix(kv) % 50'000);
}

/// What the model would say on its own: `count` tokens behind `prompt`.
[[nodiscard]] inline std::vector<llmmem::token_id> toy_text(std::span<const llmmem::token_id> prompt,
                                                            std::size_t count) {
  std::vector<llmmem::token_id> tokens(prompt.begin(), prompt.end());
  std::uint64_t kv = 0;
  for (const llmmem::token_id token : prompt)
    kv = toy_kv(kv, token);
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(toy_next(kv));
    kv = toy_kv(kv, tokens.back());
  }
  return tokens;
}

/// The client of a scheduler, with the memory behind the blocks.
///
/// @tparam Swaps  whether it saves the KV of what is preempted.
template <class Cache, bool Swaps>
class toy_engine {
 public:
  explicit toy_engine(const Cache& cache)
      : cache_(&cache), memory_(cache.max_physical_blocks() * cache.block_tokens()) {}

  std::map<std::uint64_t, toy_request> requests;
  std::uint64_t lose_every = 0;  // one in so many swaps is lost on the way back

  void ask(std::uint64_t user, std::vector<llmmem::token_id> prompt) {
    const std::size_t size = prompt.size();
    requests[user] = {.tokens = std::move(prompt), .prompt = size};
  }

  [[nodiscard]] std::span<const llmmem::token_id> tokens(std::uint64_t user) noexcept {
    return requests.find(user)->second.tokens;
  }
  void copy(const llmmem::block_copy& what) noexcept {
    for (std::uint32_t i = 0; i < what.tokens; ++i)
      at(what.destination, i) = at(what.source, i);
  }
  void exhausted(std::uint64_t user, const llmmem::failure&) noexcept {
    requests.find(user)->second.is_exhausted = true;
  }
  [[nodiscard]] bool swap_out(std::uint64_t user, llmmem::sequence_id sequence,
                              std::uint64_t written) noexcept
    requires Swaps
  {
    if (written == 0) return false;
    toy_request& gone = requests.find(user)->second;
    gone.saved.clear();
    for (std::uint64_t i = 0; i < written; ++i)
      gone.saved.push_back(at(sequence, i));
    gone.is_saved = true;
    return true;
  }
  [[nodiscard]] bool swap_in(std::uint64_t user, llmmem::sequence_id sequence, std::uint64_t first,
                             std::uint64_t end) noexcept
    requires Swaps
  {
    if (!has_saved(user)) return false;
    for (std::uint64_t i = first; i < end; ++i)
      at(sequence, i) = requests.find(user)->second.saved[i];
    return true;
  }
  /// Discards what was saved; returns whether it can still be read.
  [[nodiscard]] bool has_saved(std::uint64_t user) noexcept {
    toy_request& back = requests.find(user)->second;
    if (!back.is_saved) std::abort();
    back.is_saved = false;
    ++swaps_;
    return lose_every == 0 || swaps_ % lose_every != 0;
  }
  /// Writes the KV of token `i` of a block.
  void write(llmmem::block_id block, std::uint64_t i, std::uint64_t kv) noexcept { at(block, i) = kv; }

  /// Computes a step; says who got a new token, and who did not because their prompt goes on.
  void compute(std::span<const llmmem::scheduled_work> work) {
    for (const llmmem::scheduled_work& each : work) {
      toy_request& now = requests.at(each.user);
      std::uint64_t kv = each.first == 0 ? 0 : at(each.sequence, each.first - 1);
      for (std::uint64_t i = each.first; i < each.first + each.count; ++i) {
        kv = toy_kv(kv, now.tokens[i]);
        at(each.sequence, i) = kv;
      }
      if (each.first + each.count == now.tokens.size()) now.tokens.push_back(toy_next(kv));
    }
  }

  /// The KV of a token, as kernels read it.
  [[nodiscard]] std::uint64_t kv(llmmem::sequence_id sequence, std::uint64_t i) noexcept {
    return at(sequence, i);
  }

 private:
  std::uint64_t& at(llmmem::block_id block, std::uint64_t i) noexcept {
    return memory_[llmmem::to_index(block) * cache_->block_tokens() + i];
  }
  std::uint64_t& at(llmmem::sequence_id sequence, std::uint64_t i) noexcept {
    return at(cache_->blocks(sequence)[i / cache_->block_tokens()], i % cache_->block_tokens());
  }

  const Cache* cache_;
  std::vector<std::uint64_t> memory_;
  std::uint64_t swaps_ = 0;
};

}  // namespace llmmem_tests
