#include "survive_failures/job_log.hpp"

#include <doctest/doctest.h>

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "support/small_job.hpp"
#include "survive_failures/report.hpp"

using namespace survive_failures;
using llmmem_tests::kept_log;
using llmmem_tests::small_job;

namespace {

constexpr std::uint64_t ms = 1'000'000;

/// What ranks 0 to 2 of three tell, rank 2 of which is killed at 100 ms.
struct told_job {
  kept_log kept{small_job(3, 40, "mirror:2", 1)};
  job_log& log = kept.log();

  void all(event_kind kind, std::uint64_t epoch, std::uint64_t step, std::uint64_t at_ms,
           std::uint64_t members, std::uint64_t value = 0) {
    for (std::uint32_t seat = 0; seat < 3; ++seat) {
      if ((members >> seat & 1) == 0) continue;
      // The last seat is the last each time.
      log.hear({.kind = kind,
                .seat = seat,
                .pid = 0,
                .epoch = epoch,
                .step = step,
                .at_ns = (at_ms - 2 + seat) * ms,
                .members = members,
                .value = value,
                .loss = 1.5});
    }
  }
  void begin() {
    for (std::uint32_t seat = 0; seat < 3; ++seat)
      log.started(seat, 50 + seat);
    all(event_kind::began, 1, 0, 10, 0b111);
    all(event_kind::fetched, 1, 0, 11, 0b111);
    all(event_kind::verified, 1, 0, 12, 0b111);
  }
  /// From its detection to the first step after.
  void recover() {
    all(event_kind::failed, 1, 7, 105, 0b011);
    all(event_kind::agreed, 1, 7, 107, 0b011);
    all(event_kind::repeats, 1, 7, 107, 0b011);
    all(event_kind::began, 2, 7, 108, 0b011);
    all(event_kind::fetched, 2, 7, 110, 0b011);
    all(event_kind::verified, 2, 7, 114, 0b011);
    all(event_kind::committed, 2, 8, 130, 0b011);
  }
};

}  // namespace

