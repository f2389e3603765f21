/// @file
/// A request trace in memory: the times, lengths and prompt blocks of requests.
#pragma once

#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace replay_trace {

/// A trace that cannot be used: a malformed line, data that cannot be unpacked, or no request at all.
class trace_error : public llmmem::error {
 public:
  using error::error;
};

/// The readable trace formats, and the built-in generator's.
enum class trace_format : std::uint8_t {
  mooncake,  ///< JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512 tokens; session_id,
             ///< delay
  azure,     ///< CSV: TIMESTAMP,ContextTokens,GeneratedTokens
  bailian,   ///< JSON lines: timestamp (s), input_length, output_length, hash_ids of 16 tokens
  burstgpt,  ///< CSV: Timestamp (s), Request tokens, Response tokens, in any order among other columns
  generated,  ///< made by `generate_trace`
};

/// The name used on the command line.
[[nodiscard]] constexpr std::string_view format_name(trace_format format) noexcept {
  switch (format) {
    case trace_format::mooncake:
      return "mooncake";
    case trace_format::azure:
      return "azure";
    case trace_format::bailian:
      return "bailian";
    case trace_format::burstgpt:
      return "burstgpt";
    case trace_format::generated:
      break;
  }
  return "generated";
}

/// The file format called `name`, or nothing.
[[nodiscard]] constexpr std::optional<trace_format> find_format(std::string_view name) noexcept {
  for (const auto format :
       {trace_format::mooncake, trace_format::azure, trace_format::bailian, trace_format::burstgpt}) {
    if (format_name(format) == name) return format;
  }
  return std::nullopt;
}

/// The default tokens per block: those of one hash id in this format, or vLLM's 16 for traces of lengths
/// only.
[[nodiscard]] constexpr std::uint32_t default_block_tokens(trace_format format) noexcept {
  return format == trace_format::mooncake || format == trace_format::generated ? 512 : 16;
}

/// The most tokens of a prompt or an answer: 2^24, several times the longest context windows. It keeps a
/// damaged length from becoming terabytes of blocks, and every sum of lengths within 64 bits.
inline constexpr std::uint64_t max_request_tokens = std::uint64_t{1} << 24;

/// One request, a view into its trace.
struct request {
  std::uint64_t timestamp_us;
  std::uint64_t input_tokens;   ///< length of the prompt
  std::uint64_t output_tokens;  ///< length of the answer
  std::span<const std::uint64_t>
      block_ids;                ///< one id per prompt block; in some traces the short last one has none
  std::uint64_t hashed_tokens;  ///< prompt tokens in blocks that have an id
};

/// Malformed lines that were skipped.
struct skipped_lines {
  std::uint64_t count = 0;
  std::string first;  ///< the complete error text of the first
};

/// Requests in the order of the file; all block ids are in one flat array.
///
/// Equal ids at the start of two prompts are a shared prefix. A prompt may have an id twice (Bailian hashes
/// each block by itself), so the position matters: see `replay`.
///
/// @par Memory   24 bytes per request and 8 bytes per id.
class trace {
 public:
  /// @param block_tokens  tokens per block id.
  trace(std::string name, trace_format format, std::uint32_t block_tokens)
      : name_(std::move(name)), format_(format), block_tokens_(block_tokens) {}

  /// Appends a request. @pre both lengths are at most `max_request_tokens`.
  void add(std::uint64_t timestamp_us, std::uint64_t input_tokens, std::uint64_t output_tokens,
           std::span<const std::uint64_t> block_ids) {
    block_ids_.insert(block_ids_.end(), block_ids.begin(), block_ids.end());
    requests_.push_back({timestamp_us, block_ids_.size(), static_cast<std::uint32_t>(input_tokens),
                         static_cast<std::uint32_t>(output_tokens)});
    input_tokens_ += input_tokens;
    output_tokens_ += output_tokens;
  }

  [[nodiscard]] std::size_t size() const noexcept { return requests_.size(); }

  /// @pre `index < size()`.
  [[nodiscard]] request operator[](std::size_t index) const noexcept {
    const record& r = requests_[index];
    const std::size_t first = index == 0 ? 0 : requests_[index - 1].ids_end;
    const auto ids = std::span(block_ids_).subspan(first, r.ids_end - first);
    return {r.timestamp_us, r.input_tokens, r.output_tokens, ids,
            std::min<std::uint64_t>(r.input_tokens, std::uint64_t{ids.size()} * block_tokens_)};
  }

  /// The file's path, or the generator's name.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] trace_format format() const noexcept { return format_; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return block_tokens_; }
  void set_block_tokens(std::uint32_t block_tokens) noexcept { block_tokens_ = block_tokens; }
  /// Every id of every request, in order.
  [[nodiscard]] std::span<const std::uint64_t> block_ids() const noexcept { return block_ids_; }
  /// False for a trace of lengths alone, which has no prefixes to share.
  [[nodiscard]] bool has_block_ids() const noexcept { return !block_ids_.empty(); }
  /// False if no request has a time; times are then the sums of the delays of each session.
  [[nodiscard]] bool has_timestamps() const noexcept { return has_timestamps_; }
  void set_has_timestamps(bool has_timestamps) noexcept { has_timestamps_ = has_timestamps; }
  [[nodiscard]] std::uint64_t input_tokens() const noexcept { return input_tokens_; }
  [[nodiscard]] std::uint64_t output_tokens() const noexcept { return output_tokens_; }

  /// Malformed lines of the file that were skipped.
  [[nodiscard]] const skipped_lines& skipped() const noexcept { return skipped_; }
  void set_skipped(skipped_lines skipped) { skipped_ = std::move(skipped); }

 private:
  struct record {
    std::uint64_t timestamp_us;
    std::size_t ids_end;
    std::uint32_t input_tokens;
    std::uint32_t output_tokens;
  };

  std::string name_;
  trace_format format_;
  std::uint32_t block_tokens_;
  std::vector<record> requests_;
  std::vector<std::uint64_t> block_ids_;
  std::uint64_t input_tokens_ = 0;
  std::uint64_t output_tokens_ = 0;
  bool has_timestamps_ = true;
  skipped_lines skipped_;
};

/// The number of different block ids: with this capacity nothing is evicted. O(ids).
[[nodiscard]] inline std::uint64_t distinct_blocks(const trace& from) {
  const std::unordered_set<std::uint64_t> distinct(from.block_ids().begin(), from.block_ids().end());
  return distinct.size();
}

/// The blocks that the longest single request needs, prompt and answer: no smaller capacity can serve the
/// trace.
[[nodiscard]] inline std::uint64_t longest_request_blocks(const trace& from) {
  std::uint64_t longest = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const request r = from[i];
    const std::uint64_t tokens = r.input_tokens + r.output_tokens;
    longest = tokens > longest ? tokens : longest;
  }
  return (longest + from.block_tokens() - 1) / from.block_tokens();
}

}  // namespace replay_trace
