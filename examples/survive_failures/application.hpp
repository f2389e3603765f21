/// @file
/// The program: trains on ranks that die, and proves that the result is the same.
#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/standard_streams.hpp"
#include "common/text.hpp"
#include "survive_failures/command_line.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/job_log.hpp"
#include "survive_failures/processes.hpp"
#include "survive_failures/reference.hpp"
#include "survive_failures/report.hpp"
#include "survive_failures/saved_job.hpp"
#include "survive_failures/simulated.hpp"
#include "survive_failures/threads.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/training_text.hpp"

namespace survive_failures {

namespace detail {

inline void run_checked(const command_line& asked, std::FILE* out, std::FILE* notes) {
  train_gpt::named_text from = train_gpt::load_text(asked.text_file);
  const train_gpt::corpus text(from.name, std::move(from.text), asked.plan.shape);
  if (asked.plan.is_saved()) {
    if (const auto step = saved_job(asked.plan, text).newest())
      example::tell(notes, "continues from step {} in {}\n", *step,
                    example::printable(asked.plan.checkpoint_dir, 512));
  }
  job_log log(asked.plan, notes);
  switch (asked.plan.transport) {
    case transport_kind::sockets:
      process_job(asked.plan, text, log).run();
      break;
    case transport_kind::threads:
      thread_job(asked.plan, text, log).run();
      break;
    case transport_kind::simulated:
      run_simulated(asked.plan, plan_faults(asked.plan), text, log);
      break;
  }
  example::tell(notes, "the same without ranks, messages and failures ...\n");
  const std::size_t threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16);
  const job_result result{log.figures(), reference_digest(asked.plan, text, threads)};
  example::write(out, asked.json ? to_json(asked.plan, result) : to_text(asked.plan, result),
                 "standard output");
  if (!result.identical())
    throw llmmem::error("the weights differ from those of a run without failures: this must not be");
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status.
[[nodiscard]] inline example::exit_status run_application(const std::vector<std::string>& arguments,
                                                          std::FILE* out, std::FILE* notes) {
  const auto parse = [](const std::vector<std::string>& given) {
    CLI::App app("Trains a small GPT on ranks that are killed, while the others continue.",
                 "survive_failures");
    const job_options options(app);
    const auto help = example::parse(app, given);
    return std::pair(help ? command_line{} : options.asked(), help);
  };
  return example::run({"survive_failures", "lower --ranks, --layers, --width, --context or --batch"},
                      arguments, out, notes, parse,
                      [&](const command_line& asked) { detail::run_checked(asked, out, notes); });
}

}  // namespace survive_failures
