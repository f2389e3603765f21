#include "replay_trace/application.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "replay_trace/paged_replay.hpp"
#include "support/program_run.hpp"

using namespace replay_trace;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;
using nlohmann::json;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured([&](std::FILE* out, std::FILE* notes) {
    return run_application(arguments, replay, {out, notes, progress_style::silent, bar_style::ascii});
  });
}

/// A file in a folder of its own, gone at the end.
class scratch_file {
 public:
  explicit scratch_file(const std::string& text) {
    std::string folder =
        (std::filesystem::temp_directory_path() / "replay_trace_").string() + std::string(6, 'X');
    REQUIRE(::mkdtemp(folder.data()) != nullptr);
    folder_ = folder;
    std::ofstream(path()) << text;
  }
  scratch_file(const scratch_file&) = delete;
  scratch_file& operator=(const scratch_file&) = delete;
  ~scratch_file() { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::string path() const { return folder_ + "/trace"; }
  [[nodiscard]] std::string beside(const char* name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

const std::string three_requests =
    R"({"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}
{"timestamp": 1, "input_length": 1024, "output_length": 9, "hash_ids": [1, 3]}
{"timestamp": 2, "input_length": 1000, "output_length": 9, "hash_ids": [1, 4]}
)";

}  // namespace

TEST_CASE("with --json the program writes one object with every field and nothing else") {
  const scratch_file file(three_requests);
  const outcome got = run({"--trace", file.path(), "--json", "--capacity-blocks", "10"});
  CHECK(got.status == exit_status::success);
  CHECK(got.notes.empty());
  const json object = json::parse(got.out);
  CHECK(object.at("trace") == file.path());
  CHECK(object.at("requests") == 3);
  CHECK(object.at("block_refs") == 6);
  CHECK(object.at("hits") == 2);
  CHECK(object.at("hit_ratio").get<double>() == doctest::Approx(1.0 / 3));
  CHECK(object.at("capacity_blocks") == 10);
  CHECK(object.at("policy") == "lru");
  CHECK(object.at("evictions") == 0);
  CHECK(object.at("useful_over_reserved").get<double>() ==
        doctest::Approx((1033 + 1033 + 1009) / (8 * 512.0)));
  CHECK(object.at("ns_per_block_ref").is_number());
  CHECK(object.at("peak_metadata_bytes").get<std::uint64_t>() > 0);
  CHECK(object.size() == 11);
}

TEST_CASE("with --policy all the program writes an array, one object for each policy") {
  const scratch_file file(three_requests);
  const json array = json::parse(run({"--trace", file.path(), "--json", "--policy", "all"}).out);
  REQUIRE(array.size() == policy_names.size());
  for (std::size_t i = 0; i < policy_names.size(); ++i)
    CHECK(array[i].at("policy") == std::string(policy_names[i]));
  CHECK(array[0].at("capacity_blocks") == 4);  // unlimited: what it came to hold
}

TEST_CASE("a trace's name of any bytes survives JSON") {
  CHECK(json::parse(to_json("a\"b\\c\n\x01\xff\xc3\xa9", replay_result{}, llmmem::find_model("llama3-70b")))
            .at("trace") == "a\"b\\c\n\x01\xef\xbf\xbd\xc3\xa9");
}

TEST_CASE(
    "with --tiers the program reports hits by tier and the time to the first token, as text and as JSON") {
  const scratch_file file(three_requests);
  const std::vector<std::string> asked{"--trace", file.path(), "--tiers", "hbm=1,host=1,nvme=4"};
  const outcome text = run(asked);
  CHECK(text.status == exit_status::success);
  CHECK(text.out.find("  found in tiers (lru)\n  hbm ") != std::string::npos);
  CHECK(text.out.find("  first token ") != std::string::npos);
  auto as_json = asked;
  as_json.push_back("--json");
  const json result = json::parse(run(as_json).out);
  CHECK(result["hits_by_tier"]["hbm"] == result["hits"]);
  CHECK(result["hits"].get<int>() + result["hits_by_tier"]["host"].get<int>() +
            result["hits_by_tier"]["nvme"].get<int>() ==
        2);
  CHECK(result["first_token_ms"].size() == 4);
}

