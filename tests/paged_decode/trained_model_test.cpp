// The decoder of a model that train_gpt trained, held to train_gpt's own forward pass.
#include <llmmem/kernels/host_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "paged_decode/keeping_cache.hpp"
#include "paged_decode/perplexity.hpp"
#include "paged_decode/trained_model.hpp"
#include "support/random.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiny_gpt.hpp"

using namespace paged_decode;

namespace {

constexpr train_gpt::gpt_shape shape{.blocks = 2, .width = 64, .heads = 2, .context = 40, .batch = 3};

/// A model after some steps of training, its weights and a batch.
struct trained {
  trained() : training(shape) {
    for (std::uint64_t step = 0; step < 30; ++step)
      static_cast<void>(training.trainer.step(training.text.batch(shape, 1, step), step));
    batch = training.text.batch(shape, 2, 0);
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const auto of = weights_of(shape.layer(i));
      weights.emplace_back(of.begin(), of.end());
    }
  }

  [[nodiscard]] std::span<const float> weights_of(train_gpt::layer_id layer) {
    return training.state.acquire(layer, train_gpt::state_kind::weights, train_gpt::lease_mode::read);
  }

  /// train_gpt's forward pass. @return the head's record
  [[nodiscard]] std::vector<float> forward() {
    auto& model = training.model;
    model.embed(batch.tokens, weights_of(shape.embedding()));
    std::vector<float> record;
    for (std::size_t i = 1; i < shape.layers(); ++i) {
      const train_gpt::layer_id layer = shape.layer(i);
      record.assign(model.activations(layer).elements, 0);
      model.save_input(record);
      model.fill(layer, weights_of(layer), record);
      if (layer != shape.head()) model.advance(layer, weights_of(layer), record);
    }
    return record;
  }

  llmmem_tests::tiny_training<float> training;
  train_gpt::token_batch batch{};
  std::vector<std::vector<float>> weights{};
};

[[nodiscard]] paged_config cache_of(std::uint32_t block_tokens) {
  return {.form = kv_form::f32, .blocks = 200, .block_tokens = block_tokens, .most_tokens = 64};
}

}  // namespace

TEST_CASE("the decoder's logits are those of train_gpt's forward pass, to the bit for the first token") {
  trained of;
  const std::vector<float> record = of.forward();
  const train_gpt::layer_view<const float> head(record, of.training.model.activations(shape.head()));
  const train_gpt::layer_view<const float> weights(of.weights_of(shape.head()),
                                                   of.training.model.parameters(shape.head()));
  rows_of_floats right(shape.tokens(), train_gpt::vocabulary);
  std::vector<float> scratch(train_gpt::product_scratch_elements);
  train_gpt::multiply_add<float>(train_gpt::as_matrix(right.all(), right.columns()),
                                 head[train_gpt::head_activation::norm],
                                 weights[train_gpt::head_tensor::weight], scratch);
  const double most_logit = static_cast<double>(*std::ranges::max_element(right.all()));
  REQUIRE(most_logit > 1);

  const trained_model model(shape, of.weights);
  host_place place;
  for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}, shape.context}) {
    CAPTURE(chunk);
    paged_cache<host_place> cache(model.config(), cache_of(8), place);
    for (std::size_t sequence = 0; sequence < shape.batch; ++sequence) {
      const std::vector<llmmem::token_id> tokens(
          of.batch.tokens.begin() + static_cast<std::ptrdiff_t>(sequence * shape.context),
          of.batch.tokens.begin() + static_cast<std::ptrdiff_t>((sequence + 1) * shape.context));
      const auto where = cache.create(std::span(tokens).first(1));
      for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const auto part = std::span(tokens).subspan(at, std::min(chunk, tokens.size() - at));
        const grown<llmmem::sequence_id> batch{where, part};
        const rows_of_floats logits = decode(model, cache, std::span(&batch, 1));
        for (std::size_t row = 0; row < part.size(); ++row) {
          const std::span<const float> wanted = right[sequence * shape.context + at + row];
          for (std::size_t i = 0; i < wanted.size(); ++i) {
            // Attention sums in another order, of at most 40 terms: each layer adds some roundings.
            const double apart =
                std::abs(static_cast<double>(logits[row][i]) - static_cast<double>(wanted[i]));
            REQUIRE(apart <= 1e-5 * most_logit);
            if (at + row == 0) REQUIRE(logits[row][i] == wanted[i]);  // one token: nothing to sum
          }
        }
      }
    }
  }
}

