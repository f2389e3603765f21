/// @file
/// The requests for measurements of lookups and replays: a recorded hour of a chat service if there is one,
/// otherwise a generated hour.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "replay_trace/generator.hpp"
#include "replay_trace/read_trace.hpp"

namespace llmmem_benchmarks {

/// One prompt: its blocks, as keys and as numbers, and its lengths.
struct prompt {
  std::span<const llmmem::block_key> keys;
  std::span<const std::uint32_t> numbers;
  std::uint64_t input_tokens = 0;
  std::uint64_t output_tokens = 0;
};

/// The prompts of a trace, with every key computed in advance.
///
/// A key is a bijection of the trace's block id that mixes its bits (`key_from_id`): the ids themselves run
/// from 0 and would make a perfect hash of `std::hash`, which is the identity. `numbers` are dense, in order
/// of first use, for code that needs no hash.
class prompts {
 public:
  explicit prompts(const replay_trace::trace& from) : block_tokens_(from.block_tokens()) {
    std::unordered_map<std::uint64_t, std::uint32_t> number_of;
    keys_.reserve(from.block_ids().size());
    numbers_.reserve(from.block_ids().size());
    for (const std::uint64_t id : from.block_ids()) {
      keys_.push_back(llmmem::key_from_id(id));
      numbers_.push_back(
          number_of.try_emplace(id, static_cast<std::uint32_t>(number_of.size())).first->second);
    }
    distinct_ = number_of.size();
    std::size_t first = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto request = from[i];
      const std::size_t blocks = request.block_ids.size();
      const std::unordered_set<std::uint64_t> once(request.block_ids.begin(), request.block_ids.end());
      if (once.size() != blocks) {
        throw llmmem::argument_error(
            from.name() + ": request " + std::to_string(i) +
            " has a block twice; lookups of a whole prompt cannot be compared with it");
      }
      all_.push_back({std::span(keys_).subspan(first, blocks), std::span(numbers_).subspan(first, blocks),
                      request.input_tokens, request.output_tokens});
      first += blocks;
    }
  }

  prompts(const prompts&) = delete;  // prompts are views of the keys
  prompts& operator=(const prompts&) = delete;

  [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
  [[nodiscard]] const prompt& operator[](std::size_t i) const noexcept { return all_[i]; }
  [[nodiscard]] auto begin() const noexcept { return all_.begin(); }
  [[nodiscard]] auto end() const noexcept { return all_.end(); }

  [[nodiscard]] std::uint64_t block_refs() const noexcept { return keys_.size(); }
  [[nodiscard]] std::uint64_t distinct_blocks() const noexcept { return distinct_; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return block_tokens_; }
  [[nodiscard]] std::uint64_t longest_tokens() const noexcept {
    std::uint64_t longest = 0;
    for (const prompt& each : all_)
      longest = std::max(longest, each.input_tokens + each.output_tokens);
    return longest;
  }

 private:
  std::uint32_t block_tokens_;
  std::uint64_t distinct_ = 0;
  std::vector<llmmem::block_key> keys_;
  std::vector<std::uint32_t> numbers_;
  std::vector<prompt> all_;
};

/// The recorded trace's file, or nothing: in the folder that LLMMEM_DATA_DIR names (set but empty means
/// none), otherwise in shared/data next to the checkout.
inline std::string recorded_trace() {
  const char* const told = std::getenv("LLMMEM_DATA_DIR");
  const std::filesystem::path folder = told == nullptr ? LLMMEM_BENCH_DATA_DIR : told;
  const std::filesystem::path file = folder / "mooncake_conversation_trace.jsonl";
  return !folder.empty() && std::filesystem::exists(file) ? file.string() : std::string();
}

/// The source of the figures, for the context of the JSON.
inline std::string requests_source() {
  return recorded_trace().empty() ? "generated, seed 1 (examples/replay_trace/generator.hpp)"
                                  : "mooncake_conversation_trace.jsonl";
}

/// The requests, read or generated on first use. An unreadable recorded trace is an error, because figures of
/// another one would pass for its own.
inline const prompts& requests() {
  static const prompts all(recorded_trace().empty() ? replay_trace::generate_trace()
                                                    : replay_trace::read_trace_file(recorded_trace()));
  return all;
}

}  // namespace llmmem_benchmarks
