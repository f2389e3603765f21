/// The example examples/refit.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "refit/job.hpp"

using namespace refit_example;

namespace {

std::string text_of(std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; text.size() < bytes; ++i)
    text += "step " + std::to_string(i * i) + " of the run\n";
  return text;
}

}  // namespace

TEST_CASE(
    "engines have the trainers' weights after each refit, in every form, and by fewer bytes with changes") {
  job_options asked;
  asked.shape = {.blocks = 1, .width = 32, .heads = 2, .context = 16, .batch = 1};
  asked.steps = 4;
  const train_gpt::corpus text("text", text_of(2000), asked.shape);
  std::uint64_t all_bytes = 0;
  for (const weight_form form : {weight_form::bf16, weight_form::int8}) {
    for (const auto sends : {llmmem::refit_sends::all, llmmem::refit_sends::changes}) {
      for (const std::uint32_t engines : {1U, 3U}) {
        if (form == weight_form::int8 && engines == 3) continue;  // would cut groups of 32 columns
        asked.form = form;
        asked.sends = sends;
        asked.engines = engines;
        asked.every = engines == 1 ? 1 : 2;
        CAPTURE(engines);
        const job_result result = run_job(asked, text);
        REQUIRE(result.lines.size() == asked.steps / asked.every);
        for (std::size_t i = 0; i < result.lines.size(); ++i) {
          const refit_line& line = result.lines[i];
          CHECK(line.version == i + 1);
          CHECK(line.wrong_tensors == 0);
          CHECK(line.matched_tokens == 0);
          CHECK(line.dropped_blocks == 8 * engines);
          CHECK(line.links == 2 * engines);
          CHECK(line.changed_links == (sends == llmmem::refit_sends::all || i == 0 ? 0 : line.links));
          if (form == weight_form::bf16 && sends == llmmem::refit_sends::changes && i != 0)
            CHECK(line.sent_bytes * 4 < line.elements_bytes);
        }
        all_bytes += result.lines.back().sent_bytes;
      }
    }
  }
  CHECK(all_bytes != 0);
}
