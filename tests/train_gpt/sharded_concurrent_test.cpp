/// Ranks that share a batch, their state whole or in shards, train as one.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/program_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/application.hpp"
#include "train_gpt/ranks_run.hpp"
#include "train_gpt/sharded_stores.hpp"
#include "train_gpt/step_guard.hpp"

using namespace train_gpt;
using llmmem::zero_stage;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

constexpr const char* readme = LLMMEM_SOURCE_DIR "/README.md";
constexpr const char* kinds[] = {"data", "zero1", "zero2", "zero3"};
constexpr gpt_shape shape{.blocks = 2, .width = 12, .heads = 2, .context = 7, .batch = 12};
constexpr std::uint64_t steps = 3;

outcome run(const std::vector<std::string>& more) {
  std::vector<std::string> all{"--layers",  "2", "--width", "12",   "--heads", "2",
                               "--context", "7", "--batch", "12",   "--steps", "3",
                               "--threads", "1", "--text",  readme, "--json"};
  all.insert(all.end(), more.begin(), more.end());
  return run_captured([&](std::FILE* out, std::FILE* notes) { return run_application(all, out, notes); });
}

nlohmann::json json_of(const std::vector<std::string>& more) {
  const outcome done = run(more);
  REQUIRE_MESSAGE(done.status == exit_status::success, done.notes);
  return nlohmann::json::parse(done.out);
}

std::uint64_t parameters() {
  return shape.model().parameters();
}

std::uint64_t elements_of_layer(std::size_t layer) {
  return parameter_layout(shape, shape.layer(layer)).elements;
}

/// What a rank keeps of P parameters of 4 bytes, gradients of 4 and moments of 8.
std::uint64_t formula(std::size_t kind, std::uint64_t share) {
  const std::uint64_t p = parameters();
  switch (kind) {
    case 0:
      return 16 * p;
    case 1:
      return 8 * p + 8 * share;
    case 2:
      return 4 * p + 12 * share;
    default:
      return 16 * share;
  }
}

}  // namespace

TEST_CASE("data parallelism and ZeRO 1 to 3 have the same losses and weights, bit for bit") {
  const auto plain = json_of({});
  CHECK_FALSE(plain.contains("ranks"));
  for (const std::string update : {"in_backward", "after_backward"}) {
    for (const std::string ranks : {"1", "2", "3", "4"}) {
      CAPTURE(ranks);
      const auto data = json_of({"--ranks", ranks, "--update", update});
      CHECK(data["losses"].size() == steps + 1);
      CHECK(data["ranks"].size() == std::stoul(ranks));
      if (ranks == "1") {
        CHECK(data["losses"] == plain["losses"]);
        CHECK(data["digest"] == plain["digest"]);
      }
      // Another order of the same sums: the ranks have seen the whole batch between them, each its own share.
      const auto loss = [](const nlohmann::json& of, std::size_t step) {
        return std::strtod(of["losses"][step].get<std::string>().c_str(), nullptr);
      };
      CHECK(loss(data, 0) == doctest::Approx(loss(plain, 0)).epsilon(1e-9));
      CHECK(loss(data, steps) == doctest::Approx(loss(plain, steps)).epsilon(1e-6));
      for (const std::string kind : kinds) {
        CAPTURE(kind);
        const auto sharded = json_of({"--ranks", ranks, "--parallel", kind, "--update", update});
        CHECK(sharded["losses"] == data["losses"]);
        CHECK(sharded["digest"] == data["digest"]);
      }
      const auto ahead =
          json_of({"--ranks", ranks, "--parallel", "zero3", "--gather-ahead", "1", "--update", update});
      CHECK(ahead["losses"] == data["losses"]);
      CHECK(ahead["digest"] == data["digest"]);
    }
  }
}

