#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "layer_groups/application.hpp"
#include "support/program_run.hpp"

using namespace layer_groups;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

}  // namespace

TEST_CASE("every byte of the budget has one cause, and every request ends or is refused") {
  const auto [status, out, notes] = run({"--requests", "60", "--budget", "2", "--json"});
  REQUIRE(status == exit_status::success);
  const auto all = nlohmann::json::parse(out);
  CHECK(all.size() == 4 * 4 + 2 * 3);  // states have no single table
  for (const auto& each : all) {
    CAPTURE(each["model"].get<std::string>());
    CAPTURE(each["scheme"].get<std::string>());
    const auto& bytes = each["byte_samples"];
    std::uint64_t sum = 0;
    for (const char* cause :
         {"needed", "cached", "unlooked", "unfilled", "padding", "partial_pages", "null_block", "free"}) {
      sum += bytes[cause].get<std::uint64_t>();
    }
    CHECK(sum == bytes["samples"].get<std::uint64_t>() * bytes["budget"].get<std::uint64_t>());
    CHECK(each["requests"] == 60);
    CHECK(each["hit_tokens"].get<std::uint64_t>() <= each["prompt_tokens"].get<std::uint64_t>());
  }
}

TEST_CASE("equal groups have the layers of the smallest set, and blocks no smaller than a state") {
  for (const hybrid_model& model : models()) {
    CAPTURE(model.name);
    const scheme ours = super_pages(model, {});
    const scheme equal = equal_groups(model, {});
    std::uint64_t bytes = 0;
    for (const auto& parts : equal.parts) {
      CHECK(parts[0].needs.block_bytes <= equal.page_bytes);
      bytes += parts[0].needs.block_bytes /
               (parts[0].needs.kind == llmmem::layer_kind::state_snapshots ? 1 : parts[0].needs.block_tokens);
    }
    std::uint64_t ours_bytes = 0;
    for (const auto& each : ours.groups) {
      ours_bytes +=
          each.block_bytes / (each.kind == llmmem::layer_kind::state_snapshots ? 1 : each.block_tokens);
    }
    CHECK(bytes == ours_bytes);  // no layer is lost
  }
}

TEST_CASE("impossible options are refused by name") {
  CHECK(run({"--model", "gpt"}).notes ==
        "layer_groups: --model \"gpt\": no such model; there are all, gemma2-9b, gemma3-27b, llama4-scout, "
        "jamba-v0.1, nemotron-h-8b, deepseek-v3\nrun layer_groups --help for the options\n");
  CHECK(run({"--budget", "0"}).status == exit_status::wrong_usage);
  CHECK(run({"--seed", "-1"}).notes ==
        "layer_groups: --seed \"-1\": must be a whole number from 0 to 18446744073709551615\n"
        "run layer_groups --help for the options\n");
  CHECK(run({"--snapshot-tokens", "500"}).notes ==
        "layer_groups: --snapshot-tokens \"500\": must be a multiple of --block-tokens, 16\n"
        "run layer_groups --help for the options\n");
  CHECK(run({"--trace", "/nowhere"}).status == exit_status::failure);
  CHECK(run({"--help"}).status == exit_status::success);
}
