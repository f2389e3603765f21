#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "paged_decode/application.hpp"
#include "support/program_run.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/small_decoder.hpp"

using namespace paged_decode;
using llmmem_tests::outcome;
using llmmem_tests::random_numbers;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

[[nodiscard]] std::uint32_t between(random_numbers& random, std::uint32_t least, std::uint32_t most) {
  return least + random.below(most - least + 1);
}

/// A small model, requests and cache of any kind.
[[nodiscard]] experiment any_experiment(random_numbers& random) {
  constexpr std::array heads{1U, 2U, 4U, 8U};
  experiment what{.with_errors = false};
  what.shape = {.layers = between(random, 1, 3),
                .kv_heads = between(random, 1, 2),
                .head_dim = 32 * between(random, 1, 4),
                .hidden = 8 * between(random, 1, 4),
                .inner = 16,
                .vocabulary = between(random, 2, 24),
                .window = random.once_in(2) ? between(random, 1, 24) : 0};
  what.shape.query_heads = what.shape.kv_heads * heads[random.below(std::uint32_t{4})];
  what.plan = {.requests = between(random, 1, 4),
               .prefix_tokens = between(random, 0, 30),
               .own_tokens = between(random, 1, 9),
               .answer_tokens = between(random, 1, 20),
               .chunk_tokens = between(random, 1, 16),
               .samples = between(random, 1, 4),
               .drafts = between(random, 0, 5),
               .seed = random.next()};
  what.cache = {
      .form = all_forms[random.below(static_cast<std::uint32_t>(all_forms.size()))],
      .block_tokens = between(random, 1, 17),
      .heads_in_block = random.once_in(2) ? llmmem::paging::head_order::hnd : llmmem::paging::head_order::nhd,
      .order = llmmem::block_order(random.below(llmmem::block_order_count)),
      .permutation = random.below(std::uint32_t{3})};
  return what;
}

/// Attention by its definition, in doubles.
[[nodiscard]] std::vector<double> attended(std::span<const float> query,
                                           std::span<const std::vector<float>> keys,
                                           std::span<const std::vector<float>> values) {
  std::vector<double> weights;
  double sum = 0;
  for (const std::vector<float>& key : keys) {
    double product = 0;
    for (std::size_t i = 0; i < query.size(); ++i)
      product += static_cast<double>(query[i]) * static_cast<double>(key[i]);
    weights.push_back(std::exp(product / std::sqrt(static_cast<double>(query.size()))));
    sum += weights.back();
  }
  std::vector<double> out(query.size());
  for (std::size_t token = 0; token < values.size(); ++token) {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] += weights[token] / sum * static_cast<double>(values[token][i]);
  }
  return out;
}

/// Short prompts in small blocks, with samples and drafts.
experiment small_experiment() {
  experiment what = llmmem_tests::small_decoder();
  what.plan = {.requests = 6,
               .prefix_tokens = 11,
               .own_tokens = 5,
               .answer_tokens = 18,
               .chunk_tokens = 7,
               .samples = 2};
  return what;
}

}  // namespace

TEST_CASE("every kind of paged cache gives the tokens and the bits of a contiguous one") {
  paged_counts all;
  std::uint64_t accepted = 0;
  for (const auto seed : llmmem_tests::seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const experiment what = any_experiment(random);
    const finding found = compare(what);
    REQUIRE(found.contiguous.transcripts.size() == found.paged.transcripts.size());
    for (std::size_t i = 0; i < found.paged.transcripts.size(); ++i) {
      const transcript& one = found.contiguous.transcripts[i];
      CHECK(one.tokens.size() == what.plan.prompt_tokens() + what.plan.answer_tokens);
      for (const service_result* other : {&found.paged, &found.permuted}) {
        REQUIRE(other->transcripts[i].tokens == one.tokens);
        REQUIRE(other->transcripts[i].logits == one.logits);
      }
    }
    CHECK(found.is_identical());
    all.shared_tokens += found.counts.shared_tokens;
    all.copies_on_write += found.counts.copies_on_write;
    all.rolled_back += found.counts.rolled_back;
    accepted += found.paged.accepted;
    CHECK(found.counts.block_capacity <= found.counts.most_unshared);
  }
  // Nothing of this is left out by chance.
  CHECK(all.shared_tokens > 100);
  CHECK(all.copies_on_write > 20);
  CHECK(all.rolled_back > 100);
  CHECK(accepted > 20);
}