TEST_CASE("a rank keeps the bytes of its stage's formula, and in addition a layer's buffers") {
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < shape.layers(); ++i)
    largest = std::max(largest, 4 * elements_of_layer(i));
  for (std::uint64_t ranks = 1; ranks <= 4; ++ranks) {
    for (std::size_t kind = 0; kind < 4; ++kind) {
      CAPTURE(ranks);
      CAPTURE(kind);
      const auto json = json_of({"--ranks", std::to_string(ranks), "--parallel", kinds[kind]});
      std::uint64_t peak = 0;
      for (std::uint64_t rank = 0; rank < ranks; ++rank) {
        const auto& told = json["ranks"][rank];
        const std::uint64_t share = llmmem::even_share(parameters(), rank, ranks).count;
        CHECK(told["kept_state_bytes"] == formula(kind, share));
        // A layer's gradients (ZeRO 2), and its weights (ZeRO 3); and to sum them, as many pieces of a layer
        // as there are ranks, of which one rank owns no more than its share of all.
        const std::uint64_t layers = kind == 3 ? 2 : kind == 2 ? 1 : 0;
        const std::uint64_t sums = ranks == 1 ? 0 : ranks * std::min(largest, 4 * share);
        const auto extra = told["peak_state_bytes"].get<std::uint64_t>() - formula(kind, share);
        CHECK(extra <= layers * largest + sums);
        if (ranks > 1) CHECK(extra > 0);
        if (ranks == 1) CHECK(extra == 0);
        peak = std::max(peak, told["peak_bytes"].get<std::uint64_t>());
        const gpt_shape mine = shape_of_rank(shape, ranks);
        const planned_bytes plan = plan_bytes(mine, 1);
        CHECK(told["peak_bytes"] ==
              told["peak_state_bytes"].get<std::uint64_t>() + plan.activations + plan.workspace);
      }
      CHECK(json["peak_resident_bytes"] == peak);
    }
  }
}

TEST_CASE("the ranks send 2P per step, 3P with sharded weights, and each (N - 1) / N of it") {
  for (std::uint64_t ranks = 1; ranks <= 4; ++ranks) {
    for (std::size_t kind = 0; kind < 4; ++kind) {
      CAPTURE(ranks);
      CAPTURE(kind);
      const auto json = json_of({"--ranks", std::to_string(ranks), "--parallel", kinds[kind]});
      std::uint64_t sent = 0;
      for (const auto& each : json["ranks"])
        sent += each["bytes_sent"].get<std::uint64_t>();
      const std::uint64_t p = 4 * parameters();
      const std::uint64_t embedding = 4 * elements_of_layer(0);
      // Of all ranks together; every part of a pass is P (N - 1), wherever the shards are cut. Weights are
      // gathered forward and backward, but for the embedding, whose backward pass has no need of them; in the
      // evaluation that ends the run; and for the digest.
      const std::uint64_t passes = kind == 3   ? steps * (3 * p - embedding) + 2 * p
                                   : kind == 0 ? steps * 2 * p
                                               : steps * 2 * p + p;  // as drawn
      const std::uint64_t losses = (steps + 1) * ranks * sizeof(double);
      CHECK(sent == (ranks - 1) * (passes + losses));
    }
  }
}

