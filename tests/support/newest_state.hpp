/// @file
/// What the newest checkpoint of a storage holds, to be compared with what should have been saved.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

struct newest_state {
  std::uint64_t step = 0;  // 0: there is none
  std::vector<std::vector<std::byte>> bytes{};
};

/// @pre the tensors are of bytes, and whole.
template <class Storage>
[[nodiscard]] newest_state load_newest(Storage& storage, std::span<const llmmem::state_tensor> tensors) {
  const llmmem::checkpoint_search search = llmmem::find_checkpoint(storage);
  if (!search.found) return {};
  newest_state loaded{.step = search.found->id.step};
  std::vector<llmmem::wanted_tensor> wanted;
  for (const llmmem::state_tensor& each : tensors) {
    std::uint64_t bytes = 1;
    for (const std::uint64_t extent : each.shape)
      bytes *= extent;
    loaded.bytes.emplace_back(static_cast<std::size_t>(bytes));
    wanted.push_back({.name = each.name, .part = {}, .type = each.type, .shape = each.shape});
  }
  llmmem::load_checkpoint(storage, *search.found, wanted,
                          [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> part) {
                            std::memcpy(loaded.bytes[i].data() + offset, part.data(), part.size());
                          },
                          {.readers = 1});
  return loaded;
}

/// A tensor of bytes.
[[nodiscard]] inline llmmem::state_tensor byte_tensor(std::string name, std::uint64_t bytes) {
  return {.name = std::move(name),
          .type = llmmem::safetensors_type::u8,
          .shape = {bytes},
          .group = "model",
          .part = {}};
}

}  // namespace llmmem_tests
