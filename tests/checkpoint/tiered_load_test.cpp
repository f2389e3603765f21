// Tensors of a tiered buffer, saved as they are and loaded into any chunks.
#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/tiered_load.hpp>
#include <llmmem/checkpoint/tiered_view.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_storage.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/changing_state.hpp"
#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/small_checkpoint.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

using buffer_type = tiered_buffer<host_space, host_space>;
using checkpointer = async_checkpointer<view_traits<tiered_state_view<buffer_type>>>;
using tensors_type = tiered_tensors<buffer_type>;

constexpr std::uint64_t page = 4096;

/// A buffer with tensors in chunks of some size.
struct engine {
  engine(const std::vector<state_tensor>& described, const chunk_mapping_options& chunks,
         std::uint64_t top = 12 * page)
      : buffer({.max_chunks = 512}, {space, top, 256}, {space, 256 * page, 512}),
        tensors(buffer, map_to_chunks(sizes_of(described), chunks)) {}

  void fill(const tensor_values& values) {
    for (std::uint32_t i = 0; i < values.size(); ++i) {
      tensors
          .for_each_part<access_mode::write>(
              tensor_id{i},
              [&](auto& lease, const tensor_part& part) {
                std::copy_n(values[i].begin() + static_cast<std::ptrdiff_t>(part.begin), part.bytes,
                            lease.span().begin());
              })
          .value();
    }
  }
  [[nodiscard]] tensor_values values() {
    tensor_values all;
    for (std::uint32_t i = 0; i < tensors.mapping().tensors(); ++i) {
      all.emplace_back(tensors.bytes(tensor_id{i}).value());
      tensors
          .for_each_part<access_mode::read>(
              tensor_id{i},
              [&](auto& lease, const tensor_part& part) {
                std::ranges::copy(lease.span(), all.back().begin() + static_cast<std::ptrdiff_t>(part.begin));
              })
          .value();
    }
    return all;
  }

  host_space space{{.budget = 1 << 22}};
  buffer_type buffer;
  tensors_type tensors;
};

/// Small ones that share chunks, a large one of several, and one whose elements share bytes.
std::vector<state_tensor> some_tensors() {
  const auto tensor = [](const char* name, safetensors_type type, std::vector<std::uint64_t> shape) {
    return state_tensor{.name = name, .type = type, .shape = std::move(shape), .group = "model", .part = {}};
  };
  return {tensor("norm", safetensors_type::f32, {17}), tensor("wte", safetensors_type::f32, {100, 101}),
          tensor("bias", safetensors_type::bf16, {33}), tensor("codes", safetensors_type::f6_e2m3, {40, 400}),
          tensor("scale", safetensors_type::f8_e4m3, {1})};
}

}  // namespace

