/// The example: its table is that of replaying the trace under each policy.
#include "cache_journal/application.hpp"

#include <llmmem/eviction/any.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "cache_journal/record.hpp"
#include "cache_journal/record_groups.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/paged_replay.hpp"
#include "support/program_run.hpp"

using namespace cache_journal;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

}  // namespace

TEST_CASE("a journal recorded under LRU gives the hits of every policy, MIN included") {
  const replay_trace::trace from = replay_trace::generate_trace({.seed = 3, .requests = 1500});
  for (const std::uint64_t capacity : {1'000U, 4'000U}) {
    CAPTURE(capacity);
    const finding found = examine("generated", record(from, capacity), std::nullopt);
    CHECK(found.diverged.empty());
    CHECK(found.torn.empty());
    REQUIRE(found.policies.size() == llmmem::eviction_names.size());
    for (const llmmem::what_if_result& each : found.policies) {
      CAPTURE(each.policy);
      const replay_trace::replay_result real =
          replay_trace::replay(from, {each.policy, capacity, from.block_tokens(), 1}, [](std::uint64_t) {});
      CHECK(each.hit_blocks == real.hits);
      CHECK(each.requested_blocks == real.block_refs);
      CHECK(each.evictions == real.evictions);
      CHECK(each.skipped == 0);
    }
  }
}

TEST_CASE("a journal is replayed at another capacity as if it had been recorded there") {
  const replay_trace::trace from = replay_trace::generate_trace({.seed = 4, .requests = 600});
  const auto there = examine("there", record(from, 900), std::nullopt).policies;
  CHECK(examine("here", record(from, 300), 900).policies == there);
}

TEST_CASE("a journal of a model with windows gives the hits of every policy, and of another capacity") {
  const replay_trace::trace from = replay_trace::generate_trace({.seed = 3, .requests = 250});
  const auto journal = record_groups(from, 400, 12);
  const finding found = examine_groups("generated", journal, std::nullopt);
  CHECK(found.diverged.empty());
  CHECK(found.torn.empty());
  CHECK(is_of_groups(journal));
  CHECK_FALSE(is_of_groups(record(from, 400)));
  std::uint64_t lru = 0;
  for (const llmmem::what_if_result& each : found.policies) {
    if (each.policy == "lru") lru = each.hit_tokens;
    if (each.policy != "s3fifo" && each.policy != "fifo") continue;
    CAPTURE(each.policy);
    const auto there = record_groups(from, 400, 12, each.policy);
    const llmmem::hybrid_stats real = llmmem::paging::replay(there, make_group_cache).cache().stats();
    CHECK(each.hit_tokens == real.hit_tokens);
    CHECK(each.hit_blocks == real.hit_tokens);
    CHECK(each.evictions == real.pages.evictions);
    CHECK(each.skipped == 0);
  }
  CHECK(lru > 200);
  CHECK(examine_groups("here", record_groups(from, 200, 12), 400).policies == found.policies);
}

TEST_CASE("with --json there is one JSON object on standard output") {
  const outcome done = run({"--json", "--capacity-blocks", "500"});
  CHECK(done.status == exit_status::success);
  CHECK(done.notes.empty());
  const auto json = nlohmann::json::parse(done.out);
  CHECK(json["diverged"].is_null());
  CHECK(json["torn"].is_null());
  CHECK(json["capacity_blocks"] == 500);
  CHECK(json["policies"].size() == llmmem::eviction_names.size());
  CHECK(json["policies"][0]["policy"] == "lru");
  CHECK(json["policies"][0]["sequences"] == 12'031);
}

TEST_CASE("a torn journal is evaluated up to its end, and the output says where that is") {
  const replay_trace::trace from = replay_trace::generate_trace({.seed = 3, .requests = 100});
  const std::vector<std::byte> whole = record(from, 100);
  const finding found = examine("torn", std::span(whole).first(whole.size() - 3), std::nullopt);
  CHECK(found.diverged.empty());
  CHECK(found.torn == "record " + std::to_string(found.records + 1) + ", offset " +
                          std::to_string(whole.size() - 14) + ": it is truncated");
}

TEST_CASE("errors are one line and a status") {
  const std::string hint = "\nrun cache_journal --help for the options\n";
  const outcome wrong = run({"--capacity-blocks", "0"});
  CHECK(wrong.status == exit_status::wrong_usage);
  CHECK(wrong.out.empty());
  CHECK(wrong.notes ==
        "cache_journal: --capacity-blocks \"0\": must be a whole number from 1 to 1000000000" + hint);
  const outcome seed = run({"--seed", "x"});
  CHECK(seed.notes ==
        "cache_journal: --seed \"x\": must be a whole number from 0 to 18446744073709551615" + hint);
  const outcome both = run({"--replay", "a", "--trace", "b"});
  CHECK(both.notes ==
        "cache_journal: --replay excludes --trace, --record and --seed: the file says it all" + hint);
  const outcome window = run({"--replay", "a", "--window", "3"});
  CHECK(window.notes == "cache_journal: --replay excludes --window: the file says it all" + hint);
  const outcome missing = run({"--replay", "/nonexistent/journal"});
  CHECK(missing.status == exit_status::failure);
  CHECK(missing.notes == "cache_journal: /nonexistent/journal: cannot open it: No such file or directory\n");
  const outcome other = run({"--replay", "/dev/null"});
  CHECK(other.notes ==
        "cache_journal: journal: offset 0: the bytes end here; a journal begins with 8 bytes and a header\n");
  CHECK(run({"--help"}).status == exit_status::success);
}
