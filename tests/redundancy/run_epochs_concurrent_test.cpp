#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/redundancy/run_epochs.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::job_history;

constexpr std::uint64_t second = 1'000'000'000;
using sim_ranks = communicator<sim_endpoint>;

/// What a part is at a version.
std::vector<std::byte> part_at(part_id part, std::uint64_t version) {
  return bytes_of_seed(300 + 7 * to_index(part), version * 100 + to_index(part) + 1);
}

/// A job whose state is kept in peers' memory, and held to what it must be whenever it is touched.
template <class Ranks>
class kept_job {
 public:
  kept_job(Ranks& ranks, std::uint32_t seats, std::uint64_t last, job_history& history, std::string scheme)
      : ranks_(&ranks), last_(last), history_(&history), state_(seats) {
    std::vector<std::uint64_t> sizes;
    std::vector<seat_id> homes;
    for (std::uint32_t i = 0; i < seats; ++i) {
      state_[i] = part_at(part_id{i}, 99);  // of no use
      sizes.push_back(state_[i].size());
      homes.push_back(seat_id{i});
    }
    replica_.emplace(ranks, redundancy_scheme::parse(scheme), sizes, homes);
  }

  redundancy::job_outcome begin() {
    const auto into = [this](part_id part) { return std::span(state_[to_index(part)]); };
    const auto back = replica_->recover(ranks_->after(60 * second), into);
    if (back.code() == errc::state_lost) return redundancy::job_outcome::stop;
    if (!back) return redundancy::job_outcome::failed;
    version_ = back->version;
    for (const part_id part : replica_->own_parts()) {
      if (!back->is_recovered) state_[to_index(part)] = part_at(part, 0);
    }
    check();
    return redundancy::job_outcome::succeeded;
  }
  [[nodiscard]] bool is_over() const { return version_ == last_; }
  redundancy::job_outcome step() {
    std::vector<part_bytes> parts;
    for (const part_id part : replica_->own_parts()) {
      state_[to_index(part)] = part_at(part, version_ + 1);
      parts.push_back({part, state_[to_index(part)]});
    }
    return replica_->keep(version_ + 1, parts, ranks_->after(60 * second))
               ? redundancy::job_outcome::succeeded
               : redundancy::job_outcome::failed;
  }
  void commit() {
    replica_->commit();
    history_->committed(++version_, ranks_->epoch(), ranks_->seats(), 0, 0);
    check();
  }
  void drop() { replica_->drop(); }

 private:
  void check() const {
    for (const part_id part : replica_->own_parts())
      CHECK(state_[to_index(part)] == part_at(part, version_));
  }

  Ranks* ranks_;
  std::uint64_t version_ = 0;
  std::uint64_t last_;
  job_history* history_;
  std::vector<std::vector<std::byte>> state_;
  std::optional<redundant_replica<Ranks>> replica_{};
};

/// A job of which the test says how each step goes.
struct told_job {
  std::uint64_t last = 3;
  std::function<redundancy::job_outcome(std::uint64_t tries)> how = [](std::uint64_t) {
    return redundancy::job_outcome::succeeded;
  };
  std::uint64_t done = 0;
  std::uint64_t tries = 0;
  std::uint64_t begun = 0;
  std::uint64_t dropped = 0;
  std::uint64_t heard = 0;

  redundancy::job_outcome begin() {
    ++begun;
    return redundancy::job_outcome::succeeded;
  }
  [[nodiscard]] bool is_over() const { return done == last; }
  redundancy::job_outcome step() { return how(tries++); }
  void commit() { ++done; }
  void drop() { ++dropped; }
  void agreed_on(const llmmem::comm::agreed& /*outcome*/) { ++heard; }
};
/// Ranks of which the test says what they agree on: `outcomes`, and then `why` there is no agreement.
struct told_ranks {
  std::vector<llmmem::comm::agreed> outcomes{};
  error_code why = errc::no_quorum;
  std::size_t agreements = 0;
  std::uint64_t admitted = 0;
  deadline by{};

  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return {ns}; }
  result<llmmem::comm::agreed> agree(std::uint64_t bits, deadline until) {
    by = until;
    CHECK(bits == 1);
    if (agreements == outcomes.size()) return failure{why};
    return outcomes[agreements++];
  }
  void admit(const llmmem::comm::agreed& /*outcome*/) { ++admitted; }
  void revoke() noexcept {}
};