TEST_CASE("each wrong option of ranks has its own error, with valid values") {
  const auto wrong = [](const std::vector<std::string>& arguments) {
    const outcome done = run(arguments);
    CHECK(done.status == exit_status::wrong_usage);
    CHECK(done.out.empty());
    return done.notes;
  };
  const std::string hint = "\nrun train_gpt --help for the options\n";
  CHECK(wrong({"--ranks", "5"}) ==
        "train_gpt: --ranks 5 does not divide --batch 12; --batch 15 would do" + hint);
  CHECK(wrong({"--ranks", "65"}) == "train_gpt: --ranks \"65\": must be a whole number from 0 to 64" + hint);
  CHECK(wrong({"--parallel", "zero3"}) == "train_gpt: --parallel is of ranks; add --ranks N" + hint);
  CHECK(wrong({"--ranks", "2", "--parallel", "zero4"}) ==
        "train_gpt: --parallel: 'zero4' is unknown; there are data, zero1, zero2 and zero3" + hint);
  CHECK(wrong({"--ranks", "2", "--parallel", "zero2", "--gather-ahead", "1"}) ==
        "train_gpt: --gather-ahead is of weights in shards; add --parallel zero3" + hint);
  CHECK(wrong({"--ranks", "2", "--parallel", "zero3", "--gather-ahead", "1025"}) ==
        "train_gpt: --gather-ahead \"1025\": must be a whole number from 0 to 1024" + hint);
  CHECK(wrong({"--wire", "int8"}) ==
        "train_gpt: --wire, --node-ranks and --error-feedback are of ranks; add --ranks N" + hint);
  CHECK(
      wrong({"--ranks", "2", "--wire", "int7"}) ==
      "train_gpt: --wire: 'int7' is unknown; there are plain, bf16, fp8, int8, int4, zeropp and topk:SHARE" +
          hint);
  CHECK(wrong({"--ranks", "2", "--wire", "zeropp"}) ==
        "train_gpt: --wire zeropp sums in two hops; add --node-ranks N, the ranks of a node" + hint);
  CHECK(wrong({"--ranks", "4", "--node-ranks", "3"}) ==
        "train_gpt: --node-ranks 3 does not divide --ranks 4; --ranks 6 would do" + hint);
  CHECK(wrong({"--ranks", "2", "--parallel", "zero2", "--node-ranks", "2", "--secondary-shards"}) ==
        "train_gpt: --secondary-shards are of weights in shards, and of nodes; add --parallel zero3 and "
        "--node-ranks N, at least 2" +
            hint);
  CHECK(
      wrong({"--ranks", "2", "--parallel", "zero3", "--node-ranks", "2", "--secondary-shards",
             "--gather-ahead", "1"}) ==
      "train_gpt: --secondary-shards with --gather-ahead, which gathers from all ranks; leave one of the two "
      "out" +
          hint);
  CHECK(wrong({"--ranks", "2", "--error-feedback"}) ==
        "train_gpt: --error-feedback is of sums that lose something; add --wire int8, or another" + hint);
  CHECK(wrong({"--ranks", "2", "--wire", "int8", "--error-feedback", "--checkpoint-dir", "/nowhere"}) ==
        "train_gpt: --error-feedback with --checkpoint-dir: what sums have lost is not in a checkpoint, so a "
        "resumed run would have other weights; leave one of the two out" +
            hint);
  CHECK(wrong({"--ranks", "2", "--wire", "int8", "--error-feedback", "--loss-scale", "8"}) ==
        "train_gpt: --error-feedback with --loss-scale: what sums have lost is in units of a scale that "
        "changes; "
        "leave one of the two out" +
            hint);
  for (const std::string text : {"0", "-1", "inf", "nan", "1e-40", "1e301", "1e400", "", " 1", "1x"}) {
    CHECK(wrong({"--clip-norm", text}) ==
          "train_gpt: --clip-norm \"" + text + "\": must be a number from 2^-24 to 1e300" + hint);
  }
  for (const std::string text : {"two", "0", "-2", "inf", "nan", "5e-8", "2e19", "1e-45", ""}) {
    CHECK(wrong({"--loss-scale", text}) ==
          "train_gpt: --loss-scale \"" + text + "\": must be a number from 2^-24 to 2^64" + hint);
  }
  CHECK(wrong({"--loss-scale", "2", "--loss-scale-interval", "0"}) ==
        "train_gpt: --loss-scale-interval \"0\": must be a whole number from 1 to 1000000000" + hint);
  CHECK(wrong({"--loss-scale-interval", "3"}) ==
        "train_gpt: --loss-scale-interval is of a loss scale; add --loss-scale X" + hint);
  CHECK(
      wrong({"--clip-norm", "1", "--update", "in_backward"}) ==
      "train_gpt: --clip-norm and --loss-scale decide by all gradients of a step, which --update in_backward "
      "does not wait for; leave it out" +
          hint);
  CHECK(wrong({"--clip-norm", "1", "--layers", "1024", "--width", "2048"})
            .starts_with(
                "train_gpt: --clip-norm and --loss-scale add the squares of at most 2147483648 gradients, "
                "this model has 515"));
  CHECK(wrong({"--recompute", "half"}) ==
        "train_gpt: --recompute: 'half' is unknown; there are none, selective, full and budget:BYTES" + hint);
  CHECK(wrong({"--recompute", "budget:0"}) ==
        "train_gpt: --recompute budget: \"0\": must be a whole number from 1 to 1125899906842624" + hint);
}