TEST_CASE("impossible tiers are refused by name") {
  const auto first_line = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--generate");
    const outcome got = run(arguments);
    CHECK(got.status == exit_status::wrong_usage);
    return got.notes.substr(0, got.notes.find('\n'));
  };
  CHECK(first_line({"--tiers", "hbm=1"}) == "replay_trace: --tiers \"hbm=1\": host=N is missing");
  CHECK(first_line({"--tiers", "hbm=1,hbm=2"}) == "replay_trace: --tiers \"hbm=1,hbm=2\": hbm stands twice");
  CHECK(first_line({"--tiers", "disk=1"}) ==
        "replay_trace: --tiers \"disk=1\": each part is hbm=N, host=N or nvme=N, of blocks");
  CHECK(first_line({"--tiers", "hbm=0,host=1,nvme=1"}) ==
        "replay_trace: --tiers hbm \"0\": must be a whole number from 1 to 67108864");
  CHECK(first_line({"--tiers", "hbm=1,host=1,nvme=1", "--capacity-blocks", "1"}) ==
        "replay_trace: --tiers has the cache's blocks, as hbm=N; leave out --capacity-blocks");
  CHECK(first_line({"--tiers", "hbm=1,host=1,nvme=1", "--chart", "x.svg", "--pool", "2"}) ==
        "replay_trace: --chart draws the tiers of one node; leave out --pool");
  CHECK(first_line({"--tiers", "hbm=1,host=1,nvme=1", "--chart", "x.svg", "--policy", "all"}) ==
        "replay_trace: --chart draws tiers under one policy; name it instead of --policy all");
}

TEST_CASE("the report compares with LRU, MIN and the ceiling") {
  const scratch_file file(three_requests);
  const outcome got = run({"--trace", file.path(), "--policy", "fifo", "--capacity-blocks", "2"});
  CHECK(got.status == exit_status::success);
  for (const char* part : {"requests       3", "fifo", "lru", "min", "ceiling", "33.33 %",
                           "llama3-70b keeps 320 KiB", "fragmentation", "metadata"}) {
    CAPTURE(part);
    CHECK(got.out.find(part) != std::string::npos);
  }
}

TEST_CASE("a trace without timestamps is reported as one") {
  const scratch_file file(
      "{\"session_id\": \"s\", \"input_length\": 1024, \"output_length\": 9, \"hash_ids\": [1, 2]}\n");
  const outcome got = run({"--trace", file.path()});
  CHECK(got.status == exit_status::success);
  CHECK(got.out.find("  requests       1 without timestamps\n") != std::string::npos);
}

TEST_CASE("a BurstGPT trace is replayed as lengths, whether recognised or named") {
  const scratch_file file("Timestamp,Request tokens,Response tokens\n5,472,18\n");
  for (const std::vector<std::string>& extra : {std::vector<std::string>{}, {"--format", "burstgpt"}}) {
    std::vector<std::string> arguments{"--trace", file.path(), "--json"};
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const json object = json::parse(run(arguments).out);
    CHECK(object.at("block_refs") == 30);
    CHECK(object.at("useful_over_reserved").get<double>() == doctest::Approx(490 / (31 * 16.0)));
  }
}

TEST_CASE("with --chart the program draws every policy") {
  const scratch_file file(three_requests);
  const std::string chart = file.beside("chart.svg");
  CHECK(run({"--trace", file.path(), "--chart", chart}).status == exit_status::success);
  std::ifstream in(chart);
  const std::string svg{std::istreambuf_iterator<char>(in), {}};
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  for (const char* part : {">lru<", ">fifo<", ">lfu<", ">min<", "ceiling"}) {
    CAPTURE(part);
    CHECK(svg.find(part) != std::string::npos);
  }
}

