#include "survive_failures/survivor.hpp"

#include <llmmem/error.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/seeds.hpp"
#include "support/small_job.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/reference.hpp"
#include "survive_failures/report.hpp"
#include "survive_failures/simulated.hpp"
#include "survive_failures/threads.hpp"

using namespace survive_failures;
using llmmem_tests::kept_log;
using llmmem_tests::seeds;
using llmmem_tests::small_job;
using llmmem_tests::some_text;

namespace {

const std::string schemes[] = {"mirror:2", "mirror:3", "parity:2", "parity:3", "rs:2+2", "compute"};

/// All that finished have the reference's weights. @return whether any did
bool all_are_right(const job_plan& plan, const job_figures& figures) {
  const std::uint64_t expected = reference_digest(plan, some_text(plan), 1);
  for (const std::uint64_t digest : figures.digests)
    CHECK(digest == expected);
  return !figures.digests.empty();
}

}  // namespace

TEST_SUITE("survivor") {
  TEST_CASE("ranks of a simulation that die at any moment reach the weights of a run without failures") {
    std::uint64_t deaths = 0;
    std::uint64_t several = 0;
    std::uint64_t repeated = 0;
    std::uint64_t joined = 0;
    for (const std::string& scheme : schemes) {
      for (const auto seed : seeds(6)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const std::uint32_t least = llmmem::redundancy_scheme::parse(scheme).group_ranks();
        job_plan plan =
            small_job(static_cast<std::uint32_t>(std::max(least, 2U) + random() % 3), 16, scheme, seed);
        plan.faults = 3;
        plan.transport = transport_kind::simulated;
        plan.restart_ms = random() % 30;
        const auto faults = plan_faults(plan);
        kept_log kept(plan);
        try {
          run_simulated(plan, faults, some_text(plan), kept.log());
        } catch (const llmmem::error& error) {
          const std::string text = kept.text();
          FAIL(std::string(error.what()) << "\n" << text);
        }
        const job_figures figures = kept.log().figures();
        REQUIRE(all_are_right(plan, figures));
        // Each fault costs one step at most, or one a death when these are noticed apart.
        CHECK(figures.steps_repeated <= figures.deaths.size());
        deaths += figures.deaths.size();
        repeated += figures.steps_repeated;
        joined += figures.joined;
        several += static_cast<std::uint64_t>(
            std::ranges::count_if(faults, [](const planned_fault& each) { return each.seats.size() > 1; }));
      }
    }
    CHECK(deaths > 60);
    CHECK(several > 10);
    CHECK(repeated > 40);
    CHECK(joined > 40);
  }

  TEST_CASE("with more deaths than the redundancy tolerates, a run ends with an error or is right") {
    std::uint64_t lost = 0;
    std::uint64_t right = 0;
    for (const std::string& scheme : schemes) {
      for (const auto seed : seeds(6)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        job_plan plan = small_job(5, 12, scheme, seed);
        plan.transport = transport_kind::simulated;
        plan.restart_ms = random() % 5;
        // All but one or two, one shortly after the other.
        std::vector<planned_fault> faults;
        for (std::uint32_t seat = 0; seat < 3 + random() % 2; ++seat) {
          faults.push_back(
              {.after_step = seat == 0 ? 5U : 0U, .delay_ns = random() % 8'000'000, .seats = {seat}});
        }
        for (std::size_t i = 1; i < faults.size(); ++i)
          faults[0].seats.push_back(faults[i].seats[0]);
        faults.resize(1);
        kept_log kept(plan);
        try {
          run_simulated(plan, faults, some_text(plan), kept.log());
          if (all_are_right(plan, kept.log().figures())) ++right;
        } catch (const llmmem::error& error) {
          ++lost;
          CHECK(std::string(error.what()) == "more ranks were lost than the redundancy bears");
          // Fresh ranks among themselves, once those that knew of the loss were gone, may have begun anew.
          static_cast<void>(all_are_right(plan, kept.log().figures()));
        }
      }
    }
    CHECK(lost > 20);
    CHECK(lost + right == 6 * seeds(6).size());
  }

  TEST_CASE("ranks in threads, killed while they compute and communicate, reach the same weights") {
    std::uint64_t deaths = 0;
    for (const std::string scheme : {"mirror:2", "parity:3", "compute"}) {
      for (const auto seed : seeds(2)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        job_plan plan = small_job(4, 60, scheme, seed);
        plan.faults = 3;
        plan.transport = transport_kind::threads;
        plan.restart_ms = seed % 2;
        kept_log kept(plan);
        const train_gpt::corpus text = some_text(plan);
        thread_job(plan, text, kept.log()).run();
        REQUIRE(all_are_right(plan, kept.log().figures()));
        deaths += kept.log().figures().deaths.size();
      }
    }
    CHECK(deaths > 3);
  }

  TEST_CASE("the weights depend only on the plan, and not on the redundancy, the transport or the faults") {
    std::vector<std::uint64_t> digests;
    for (const std::string scheme : {"mirror:2", "rs:2+2"}) {
      for (const std::uint32_t faults : {0U, 2U}) {
        job_plan plan = small_job(4, 12, scheme, 5);
        plan.faults = faults;
        plan.transport = transport_kind::simulated;
        kept_log kept(plan);
        run_simulated(plan, plan_faults(plan), some_text(plan), kept.log());
        const auto all = kept.log().figures().digests;
        digests.insert(digests.end(), all.begin(), all.end());
      }
    }
    REQUIRE(digests.size() >= 10);
    for (const std::uint64_t each : digests)
      CHECK(each == digests.front());
    const job_plan other = small_job(4, 12, "mirror:2", 6);
    CHECK(reference_digest(other, some_text(other), 1) != digests.front());
  }
}
