/// @file
/// The command line of a training program.
#pragma once

#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/training/loss_scale.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "common/program.hpp"
#include "common/text.hpp"
#include "train_gpt/outer_options.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/step_guard.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// The options of every training program; a program adds its own to the same `app`.
class training_options {
 public:
  explicit training_options(CLI::App& app) : outer_(app) {
    const command_line usual;
    const auto number = [&](const char* name, const std::string& what, std::size_t otherwise) {
      app.add_option(name, numbers_[name], fmt::format("{} (default: {})", what, otherwise))->type_name("N");
    };
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.add_option("--text", asked_.text_file,
                   "train on this file, any bytes (default: $LLMMEM_DATA_DIR/tinyshakespeare.txt, else this "
                   "project's own headers)")
        ->type_name("FILE");
    number("--steps", "of training", static_cast<std::size_t>(usual.steps));
    number("--seed", "of weights and batches", static_cast<std::size_t>(usual.seed));
    number("--threads", "that compute; the figures do not depend on it", usual.threads);
    number("--layers", "transformer blocks", usual.shape.blocks);
    number("--width", "of the residual stream", usual.shape.width);
    number("--heads", "of attention", usual.shape.heads);
    number("--context", "bytes of a sequence", usual.shape.context);
    number("--batch", "sequences of a step", usual.shape.batch);
    number("--evaluate", "batches of the last loss, which is their mean",
           static_cast<std::size_t>(usual.evaluate));
    app.add_option("--memory", memory_, "plain: all in host memory; tiered: needs --budget-mib")
        ->type_name("plain|tiered");
    number("--budget-mib", "MiB of the first tier, which holds all data of the computation", 0);
    number("--host-mib", "MiB of a second tier of host memory; 0: none", 0);
    app.add_option("--schedule", schedule_, "when pieces are brought up (default: next_use)")
        ->type_name("on_demand|lookahead|next_use");
    app.add_option("--tier-dir", asked_.tiers.folder,
                   "folder for the file of the last tier (default: the system's for temporary files)")
        ->type_name("DIR");
    app.add_option(
           "--optimizer", optimizer_,
           "adamw (default), with two moments of each weight; sgd with momentum, with one; adafactor, with a "
           "factor of each row and column; or muon, for the matrices of blocks, with adamw for vectors, the "
           "embedding and the head")
        ->type_name("adamw|sgd|adafactor|muon");
    number("--tiles",
           "parts of each matrix of blocks and head, which are gathered, summed, updated and moved one at a "
           "time; the figures do not depend on it; 0: whole layers",
           0);
    app.add_option("--update", update_,
                   "when the optimizer changes weights (default: in_backward, layer by layer; the figures do "
                   "not depend on it)")
        ->type_name("in_backward|after_backward");
    app.add_option("--checkpoint-dir", asked_.checkpoints.folder,
                   "save the run in this folder during training")
        ->type_name("DIR");
    app.add_option("--checkpoint-copy", asked_.checkpoints.copy,
                   "copy checkpoints to this folder in the background; --resume also looks there")
        ->type_name("DIR");
    app.add_option("--checkpoint-every", every_,
                   "steps between two saves (default: auto, the optimum); the last step is also saved")
        ->type_name("N|auto");
    app.add_flag("--resume", asked_.checkpoints.resumes,
                 "continue with the newest checkpoint in --checkpoint-dir, if there is one");
    number("--ranks", "that share each batch; 0: none", 0);
    app.add_option("--transport", transport_,
                   "what --ranks are: threads of this process (default), or processes joined by sockets")
        ->type_name("thread|socket");
    app.add_option(
           "--parallel", parallel_,
           "the state that each of --ranks keeps (default: data): all; or its shard of the "
           "optimizer's (zero1), also of gradients (zero2), also of weights (zero3); the figures do not "
           "depend on it")
        ->type_name("data|zero1|zero2|zero3");
    number("--gather-ahead", "layers whose weights zero3 gathers in advance, and has memory for", 0);
    number(
        "--sums-in-flight",
        "layers whose gradients the ranks sum during the backward pass of the next ones; the optimizer then "
        "runs after the backward pass",
        0);
    app.add_option(
           "--wire", wire_,
           "the form in which ranks send gradients, and zero3 weights (default: plain): bfloat16 (bf16), "
           "groups of 8-bit floats (fp8) or of integers (int8, int4), or as ZeRO++ (zeropp): weights as "
           "int8 and gradients as int4, which needs --node-ranks; or topk: each rank sends this share of "
           "each layer's gradients, the largest, as floats or bfloat16, and keeps the others with their "
           "momentum (with :kept, also the momentum of those that it sends); needs --optimizer sgd")
        ->type_name("plain|bf16|fp8|int8|int4|zeropp|topk:SHARE[:bf16][:kept]");
    number("--node-ranks",
           "ranks of a node: gathers and sums in two hops, of which one is in the node; 0: one hop", 0);
    app.add_flag("--secondary-shards", asked_.parallel.keeps_secondary,
                 "keep the weights of zero3's forward pass in shards of each node, too, so that the backward "
                 "pass sends nothing to other nodes; the figures do not depend on it");
    app.add_flag("--error-feedback", asked_.parallel.wires.keeps_errors,
                 "add what --wire loses of a sum to the next step's");
    app.add_option(
           "--recompute", recompute_,
           "activations that the backward pass recomputes (default: none): the attention's "
           "(selective), all from each block's input (full), or the cheapest within this many bytes at "
           "once, of each rank; the figures do not depend on it")
        ->type_name("none|selective|full|budget:BYTES");
    app.add_option(
           "--activation-bits", activation_bits_,
           "keep the activations of blocks between their passes as integers of so many bits, rounded "
           "without bias; changes the figures, in the same way for any --memory, --threads and --parallel "
           "(default: floats)")
        ->type_name("8|4|2");
    app.add_option("--clip-norm", clip_norm_,
                   "scale each step's gradients down to this norm, of all of them; the figures do not depend "
                   "on --parallel")
        ->type_name("X");
    app.add_option(
           "--loss-scale", loss_scale_,
           "begin with this factor of the loss, double it after --loss-scale-interval steps, and skip "
           "a step and halve it where a gradient is not finite on any rank; a power of two changes no "
           "figures")
        ->type_name("X");
    number("--loss-scale-interval", "steps in a row without an overflow until the factor doubles",
           usual.guard.growth_interval);
    app.add_flag("--json", asked_.json, "JSON on standard output, all else on standard error");
  }

