#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/rank_state.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

/// A state, and its bytes.
struct world_state {
  std::vector<state_tensor> catalogue;
  std::vector<std::vector<std::byte>> bytes;

  [[nodiscard]] std::uint64_t width(std::size_t tensor) const { return bits_of(catalogue[tensor].type) / 8; }
  /// What a part of a tensor has, one element behind the other.
  [[nodiscard]] std::vector<std::byte> of(std::size_t tensor, const element_runs& part) const {
    std::vector<std::byte> all;
    for (const std::uint64_t element : elements_of(part)) {
      for (std::uint64_t i = 0; i < width(tensor); ++i)
        all.push_back(bytes[tensor][static_cast<std::size_t>(element * width(tensor) + i)]);
    }
    return all;
  }
};

world_state make_state(random_numbers& random) {
  constexpr safetensors_type types[] = {safetensors_type::f32, safetensors_type::bf16, safetensors_type::u8,
                                        safetensors_type::f64};
  world_state state;
  const std::vector<std::vector<std::uint64_t>> shapes = {{7, 5}, {16, 3},   {11},   {},
                                                          {0, 4}, {3, 2, 4}, {1, 9}, {2, 0}};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    state.catalogue.push_back({.name = "layer." + std::to_string(i),
                               .type = types[i % 4],
                               .shape = shapes[i],
                               .group = i % 3 == 0 ? "optimizer" : "model",
                               .part = {}});
    const std::uint64_t elements = tensor_shape::of(shapes[i]).elements();
    std::vector<std::byte> bytes(static_cast<std::size_t>(elements * state.width(i)));
    for (std::byte& each : bytes)
      each = static_cast<std::byte>(random.below(256U));
    state.bytes.push_back(std::move(bytes));
  }
  return state;
}

constexpr std::uint64_t chunk = 64;

/// Writes what a rank saves, as its plan says. Returns what it has to say of it.
checkpoint_manifest save_rank(simulated_storage& storage, const checkpoint_draft& draft,
                              const world_state& state, const std::vector<state_tensor>& saved,
                              std::uint32_t rank, std::uint32_t world) {
  const file_plan plan =
      plan_files(saved, {.max_shard_bytes = 100, .data_alignment = 64, .rank = rank, .world = world});
  checkpoint_manifest part{.generation = draft.id.generation,
                           .step = draft.id.step,
                           .world = world,
                           .chunk_bytes = chunk,
                           .files = {},
                           .tensors = plan.tensors};
  for (const planned_file& file : plan.files) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(file.bytes));
    std::memcpy(bytes.data(), file.head.data(), file.head.size());
    for (const planned_span& span : file.spans) {
      const element_runs all = element_runs::all_of(tensor_shape::of(saved[span.tensor].shape).elements());
      const std::vector<std::byte> part_bytes = state.of(span.tensor, saved[span.tensor].part.value_or(all));
      std::memcpy(bytes.data() + span.begin, part_bytes.data() + span.offset,
                  static_cast<std::size_t>(span.bytes));
    }
    auto output = storage.create(draft.path(file.name), bytes.size());
    static_cast<void>(output.begin_write(0, bytes));
    output.sync();
    part.files.push_back(described(file.name, bytes, chunk, rank));
  }
  return part;
}

/// The bytes of all headers of files that have anything of what is wanted.
std::uint64_t header_bytes(simulated_storage& storage, const found_checkpoint& found,
                           std::span<const wanted_tensor> wanted) {
  std::set<std::uint32_t> files;
  for (const wanted_tensor& each : wanted) {
    for (const checkpoint_tensor& tensor : found.manifest.tensors) {
      if (tensor.name != each.name) continue;
      for (const checkpoint_piece& piece : tensor.pieces)
        intersect(piece.runs, *each.part, [&](std::uint64_t, std::uint64_t) { files.insert(piece.file); });
    }
  }
  std::uint64_t bytes = 0;
  for (const std::uint32_t file : files) {
    const std::string path = found.folder + "/" + found.manifest.files[file].name;
    const auto input = storage.open(path);
    std::vector<std::byte> first(8);
    input.read(0, first);
    bytes += safetensors_header_bytes(first, path);
  }
  return bytes;
}

