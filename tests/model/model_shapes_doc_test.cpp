#include <llmmem/model/activations.hpp>
#include <llmmem/model/presets.hpp>
#include <llmmem/model/training_state.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

using namespace llmmem;

namespace {

/// 1234567 as "1,234,567".
std::string grouped(std::uint64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i != 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string shapes_table() {
  std::string table =
      "| `--model` | layers | hidden | heads (KV) | parameters | active | KV bytes a token, bf16 | hidden / "
      "KV | "
      "training, 16 B a parameter (GB) |\n|---|---|---|---|---|---|---|---|---|\n";
  for (const model_shape& m : all_models()) {
    const std::string kv_heads = m.latent.kv_rank != 0 ? "latent " + std::to_string(m.kv_elements_per_layer())
                                                       : std::to_string(m.kv_heads);
    table += "| " + std::string(m.name) + " | " + std::to_string(m.layers) + " | " +
             std::to_string(m.hidden) + " | " + std::to_string(m.heads) + " (" + kv_heads + ") | " +
             grouped(m.parameters()) + " | " + grouped(m.active_parameters()) + " | " +
             grouped(m.kv_bytes_per_token()) + " | " + decimal(m.hidden_over_kv()) + " | " +
             decimal(static_cast<double>(training_state(m.parameters()).total()) / 1e9) + " |\n";
  }
  return table;
}

std::string activations_table() {
  constexpr model_shape gpt3{
      .name = "gpt3-175b", .vocabulary = 51200, .hidden = 12288, .layers = 96, .heads = 96};
  struct line {
    const char* what;
    training_step step;
  };
  constexpr auto on = sequence_parallel::on;
  const line lines[] = {
      {"one rank", {.sequence = 2048}},
      {"8 tensor-parallel ranks", {.sequence = 2048, .tensor_parallel = 8}},
      {"and sequence parallel", {.sequence = 2048, .tensor_parallel = 8, .split = on}},
      {"8 ranks, selective recomputation",
       {.sequence = 2048, .tensor_parallel = 8, .recomputed = recompute::selective}},
      {"and sequence parallel",
       {.sequence = 2048, .tensor_parallel = 8, .split = on, .recomputed = recompute::selective}},
      {"full recomputation", {.sequence = 2048, .tensor_parallel = 8, .recomputed = recompute::full}},
  };
  std::string table = "| GPT-3 175B, 2048 tokens, batch 1 | MiB a layer |\n|---|---|\n";
  for (const line& l : lines) {
    const std::uint64_t bytes = activation_bytes_per_layer(gpt3, l.step);
    table += "| " + std::string(l.what) + " | " + std::to_string(bytes / (1024 * 1024)) + " |\n";
  }
  return table;
}

}  // namespace

TEST_CASE("docs/model_shapes.md shows the tables that the code computes") {
  const std::string here = __FILE__;
  std::ifstream file(here.substr(0, here.rfind("tests/model/")) + "docs/model_shapes.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  if (page.empty()) {
    MESSAGE("skipped: the sources are not where they were compiled");
    return;
  }
  for (const std::string& table : {shapes_table(), activations_table()}) {
    INFO("docs/model_shapes.md should hold\n", table);
    CHECK(page.find(table) != std::string::npos);
  }
}
