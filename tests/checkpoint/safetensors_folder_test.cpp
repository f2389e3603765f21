// A folder as Hugging Face publishes it: an index and shards, or one file.
#include <llmmem/checkpoint/safetensors_folder.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "support/error_text.hpp"
#include "support/published_model.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// What opening says.
std::string refusal(const published_model& model) {
  return text_of([&] { const safetensors_folder opened(model.path()); });
}

}  // namespace

TEST_SUITE("safetensors_folder") {
  TEST_CASE("all tensors of all shards are found by name, completely and in any parts") {
    const published_model model;
    safetensors_folder opened(model.path());
    CHECK(opened.tensors().size() == model.tensors.size());
    for (const published_tensor& each : model.tensors) {
      CAPTURE(each.name);
      const checkpoint_tensor* const found = opened.find(each.name);
      REQUIRE(found != nullptr);
      CHECK(found->shape == each.shape);
      CHECK(found->type == each.type);
      CHECK(opened.file_of(*found) == each.shard);
      const std::vector<wanted_tensor> whole{
          {.name = each.name, .part = {}, .type = each.type, .shape = each.shape}};
      std::vector<std::byte> bytes(each.bytes.size());
      opened.load(whole, [&](std::uint32_t, std::uint64_t offset, auto part) {
        std::ranges::copy(part, bytes.begin() + static_cast<std::ptrdiff_t>(offset));
      });
      CHECK(bytes == each.bytes);
    }
    CHECK(opened.find("model.norm") == nullptr);
    // Columns 2 to 4 of a matrix, in one load with a row of another shard.
    const std::vector<wanted_tensor> parts{
        {.name = "model.embed_tokens.weight", .part = element_runs{2, 3, 8, 16}, .type = {}, .shape = {}},
        {.name = "lm_head.weight", .part = element_runs{24, 8, 8, 1}, .type = {}, .shape = {}}};
    std::vector<std::vector<std::byte>> got{std::vector<std::byte>(16 * 3 * 2),
                                            std::vector<std::byte>(8 * 2)};
    const load_report report = opened.load(parts, [&](std::uint32_t i, std::uint64_t offset, auto part) {
      std::ranges::copy(part, got[i].begin() + static_cast<std::ptrdiff_t>(offset));
    });
    CHECK(report.bytes == 16 * 3 * 2 + 8 * 2);
    const std::vector<std::byte>& embedding = model.bytes_of_tensor("model.embed_tokens.weight");
    for (std::size_t row = 0; row < 16; ++row) {
      for (std::size_t i = 0; i < 6; ++i)
        CHECK(got[0][row * 6 + i] == embedding[row * 16 + 4 + i]);
    }
    const std::vector<std::byte>& head = model.bytes_of_tensor("lm_head.weight");
    CHECK(std::ranges::equal(got[1], std::span(head).subspan(48, 16)));
    CHECK(text_of([&] {
            load_checkpoint(opened.storage(), opened.found(), parts, [](auto, auto, auto) {});
          }).ends_with(": it has no checksums; load it with verification::sizes"));
  }

  TEST_CASE("one file without an index is a model, a folder with neither is not") {
    published_model model;
    std::filesystem::remove(model.file("model.safetensors.index.json"));
    CHECK(refusal(model).ends_with(
        "model.safetensors.index.json: cannot be opened: No such file or directory; and there is no "
        "model.safetensors: this is not the folder of a published model"));
    std::filesystem::copy_file(model.file("model-00001-of-00003.safetensors"),
                               model.file("model.safetensors"));
    const safetensors_folder opened(model.path());
    CHECK(opened.find("model.embed_tokens.weight") != nullptr);
    CHECK(opened.find("lm_head.weight") == nullptr);
  }

  TEST_CASE("files outside the index are ignored, and files may be links, as in the hub's cache") {
    const published_model model;
    std::ofstream(model.file("model-extra.safetensors")) << "no safetensors file";
    std::filesystem::create_directory(model.file("blobs"));
    for (const char* name : {"model-00002-of-00003.safetensors", "model.safetensors.index.json"}) {
      std::filesystem::rename(model.file(name), model.file("blobs") / name);
      std::filesystem::create_symlink(std::filesystem::path("blobs") / name, model.file(name));
    }
    CHECK(safetensors_folder(model.path()).tensors().size() == model.tensors.size());
  }

  TEST_CASE("a missing shard is named with one of its tensors") {
    const published_model model;
    std::filesystem::remove(model.file("model-00002-of-00003.safetensors"));
    CHECK(refusal(model).ends_with(
        "model-00002-of-00003.safetensors: cannot be opened: No such file or directory; the index says that "
        "2 tensors are in it, \"model.layers.0.bias\" among them: download it"));
  }

  TEST_CASE("an index of other files is refused by a tensor that is not where it says") {
    const published_model model;
    model.write_index({{"lm_head.weight", "model-00001-of-00003.safetensors"}});
    CHECK(refusal(model).ends_with(
        "model.safetensors.index.json: tensor \"lm_head.weight\" is said to be in "
        "\"model-00001-of-00003.safetensors\", which does not have it: the index belongs to other files"));
  }

  TEST_CASE("an entry that points out of the folder is refused by name") {
    const published_model model;
    for (const char* shard : {"../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "",
                              ".hidden", "MANIFEST.json", "a\\u0000b"}) {
      CAPTURE(shard);
      model.write_index({{"lm_head.weight", shard}});
      const std::string text = refusal(model);
      CHECK(text.find("tensor \"lm_head.weight\" is said to be in ") != std::string::npos);
      CHECK(text.find("which is not the name of a file in this folder") != std::string::npos);
    }
  }

  TEST_CASE("a tensor that occurs twice is refused by name, and so is a file that is not an index") {
    const published_model model;
    model.write_index({{"a", "model-00001-of-00003.safetensors"},
                       {"lm_head.weight", "model-00002-of-00003.safetensors"},
                       {"a", "model-00003-of-00003.safetensors"}});
    CHECK(
        refusal(model).ends_with("tensor \"a\" occurs twice, in \"model-00001-of-00003.safetensors\" and "
                                 "\"model-00003-of-00003.safetensors\""));
    const auto with = [&](const char* text) {
      std::ofstream(model.file("model.safetensors.index.json")) << text;
      return refusal(model);
    };
    CHECK(with("{}").ends_with("it has no \"weight_map\", which maps tensors to files"));
    CHECK(with("{\"weight_map\":{},\"weight_map\":{}}").find("occurs twice") != std::string::npos);
    CHECK(with("{\"weight_map\":{\"a\":1}}").find("must be here") != std::string::npos);
    CHECK(with("{\"weight_map\":{}").find("must be here") != std::string::npos);
    CHECK(with("version https://git-lfs.github.com/spec/v1\n")
              .ends_with("it is a Git LFS pointer; fetch the file itself: git lfs pull"));
    CHECK(with("{\"metadata\":{\"total_size\":7},\"weight_map\":{}}") == "none");
  }

  TEST_CASE("a shard that is a pointer, truncated or extended is refused as such a file is") {
    for (const int what : {0, 1, 2}) {
      const published_model model;
      const std::filesystem::path shard = model.file("model-00003-of-00003.safetensors");
      if (what == 0) std::ofstream(shard) << "version https://git-lfs.github.com/spec/v1\n";
      if (what == 1) std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
      if (what == 2) std::filesystem::resize_file(shard, std::filesystem::file_size(shard) + 1);
      CHECK(refusal(model).find("model-00003-of-00003.safetensors: ") != std::string::npos);
    }
  }
}