TEST_CASE("drafts, chunks and other requests leave the result of a request unchanged") {
  std::uint64_t without_drafts = 0;
  for (const auto seed : llmmem_tests::seeds(12)) {
    CAPTURE(seed);
    random_numbers random(seed);
    experiment what = any_experiment(random);
    what.plan.requests = 4;
    what.plan.drafts = 3;
    const auto transcripts = [&] {
      host_place place;
      const model made(what.shape, what.most_tokens(), what.plan.seed);
      return run_paged(made, what, what.large_enough(), place).result.transcripts;
    };
    const std::vector<transcript> usual = transcripts();
    const auto check_same = [&](const std::vector<transcript>& others) {
      for (std::size_t i = 0; i < others.size(); ++i) {
        REQUIRE(others[i].tokens == usual[i].tokens);
        REQUIRE(others[i].logits == usual[i].logits);
      }
    };
    what.plan.chunk_tokens = what.plan.chunk_tokens == 1 ? 5 : 1;
    check_same(transcripts());
    const std::uint64_t most_tokens = what.most_tokens();
    what.plan.drafts = 0;
    if (what.most_tokens() == most_tokens) {  // else the shares of a row, and so its sums, are others
      check_same(transcripts());
      ++without_drafts;
    }
    what.plan.drafts = 3;
    what.plan.requests = 1;
    check_same(transcripts());
  }
  CHECK(without_drafts > 4);
}

TEST_CASE("the contiguous cache follows the definition of attention") {
  for (const auto seed : llmmem_tests::seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    experiment what = any_experiment(random);
    const model_config& shape = what.shape;
    contiguous_cache cache(shape, kv_form::f32, 64);
    const auto where = cache.create({});
    std::vector<std::vector<float>> keys(shape.kv_heads * std::size_t{40});
    std::vector<std::vector<float>> values(keys.size());
    const auto any_rows = [&](std::size_t columns) {
      rows_of_floats out(1, columns);
      for (float& each : out[0])
        each = static_cast<float>(made_up_share(seed, random.next()) * 4 - 2);
      return out;
    };
    const std::uint32_t layer = random.below(shape.layers);
    for (std::size_t token = 0; token < 40; ++token) {
      const llmmem::token_id any = 0;
      const grown<std::size_t> batch{where, std::span(&any, 1)};
      cache.grow(std::span(&batch, 1));
      const projected in{any_rows(shape.query_elements()), any_rows(shape.kv_elements()),
                         any_rows(shape.kv_elements())};
      const rows_of_floats out = cache.attend(layer, in);
      const std::uint32_t window = shape.window_of(layer);
      const std::size_t first = window != 0 && token + 1 > window ? token + 1 - window : 0;
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        const std::size_t at = head * shape.head_dim;
        const auto of = [&](const rows_of_floats& from) {
          const auto vector = from[0].subspan(at, shape.head_dim);
          return std::vector<float>(vector.begin(), vector.end());
        };
        keys[head * 40 + token] = of(in.keys);
        values[head * 40 + token] = of(in.values);
        const std::size_t group = shape.query_heads / shape.kv_heads;
        for (std::size_t query = head * group; query < (head + 1) * group; ++query) {
          const std::vector<double> right =
              attended(in.queries[0].subspan(query * shape.head_dim, shape.head_dim),
                       std::span(keys).subspan(head * 40 + first, token + 1 - first),
                       std::span(values).subspan(head * 40 + first, token + 1 - first));
          for (std::size_t i = 0; i < shape.head_dim; ++i)
            REQUIRE(std::abs(static_cast<double>(out[0][query * shape.head_dim + i]) - right[i]) < 1e-5);
        }
      }
    }
  }
}

TEST_CASE("a rotation keeps lengths, and products depend only on the distance") {
  const rotary turns(16, 100);
  std::vector<float> x(16);
  std::iota(x.begin(), x.end(), -7.0F);
  const auto product_at = [&](std::size_t a, std::size_t b) {
    std::vector<float> one = x;
    std::vector<float> other = x;
    turns.turn_heads(one, a);
    turns.turn_heads(other, b);
    return std::inner_product(one.begin(), one.end(), other.begin(), 0.0);
  };
  const double length = product_at(0, 0);
  CHECK(product_at(93, 93) == doctest::Approx(length).epsilon(1e-5));
  CHECK(product_at(90, 87) == doctest::Approx(product_at(3, 0)).epsilon(1e-5));
  CHECK(product_at(3, 0) != doctest::Approx(length).epsilon(1e-2));
}