TEST_SUITE("tensors of a tiered buffer, saved and loaded") {
  TEST_CASE("a tensor in several chunks is saved as one, and restored to any chunks") {
    const std::vector<state_tensor> described = some_tensors();
    random_numbers random(4);
    const tensor_values values = random_values(random, described);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    {
      engine first(described, {.group_bytes = page, .split_bytes = 2 * page});
      first.fill(values);
      CHECK(first.tensors.parts(tensor_id{1}).value().size() == 5);
      checkpointer saves(coordinator, described, {.ring_bytes = 3 * page, .chunk_bytes = page});
      const commit_ticket saved = saves.begin_snapshot(7, first.tensors).ticket();
      CHECK(saved.wait() == commit_status::committed);
    }
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->manifest.tensors.size() == described.size());
    // As a tool reads them.
    for (std::uint32_t i = 0; i < described.size(); ++i) {
      const std::vector<wanted_tensor> wanted{
          {.name = described[i].name, .part = {}, .type = described[i].type, .shape = described[i].shape}};
      std::vector<std::byte> got(values[i].size());
      load_checkpoint(storage, *search.found, wanted, [&](std::uint32_t, std::uint64_t offset, auto bytes) {
        std::ranges::copy(bytes, got.begin() + static_cast<std::ptrdiff_t>(offset));
      });
      CHECK(got == values[i]);
    }
    for (const std::uint64_t split : {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{11}}) {
      for (const std::uint64_t window : {std::uint64_t{1}, 5 * page, std::uint64_t{1} << 30}) {
        engine next(described, {.group_bytes = 0, .split_bytes = split * page});
        const load_report report =
            load_into(storage, *search.found, described, next.tensors, {.window_bytes = window});
        CHECK(next.values() == values);
        CHECK(report.bytes >= 100 * 101 * 4);
        CHECK(next.tensors.audit().empty());
        CHECK(next.buffer.audit().empty());
      }
    }
  }

  TEST_CASE("a rank's parts of rows and columns are restored") {
    std::vector<state_tensor> described = some_tensors();
    described.resize(2);
    described[0].part = element_runs::flat_range(3, 9);
    described[1].part = element_runs{20, 60, 101, 100};  // columns 20 to 79
    random_numbers random(6);
    const std::vector<state_tensor> whole{some_tensors()[0], some_tensors()[1]};
    const tensor_values values = random_values(random, whole);
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{whole};
    save_state(folder, 1, 512, ranks, values, {}, {});
    engine rank(described, {.group_bytes = 0, .split_bytes = page});
    load_into(storage, *find_checkpoint(storage).found, described, rank.tensors);
    const tensor_values got = rank.values();
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(got[i] == part_of(values[i], *described[i].part, 32));
  }

  TEST_CASE("an engine on a file and a schedule continues after a stop, bit for bit") {
    const temporary_folder folder;
    const std::vector<state_tensor> described = some_tensors();
    const auto train = [&](const std::string& run, std::uint64_t steps) {
      using disk_buffer = tiered_buffer<tier<host_space, min_eviction>, file_space<>>;
      host_space top({.budget = 16 * page});
      file_space<> disk(folder.file("tier"), {.budget = 64 * page});
      disk_buffer buffer({}, {top, 16 * page}, {disk, 64 * page});
      prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 1'000'000'000}}});
      tiered_tensors tensors(
          schedule, map_to_chunks(sizes_of(described), {.group_bytes = page, .split_bytes = 2 * page}));
      posix_storage<> storage(folder.file(run));
      std::uint64_t step = 0;
      const auto each_byte = [&](auto change) {
        for (std::uint32_t i = 0; i < described.size(); ++i) {
          for (std::uint32_t part = 0; part < tensors.parts(tensor_id{i}).value().size(); ++part)
            change(i, part);
        }
      };
      if (const checkpoint_search search = find_checkpoint(storage); search.found) {
        load_into(storage, *search.found, described, tensors);
        step = search.found->id.step;
      } else {
        each_byte([&](std::uint32_t i, std::uint32_t part) {
          std::ranges::fill(tensors.write(tensor_id{i}, part).value().span(), std::byte{3});
        });
      }
      solo_coordinator coordinator(storage);
      struct traits : checkpointer_traits {
        using view_type = tiered_state_view<disk_buffer>;
      };
      async_checkpointer<traits> saves(coordinator, described, {.ring_bytes = 8 * page});
      std::uint64_t digest = 0;
      while (step < steps) {
        ++step;
        schedule.begin_iteration();
        {
          const mutation_permit permit = saves.gate().mutate();
          each_byte([&](std::uint32_t i, std::uint32_t part) {
            const auto lease = tensors.update(tensor_id{i}, part).value();
            for (std::byte& each : lease.span()) {
              digest = digest * 31 + std::to_integer<std::uint64_t>(each);
              each = static_cast<std::byte>(std::to_integer<std::uint64_t>(each) * 5 + step + i);
            }
          });
        }
        schedule.end_iteration();
        static_cast<void>(saves.begin_snapshot(step, tensors));
      }
      saves.flush();
      CHECK(saves.stats().failed == 0);
      return digest;
    };
    CHECK(train("whole", 6) != 0);
    for (std::uint64_t stop = 1; stop < 6; ++stop)
      static_cast<void>(train("parts", stop));
    CHECK(train("parts", 6) != 0);
    posix_storage<> one(folder.file("whole"));
    posix_storage<> other(folder.file("parts"));
    const found_checkpoint a = *find_checkpoint(one).found;
    const found_checkpoint b = *find_checkpoint(other).found;
    CHECK(a.id.step == 6);
    CHECK(b.id.step == 6);
    CHECK(a.manifest.files == b.manifest.files);  // their checksums among them
  }

  TEST_CASE(
      "a state that changes during a save is saved as it was, and an incremental save reports what did not "
      "change") {
    const std::vector<state_tensor> described = some_tensors();
    random_numbers random(8);
    const tensor_values values = random_values(random, described);
    engine one(described, {.group_bytes = page, .split_bytes = 2 * page});
    one.fill(values);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, described,
                       {.ring_bytes = 2 * page, .chunk_bytes = page, .full_every = 4});
    static_cast<void>(saves.begin_snapshot(1, one.tensors));
    saves.flush();
    const std::uint64_t before = saves.stats().persisted_bytes;
    {
      const snapshot_guard guard = saves.begin_snapshot(2, one.tensors);
      one.tensors.update(tensor_id{1}, 2).value().span()[5] ^= std::byte{1};
    }
    saves.flush();
    CHECK(load_newest(storage, {}).step == 2);
    engine next(described, {.group_bytes = page, .split_bytes = 3 * page});
    load_into(storage, *find_checkpoint(storage).found, described, next.tensors);
    CHECK(next.values() == values);
    CHECK(saves.stats().persisted_bytes - before < 2 * page);  // nothing had changed before it
    static_cast<void>(saves.begin_snapshot(3, one.tensors));
    saves.flush();
    load_into(storage, *find_checkpoint(storage).found, described, next.tensors);
    CHECK(next.values() == one.values());
    CHECK(saves.stats().committed == 3);
  }

  TEST_CASE("impossible input is reported: tensors that were never written, other numbers, other sizes") {
    const std::vector<state_tensor> described = some_tensors();
    random_numbers random(9);
    const tensor_values values = random_values(random, described);
    engine one(described, {.group_bytes = page, .split_bytes = 3 * page});
    CHECK(text_of([&] { const tiered_state_view<buffer_type> view(one.tensors); }) ==
          "tiered_state_view: tensor 0 was never written completely; write it, or leave it out");
    one.fill(values);
    CHECK(one.buffer.stats().shared == 0);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    std::vector<state_tensor> longer = described;
    longer[0].shape = {18};
    {
      checkpointer saves(coordinator, longer, {.ring_bytes = 2 * page, .chunk_bytes = page});
      const commit_ticket saved = saves.begin_snapshot(1, one.tensors).ticket();
      CHECK(saved.wait() == commit_status::not_committed);
      CHECK(saved.why().find("tensor 0 are described, but it has 68") != std::string::npos);
    }
    checkpointer saves(coordinator, described, {.ring_bytes = 2 * page, .chunk_bytes = page});
    static_cast<void>(saves.begin_snapshot(1, one.tensors));
    saves.flush();
    const found_checkpoint found = *find_checkpoint(storage).found;
    CHECK(text_of([&] { load_into(storage, found, longer, one.tensors); }) ==
          "load_into: tensor norm is described with 72 bytes, but tensor 0 has 68");
    CHECK(text_of([&] { load_into(storage, found, std::span(described).first(2), one.tensors); }) ==
          "load_into: 2 tensors are described, but the buffer has 5");
  }

  TEST_CASE("no tensor has unverified contents of a damaged checkpoint") {
    const std::vector<state_tensor> described = some_tensors();
    random_numbers random(10);
    const tensor_values values = random_values(random, described);
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{described};
    save_state(folder, 1, 512, ranks, values, {}, {});
    const found_checkpoint found = *find_checkpoint(storage).found;
    storage.flip(found.folder + "/model.safetensors", 8 * (4096 + 20'000));  // in "wte"
    engine one(described, {.group_bytes = 0, .split_bytes = page});
    CHECK_THROWS_AS(load_into(storage, found, described, one.tensors, {.window_bytes = 1}), format_error);
    CHECK_FALSE(one.tensors.has_contents(tensor_id{1}).value());
    for (std::uint32_t i = 0; i < described.size(); ++i) {
      for (std::uint32_t part = 0; i == 1 && part < one.tensors.parts(tensor_id{i}).value().size(); ++part)
        CHECK_FALSE(one.tensors.has_contents(tensor_id{i}, part).value());
    }
    CHECK(one.tensors.audit().empty());
    one.fill(values);  // no lease was left behind
  }

  TEST_CASE("the ring of a small state uses smaller chunks") {
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    const std::vector<state_tensor> described = some_tensors();
    const checkpointer saves(coordinator, described, {.ring_bytes = 64 << 10});
    CHECK(saves.stats().ring_bytes <= 64 << 10);
    CHECK(text_of([&] {
            const checkpointer none(coordinator, described, {.ring_bytes = 8191});
          }).ends_with("a ring of 8191 bytes for chunks of 4194304; it needs space for two of them"));
  }
}