TEST_CASE("the report has the bytes that each rank kept and sent") {
  std::vector<std::string> all{"--layers", "1", "--width",    "8",    "--heads",   "2", "--context", "4",
                               "--batch",  "4", "--steps",    "1",    "--threads", "1", "--text",    readme,
                               "--ranks",  "2", "--parallel", "zero3"};
  const outcome done =
      run_captured([&](std::FILE* out, std::FILE* notes) { return run_application(all, out, notes); });
  REQUIRE(done.status == exit_status::success);
  CHECK(done.notes.find("train_gpt: step 1/1") != done.notes.npos);
  for (const char* said : {"  rank 0 ", "  rank 1 ", "with activations peak", "sent "})
    CHECK(done.out.find(said) != done.out.npos);
}

namespace {

/// Activations of which one `save` fails.
class failing_activations : public host_activations<float, llmmem::host_space> {
 public:
  failing_activations(llmmem::host_space& space, const gpt_shape& of, std::uint64_t fails_in)
      : host_activations(space, of), left_(fails_in) {}
  [[nodiscard]] std::span<float> save(layer_id layer) {
    if (left_-- == 0) throw llmmem::io_error("the drive is gone");
    return host_activations::save(layer);
  }
  [[nodiscard]] std::span<const float> fetch(layer_id layer, const rebuild_activations<float>& rebuild) {
    if (left_-- == 0) throw llmmem::io_error("the drive is gone");
    return host_activations::fetch(layer, rebuild);
  }

 private:
  std::uint64_t left_;
};

/// Three ranks that train two steps; rank 1 has so many bytes for its state, and so many activations.
struct failures {
  std::atomic<int> of_comm{0};
  std::atomic<int> of_memory{0};
  std::atomic<int> of_drive{0};
  std::atomic<int> none{0};
};

void train_three(zero_stage stage, std::uint32_t ahead, std::uint64_t budget, std::uint64_t fails_in,
                 failures& seen, llmmem::optimizer_form optimizer = llmmem::optimizer_form::adamw) {
  gpt_shape mine = shape_of_rank(shape, 3);
  mine.optimizer = optimizer;
  const corpus text("tiny", llmmem_tests::tiny_text(2000), shape);
  llmmem::thread_network net(3);
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 0; seat < 3; ++seat) {
    threads.emplace_back([&, seat] {
      llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(10'000'000'000)).value();
      llmmem::host_space kept({.budget = seat == 1 ? budget : std::uint64_t{1} << 30, .name = "state"});
      try {
        llmmem::host_space host({.budget = std::uint64_t{1} << 30, .name = "host"});
        worker_team team(1);
        sharded_layers<float, llmmem::host_space, decltype(ranks)> state(
            kept, mine, ranks, {.stage = stage, .gather_ahead = ahead});
        failing_activations activations(host, mine, seat == 1 ? fails_in : ~std::uint64_t{0});
        gpt<float, llmmem::host_space> model(mine, team, host);
        // Other optimizers send messages of their own, also between the failing calls.
        const auto when = optimizer == llmmem::optimizer_form::adamw ? update_time::after_backward
                                                                     : update_time::in_backward;
        trainer inner(model, team, state, activations, {}, when);
        rank_trainer training(inner, ranks);
        inner.initialise(1);
        for (std::uint64_t step = 0; step < 2; ++step)
          static_cast<void>(training.step(text.batch(shape, 1, step), step));
        ++seen.none;
      } catch (const llmmem::comm_error&) {
        ++seen.of_comm;
      } catch (const llmmem::out_of_memory&) {
        ++seen.of_memory;
        ranks.revoke();
      } catch (const llmmem::io_error&) {
        ++seen.of_drive;
        ranks.revoke();
      }
      CHECK(kept.used() == 0);
    });
  }
  for (std::thread& each : threads)
    each.join();
}

}  // namespace

