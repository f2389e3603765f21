#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "allocation_trace/application.hpp"
#include "support/program_run.hpp"
#include "support/seeds.hpp"

using namespace allocation_trace;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;
using nlohmann::json;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

trace read(std::string_view text) {
  replay_trace::memory_source source(text, "t");
  return read_allocations(source);
}

std::string refusal_of(const std::string& lines) {
  try {
    static_cast<void>(read("llmmem allocation trace 1\n" + lines));
  } catch (const trace_error& why) {
    return why.what();
  }
  return "none";
}

program_options short_run() {
  program_options options{.model = llmmem::find_model("llama2-7b")};
  options.steps = 4;
  options.requests = 80;
  return options;
}

}  // namespace

TEST_CASE("the pieces of a layer add up to what the paper counts for it") {
  for (const auto again : {llmmem::recompute::none, llmmem::recompute::selective}) {
    for (const std::uint64_t tokens : {std::uint64_t{1}, std::uint64_t{17}, std::uint64_t{2048}}) {
      const llmmem::training_step step{.sequence = tokens, .batch = 3, .recomputed = again};
      const auto& model = llmmem::find_model("llama2-13b");
      const auto pieces = layer_activations(model, step);
      CHECK(std::accumulate(pieces.begin(), pieces.end(), std::uint64_t{0}) ==
            llmmem::activation_bytes_per_layer(model, step));
      CHECK(pieces[0] == llmmem::activation_bytes_per_layer(
                             model, {.sequence = tokens, .batch = 3, .recomputed = llmmem::recompute::full}));
    }
  }
}

TEST_CASE("every program frees the allocations of a step or a request once, and keeps the rest") {
  for (const auto seed : llmmem_tests::seeds(3)) {
    for (const std::string_view name : program_names) {
      CAPTURE(name);
      program_options longer = short_run();
      longer.steps += 1;
      longer.requests += 1;
      const auto lengths = generate_lengths(seed, 500);
      std::vector<std::uint64_t> kept;
      for (const auto& options : {short_run(), longer}) {
        const trace played = play(name, lengths, options);
        std::vector<std::uint64_t> live(played.allocations());
        for (const event& each : played.events()) {
          REQUIRE((live[each.id] == 0) == (each.bytes != 0));
          live[each.id] = each.bytes;
        }
        kept.push_back(std::accumulate(live.begin(), live.end(), std::uint64_t{0}));
      }
      CHECK(kept[0] == kept[1]);
      CHECK(kept[0] > 0);
    }
  }
}

TEST_CASE("a trace reads back as it was written") {
  const trace played = play("train", generate_lengths(1, 100), short_run());
  const std::string text = to_text(played);
  const trace again = read(text);
  CHECK(to_text(again) == text);
  CHECK(again.peak_live_bytes() == played.peak_live_bytes());
}

TEST_CASE("an error in a trace is reported with file, line and reason") {
  CHECK(refusal_of("a 1 5\nf 1\na 2 7\n") == "none");
  CHECK(refusal_of("a 1 5\r\nf 1") == "none");
  CHECK(refusal_of("") == "t: no allocation in it");
  CHECK(refusal_of("b 1 5\n") == "t:2: must be `a ID BYTES` or `f ID`; near \"b 1 5\"");
  CHECK(refusal_of("\n") == "t:2: must be `a ID BYTES` or `f ID`; near \"\"");
  CHECK(refusal_of("a 1\n") == "t:2: an allocation has two numbers, the id and the bytes; near \"a 1\"");
  CHECK(refusal_of("a x 1\n") == "t:2: the id is not a number; near \"a x 1\"");
  CHECK(refusal_of("a 1 -1\n") == "t:2: the bytes are not a number; near \"a 1 -1\"");
  CHECK(refusal_of("a 1 5 6\n") == "t:2: the bytes are not a number; near \"a 1 5 6\"");
  CHECK(refusal_of("a 1 0\n") == "t:2: 0 bytes; an allocation has 1 to 281474976710656; near \"a 1 0\"");
  CHECK(refusal_of("a 1 281474976710657\n") ==
        "t:2: 281474976710657 bytes; an allocation has 1 to 281474976710656; near \"a 1 281474976710657\"");
  CHECK(refusal_of("a 1 281474976710656\na 2 1\n") ==
        "t:3: 281474976710657 bytes are live, more than 281474976710656; near \"a 2 1\"");
  CHECK(refusal_of("a 1 5\na 1 5\n") == "t:3: id 1 was allocated before; near \"a 1 5\"");
  CHECK(refusal_of("a 1 5\nf 1\na 1 5\n") == "t:4: id 1 was allocated before; near \"a 1 5\"");
  CHECK(refusal_of("f 1\n") == "t:2: id 1 was never allocated; near \"f 1\"");
  CHECK(refusal_of("a 1 5\nf 1\nf 1\n") == "t:4: id 1 was freed before; near \"f 1\"");
  CHECK(refusal_of("a 1 5\nf 1 5\n") == "t:3: a free has one number, the id; near \"f 1 5\"");
  CHECK(refusal_of(std::string(80, 'a') + "\n") ==
        "t:2: the line is longer than 64 bytes; near \"" + std::string(40, 'a') + "...\"");
  CHECK_THROWS_WITH_AS(read("a 1 5\n"),
                       "t:1: the first line must be \"llmmem allocation trace 1\"; near \"a 1 5\"",
                       trace_error);
}

