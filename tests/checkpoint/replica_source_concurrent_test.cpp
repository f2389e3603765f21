#include <llmmem/checkpoint/replica_source.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/comm_job.hpp"
#include "support/error_text.hpp"
#include "support/named_storage.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::process_killed;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using llmmem::testing::simulated_storage;

namespace {

constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint32_t seats = 3;
using ranks_of = communicator<sim_endpoint>;
using replica_of = redundant_replica<ranks_of>;
static_assert(recoverable_replica<replica_of>);
const checkpoint_world world{.ranks = 1, .files = 1, .file_bytes = 40, .write_bytes = 16};

void save_as(simulated_storage& storage, const checkpoint_id& id) {
  checkpoint_folder folder(storage);
  const checkpoint_draft draft = folder.begin_as(id);
  folder.commit(draft, write_rank(storage, world, draft, 0));
}

/// The folders of a job: one near each rank, and one for all.
struct folders {
  std::vector<simulated_storage> local{};
  simulated_storage durable{called("durable")};
  folders() {
    for (std::uint32_t i = 0; i < seats; ++i)
      local.push_back(simulated_storage(called("local" + std::to_string(i))));
  }
  void save_everywhere(const checkpoint_id& id) {
    for (simulated_storage& each : local)
      save_as(each, id);
  }
};

/// A process of a job that keeps one part a seat in its peers' memory.
struct process {
  ranks_of ranks;
  replica_of replica;
  folders* stored;

  process(sim_endpoint& end, folders& of, const char* scheme = "mirror:2")
      : ranks(end),
        replica(ranks, redundancy_scheme::parse(scheme), std::vector<std::uint64_t>(seats, 500),
                std::vector<seat_id>{seat_id{0}, seat_id{1}, seat_id{2}}),
        stored(&of) {
    ranks.join(ranks.after(20 * second)).value();
  }
  [[nodiscard]] simulated_storage& local() { return stored->local[to_index(ranks.endpoint().self())]; }
  [[nodiscard]] auto recovered(verification how = verification::checksums) {
    return recover(how, replica_source("peers", ranks, replica, ranks.after(60 * second)),
                   checkpoint_source("local", local()), checkpoint_source("durable", stored->durable));
  }
  [[nodiscard]] static std::vector<std::byte> part_at(part_id part, std::uint64_t version) {
    return bytes_of_seed(500, version * 10 + to_index(part));
  }
  void keep(std::uint64_t version) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<part_bytes> parts;
    for (const part_id part : replica.own_parts())
      bytes.push_back(part_at(part, version));
    for (const part_id part : replica.own_parts())
      parts.push_back({part, bytes[parts.size()]});
    replica.keep(version, parts, ranks.after(60 * second)).value();
    agree();
    replica.commit();
  }
  [[nodiscard]] bool has(std::uint64_t version) const {
    return std::ranges::all_of(replica.own_parts(), [&](part_id part) {
      return std::ranges::equal(replica.recovered(part), part_at(part, version));
    });
  }
  llmmem::comm::agreed agree() { return ranks.agree(1, ranks.after(300 * second)).value(); }
};

/// Three processes of a job; `body` for each.
template <class Body>
void in_threes(folders& of, Body body, const char* scheme = "mirror:2") {
  sim_network net({.seats = seats});
  net.run([&](sim_endpoint& end) {
    process self(end, of, scheme);
    body(self, end);
    static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
  });
}

}  // namespace

