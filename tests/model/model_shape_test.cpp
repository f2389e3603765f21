#include <llmmem/model/model_shape.hpp>
#include <llmmem/model/presets.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <cstdint>
#include <random>

using namespace llmmem;
using llmmem_tests::seeds;

namespace {

constexpr model_shape small{.name = "small",
                            .vocabulary = 10,
                            .hidden = 8,
                            .layers = 2,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_width = 2,
                            .intermediate = 16,
                            .context = 32};

/// The definition, tensor by tensor and layer by layer, as a checkpoint lists them.
std::uint64_t count_tensors(const model_shape& m, std::uint64_t routed) {
  std::uint64_t total = 0;
  const auto matrix = [&](std::uint64_t rows, std::uint64_t columns) { total += rows * columns; };
  const auto vector = [&](std::uint64_t length) { total += length; };
  const auto norm = [&] {
    vector(m.hidden);
    if (m.norm == norm_kind::layer) vector(m.hidden);
  };
  const auto mlp = [&](std::uint64_t inner) {
    matrix(inner, m.hidden);
    if (m.bias == bias_kind::all) vector(inner);
    if (m.mlp == mlp_kind::gated) {
      matrix(inner, m.hidden);
      if (m.bias == bias_kind::all) vector(inner);
    }
    matrix(m.hidden, inner);
    if (m.bias == bias_kind::all) vector(m.hidden);
  };
  matrix(m.vocabulary, m.hidden);
  if (m.position == position_kind::learned) matrix(m.context, m.hidden);
  for (std::uint64_t layer = 0; layer < m.layers; ++layer) {
    norm();
    if (m.latent.kv_rank != 0) {
      const auto& l = m.latent;
      if (l.q_rank != 0) {
        matrix(l.q_rank, m.hidden);
        vector(l.q_rank);
        matrix(m.heads * (l.nope_width + l.rope_width), l.q_rank);
      } else {
        matrix(m.heads * (l.nope_width + l.rope_width), m.hidden);
      }
      matrix(l.kv_rank + l.rope_width, m.hidden);
      vector(l.kv_rank);
      matrix(m.heads * (l.nope_width + l.value_width), l.kv_rank);
      matrix(m.hidden, m.heads * l.value_width);
    } else {
      for (const std::uint64_t width :
           {m.heads * m.head_width, m.kv_heads * m.head_width, m.kv_heads * m.head_width}) {
        matrix(width, m.hidden);
        if (m.bias != bias_kind::none) vector(width);
      }
      matrix(m.hidden, m.heads * m.head_width);
      if (m.bias == bias_kind::all) vector(m.hidden);
    }
    norm();
    if (m.experts.count == 0 || layer < m.experts.dense_layers) {
      mlp(m.intermediate);
    } else {
      matrix(m.experts.count, m.hidden);
      if (m.experts.router == router_kind::score_correction) vector(m.experts.count);
      for (std::uint64_t expert = 0; expert < routed + m.experts.shared; ++expert)
        mlp(m.experts.intermediate);
    }
  }
  norm();
  if (m.output == output_kind::separate) matrix(m.vocabulary, m.hidden);
  return total;
}

model_shape random_shape(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto up_to = [&](std::uint64_t n) { return 1 + random() % n; };
  const auto coin = [&] { return random() % 2 == 0; };
  model_shape m = small;
  m.vocabulary = up_to(100);
  m.hidden = up_to(32);
  m.layers = up_to(6);
  m.kv_heads = up_to(4);
  m.heads = m.kv_heads * up_to(4);
  m.head_width = up_to(16);
  m.intermediate = up_to(64);
  m.context = up_to(64);
  m.mlp = coin() ? mlp_kind::plain : mlp_kind::gated;
  m.norm = coin() ? norm_kind::layer : norm_kind::rms;
  m.bias = static_cast<bias_kind>(random() % 3);
  m.position = coin() ? position_kind::learned : position_kind::rotary;
  m.output = coin() ? output_kind::tied : output_kind::separate;
  if (coin()) {
    m.latent = {.q_rank = random() % 8,
                .kv_rank = up_to(8),
                .nope_width = random() % 8,
                .rope_width = up_to(8),
                .value_width = up_to(8)};
  }
  if (coin()) {
    m.experts = {.count = up_to(8),
                 .active = 1,
                 .shared = random() % 3,
                 .intermediate = up_to(32),
                 .dense_layers = random() % (m.layers + 1),
                 .router = coin() ? router_kind::plain : router_kind::score_correction};
    m.experts.active = up_to(m.experts.count);
  }
  return m;
}

}  // namespace