TEST_CASE("forms cost the bytes of their bits") {
  const finding found = compare({.shape = {.layers = 2, .hidden = 64, .inner = 64}, .plan = {.requests = 2}});
  REQUIRE(found.errors.size() == 3);
  const form_error& bf16 = found.errors[0];
  const form_error& fp8 = found.errors[1];
  const form_error& int8 = found.errors[2];
  CHECK(bf16.rows == 4 * 64);
  CHECK(bf16.root_mean_square > 0);
  CHECK(bf16.root_mean_square < int8.root_mean_square);
  CHECK(int8.root_mean_square < fp8.root_mean_square);
  CHECK(fp8.root_mean_square < 0.1 * found.logits_size);
  for (const form_error& each : found.errors) {
    CHECK(each.most >= each.root_mean_square);
    CHECK(each.changed < each.rows / 4);
  }
}

TEST_CASE("the program reports digests and shared blocks as JSON") {
  const auto [status, out, notes] =
      run({"--requests", "2", "--answer", "20", "--layers", "2", "--no-errors", "--json", "--hnd"});
  REQUIRE(status == exit_status::success);
  const auto found = nlohmann::json::parse(out);
  CHECK(found["identical"] == true);
  CHECK(found["tokens"] == 4 * 20);
  CHECK(found["digest"] == found["contiguous_digest"]);
  CHECK(found["digest"] == found["permuted_digest"]);
  CHECK(found["logits_rms"].is_null());
  CHECK(found["kv"] == "bf16");
  CHECK(found["shared_tokens"] == 48);
  CHECK(found["copies_on_write"] == 2);
  // No operation is left to a C library or a compiler: these bits are every machine's.
  CHECK(found["digest"] == "e89abf3f9ead7ae2");
}

TEST_CASE("the cache hands out blocks in two orders, for any seed and any first block") {
  constexpr std::uint64_t most = ~std::uint64_t{0};
  for (const std::uint64_t before : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, most}) {
    for (const std::uint64_t seed : {std::uint64_t{0}, most - before, most - 1, most}) {
      const std::uint64_t after = paged_decode::another_order(before, seed);
      CHECK(after != 0);
      CHECK(after != before);
    }
  }
}

TEST_CASE("an impossible option is refused with its name, its value and valid ones") {
  struct wrong {
    std::vector<std::string> arguments;
    const char* why;
  };
  const std::vector<wrong> all{
      {{"--kv", "int4"}, "--kv \"int4\": no such form; there are f32, bf16, fp8, int8"},
      {{"--requests", "0"}, "--requests \"0\": must be a whole number from 1 to 64"},
      {{"--query-heads", "3"}, "--query-heads \"3\": must be a multiple of --kv-heads, 2"},
      {{"--head-dim", "40"}, "--head-dim \"40\": must be a multiple of 32, a group of int8"},
      {{"--head-dim", "36", "--no-errors"}, "--head-dim \"36\": must be a multiple of 8"},
      {{"--permute", "x"}, "--permute \"x\": must be a whole number"},
      {{"--nonsense"}, "--nonsense"},
  };
  for (const wrong& each : all) {
    CAPTURE(each.why);
    const auto [status, out, notes] = run(each.arguments);
    CHECK(status == exit_status::wrong_usage);
    CHECK(out.empty());
    CHECK(notes.find(each.why) != std::string::npos);
  }
}

TEST_CASE("a split cache gives the tokens and the bits of a contiguous one, on any number of threads") {
  for (const auto& [form, device, host] : {std::tuple{kv_form::bf16, 1U, 1U},
                                           {kv_form::fp8, 3U, 1U},
                                           {kv_form::int8, 2U, 5U},
                                           {kv_form::f32, 30U, 40U}}) {
    CAPTURE(name_of(form));
    experiment what = small_experiment();
    what.cache.form = form;
    const split_finding found = compare_split(what, {.device_threads = device, .host_threads = host});
    REQUIRE(found.split.transcripts.size() == 9);
    for (std::size_t i = 0; i < 9; ++i) {
      REQUIRE(found.split.transcripts[i].tokens == found.contiguous.transcripts[i].tokens);
      REQUIRE(found.split.transcripts[i].logits == found.contiguous.transcripts[i].logits);
    }
    CHECK(found.is_identical());
    CHECK(found.counts.steps == found.split.steps);
    CHECK(found.counts.sequences[0] > 0);
    CHECK(found.counts.sequences[1] > 0);
    CHECK(found.most_device_blocks <= found.device_blocks);
    CHECK(found.counts.link_bytes > 0);
    CHECK(found.counts.predicted_ns > 0);
    CHECK(found.counts.measured_ns > 0);
  }
}

