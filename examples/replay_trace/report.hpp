/// @file
/// The results of the replays as text for people.
#pragma once

#include <llmmem/model/model_shape.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/text.hpp"
#include "replay_trace/first_token.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

/// How bars are drawn.
enum class bar_style : std::uint8_t { unicode, ascii };

/// A replay to compare with, drawn but not described.
struct reference_line {
  std::string name;
  double hit_ratio;
};

struct report_input {
  const trace* from;
  std::vector<replay_result> results;  ///< the requested results: of one policy, or of all at one capacity
  std::vector<reference_line> references;  ///< the policies to compare with that are not among `results`
  std::optional<double> ceiling;           ///< hit ratio at unlimited capacity
  llmmem::model_shape model;
  bar_style bars = bar_style::unicode;
};

namespace detail {

/// A bar of `width` cells filled to `ratio`, in eighths of a cell if the style has them.
[[nodiscard]] inline std::string bar(double ratio, std::size_t width, bar_style style) {
  ratio = std::clamp(ratio, 0.0, 1.0);
  if (style == bar_style::ascii) {
    const auto filled = static_cast<std::size_t>(std::lround(ratio * static_cast<double>(width)));
    return std::string(filled, '#') + std::string(width - filled, '.');
  }
  constexpr std::string_view partial[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto eighths = static_cast<std::size_t>(std::lround(ratio * static_cast<double>(width * 8)));
  std::string out;
  for (std::size_t i = 0; i < eighths / 8; ++i)
    out += "█";
  out += partial[eighths % 8];
  for (std::size_t i = (eighths + 7) / 8; i < width; ++i)
    out += "·";
  return out;
}

[[nodiscard]] inline std::string percent(std::optional<double> ratio) {
  return ratio ? fmt::format("{:.2f} %", *ratio * 100) : "-";
}

[[nodiscard]] inline std::string duration_text(std::uint64_t us) {
  const double seconds = static_cast<double>(us) / 1e6;
  if (seconds < 120) return fmt::format("{:.1f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.1f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

/// The time from the first to the last timestamp, in any order.
[[nodiscard]] inline std::uint64_t trace_duration_us(const trace& from) {
  std::uint64_t first = ~std::uint64_t{0};
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    first = std::min(first, from[i].timestamp_us);
    last = std::max(last, from[i].timestamp_us);
  }
  return from.size() == 0 ? 0 : last - first;
}

inline void report_trace(std::string& text, const report_input& input) {
  const trace& t = *input.from;
  const auto out = std::back_inserter(text);
  const double requests = static_cast<double>(std::max<std::size_t>(t.size(), 1));
  text += example::printable(t.name(), 512);
  if (t.format() != trace_format::generated) fmt::format_to(out, " ({})", format_name(t.format()));
  text += '\n';
  fmt::format_to(out, "  requests       {} {}\n", example::grouped(t.size()),
                 t.has_timestamps() ? "in " + duration_text(trace_duration_us(t)) : "without timestamps");
  fmt::format_to(out, "  tokens         {} in prompts, {} in answers (mean {:.0f} and {:.0f} a request)\n",
                 example::count_text(t.input_tokens()), example::count_text(t.output_tokens()),
                 static_cast<double>(t.input_tokens()) / requests,
                 static_cast<double>(t.output_tokens()) / requests);
  if (t.skipped().count > 0) {
    fmt::format_to(out, "  skipped        {} malformed lines, the first:\n                 {}\n",
                   example::grouped(t.skipped().count), t.skipped().first);
  }
}

inline void report_policies(std::string& text, const report_input& input) {
  const auto out = std::back_inserter(text);
  const auto row = [&](std::string_view name, std::optional<double> ratio, const replay_result* result) {
    fmt::format_to(out, "  {:<12} {:>8}  {}", name, percent(ratio), bar(ratio.value_or(0), 30, input.bars));
    if (result != nullptr) {
      const auto ns = result->ns_per_block_ref();
      fmt::format_to(out, "  {:>10}  {:>7}", example::grouped(result->evictions),
                     ns ? fmt::format("{:.1f}", *ns) : "-");
    }
    text += '\n';
  };
  text += "\n  policy       hit ratio                                    evictions  ns/block\n";
  for (const replay_result& result : input.results)
    row(result.policy, result.hit_ratio(), &result);
  for (const reference_line& line : input.references)
    row(line.name, line.hit_ratio, nullptr);
  if (input.ceiling) row("ceiling", input.ceiling, nullptr);
}

inline void report_memory(std::string& text, const report_input& input, const replay_result& result) {
  const trace& t = *input.from;
  const auto out = std::back_inserter(text);
  const auto kv = [&](double tokens) {
    return example::bytes_text(tokens * static_cast<double>(input.model.kv_bytes_per_token()));
  };
  fmt::format_to(out, "\n  {} keeps {} of KV a token\n", input.model.name, kv(1));
  if (result.block_refs > 0 && t.has_block_ids()) {
    fmt::format_to(out, "  KV reused      {} ({} of {} prompt tokens not computed again, {})\n",
                   kv(static_cast<double>(result.matched_tokens)), example::count_text(result.matched_tokens),
                   example::count_text(result.input_tokens), result.policy);
  }
  std::uint64_t longest = 0;
  for (std::size_t i = 0; i < t.size(); ++i) {
    longest = std::max(longest, t[i].input_tokens + t[i].output_tokens);
  }
  if (result.requests > 0 && result.reserved_tokens > 0 && longest > 0) {
    const double paged = static_cast<double>(result.reserved_tokens) / static_cast<double>(result.requests);
    const double saved = 1 - paged / static_cast<double>(longest);
    fmt::format_to(
        out,
        "  KV reserved    {} a request in pages; room for the longest would take {} each ({:.1f} % saved)\n",
        kv(paged), kv(static_cast<double>(longest)), saved * 100);
    const double useful = *result.useful_over_reserved();
    fmt::format_to(out, "  fragmentation  {:.2f} % of what is reserved ({:.4f} useful over reserved)\n",
                   (1 - useful) * 100, useful);
  }
  fmt::format_to(out, "  metadata       {} at most\n",
                 example::bytes_text(static_cast<double>(result.peak_metadata_bytes)));
}

inline void report_pool(std::string& text, const report_input& input, const replay_result& result) {
  const auto out = std::back_inserter(text);
  const double refs = static_cast<double>(std::max<std::uint64_t>(result.block_refs, 1));
  const auto row = [&](std::string_view name, std::uint64_t hits, std::string_view rest) {
    fmt::format_to(out, "  {:<6} {:>8}  {}  {:>8} blocks{}\n", name,
                   percent(static_cast<double>(hits) / refs),
                   bar(static_cast<double>(hits) / refs, 30, input.bars), example::grouped(hits), rest);
  };
  const std::uint64_t all = result.hits + result.host_hits + result.nvme_hits + result.pool->peer_hits;
  row("peers", result.pool->peer_hits,
      fmt::format("  {} tokens", example::count_text(result.pool->peer_tokens)));
  row("all", all, "");
  row("alone", result.pool->local_hits, ": the same nodes without the pool");
  fmt::format_to(
      out, "  pool           {:.2f} times the hits of the same {} nodes without it; {} came from peers\n",
      static_cast<double>(all) / static_cast<double>(std::max<std::uint64_t>(result.pool->local_hits, 1)),
      result.pool->nodes,
      example::bytes_text(static_cast<double>(result.pool->peer_hits * result.block_bytes)));
  fmt::format_to(out, "  directory      {} spans; {} questions, {} messages in all\n",
                 example::grouped(result.pool->directory_spans), example::grouped(result.pool->asked_spans),
                 example::grouped(result.pool->posted_messages));
}

inline void report_tiers(std::string& text, const report_input& input, const replay_result& result) {
  const auto out = std::back_inserter(text);
  const double refs = static_cast<double>(std::max<std::uint64_t>(result.block_refs, 1));
  const auto row = [&](std::string_view name, std::uint64_t hits, std::uint64_t tokens) {
    fmt::format_to(out, "  {:<6} {:>8}  {}  {:>8} blocks  {} tokens\n", name,
                   percent(static_cast<double>(hits) / refs),
                   bar(static_cast<double>(hits) / refs, 30, input.bars), example::grouped(hits),
                   example::count_text(tokens));
  };
  const first_token_times times = time_to_first_token(result, input.model);
  fmt::format_to(out, "\n  found in tiers ({}{})\n", result.policy,
                 result.pool ? fmt::format(", {} nodes as one pool", result.pool->nodes) : "");
  row("hbm", result.hits, result.tiers->hbm);
  row("host", result.host_hits, result.tiers->host);
  row("nvme", result.nvme_hits, result.tiers->nvme);
  if (result.pool) report_pool(text, input, result);
  fmt::format_to(
      out,
      "  first token    {:.0f} ms a request: {:.1f} from host, {:.1f} from nvme, {:.0f} computing; "
      "without these two {:.0f} ms\n"
      "                 (50 GB/s from host, 10 GB/s from nvme, 1 PFLOP/s, nothing overlapped)\n",
      times.total_ms(), times.host_ms, times.nvme_ms, times.compute_ms, times.without_tiers_ms);
  fmt::format_to(out, "  loaded         {} from host, {} from nvme; every byte of {} blocks checked\n",
                 example::bytes_text(static_cast<double>(result.host_hits * result.block_bytes)),
                 example::bytes_text(static_cast<double>(result.nvme_hits * result.block_bytes)),
                 example::grouped(result.verified_blocks));
}

}  // namespace detail

/// The report, several lines with a newline at the end. @pre `input.results` is not empty.
[[nodiscard]] inline std::string report_text(const report_input& input) {
  const replay_result& first = input.results.front();
  std::string text;
  detail::report_trace(text, input);
  fmt::format_to(
      std::back_inserter(text), "  capacity       {} of {} tokens{}\n",
      first.capacity_limit ? example::grouped(*first.capacity_limit) + " blocks" : "unlimited, blocks",
      first.block_tokens,
      input.from->has_block_ids()
          ? fmt::format(", {} references to {} distinct blocks", example::grouped(first.block_refs),
                        example::grouped(distinct_blocks(*input.from)))
          : fmt::format(", {} of them for prompts; lengths only, no prefix can be shared",
                        example::grouped(first.block_refs)));
  detail::report_policies(text, input);
  for (const replay_result& result : input.results) {
    if (result.tiers) detail::report_tiers(text, input, result);
  }
  detail::report_memory(text, input, first);
  return text;
}

}  // namespace replay_trace
