#include "train_gpt/application.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/program_run.hpp"
#include "support/tiny_gpt.hpp"

using namespace train_gpt;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

/// Small, so that a build without optimisation is quick.
std::vector<std::string> small(std::vector<std::string> more) {
  std::vector<std::string> all{"--layers",  "1", "--width", "16", "--heads", "2",
                               "--context", "8", "--batch", "2",  "--steps", "3"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

constexpr const char* readme = LLMMEM_SOURCE_DIR "/README.md";

const std::string hint = "\nrun train_gpt --help for the options\n";

}  // namespace

TEST_CASE("with --json the program writes one object with every field to standard output") {
  const outcome done = run(small({"--json", "--text", readme, "--threads", "2"}));
  REQUIRE(done.status == exit_status::success);
  const auto json = nlohmann::json::parse(done.out);
  CHECK(json.size() == 13);
  CHECK(json["stalls"].size() == 6);
  CHECK(json["stalls"]["write_back"] == 0);
  CHECK(json["first_step_stall_seconds"] == 0);
  CHECK(json["predicted"]["peak_bytes"] == json["peak_resident_bytes"]);
  REQUIRE(json["losses"].size() == 4);
  for (const auto& loss : json["losses"]) {
    const auto text = loss.get<std::string>();
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    CHECK(*end == '\0');
    CHECK(text.substr(0, 2) == "0x");
    CHECK(value > 4);
    CHECK(value < 7);
  }
  CHECK(json["digest"].get<std::string>().size() == 16);
  CHECK(json["tokens_per_second"].get<double>() > 0);
  const gpt_shape shape{.blocks = 1, .width = 16, .heads = 2, .context = 8, .batch = 2};
  CHECK(json["peak_resident_bytes"].get<std::uint64_t>() >= plan_bytes(shape, 2).total());
  CHECK(json["bytes_moved"] == nlohmann::json::object());
  CHECK(json["stall_seconds"] == 0);
  CHECK(json["stall_lower_bound_seconds"] == 0);
  CHECK(json["regret"] == 0);
  CHECK(json["skipped_steps"] == 0);
  CHECK(json["loss_scale"] == 1);
}

TEST_CASE("a report has a run's moved bytes by link, and the first tier's peak") {
  run_result result;
  result.losses = {1.5, 0.25};
  result.memory.tiers = {{"device", 10, 20}, {"host", 30, 40}};
  result.memory.links = {{"device to host", 123}, {"host to \"disk\"", 456}};
  result.memory.stall_seconds = 0.5;
  result.memory.stalls[static_cast<std::size_t>(llmmem::stall_cause::budget)] = 0.375;
  result.memory.first_step_stall_seconds = 0.0625;
  result.memory.stall_lower_bound_seconds = 0.25;
  result.memory.regret = 0.125;
  result.skipped_steps = 3;
  result.loss_scale = 512;
  const auto json = nlohmann::json::parse(to_json(result));
  CHECK(json["losses"] == nlohmann::json{"0x1.8p+0", "0x1p-2"});
  CHECK(json["digest"] == "0000000000000000");
  CHECK(json["peak_resident_bytes"] == 20);
  CHECK(json["bytes_moved"] == nlohmann::json{{"device to host", 123}, {"host to \"disk\"", 456}});
  CHECK(json["stall_seconds"] == 0.5);
  CHECK(json["stalls"]["budget"] == 0.375);
  CHECK(json["stalls"]["codec"] == 0);
  CHECK(json["first_step_stall_seconds"] == 0.0625);
  CHECK(json["stall_lower_bound_seconds"] == 0.25);
  CHECK(json["regret"] == 0.125);
  CHECK(json["skipped_steps"] == 3);
  CHECK(json["loss_scale"] == 512);
}

TEST_CASE("the stall of a run is the sum of its steps' stalls") {
  struct waiting_trainer {
    double stalled = 3;  // before the run
    double step(const token_batch&, std::uint64_t number) {
      stalled += 0.25;
      return static_cast<double>(number);
    }
    double evaluate(const token_batch&) { return stalled += 5; }
    std::uint64_t digest() { return static_cast<std::uint64_t>(stalled += 7); }
  } waiting;
  const gpt_shape& shape = llmmem_tests::tiny_shape;
  const corpus text("tiny", llmmem_tests::tiny_text(100), shape);
  const auto memory = [&] {
    memory_report now;
    now.stall_seconds = waiting.stalled;
    now.stalls[1] = waiting.stalled / 2;
    return now;
  };
  double shown = 0;
  const run_result result = run_training(waiting, text, shape, 4, 1, memory,
                                         [&](const run_progress& now) { shown = now.memory.stall_seconds; });
  CHECK(result.memory.stall_seconds == 1);
  CHECK(result.memory.stalls[1] == 0.5);
  CHECK(result.memory.first_step_stall_seconds == 0.25);
  CHECK(shown == 9);
  CHECK(result.losses.size() == 5);
}

TEST_CASE("the figures depend on the seed, and not on the threads") {
  const auto result = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--json", "--text", readme});
    const auto json = nlohmann::json::parse(run(small(std::move(more))).out);
    return json["losses"].dump() + json["digest"].dump();
  };
  CHECK(result({"--threads", "1"}) == result({"--threads", "3"}));
  CHECK(result({"--seed", "1"}) != result({"--seed", "2"}));
}