static_assert(epoch_job<told_job>);
static_assert(epoch_ranks<told_ranks>);
static_assert(epoch_job<kept_job<sim_ranks>>);
static_assert(epoch_ranks<sim_ranks>);

}  // namespace

TEST_SUITE("run_epochs") {
  TEST_CASE("ranks of a simulation die at any moment and return, with one history and every byte of it") {
    std::uint64_t deaths = 0;
    for (const char* const scheme : {"mirror:2", "parity:3", "rs:2+2"}) {
      for (const auto seed : llmmem_tests::seeds(40)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        sim_network net({.seats = 5, .seed = seed});
        const std::uint32_t victims = redundancy_scheme::parse(scheme).tolerates();
        for (std::uint32_t i = 0; i < victims; ++i) {
          const seat_id victim{static_cast<std::uint32_t>((seed + i) % 5)};
          net.kill_in_call(victim, 20 + random() % 250);
          if (random() % 2 == 0) net.restart_after(victim, random() % 20'000'000);
        }
        job_history history;
        std::atomic<std::uint64_t> finished{0};
        net.run([&](sim_endpoint& end) {
          sim_ranks ranks(end);
          if (!ranks.join(ranks.after(10 * second))) return;
          kept_job job(ranks, 5, 12, history, scheme);
          const auto how = run_epochs(ranks, job);
          if (how) CHECK(*how == epochs_end::finished);
          if (how) CHECK(job.is_over());
          finished += how ? 1U : 0U;
        });
        CHECK(finished >= 5 - victims);
        CHECK_FALSE(history.has_split());
        CHECK(history.steps() == 13);
        deaths += victims;
      }
    }
    CHECK(deaths >= 40);
  }

  TEST_CASE("ranks in threads are killed at any time and return, with one history and every byte of it") {
    std::uint64_t killed = 0;
    for (const auto seed : llmmem_tests::seeds(6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      constexpr std::uint32_t seats = 4;
      constexpr const char* scheme = "mirror:3";
      thread_network net(seats);
      job_history history;
      std::atomic<std::uint32_t> finished{0};
      std::atomic<std::uint32_t> running{seats};
      const auto live = [&](std::uint32_t seat) {
        for (bool is_over = false; !is_over;) {
          try {
            thread_endpoint end(net, seat_id{seat});
            communicator ranks(end);
            if (!ranks.join(ranks.after(60 * second))) continue;
            kept_job job(ranks, seats, 400, history, scheme);
            const auto how = run_epochs(ranks, job);
            if (how) ++finished;
            is_over = how.has_value();
          } catch (const rank_killed&) {
            is_over = finished != 0;
          }
        }
        --running;
      };
      std::vector<std::thread> threads;
      for (std::uint32_t seat = 0; seat < seats; ++seat)
        threads.emplace_back(live, seat);
      // As many as it bears, in case none of them has come back when the next one dies.
      for (std::uint32_t i = 0; i < redundancy_scheme::parse(scheme).tolerates() && finished == 0; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(500 + random() % 20'000));
        if (finished != 0) break;
        net.kill(seat_id{static_cast<std::uint32_t>(random() % seats)});
        ++killed;
      }
      // Who waits to be admitted when it is over finds nobody.
      while (running != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        for (std::uint32_t seat = 0; seat < seats && finished != 0; ++seat)
          net.kill(seat_id{seat});
      }
      for (std::thread& each : threads)
        each.join();
      CHECK(finished != 0);
      CHECK_FALSE(history.has_split());
    }
    CHECK(killed >= 3);
  }

  TEST_CASE("if a step fails on one rank, all drop it and repeat it in the next epoch") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(second)).value();
      told_job job;
      job.how = [&](std::uint64_t tries) {
        return tries == 1 && end.self() == seat_id{1} ? redundancy::job_outcome::failed
                                                      : redundancy::job_outcome::succeeded;
      };
      CHECK(run_epochs(ranks, job).value() == epochs_end::finished);
      CHECK(job.done == 3);
      CHECK(job.tries == 4);
      CHECK(job.dropped == 1);
      CHECK(job.begun == 2);
      CHECK(job.heard == 4);
      CHECK(ranks.epoch() == 2);
    });
  }

  TEST_CASE("if no step is left, all ranks agree once that the job is over, and nothing is committed") {
    sim_network net({.seats = 3});
    net.run([&](sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(second)).value();
      told_job job{.last = 0};
      CHECK(run_epochs(ranks, job).value() == epochs_end::finished);
      CHECK(job.tries == 0);
      CHECK(job.done == 0);
      CHECK(job.heard == 1);
      CHECK(ranks.stats().agreements == 1);
    });
  }

  TEST_CASE("a job that returns stop ends at once") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(second)).value();
      told_job job;
      job.how = [](std::uint64_t tries) {
        return tries == 2 ? redundancy::job_outcome::stop : redundancy::job_outcome::succeeded;
      };
      CHECK(run_epochs(ranks, job).value() == epochs_end::stopped);
      CHECK(ranks.is_revoked());
      CHECK(job.done == 2);
      CHECK(job.heard == 2);
      ranks.agree(0, ranks.after(second)).value();
    });
  }

  TEST_CASE("an exception of a job passes through, and no call waits for its rank") {
    sim_network net({.seats = 2, .max_notice_ns = 100'000});
    net.run([&](sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(second)).value();
      const bool throws = end.self() == seat_id{0};
      told_job job;
      job.how = [&](std::uint64_t tries) {
        if (tries == 1 && throws) throw 7;
        std::byte one[1] = {};
        const rank_id other{to_number(ranks.world()) - 1 - to_index(ranks.rank())};
        if (tries > 1) return redundancy::job_outcome::succeeded;  // alone
        return ranks.exchange(one, other, one, other, 5, ranks.after(600 * second))
                   ? redundancy::job_outcome::succeeded
                   : redundancy::job_outcome::failed;
      };
      if (throws) {
        CHECK_THROWS_AS(static_cast<void>(run_epochs(ranks, job)), int);
        CHECK(ranks.is_revoked());
        return;  // and dies
      }
      CHECK(run_epochs(ranks, job).value() == epochs_end::finished);
      CHECK(job.dropped == 1);
      CHECK(to_number(ranks.world()) == 1);
      CHECK(end.now_ns() < 100 * second);
    });
  }

  TEST_CASE("a rank that cannot continue revokes the epoch, so that no call waits for it") {
    sim_network net({.seats = 2});
    net.run([&](sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(second)).value();
      told_job job;
      job.how = [&](std::uint64_t tries) {
        if (tries != 1) return redundancy::job_outcome::succeeded;
        if (end.self() == seat_id{1}) return redundancy::job_outcome::failed;
        std::byte one[1] = {};
        CHECK(ranks.recv(one, rank_id{1}, 5, ranks.after(600 * second)).code() == errc::epoch_revoked);
        return redundancy::job_outcome::failed;
      };
      CHECK(run_epochs(ranks, job, {.patience_ns = 1000 * second}).value() == epochs_end::finished);
      CHECK(end.now_ns() < 100 * second);
    });
  }

  TEST_CASE("the next epoch begins only if a rank is out, a rank joins, or this one failed") {
    const seat_set one = [] {
      seat_set made;
      made.insert(seat_id{1});
      return made;
    }();
    told_ranks ranks;
    ranks.outcomes = {{.bits = 1}, {.bits = 1, .failed = one},
                      {.bits = 1}, {.bits = 1, .joining = one},
                      {.bits = 0}, {.bits = 1}};
    told_job job{.last = 5};
    std::vector<std::uint64_t> begun;
    job.how = [&](std::uint64_t) {
      begun.push_back(job.begun);
      return redundancy::job_outcome::succeeded;
    };
    CHECK(run_epochs(ranks, job).value() == epochs_end::finished);
    CHECK(begun == std::vector<std::uint64_t>{1, 1, 2, 2, 3, 4});
    CHECK(ranks.admitted == 3);
    CHECK(job.dropped == 1);
    CHECK(job.done == 5);
  }

  TEST_CASE(
      "a rank learns that the others continued without it, as it learns any other end of an agreement") {
    for (const error_code why : {errc::no_quorum, errc::peer_timed_out}) {
      told_ranks ranks;
      ranks.why = why;
      told_job job;
      CHECK(run_epochs(ranks, job, {.patience_ns = 77}).code() == why);
      CHECK(ranks.by.ns == 77);
      CHECK(ranks.admitted == 0);
      CHECK(job.done + job.dropped + job.heard == 0);
    }
  }
}
