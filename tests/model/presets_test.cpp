#include <llmmem/model/presets.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

using namespace llmmem;

// Parameters as the published checkpoints hold them (the tensors' sizes in their safetensors headers).
static_assert(models::gpt2_124m.parameters() == 124'439'808);
static_assert(models::llama2_7b.parameters() == 6'738'415'616);
static_assert(models::llama2_13b.parameters() == 13'015'864'320);
static_assert(models::llama2_70b.parameters() == 68'976'648'192);
static_assert(models::llama3_8b.parameters() == 8'030'261'248);
static_assert(models::llama3_70b.parameters() == 70'553'706'496);
static_assert(models::llama3_405b.parameters() == 405'853'388'800);
static_assert(models::mixtral_8x7b.parameters() == 46'702'792'704);
static_assert(models::deepseek_v3.parameters() == 671'026'419'200);
static_assert(models::qwen2_5_7b.parameters() == 7'615'616'512);
static_assert(models::qwen2_5_72b.parameters() == 72'706'203'648);

// Active parameters: "12.9B" (Mixtral, section 1); "36.6B, including 0.9B for the output head" (DeepSeek-V3's
// weight notes, corrected), which leaves the input embedding out.
static_assert(models::mixtral_8x7b.active_parameters() == 12'879'925'248);
static_assert(models::deepseek_v3.active_parameters() - models::deepseek_v3.embedding_parameters() ==
              36'625'618'432);
static_assert(models::llama2_7b.active_parameters() == models::llama2_7b.parameters());

// KV bytes of a token, 16 bits an element.
static_assert(models::llama3_70b.kv_bytes_per_token() == 327'680);
static_assert(models::llama2_7b.kv_bytes_per_token() == 524'288);
static_assert(models::deepseek_v3.kv_bytes_per_token() == 70'272);
static_assert(models::llama3_405b.kv_bytes_per_token() == 516'096);
static_assert(models::llama2_7b.kv_bytes_per_token(dtype::fp8_e4m3) == 262'144);
static_assert(models::llama2_7b.kv_bytes_per_token(dtype::int4) == 131'072);
static_assert(models::llama3_70b.kv_bytes_per_block(16) == 5'242'880);

// HCache's question: 0.5 favours hidden states, 2 and 4 forbid them.
static_assert(models::llama2_7b.hidden_over_kv() == 0.5);
static_assert(models::llama2_13b.hidden_over_kv() == 0.5);
static_assert(models::llama3_8b.hidden_over_kv() == 2.0);
static_assert(models::llama3_70b.hidden_over_kv() == 4.0);

static_assert(find_model("deepseek-v3").latent.kv_rank == 512);
static_assert(all_models().size() == 11);

TEST_CASE("every preset is a valid shape and is found by its own name") {
  for (const model_shape& model : all_models()) {
    CAPTURE(model.name);
    CHECK_NOTHROW(model.validate());
    CHECK(&find_model(model.name) == &model);
    CHECK(model.active_parameters() <= model.parameters());
  }
}

TEST_CASE("an unknown model name is refused with the known ones") {
  CHECK_THROWS_WITH_AS(
      static_cast<void>(find_model("llama4")),
      "find_model: no model is called \"llama4\"; known are gpt2-124m, llama2-7b, llama2-13b, "
      "llama2-70b, llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, deepseek-v3, qwen2.5-7b, "
      "qwen2.5-72b",
      argument_error);
  CHECK_THROWS_AS(static_cast<void>(find_model("")), argument_error);
  CHECK_THROWS_AS(static_cast<void>(find_model("Llama2-7B")), argument_error);
}