TEST_CASE("perplexity is e to the power of train_gpt's loss, and forms diverge from floats by their bits") {
  trained of;
  // One window: its tokens, and behind them the last target.
  std::vector<std::uint8_t> text(of.batch.tokens.begin(),
                                 of.batch.tokens.begin() + static_cast<std::ptrdiff_t>(shape.context));
  text.push_back(of.batch.targets[shape.context - 1]);
  for (std::size_t sequence = 1; sequence < shape.batch; ++sequence) {  // the same window in every place
    for (auto* const each : {&of.batch.tokens, &of.batch.targets})
      std::copy_n(each->begin(), shape.context,
                  each->begin() + static_cast<std::ptrdiff_t>(sequence * shape.context));
  }
  const double loss = of.training.model.loss(of.batch.targets, of.forward());
  const trained_model model(shape, of.weights);
  const std::vector<llmmem::token_budget> budgets{{.budget = 40, .sinks = 1, .recent = 4},
                                                  {.budget = 16, .sinks = 1, .recent = 4},
                                                  {.budget = 4, .recent = 1}};
  const perplexity_finding one = measure_perplexity(model, "text", text, {.block_tokens = 8}, 4, budgets);
  CHECK(one.predicted == shape.context);
  REQUIRE(one.forms.size() == all_forms.size() + further_forms.size() + closing_forms.size());
  CHECK(one.forms.front().perplexity == doctest::Approx(std::exp(loss)).epsilon(1e-5));

  // A budget of all tokens changes no bit, and smaller ones cost more, in each form.
  REQUIRE(one.kept.size() == 3 * all_forms.size());
  for (std::size_t i = 0; i < all_forms.size(); ++i) {
    CAPTURE(i);
    const form_quality& all = one.kept[i];
    const form_quality& some = one.kept[all_forms.size() + i];
    const form_quality& few = one.kept[2 * all_forms.size() + i];
    CHECK(all.form == all_forms[i]);
    CHECK(all.perplexity == one.forms[i].perplexity);
    CHECK(all.divergence == one.forms[i].divergence);
    CHECK(all.bytes_per_token == one.forms[i].bytes_per_token);
    CHECK(all.divergence < some.divergence);
    CHECK(some.divergence < few.divergence);
    CHECK(all.most_held == 40);
    CHECK(some.most_held == 16 + 8);
    CHECK(few.most_held == 4 + 8);
  }
  CHECK(to_report({}, one).find("keeping  sinks") != std::string::npos);

  const std::string more = llmmem_tests::tiny_text(700);
  const std::vector<std::uint8_t> long_text(more.begin(), more.end());
  const perplexity_finding found = measure_perplexity(model, "text", long_text, {.block_tokens = 8}, 5);
  CHECK(found.predicted == 699);
  const auto quality = [&](kv_form form) -> const form_quality& {
    return *std::ranges::find(found.forms, form, &form_quality::form);
  };
  const form_quality& exact = quality(kv_form::f32);
  CHECK(exact.divergence == 0);
  CHECK(exact.perplexity < 100);  // it learned
  CHECK(exact.bytes_per_token == 2 * 2 * 64 * 4);
  CHECK(quality(kv_form::bf16).bytes_per_token == 2 * 2 * 64 * 2);
  CHECK(quality(kv_form::fp8).bytes_per_token == 2 * 2 * 64);
  CHECK(quality(kv_form::int8).bytes_per_token == 2 * 2 * 2 * (32 + 4));
  CHECK(quality(kv_form::int4_by_token).bytes_per_token == 2 * 2 * 2 * (16 + 4));
  CHECK(quality(kv_form::bf16).divergence > 0);
  CHECK(quality(kv_form::bf16).divergence < quality(kv_form::int8).divergence);
  CHECK(quality(kv_form::int8).divergence < quality(kv_form::fp8).divergence);
  CHECK(quality(kv_form::fp8).divergence < quality(kv_form::int4_by_token).divergence);
  CHECK(quality(kv_form::int4_by_token).divergence < 0.1);
  // Blocks of 8: a scale of 2 bytes for each channel of K, and for each vector of V.
  CHECK(quality(kv_form::int4_by_channel).bytes_per_token == 2 * ((2 * 64 / 2) + 64 * 2 / 8 + 2 * 2));
  CHECK(quality(kv_form::int8_by_channel).bytes_per_token == 2 * ((2 * 64) + 64 * 2 / 8 + 2 * 2));
  CHECK(quality(kv_form::int8_by_channel).divergence > 0);
  CHECK(quality(kv_form::int8_by_channel).divergence < quality(kv_form::int4_by_channel).divergence);
  CHECK(quality(kv_form::int4_by_channel).divergence < quality(kv_form::int4_by_token).divergence);
  CHECK(quality(kv_form::k8v4).bytes_per_token == 2 * 2 * (32 + 4 + 16 + 4));
  CHECK(quality(kv_form::nvfp4).bytes_per_token == 2 * 2 * 2 * (16 + 2));
  CHECK(quality(kv_form::int4_rotated).bytes_per_token == quality(kv_form::int4_by_token).bytes_per_token);
  CHECK(quality(kv_form::int4_by_token_zero).bytes_per_token ==
        quality(kv_form::int4_by_token).bytes_per_token);
  CHECK(quality(kv_form::int4_by_token_zero).divergence < quality(kv_form::int4_by_token).divergence);
  CHECK(quality(kv_form::k8v4).divergence > quality(kv_form::int8).divergence);
  CHECK(quality(kv_form::k8v4).divergence < 0.1);
  CHECK(quality(kv_form::nvfp4).divergence > 0);
  CHECK(quality(kv_form::nvfp4).divergence < 0.1);
  CHECK(quality(kv_form::int4_rotated).divergence > 0);
  CHECK(quality(kv_form::int4_rotated).divergence < 0.1);
  for (const form_quality& each : found.forms)
    CHECK(each.divergence_999 >= each.divergence);

  // How many windows are decoded at once changes no bit; nor what blocks, unless scales are theirs.
  const perplexity_finding other = measure_perplexity(model, "text", long_text, {.block_tokens = 3}, 1);
  for (std::size_t i = 0; i < all_forms.size(); ++i) {
    CHECK(other.forms[i].perplexity == found.forms[i].perplexity);
    CHECK(other.forms[i].divergence == found.forms[i].divergence);
  }
  const perplexity_finding alone = measure_perplexity(model, "text", long_text, {.block_tokens = 8}, 1);
  for (std::size_t i = 0; i < found.forms.size(); ++i)
    CHECK(alone.forms[i].perplexity == found.forms[i].perplexity);
}