TEST_SUITE("replica_source") {
  TEST_CASE("a search of empty sources finds nothing, without an error") {
    folders of;
    in_threes(of, [](process& self, sim_endpoint&) {
      const auto recovered = self.recovered();
      CHECK_FALSE(recovered.found);
      CHECK_FALSE(recovered.version);
      CHECK(recovered.message() == "no checkpoint");
    });
  }

  TEST_CASE("the newer of memory and file counts") {
    folders of;
    of.save_everywhere({100, 1});
    in_threes(of, [&](process& self, sim_endpoint& end) {
      const auto first = self.recovered();
      CHECK_FALSE(first.version);
      REQUIRE(first.found);
      CHECK(first.name == "local");
      self.keep(120);
      const auto memory = self.recovered();
      CHECK(memory.version == 120U);
      CHECK_FALSE(memory.found);
      CHECK(memory.message() == "peers: version 120");
      CHECK(self.has(120));
      self.agree();
      if (end.self() == seat_id{0}) save_as(of.durable, {120, 2});
      self.agree();
      CHECK(self.recovered().version == 120U);  // as new: what is faster
      self.agree();
      if (end.self() == seat_id{0}) save_as(of.durable, {130, 3});
      self.agree();
      const auto file = self.recovered();
      CHECK_FALSE(file.version);
      REQUIRE(file.found);
      CHECK(file.found->id == checkpoint_id{130, 3});
      CHECK(file.visit([](auto& storage) { return &storage; }) == &of.durable);
      CHECK(file.message() == "durable: step-0000000130-g00000003");
    });
  }

  TEST_CASE("parts are restored to the engine's memory, and the engine is asked for nothing else") {
    folders of;
    of.save_everywhere({100, 1});
    in_threes(of, [&](process& self, sim_endpoint& end) {
      std::vector<std::vector<std::byte>> destinations(seats, std::vector<std::byte>(500));
      std::vector<part_id> asked;
      replica_into kept(self.replica, [&](part_id part) {
        asked.push_back(part);
        return std::span(destinations[to_index(part)]);
      });
      const auto found = [&] {
        return recover(verification::checksums,
                       replica_source("peers", self.ranks, kept, self.ranks.after(60 * second)),
                       checkpoint_source("local", self.local()));
      };
      CHECK(found().found);
      CHECK(asked.empty());
      self.keep(120);
      if (end.self() == seat_id{1}) self.replica.forget();  // as a fresh process
      CHECK(found().version == 120U);
      CHECK(asked == self.replica.own_parts());
      CHECK(self.has(120));
      for (const part_id part : asked)
        CHECK(self.replica.recovered(part).data() == destinations[to_index(part)].data());
      kept.forget();
      CHECK(found().found);
    });
  }

  TEST_CASE("for a run that went back, its newest checkpoint counts, not the one of the highest step") {
    folders of;
    of.save_everywhere({100, 1});
    of.save_everywhere({60, 2});
    in_threes(of, [](process& self, sim_endpoint&) {
      REQUIRE(self.recovered().found);
      self.keep(65);
      CHECK(self.recovered().version == 65U);
    });
  }

  TEST_CASE(
      "if a rank dies, its part comes from memory; if too many die, all load a file and memory is "
      "forgotten") {
    for (const bool both : {false, true}) {
      CAPTURE(both);
      folders of;
      of.save_everywhere({100, 1});
      in_threes(of, [both](process& self, sim_endpoint& end) {
        REQUIRE(self.recovered().found);
        self.keep(120);
        self.agree();
        if (end.self() == seat_id{2} || (both && end.self() == seat_id{1})) throw process_killed{};
        end.work(second);
        self.ranks.shrink(self.agree());
        const auto recovered = self.recovered();
        if (!both) {
          CHECK(recovered.version == 120U);
          CHECK(self.has(120));
          return;
        }
        CHECK_FALSE(recovered.version);
        REQUIRE(recovered.found);
        CHECK(recovered.found->id.step == 100);
        CHECK_FALSE(self.replica.version());
        CHECK(recovered.message().rfind("local: step-0000000100-g00000001; passed over peers: ", 0) == 0);
      });
    }
  }

  TEST_CASE(
      "ranks take the newest checkpoint that is complete on each in any source, as a search by hand does") {
    std::uint64_t found = 0;
    std::uint64_t partial = 0;
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      folders of;
      std::optional<checkpoint_id> newest;
      for (std::uint64_t generation = 1; generation <= 5; ++generation) {
        const checkpoint_id id{generation * 10, generation};
        bool on_all = true;
        const bool is_durable = random.once_in(3);
        const bool is_damaged = random.once_in(2);
        if (is_durable) save_as(of.durable, id);
        if (is_durable && is_damaged) of.durable.flip(folder_name(id) + "/rank0-0.bin", 100);
        for (simulated_storage& local : of.local) {
          const bool is_there = !random.once_in(5);
          const bool breaks = random.once_in(6);
          if (is_there) save_as(local, id);
          if (is_there && breaks) local.flip(folder_name(id) + "/rank0-0.bin", 100);
          on_all = on_all && ((is_there && !breaks) || (is_durable && !is_damaged));
        }
        if (on_all) newest = id;
        if (!on_all) ++partial;
      }
      found += newest ? 1U : 0U;
      in_threes(of, [&](process& self, sim_endpoint&) {
        const auto recovered = self.recovered();
        CHECK(recovered.found.has_value() == newest.has_value());
        if (newest && recovered.found) {
          CHECK(recovered.found->id == *newest);
          recovered.visit([&](auto& storage) { CHECK(has_its_bytes(storage, world, *recovered.found)); });
        }
      });
    }
    CHECK(found > 20);
    CHECK(partial > 20);
  }

  TEST_CASE("a checkpoint that others cannot load is recorded with the reason") {
    folders of;
    of.save_everywhere({10, 1});
    of.save_everywhere({20, 2});
    save_as(of.local[0], {30, 3});
    of.local[1].flip("step-0000000020-g00000002/rank0-0.bin", 100);
    in_threes(of, [](process& self, sim_endpoint& end) {
      const auto recovered = self.recovered();
      const std::string text =
          "local: step-0000000010-g00000001; passed over local: step-0000000020-g00000002: ";
      if (end.self() == seat_id{0}) {
        CHECK(recovered.message() ==
              text +
                  "rank 1 cannot load it; passed over local: step-0000000030-g00000003: "
                  "not all ranks have it");
        CHECK(recovered.skipped[0].what == skip_reason::not_everywhere);
      }
      if (end.self() == seat_id{1}) CHECK(recovered.skipped[0].what == skip_reason::damaged);
      if (end.self() == seat_id{2}) CHECK(recovered.message() == text + "rank 1 cannot load it");
    });
  }

  TEST_CASE("ranks with different contents under one name take neither") {
    folders of;
    of.save_everywhere({10, 1});
    save_as(of.local[0], {20, 2});
    save_as(of.local[1], {20, 2});
    {
      checkpoint_folder folder(of.local[2]);
      const checkpoint_draft draft = folder.begin_as({20, 2});
      folder.commit(draft, write_rank(of.local[2], {.ranks = 1, .files = 2}, draft, 0));
    }
    in_threes(of, [](process& self, sim_endpoint&) {
      CHECK(self.recovered().message() ==
            "local: step-0000000010-g00000001; passed over local: step-0000000020-g00000002: ranks have "
            "different contents under that name: these belong to different runs");
    });
  }

  TEST_CASE(
      "a rank that cannot read a possibly complete checkpoint stops all ranks: none takes an older one") {
    folders of;
    of.save_everywhere({10, 1});
    of.save_everywhere({20, 2});
    of.local[1].set_faults({{.call = storage_call::open, .every = 1, .count = 100}});
    in_threes(of, [](process& self, sim_endpoint&) {
      try {
        static_cast<void>(self.recovered());
        FAIL_CHECK("an older one was taken");
      } catch (const unreadable_checkpoint& error) {
        CHECK(std::string(error.what())
                  .starts_with("recover: rank 1: step-0000000020-g00000002 cannot be read now"));
      }
    });
    of.local[1].set_faults({{.call = storage_call::open, .every = 1, .count = 2}});
    in_threes(of, [](process& self, sim_endpoint&) { CHECK(self.recovered().found->id.step == 20); });
  }

  TEST_CASE("a rank that can list no source stops all ranks, unless memory has the state") {
    folders of;
    of.save_everywhere({10, 1});
    in_threes(of, [&](process& self, sim_endpoint& end) {
      self.replica.recover(self.ranks.after(60 * second)).value();
      const auto blind = [&] {
        if (end.self() == seat_id{1}) {
          self.local().set_faults({{.call = storage_call::list, .every = 1, .count = 100}});
          of.durable.set_faults({{.call = storage_call::list, .every = 1, .count = 100}});
        }
        self.agree();
      };
      blind();
      const std::string text = text_of([&] { static_cast<void>(self.recovered()); });
      const std::string blind_text = "recover: no source can be listed on rank 1";
      const std::string why = ": the folder cannot be listed: Input/output error; a planned fault";
      const std::string of_one = end.self() == seat_id{1} ? "; local: local1" + why : "";
      CHECK(text == blind_text + of_one + "; durable: durable" + why);
      self.keep(20);
      CHECK(self.recovered().version == 20U);
    });
  }

  TEST_CASE(
      "regardless of which rank dies in which call, the others learn it, agree, and get the same result") {
    std::uint64_t max_calls = 0;
    for (std::uint32_t victim = 0; victim < seats; ++victim) {
      for (std::uint64_t call = 0; call == 0 || call < max_calls; ++call) {
        CAPTURE(victim);
        CAPTURE(call);
        folders of;
        of.save_everywhere({10, 1});
        of.save_everywhere({20, 2});
        of.local[1].flip("step-0000000020-g00000002/rank0-0.bin", 100);
        sim_network net({.seats = seats, .seed = call + 1});
        if (call != 0) net.kill_in_call(seat_id{victim}, call);
        std::vector<std::uint64_t> steps(seats, 0);
        std::vector<bool> joined(seats, false);
        net.run([&](sim_endpoint& end) {
          ranks_of ranks(end);
          if (!ranks.join(ranks.after(20 * second))) return;
          joined[to_index(end.self())] = true;
          no_replica none;
          for (;;) {
            std::uint64_t step = 0;
            try {
              const auto recovered = recover(verification::checksums,
                                             replica_source("none", ranks, none, ranks.after(20 * second)),
                                             checkpoint_source("local", of.local[to_index(end.self())]));
              step = recovered.found ? recovered.found->id.step : 0;
            } catch (const comm_error&) {
            }
            const llmmem::comm::agreed outcome =
                ranks.agree(step == 0 ? 0 : 1, ranks.after(100 * second)).value();
            steps[to_index(end.self())] = step;
            if (outcome.bits == 1) return;
            ranks.shrink(outcome);
          }
        });
        for (std::uint32_t i = 0; i < seats; ++i) {
          if (call == 0) max_calls = std::max(max_calls, net.calls(seat_id{i}));
          if (net.was_killed(seat_id{i}) || !joined[i]) continue;
          CHECK((steps[i] == 10 || steps[i] == 20));
          for (std::uint32_t other = 0; other < seats; ++other) {
            if (!net.was_killed(seat_id{other}) && joined[other]) CHECK(steps[other] == steps[i]);
          }
        }
      }
    }
    CHECK(max_calls > 10);
  }
}