TEST_CASE("a program survives the smallest budget, and not one step less") {
  for (const std::string_view program : {"train-recompute", "serve-exact"}) {
    const trace played = play(program, generate_lengths(1, 200), short_run());
    for (const std::string_view name : arena_names) {
      CAPTURE(name);
      const std::uint64_t budget = smallest_budget(played, name);
      CHECK(budget >= played.peak_live_bytes());
      CHECK_FALSE(replay(played, name, budget).failed_at);
      const replay_result less = replay(played, name, budget - (std::uint64_t{2} << 20));
      REQUIRE(less.failed_at);
      CHECK(less.why.code == llmmem::errc::out_of_bytes);
    }
  }
}

TEST_CASE(
    "on a recorded trace caching_split fails with more free bytes than requested, and stitched survives") {
  program_options options = short_run();
  options.requests = 400;
  const trace played = read(to_text(play("serve-exact", generate_lengths(1, 500), options)));
  const std::uint64_t budget = smallest_budget(played, "stitched");
  CHECK_FALSE(replay(played, "stitched", budget).failed_at);
  const replay_result split = replay(played, "caching_split", budget);
  REQUIRE(split.failed_at);
  CHECK(split.stats.free() > played.events()[*split.failed_at].bytes);
  CHECK(split.stats.largest_free < played.events()[*split.failed_at].bytes);
}

TEST_CASE("the program prints a table, or JSON with every figure") {
  const std::vector<std::string> common{"--program", "serve-exact", "--requests", "60", "--seed", "2"};
  const outcome table = run(common);
  CHECK(table.status == exit_status::success);
  CHECK(table.notes.empty());
  for (const char* part : {"smallest budget over peak live bytes", "serve-exact llama2-7b", "system calls"})
    CHECK(table.out.find(part) != std::string::npos);

  auto with_json = common;
  with_json.push_back("--json");
  const json found = json::parse(run(with_json).out);
  REQUIRE(found.size() == 1);
  CHECK(found[0].at("trace") == "serve-exact llama2-7b");
  CHECK(found[0].at("events").get<std::uint64_t>() > 500);
  REQUIRE(found[0].at("arenas").size() == 3);
  CHECK(found[0].at("arenas")[2].at("arena") == "stitched");
  CHECK(found[0].at("arenas")[2].at("smallest_budget").get<std::uint64_t>() >=
        found[0].at("peak_live_bytes").get<std::uint64_t>());
  CHECK(run(with_json).out == run(with_json).out);
}

TEST_CASE("a recorded file replays to the figures of the program that recorded it") {
  std::string folder =
      (std::filesystem::temp_directory_path() / "allocation_trace_").string() + std::string(6, 'X');
  REQUIRE(::mkdtemp(folder.data()) != nullptr);
  const std::string file = folder + "/trace";
  CHECK(run({"--program", "train", "--steps", "2", "--record", file}).status == exit_status::success);
  const json direct = json::parse(run({"--program", "train", "--steps", "2", "--json"}).out);
  const json replayed = json::parse(run({"--replay", file, "--json"}).out);
  CHECK(replayed[0].at("arenas") == direct[0].at("arenas"));
  std::filesystem::remove_all(folder);
}

TEST_CASE("wrong usage is reported, with exit status 2") {
  const auto refused = [](const std::vector<std::string>& arguments) {
    const outcome got = run(arguments);
    CHECK(got.status == exit_status::wrong_usage);
    CHECK(got.out.empty());
    return got.notes;
  };
  const std::string hint = "\nrun allocation_trace --help for the options\n";
  CHECK(refused({"--program", "sleep"}) ==
        "allocation_trace: --program \"sleep\": no such program; there are all, train-fixed, train, "
        "train-recompute, "
        "train-recompute-offload, serve-exact, serve-growing" +
            hint);
  CHECK(refused({"--steps", "0"}) ==
        "allocation_trace: --steps \"0\": must be a whole number from 1 to 10000" + hint);
  CHECK(refused({"--model", "mixtral-8x7b"}) ==
        "allocation_trace: --model \"mixtral-8x7b\": no such dense model; there are gpt2-124m, llama2-7b, "
        "llama2-13b, "
        "llama2-70b, llama3-8b, llama3-70b, llama3-405b, qwen2.5-7b, qwen2.5-72b" +
            hint);
  CHECK(refused({"--replay", "x", "--program", "train"}) ==
        "allocation_trace: --replay excludes --program, --record and --trace: the file says it all" + hint);
  CHECK(refused({"--record", "x"}) ==
        "allocation_trace: --record writes one trace; name it with --program" + hint);
  const outcome missing = run({"--replay", "/nonexistent/trace"});
  CHECK(missing.status == exit_status::failure);
  CHECK(missing.notes == "allocation_trace: /nonexistent/trace: cannot open it: No such file or directory\n");
}
