#include <llmmem/comm/communicator.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::job_end;
using llmmem_tests::job_history;
using llmmem_tests::job_options;
using llmmem_tests::run_job;

using ranks_of = communicator<sim_endpoint>;
constexpr std::uint64_t millisecond = 1'000'000;
constexpr std::uint64_t second = 1'000'000'000;

/// The ends of a job's processes, by seat, then incarnation.
using job_ends = std::vector<std::vector<job_end>>;

job_ends run_in(sim_network& net, std::uint32_t seats, job_history& history, const job_options& options = {},
                std::uint64_t work_ns = 0) {
  job_ends ends(seats, std::vector<job_end>(8));
  net.run([&](sim_endpoint& end) {
    ends[to_index(end.self())][end.incarnation()] = run_job(end, history, options, [&](std::uint64_t) {
      if (work_ns != 0) end.work(work_ns);
    });
  });
  return ends;
}

}  // namespace

TEST_SUITE("communicator") {
  TEST_CASE("ranks pass messages round a ring") {
    sim_network net({.seats = 4});
    net.run([](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(10 * second)).value();
      const std::uint32_t world = to_number(ranks.world());
      const std::uint32_t self = to_index(ranks.rank());
      const rank_id next{(self + 1) % world};
      const rank_id before{(self + world - 1) % world};
      for (std::uint32_t i = 0; i < 5; ++i) {
        const auto out = bytes_of_seed(std::size_t{1} << (4 * i), self + 10 * i);
        std::vector<std::byte> in(out.size());
        ranks.exchange(out, next, in, before, i, ranks.after(10 * second)).value();
        CHECK(in == bytes_of_seed(in.size(), to_index(before) + 10 * i));
      }
      ranks.agree(1, ranks.after(second)).value();
    });
  }

  TEST_CASE("whoever dies at whatever call, the others end with the state of a run in which nobody died") {
    constexpr std::uint32_t seats = 3;
    std::uint64_t most_calls = 0;
    {
      sim_network net({.seats = seats});
      job_history history;
      static_cast<void>(run_in(net, seats, history, {.steps = 3}));
      for (std::uint32_t i = 0; i < seats; ++i)
        most_calls = std::max(most_calls, net.calls(seat_id{i}));
    }
    CHECK(most_calls > 20);
    for (std::uint32_t victim = 0; victim < seats; ++victim) {
      for (std::uint64_t call = 0; call < most_calls; ++call) {
        CAPTURE(victim);
        CAPTURE(call);
        sim_network net({.seats = seats, .seed = call});
        net.kill_in_call(seat_id{victim}, call);
        job_history history;
        const job_ends ends = run_in(net, seats, history, {.steps = 3});
        bool is_formed = false;
        for (const auto& each : ends)
          is_formed = is_formed || each[0].is_through;
        for (std::uint32_t i = 0; i < seats; ++i) {
          if (net.was_killed(seat_id{i})) continue;
          // One that died before all had met leaves nobody to begin with.
          CHECK((ends[i][0].is_through || (!is_formed && ends[i][0].is_fresh)));
        }
        CHECK_FALSE(history.has_split());
      }
    }
  }

  TEST_CASE("several die, some come back and are admitted, and all that are left end with the same state") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 4);
      sim_network net({.seats = seats, .seed = seed, .frame_bytes = random() % 2 == 0 ? 4096U : 5000U});
      std::uint32_t killed = 0;
      for (std::uint32_t i = 0; i < seats; ++i) {
        if (random() % 2 == 0 || killed + 1 == seats) continue;
        ++killed;
        if (random() % 2 == 0) net.restart_after(seat_id{i}, random() % (100 * millisecond));
        if (random() % 2 == 0) {
          net.kill_in_call(seat_id{i}, 12 + random() % 120);
        } else {
          net.kill_at(seat_id{i}, 2 * millisecond + random() % (60 * millisecond));
        }
      }
      job_history history;
      const job_ends ends = run_in(net, seats, history, {.steps = 12}, 2 * millisecond);
      bool is_formed = false;
      for (const auto& each : ends) {
        for (const job_end& one : each)
          is_formed = is_formed || one.is_through;
      }
      for (std::uint32_t i = 0; i < seats; ++i) {
        CAPTURE(i);
        if (!net.was_killed(seat_id{i}))
          CHECK((ends[i][0].is_through || (!is_formed && ends[i][0].is_fresh)));
      }
      CHECK_FALSE(history.has_split());
    }
  }

  TEST_CASE(
      "a job that is cut in two goes on in one half at most, and one that stands still is left behind") {
    std::uint64_t left_behind = 0;
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 4);
      sim_network net({.seats = seats, .seed = seed});
      if (random() % 2 == 0) {
        seat_set group;
        for (std::uint32_t i = 0; i < seats; ++i) {
          if (random() % 2 == 0) group.insert(seat_id{i});
        }
        const std::uint64_t from = 3 * millisecond + random() % (20 * millisecond);
        net.part(group, from, from + random() % (3 * second));
      } else {
        const std::uint64_t from = 3 * millisecond + random() % (20 * millisecond);
        net.stop(seat_id{static_cast<std::uint32_t>(random() % seats)}, from, from + random() % (3 * second));
      }
      if (random() % 3 == 0)
        net.kill_in_call(seat_id{static_cast<std::uint32_t>(random() % seats)}, 12 + random() % 80);
      job_history history;
      const job_ends ends = run_in(net, seats, history, {.steps = 12}, 2 * millisecond);
      CHECK_FALSE(history.has_split());
      for (const auto& each : ends)
        left_behind += each[0].has_lost_quorum ? 1U : 0U;
    }
    CHECK(left_behind > 30);
  }
}