TEST_CASE("with --chart and --tiers the program draws a line for each tier") {
  const scratch_file file(three_requests);
  const std::string chart = file.beside("chart.svg");
  REQUIRE(run({"--trace", file.path(), "--tiers", "hbm=8,host=4,nvme=2", "--chart", chart}).status ==
          exit_status::success);
  std::ifstream in(chart);
  const std::string svg{std::istreambuf_iterator<char>(in), {}};
  for (const char* part :
       {">hbm<", ">hbm and host<", ">all tiers<", "ceiling", "bytes of the tiers", ", lru<"}) {
    CAPTURE(part);
    CHECK(svg.find(part) != std::string::npos);
  }
}

TEST_CASE("a picture of tiers has hits and bytes of each tier and those above") {
  const std::vector<tier_budget> budgets = tier_budgets(8, {.host = 4, .nvme = 40}, 4);
  REQUIRE(budgets.size() == 5);  // from half the sizes on: smaller caches cannot hold the longest prompt
  CHECK(budgets[0].hbm == 4);
  CHECK(budgets[0].below.host == 2);
  CHECK(budgets[4].hbm == 64);
  CHECK(budgets[4].below.nvme == 320);
  CHECK(tier_budgets(8, {.host = 1, .nvme = 1}, 100).size() == 1);  // the replay that reports why it fails
  replay_result one;
  one.policy = "lru";
  one.block_tokens = 16;
  one.block_refs = 100;
  one.hits = 10;
  one.host_hits = 20;
  one.nvme_hits = 30;
  const llmmem::model_shape model = llmmem::find_model("llama3-70b");
  const hit_ratio_chart chart = tier_chart(budgets, std::vector<replay_result>(budgets.size(), one), model);
  REQUIRE(chart.series.size() == 3);
  const std::uint64_t block = 16 * model.kv_bytes_per_token();
  CHECK(chart.series[0].points[0].capacity == 4 * block);
  CHECK(chart.series[1].points[0].capacity == (4 + 2) * block);
  CHECK(chart.series[2].points[0].capacity == (4 + 2 + 20) * block);
  CHECK(chart.series[0].points[4].ratio == doctest::Approx(0.1));
  CHECK(chart.series[1].points[4].ratio == doctest::Approx(0.3));
  CHECK(chart.series[2].points[4].ratio == doctest::Approx(0.6));
}

TEST_CASE("data that a chart cannot show is refused") {
  CHECK_THROWS_WITH_AS(draw_svg({"t", {}, {}}), "chart: nothing to draw, there is no series",
                       llmmem::argument_error);
  CHECK_THROWS_WITH_AS(draw_svg({"t", {{"lru", {}}}, {}}), "chart: series \"lru\" has no points",
                       llmmem::argument_error);
  CHECK_THROWS_AS(draw_svg({"t", {{"lru", {{0, 0.5}}}}, {}}), llmmem::argument_error);
  CHECK_THROWS_AS(draw_svg({"t", {{"lru", {{1, 1.5}}}}, {}}), llmmem::argument_error);
  CHECK(draw_svg({"<&>", {{"lru", {{1, 0.5}}}}, 0.5}).find("&lt;&amp;&gt;") != std::string::npos);
}

