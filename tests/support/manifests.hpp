/// @file
/// Manifests for tests: random ones, ones as somebody hostile would write them, and their checksum made
/// right.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

/// Eight hexadecimal digits.
inline std::string hex8(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

/// A manifest's text with the right checksum behind it, whatever `body` says. It is no signature: anybody
/// can.
inline std::string sealed(const std::string& body) {
  const std::uint32_t sum = llmmem::crc32c(0, std::as_bytes(std::span(body.data(), body.size())));
  return body + "\"crc32c\":\"" + hex8(sum) + "\"}\n";
}

/// The JSON of an object, sealed.
inline std::string sealed(const nlohmann::ordered_json& object) {
  std::string body = object.dump();
  body.pop_back();
  return sealed(body + (object.empty() ? "\n" : ",\n"));
}

/// What a manifest means as JSON, without the checksum; any, also one that does not fit together.
inline nlohmann::ordered_json json_of(const llmmem::checkpoint_manifest& manifest) {
  nlohmann::ordered_json all = {{"format", "llmmem-checkpoint-1"},
                                {"generation", manifest.generation},
                                {"step", manifest.step},
                                {"world", manifest.world},
                                {"chunk_bytes", manifest.chunk_bytes},
                                {"files", nlohmann::ordered_json::array()}};
  for (const llmmem::checkpoint_file& each : manifest.files) {
    std::string chunks;
    for (const std::uint32_t chunk : each.chunks)
      chunks += hex8(chunk);
    all["files"].push_back({{"name", each.name},
                            {"bytes", each.bytes},
                            {"rank", each.rank},
                            {"crc32c", hex8(each.crc32c)},
                            {"chunks", chunks}});
    for (const llmmem::chunk_run& run : each.runs)
      all["files"].back()["runs"].push_back({run.first, run.count, run.stored, run.place});
  }
  for (const llmmem::stored_chunks& each : manifest.stored) {
    all["stored"].push_back(
        {{"name", each.name}, {"generation", each.generation}, {"step", each.step}, {"bytes", each.bytes}});
  }
  all["tensors"] = nlohmann::ordered_json::array();
  for (const llmmem::checkpoint_tensor& each : manifest.tensors) {
    nlohmann::ordered_json pieces = nlohmann::ordered_json::array();
    for (const llmmem::checkpoint_piece& piece : each.pieces) {
      const std::uint64_t runs[] = {piece.runs.begin, piece.runs.run, piece.runs.stride, piece.runs.count};
      pieces.push_back({{"file", piece.file}, {"entry", piece.entry}, {"runs", runs}});
    }
    all["tensors"].push_back({{"name", each.name},
                              {"type", std::string(llmmem::name_of(each.type))},
                              {"shape", each.shape},
                              {"pieces", pieces}});
  }
  return all;
}

/// Bytes that only the seed knows.
inline std::vector<std::byte> random_bytes(random_numbers& random, std::uint64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::byte& each : bytes)
    each = static_cast<std::byte>(random.below(256U));
  return bytes;
}

/// Some elements of a tensor: all, none, a range, or a box of its rows and columns.
inline llmmem::element_runs random_runs(random_numbers& random, const llmmem::tensor_shape& shape) {
  using llmmem::element_runs;
  const auto range = [&](std::uint64_t of) {
    const std::uint64_t first = random.below(of + 1);
    return llmmem::index_range{first, random.below(of - first + 1)};
  };
  switch (random.below(4U)) {
    case 0:
      return element_runs::all_of(shape.elements());
    case 1: {
      const llmmem::index_range some = range(shape.elements());
      return element_runs::flat_range(some.first, some.count);
    }
    default:
      return element_runs::box(shape, range(shape.rows()), range(shape.columns()));
  }
}

/// Puts the chunks of some files anywhere in stored files that are as long as need be.
inline void scatter_chunks(random_numbers& random, llmmem::checkpoint_manifest& of) {
  for (std::uint64_t i = random.below(4U); i > 0; --i) {
    const bool is_own = random.once_in(3) || of.generation == 0;
    of.stored.push_back({is_own ? of.generation : random.below(of.generation),
                         is_own ? of.step : random.next(), "s" + std::to_string(i), 0});
  }
  if (of.stored.empty()) return;
  for (llmmem::checkpoint_file& file : of.files) {
    if (random.once_in(2)) continue;
    for (std::uint64_t first = 0; first < file.chunks.size();) {
      const std::uint64_t count = 1 + random.below(file.chunks.size() - first);
      const auto stored = static_cast<std::uint32_t>(random.below(of.stored.size()));
      std::uint64_t& bytes = of.stored[stored].bytes;
      const std::uint64_t taken = bytes / of.chunk_bytes + (bytes % of.chunk_bytes == 0 ? 0 : 1);
      const std::uint64_t place = taken + random.below(std::uint64_t{5});  // each chunk has its own
      file.runs.push_back({first, count, stored, place});
      first += count;
      const std::uint64_t end = std::min(first * of.chunk_bytes, file.bytes);
      bytes = place * of.chunk_bytes + end - (first - count) * of.chunk_bytes;
    }
  }
}

/// A manifest that fits together.
inline llmmem::checkpoint_manifest random_manifest(random_numbers& random) {
  using namespace llmmem;
  constexpr std::string_view decorations[] = {"",  "\"\\", "\n\t\x01", "\xC3\xBC", "\xF0\x9F\xA6\x99",
                                              " ", "{}[]"};
  const auto name = [&](const char* kind, std::uint64_t i) {
    return kind + std::to_string(i) + std::string(decorations[random.below(7U)]);
  };
  const auto any_number = [&] { return random.next() >> random.below(64U); };
  checkpoint_manifest made{.generation = any_number(),
                           .step = any_number(),
                           .world = 1 + random.below(3U),
                           .chunk_bytes = 1 + random.below(100U),
                           .files = {},
                           .tensors = {}};
  for (std::uint64_t i = random.below(4U); i > 0; --i) {
    const std::uint64_t count = random.once_in(4) ? 0 : random.below(600U);
    made.files.push_back(
        described(name("f", i), random_bytes(random, count), made.chunk_bytes, random.below(made.world)));
  }
  for (std::uint64_t i = random.below(5U); i > 0; --i) {
    checkpoint_tensor tensor{
        name("t", i), static_cast<safetensors_type>(random.below(safetensors_types)), {}, {}};
    for (std::uint64_t k = random.below(4U); k > 0; --k)
      tensor.shape.push_back(random.once_in(8) ? 0 : 1 + random.below(6U));
    if (bits_of(tensor.type) < 8) tensor.shape.push_back(4);  // whole bytes
    const tensor_shape shape = tensor_shape::of(tensor.shape);
    for (std::uint64_t k = random.below(4U); k > 0 && !made.files.empty(); --k) {
      const element_runs runs = random_runs(random, shape);
      const auto file = static_cast<std::uint32_t>(random.below(made.files.size()));
      const std::uint64_t bits = runs.elements() * bits_of(tensor.type);
      if (bits % 8 != 0 || bits / 8 > made.files[file].bytes) continue;
      tensor.pieces.push_back({file, name("e", k), runs});
    }
    made.tensors.push_back(std::move(tensor));
  }
  if (random.once_in(2)) scatter_chunks(random, made);
  return made;
}

}  // namespace llmmem_tests
