/// @file
/// The command line.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/redundancy/redundancy.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "common/program.hpp"
#include "common/text.hpp"
#include "survive_failures/plan.hpp"

namespace survive_failures {

/// Silence is checked every 50 ms: with less, a healthy process might be killed for a moment's load.
inline constexpr std::uint64_t least_silence_ms = 200;

struct command_line {
  job_plan plan;
  std::optional<std::string> text_file{};
  bool json = false;
};

/// The options; this and `app` refer to each other.
class job_options {
 public:
  explicit job_options(CLI::App& app) {
    const job_plan usual;
    const auto number = [&](const char* name, const std::string& what, std::uint64_t otherwise) {
      app.add_option(name, numbers_[name], fmt::format("{} (default: {})", what, otherwise))->type_name("N");
    };
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    number("--ranks", "that train together", usual.ranks);
    number("--steps", "of training", usual.steps);
    number("--faults", "to do to them, evenly over the steps", usual.faults);
    app.add_option("--redundancy", redundancy_,
                   "how other ranks keep the state (default: mirror:2): F copies in total; one parity of "
                   "K ranks; M parities of K; or computed twice")
        ->type_name("mirror:F|parity:K|rs:K+M|compute");
    app.add_option("--transport", transport_,
                   "processes joined by sockets (default); threads; or a simulation in virtual time")
        ->type_name("socket|thread|sim");
    number("--seed", "of weights, batches and faults", usual.seed);
    number("--layers", "transformer blocks", usual.shape.blocks);
    number("--width", "of the residual stream", usual.shape.width);
    number("--heads", "of attention", usual.shape.heads);
    number("--context", "bytes of a sequence", usual.shape.context);
    number("--batch", "sequences of a step, shared out to the ranks", usual.shape.batch);
    number("--restart-ms", "from a death to the start of a fresh rank in its place", usual.restart_ms);
    number("--silence-ms", "until a process that stands still is killed by the others, 200 at least",
           usual.silence_ms);
    app.add_option("--checkpoint-dir", checkpoint_dir_,
                   "also save the job there, in case more die than the redundancy tolerates, and continue "
                   "from what is there")
        ->type_name("DIR");
    number("--checkpoint-every", "steps", usual.checkpoint_every);
    app.add_option("--text", text_, "train on this file, any bytes (default: as train_gpt)")
        ->type_name("FILE");
    app.add_flag("--json", json_, "JSON on standard output, all else on standard error");
  }
  job_options(const job_options&) = delete;
  job_options& operator=(const job_options&) = delete;

  /// @pre the app has parsed.
  /// @throws usage_error  the text has valid values.
  [[nodiscard]] command_line asked() const {
    command_line all;
    job_plan& plan = all.plan;
    plan.ranks = static_cast<std::uint32_t>(count("--ranks", plan.ranks, 2, 32));
    plan.steps = count("--steps", plan.steps, 1, 1'000'000'000);
    plan.faults = static_cast<std::uint32_t>(count("--faults", plan.faults, 0, 1'000'000));
    plan.seed = count("--seed", plan.seed, 0, 1'000'000'000'000);
    plan.shape.blocks = count("--layers", plan.shape.blocks, 1, 1024);
    plan.shape.width = count("--width", plan.shape.width, 1, 16'384);
    plan.shape.heads = count("--heads", plan.shape.heads, 1, 256);
    plan.shape.context = count("--context", plan.shape.context, 1, 8192);
    const std::uint64_t even = (plan.shape.batch + plan.ranks - 1) / plan.ranks * plan.ranks;
    plan.shape.batch = count("--batch", even, 1, 4096);
    plan.restart_ms = count("--restart-ms", plan.restart_ms, 0, 3'600'000);
    plan.silence_ms = count("--silence-ms", plan.silence_ms, least_silence_ms, 3'600'000);
    read_redundancy(plan);
    read_transport(plan);
    read_checkpoints(plan);
    if (plan.shape.batch % plan.ranks != 0) {
      throw example::usage_error(fmt::format("--ranks {} does not divide --batch {}; --batch {} would do",
                                             plan.ranks, plan.shape.batch,
                                             (plan.shape.batch / plan.ranks + 1) * plan.ranks));
    }
    if (plan.shape.width % plan.shape.heads != 0) {
      throw example::usage_error(fmt::format("--heads {} does not divide --width {}; --width {} would do",
                                             plan.shape.heads, plan.shape.width,
                                             (plan.shape.width / plan.shape.heads + 1) * plan.shape.heads));
    }
    if (plan.faults >= plan.steps) {
      throw example::usage_error(
          fmt::format("--faults {} in --steps {}: each needs a step at least; ask for "
                      "--steps {}",
                      plan.faults, plan.steps, plan.faults * 20));
    }
    all.text_file = text_;
    all.json = json_;
    return all;
  }

 private:
  void read_redundancy(job_plan& plan) const {
    if (redundancy_) {
      try {
        plan.redundancy = llmmem::redundancy_scheme::parse(*redundancy_);
      } catch (const llmmem::argument_error& wrong) {
        throw example::usage_error(fmt::format("--redundancy: {}", example::printable(wrong.what(), 400)));
      }
    }
    if (const auto why = plan.redundancy.fits(llmmem::rank_count{plan.ranks}))
      throw example::usage_error("--redundancy " + *why);
  }

  void read_transport(job_plan& plan) const {
    if (transport_ == "thread") {
      plan.transport = transport_kind::threads;
    } else if (transport_ == "sim") {
      plan.transport = transport_kind::simulated;
    } else if (!transport_.empty() && transport_ != "socket") {
      throw example::usage_error(fmt::format("--transport: '{}' is unknown; there are socket, thread and sim",
                                             example::printable(transport_, 64)));
    }
  }

  void read_checkpoints(job_plan& plan) const {
    plan.checkpoint_every = count("--checkpoint-every", plan.checkpoint_every, 1, 1'000'000'000);
    if (!checkpoint_dir_) {
      if (numbers_.at("--checkpoint-every"))
        throw example::usage_error("--checkpoint-every is of checkpoints; add --checkpoint-dir DIR");
      return;
    }
    if (checkpoint_dir_->empty()) throw example::usage_error("--checkpoint-dir \"\": must be a folder");
    if (plan.transport == transport_kind::simulated) {
      throw example::usage_error(
          "--checkpoint-dir: files are not simulated; take --transport socket or thread, or leave it out");
    }
    plan.checkpoint_dir = *checkpoint_dir_;
  }

  [[nodiscard]] std::uint64_t count(const std::string& name, std::uint64_t otherwise, std::uint64_t least,
                                    std::uint64_t most) const {
    const std::optional<std::string>& text = numbers_.at(name);
    return text ? example::usage_count(name, *text, least, most) : otherwise;
  }

  std::optional<std::string> text_{};
  std::optional<std::string> redundancy_{};
  std::optional<std::string> checkpoint_dir_{};
  std::string transport_{};
  bool json_ = false;
  std::map<std::string, std::optional<std::string>> numbers_{};
};

}  // namespace survive_failures
