/// @file
/// The command line of `kv_pool`.
#pragma once

#include <llmmem/pool/redis_types.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/program.hpp"

namespace kv_pool_example {

using example::usage_error;

/// The most processes of each role.
inline constexpr std::uint32_t most_nodes = 16;

/// How the ranks of one role split the model, and the tokens of their blocks.
struct kv_split {
  std::uint32_t tp = 1;          ///< ranks that share the heads
  std::uint32_t cp = 1;          ///< ranks that share the tokens
  std::uint32_t interleave = 1;  ///< consecutive tokens on one of these
  std::uint32_t block = 16;      ///< tokens of a rank's block

  [[nodiscard]] std::uint32_t ranks() const noexcept { return tp * cp; }
};
/// The two sides of a handover.
struct kv_splits {
  kv_split prefill;
  kv_split decode;
};
inline constexpr std::uint32_t heads_of_model = 8;

/// What a decode process expects to pay for tokens of other processes, and for computed ones.
struct move_costs {
  std::uint64_t link = 0;     ///< bytes a second from each other process
  std::uint64_t latency = 0;  ///< nanoseconds before the first of them
  std::uint64_t compute = 0;  ///< nanoseconds for a token
};

/// How blocks pass between the processes.
enum class block_way : std::uint8_t { message, shared, ucx };

struct command_line {
  std::uint32_t prefill = 2;  ///< processes that compute prompts
  std::uint32_t decode = 2;   ///< processes that answer
  std::uint32_t requests = 200;
  std::uint32_t families = 4;            ///< system prompts that requests share
  std::uint64_t block_bytes = 16384;     ///< bytes of a block of 16 tokens
  std::uint64_t host_blocks = 8192;      ///< blocks of a node's host tier
  std::optional<std::uint32_t> kill_at;  ///< answers after which the first prefill process is killed
  bool restarts = false;                 ///< whether a fresh process takes its seat
  std::optional<std::string> redis;      ///< where the Redis server is that has the pool's directory
  block_way mover = block_way::message;
  std::optional<move_costs> costs;  ///< a process fetches only what is cheaper to move than to compute
  std::optional<kv_splits> splits;  ///< hands prompts over between them, without a pool
  std::uint64_t seed = 1;
  bool json = false;

