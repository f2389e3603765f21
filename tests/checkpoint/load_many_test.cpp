// Loading many tensors, and whose thread calls the sink.
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/error_text.hpp"
#include "support/small_checkpoint.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

/// A checkpoint of so many tensors of one element each, in one file of small chunks.
struct many_tensors {
  explicit many_tensors(std::uint32_t count, std::uint64_t chunk_bytes = 64) {
    random_numbers random(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      tensors.push_back({.name = "layer." + std::to_string(i % 7) + ".expert." + std::to_string(i),
                         .type = safetensors_type::u64,
                         .shape = {1},
                         .group = "model",
                         .part = {}});
      wanted.push_back({.name = tensors.back().name, .part = {}, .type = {}, .shape = {}});
    }
    values = random_values(random, tensors);
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{tensors};
    save_state(folder, 1, chunk_bytes, ranks, values, {}, {});
    found = *find_checkpoint(storage).found;
  }

  simulated_storage storage;
  std::vector<state_tensor> tensors{};
  tensor_values values{};
  std::vector<wanted_tensor> wanted{};
  found_checkpoint found{};
};

/// Puts bytes where they belong.
struct tensor_memory {
  explicit tensor_memory(const many_tensors& of) {
    for (const auto& each : of.values)
      values.emplace_back(each.size());
  }
  void operator()(std::uint32_t i, std::uint64_t offset, std::span<const std::byte> bytes) {
    std::memcpy(values[i].data() + offset, bytes.data(), bytes.size());
  }
  tensor_values values{};
};

}  // namespace

TEST_SUITE("load_checkpoint, of many tensors") {
  TEST_CASE("each chunk checks only the copies in it") {
    for (const std::uint32_t count : {500U, 2000U}) {
      many_tensors of(count);
      tensor_memory memory(of);
      const load_report report = load_checkpoint(of.storage, of.found, of.wanted, memory);
      CHECK(memory.values == of.values);
      const std::uint64_t chunks = of.found.manifest.files.at(0).chunks.size();
      CHECK(chunks > count / 10);
      CHECK(report.lookups <= count + chunks);  // a copy across two chunks is looked at by both
    }
  }

  TEST_CASE("a series of runs that spans others is found in each chunk that has a part of it") {
    // A column of a matrix, and one row: the runs of one lie between those of the other.
    random_numbers random(5);
    const std::vector<state_tensor> tensors{
        {.name = "w", .type = safetensors_type::u8, .shape = {40, 9}, .group = "model", .part = {}}};
    const tensor_values values = random_values(random, tensors);
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{tensors};
    save_state(folder, 1, 32, ranks, values, {}, {});
    const auto found = *find_checkpoint(storage).found;
    const element_runs column{3, 1, 9, 40};
    const element_runs row{18, 9, 9, 1};
    const std::vector<wanted_tensor> wanted{{.name = "w", .part = row, .type = {}, .shape = {}},
                                            {.name = "w", .part = column, .type = {}, .shape = {}}};
    std::vector<std::vector<std::byte>> got{std::vector<std::byte>(9), std::vector<std::byte>(40)};
    load_checkpoint(storage, found, wanted, [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
      std::memcpy(got[i].data() + offset, bytes.data(), bytes.size());
    });
    CHECK(got[0] == part_of(values[0], row, 8));
    CHECK(got[1] == part_of(values[0], column, 8));
  }

  TEST_CASE("a loader loads repeatedly, and reads each header once") {
    many_tensors of(300);
    checkpoint_loader loader(of.storage, of.found, {.verify = verification::sizes});
    std::uint64_t first_bytes = 0;
    for (std::uint32_t i = 0; i < of.wanted.size(); i += 10) {
      tensor_memory memory(of);
      const load_report report =
          loader.load(std::span(of.wanted).subspan(i, 1),
                      [&](std::uint32_t, std::uint64_t offset, auto bytes) { memory(i, offset, bytes); });
      CHECK(memory.values[i] == of.values[i]);
      if (i == 0) first_bytes = report.read_bytes;
      if (i != 0) CHECK(report.read_bytes == 8);
    }
    CHECK(first_bytes > 300 * 20);
    const wanted_tensor none[] = {{.name = "layer.7", .part = {}, .type = {}, .shape = {}}};
    CHECK(text_of([&] {
            loader.load(none, [](auto, auto, auto) {});
          }).ends_with("\"layer.7\" is not in this checkpoint"));
  }

  TEST_CASE("only the caller's thread calls the sink, regardless of the number of readers") {
    many_tensors of(400);
    for (const verification how : {verification::checksums, verification::sizes}) {
      for (const std::uint32_t readers : {1U, 2U, 7U}) {
        tensor_memory memory(of);
        const std::thread::id caller = std::this_thread::get_id();
        std::uint64_t others = 0;
        load_checkpoint(of.storage, of.found, of.wanted,
                        [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
                          others += std::this_thread::get_id() == caller ? 0U : 1U;
                          memory(i, offset, bytes);
                        },
                        {.verify = how, .readers = readers});
        CHECK(others == 0);
        CHECK(memory.values == of.values);
      }
    }
  }

  TEST_CASE("all readers call the sink if the caller allows it") {
    many_tensors of(400);
    tensor_memory memory(of);
    std::atomic<std::uint64_t> calls{0};
    load_checkpoint(of.storage, of.found, of.wanted,
                    [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
                      calls.fetch_add(1);
                      memory(i, offset, bytes);
                    },
                    {.sink = sink_calls::by_readers});
    CHECK(memory.values == of.values);
    CHECK(calls.load() >= 400);
  }

  TEST_CASE("exceptions of the sink and damage found by readers reach the caller") {
    many_tensors of(400);
    for (const sink_calls sink : {sink_calls::by_caller, sink_calls::by_readers}) {
      std::atomic<std::uint64_t> calls{0};
      CHECK_THROWS_AS(load_checkpoint(of.storage, of.found, of.wanted,
                                      [&](std::uint32_t, std::uint64_t, auto) {
                                        if (calls.fetch_add(1) == 100) throw std::runtime_error("no room");
                                      },
                                      {.sink = sink}),
                      std::runtime_error);
    }
    of.storage.flip(of.found.folder + "/model.safetensors", 8 * (of.found.manifest.files.at(0).bytes - 100));
    for (const sink_calls sink : {sink_calls::by_caller, sink_calls::by_readers})
      CHECK_THROWS_AS(
          load_checkpoint(of.storage, of.found, of.wanted, [](auto, auto, auto) {}, {.sink = sink}),
          format_error);
  }
}

