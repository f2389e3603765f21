/// @file
/// A job of survive_failures that is quick without optimisation, too.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "common/program.hpp"
#include "survive_failures/job_log.hpp"
#include "survive_failures/plan.hpp"
#include "train_gpt/corpus.hpp"

namespace llmmem_tests {

[[nodiscard]] inline survive_failures::job_plan small_job(std::uint32_t ranks, std::uint64_t steps,
                                                          const std::string& redundancy, std::uint64_t seed) {
  survive_failures::job_plan plan;
  plan.shape = {.blocks = 1, .width = 8, .heads = 2, .context = 4, .batch = ranks};
  plan.steps = steps;
  plan.seed = seed;
  plan.ranks = ranks;
  plan.redundancy = llmmem::redundancy_scheme::parse(redundancy);
  return plan;
}

[[nodiscard]] inline train_gpt::corpus some_text(const survive_failures::job_plan& plan) {
  std::string text;
  for (std::uint64_t i = 0; i < 4000; ++i)
    text += static_cast<char>('a' + train_gpt::mixed(7, i / 3) % 26);
  return {"some text", text, plan.shape};
}

/// A log, and what it writes.
class kept_log {
 public:
  explicit kept_log(const survive_failures::job_plan& plan)
      : notes_(std::tmpfile(), &std::fclose), log_(plan, checked()) {}

  [[nodiscard]] survive_failures::job_log& log() { return log_; }
  [[nodiscard]] std::string text() const {
    std::string all;
    std::rewind(notes_.get());
    for (int c = std::fgetc(notes_.get()); c != EOF; c = std::fgetc(notes_.get()))
      all += static_cast<char>(c);
    return all;
  }

 private:
  [[nodiscard]] std::FILE* checked() const {
    REQUIRE(notes_);
    return notes_.get();
  }
  example::file_handle notes_;
  survive_failures::job_log log_;
};

}  // namespace llmmem_tests
