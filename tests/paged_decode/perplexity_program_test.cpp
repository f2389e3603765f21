// One chain: train_gpt trains and saves, and paged_decode tells what each form of keys and values costs that
// model.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "paged_decode/application.hpp"
#include "support/child_process.hpp"
#include "support/program_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiny_gpt.hpp"

using namespace paged_decode;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

void put(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace

TEST_CASE("a chart holds all labels, and what has no finite divergence is not in it") {
  perplexity_finding found;
  found.shape.context = 24;
  for (const double none : {0.0, std::numeric_limits<double>::infinity(), std::nan("")})
    found.forms.push_back({.form = kv_form::bf16, .bytes_per_token = 64, .divergence = none});
  CHECK_THROWS_WITH_AS(static_cast<void>(draw_svg(found)),
                       "chart: no form has a finite divergence above 0, so there is nothing to draw",
                       llmmem::argument_error);
  for (const std::size_t cold : {1U, 60U}) {
    while (found.cold.size() < cold) {
      found.cold.push_back({.bytes_per_token = 40,
                            .divergence = 1e-3,
                            .cold_name = "codec " + std::to_string(found.cold.size())});
    }
    const std::string svg = draw_svg(found);
    const auto number_after = [&](const std::string& text, std::size_t from) {
      return std::stod(svg.substr(svg.find(text, from) + text.size()));
    };
    const double height = number_after("height='", 0);
    CHECK((cold == 1 ? height == 560 : height > 560));
    std::size_t labels = 0;
    for (std::size_t at = 0; (at = svg.find("<text class='label'", at)) != svg.npos; ++at, ++labels) {
      const double y = number_after(" y='", at);
      CHECK((y > 0 && y < height));
    }
    CHECK(labels == cold);
  }
}

TEST_CASE("the program serves a model of train_gpt, and reports its perplexity in every form") {
  const llmmem_tests::temporary_folder folder;
  const std::string in = folder.path().string() + "/";
  const std::string text = llmmem_tests::tiny_text(9000);
  put(in + "train.txt", text.substr(0, 8000));
  put(in + "held.txt", text.substr(8000));
  put(in + "empty.txt", "");
  put(in + "one.txt", "a");
  llmmem_tests::child_process child(LLMMEM_EXAMPLES_DIR "/train_gpt",
                                    {"--text",
                                     in + "train.txt",
                                     "--layers",
                                     "2",
                                     "--width",
                                     "64",
                                     "--heads",
                                     "2",
                                     "--context",
                                     "24",
                                     "--batch",
                                     "4",
                                     "--steps",
                                     "60",
                                     "--threads",
                                     "1",
                                     "--checkpoint-dir",
                                     in + "weights",
                                     "--checkpoint-every",
                                     "30"},
                                    in + "out", in + "notes");
  REQUIRE(child.wait().status == 0);

  const outcome ran = run({"--weights", in + "weights", "--text", in + "held.txt", "--keep-tokens", "8,30",
                           "--recent", "3", "--block-tokens", "4", "--json"});
  CAPTURE(ran.notes);
  REQUIRE(ran.status == exit_status::success);
  const auto found = nlohmann::json::parse(ran.out);
  CHECK(found["tokens"] == 999);
  std::vector<kv_form> forms(all_forms.begin(), all_forms.end());
  forms.insert(forms.end(), further_forms.begin(), further_forms.end());
  forms.insert(forms.end(), closing_forms.begin(), closing_forms.end());
  REQUIRE(found["forms"].size() == forms.size());
  for (std::size_t i = 0; i < forms.size(); ++i) {
    const auto& each = found["forms"][i];
    CHECK(each["form"] == name_of(forms[i]));
    CHECK(each["perplexity"] > 1.5);
    CHECK(each["perplexity"] < 30);  // of 256 bytes: the text was learned
  }
  CHECK(found["forms"][0]["kl_mean"] == 0.0);
  REQUIRE(found["kept"].size() == 2 * all_forms.size());
  CHECK(found["kept"][0]["budget"] == 8);
  CHECK(found["kept"][0]["sinks"] == 2);
  CHECK(found["kept"][0]["recent"] == 3);
  CHECK(found["kept"][0]["kl_mean"] > 0.0);
  CHECK(found["kept"][all_forms.size()]["budget"] == 30);
  CHECK(found["kept"][all_forms.size()]["kl_mean"] == 0.0);  // windows are of 24 tokens
  CHECK(found["kept"][0]["bytes"] == (8 + 4) * 2 * 2 * 64 * 4);
  const auto wrong = [](const std::vector<std::string>& arguments) {
    const outcome done = run(arguments);
    CHECK(done.status == exit_status::wrong_usage);
    return done.notes.substr(0, done.notes.find('\n'));
  };
  CHECK(
      wrong({"--keep-tokens", "8"}) ==
      "paged_decode: --keep-tokens measures what dropped tokens cost a trained model; give --weights DIR and "
      "--text FILE");
  CHECK(
      wrong({"--cold"}) ==
      "paged_decode: --cold measures what the codecs of a cold tier cost a trained model; give --weights DIR "
      "and --text FILE");
  CHECK(wrong({"--sinks", "8"}) ==
        "paged_decode: --sinks and --recent are about tokens to keep; give --keep-tokens N");
  CHECK(wrong({"--model", "mla", "--keep-tokens", "8"}) ==
        "paged_decode: --keep-tokens is measured on a trained model, and train_gpt trains none with latents: "
        "not "
        "for --model mla; leave it out");
  CHECK(wrong({"--weights", "w", "--text", "t", "--keep-tokens", "8", "--sinks", "6"}) ==
        "paged_decode: --keep-tokens 8: 6 sinks and 4 recent tokens are more; lower --sinks or --recent");
  CHECK(wrong({"--weights", "w", "--text", "t", "--keep-tokens", "8,"})
            .starts_with("paged_decode: --keep-tokens \"\": must be a whole number from 2"));
  CHECK(found["forms"][1]["bytes_per_token"] == 2 * 2 * 64 * 2);

  CHECK(wrong({"--weights", in + "weights", "--text", in + "held.txt", "--chart", in + "./held.txt"}) ==
        "paged_decode: --chart would overwrite the file that --text reads; give it another name");
  CHECK(wrong({"--chart", "a.svg"}) ==
        "paged_decode: --chart draws what forms cost a trained model; give --weights DIR and --text FILE");

  const outcome table = run({"--weights", in + "weights", "--text", in + "held.txt", "--tokens", "100",
                             "--chart", in + "forms.svg"});
  CHECK(table.status == exit_status::success);
  std::ifstream drawn(in + "forms.svg");
  const std::string svg{std::istreambuf_iterator<char>(drawn), {}};
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  for (const kv_form each : forms)  // every form but f32, to which the others are compared
    CHECK((svg.find(">" + std::string(name_of(each)) + "</text>") != std::string::npos) ==
          (each != kv_form::f32));
  CHECK(table.out.find("2 blocks of width 64 with 2 heads of 32, context 24; 99 tokens of") == 0);
  CHECK(table.out.find("\n  int4_by_token ") != std::string::npos);

  const auto refused = [&](const std::vector<std::string>& arguments, exit_status how,
                           const std::string& why) {
    const outcome came = run(arguments);
    CAPTURE(came.notes);
    CHECK(came.status == how);
    CHECK(came.out.empty());
    CHECK(came.notes.find(why) != std::string::npos);
  };
  using enum exit_status;
  {  // The newest checkpoint is damaged: the one before is taken, with a word about it.
    std::vector<std::filesystem::path> tensors;
    for (const auto& each : std::filesystem::recursive_directory_iterator(in + "weights")) {
      if (each.path().extension() == ".safetensors" &&
          each.path().string().find("step-0000000060") != std::string::npos)
        tensors.push_back(each.path());
    }
    REQUIRE(!tensors.empty());
    std::fstream file(tensors[0], std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put('\x7F');
    file.close();
    const outcome older = run({"--weights", in + "weights", "--text", in + "held.txt", "--tokens", "100"});
    CHECK(older.status == success);
    CHECK(older.notes.find("passed over step-0000000060") != std::string::npos);
    CHECK(table.notes.empty());
  }
  refused({"--weights", in + "weights", "--text", in + "empty.txt"}, failure,
          "empty.txt: it has no token, and perplexity needs 2");
  refused({"--weights", in + "weights", "--text", in + "one.txt"}, failure,
          "one.txt: it has 1 token, and perplexity needs 2");
  refused({"--weights", in + "weights", "--text", in + "none.txt"}, failure, "none.txt: cannot open it");
  refused({"--weights", in + "none", "--text", in + "held.txt"}, failure,
          "none: No such file or directory; train_gpt --checkpoint-dir makes one");
  refused({"--weights", in.substr(0, in.size() - 1), "--text", in + "held.txt"}, failure,
          "no checkpoint; train_gpt --checkpoint-dir saves one");
  refused({"--weights", in + "weights"}, wrong_usage, "--weights needs a text to tell perplexity on");
  refused({"--text", in + "held.txt"}, wrong_usage, "give --weights DIR");
  refused({"--weights", in + "weights", "--text", in + "held.txt", "--layers", "3"}, wrong_usage,
          "--layers is of no effect with --weights");
  refused({"--weights", in + "weights", "--text", in + "held.txt", "--tokens", "1"}, wrong_usage,
          "--tokens \"1\": must be a whole number from 2 to");
}
