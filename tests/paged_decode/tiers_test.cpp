/// Conversations over a cache with tiers beneath it.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "paged_decode/application.hpp"
#include "support/program_run.hpp"
#include "support/small_decoder.hpp"
#include "support/temporary_folder.hpp"

using namespace paged_decode;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

tiers_experiment small(const std::string& folder) {
  tiers_experiment out;
  out.plan = {.conversations = 8, .turns = 2, .message_tokens = 11, .answer_tokens = 7, .chunk_tokens = 9};
  out.sizes = {.host = 12, .file = 200, .folder = folder};
  return out;
}

}  // namespace

TEST_CASE(
    "contexts many times larger than the cache come back from tiers with every bit, in every form and "
    "order") {
  const llmmem_tests::temporary_folder folder;
  experiment what = llmmem_tests::small_decoder();
  constexpr auto nhd = llmmem::paging::head_order::nhd;
  constexpr auto hnd = llmmem::paging::head_order::hnd;
  for (const auto& [form, heads] :
       {std::pair{kv_form::bf16, nhd}, {kv_form::fp8, nhd}, {kv_form::int8, hnd}}) {
    CAPTURE(name_of(form));
    what.cache.form = form;
    what.cache.heads_in_block = heads;
    const tiers_finding found = compare_tiers(what, small(folder.path().string()));
    CHECK(found.is_identical());
    CHECK(found.context_blocks >= 7 * found.device_blocks);
    CHECK(found.tiered.computed == found.whole.computed);  // nothing is computed twice
    CHECK(found.small.computed > found.whole.computed);
    CHECK(found.tiers.file_blocks > 0);
    CHECK(found.tiers.failed_blocks == 0);
  }
}

TEST_CASE("records of latents come back from tiers with every bit, codes and scales together") {
  const llmmem_tests::temporary_folder folder;
  experiment what = llmmem_tests::small_latents();
  tiers_experiment asked = small(folder.path().string());
  asked.plan.conversations = 4;
  for (const latent_form form : {latent_form::bf16, latent_form::fp8_ds_mla, latent_form::nvfp4_ds_mla}) {
    CAPTURE(name_of(form));
    what.cache.record = record_of(form, what.shape.latents, what.shape.rotary_dim);
    const tiers_finding found = compare_tiers(what, asked);
    CHECK(found.is_identical());
    CHECK(found.tiered.computed == found.whole.computed);
    CHECK(found.small.computed > found.whole.computed);
    CHECK(found.tiers.file_blocks > 0);
    CHECK(found.tiers.block_bytes ==
          what.cache.record->row_bytes * what.shape.layers * what.cache.block_tokens);
  }
}

TEST_CASE("tiers smaller than the contexts cost computation, and change no bit") {
  const llmmem_tests::temporary_folder folder;
  experiment what = llmmem_tests::small_decoder();
  tiers_experiment asked = small(folder.path().string());
  asked.sizes.file = 24;
  const tiers_finding found = compare_tiers(what, asked);
  CHECK(found.is_identical());
  CHECK(found.tiered.computed > found.whole.computed);
  asked.device_blocks = 3;
  CHECK_THROWS_WITH_AS(static_cast<void>(compare_tiers(what, asked)),
                       "--device-blocks 3: one conversation needs 9 blocks of 4 tokens at its end",
                       llmmem::error);
}

TEST_CASE("the program runs conversations, and refuses impossible ones") {
  const llmmem_tests::temporary_folder folder;  // the default one may be in use by another run of the tests
  const outcome ran =
      run({"--tiers", "host=8,file=64", "--tier-dir", folder.path().string(), "--conversations", "6",
           "--turns", "2", "--answer", "4", "--layers", "1", "--json"});
  CHECK(ran.status == example::exit_status::success);
  const auto found = nlohmann::json::parse(ran.out);
  CHECK(found["identical"] == true);
  CHECK(found["computed_tiered"] == found["computed_tokens"]);
  const outcome latents = run({"--model",
                               "mla",
                               "--kv",
                               "fp8_ds_mla",
                               "--tiers",
                               "host=4,file=16",
                               "--tier-dir",
                               folder.path().string(),
                               "--conversations",
                               "2",
                               "--turns",
                               "2",
                               "--message",
                               "3",
                               "--answer",
                               "2",
                               "--layers",
                               "1",
                               "--latents",
                               "16",
                               "--rotary",
                               "8",
                               "--query-heads",
                               "1"});
  CHECK(latents.status == example::exit_status::success);
  CHECK(latents.out.find("in fp8_ds_mla") != std::string::npos);
  const auto refused = [](const std::vector<std::string>& arguments, const char* text) {
    const outcome came = run(arguments);
    CHECK(came.status == example::exit_status::wrong_usage);
    CHECK(came.notes.find(text) != std::string::npos);
  };
  refused({"--tiers", "host=8"}, "--tiers \"host=8\": file=N is missing");
  refused({"--tiers", "host=8,disk=3"}, "each part is host=N or file=N, of blocks");
  refused({"--tiers", "host=8,host=9,file=3"}, "host stands twice");
  refused({"--device-blocks", "8"}, "--device-blocks is about the tiers; give --tiers host=N,file=N");
}