TEST_SUITE("plan_files, of many groups") {
  TEST_CASE("each tensor is in its group's file, and the files are in the order of their first tensors") {
    std::vector<state_tensor> tensors;
    for (std::uint32_t i = 0; i < 300; ++i)
      tensors.push_back({.name = "t" + std::to_string(i),
                         .type = safetensors_type::u8,
                         .shape = {8},
                         .group = "g" + std::to_string(i * 7 % 100),
                         .part = {}});
    const file_plan plan = plan_files(tensors, {});
    REQUIRE(plan.files.size() == 100);
    for (std::uint32_t i = 0; i < 300; ++i) {
      REQUIRE(plan.tensors[i].pieces.size() == 1);
      CHECK(plan.files[plan.tensors[i].pieces[0].file].name == tensors[i].group + ".safetensors");
    }
    for (std::uint32_t i = 0; i < 100; ++i)
      CHECK(plan.files[i].name == tensors[i].group + ".safetensors");
  }

  TEST_CASE("a header that would be too long for readers is split into two files") {
    for (const bool has_part : {false, true}) {
      std::vector<state_tensor> tensors;
      for (std::uint32_t i = 0; i < 200; ++i) {
        // Names whose quotes and control characters take more in JSON.
        tensors.push_back({.name = std::string(i % 50, i % 3 == 0 ? '"' : '\1') + std::to_string(i),
                           .type = safetensors_type::f8_e8m0,
                           .shape = {1, i + 1, 1, 1, 3},
                           .group = "model",
                           .part = {}});
        if (has_part) tensors.back().part = element_runs::flat_range(1, i + 1);
      }
      for (const std::uint64_t most : {std::uint64_t{1}, std::uint64_t{5000}, std::uint64_t{20'000}}) {
        const file_plan plan = plan_files(tensors, {.data_alignment = 8, .max_header_bytes = most});
        std::uint64_t spans = 0;
        for (const planned_file& each : plan.files) {
          if (each.name.ends_with(".json")) continue;
          CHECK((each.head.size() <= most + 8 || each.spans.size() == 1));
          spans += each.spans.size();
        }
        CHECK(spans == tensors.size());
        CHECK(plan.files.size() <= 1 + (most == 1 ? 200 : 200 * 900 / most));
      }
    }
  }
}