TEST_CASE("a cache that keeps some tokens attends to those with the largest sums of weights, of each head") {
  constexpr model_config config{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16, .window = 0};
  constexpr llmmem::token_budget budget{.budget = 9, .sinks = 2, .recent = 3};
  constexpr std::uint32_t block = 4;
  struct token {
    std::vector<float> key, value;
    double scores[2];  // of the KV head's query heads
  };
  std::vector<token> lists[2];
  llmmem_tests::random_numbers random(3);
  const auto fill = [&](rows_of_floats& rows, float size) {
    for (float& each : rows.all())
      each = size * (static_cast<float>(random.below(2001U)) / 1000 - 1);
  };
  keeping_cache cache(config, {.form = kv_form::f32, .blocks = 20, .block_tokens = block, .most_tokens = 64},
                      budget);
  const llmmem::token_id any = 1;
  const keeping_cache::sequence of = cache.create(std::span(&any, 1));
  for (std::uint64_t step = 0; step < 60; ++step) {
    const grown<keeping_cache::sequence> one[] = {{of, std::span(&any, 1)}};
    cache.grow(one);
    projected in{{1, 64}, {1, 32}, {1, 32}};
    fill(in.queries, 2);
    fill(in.keys, 2);
    fill(in.values, 1);
    const rows_of_floats out = cache.attend(0, in);
    for (std::size_t head = 0; head < 2; ++head) {
      std::vector<token>& list = lists[head];
      if (list.size() == budget.budget + block) {
        while (list.size() > budget.budget) {  // the least of the middle; of equals, the last
          std::size_t least = budget.sinks;
          const auto score = [&](std::size_t t) { return list[t].scores[0] + list[t].scores[1]; };
          for (std::size_t t = budget.sinks; t + budget.recent < list.size(); ++t)
            least = score(t) <= score(least) ? t : least;
          list.erase(list.begin() + static_cast<std::ptrdiff_t>(least));
        }
      }
      const auto part = [&](const rows_of_floats& rows) {
        const auto from = rows[0].subspan(head * 16, 16);
        return std::vector<float>(from.begin(), from.end());
      };
      list.push_back({part(in.keys), part(in.values), {}});
      for (std::size_t query = 0; query < 2; ++query) {
        const std::size_t first = (head * 2 + query) * 16;
        std::vector<double> weights;
        double sum = 0;
        for (const token& each : list) {
          double dot = 0;
          for (std::size_t d = 0; d < 16; ++d)
            dot += double{in.queries[0][first + d]} * double{each.key[d]};
          weights.push_back(std::exp(dot / 4));
          sum += weights.back();
        }
        for (std::size_t d = 0; d < 16; ++d) {
          double right = 0;
          for (std::size_t t = 0; t < list.size(); ++t)
            right += weights[t] / sum * double{list[t].value[d]};
          REQUIRE(double{out[0][first + d]} == doctest::Approx(right).epsilon(1e-4));
        }
        for (std::size_t t = 0; t < list.size(); ++t)
          list[t].scores[query] += weights[t] / sum;
      }
    }
  }
  CHECK(cache.tokens(of) == 60);
  CHECK(cache.most_held() == budget.budget + block);
  CHECK_THROWS_AS(static_cast<void>(cache.fork(of)), llmmem::error);
  CHECK_THROWS_AS(cache.truncate(of, 3), llmmem::error);
  cache.release(of);
}

