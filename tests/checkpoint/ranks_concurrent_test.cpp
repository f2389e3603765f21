// Threads stand for processes: each has a storage, a coordinator and a checkpointer of its own.
#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/rank_state.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// A view that fails when it is told to, as a device might.
struct fragile_view {
  static constexpr bool is_concurrent = true;
  host_state_view inner;
  bool fails = false;

  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    if (fails) throw std::runtime_error("the device is lost");
    inner.copy_out(tensor, offset, into);
  }
};

struct traits : checkpointer_traits {
  using coordinator_type = file_coordinator<storage_type>;
  using view_type = fragile_view;
};

const std::vector<state_tensor> catalogue = {
    {.name = "weight", .shape = {300, 257}, .part = {}},
    {.name = "bias", .shape = {257}, .part = {}},
    {.name = "moment", .shape = {300, 257}, .group = "optimizer", .part = {}},
};

/// What element `i` of a tensor is after a step.
float value(std::uint64_t step, std::size_t tensor, std::uint64_t i) {
  return static_cast<float>(step * 1000 + tensor * 100 + i % 97);
}

/// What one rank saw of a checkpoint.
struct seen {
  commit_status status = commit_status::pending;
  std::string why{};
  std::uint64_t generation = 0;
};

file_coordinator_options quick(std::uint32_t rank, std::uint32_t world) {
  using namespace std::chrono_literals;
  return {.rank = rank,
          .world = world,
          .join_within = 60s,
          .begin_within = 60s,
          .commit_within = 60s,
          .poll = 1ms};
}

/// A rank's run: steps 1 to `steps`, each saved; its state is held whole (`replicated`) or in part.
template <partition P>
std::vector<seen> train(const std::string& folder, const P& split, std::uint32_t rank, std::uint64_t steps,
                        std::uint64_t fails_at) {
  const std::uint32_t world = to_number(split.world());
  posix_storage<> storage(folder);
  file_coordinator<posix_storage<>> coordinator(storage, quick(rank, world), {.last = 100});
  const std::vector<state_tensor> saved = rank_state(catalogue, split, rank_id{rank});
  async_checkpointer<traits> checkpointer(coordinator, saved,
                                          {.ring_bytes = 1 << 18, .chunk_bytes = 1 << 15});
  std::vector<std::vector<float>> held;
  std::vector<std::span<const std::byte>> spans;
  for (std::uint32_t t = 0; t < catalogue.size(); ++t) {
    const element_runs local = split.local(tensor_id{t}, rank_id{rank});
    held.emplace_back(static_cast<std::size_t>(local.elements()));
    const element_runs all = element_runs::all_of(tensor_shape::of(catalogue[t].shape).elements());
    const index_range range = range_within(local, saved[t].part.value_or(all)).value();
    spans.push_back(std::as_bytes(std::span(held[t]).subspan(static_cast<std::size_t>(range.first),
                                                             static_cast<std::size_t>(range.count))));
  }
  std::vector<commit_ticket> tickets;
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const auto update = [&](mutation_permit) {
      for (std::uint32_t t = 0; t < catalogue.size(); ++t) {
        const element_runs local = split.local(tensor_id{t}, rank_id{rank});
        for (std::uint64_t i = 0; i < held[t].size(); ++i)
          held[t][static_cast<std::size_t>(i)] = value(step, t, local.element_at(i));
      }
    };
    update(checkpointer.gate().mutate());
    const std::uint64_t own = step * 10 + rank;
    std::vector<std::byte> extra(sizeof own);
    std::memcpy(extra.data(), &own, sizeof own);
    const snapshot_guard guard = checkpointer.begin_snapshot(
        step, {host_state_view(spans), step == fails_at && rank == 1}, {{"position", std::move(extra)}});
    tickets.push_back(guard.ticket());
  }
  std::vector<seen> all;
  for (const commit_ticket& each : tickets) {
    const commit_status status = each.wait();
    all.push_back({status, each.why(), each.generation()});
  }
  return all;
}