TEST_CASE("a split cache of records gives the tokens and the bits of a contiguous one") {
  experiment what = llmmem_tests::small_latents();
  what.shape.query_heads = 3;  // odd: a row's workspace is then no multiple of 16 bytes
  what.plan = {.requests = 4, .prefix_tokens = 131, .own_tokens = 5, .answer_tokens = 8, .samples = 2};
  what.cache.record = record_of(latent_form::fp8_ds_mla, what.shape.latents, what.shape.rotary_dim);
  const split_finding found = compare_split(what, {.device_threads = 2, .host_threads = 3});
  CHECK(found.is_identical());
  CHECK(found.split.transcripts[0].logits == found.contiguous.transcripts[0].logits);
  CHECK(found.counts.sequences[0] > 0);
  CHECK(found.counts.sequences[1] > 0);
  const std::uint64_t rows = found.counts.link_bytes / what.shape.layers / sizeof(float);
  CHECK(rows % (what.shape.query_elements() + 40 + what.shape.attended_elements()) == 0);
}

TEST_CASE("the side with more threads gets more sequences, within the device's blocks") {
  const auto tokens_of = [](std::uint32_t device, std::uint32_t host, std::uint64_t blocks) {
    const split_finding found = compare_split(
        small_experiment(), {.device_threads = device, .host_threads = host, .device_blocks = blocks});
    CHECK(found.is_identical());
    CHECK(found.most_device_blocks <= found.device_blocks);
    return found.counts.tokens;
  };
  constexpr std::uint64_t enough = 1000;
  const auto equal = tokens_of(1, 1, enough);
  const auto fast_device = tokens_of(4, 1, enough);
  const auto fast_host = tokens_of(1, 4, enough);
  CHECK(fast_device[0] > equal[0]);
  CHECK(fast_host[1] > equal[1]);
  CHECK(tokens_of(16, 1, enough)[1] == 0);  // the device ends all before the host ends one
  CHECK(tokens_of(16, 1, 20)[1] > 0);       // a request has two samples of ten blocks
  CHECK(tokens_of(16, 1, 9)[0] == 0);
}

TEST_CASE("threads get ranges of about as many tokens, and none is empty") {
  const auto cuts = [](std::vector<std::int32_t> lengths, std::uint32_t ranges) {
    return equal_cuts(lengths, ranges);
  };
  using several = std::vector<std::size_t>;
  CHECK(cuts({5, 5, 5, 5}, 1) == several{0, 4});
  CHECK(cuts({5, 5, 5, 5}, 2) == several{0, 2, 4});
  CHECK(cuts({15, 5, 5, 5}, 2) == several{0, 1, 4});
  CHECK(cuts({1, 1, 98}, 4) == several{0, 3});
  CHECK(cuts({7, 7}, 8) == several{0, 1, 2});
  CHECK(cuts({}, 3) == several{0});
}

TEST_CASE("the program reports a split, and refuses impossible ones") {
  const outcome ran = run({"--split", "device=2,host=1", "--device-blocks", "20", "--requests", "3",
                           "--answer", "12", "--layers", "1", "--json"});
  CHECK(ran.status == example::exit_status::success);
  const auto found = nlohmann::json::parse(ran.out);
  CHECK(found["identical"] == true);
  CHECK(found["digest"] == found["contiguous_digest"]);
  CHECK(found["device_threads"] == 2);
  CHECK(found["host_threads"] == 1);
  CHECK(found["device_blocks"] == 20);
  CHECK(found["host_sequences"] > 0);
  CHECK(found["device_sequences"] > 0);
  const outcome text =
      run({"--split", "device=1,host=1", "--requests", "1", "--answer", "2", "--layers", "1"});
  CHECK(text.out.find("identical: every token, every bit of every logit") != std::string::npos);
  const auto refused = [](const std::vector<std::string>& arguments, const char* why) {
    const outcome came = run(arguments);
    CHECK(came.status == example::exit_status::wrong_usage);
    CHECK(came.notes.find(why) != std::string::npos);
  };
  refused({"--split", "device=1"}, "--split \"device=1\": host=N is missing");
  refused({"--split", "device=1,gpu=1"}, "each part is device=N or host=N, of threads");
  refused({"--split", "device=0,host=1"}, "must be a whole number from 1 to 256");
  refused({"--split", "device=1,host=1", "--tiers", "host=1,file=1"},
          "--split and --tiers are runs of different kinds; leave one of them out");
  refused({"--split", "device=1,host=1", "--tier-dir", "x"},
          "--tier-dir is about the tiers, and has no effect with --split; leave it out");
  refused({"--device-blocks", "8"}, "or --split device=N,host=N for a device and its host");
}

