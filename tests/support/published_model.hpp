/// @file
/// A small model in a folder, as Hugging Face's tools publish it: an index and three shards.
#pragma once

#include <llmmem/model/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/temporary_folder.hpp"

namespace llmmem_tests {

struct published_tensor {
  std::string name{};
  llmmem::safetensors_type type = llmmem::safetensors_type::bf16;
  std::vector<std::uint64_t> shape{};
  std::string shard{};
  std::vector<std::byte> bytes{};
};

class published_model {
 public:
  published_model() {
    using enum llmmem::safetensors_type;
    add("model.embed_tokens.weight", bf16, {16, 8}, 1);
    add("model.layers.0.weight", f8_e4m3, {7, 5}, 1);
    add("model.layers.0.bias", f32, {5}, 2);
    add("model.step", i64, {}, 2);
    add("scaled_fp8", f8_e4m3, {0}, 3);
    add("lm_head.weight", bf16, {16, 8}, 3);
    for (int i = 1; i <= 3; ++i)
      write_shard(shard_name(i));
    std::vector<std::pair<std::string, std::string>> map;
    for (const published_tensor& each : tensors)
      map.emplace_back(each.name, each.shard);
    write_index(map);
  }

  [[nodiscard]] std::string path() const { return folder_.path().string(); }
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_.path() / name; }
  [[nodiscard]] const std::vector<std::byte>& bytes_of_tensor(std::string_view name) const {
    for (const published_tensor& each : tensors) {
      if (each.name == name) return each.bytes;
    }
    throw std::runtime_error("no such tensor");
  }
  /// Puts another index in its place; strings go into the JSON as they are.
  void write_index(const std::vector<std::pair<std::string, std::string>>& map) const {
    std::ofstream out(file("model.safetensors.index.json"));
    out << "{\n  \"metadata\": {\"total_size\": 1},\n  \"weight_map\": {";
    for (std::size_t i = 0; i < map.size(); ++i)
      out << (i == 0 ? "" : ",") << "\n    \"" << map[i].first << "\": \"" << map[i].second << "\"";
    out << "\n  }\n}\n";
  }

  std::vector<published_tensor> tensors{};

 private:
  [[nodiscard]] static std::string shard_name(int number) {
    return "model-0000" + std::to_string(number) + "-of-00003.safetensors";
  }
  void add(const char* name, llmmem::safetensors_type type, std::vector<std::uint64_t> shape, int shard) {
    std::uint64_t bytes = bits_of(type) / 8;
    for (const std::uint64_t each : shape)
      bytes *= each;
    published_tensor made{name, type, std::move(shape), shard_name(shard), {}};
    for (std::uint64_t i = 0; i < bytes; ++i)
      made.bytes.push_back(static_cast<std::byte>(random_.below(256U)));
    tensors.push_back(std::move(made));
  }
  void write_shard(const std::string& shard) const {
    std::vector<llmmem::safetensors_tensor> stored;
    for (const published_tensor& each : tensors) {
      if (each.shard == shard) stored.push_back({each.name, each.type, each.shape});
    }
    const llmmem::safetensors_layout layout = lay_out_safetensors(std::move(stored), {{"format", "pt"}}, 8);
    std::ofstream out(file(shard), std::ios::binary);
    out << layout.head;
    for (const llmmem::safetensors_entry& entry : layout.header.entries) {
      for (const std::byte each : bytes_of_tensor(entry.name))
        out << static_cast<char>(each);
    }
  }

  temporary_folder folder_;
  random_numbers random_{17};
};

}  // namespace llmmem_tests