TEST_CASE(
    "a layer's gradients are the mean of the ranks', on their owners; unfinished ones belong to no rank") {
  for (const zero_stage stage :
       {zero_stage::none, zero_stage::optimizer, zero_stage::gradients, zero_stage::weights}) {
    CAPTURE(static_cast<int>(stage));
    llmmem::thread_network net(2);
    std::vector<std::thread> threads;
    for (std::uint32_t seat = 0; seat < 2; ++seat) {
      threads.emplace_back([&, seat] {
        llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
        llmmem::communicator ranks(end);
        ranks.join(ranks.after(10'000'000'000)).value();
        llmmem::host_space kept({.budget = std::uint64_t{1} << 30, .name = "state"});
        sharded_layers<float, llmmem::host_space, decltype(ranks)> state(kept, shape, ranks,
                                                                         {.stage = stage});
        using store = decltype(state);
        const layer_id layer = shape.layer(1);
        {
          const state_lease<store, lease_mode::write> mine(state, layer, state_kind::gradients);
          CHECK(mine.values().size() == elements_of_layer(1));
          std::fill(mine.values().begin(), mine.values().end(), seat == 0 ? 3.F : 5.F);
        }
        {
          const state_lease<store, lease_mode::read> sum(state, layer, state_kind::gradients);
          CHECK(sum.values().size() == state.owned(layer).count);
          CHECK(std::all_of(sum.values().begin(), sum.values().end(), [](float each) { return each == 4; }));
        }
        state.end_step(0);
        // Both are through, before one ends everything: who is behind would find its sum ended, too.
        ranks.agree(0, ranks.after(10'000'000'000)).value();
        try {
          const state_lease<store, lease_mode::write> mine(state, layer, state_kind::gradients);
          if (seat == 1) throw llmmem::io_error("the drive is gone");
        } catch (const llmmem::io_error&) {
          CHECK(seat == 1);
          CHECK(ranks.is_revoked());
          return;
        }
        CHECK_THROWS_AS(state.end_step(1), llmmem::comm_error);
        CHECK_THROWS_AS(state.begin_step(2), llmmem::comm_error);
        CHECK_THROWS_AS(static_cast<void>(state.acquire(layer, state_kind::mean, lease_mode::read_write)),
                        llmmem::comm_error);
      });
    }
    for (std::thread& each : threads)
      each.join();
  }
}

TEST_CASE("a run on ranks fails with the original error, not with its consequences on other ranks") {
  command_line asked;
  asked.shape = shape;
  asked.steps = 1;
  asked.threads = 1;
  asked.parallel = {.ranks = 3, .stage = zero_stage::none};
  const corpus text("tiny", llmmem_tests::tiny_text(2000), shape);
  const example::file_handle notes(std::tmpfile(), &std::fclose);
  for (int i = 0; i < 5; ++i) {
    CHECK_THROWS_AS(static_cast<void>(train_in_ranks(asked, formula(0, 0), text, notes.get())),
                    llmmem::out_of_memory);
  }
  CHECK(train_in_ranks(asked, std::uint64_t{1} << 30, text, notes.get()).losses.size() == 2);
}

TEST_CASE("any failure on one rank ends all ranks with an error, and none waits") {
  constexpr std::pair<zero_stage, std::uint32_t> runs[] = {
      {zero_stage::none, 0},    {zero_stage::optimizer, 0}, {zero_stage::gradients, 0},
      {zero_stage::weights, 0}, {zero_stage::weights, 1},   {zero_stage::weights, 3}};
  for (const auto& [stage, ahead] : runs) {
    CAPTURE(static_cast<int>(stage));
    CAPTURE(ahead);
    for (const std::uint64_t fails_in : {0U, 1U, 3U, 5U, 6U, 8U}) {  // forward, backward, the next step
      failures seen;
      train_three(stage, ahead, std::uint64_t{1} << 30, fails_in, seen);
      CHECK(seen.of_drive == 1);
      CHECK(seen.of_comm == 2);
    }
    const std::uint64_t share = llmmem::even_share(parameters(), 1, 3).count;
    const std::uint64_t kept = formula(static_cast<std::size_t>(stage), share);
    for (const std::uint64_t more : {std::uint64_t{0}, std::uint64_t{3000}, std::uint64_t{20'000}}) {
      failures seen;
      train_three(stage, ahead, kept + more, ~std::uint64_t{0}, seen);
      CHECK((seen.none == 3 || (seen.of_memory == 1 && seen.of_comm == 2)));
      if (more == 0) CHECK(seen.of_memory == 1);
    }
    failures well;
    train_three(stage, ahead, std::uint64_t{1} << 30, ~std::uint64_t{0}, well);
    CHECK(well.none == 3);
  }
  for (const auto& [stage, optimizer] : {std::pair(zero_stage::optimizer, llmmem::optimizer_form::adafactor),
                                         std::pair(zero_stage::weights, llmmem::optimizer_form::adafactor),
                                         std::pair(zero_stage::none, llmmem::optimizer_form::muon)}) {
    CAPTURE(static_cast<int>(optimizer));
    for (const std::uint64_t fails_in : {3U, 5U, 6U}) {
      failures seen;
      train_three(stage, stage == zero_stage::weights ? 1 : 0, std::uint64_t{1} << 30, fails_in, seen,
                  optimizer);
      CHECK(seen.of_drive == 1);
      CHECK(seen.of_comm == 2);
    }
  }
}

namespace {

/// Activations of which one is infinite, in one step.
class overflowing_activations : public host_activations<float, llmmem::host_space> {
 public:
  using host_activations::host_activations;
  bool overflows = false;
  [[nodiscard]] std::span<const float> fetch(layer_id layer, const rebuild_activations<float>& rebuild) {
    const std::span<const float> record = host_activations::fetch(layer, rebuild);
    if (overflows) save(layer)[0] = std::numeric_limits<float>::infinity();
    return record;
  }
};

struct guarded_end {
  std::uint64_t digest = 0;
  std::uint64_t skipped = 0;
  double scale = 0;

  friend bool operator==(const guarded_end&, const guarded_end&) = default;
};

/// Trains these batches on three ranks; at `overflow`, counted from 0, one activation of rank 1 is infinite.
std::vector<guarded_end> train_guarded(zero_stage stage, std::uint32_t ahead,
                                       std::vector<std::uint64_t> batches, std::uint64_t overflow,
                                       const guard_options& asked, const llmmem::sharded_wires& wires = {},
                                       llmmem::optimizer_form optimizer = llmmem::optimizer_form::adamw) {
  gpt_shape mine = shape_of_rank(shape, 3);
  mine.optimizer = optimizer;
  const corpus text("tiny", llmmem_tests::tiny_text(2000), shape);
  llmmem::thread_network net(3);
  std::vector<guarded_end> ends(3);
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 0; seat < 3; ++seat) {
    threads.emplace_back([&, seat] {
      llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(10'000'000'000)).value();
      llmmem::host_space host({.budget = std::uint64_t{1} << 30, .name = "host"});
      worker_team team(1);
      sharded_layers<float, llmmem::host_space, decltype(ranks)> state(
          host, mine, ranks, {.stage = stage, .gather_ahead = ahead, .wires = wires});
      overflowing_activations activations(host, mine);
      gpt<float, llmmem::host_space> model(mine, team, host);
      trainer inner(model, team, state, activations);
      rank_voice_of voice(ranks);
      step_guard guard(asked, voice);
      inner.guard_steps(guard);
      rank_trainer training(inner, ranks);
      inner.initialise(1);
      for (std::uint64_t step = 0; step < batches.size(); ++step) {
        activations.overflows = seat == 1 && step == overflow;
        static_cast<void>(training.step(text.batch(shape, 1, batches[step]), step));
        // As a run that is resumed after every step.
        const std::vector<std::byte> saved = guard.saved();
        step_guard resumed(asked, voice);
        resumed.restore(saved, step + 1);
        CHECK(resumed.saved() == saved);
      }
      ends[seat] = {training.digest(), guard.skipped(), guard.scale()};
      ranks.agree(0, ranks.after(10'000'000'000)).value();
    });
  }
  for (std::thread& each : threads)
    each.join();
  return ends;
}

}  // namespace

TEST_CASE("an overflow on one rank skips the step on all, as if it had not been") {
  constexpr std::uint64_t never = 100;
  const guard_options asked{.clip_norm = 0.25, .loss_scale = 1024.0};
  const auto without = train_guarded(zero_stage::none, 0, {0, 2}, never, {.clip_norm = 0.25});
  CHECK(without[0].skipped == 0);
  CHECK(without[0].scale == 1);
  for (const zero_stage stage : {zero_stage::none, zero_stage::optimizer, zero_stage::weights}) {
    for (const std::uint32_t ahead : {0U, 1U}) {
      const guarded_end expected{without[0].digest, 1, 512};
      CHECK(train_guarded(stage, ahead, {0, 1, 2}, 1, asked) == std::vector(3, expected));
    }
  }
  const llmmem::wire_form int8(llmmem::wire_format::int8);
  const llmmem::sharded_wires wires{.sum = {int8, int8}, .keeps_errors = false};
  const auto wired = train_guarded(zero_stage::gradients, 0, {0, 2}, never, {.clip_norm = 0.25}, wires);
  CHECK(train_guarded(zero_stage::gradients, 0, {0, 1, 2}, 1, asked, wires) ==
        std::vector(3, guarded_end{wired[0].digest, 1, 512}));
  for (const auto& [stage, optimizer] : {std::pair(zero_stage::gradients, llmmem::optimizer_form::adafactor),
                                         std::pair(zero_stage::none, llmmem::optimizer_form::muon)}) {
    CAPTURE(static_cast<int>(optimizer));
    const auto other = train_guarded(zero_stage::none, 0, {0, 2}, never, {.clip_norm = 0.25}, {}, optimizer);
    CHECK(train_guarded(stage, 0, {0, 1, 2}, 1, asked, {}, optimizer) ==
          std::vector(3, guarded_end{other[0].digest, 1, 512}));
  }
}

TEST_CASE("a guard refuses a damaged state, and a run without a guard one that has skipped steps") {
  rank_voice alone;
  step_guard guard({.loss_scale = 8.0}, alone);
  const auto with = [&](std::size_t at, const auto& value) {
    std::vector<std::byte> bytes = guard.saved();
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    return bytes;
  };
  const std::vector<std::byte> skipped_two = with(8, std::uint64_t{2});
  for (const std::vector<std::byte>& damaged :
       {std::vector<std::byte>(23), std::vector<std::byte>{}, skipped_two,
        with(0, std::numeric_limits<double>::quiet_NaN()), with(0, -1.0), with(0, 0x1p+65)}) {
    CHECK_THROWS_AS(guard.restore(damaged, 1), llmmem::format_error);
    CHECK(guard.skipped() == 0);
    CHECK(guard.scale() == 8);
  }
  guard.restore(skipped_two, 2);

  const llmmem_tests::temporary_folder folder;
  llmmem::termination_request termination;
  command_line asked;
  asked.shape = shape;
  asked.steps = steps;
  asked.checkpoints = {.folder = folder.file("saved"), .every = 1, .termination = &termination};
  named_text from = load_text(readme);
  const corpus text(from.name, std::move(from.text), shape);
  llmmem::host_space space({.budget = std::uint64_t{1} << 24, .name = "state"});
  host_state<float, llmmem::host_space> state(space, shape);
  erased_state held(state);
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    for (const state_kind kind : {state_kind::weights, state_kind::mean, state_kind::variance}) {
      const auto values = held.acquire(shape.layer(i), kind, lease_mode::write);
      std::fill(values.begin(), values.end(), 0.0F);
      held.release(shape.layer(i), kind, lease_mode::write);
    }
  }
  {
    run_checkpoints<true> checkpoints(asked, run_identity(asked, text), held, alone, nullptr, &guard);
    const double losses[] = {1.0, 1.0};
    static_cast<void>(checkpoints.begin());
    checkpoints.after_step(2, losses, 0.1);
    CHECK(checkpoints.finish().empty());
  }
  const std::vector<std::string> resumed{"--checkpoint-dir", folder.file("saved"), "--resume"};
  CHECK(run(resumed).status == exit_status::wrong_usage);
  CHECK(run(resumed).notes.find("has skipped 2 of 2 steps") != std::string::npos);
  std::vector<std::string> scaled = resumed;
  scaled.insert(scaled.end(), {"--loss-scale", "64"});
  const nlohmann::json json = json_of(scaled);
  CHECK(json["skipped_steps"] == 2);
  CHECK(json["loss_scale"] == 8);
}

TEST_CASE("all ranks refuse a run without a guard if one worker of it has skipped steps") {
  const llmmem_tests::temporary_folder folder;
  llmmem::termination_request termination;
  command_line asked;
  asked.shape = shape;
  asked.checkpoints = {.folder = folder.file("saved"), .every = 1, .termination = &termination};
  asked.parallel.ranks = 2;
  asked.parallel.outer.workers = 2;
  const corpus text("tiny", llmmem_tests::tiny_text(2000), shape);
  const auto live = [&](std::uint32_t seat, llmmem::thread_network& net) {
    llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
    llmmem::communicator ranks(end);
    ranks.join(ranks.after(10'000'000'000)).value();
    rank_voice_of voice(ranks);
    llmmem::host_space space({.budget = std::uint64_t{1} << 24, .name = "state"});
    host_state<float, llmmem::host_space> state(space, shape);
    erased_state held(state);
    rank_voice alone;
    step_guard guard({.clip_norm = 1}, alone);
    const float overflow[] = {std::numeric_limits<float>::infinity()};
    static_cast<void>(guard.begin());
    if (seat == 1) guard.norm().add(overflow);
    static_cast<void>(guard.decide());
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      for (const state_kind kind : {state_kind::weights, state_kind::mean, state_kind::variance}) {
        const auto values = held.acquire(shape.layer(i), kind, lease_mode::write);
        std::fill(values.begin(), values.end(), 0.0F);
        held.release(shape.layer(i), kind, lease_mode::write);
      }
    }
    std::string refused;
    try {
      run_checkpoints<true> checkpoints(asked, run_identity(asked, text), held, voice, nullptr,
                                        asked.checkpoints.resumes ? nullptr : &guard);
      static_cast<void>(checkpoints.begin());
      const double losses[] = {1.0};
      checkpoints.after_step(1, losses, 0.1);
      CHECK(checkpoints.finish().empty());
      ranks.agree(0, ranks.after(10'000'000'000)).value();
    } catch (const llmmem::error& wrong) {
      refused = wrong.what();
    }
    return refused;
  };
  for (const bool resumes : {false, true}) {
    asked.checkpoints.resumes = resumes;
    llmmem::thread_network net(2);
    std::string second;
    std::thread other([&] { second = live(1, net); });
    const std::string first = live(0, net);
    other.join();
    CHECK(first == second);
    CHECK((first.find("has skipped 1 of 1 steps") != std::string::npos) == resumes);
  }
}
