/// @file
/// The program: its run and its output.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "kv_pool/board.hpp"
#include "kv_pool/command_line.hpp"
#include "kv_pool/processes.hpp"

namespace kv_pool_example {

namespace detail {

[[nodiscard]] inline std::string text_of(const kv_split& split) {
  return fmt::format("tp={},cp={},interleave={},block={}", split.tp, split.cp, split.interleave, split.block);
}
[[nodiscard]] inline const char* text_of(block_way way) noexcept {
  return way == block_way::message ? "message" : way == block_way::shared ? "shared" : "ucx";
}
[[nodiscard]] inline const char* fate_of(const node_figures& node) noexcept {
  return !node.is_alive ? "  killed" : node.starts > 1 ? "  killed, started again" : "";
}

[[nodiscard]] inline std::string handover_table(const command_line& asked, board& shared, double seconds) {
  std::string out =
      fmt::format("{} requests of {} families, handed over from {} to {}, in {:.1f} s\n\n", asked.requests,
                  asked.families, text_of(asked.splits->prefill), text_of(asked.splits->decode), seconds);
  out += "  rank         requests    computed   own cache    layers       bytes  blocks checked\n";
  std::uint64_t wrong = 0;
  for (std::uint32_t seat = 0; seat < asked.nodes(); ++seat) {
    const node_figures& each = shared.node(seat);
    const bool is_prefill = seat < asked.prefill;
    fmt::format_to(std::back_inserter(out), "  {} {:<4} {:>9}  {:>10}  {:>10}  {:>8}  {:>10}  {:>14}{}\n",
                   is_prefill ? "prefill" : "decode ", is_prefill ? seat : seat - asked.prefill,
                   each.requests.load(), example::grouped(each.computed), example::grouped(each.matched),
                   example::grouped(each.layers), example::bytes_text(static_cast<double>(each.bytes)),
                   example::grouped(each.verified), fate_of(each));
    wrong += each.wrong;
  }
  fmt::format_to(std::back_inserter(out),
                 "\n  layers and bytes that a rank sent or received; {} of the checked blocks wrong\n",
                 wrong);
  return out;
}

[[nodiscard]] inline std::string table(const command_line& asked, board& shared, double seconds) {
  if (asked.splits) return handover_table(asked, shared, seconds);
  std::string out = fmt::format(
      "{} requests of {} families, prompts computed by {} processes and answered by {}{}, in {:.1f} s\n\n",
      asked.requests, asked.families, asked.prefill, asked.decode,
      asked.redis                         ? fmt::format(", directory in Redis at {}", *asked.redis)
      : asked.mover == block_way::message ? ""
                                          : fmt::format(", blocks read by {}", text_of(asked.mover)),
      seconds);
  out += "  node         requests    computed   own cache   own tiers  from others  blocks sent  blocks read";
  out += asked.costs ? "  costly to move\n" : "\n";
  std::uint64_t verified = 0;
  std::uint64_t wrong = 0;
  for (std::uint32_t seat = 0; seat < asked.nodes(); ++seat) {
    const node_figures& each = shared.node(seat);
    fmt::format_to(
        std::back_inserter(out), "  {} {:<4} {:>9}  {:>10}  {:>10}  {:>10}  {:>11}  {:>11}  {:>11}{}{}\n",
        seat < asked.prefill ? "prefill" : "decode ", seat, each.requests.load(),
        example::grouped(each.computed), example::grouped(each.matched), example::grouped(each.loaded),
        example::grouped(each.fetched), example::grouped(each.served), example::grouped(each.read),
        asked.costs ? fmt::format("  {:>14}", example::grouped(each.costly)) : "", fate_of(each));
    verified += each.verified;
    wrong += each.wrong;
  }
  fmt::format_to(
      std::back_inserter(out),
      "\n  tokens by where they came from; {} blocks of {} checked byte by byte, {} of them wrong\n",
      example::grouped(verified), example::bytes_text(static_cast<double>(asked.block_bytes)), wrong);
  return out;
}

[[nodiscard]] inline std::string json(const command_line& asked, board& shared, double seconds) {
  std::string nodes;
  std::uint64_t verified = 0;
  std::uint64_t wrong = 0;
  for (std::uint32_t seat = 0; seat < asked.nodes(); ++seat) {
    const node_figures& each = shared.node(seat);
    nodes += fmt::format(
        R"({}{{"role": "{}", "requests": {}, "computed_tokens": {}, "matched_tokens": {}, "loaded_tokens": {}, )"
        R"("fetched_tokens": {}, "costly_tokens": {}, "served_blocks": {}, "read_blocks": {}, "starts": {}, "killed": {}, )"
        R"("layers": {}, "handover_bytes": {}}})",
        seat == 0 ? "" : ", ", seat < asked.prefill ? "prefill" : "decode", each.requests.load(),
        each.computed.load(), each.matched.load(), each.loaded.load(), each.fetched.load(),
        each.costly.load(), each.served.load(), each.read.load(), each.starts.load(),
        !each.is_alive || each.starts > 1, each.layers.load(), each.bytes.load());
    verified += each.verified;
    wrong += each.wrong;
  }
  const std::string splits = !asked.splits
                                 ? ""
                                 : fmt::format(R"("prefill_split": "{}", "decode_split": "{}", )",
                                               text_of(asked.splits->prefill), text_of(asked.splits->decode));
  return fmt::format(
      R"({{"requests": {}, "answered": {}, "seconds": {:.3f}, "block_bytes": {}, "verified_blocks": {}, )"
      R"("wrong_blocks": {}, {}{}{}"nodes": [{}]}})"
      "\n",
      asked.requests, shared.answered(), seconds, asked.block_bytes, verified, wrong, splits,
      asked.splits  ? ""
      : asked.redis ? R"("directory": "redis", )"
                    : R"("directory": "embedded", )",
      asked.splits ? "" : fmt::format(R"("mover": "{}", )", text_of(asked.mover)), nodes);
}

inline void run_checked(const command_line& asked, std::FILE* out, std::FILE* notes) {
  board shared(asked.requests);
  const auto start = std::chrono::steady_clock::now();
  const bool is_well = run_job(asked, shared, notes);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  example::write(out, asked.json ? json(asked, shared, seconds) : table(asked, shared, seconds),
                 "standard output");
  if (!is_well || shared.answered() != asked.requests)
    throw llmmem::error(fmt::format("{} of {} requests were answered", shared.answered(), asked.requests));
  for (std::uint32_t seat = 0; seat < asked.nodes(); ++seat) {
    if (shared.node(seat).wrong != 0) throw llmmem::error(fmt::format("node {} read wrong bytes", seat));
  }
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status.
[[nodiscard]] inline example::exit_status run_application(const std::vector<std::string>& arguments,
                                                          std::FILE* out, std::FILE* notes) {
  const example::program self{.name = "kv_pool",
                              .too_large = "give fewer nodes, or smaller --host-blocks or --block-bytes"};
  return example::run(self, arguments, out, notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, out, notes); });
}

}  // namespace kv_pool_example
