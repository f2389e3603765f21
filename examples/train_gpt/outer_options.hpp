/// @file
/// The options of workers that train apart.
#pragma once

#include <llmmem/comm/wire_form.hpp>
#include <llmmem/kernels/outer_update.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "common/program.hpp"

namespace train_gpt {

/// Workers that each take many steps alone, and then one outer step together (`llmmem::outer_rounds`).
struct outer_options {
  std::uint64_t local_steps = 0;  ///< of a round; 0: there are no rounds
  std::uint32_t workers = 1;
  llmmem::outer_hyper by{};
  llmmem::wire_form wire{};

  [[nodiscard]] bool joins() const noexcept { return local_steps != 0; }
  /// The rounds that end in steps `first` to `end` - 1.
  [[nodiscard]] std::uint64_t rounds(std::uint64_t first, std::uint64_t end) const noexcept {
    return joins() ? end / local_steps - first / local_steps : 0;
  }
};

/// These options on a command line.
class outer_arguments {
 public:
  explicit outer_arguments(CLI::App& app) {
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.add_option("--local-steps", local_steps_,
                   "each of --workers takes so many steps alone; then all take an outer step together, in "
                   "the direction of their mean change")
        ->type_name("N");
    app.add_option("--workers", workers_,
                   "that train apart, each of --ranks ranks (default: 1), with its share of every batch; "
                   "needs --local-steps")
        ->type_name("N");
    app.add_option("--outer", outer_,
                   "the optimizer of outer steps: nesterov (default), as in DiLoCo; or sgd, with which the "
                   "workers take the mean of their weights")
        ->type_name("nesterov|sgd");
    app.add_option("--outer-rate", rate_, "of outer steps (default: 0.7 with nesterov, 1 with sgd)")
        ->type_name("X");
    app.add_option("--outer-momentum", momentum_, "of outer steps (default: 0.9 with nesterov, 0 with sgd)")
        ->type_name("X");
    app.add_option("--outer-wire", wire_, "the form of an outer step's messages (default: plain)")
        ->type_name("plain|bf16|fp8|int8|int4");
  }
  outer_arguments(const outer_arguments&) = delete;  // the app refers to this object
  outer_arguments& operator=(const outer_arguments&) = delete;

  /// @throws usage_error
  [[nodiscard]] outer_options asked() const {
    if (!local_steps_) {
      if (workers_ || !outer_.empty() || rate_ || momentum_ || !wire_.empty())
        throw example::usage_error(
            "--workers and --outer, with its rate, momentum and wire, are of workers that train apart; add "
            "--local-steps N");
      return {};
    }
    if (!workers_) {
      throw example::usage_error(
          "--local-steps is of workers that train apart; add --workers N (with 1, the one worker takes outer "
          "steps by itself)");
    }
    outer_options all;
    all.local_steps = example::usage_count("--local-steps", *local_steps_, 1, 1'000'000);
    all.workers = static_cast<std::uint32_t>(example::usage_count("--workers", *workers_, 1, 64));
    if (outer_ == "sgd") {
      all.by = {.rate = 1, .momentum = 0, .nesterov = false};
    } else if (!outer_.empty() && outer_ != "nesterov") {
      throw example::usage_error(fmt::format("--outer: '{}' is unknown; there are nesterov and sgd",
                                             example::printable(outer_, 64)));
    }
    if (rate_)
      all.by.rate = example::usage_number("--outer-rate", *rate_, 1e-6F, 100.0F, "from 0.000001 to 100");
    if (momentum_)
      all.by.momentum =
          example::usage_number("--outer-momentum", *momentum_, 0.0F, 0.999999F, "from 0 to 0.999999");
    using llmmem::wire_format;
    static const std::map<std::string, wire_format> known{
        {"", wire_format::plain},  {"plain", wire_format::plain}, {"bf16", wire_format::bf16},
        {"fp8", wire_format::fp8}, {"int8", wire_format::int8},   {"int4", wire_format::int4}};
    const auto found = known.find(wire_);
    if (found == known.end()) {
      throw example::usage_error(
          fmt::format("--outer-wire: '{}' is unknown; there are plain, bf16, fp8, int8 and int4",
                      example::printable(wire_, 64)));
    }
    all.wire = found->second;
    return all;
  }

 private:
  std::optional<std::string> local_steps_{};
  std::optional<std::string> workers_{};
  std::string outer_;
  std::optional<std::string> rate_{};
  std::optional<std::string> momentum_{};
  std::string wire_;
};

}  // namespace train_gpt