template <partition P>
std::vector<std::vector<seen>> train_all(const std::string& folder, const P& split, std::uint64_t steps,
                                         std::uint64_t fails_at = 0) {
  std::vector<std::vector<seen>> all(to_number(split.world()));
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        all[rank] = train(folder, split, rank, steps, fails_at);
      } catch (const std::exception& failure) {
        all[rank] = {{commit_status::not_committed, failure.what(), 0}};
      }
    });
  }
  for (std::thread& each : threads)
    each.join();
  return all;
}

/// Whether a checkpoint has every tensor as it was after its step, and what each rank added.
std::string what_is_wrong(const std::string& folder, const found_checkpoint& found, std::uint32_t world) {
  posix_storage<> storage(folder);
  std::vector<wanted_tensor> wanted;
  std::vector<std::vector<float>> got;
  for (const state_tensor& each : catalogue) {
    wanted.push_back({.name = each.name, .type = each.type, .shape = each.shape});
    got.emplace_back(static_cast<std::size_t>(tensor_shape::of(each.shape).elements()));
  }
  load_checkpoint(
      storage, found, wanted, [&](std::uint32_t t, std::uint64_t offset, std::span<const std::byte> bytes) {
        std::memcpy(reinterpret_cast<std::byte*>(got[t].data()) + offset, bytes.data(), bytes.size());
      });
  for (std::size_t t = 0; t < got.size(); ++t) {
    for (std::size_t i = 0; i < got[t].size(); ++i) {
      if (got[t][i] != value(found.id.step, t, i)) return "an element differs";
    }
  }
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const auto extra = load_extra(storage, found, rank, "position");
    if (!extra || extra->size() != sizeof(std::uint64_t)) return "an extra is missing";
    std::uint64_t own = 0;
    std::memcpy(&own, extra->data(), sizeof own);
    if (own != found.id.step * 10 + rank) return "an extra differs";
  }
  return "";
}

}  // namespace

TEST_SUITE("ranks, each in a thread") {
  TEST_CASE("three ranks save their parts several times, and all of it is there") {
    const std::vector<tensor_facts> facts = facts_of(catalogue);
    const auto check = [&](const auto& split) {
      const temporary_folder folder;
      const auto all = train_all(folder.file("run"), split, 4);
      for (const auto& rank : all) {
        REQUIRE(rank.size() == 4);
        for (std::size_t i = 0; i < 4; ++i) {
          CHECK(rank[i].status == commit_status::committed);
          CHECK(rank[i].why == "");
          CHECK(rank[i].generation == i + 1);
        }
      }
      posix_storage<> storage(folder.file("run"));
      const std::vector<checkpoint_id> ids = list_checkpoints(storage);
      CHECK(ids.size() == 4);
      for (const checkpoint_id& id : ids)
        CHECK(what_is_wrong(folder.file("run"), open_checkpoint(storage, id, verification::checksums), 3) ==
              "");
    };
    check(llmmem::sharding::replicated(facts, rank_count{3}));
    check(flat_uneven::even(facts, rank_count{3}));
  }

  TEST_CASE("when one rank fails, all ranks learn it at once, and the next checkpoints work") {
    const temporary_folder folder;
    const llmmem::sharding::replicated split(facts_of(catalogue), rank_count{3});
    const auto began = std::chrono::steady_clock::now();
    const auto all = train_all(folder.file("run"), split, 4, 2);
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(50));  // not by the deadline
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      CAPTURE(rank);
      REQUIRE(all[rank].size() == 4);
      for (std::size_t i = 0; i < 4; ++i)
        CHECK(all[rank][i].status == (i == 1 ? commit_status::not_committed : commit_status::committed));
      CHECK(all[rank][1].why.find("the device is lost") != std::string::npos);
      CHECK((rank == 1 || all[rank][1].why.find("rank 1 stopped it") != std::string::npos));
    }
    posix_storage<> storage(folder.file("run"));
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->id.step == 4);
    CHECK(what_is_wrong(folder.file("run"), *search.found, 3) == "");
    CHECK(list_checkpoints(storage).size() == 3);
  }
}