TEST_CASE("a model with latents answers alike over a paged cache of records, token by token, and expanded") {
  experiment what = small_experiment();
  what.plan.requests = 3;
  what.plan.own_tokens = 6;  // prompts end inside a block
  what.plan.answer_tokens = 8;
  what.shape = llmmem_tests::small_latents().shape;
  for (const latent_form form : {latent_form::bf16, latent_form::nvfp4_ds_mla}) {
    CAPTURE(name_of(form));
    what.with_errors = form == latent_form::bf16;
    const latent_finding found = compare_latents(what, form);
    CHECK(found.is_identical());
    CHECK(found.is_expanded());
    CHECK(found.one_by_one.steps > found.contiguous.steps);
    CHECK(found.counts.shared_tokens > 0);
    CHECK(found.counts.copies_on_write > 0);
    CHECK(found.expanded.most > 0);
    CHECK(found.expanded.most < latent_finding::expanded_bound * found.logits_size);
    CHECK(found.bytes_per_token == record_of(form, 32, 8).row_bytes * what.shape.layers);
    if (!what.with_errors) continue;
    REQUIRE(found.errors.size() == 3);
    CHECK(found.errors[0].of.root_mean_square > 1e-4);  // of bf16
    CHECK(found.errors[1].of.root_mean_square > 3 * found.errors[0].of.root_mean_square);
    CHECK(found.errors[2].of.root_mean_square > found.errors[1].of.root_mean_square);
    CHECK(found.errors[2].of.root_mean_square < 0.5 * found.logits_size);
  }
}

TEST_CASE("the program reports a model with latents, and refuses what that does not have") {
  const outcome ran =
      run({"--model",       "mla", "--kv",        "fp8_ds_mla", "--requests", "1",  "--prefix",    "3",
           "--own",         "2",   "--answer",    "2",          "--samples",  "1",  "--layers",    "1",
           "--latents",     "32",  "--rotary",    "8",          "--head-dim", "16", "--value-dim", "16",
           "--query-heads", "2",   "--no-errors", "--json"});
  CHECK(ran.status == example::exit_status::success);
  const auto found = nlohmann::json::parse(ran.out);
  CHECK(found["model"] == "mla");
  CHECK(found["kv"] == "fp8_ds_mla");
  CHECK(found["identical"] == true);
  for (const char* const other : {"contiguous_digest", "permuted_digest", "one_by_one_digest"})
    CHECK(found[other] == found["digest"]);
  CHECK(found["bytes_per_token"] ==
        64);  // 32 codes and a scale, rounded up to 16 bytes, and 8 elements of bf16
  CHECK(found["expanded_most"] < 1e-4 * found["logits_rms"].get<double>());
  const auto refused = [](const std::vector<std::string>& arguments, const char* why) {
    const outcome came = run(arguments);
    CHECK(came.status == example::exit_status::wrong_usage);
    CHECK(came.notes.find(why) != std::string::npos);
  };
  refused({"--model", "moe"}, "--model \"moe\": no such model; there are gqa, mla");
  refused({"--model", "mla", "--kv", "int8"},
          "no record of latents; with --model mla there are f32, bf16, fp8_ds_mla, nvfp4_ds_mla");
  refused({"--model", "mla", "--latents", "24"}, "must be a multiple of 16, a group of nvfp4_ds_mla");
  refused({"--model", "mla", "--rotary", "12"}, "must be a multiple of 8");
  refused({"--model", "mla", "--hnd"},
          "--hnd is not for --model mla, whose cache has one head of records; leave it out");
  refused({"--latents", "64"}, "--latents is about a model with latents; give --model mla");
}