TEST_SUITE("job_log") {
  TEST_CASE("a job is complete when all ranks live and have kept a version in the newest epoch") {
    told_job job;
    CHECK_FALSE(job.log.is_complete());
    job.begin();
    CHECK_FALSE(job.log.is_complete());
    job.all(event_kind::committed, 1, 7, 20, 0b011);
    CHECK_FALSE(job.log.is_complete());
    job.all(event_kind::committed, 1, 7, 20, 0b111);
    CHECK(job.log.is_complete());
    CHECK(job.log.step() == 7);
    job.log.stopped(1);
    CHECK_FALSE(job.log.is_complete());
    job.log.continued(1);
    CHECK(job.log.is_complete());
    job.log.fault({2}, SIGKILL, 100 * ms);
    CHECK_FALSE(job.log.is_complete());
    job.log.died(2, SIGKILL);
    CHECK(job.log.alive() == 2);
    job.recover();
    CHECK_FALSE(job.log.is_complete());
  }

  TEST_CASE("after a death a job is complete only in a later epoch, even if all ranks soon live again") {
    told_job job;
    job.begin();
    job.all(event_kind::committed, 1, 7, 20, 0b111);
    job.log.died(2, SIGKILL);
    job.log.started(2, 99);
    CHECK_FALSE(job.log.is_complete());
    job.all(event_kind::began, 2, 7, 30, 0b111);
    CHECK_FALSE(job.log.is_complete());
    job.all(event_kind::committed, 2, 8, 40, 0b111);
    CHECK(job.log.is_complete());
  }

  TEST_CASE("a recovery lasts from the fault to the next step of the last remaining rank") {
    told_job job;
    job.begin();
    job.all(event_kind::committed, 1, 7, 20, 0b111);
    job.log.fault({2}, SIGKILL, 100 * ms);
    job.log.died(2, SIGKILL);
    job.recover();
    const job_figures figures = job.log.figures();
    REQUIRE(figures.recoveries.size() == 1);
    const job_recovery& found = figures.recoveries.front();
    CHECK(found.detect_ms == doctest::Approx(4));
    CHECK(found.agree_ms == doctest::Approx(2));
    CHECK(found.fetch_ms == doctest::Approx(3));
    CHECK(found.verify_ms == doctest::Approx(4));
    CHECK(found.resume_ms == doctest::Approx(16));
    CHECK(figures.steps_repeated == 1);
    CHECK(figures.faults == 1);
    REQUIRE(figures.deaths.size() == 1);
    CHECK(figures.deaths[0].seat == 2);
    CHECK(figures.deaths[0].pid == 52);
    CHECK(figures.deaths[0].signal == SIGKILL);
    CHECK(figures.deaths[0].step == 7);
  }

  TEST_CASE("a death from outside counts, and its detection time is unknown") {
    told_job job;
    job.begin();
    job.all(event_kind::committed, 1, 7, 20, 0b111);
    job.log.died(2, SIGTERM);
    job.recover();
    const job_figures figures = job.log.figures();
    REQUIRE(figures.recoveries.size() == 1);
    CHECK_FALSE(figures.recoveries.front().detect_ms.has_value());
    CHECK(figures.faults == 0);
    CHECK(figures.deaths.at(0).signal == SIGTERM);
    const job_result result{figures, 0};
    CHECK_FALSE(result.identical());  // nobody finished
    CHECK(to_json(small_job(3, 40, "mirror:2", 1), result).find(R"("detect": null)") != std::string::npos);
  }

  TEST_CASE("a stopped rank that others killed counts as stopped") {
    told_job job;
    job.begin();
    job.log.stopped(1);
    job.log.died(1, SIGKILL);
    job.log.died(2, SIGKILL);
    CHECK(job.log.figures().deaths.at(0).signal == SIGSTOP);
    CHECK(job.log.figures().deaths.at(1).signal == SIGKILL);
    CHECK(job.kept.text().find("rank 1 died of SIGSTOP") != std::string::npos);
  }

  TEST_CASE("fresh ranks are counted, and the weights of each that finishes") {
    told_job job;
    job.begin();
    job.all(event_kind::committed, 1, 7, 20, 0b111);
    job.log.died(2, SIGKILL);
    job.recover();
    job.log.started(2, 99);
    job.all(event_kind::agreed, 2, 9, 150, 0b011);
    job.all(event_kind::began, 3, 9, 151, 0b111);
    job.all(event_kind::committed, 3, 10, 160, 0b111);
    CHECK(job.log.is_complete());
    job.all(event_kind::finished, 3, 40, 900, 0b111, 77);
    const job_figures figures = job.log.figures();
    CHECK(figures.joined == 1);
    CHECK(figures.recoveries.size() == 1);  // to admit one is none
    CHECK(figures.digests == std::vector<std::uint64_t>{77, 77, 77});
    CHECK(job.log.finished() == 0b111);
    CHECK(job_result{figures, 77}.identical());
    CHECK_FALSE(job_result{figures, 78}.identical());
    job_figures one_other = figures;
    one_other.digests[1] = 78;
    CHECK_FALSE(job_result{one_other, 77}.identical());
  }

  TEST_CASE("a fresh rank in the seat of a rank that died in the last epoch does not count as finished") {
    told_job job;
    job.begin();
    CHECK_FALSE(job.log.is_finisher(2));
    job.log.died(2, SIGKILL);
    job.all(event_kind::finished, 1, 40, 900, 0b111, 77);
    job.log.started(2, 60);
    CHECK(job.log.is_finisher(0));
    CHECK(job.log.is_finisher(1));
    CHECK_FALSE(job.log.is_finisher(2));
  }

  TEST_CASE("steps before a fallback are lost once, and each checkpoint that is loaded is listed") {
    told_job job;
    job.begin();
    job.all(event_kind::committed, 1, 57, 20, 0b111);
    job.all(event_kind::began, 2, 57, 30, 0b101);
    job.all(event_kind::restored, 2, 50, 31, 0b101, 1);
    CHECK(job.log.step() == 50);
    job.all(event_kind::committed, 2, 51, 40, 0b101);
    CHECK(job.log.step() == 51);
    job.all(event_kind::began, 3, 51, 50, 0b100);
    job.all(event_kind::restored, 3, 50, 51, 0b100, 1);
    job.all(event_kind::began, 4, 50, 60, 0b111);
    job.all(event_kind::restored, 4, 0, 61, 0b111, 0);  // none of those can be loaded any more
    CHECK(job.log.step() == 0);
    const job_figures figures = job.log.figures();
    CHECK(figures.steps_lost == 7 + 1 + 50);
    CHECK(figures.restored_from == std::vector<std::uint64_t>{50, 50});
    CHECK(to_json(small_job(3, 40, "mirror:2", 1), {figures, 0})
              .find(R"("steps_lost": 58, "restored_from": [50, 50], )") != std::string::npos);
    CHECK(to_text(small_job(3, 40, "mirror:2", 1), {figures, 0})
              .find("checkpoints  2 times loaded, the last of step 50; 58 steps were lost\n") !=
          std::string::npos);
    CHECK(job.kept.text().find("step 50 loaded: 7 steps lost\n") != std::string::npos);
    CHECK(job.kept.text().find("step 0 started again, no checkpoint: 50 steps lost\n") != std::string::npos);
  }

  TEST_CASE(
      "fresh ranks that meet after all have died begin with epoch 1 again, which follows the earlier ones") {
    told_job job;
    job.begin();
    job.all(event_kind::began, 2, 0, 15, 0b111);
    job.all(event_kind::committed, 2, 7, 20, 0b111);
    for (std::uint32_t seat = 0; seat < 3; ++seat)
      job.log.died(seat, SIGKILL);
    job.begin();
    CHECK(job.log.epoch() == 3);
    CHECK_FALSE(job.log.is_complete());
    job.all(event_kind::committed, 1, 8, 40, 0b111);
    CHECK(job.log.is_complete());
    job.begin();
    CHECK(job.log.epoch() == 4);
  }

  TEST_CASE("the reason of a failed save is reported, truncated if it is too long for an event") {
    told_job job;
    job.begin();
    job_event event{.kind = event_kind::unsaved, .seat = 1, .epoch = 1, .step = 20};
    event.say(std::string(300, 'x'));
    job.log.hear(event);
    CHECK(job.kept.text().find("rank 1: step 20 is not saved: " + std::string(255, 'x') + "\n") !=
          std::string::npos);
    event.kind = event_kind::saved;
    event.say("");
    const std::string before = job.kept.text();
    job.log.hear(event);
    CHECK(job.kept.text() == before);
    event.say("no LATEST");
    job.log.hear(event);
    CHECK(job.kept.text().find("rank 1: no LATEST\n") != std::string::npos);
  }

  TEST_CASE("every start is reported with its process, in the format that others read") {
    told_job job;
    job.begin();
    CHECK(job.kept.text().find("\nrank 2 pid 52\n") != std::string::npos);
  }

  TEST_CASE("a first epoch that begins again has lost the committed steps if nothing is saved") {
    told_job job;
    job.begin();
    job.log.hear({.kind = event_kind::began, .seat = 1, .epoch = 1, .members = 0b111});
    CHECK_FALSE(job.log.is_lost());  // nothing was committed
    job.all(event_kind::began, 1, 0, 20, 0b101);
    job.all(event_kind::committed, 1, 8, 40, 0b111);
    CHECK_FALSE(job.log.is_lost());
    job.log.hear({.kind = event_kind::began, .seat = 1, .epoch = 1, .members = 0b111});
    CHECK(job.log.is_lost());
  }
}
