/// The calls that the library expects of a step are those that a rank makes.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/training_plan.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/tiny_gpt.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/plan_of_run.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/sharded_stores.hpp"
#include "train_gpt/trainer.hpp"

using namespace train_gpt;

TEST_CASE("a rank leases the chunks of its plan's trace, in order") {
  using llmmem::zero_stage;
  using buffer_type = llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space>;
  using schedule_type = llmmem::prefetch_schedule<buffer_type, llmmem::schedule::on_demand>;
  constexpr std::uint64_t ten_seconds = 10'000'000'000;
  for (const zero_stage stage :
       {zero_stage::none, zero_stage::optimizer, zero_stage::gradients, zero_stage::weights}) {
    for (const recompute_kind again :
         {recompute_kind::none, recompute_kind::selective, recompute_kind::full}) {
      for (const std::size_t world : {1U, 2U, 3U}) {
        command_line asked;
        asked.shape = {.blocks = 2, .width = 12, .heads = 2, .context = 7, .batch = 6};
        if (again == recompute_kind::selective) asked.shape.optimizer = llmmem::optimizer_form::adafactor;
        if (again == recompute_kind::full && stage == zero_stage::none)
          asked.shape.optimizer = llmmem::optimizer_form::muon;
        asked.threads = 1;
        asked.memory = memory_kind::tiered;
        asked.tiers.budget_mib = 1;
        asked.recompute.kind = again;
        asked.update = world == 2 ? update_time::after_backward : update_time::in_backward;
        asked.parallel = {.ranks = world, .stage = stage};
        if (again == recompute_kind::none && stage == zero_stage::none && world != 1) {
          asked.shape.optimizer = llmmem::optimizer_form::sgd;
          asked.shape.corrects_momentum = true;
          asked.parallel.top_k.density = 0.01;
        }
        if (world == 2 && again != recompute_kind::none) asked.parallel.sums_in_flight = 1;
        const bool is_of_elements = asked.shape.optimizer == llmmem::optimizer_form::adamw;
        if (world == 3 && is_of_elements) asked.shape.tiles = 3;
        const planned_run run = plan_run(asked);
        const corpus text("tiny", llmmem_tests::tiny_text(2000), asked.shape);
        llmmem::thread_network net(static_cast<std::uint32_t>(world));
        std::vector<std::thread> threads;
        for (std::uint32_t seat = 0; seat < world; ++seat) {
          threads.emplace_back([&, seat] {
            llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
            llmmem::communicator ranks(end);
            ranks.join(ranks.after(ten_seconds)).value();
            llmmem::host_space top({.budget = 1 << 20, .name = "top"});
            llmmem::host_space last({.budget = 1 << 21, .name = "last"});
            llmmem::host_space space({.budget = 1 << 24, .name = "rank"});
            buffer_type buffer({}, {top, 1 << 20}, {last, 1 << 21});
            schedule_type schedule(buffer, {.links = {{.bytes_per_second = 1'000'000'000}}});
            erased_chunks<schedule_type> chunks(schedule);
            sharded_layers<float, llmmem::host_space, decltype(ranks), llmmem::leased_pieces<chunk_store>>
                state(space, static_cast<chunk_store&>(chunks), run.shape, ranks,
                      {.stage = stage,
                       .sums_in_flight = asked.parallel.sums_in_flight,
                       .top_k_density = asked.parallel.top_k.density});
            recorded_activations<float> activations(chunks, run.records.forms);
            worker_team team(1);
            gpt<float, llmmem::host_space> model(run.shape, team, space);
            trainer inner(model, team, state, activations, adam_options{}, asked.update);
            rank_trainer training(inner, ranks);
            inner.initialise(1);
            static_cast<void>(training.step(text.batch(asked.shape, 1, 0), 0));
            const llmmem::schedule_trace expected = step_trace(run.plan, run.layers, ranks.rank());
            CHECK(expected.fingerprint() == schedule.trace().fingerprint());
            CHECK(expected.max_leased_bytes() == schedule.trace().max_leased_bytes());
            const llmmem::training_prediction predicted = run.of_rank(to_index(ranks.rank()));
            CHECK(predicted.tiers.back().bytes == buffer.stats().tiers[1].peak);
            static_cast<void>(training.step(text.batch(asked.shape, 1, 1), 1));
            CHECK(schedule.stats().inserted + schedule.stats().skipped + schedule.stats().diverged == 0);
            ranks.agree(0, ranks.after(ten_seconds)).value();
          });
        }
        for (std::thread& each : threads)
          each.join();
      }
    }
  }
}