TEST_CASE("blocks from a cold tier cost the bits of their bins, and a lossless codec changes no bit") {
  trained of;
  const trained_model model(shape, of.weights);
  const std::vector<std::uint8_t> text(
      of.batch.tokens.begin(), of.batch.tokens.begin() + static_cast<std::ptrdiff_t>(shape.context + 1));
  const std::vector<llmmem::offload::layer_bins> few{{.keys = 9, .values = 9}};
  const std::vector<llmmem::offload::layer_bins> many{{.keys = 65, .values = 65}};
  const std::vector<cold_form> colds{{.name = "lossless"}, {"9", few}, {"65", many}};
  const perplexity_finding found = measure_perplexity(model, "text", text, {.block_tokens = 4}, 1, {}, colds);
  REQUIRE(found.cold.size() == 3);
  const form_quality& bf16 = found.forms[1];
  CHECK(found.cold[0].perplexity == bf16.perplexity);
  CHECK(found.cold[0].divergence == bf16.divergence);
  for (const form_quality& each : found.cold) {
    CHECK(each.cold.blocks == shape.context / 4);
    CHECK(each.cold.values == each.cold.blocks * 4 * 2 * shape.width * shape.blocks);
  }
  CHECK(found.cold[0].cold.error_share(0) == 0);
  CHECK(found.cold[1].cold.bits_of_value() < found.cold[2].cold.bits_of_value());
  CHECK(found.cold[2].cold.bits_of_value() < 8);
  for (std::size_t plane = 0; plane < 2; ++plane) {
    CHECK(found.cold[1].cold.error_share(plane) > 4 * found.cold[2].cold.error_share(plane));
    CHECK(found.cold[2].cold.error_share(plane) > 0);
  }
  CHECK(found.cold[1].divergence > found.cold[2].divergence);
  CHECK(found.cold[2].divergence > bf16.divergence);
  CHECK(to_json(found).find("\"codec\": \"65\"") != std::string::npos);
  CHECK(to_report({}, found).find("bits a value") != std::string::npos);
}

TEST_CASE("forms whose groups do not fit the heads are left out, and reported") {
  constexpr train_gpt::gpt_shape narrow{.blocks = 1, .width = 32, .heads = 2, .context = 8, .batch = 1};
  std::vector<std::vector<float>> layers;
  for (std::size_t i = 0; i < narrow.layers(); ++i)
    layers.emplace_back(train_gpt::parameter_layout(narrow, narrow.layer(i)).elements);
  const trained_model model(narrow, std::move(layers));
  const perplexity_finding found = measure_perplexity(model, "text", std::vector<std::uint8_t>(20), {}, 2);
  CHECK(found.left_out == std::vector{kv_form::int8, kv_form::int4_by_token, kv_form::k8v4, kv_form::nvfp4,
                                      kv_form::int4_rotated, kv_form::int4_by_token_zero});
  REQUIRE(found.forms.size() == 3 + closing_forms.size());  // groups of by-channel forms fit any heads
  CHECK(found.forms[0].perplexity == doctest::Approx(256).epsilon(1e-6));  // all weights 0: any byte
  CHECK(to_report({}, found).find("left out: heads have 16 elements") != std::string::npos);
}