  training_options(const training_options&) = delete;  // the app refers to this object
  training_options& operator=(const training_options&) = delete;

  /// @pre the app has parsed.
  /// @throws usage_error  the text has valid values.
  [[nodiscard]] command_line asked() const {
    command_line all = asked_;
    all.steps = count("--steps", all.steps, 0, 1'000'000);
    all.seed = count("--seed", all.seed, 0, 1'000'000'000'000);
    all.threads = count("--threads", all.threads, 1, worker_team::most);
    all.shape.blocks = count("--layers", all.shape.blocks, 1, 1024);
    all.shape.width = count("--width", all.shape.width, 1, 16'384);
    all.shape.heads = count("--heads", all.shape.heads, 1, 256);
    all.shape.context = count("--context", all.shape.context, 1, 8192);
    all.shape.batch = count("--batch", all.shape.batch, 1, 4096);
    all.evaluate = count("--evaluate", all.evaluate, 1, 1'000'000);
    if (all.shape.width % all.shape.heads != 0) {
      const std::size_t width = (all.shape.width / all.shape.heads + 1) * all.shape.heads;
      throw example::usage_error(fmt::format("--heads {} does not divide --width {}; --width {} would do",
                                             all.shape.heads, all.shape.width, width));
    }
    read_memory(all);
    read_tiles(all);
    read_checkpoints(all);
    read_parallel(all);
    read_recompute(all);
    read_guard(all);
    return all;
  }

 private:
  void read_memory(command_line& all) const {
    if (memory_ == "tiered") {
      all.memory = memory_kind::tiered;
    } else if (!memory_.empty() && memory_ != "plain") {
      throw example::usage_error(fmt::format("--memory: '{}' is unknown; there are plain and tiered",
                                             example::printable(memory_, 64)));
    }
    if (optimizer_ == "sgd") {
      all.shape.optimizer = llmmem::optimizer_form::sgd;
    } else if (optimizer_ == "adafactor") {
      all.shape.optimizer = llmmem::optimizer_form::adafactor;
    } else if (optimizer_ == "muon") {
      all.shape.optimizer = llmmem::optimizer_form::muon;
    } else if (!optimizer_.empty() && optimizer_ != "adamw") {
      throw example::usage_error(
          fmt::format("--optimizer: '{}' is unknown; there are adamw, sgd, adafactor and muon, whose state "
                      "is floats, as the weights that this program computes with",
                      example::printable(optimizer_, 64)));
    }
    if (update_ == "after_backward") {
      all.update = update_time::after_backward;
    } else if (!update_.empty() && update_ != "in_backward") {
      throw example::usage_error(
          fmt::format("--update: '{}' is unknown; there are in_backward and after_backward",
                      example::printable(update_, 64)));
    }
    if (schedule_ == "on_demand") {
      all.tiers.schedule = schedule_kind::on_demand;
    } else if (schedule_ == "lookahead") {
      all.tiers.schedule = schedule_kind::lookahead;
    } else if (!schedule_.empty() && schedule_ != "next_use") {
      throw example::usage_error(
          fmt::format("--schedule: '{}' is unknown; there are on_demand, lookahead and next_use",
                      example::printable(schedule_, 64)));
    }
    all.tiers.budget_mib = count("--budget-mib", 0, 1, 1 << 24);
    all.tiers.host_mib = count("--host-mib", 0, 0, 1 << 24);
    if (all.memory == memory_kind::tiered && all.tiers.budget_mib == 0) {
      throw example::usage_error("--memory tiered needs --budget-mib N, the MiB of the first tier");
    }
    const bool of_tiers = all.tiers.budget_mib != 0 || all.tiers.host_mib != 0 || !schedule_.empty() ||
                          !all.tiers.folder.empty();
    if (all.memory == memory_kind::plain && of_tiers) {
      throw example::usage_error(
          "--budget-mib, --host-mib, --schedule and --tier-dir are of tiers; add --memory tiered");
    }
  }

  void read_checkpoints(command_line& all) const {
    if (!every_.empty() && every_ != "auto")
      all.checkpoints.every = example::usage_count("--checkpoint-every", every_, 1, 1'000'000);
    const bool of_checkpoints = !every_.empty() || all.checkpoints.resumes || !all.checkpoints.copy.empty();
    if (all.checkpoints.folder.empty() && of_checkpoints) {
      throw example::usage_error(
          "--checkpoint-every, --checkpoint-copy and --resume are of checkpoints; add --checkpoint-dir DIR");
    }
  }

  void read_parallel(command_line& all) const {
    using llmmem::zero_stage;
    if (parallel_ == "zero1") {
      all.parallel.stage = zero_stage::optimizer;
    } else if (parallel_ == "zero2") {
      all.parallel.stage = zero_stage::gradients;
    } else if (parallel_ == "zero3") {
      all.parallel.stage = zero_stage::weights;
    } else if (!parallel_.empty() && parallel_ != "data") {
      throw example::usage_error(
          fmt::format("--parallel: '{}' is unknown; there are data, zero1, zero2 and zero3",
                      example::printable(parallel_, 64)));
    }
    if (transport_ == "socket") {
      all.parallel.are_processes = true;
    } else if (!transport_.empty() && transport_ != "thread") {
      throw example::usage_error(fmt::format("--transport: '{}' is unknown; there are thread and socket",
                                             example::printable(transport_, 64)));
    }
    all.parallel.outer = outer_.asked();
    const std::uint64_t of_worker = count("--ranks", 0, 0, 64);
    const std::uint64_t workers = all.parallel.outer.workers;
    all.parallel.ranks =
        all.parallel.outer.joins() ? std::max<std::uint64_t>(of_worker, 1) * workers : of_worker;
    if (all.parallel.ranks > 64) {
      throw example::usage_error(fmt::format("{} --workers of {} --ranks are {} ranks; there may be 64",
                                             workers, of_worker, all.parallel.ranks));
    }
    all.parallel.gather_ahead = static_cast<std::uint32_t>(count("--gather-ahead", 0, 0, 1024));
    if (all.shape.optimizer == llmmem::optimizer_form::muon && all.parallel.stage != zero_stage::none) {
      throw example::usage_error(
          "--optimizer muon works on whole matrices, which shards cut; leave --parallel out: with data, the "
          "ranks share out the matrices of each layer");
    }
    if (all.parallel.gather_ahead != 0 && all.parallel.stage != zero_stage::weights)
      throw example::usage_error("--gather-ahead is of weights in shards; add --parallel zero3");
    read_sums_in_flight(all);
    const std::size_t ranks = all.parallel.ranks;
    read_wires(all);
    if (ranks == 0) {
      if (!parallel_.empty()) throw example::usage_error("--parallel is of ranks; add --ranks N");
      if (!transport_.empty()) throw example::usage_error("--transport is of ranks; add --ranks N");
      return;
    }
    if (all.shape.batch % ranks != 0) {
      const std::string who = workers == 1 ? fmt::format("--ranks {} does", ranks)
                                           : fmt::format("{} ranks of all --workers do", ranks);
      throw example::usage_error(fmt::format("{} not divide --batch {}; --batch {} would do", who,
                                             all.shape.batch, (all.shape.batch / ranks + 1) * ranks));
    }
  }

  void read_tiles(command_line& all) const {
    all.shape.tiles = static_cast<std::uint32_t>(count("--tiles", 0, 0, 16'384));
    if (all.shape.tiles == 0) return;
    if (all.shape.tiles > all.shape.width) {
      throw example::usage_error(
          fmt::format("--tiles {} of matrices with --width {} rows; each tile has at least one",
                      all.shape.tiles, all.shape.width));
    }
    const bool is_muon = all.shape.optimizer == llmmem::optimizer_form::muon;
    if (is_muon || all.shape.optimizer == llmmem::optimizer_form::adafactor) {
      throw example::usage_error(
          fmt::format("--optimizer {} works on whole matrices, which --tiles cuts; leave one of the two out",
                      is_muon ? "muon" : "adafactor"));
    }
    if (wire_.rfind("topk:", 0) == 0) {
      throw example::usage_error(
          "--wire topk sends the largest gradients of each layer, and with --tiles would send those of each "
          "tile, which are others; leave one of the two out");
    }
  }

  void read_sums_in_flight(command_line& all) const {
    all.parallel.sums_in_flight = static_cast<std::uint32_t>(count("--sums-in-flight", 0, 0, 1024));
    if (all.parallel.sums_in_flight == 0) return;
    if (all.parallel.ranks == 0) throw example::usage_error("--sums-in-flight is of ranks; add --ranks N");
    if (update_ == "in_backward") {
      throw example::usage_error(
          "--sums-in-flight sums a layer's gradients while the next layer is computed, and --update "
          "in_backward "
          "needs them before; leave --update out");
    }
    all.update = update_time::after_backward;
  }

  void read_wires(command_line& all) const {
    using llmmem::wire_format;
    static const std::map<std::string, wire_format> known{
        {"", wire_format::plain},     {"plain", wire_format::plain}, {"bf16", wire_format::bf16},
        {"fp8", wire_format::fp8},    {"int8", wire_format::int8},   {"int4", wire_format::int4},
        {"zeropp", wire_format::int4}};
    const bool is_top_k = wire_.rfind("topk:", 0) == 0;
    const auto found = known.find(is_top_k ? "" : wire_);
    if (found == known.end()) {
      throw example::usage_error(fmt::format(
          "--wire: '{}' is unknown; there are plain, bf16, fp8, int8, int4, zeropp and topk:SHARE",
          example::printable(wire_, 64)));
    }
    llmmem::sharded_wires& wires = all.parallel.wires;
    wires.node_ranks = static_cast<std::uint32_t>(count("--node-ranks", 0, 0, 64));
    wires.sum = {found->second, found->second};
    // Weights that all ranks have completely are their master copies.
    if (all.parallel.stage == llmmem::zero_stage::weights)
      wires.gather = wire_ == "zeropp" ? wire_format::int8 : found->second;
    const std::size_t ranks = all.parallel.ranks;
    if (ranks == 0 && (!wire_.empty() || wires.node_ranks != 0 || wires.keeps_errors))
      throw example::usage_error("--wire, --node-ranks and --error-feedback are of ranks; add --ranks N");
    if (is_top_k) read_top_k(all);
    if (wire_ == "zeropp" && wires.node_ranks == 0)
      throw example::usage_error("--wire zeropp sums in two hops; add --node-ranks N, the ranks of a node");
    const std::uint32_t of_worker = all.parallel.ranks_of_worker();
    if (wires.node_ranks != 0 && of_worker % wires.node_ranks != 0)
      throw example::usage_error(
          fmt::format("--node-ranks {} does not divide --ranks {}; --ranks {} would do", wires.node_ranks,
                      of_worker, (of_worker / wires.node_ranks + 1) * wires.node_ranks));
    if (all.parallel.keeps_secondary &&
        (all.parallel.stage != llmmem::zero_stage::weights || wires.node_ranks < 2))
      throw example::usage_error(
          "--secondary-shards are of weights in shards, and of nodes; add --parallel zero3 and --node-ranks "
          "N, at "
          "least 2");
    if (all.parallel.keeps_secondary && all.parallel.gather_ahead != 0)
      throw example::usage_error(
          "--secondary-shards with --gather-ahead, which gathers from all ranks; leave one of the two out");
    if (wires.keeps_errors && found->second == wire_format::plain)
      throw example::usage_error(
          "--error-feedback is of sums that lose something; add --wire int8, or another");
    if (wires.keeps_errors && !all.checkpoints.folder.empty()) {
      throw example::usage_error(
          "--error-feedback with --checkpoint-dir: what sums have lost is not in a checkpoint, so a resumed "
          "run would have other weights; leave one of the two out");
    }
  }

  void read_top_k(command_line& all) const {
    std::string share = wire_.substr(5);
    llmmem::top_k_plan& top_k = all.parallel.top_k;
    const auto ends_with = [&](const std::string& end) {
      if (!share.ends_with(end)) return false;
      share.resize(share.size() - end.size());
      return true;
    };
    if (ends_with(":kept")) all.parallel.sent = llmmem::sent_momentum::kept;
    if (ends_with(":bf16")) top_k.form = llmmem::sparse_values::bf16;
    top_k.density = example::usage_number("--wire topk:", share, 1e-9, 1.0,
                                          "from 0.000000001 to 1, then :bf16, :kept, both or neither");
    if (all.shape.optimizer != llmmem::optimizer_form::sgd) {
      throw example::usage_error(
          "--wire topk adds momentum before it sends, and another optimizer would take its own moments of "
          "sums that are mostly zeros; add --optimizer sgd");
    }
    all.shape.corrects_momentum = true;
    if (all.parallel.stage != llmmem::zero_stage::none) {
      throw example::usage_error(
          "--wire topk has each rank keep momentum and unsent gradients of all weights, which leaves nothing "
          "to shard but the weights; leave --parallel out");
    }
    if (all.parallel.wires.node_ranks != 0) {
      throw example::usage_error("--wire topk sums in one hop; leave --node-ranks out");
    }
    if (all.parallel.wires.keeps_errors) {
      throw example::usage_error(
          "--error-feedback is of other wires: with --wire topk, what is not sent waits in any case; leave "
          "it "
          "out");
    }
    if (all.parallel.sums_in_flight != 0) {
      throw example::usage_error(
          "--sums-in-flight sums all gradients, and --wire topk a share; leave one of the two out");
    }
  }

  void read_recompute(command_line& all) const {
    const std::string prefix = "budget:";
    if (recompute_ == "selective") {
      all.recompute.kind = recompute_kind::selective;
    } else if (recompute_ == "full") {
      all.recompute.kind = recompute_kind::full;
    } else if (recompute_.rfind(prefix, 0) == 0) {
      all.recompute.kind = recompute_kind::budget;
      all.recompute.budget_bytes = example::usage_count(
          "--recompute budget:", recompute_.substr(prefix.size()), 1, std::uint64_t{1} << 50);
    } else if (!recompute_.empty() && recompute_ != "none") {
      throw example::usage_error(
          fmt::format("--recompute: '{}' is unknown; there are none, selective, full and budget:BYTES",
                      example::printable(recompute_, 64)));
    }
    if (!activation_bits_) return;
    if (activation_bits_ != "8" && activation_bits_ != "4" && activation_bits_ != "2") {
      throw example::usage_error(fmt::format("--activation-bits: '{}' is unknown; there are 8, 4 and 2",
                                             example::printable(*activation_bits_, 64)));
    }
    if (all.recompute.kind != recompute_kind::none) {
      throw example::usage_error(
          "--recompute promises the figures of the run without it, and --activation-bits would have it "
          "compute "
          "from rounded activations; leave one of the two out");
    }
    all.activation_bits = static_cast<std::uint32_t>(activation_bits_->front() - '0');
  }

  void read_guard(command_line& all) const {
    const auto value = [](const char* name, const std::optional<std::string>& given, double least,
                          double most, const char* range) -> std::optional<double> {
      if (!given) return std::nullopt;
      return example::usage_number(name, *given, least, most, range);
    };
    const llmmem::loss_scale_options rules;
    all.guard.clip_norm =
        value("--clip-norm", clip_norm_, guard_options::least_clip_norm, 1e300, "from 2^-24 to 1e300");
    all.guard.loss_scale =
        value("--loss-scale", loss_scale_, rules.least, guard_options::most_loss_scale, "from 2^-24 to 2^64");
    all.guard.growth_interval =
        static_cast<std::uint32_t>(count("--loss-scale-interval", rules.growth_interval, 1, 1'000'000'000));
    if (!all.guard.loss_scale && numbers_.at("--loss-scale-interval"))
      throw example::usage_error("--loss-scale-interval is of a loss scale; add --loss-scale X");
    if (all.guard.loss_scale && all.parallel.wires.keeps_errors) {
      throw example::usage_error(
          "--error-feedback with --loss-scale: what sums have lost is in units of a scale that changes; "
          "leave "
          "one of the two out");
    }
    if (!all.guard.guards()) return;
    if (all.parallel.top_k.density != 0) {
      throw example::usage_error(
          "--clip-norm and --loss-scale decide by the gradients of one step, and --wire topk sends those of "
          "many "
          "in one; leave one of the two out");
    }
    if (update_ == "in_backward") {
      throw example::usage_error(
          "--clip-norm and --loss-scale decide by all gradients of a step, which --update in_backward does "
          "not wait for; leave it out");
    }
    constexpr std::uint64_t most = std::uint64_t{1} << 31;  // of `gradient_norm`
    if (const std::uint64_t parameters = all.shape.model().parameters(); parameters > most) {
      throw example::usage_error(fmt::format(
          "--clip-norm and --loss-scale add the squares of at most {} gradients, this model has {}; "
          "lower --layers or --width",
          most, parameters));
    }
    all.update = update_time::after_backward;
  }

  [[nodiscard]] std::uint64_t count(const std::string& name, std::uint64_t otherwise, std::uint64_t least,
                                    std::uint64_t most) const {
    const std::optional<std::string>& text = numbers_.at(name);
    return text ? example::usage_count(name, *text, least, most) : otherwise;
  }

  outer_arguments outer_;
  command_line asked_;
  std::string memory_;
  std::string schedule_;
  std::string optimizer_;
  std::string update_;
  std::string every_;
  std::string parallel_;
  std::string transport_;
  std::string wire_;
  std::optional<std::string> clip_norm_{};
  std::optional<std::string> loss_scale_{};
  std::string recompute_;
  std::optional<std::string> activation_bits_{};
  std::map<std::string, std::optional<std::string>> numbers_;
};

}  // namespace train_gpt
