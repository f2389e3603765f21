/// @file
/// The result of a job, for people and as JSON.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "survive_failures/job_log.hpp"
#include "survive_failures/plan.hpp"

namespace survive_failures {

/// A job's result and its proof.
struct job_result {
  job_figures figures;
  std::uint64_t reference = 0;  ///< the digest of the run without failures

  /// Returns whether every finished rank has the weights of that run.
  [[nodiscard]] bool identical() const {
    return !figures.digests.empty() &&
           std::ranges::all_of(figures.digests, [&](std::uint64_t each) { return each == reference; });
  }
};

/// Returns the median; for an even number the mean of the middle two, and 0 for none.
[[nodiscard]] inline double median(std::vector<double> of) {
  if (of.empty()) return 0;
  std::ranges::sort(of);
  return (of[(of.size() - 1) / 2] + of[of.size() / 2]) / 2;
}

/// Medians over all recoveries.
[[nodiscard]] inline job_recovery median_recovery(const std::vector<job_recovery>& all) {
  std::vector<double> detect, agree, fetch, verify, resume;
  for (const job_recovery& each : all) {
    if (each.detect_ms) detect.push_back(*each.detect_ms);
    agree.push_back(each.agree_ms);
    fetch.push_back(each.fetch_ms);
    verify.push_back(each.verify_ms);
    resume.push_back(each.resume_ms);
  }
  job_recovery middle;
  if (!detect.empty()) middle.detect_ms = median(detect);
  middle.agree_ms = median(agree);
  middle.fetch_ms = median(fetch);
  middle.verify_ms = median(verify);
  middle.resume_ms = median(resume);
  return middle;
}

[[nodiscard]] inline std::string to_json(const job_recovery& recovery) {
  return fmt::format(
      R"({{"detect": {}, "agree": {:.3f}, "fetch": {:.3f}, "verify": {:.3f}, "resume": {:.3f}}})",
      recovery.detect_ms ? fmt::format("{:.3f}", *recovery.detect_ms) : "null", recovery.agree_ms,
      recovery.fetch_ms, recovery.verify_ms, recovery.resume_ms);
}

/// One object. `recovery_ms` has the medians, `recoveries` each recovery; digests are of the final weights.
[[nodiscard]] inline std::string to_json(const job_plan& plan, const job_result& result) {
  const job_figures& all = result.figures;
  std::string deaths;
  for (const job_death& each : all.deaths) {
    deaths += fmt::format(R"({}{{"rank": {}, "pid": {}, "signal": {}, "step": {}}})",
                          deaths.empty() ? "" : ", ", each.seat, each.pid, each.signal, each.step);
  }
  std::string recoveries;
  for (const job_recovery& each : all.recoveries)
    recoveries += (recoveries.empty() ? "" : ", ") + to_json(each);
  std::string restored;
  for (const std::uint64_t each : all.restored_from)
    restored += fmt::format("{}{}", restored.empty() ? "" : ", ", each);
  return fmt::format(
      R"({{"identical": {}, "digest": "{:016x}", "reference_digest": "{:016x}", "ranks": {}, "steps": {}, )"
      R"("redundancy": "{}", "faults": {}, "deaths": [{}], "steps_repeated": {}, "steps_lost": {}, )"
      R"("restored_from": [{}], "joined": {}, )"
      R"("recovery_ms": {}, "recoveries": [{}]}})"
      "\n",
      result.identical(), all.digests.empty() ? 0 : all.digests.front(), result.reference, plan.ranks,
      plan.steps, llmmem::to_text(plan.redundancy), all.faults, deaths, all.steps_repeated, all.steps_lost,
      restored, all.joined, to_json(median_recovery(all.recoveries)), recoveries);
}

[[nodiscard]] inline std::string to_text(const job_plan& plan, const job_result& result) {
  const job_figures& all = result.figures;
  const job_recovery middle = median_recovery(all.recoveries);
  double worst = 0;
  for (const job_recovery& each : all.recoveries)
    worst = std::max(worst, each.total_ms());
  std::string text = fmt::format(
      "{} ranks, {} steps, {}: {} faults, {} deaths, {} fresh ranks admitted, {} steps repeated\n",
      plan.ranks, plan.steps, llmmem::to_text(plan.redundancy), all.faults, all.deaths.size(), all.joined,
      all.steps_repeated);
  if (!all.recoveries.empty()) {
    text += fmt::format(
        "  recovery     {:.1f} ms in the middle of {}, {:.1f} at worst: detect {}, agree {:.1f}, fetch "
        "{:.1f}, "
        "verify {:.1f}, resume {:.1f}\n",
        middle.total_ms(), all.recoveries.size(), worst,
        middle.detect_ms ? fmt::format("{:.1f}", *middle.detect_ms) : "unknown", middle.agree_ms,
        middle.fetch_ms, middle.verify_ms, middle.resume_ms);
  }
  if (!all.restored_from.empty()) {
    text += fmt::format("  checkpoints  {} times loaded, the last of step {}; {} steps were lost\n",
                        all.restored_from.size(), all.restored_from.back(), all.steps_lost);
  }
  text += fmt::format("  weights      {:016x} on {} ranks; without failures {:016x}: {}\n",
                      all.digests.empty() ? 0 : all.digests.front(), all.digests.size(), result.reference,
                      result.identical() ? "identical" : "DIFFERENT");
  if (all.faults < plan.faults) {
    text += fmt::format("  faults       {} of {} were not done: the run was over; ask for more --steps\n",
                        plan.faults - all.faults, plan.faults);
  }
  return text;
}

}  // namespace survive_failures