namespace {

/// A model of one block whose weights are 1 and -1 by turns, times a factor.
[[nodiscard]] trained_model model_of(std::size_t width, std::size_t heads, float factor) {
  const train_gpt::gpt_shape of{.blocks = 1, .width = width, .heads = heads, .context = 8, .batch = 1};
  std::vector<std::vector<float>> layers;
  for (std::size_t i = 0; i < of.layers(); ++i) {
    layers.emplace_back(train_gpt::parameter_layout(of, of.layer(i)).elements);
    for (std::size_t j = 0; j < layers.back().size(); ++j)
      layers.back()[j] = j % 3 == 0 ? factor : -factor;
  }
  return {of, std::move(layers)};
}

}  // namespace

TEST_CASE("heads that attention cannot read are reported with those that it can") {
  const std::vector<std::uint8_t> text(20);
  for (const std::size_t head : {12U, 264U}) {
    CHECK_THROWS_WITH_AS(
        static_cast<void>(measure_perplexity(model_of(head, 1, 0.1F), "text", text, {}, 2)),
        (std::string("--weights: the model's heads have ") + std::to_string(head) +
         " elements, and attention over a cache needs a multiple of 8, 256 at most; train with another "
         "--width or --heads")
            .c_str(),
        llmmem::argument_error);
  }
}

TEST_CASE("a diverged model is reported, and JSON has only numbers") {
  const std::vector<std::uint8_t> text(20);
  for (const float factor : {std::numeric_limits<float>::quiet_NaN(), 1e30F}) {
    CHECK_THROWS_WITH_AS(
        static_cast<void>(measure_perplexity(model_of(16, 2, factor), "a.txt", text, {}, 2)),
        "a.txt: with keys and values in f32, the model's logits behind token 0 are not all finite; its "
        "training diverged: take an earlier checkpoint for --weights",
        llmmem::error);
  }
  perplexity_finding beyond;
  beyond.forms.push_back({.perplexity = std::numeric_limits<double>::infinity()});
  CHECK(to_json(beyond).find("\"perplexity\": null") != std::string::npos);
}

TEST_CASE("a text without two tokens has no perplexity") {
  constexpr train_gpt::gpt_shape narrow{.blocks = 1, .width = 32, .heads = 2, .context = 8, .batch = 1};
  std::vector<std::vector<float>> layers;
  for (std::size_t i = 0; i < narrow.layers(); ++i)
    layers.emplace_back(train_gpt::parameter_layout(narrow, narrow.layer(i)).elements);
  const trained_model model(narrow, std::move(layers));
  for (const std::size_t tokens : {0U, 1U}) {
    const std::vector<std::uint8_t> text(tokens);
    CHECK_THROWS_WITH_AS(static_cast<void>(measure_perplexity(model, "a.txt", text, {}, 2)),
                         (std::string("a.txt: it has ") + (tokens == 0 ? "no token" : "1 token") +
                          ", and perplexity needs 2: one to begin with, and one to predict; give a longer "
                          "--text, or more --tokens")
                             .c_str(),
                         llmmem::argument_error);
  }
}

TEST_CASE("a checkpoint of another model is refused with the tensors that it lacks") {
  const llmmem_tests::temporary_folder folder;
  llmmem::posix_storage<> storage(folder.path().string());
  const auto refused = [&](std::vector<llmmem::checkpoint_tensor> tensors, const std::string& why) {
    llmmem::found_checkpoint found;
    found.folder = "step-1";
    found.manifest.tensors = std::move(tensors);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(detail::shape_of(storage, "w", found)),
        ("w/step-1: " + why + "; --weights takes a folder that train_gpt wrote with --checkpoint-dir")
            .c_str(),
        llmmem::format_error);
  };
  const auto tensor = [](const char* name, std::vector<std::uint64_t> sizes) {
    return llmmem::checkpoint_tensor{.name = name, .shape = std::move(sizes)};
  };
  refused({}, "it has no tensor wte.weight");
  refused({tensor("wte.weight", {256})}, "tensor wte.weight has 1 dimensions, and 2 are needed");
  refused({tensor("wte.weight", {50257, 8})},
          "tensor wte.weight is of 50257 tokens, and a model of bytes has 256");
  refused({tensor("wte.weight", {256, 8})}, "it has no tensor wpe.weight");
  refused({tensor("wte.weight", {256, 8}), tensor("wpe.weight", {4, 8})},
          "it has no tensor h.0.attn.c_attn.weight");
}
