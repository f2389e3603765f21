#include "survive_failures/fault_plan.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "support/small_job.hpp"

using namespace survive_failures;
using llmmem_tests::small_job;

namespace {

std::vector<planned_fault> faults_of(const char* scheme, std::uint32_t ranks, transport_kind transport) {
  job_plan plan = small_job(ranks, 1000, scheme, 3);
  plan.faults = 200;
  plan.transport = transport;
  return plan_faults(plan);
}

}  // namespace

TEST_SUITE("fault_plan") {
  TEST_CASE("faults come one after another, evenly over the steps") {
    const auto faults = faults_of("mirror:2", 4, transport_kind::sockets);
    REQUIRE(faults.size() == 200);
    for (std::size_t i = 0; i < faults.size(); ++i)
      CHECK(faults[i].after_step == 1000 * (i + 1) / 201);
  }

  TEST_CASE("the redundancy tolerates every planned death, and at least one rank is left") {
    for (const char* const scheme : {"mirror:2", "mirror:3", "parity:3", "rs:2+2", "compute"}) {
      CAPTURE(scheme);
      const auto map =
          llmmem::ring_neighbours().place(llmmem::redundancy_scheme::parse(scheme), llmmem::rank_count{5});
      std::size_t most = 0;
      std::set<std::uint32_t> whom;
      for (const planned_fault& fault : faults_of(scheme, 5, transport_kind::threads)) {
        llmmem::rank_set failed;
        for (const std::uint32_t seat : fault.seats)
          failed.insert(llmmem::rank_id{seat});
        CHECK(failed.size() == fault.seats.size());  // none twice
        CHECK(map.survives(failed));
        CHECK(fault.seats.size() < 5);
        most = std::max(most, fault.seats.size());
        whom.insert(fault.seats.begin(), fault.seats.end());
      }
      CHECK(whom.size() == 5);
      const std::string text = scheme;
      CHECK(most == (text == "parity:3" ? 1U : text == "mirror:3" ? 3U : 2U));
    }
  }

  TEST_CASE("only processes can be stopped, and one at a time") {
    std::uint32_t stops = 0;
    std::uint32_t pauses = 0;
    for (const planned_fault& fault : faults_of("mirror:2", 4, transport_kind::sockets)) {
      if (fault.kind == fault_kind::kill) continue;
      CHECK(fault.seats.size() == 1);
      ++(fault.kind == fault_kind::stop ? stops : pauses);
    }
    CHECK(stops > 10);
    CHECK(pauses > 5);
    for (const transport_kind other : {transport_kind::threads, transport_kind::simulated}) {
      for (const planned_fault& fault : faults_of("mirror:2", 4, other))
        CHECK(fault.kind == fault_kind::kill);
    }
  }
}
