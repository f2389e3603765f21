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

/// Two ranks that have joined, and end together.
template <class Body>
void in_pairs(const communicator_options& options, Body body) {
  for (const auto seed : llmmem_tests::seeds(5)) {
    CAPTURE(seed);
    sim_network net({.seats = 2, .seed = seed});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end, options);
      ranks.join(ranks.after(second)).value();
      body(ranks, rank_id{1 - to_index(ranks.rank())});
      ranks.agree(0, ranks.after(second)).value();
    });
  }
}

std::vector<std::byte> received(ranks_of& ranks, rank_id from, std::uint32_t tag, std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  ranks.recv(made, from, tag, ranks.after(second)).value();
  return made;
}

void end_of_a_while(ranks_of& ranks) {
  ranks.endpoint().work(millisecond);
  ranks.poll();
}

}  // namespace

TEST_SUITE("communicator") {
  TEST_CASE("ranks pass messages around a ring") {
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

  TEST_CASE(
      "regardless of which rank dies in which call, the others end with the state of a run without deaths") {
    constexpr std::uint32_t seats = 3;
    std::uint64_t max_calls = 0;
    {
      sim_network net({.seats = seats});
      job_history history;
      static_cast<void>(run_in(net, seats, history, {.steps = 3}));
      for (std::uint32_t i = 0; i < seats; ++i)
        max_calls = std::max(max_calls, net.calls(seat_id{i}));
    }
    CHECK(max_calls > 20);
    for (std::uint32_t victim = 0; victim < seats; ++victim) {
      for (std::uint64_t call = 0; call < max_calls; ++call) {
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

  TEST_CASE(
      "several ranks die, some return and are admitted, and all remaining ranks end with the same state") {
    std::uint64_t admitted = 0;
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 4);
      sim_network net({.seats = seats, .seed = seed, .frame_bytes = random() % 2 == 0 ? 4096U : 5000U});
      std::uint32_t killed = 0;
      for (std::uint32_t i = 0; i < seats; ++i) {
        if (random() % 2 == 0 || killed + 1 == seats) continue;
        ++killed;
        if (random() % 2 == 0) net.restart_after(seat_id{i}, random() % (10 * millisecond));
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
      for (const auto& each : ends)
        admitted += each[1].is_through ? 1U : 0U;
    }
    CHECK(admitted > 30);
  }

  TEST_CASE("a job that is cut in two continues in at most one half, and a stopped rank is left behind") {
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

  TEST_CASE("ranks receive messages by tag in any order, and those of one tag in the order of sending") {
    in_pairs({}, [](ranks_of& ranks, rank_id other) {
      const deadline by = ranks.after(second);
      if (to_index(ranks.rank()) == 0) {
        for (const std::uint32_t tag : {5U, 6U, 5U, 7U})
          ranks.send(bytes_of_seed(100 * tag, tag), other, tag, by).value();
        ranks.send({}, other, 9, by).value();
        ranks.send(bytes_of_seed(3, 55), other, 5, by).value();
      } else {
        CHECK(received(ranks, other, 7, 700) == bytes_of_seed(700, 7));
        CHECK(received(ranks, other, 9, 0).empty());
        CHECK(received(ranks, other, 5, 500) == bytes_of_seed(500, 5));
        CHECK(received(ranks, other, 5, 500) == bytes_of_seed(500, 5));
        CHECK(ranks.stats().early_bytes == 600 + comm::early_message_bytes);
        CHECK(received(ranks, other, 6, 600) == bytes_of_seed(600, 6));
        CHECK(received(ranks, other, 5, 3) == bytes_of_seed(3, 55));
        CHECK(ranks.stats().early_bytes == 0);
        CHECK(ranks.traffic(ranks.seat_of(other)).received_bytes == 2303);
        CHECK(ranks.traffic(ranks.seat_of(other)).received_messages == 6);
      }
    });
  }

  TEST_CASE("early messages beyond the budget wait, and are there when the rank receives them") {
    in_pairs({.early_bytes = 10'000}, [](ranks_of& ranks, rank_id other) {
      const deadline by = ranks.after(second);
      if (to_index(ranks.rank()) == 0) {
        ranks.send(bytes_of_seed(9000, 1), other, 1, by).value();
        ranks.send(bytes_of_seed(100'000, 2), other, 2, by).value();  // more than may wait anywhere
        ranks.send(bytes_of_seed(2000, 3), other, 3, by).value();
      } else {
        // In the way of what is asked for, and too much to be put aside: that is no hang.
        std::vector<std::byte> bytes(2000);
        const auto stuck = ranks.recv(bytes, other, 3, ranks.after(10 * millisecond));
        CHECK(stuck.error() == failure{errc::peer_timed_out, 0, 2000, 0});
        CHECK(ranks.stats().early_bytes == 9000 + comm::early_message_bytes);
        CHECK(ranks.probe(other, 2, by).value() == 100'000);
        CHECK(received(ranks, other, 2, 100'000) == bytes_of_seed(100'000, 2));
        CHECK(received(ranks, other, 3, 2000) == bytes_of_seed(2000, 3));
        CHECK(received(ranks, other, 1, 9000) == bytes_of_seed(9000, 1));
      }
    });
  }

  TEST_CASE("a message of the wrong length is refused with both lengths, and the next one arrives") {
    in_pairs({}, [](ranks_of& ranks, rank_id other) {
      const deadline by = ranks.after(second);
      if (to_index(ranks.rank()) == 0) {
        for (std::uint32_t i = 0; i < 2; ++i) {
          for (int copy = 0; copy < 3; ++copy)
            ranks.send(bytes_of_seed(12'000, 1), other, 1, by).value();
          ranks.send(bytes_of_seed(50, 2), other, 1, by).value();
          std::byte go{};
          ranks.recv({&go, 1}, other, 0, by).value();
        }
      } else {
        for (std::uint32_t i = 0; i < 2; ++i) {
          if (i == 1) end_of_a_while(ranks);  // then they are in store
          for (const std::size_t asked : {11'999U, 12'001U, 0U}) {
            std::vector<std::byte> bytes(asked);
            CHECK(ranks.recv(bytes, other, 1, by).error() == failure{errc::size_mismatch, 0, asked, 12'000});
          }
          CHECK(received(ranks, other, 1, 50) == bytes_of_seed(50, 2));
          ranks.send(bytes_of_seed(1, 0), other, 0, by).value();
        }
      }
    });
  }

  TEST_CASE("a wait ends at its deadline and reports its progress, and a half-lost message harms no other") {
    in_pairs({}, [](ranks_of& ranks, rank_id other) {
      if (to_index(ranks.rank()) == 0) {
        // Fills the lane, and waits for who does not listen.
        const auto stuck = ranks.send(bytes_of_seed(50'000, 1), other, 1, ranks.after(5 * millisecond));
        REQUIRE(stuck.code() == errc::peer_timed_out);
        CHECK(stuck.error().wanted == 50'000);
        CHECK(stuck.error().found >= 4096);
        CHECK(stuck.error().found < 50'000);
        ranks.send(bytes_of_seed(60'000, 2), other, 1, ranks.after(second)).value();
        // And what nobody asks for any more.
        ranks.send(bytes_of_seed(3000, 3), other, 2, ranks.after(second)).value();
      } else {
        ranks.endpoint().work(20 * millisecond);
        const std::uint64_t before = ranks.endpoint().now_ns();
        std::vector<std::byte> nothing(8);
        const auto none = ranks.recv(nothing, other, 4, ranks.after(millisecond));
        CHECK(none.error() == failure{errc::peer_timed_out, 0, 8, 0});
        CHECK(ranks.endpoint().now_ns() >= before + millisecond);
        CHECK(received(ranks, other, 1, 60'000) == bytes_of_seed(60'000, 2));
        CHECK(received(ranks, other, 2, 3000) == bytes_of_seed(3000, 3));
      }
    });
  }

  TEST_CASE("a rank may send to itself, and never waits for a rank that does not exist") {
    in_pairs({.early_bytes = 100 + 2 * comm::early_message_bytes}, [](ranks_of& ranks, rank_id) {
      const deadline by = ranks.after(second);
      const rank_id self = ranks.rank();
      ranks.send(bytes_of_seed(60, 1), self, 1, by).value();
      CHECK(ranks.send(bytes_of_seed(60, 2), self, 1, by).error() ==
            failure{errc::out_of_bytes, to_index(self), 60, 40});
      CHECK(received(ranks, self, 1, 60) == bytes_of_seed(60, 1));
      std::vector<std::byte> bytes(60);
      CHECK(ranks.recv(bytes, self, 1, by).error() == failure{errc::peer_timed_out, to_index(self), 60, 0});
      ranks.exchange(bytes_of_seed(60, 3), self, bytes, self, 2, by).value();
      CHECK(bytes == bytes_of_seed(60, 3));
      CHECK(ranks.send({}, rank_id{2}, 1, by).error() == failure{errc::out_of_range, 2, 2, 1});
      CHECK(ranks.recv({}, rank_id{7}, 1, by).error() == failure{errc::out_of_range, 7, 7, 1});
    });
  }

  TEST_CASE("a damaged message is an error, none of its bytes are accepted, and the next message arrives") {
    std::uint64_t damaged = 0;
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      sim_network net({.seats = 2, .seed = seed, .corrupts_one_in = 5});
      std::uint64_t told = 0;
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end, {.check = llmmem::comm::payload_check::crc32c});
        ranks.join(ranks.after(second)).value();
        const deadline by = ranks.after(second);
        const rank_id other{1 - to_index(ranks.rank())};
        for (std::uint32_t i = 0; i < 20; ++i) {
          if (to_index(ranks.rank()) == 0) {
            ranks.send(bytes_of_seed(500 * i + 1, i), other, i % 3, by).value();
            continue;
          }
          std::vector<std::byte> bytes(500 * i + 1);
          const auto came = ranks.recv(bytes, other, i % 3, by);
          if (came) CHECK(bytes == bytes_of_seed(bytes.size(), i));
          if (!came) CHECK(came.code() == errc::message_damaged);
          if (!came) CHECK(came.error().wanted != came.error().found);
          told += came ? 0U : 1U;
        }
        ranks.agree(0, by).value();
      });
      CHECK(told > 0);
      CHECK(told <= net.frames_corrupted());
      damaged += told;
    }
    CHECK(damaged > 40);
  }

  TEST_CASE(
      "a rank that waits for a live rank learns by a revoke that another rank has died, long before the "
      "deadline") {
    sim_network net({.seats = 3, .max_notice_ns = millisecond});
    net.kill_at(seat_id{2}, 5 * millisecond);
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      std::vector<std::byte> bytes(100);
      if (end.self() == seat_id{2}) {
        end.work(second);
        return;
      }
      const bool meets_it = end.self() == seat_id{1};
      const auto came = ranks.recv(bytes, rank_id{meets_it ? 2U : 1U}, 1, ranks.after(1000 * second));
      CHECK(came.code() == (meets_it ? errc::peer_failed : errc::epoch_revoked));
      if (meets_it) ranks.revoke();
      CHECK(end.now_ns() < 20 * millisecond);
      CHECK(ranks.is_revoked());
      // Nobody waits anew.
      CHECK(ranks.send(bytes, rank_id{0}, 1, no_deadline).error() == failure{errc::epoch_revoked, 0, 0, 1});
      const llmmem::comm::agreed outcome = ranks.agree(6, ranks.after(second)).value();
      CHECK(to_text(outcome.failed) == "seat 2");
      ranks.shrink(outcome);
      CHECK(ranks.epoch() == 2);
      CHECK(ranks.world() == rank_count{2});
      CHECK_FALSE(ranks.is_revoked());
      ranks
          .exchange(bytes, rank_id{1 - to_index(ranks.rank())}, bytes, rank_id{1 - to_index(ranks.rank())}, 1,
                    ranks.after(second))
          .value();
      ranks.agree(0, ranks.after(second)).value();
      CHECK(ranks.stats().epochs == 2);
      CHECK(ranks.stats().agreements == 2);
    });
  }

  TEST_CASE("a rank can receive a complete message of a rank that has died") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      if (end.self() == seat_id{0}) {
        ranks.send(bytes_of_seed(3000, 1), rank_id{1}, 1, ranks.after(second)).value();
        return;  // and is gone
      }
      std::vector<std::byte> bytes(3000);
      while (ranks.failed().empty())
        end_of_a_while(ranks);
      CHECK(ranks.recv(bytes, rank_id{0}, 2, ranks.after(second)).error() ==
            failure{errc::peer_failed, 0, 3000, 0});
      CHECK(received(ranks, rank_id{0}, 1, 3000) == bytes_of_seed(3000, 1));
      CHECK(ranks.send(bytes, rank_id{0}, 1, ranks.after(second)).error() ==
            failure{errc::peer_failed, 0, 3000, 0});
      CHECK(ranks.probe(rank_id{0}, 3, ranks.after(second)).error() == failure{errc::peer_failed, 0, 0, 0});
    });
  }

  TEST_CASE("a rank that returns after a long silence finds its epoch over, and can do nothing in it") {
    sim_network net({.seats = 3, .hard_silence_ns = 100 * millisecond});
    net.stop(seat_id{0}, 5 * millisecond, second);
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const bool is_zombie = end.self() == seat_id{0};
      while (is_zombie && end.now_ns() < second)
        end.work(millisecond);
      std::vector<std::byte> bytes(100);
      if (is_zombie) {
        static_cast<void>(ranks.send(bytes, rank_id{1}, 1, ranks.after(millisecond)));
        const auto outcome = ranks.agree(1, ranks.after(10 * second));
        CHECK(outcome.code() == errc::no_quorum);
        return;
      }
      const bool meets_it = end.self() == seat_id{1};
      const auto came = ranks.recv(bytes, rank_id{meets_it ? 0U : 1U}, 1, no_deadline);
      CHECK(came.code() == (meets_it ? errc::peer_failed : errc::epoch_revoked));
      ranks.revoke();
      const llmmem::comm::agreed outcome = ranks.agree(1, ranks.after(second)).value();
      CHECK(to_text(outcome.failed) == "seat 0");
      ranks.shrink(outcome);
      CHECK(ranks.rank_of(seat_id{0}) == std::nullopt);
      CHECK(ranks.rank_of(seat_id{2}) == rank_id{1});
      CHECK(end.now_ns() < second);
      const rank_id partner{1 - to_index(ranks.rank())};
      end.work(2 * second);  // the other comes back meanwhile
      ranks.exchange(bytes, partner, bytes, partner, 1, ranks.after(second)).value();
      ranks.agree(0, ranks.after(second)).value();
    });
  }

  TEST_CASE("joining ends at its deadline and names a seat that is missing") {
    sim_network net({.seats = 3});
    net.kill_in_call(seat_id{1}, 0);
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end, {.name = "job"});
      const auto joined = ranks.join(ranks.after(50 * millisecond));
      REQUIRE_FALSE(joined);
      const failure why = joined.error();
      CHECK(why == failure{errc::seat_missing, 1, why.wanted, 1});
      CHECK((why.wanted == static_cast<std::uint64_t>(seat_absence::no_contact) ||
             why.wanted == static_cast<std::uint64_t>(seat_absence::ended)));
      CHECK(ranks.epoch() == 0);
      // Nor can anything else be done before.
      CHECK(ranks.send({}, rank_id{1}, 1, {0}).error() == failure{errc::not_joined, 1});
      CHECK(ranks.recv({}, rank_id{1}, 1, {0}).error() == failure{errc::not_joined, 1});
      CHECK(ranks.exchange({}, rank_id{1}, {}, rank_id{1}, 1, {0}).error() == failure{errc::not_joined, 1});
      CHECK(ranks.probe(rank_id{1}, 1, {0}).error() == failure{errc::not_joined, 1});
      CHECK(ranks.agree(1, {0}).error() == failure{errc::not_joined, 0});
    });
  }

  TEST_CASE("an agreement that ends at its deadline names the rank that was waited for, on all ranks") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      for (const std::uint32_t late : {0U, 1U, 2U, 3U}) {
        CAPTURE(late);
        sim_network net({.seats = 4, .seed = seed});
        net.run([&](sim_endpoint& end) {
          ranks_of ranks(end, {.name = "job"});
          ranks.join(ranks.after(second)).value();
          const deadline by = ranks.after(200 * millisecond);
          if (to_index(ranks.rank()) == late) {
            end.work(250 * millisecond);
          } else {
            const auto outcome = ranks.agree(1, by);
            CHECK(outcome.error() == failure{errc::peer_timed_out, late, 0, 0});
          }
          CHECK(ranks.agree(1, ranks.after(second)).value().failed.empty());
        });
      }
      // The last that was waited for, though others were late as well.
      sim_network net({.seats = 4, .seed = seed});
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        const deadline by = ranks.after(200 * millisecond);
        const std::uint32_t rank = to_index(ranks.rank());
        if (rank == 1) end.work(120 * millisecond);
        if (rank == 3) end.work(250 * millisecond);
        if (rank != 3) CHECK(ranks.agree(1, by).error() == failure{errc::peer_timed_out, 3, 0, 0});
        ranks.agree(1, ranks.after(second)).value();
      });
      // Nor is it enough to have said something: what is proposed must be accepted.
      sim_network again({.seats = 4, .seed = seed});
      again.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        const deadline by = ranks.after(200 * millisecond);
        const std::uint32_t rank = to_index(ranks.rank());
        if (rank == 3) end.work(90 * millisecond);
        if (rank == 2) {
          const auto outcome = ranks.agree(1, ranks.after(40 * millisecond));
          CHECK(outcome.error() == failure{errc::peer_timed_out, 3, 0, 0});
          end.work(250 * millisecond);
        } else {
          CHECK(ranks.agree(1, by).error() == failure{errc::peer_timed_out, 2, 0, 0});
        }
        ranks.agree(1, ranks.after(second)).value();
      });
    }
  }

  TEST_CASE("a revoke that arrives after its epoch is over ends nothing") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed});
      net.run([](sim_endpoint& end) {
        communicator<sim_endpoint> ranks(end);
        ranks.join(ranks.after(1'000'000'000)).value();
        const llmmem::comm::agreed outcome = ranks.agree(1, ranks.after(1'000'000'000)).value();
        if (to_index(ranks.rank()) == 0) ranks.revoke();
        ranks.shrink(outcome);
        end.work(10'000'000);  // whatever is on its way has come by then
        ranks.poll();
        CHECK_FALSE(ranks.is_revoked());
        ranks.agree(1, ranks.after(1'000'000'000)).value();
      });
    }
  }
}