  [[nodiscard]] std::uint32_t nodes() const noexcept { return prefill + decode; }
  /// The requests from this one on wait until the process is killed and, with `restarts`, replaced: also on a
  /// machine that is too busy to kill it earlier.
  [[nodiscard]] std::uint32_t held_from() const noexcept {
    if (!kill_at || *kill_at >= requests) return requests;
    return std::max(*kill_at, requests / 2);
  }
};

/// Reads `tp=2,cp=1,interleave=1,block=16`, of which each may be missing.
/// @throws usage_error
[[nodiscard]] inline kv_split parse_split(const std::string& option, const std::optional<std::string>& text) {
  if (!text) return {};
  const auto [tp, cp, interleave, block] = example::usage_named_counts<4>(
      option, *text, {"tp", "cp", "interleave", "block"}, 256, "", {1, 1, 1, 16});
  const auto refuse = [&](const std::string& why) {
    throw usage_error(example::given(option, *text) + ": " + why);
  };
  if (heads_of_model % tp != 0)
    refuse(fmt::format("tp={} must divide the model's {} heads", tp, heads_of_model));
  if (tp * cp > most_nodes)
    refuse(fmt::format("tp x cp are {} processes, and at most {} may have a role", tp * cp, most_nodes));
  if (block % interleave != 0)
    refuse(fmt::format("block={} is not a whole number of runs of interleave={}", block, interleave));
  const auto of = [](std::uint64_t count) { return static_cast<std::uint32_t>(count); };
  return {.tp = of(tp), .cp = of(cp), .interleave = of(interleave), .block = of(block)};
}

/// Reads `link=N,latency=N,compute=N`.
/// @throws usage_error
[[nodiscard]] inline move_costs parse_costs(const std::string& text) {
  const auto [link, latency, compute] = example::usage_named_counts<3>(
      "--costs", text, {"link", "latency", "compute"}, std::uint64_t{1} << 50, "bytes a second, ns and ns");
  return {.link = link, .latency = latency, .compute = compute};
}

/// Reads `message`, `shared` or `ucx`.
/// @throws usage_error
[[nodiscard]] inline block_way parse_mover(const std::string& text) {
  if (text == "message") return block_way::message;
  if (text == "shared") return block_way::shared;
  if (text != "ucx") throw usage_error(example::given("--mover", text) + ": must be message, shared or ucx");
#ifndef LLMMEM_EXAMPLE_UCX
  throw usage_error("--mover ucx: this program was built without UCX; install it (Debian: libucx-dev)");
#else
  return block_way::ucx;
#endif
}

/// Reads a path of a socket, `HOST` or `HOST:PORT`.
/// @throws usage_error
[[nodiscard]] inline llmmem::redis_options redis_place(const std::string& text) {
  if (text.find('/') != std::string::npos) return {.unix_socket = text};
  const std::size_t colon = text.rfind(':');
  llmmem::redis_options out{.host = text.substr(0, colon)};
  if (colon != std::string::npos)
    out.port = static_cast<std::uint16_t>(example::usage_count("--redis", text.substr(colon + 1), 1, 65'535));
  return out;
}

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Computes prompts in some processes and answers them in others, which fetch the keys and values from a "
      "pool.",
      "kv_pool");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  std::optional<std::string> prefill, decode, requests, families, bytes, blocks, kill, seed, from, to, redis,
      mover, costs;
  app.add_option("--prefill", prefill, "processes that compute prompts (default: 2)")->type_name("N");
  app.add_option("--decode", decode, "processes that answer (default: 2)")->type_name("N");
  app.add_option("--requests", requests, "to serve (default: 200)")->type_name("N");
  app.add_option("--families", families, "system prompts that requests share (default: 4)")->type_name("N");
  app.add_option("--block-bytes", bytes,
                 "bytes of keys and values of 16 tokens, a multiple of 64 (default: 16384)")
      ->type_name("B");
  app.add_option("--host-blocks", blocks, "blocks of each node's host tier (default: 8192)")->type_name("N");
  app.add_option("--kill-at", kill,
                 "answers after which the first prefill process is killed (default: never)")
      ->type_name("N");
  app.add_flag("--restart", asked.restarts, "a fresh process takes the killed one's seat");
  app.add_option("--redis", redis,
                 "the pool's directory is in the Redis server of this socket, or at this host (default: the "
                 "nodes have it)")
      ->type_name("PATH|HOST[:PORT]");
  app.add_option("--mover", mover,
                 "how blocks pass: in messages of their owner, read from its shared memory, or through UCX "
                 "(default: message)")
      ->type_name("message|shared|ucx");
  app.add_option(
         "--costs", costs,
         "fetch only what is cheaper to move than to compute: bytes a second from each process, ns before "
         "the first, and ns to compute a token (default: fetch all)")
      ->type_name("link=N,latency=N,compute=N");
  app.add_option(
         "--prefill-split", from,
         "hands each prompt over layer by layer, without a pool, from prefill processes that split the "
         "model so (default: tp=1,cp=1,interleave=1,block=16)")
      ->type_name("tp=N,cp=N,interleave=N,block=N");
  app.add_option("--decode-split", to, "to decode processes that split it so (default: the same)")
      ->type_name("tp=N,cp=N,interleave=N,block=N");
  app.add_option("--seed", seed, "of the prompts (default: 1)")->type_name("N");
  app.add_flag("--json", asked.json, "JSON on standard output");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  const auto count = [](const char* option, const std::optional<std::string>& text, std::uint64_t least,
                        std::uint64_t most, auto& into) {
    if (text)
      into = static_cast<std::remove_reference_t<decltype(into)>>(
          example::usage_count(option, *text, least, most));
  };
  count("--prefill", prefill, 1, most_nodes, asked.prefill);
  count("--decode", decode, 1, most_nodes, asked.decode);
  count("--requests", requests, 1, 100'000, asked.requests);
  count("--families", families, 1, 1000, asked.families);
  count("--block-bytes", bytes, 64, 1U << 24, asked.block_bytes);
  count("--host-blocks", blocks, 64, 1U << 22, asked.host_blocks);
  if (asked.block_bytes % 64 != 0)
    throw usage_error(example::given("--block-bytes", *bytes) + ": must be a multiple of 64");
  if (from || to) {
    for (const auto& [option, is_given] : {std::pair("--prefill", prefill.has_value()),
                                           {"--decode", decode.has_value()},
                                           {"--redis", redis.has_value()},
                                           {"--mover", mover.has_value()},
                                           {"--costs", costs.has_value()},
                                           {"--host-blocks", blocks.has_value()}}) {
      if (is_given)
        throw usage_error(fmt::format(
            "{} is about the pool; a handover has one process for each rank of its splits, and no host tier",
            option));
    }
    if (asked.block_bytes % (64 * heads_of_model) != 0)
      throw usage_error(example::given("--block-bytes", bytes.value_or("")) +
                        fmt::format(": must be a multiple of {} for a handover", 64 * heads_of_model));
    asked.splits = {.prefill = parse_split("--prefill-split", from),
                    .decode = parse_split("--decode-split", to)};
    asked.prefill = asked.splits->prefill.ranks();
    asked.decode = asked.splits->decode.ranks();
  }
  if (kill) asked.kill_at = static_cast<std::uint32_t>(example::usage_count("--kill-at", *kill, 1, 100'000));
  if (asked.restarts && !kill) throw usage_error("--restart is about a killed process; give --kill-at N");
  if (redis) {
#ifdef LLMMEM_EXAMPLE_REDIS
    static_cast<void>(redis_place(*redis));
#else
    throw usage_error("--redis: this program was built without hiredis; install it (Debian: libhiredis-dev)");
#endif
    asked.redis = redis;
  }
  if (mover) asked.mover = parse_mover(*mover);
  if (costs) asked.costs = parse_costs(*costs);
  if (redis && asked.mover != block_way::message)
    throw usage_error("--redis with --mover: this program compiles each of them alone; a kv_pool takes both");
  if (seed) asked.seed = example::usage_seed(*seed);
  return {asked, std::nullopt};
}

}  // namespace kv_pool_example