TEST_CASE("activations of few bits change the figures, in the same way in tiers and on any threads") {
  const auto result = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--json", "--text", readme});
    const auto json = nlohmann::json::parse(run(small(std::move(more))).out);
    const auto& record = json["predicted"]["peak_record_bytes"];
    return std::pair(json["losses"].dump() + json["digest"].dump(), record.get<std::uint64_t>());
  };
  const auto exact = result({});
  const auto four = result({"--activation-bits", "4"});
  CHECK(four.first != exact.first);
  CHECK(four.second < exact.second);
  CHECK(result({"--activation-bits", "4", "--threads", "3", "--update", "after_backward"}).first ==
        four.first);
  CHECK(result({"--activation-bits", "4", "--memory", "tiered", "--budget-mib", "1"}).first == four.first);
  CHECK(result({"--activation-bits", "8"}).first != four.first);
}

TEST_CASE("a report has every step's progress and the places of the bytes") {
  const outcome done = run(small({"--text", readme}));
  CHECK(done.status == exit_status::success);
  for (const char* step : {"step 0/3", "step 1/3", "step 2/3", "step 3/3", "tokens/s", "host"})
    CHECK(done.notes.find(step) != done.notes.npos);
  for (const char* said : {"1 blocks of width 16", "README.md", "in 3 steps", "activations", "host "})
    CHECK(done.out.find(said) != done.out.npos);
}

TEST_CASE("a run of 0 steps reports a loss and the initial weights") {
  const auto json = nlohmann::json::parse(run(small({"--steps", "0", "--json", "--text", readme})).out);
  CHECK(json["losses"].size() == 1);
  CHECK(json["tokens_per_second"] == 0);
}

TEST_CASE("the default model keeps at least 64 MiB in at least 6 layers") {
  const command_line usual;
  CHECK(usual.shape.blocks >= 6);
  CHECK(usual.steps == 12);
  CHECK(plan_bytes(usual.shape, 1).total() >= std::uint64_t{64} << 20);
}