TEST_CASE("wrong usage ends with status 2 and names the option") {
  const scratch_file file(three_requests);
  const auto wrong = [&](std::vector<std::string> arguments, const char* text) {
    CAPTURE(text);
    const outcome got = run(arguments);
    CHECK(got.status == exit_status::wrong_usage);
    CHECK(got.out.empty());
    CHECK(got.notes.starts_with(std::string("replay_trace: ") + text));
  };
  wrong({}, "nothing to replay; give --trace FILE or --generate");
  wrong({"--trace", file.path(), "--generate"}, "--trace and --generate exclude each other; give one");
  wrong(
      {"--generate", "--policy", "mru"},
      "--policy \"mru\": no such policy; there are lru, fifo, lfu, min, slru, arc, s3fifo, sieve, wtinylfu, "
      "gdsf, length_aware, retention, hazard, lookahead_N (N 4, 16, 64, 256 or 1024) and all");
  wrong({"--generate", "--capacity-blocks", "0"},
        "--capacity-blocks \"0\": must be a whole number from 1 to 2147483646");
  wrong({"--generate", "--capacity-blocks", "-1"}, "--capacity-blocks \"-1\": must be a whole number");
  wrong({"--generate", "--block-tokens", "0"},
        "--block-tokens \"0\": must be a whole number from 1 to 65536");
  wrong({"--generate", "--model", "gpt-9"}, "--model \"gpt-9\": no such model; there are gpt2-124m, ");
  wrong({"--generate", "--seed", "x"}, "--seed \"x\": must be a whole number from 0 to 18446744073709551615");
  wrong({"--trace", file.path(), "--format", "csv"},
        "--format \"csv\": no such format; there are mooncake, azure");
  wrong({"--generate", "--format", "azure"}, "--format is about a file; --generate reads none");
  wrong({"--generate", "--nonsense"}, "The following argument was not expected: --nonsense");
}

TEST_CASE("bad data ends with status 1, and with --json the output has no partial object") {
  const scratch_file file("{\"timestamp\": 0}\n");
  for (const std::vector<std::string>& extra : {std::vector<std::string>{}, {"--json"}}) {
    std::vector<std::string> arguments{"--trace", file.path()};
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const outcome got = run(arguments);
    CHECK(got.status == exit_status::failure);
    CHECK(got.out.empty());
    CHECK(got.notes.find(file.path() + ":1:1: field input_length is missing") != std::string::npos);
  }
  const outcome skipped = run({"--trace", file.path(), "--skip-bad"});
  CHECK(skipped.status == exit_status::failure);  // nothing is left
  const outcome missing = run({"--trace", file.beside("no such file")});
  CHECK(missing.status == exit_status::failure);
  CHECK(missing.notes.find("cannot open it: No such file or directory") != std::string::npos);
  const outcome unwritable = run({"--generate", "--chart", "/nonexistent/chart.svg"});
  CHECK(unwritable.status == exit_status::failure);
  CHECK(unwritable.notes.find("/nonexistent/chart.svg: cannot write it") != std::string::npos);
}

TEST_CASE("with --skip-bad the program reports how many lines it skipped, and the reason of the first") {
  const scratch_file file(three_requests + "rubbish\n{}\n");
  CHECK(run({"--trace", file.path()}).status == exit_status::failure);
  const outcome got = run({"--trace", file.path(), "--skip-bad"});
  CHECK(got.status == exit_status::success);
  CHECK(got.notes.find("skipped 2 malformed lines, the first: " + file.path() + ":4:1: ") !=
        std::string::npos);
  CHECK(got.out.find("skipped        2 malformed lines") != std::string::npos);
}

TEST_CASE("the last of a repeated option counts") {
  const scratch_file file(three_requests);
  const outcome got = run({"--trace", file.path(), "--policy", "all", "--capacity-blocks", "10", "--json",
                           "--capacity-blocks", "2", "--policy", "min"});
  CHECK(got.status == exit_status::success);
  CHECK(json::parse(got.out).at("capacity_blocks") == 2);
  CHECK(json::parse(got.out).at("policy") == "min");
}

TEST_CASE("the help text ends with success") {
  const outcome got = run({"--help"});
  CHECK(got.status == exit_status::success);
  CHECK(got.out.find("--capacity-blocks") != std::string::npos);
}

TEST_CASE("unwritable help text is a failure") {
  const example::file_handle full = example::open("/dev/full", "w");
  const outcome got = run_captured([&](std::FILE*, std::FILE* notes) {
    return run_application({"--help"}, replay, {.out = full.get(), .notes = notes});
  });
  CHECK(got.status == exit_status::failure);
  CHECK(got.notes == "replay_trace: standard output: cannot write it: No space left on device\n");
}