TEST_CASE("the parameter count is the sum over a checkpoint's tensors") {
  for (const auto seed : seeds(500)) {
    CAPTURE(seed);
    const model_shape m = random_shape(seed);
    REQUIRE_NOTHROW(m.validate());
    REQUIRE(m.parameters() == count_tensors(m, m.experts.count));
    REQUIRE(m.active_parameters() == count_tensors(m, m.experts.active));
  }
  for (const model_shape& m : all_models()) {
    CAPTURE(m.name);
    CHECK(m.parameters() == count_tensors(m, m.experts.count));
  }
}

TEST_CASE("KV bytes follow the type, and half bytes are rounded up once") {
  model_shape odd = small;
  odd.kv_heads = 1;
  odd.heads = 1;
  odd.head_width = 1;
  odd.layers = 3;
  CHECK(odd.kv_bytes_per_token(dtype::int4) == 3);  // six elements of half a byte
  CHECK(bytes_of(7, dtype::int4) == 4);
  CHECK(bytes_of(0, dtype::int4) == 0);
  CHECK(bytes_of(7, dtype::f64) == 56);
  CHECK(name_of(dtype::fp8_e4m3) == "fp8_e4m3");
}

TEST_CASE("a shape that lacks a number is refused by the field's name") {
  const auto refused = [](auto change, const char* text) {
    model_shape m = small;
    change(m);
    CHECK_THROWS_WITH_AS(m.validate(), text, argument_error);
  };
  refused([](model_shape& m) { m.vocabulary = 0; },
          "model_shape small: vocabulary is 0; the model's configuration file has it");
  refused([](model_shape& m) { m.layers = 0; },
          "model_shape small: layers is 0; the model's configuration file has it");
  refused([](model_shape& m) { m.kv_heads = 0; },
          "model_shape small: kv_heads is 0; the model's configuration file has it");
  refused([](model_shape& m) { m.intermediate = 0; },
          "model_shape small: intermediate is 0; the model's configuration file has it");
  refused([](model_shape& m) { m.latent.kv_rank = 4; },
          "model_shape small: latent.rope_width is 0; the model's configuration file has it");
}

TEST_CASE("a shape whose numbers do not fit each other is refused with both") {
  const auto refused = [](auto change, const char* text) {
    model_shape m = small;
    change(m);
    CHECK_THROWS_WITH_AS(m.validate(), text, argument_error);
  };
  refused([](model_shape& m) { m.kv_heads = 3; }, "model_shape small: kv_heads 3 does not divide heads 4");
  refused([](model_shape& m) { m.experts = {.count = 2, .active = 3, .intermediate = 4}; },
          "model_shape small: experts.active 3 exceeds experts.count 2");
  refused([](model_shape& m) { m.experts = {.count = 2, .active = 1, .intermediate = 4, .dense_layers = 3}; },
          "model_shape small: experts.dense_layers 3 exceeds layers 2");
}

TEST_CASE("a product past 2^63 - 1 is refused, not wrapped") {
  model_shape m = small;
  m.vocabulary = std::uint64_t{1} << 62;
  CHECK_THROWS_WITH_AS(m.validate(),
                       "model_shape: vocabulary x hidden: 4611686018427387904 x 8 exceeds the limit of 2^63 "
                       "- 1 bytes; lower one of the two",
                       length_error);
  m = small;
  m.layers = std::uint64_t{1} << 60;
  CHECK_THROWS_AS(static_cast<void>(m.parameters()), length_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(m.kv_bytes_per_token()),
                       "model_shape: KV elements x layers: 8 x 1152921504606846976 exceeds the limit of 2^63 "
                       "- 1 bytes; lower one of the two",
                       length_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(bytes_of(max_bytes, dtype::bf16)),
                       "dtype: elements x bytes per element: 9223372036854775807 x 2 exceeds the limit of "
                       "2^63 - 1 bytes; lower one of the two",
                       length_error);
}