TEST_CASE("without a given text the program trains on the available one") {
  const char* const folder = std::getenv("LLMMEM_DATA_DIR");
  const std::string before = folder == nullptr ? "" : folder;
  ::setenv("LLMMEM_DATA_DIR", "/nonexistent", 1);
  CHECK(load_text(std::nullopt).name == "llmmem's own headers");
  CHECK(load_text(std::nullopt).text.size() > 100'000);
  ::setenv("LLMMEM_DATA_DIR", before.c_str(), 1);
  CHECK(load_text(readme).name == readme);
}

TEST_CASE("each wrong option has its own error, with valid values") {
  const auto wrong = [](const std::vector<std::string>& arguments) {
    const outcome done = run(arguments);
    CHECK(done.status == exit_status::wrong_usage);
    CHECK(done.out.empty());
    return done.notes;
  };
  CHECK(wrong({"--layers", "0"}) ==
        "train_gpt: --layers \"0\": must be a whole number from 1 to 1024" + hint);
  CHECK(wrong({"--threads", "many"}) ==
        "train_gpt: --threads \"many\": must be a whole number from 1 to 256" + hint);
  CHECK(wrong({"--width", "100"}) ==
        "train_gpt: --heads 8 does not divide --width 100; --width 104 would do" + hint);
  CHECK(wrong({"--steps", "-1"}) ==
        "train_gpt: --steps \"-1\": must be a whole number from 0 to 1000000" + hint);
  CHECK(wrong({"--activation-bits", "3"}) ==
        "train_gpt: --activation-bits: '3' is unknown; there are 8, 4 and 2" + hint);
  CHECK(wrong({"--activation-bits", ""}) ==
        "train_gpt: --activation-bits: '' is unknown; there are 8, 4 and 2" + hint);
  CHECK(wrong({"--activation-bits", "8", "--recompute", "full"}) ==
        "train_gpt: --recompute promises the figures of the run without it, and --activation-bits would have "
        "it compute from rounded activations; leave one of the two out" +
            hint);
  CHECK(wrong({"--local-steps", "4"}) ==
        "train_gpt: --local-steps is of workers that train apart; add --workers N (with 1, the one worker "
        "takes "
        "outer steps by itself)" +
            hint);
  CHECK(
      wrong({"--workers", "4"}) ==
      "train_gpt: --workers and --outer, with its rate, momentum and wire, are of workers that train apart; "
      "add --local-steps N" +
          hint);
  CHECK(wrong({"--workers", "3", "--local-steps", "4"}) ==
        "train_gpt: 3 ranks of all --workers do not divide --batch 4; --batch 6 would do" + hint);
  CHECK(wrong({"--workers", "33", "--ranks", "2", "--local-steps", "4"}) ==
        "train_gpt: 33 --workers of 2 --ranks are 66 ranks; there may be 64" + hint);
  CHECK(wrong({"--workers", "2", "--local-steps", "4", "--outer", "adam"}) ==
        "train_gpt: --outer: 'adam' is unknown; there are nesterov and sgd" + hint);
  CHECK(wrong({"--workers", "2", "--local-steps", "4", "--outer-rate", "nan"}) ==
        "train_gpt: --outer-rate \"nan\": must be a number from 0.000001 to 100" + hint);
  CHECK(wrong({"--workers", "2", "--local-steps", "4", "--outer-momentum", "1"}) ==
        "train_gpt: --outer-momentum \"1\": must be a number from 0 to 0.999999" + hint);
  const auto top_k = [&](const std::string& wire, std::vector<std::string> more) {
    more.insert(more.end(), {"--wire", wire, "--ranks", "2"});
    return wrong(more);
  };
  CHECK(top_k("topk:1.5", {}) ==
        "train_gpt: --wire topk: \"1.5\": must be a number from 0.000000001 to 1, then :bf16, :kept, both or "
        "neither" +
            hint);
  CHECK(top_k("topk", {}) ==
        "train_gpt: --wire: 'topk' is unknown; there are plain, bf16, fp8, int8, int4, "
        "zeropp and topk:SHARE" +
            hint);
  CHECK(top_k("topk:0.1", {}) ==
        "train_gpt: --wire topk adds momentum before it sends, and another optimizer would take its own "
        "moments of sums that are mostly zeros; add --optimizer sgd" +
            hint);
  CHECK(
      top_k("topk:0.1", {"--optimizer", "sgd", "--parallel", "zero1"}) ==
      "train_gpt: --wire topk has each rank keep momentum and unsent gradients of all weights, which leaves "
      "nothing to shard but the weights; leave --parallel out" +
          hint);
  CHECK(top_k("topk:0.1", {"--optimizer", "sgd", "--node-ranks", "2"}) ==
        "train_gpt: --wire topk sums in one hop; leave --node-ranks out" + hint);
  CHECK(
      top_k("topk:0.1", {"--optimizer", "sgd", "--error-feedback"}) ==
      "train_gpt: --error-feedback is of other wires: with --wire topk, what is not sent waits in any case; "
      "leave it out" +
          hint);
  CHECK(top_k("topk:0.1", {"--optimizer", "sgd", "--sums-in-flight", "1"}) ==
        "train_gpt: --sums-in-flight sums all gradients, and --wire topk a share; leave one of the two out" +
            hint);
  CHECK(top_k("topk:0.1", {"--optimizer", "sgd", "--clip-norm", "1"}) ==
        "train_gpt: --clip-norm and --loss-scale decide by the gradients of one step, and --wire topk sends "
        "those of many in one; leave one of the two out" +
            hint);
  CHECK(wrong({"--wdith", "100"}).find("--wdith") != std::string::npos);
  const std::string large =
      wrong({"--layers", "1024", "--width", "16384", "--context", "8192", "--batch", "4096"});
  CHECK(large.starts_with("train_gpt: this model would keep "));
  CHECK(large.ends_with("; lower --layers, --width, --context or --batch" + hint));
}

TEST_CASE("missing and too short texts are failures that name the file") {
  const outcome missing = run(small({"--text", "/nonexistent/a.txt"}));
  CHECK(missing.status == exit_status::failure);
  CHECK(missing.notes == "train_gpt: /nonexistent/a.txt: cannot open it: No such file or directory\n");
  const outcome folder = run(small({"--text", "/"}));
  CHECK(folder.notes == "train_gpt: /: cannot read it: Is a directory\n");
  const outcome empty = run(small({"--text", "/dev/null"}));
  CHECK(empty.status == exit_status::failure);
  CHECK(empty.out.empty());
  CHECK(empty.notes ==
        "train_gpt: /dev/null: has 0 bytes; sequences of 8 tokens need at least 9: take a longer text, or a "
        "context of fewer tokens\n");
}

TEST_CASE("help names every option") {
  const outcome help = run({"--help"});
  CHECK(help.status == exit_status::success);
  for (const char* option : {"--text", "--steps", "--seed", "--threads", "--layers", "--width", "--heads",
                             "--context", "--batch", "--json"})
    CHECK(help.out.find(option) != help.out.npos);
}