/// Loads what a rank is to have, and compares it with the state; each byte is given once.
void load_rank(simulated_storage& storage, const found_checkpoint& found, const world_state& state,
               const any_partition& split, std::uint32_t rank, verification how) {
  std::vector<wanted_tensor> wanted;
  std::vector<std::vector<std::byte>> got;
  std::vector<std::vector<int>> times;
  std::uint64_t bytes = 0;
  for (std::uint32_t t = 0; t < state.catalogue.size(); ++t) {
    const element_runs part =
        std::visit([&](const auto& each) { return each.local(tensor_id{t}, rank_id{rank}); }, split);
    wanted.push_back({.name = state.catalogue[t].name,
                      .part = part,
                      .type = state.catalogue[t].type,
                      .shape = state.catalogue[t].shape});
    got.emplace_back(static_cast<std::size_t>(part.elements() * state.width(t)));
    times.emplace_back(got.back().size(), 0);
    bytes += got.back().size();
  }
  const load_report report =
      load_checkpoint(storage, found, wanted,
                      [&](std::uint32_t tensor, std::uint64_t offset, std::span<const std::byte> part) {
                        REQUIRE(offset + part.size() <= got[tensor].size());
                        std::memcpy(got[tensor].data() + offset, part.data(), part.size());
                        for (std::size_t i = 0; i < part.size(); ++i)
                          ++times[tensor][static_cast<std::size_t>(offset) + i];
                      },
                      {.verify = how, .readers = 1});
  REQUIRE(report.bytes == bytes);
  for (std::size_t t = 0; t < got.size(); ++t) {
    REQUIRE(got[t] == state.of(t, *wanted[t].part));
    REQUIRE(times[t] == std::vector<int>(times[t].size(), 1));
  }
  if (how == verification::sizes) REQUIRE(report.read_bytes == bytes + header_bytes(storage, found, wanted));
}

}  // namespace

TEST_SUITE("reshard_load") {
  TEST_CASE("any number of ranks loads in any split what any other number saved") {
    for (const auto seed : seeds(1)) {
      random_numbers random(seed);
      const world_state state = make_state(random);
      const std::vector<tensor_facts> facts = facts_of(state.catalogue);
      std::uint64_t loads = 0;
      for (std::uint32_t savers = 1; savers <= 5; ++savers) {
        for (std::uint32_t from = 0; from < partition_kinds; ++from) {
          simulated_storage storage;
          checkpoint_folder folder(storage);
          const checkpoint_draft draft = folder.begin(10);
          const any_partition saved = random_partition(random, facts, from, rank_count{savers});
          const auto states =
              std::visit([&](const auto& split) { return rank_states(state.catalogue, split); }, saved);
          checkpoint_manifest all = save_rank(storage, draft, state, states[0], 0, savers);
          for (std::uint32_t rank = 1; rank < savers; ++rank)
            merge_manifest(all, save_rank(storage, draft, state, states[rank], rank, savers), "rank");
          folder.commit(draft, all);
          const checkpoint_search search = find_checkpoint(storage);
          REQUIRE(search.found);
          for (std::uint32_t loaders = 1; loaders <= 5; ++loaders) {
            for (std::uint32_t to = 0; to < partition_kinds; ++to) {
              CAPTURE(seed);
              CAPTURE(savers);
              CAPTURE(from);
              CAPTURE(loaders);
              CAPTURE(to);
              const any_partition wanted = random_partition(random, facts, to, rank_count{loaders});
              for (std::uint32_t rank = 0; rank < loaders; ++rank) {
                for (const verification how : {verification::sizes, verification::checksums})
                  load_rank(storage, *search.found, state, wanted, rank, how);
                ++loads;
              }
            }
          }
        }
      }
      CHECK(loads == 25 * 5 * 15);
    }
  }

  TEST_CASE("each element is in the files of one rank only") {
    random_numbers random(7);
    const world_state state = make_state(random);
    const std::vector<tensor_facts> facts = facts_of(state.catalogue);
    std::uint64_t elements = 0;
    for (const tensor_facts& each : facts)
      elements += each.shape.elements();
    for (std::uint32_t kind = 0; kind < partition_kinds; ++kind) {
      const any_partition split = random_partition(random, facts, kind, rank_count{4});
      const auto states =
          std::visit([&](const auto& each) { return rank_states(state.catalogue, each); }, split);
      std::uint64_t planned = 0;
      for (std::uint32_t rank = 0; rank < 4; ++rank) {
        const file_plan plan = plan_files(states[rank], {.rank = rank, .world = 4});
        for (const checkpoint_tensor& tensor : plan.tensors) {
          for (const checkpoint_piece& piece : tensor.pieces)
            planned += piece.runs.elements();
        }
      }
      CHECK(planned == elements);
    }
  }
}
