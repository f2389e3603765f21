#include "checkpoint_tool/convert.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "checkpoint_tool/diff.hpp"
#include "support/saved_state.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace checkpoint_tool;
using namespace llmmem_tests;
using llmmem::element_runs;

namespace {

/// All elements of sets, one after the other.
std::vector<std::uint64_t> elements_in(const std::vector<element_runs>& sets) {
  std::vector<std::uint64_t> all;
  for (const element_runs& set : sets) {
    for (std::uint64_t i = 0; i < set.elements(); ++i)
      all.push_back(set.element_at(i));
  }
  return all;
}

}  // namespace

TEST_CASE("a slice of a set has its elements in order, in at most three canonical sets") {
  for (const element_runs& of :
       {element_runs{0, 12, 12, 1}, element_runs{5, 7, 7, 1}, element_runs{2, 3, 8, 4},
        element_runs{1, 1, 2, 6}, element_runs{3, 4, 9, 2}}) {
    const std::vector<std::uint64_t> all = elements_in({of});
    for (std::uint64_t first = 0; first <= all.size(); ++first) {
      for (std::uint64_t last = first; last <= all.size(); ++last) {
        CAPTURE(first);
        CAPTURE(last);
        const std::vector<element_runs> sets = runs_between(of, first, last);
        REQUIRE(sets.size() <= 3);
        for (const element_runs& set : sets)
          REQUIRE(set.is_valid(100));
        REQUIRE(elements_in(sets) ==
                std::vector<std::uint64_t>(all.begin() + static_cast<std::ptrdiff_t>(first),
                                           all.begin() + static_cast<std::ptrdiff_t>(last)));
      }
    }
  }
  CHECK(runs_between({}, 0, 0).empty());
}

TEST_CASE("groups are recognised by the files' names") {
  CHECK(group_of("model.safetensors") == "model");
  CHECK(group_of("adam-rank-00001-of-00003.safetensors") == "adam");
  CHECK(group_of("adam-00002-of-00003.safetensors") == "adam");
  CHECK(group_of("adam-rank-00001-of-00003-00002-of-00003.safetensors") == "adam");
  CHECK(group_of("adam-rank-100001-of-100003.safetensors") == "adam");
  CHECK(group_of("a-of-b.safetensors") == "a-of-b");
  CHECK(group_of("-of-00003.safetensors") == "-of-00003");
  CHECK(group_of("-00001-of-00003.safetensors") == "model");
  CHECK(group_of("extra.safetensors") == "model");
  CHECK(group_of(".hidden.safetensors") == "model");
  CHECK(group_of("weights.bin") == "model");
  CHECK(group_of(std::string(65, 'x') + ".safetensors") == "model");
}

TEST_CASE("any state in any sharding is converted with windows of any size") {
  const std::vector<partition_kind> partitions{partition_kind::flat, partition_kind::rows,
                                               partition_kind::columns, partition_kind::replicated};
  const example::file_handle notes(std::fopen("/dev/null", "w"), &std::fclose);
  REQUIRE(notes);
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t most) { return random() % most; };
    std::vector<saved_tensor> state = some_state(seed);
    using enum llmmem::safetensors_type;
    for (const auto type : {f32, f16, u8, f6_e2m3, f4, i64}) {
      saved_tensor more{"more." + std::string(name_of(type)), type, {1 + below(9), 8, 1 + below(7)}};
      more.bytes.resize(static_cast<std::size_t>(llmmem::bytes_of(type, more.elements(), more.name)));
      for (std::byte& each : more.bytes)
        each = static_cast<std::byte>(random());
      state.push_back(more);
    }
    const temporary_folder folder;
    save_state(folder.file("0"), 1, state,
               {.world = static_cast<std::uint32_t>(1 + below(4)),
                .how = static_cast<saved_as>(below(4)),
                .chunk_bytes = 1 + below(5000),
                .max_shard_bytes = 1 + below(2000)});
    for (int i = 0; i < 3; ++i) {
      const auto from = open_folder(folder.file(std::to_string(i)));
      const llmmem::found_checkpoint found = open_whole(*from, std::nullopt);
      const std::vector<rank_files> ranks =
          plan_reshard(found.manifest, {.world = static_cast<std::uint32_t>(1 + below(4)),
                                        .partition = partitions[below(4)],
                                        .max_shard_bytes = 1 + below(2000)});
      storage_type to(folder.file(std::to_string(i + 1)));
      llmmem::checkpoint_folder<storage_type> made(to);
      const copy_options copied{.chunk_bytes = 1 + below(3000), .window_chunks = 1 + below(3)};
      const conversion done = convert_into(made, *from, found, ranks, notes.get(), copied);
      CHECK(done.manifest.chunk_bytes == copied.chunk_bytes);
      CHECK(open_checkpoint(to, done.to_id, llmmem::verification::checksums).manifest == done.manifest);
      const auto first = open_folder(folder.file("0"));
      const compared_checkpoint a{*first, open_whole(*first, std::nullopt)};
      const compared_checkpoint b{to, open_whole(to, std::nullopt)};
      const std::vector<tensor_difference> all = compare_checkpoints(a, b, notes.get(), 8 + below(500));
      CHECK(all.size() >= state.size());
      CHECK(is_same(all));
    }
    // Not only are both the same: they are the state.
    const auto last = open_folder(folder.file("3"));
    const llmmem::found_checkpoint found = open_whole(*last, std::nullopt);
    for (const saved_tensor& each : state) {
      CAPTURE(each.name);
      std::vector<std::byte> got(each.bytes.size(), std::byte{0xEE});
      const llmmem::wanted_tensor wanted[] = {{.name = each.name, .type = each.type, .shape = each.shape}};
      static_cast<void>(llmmem::load_checkpoint(
          *last, found, wanted, [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) {
            std::copy(bytes.begin(), bytes.end(), got.begin() + static_cast<std::ptrdiff_t>(offset));
          }));
      CHECK(got == each.bytes);
    }
  }
}
