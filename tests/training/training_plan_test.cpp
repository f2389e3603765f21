#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/training/training_plan.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace llmmem;

training_shape four_layers() {
  training_shape shape;
  shape.layers = {{.parameters = 100, .forward_ns = 10, .backward_ns = 20, .update_ns = 5},
                  {.parameters = 60,
                   .record = {.bytes = 4000, .kept = {{0, 400}}},
                   .forward_ns = 100,
                   .backward_ns = 200,
                   .update_ns = 5,
                   .rebuild_ns = 90},
                  {.parameters = 60,
                   .record = {.bytes = 4000, .kept = {}},
                   .forward_ns = 100,
                   .backward_ns = 200,
                   .update_ns = 5},
                  {.parameters = 80,
                   .record = {.bytes = 1000, .kept = {}},
                   .forward_ns = 50,
                   .backward_ns = 100,
                   .update_ns = 5}};
  shape.workspace_bytes = 777;
  return shape;
}

}  // namespace

TEST_SUITE("training_plan") {
  TEST_CASE("the kept bytes are those of ZeRO's Table 1, and a step sends 2P or 3P of it") {
    const training_shape shape = four_layers();
    constexpr std::uint64_t p = 300;
    for (const std::uint32_t ranks : {1U, 2U, 3U, 4U}) {
      for (const zero_stage stage :
           {zero_stage::none, zero_stage::optimizer, zero_stage::gradients, zero_stage::weights}) {
        CAPTURE(ranks);
        CAPTURE(static_cast<int>(stage));
        std::uint64_t sent = 0;
        std::uint64_t saved = 0;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          const auto of = predict({.ranks = ranks, .zero = stage}, shape, rank_id{rank});
          CHECK(of.kept == training_state(p, stage, ranks, {.weights = 4, .gradients = 4, .optimizer = 8}));
          CHECK(of.records_bytes == 400 + 4000 + 1000);
          CHECK(of.fast.bytes == of.kept.total() + of.gathered.bytes + of.records_bytes + of.workspace_bytes);
          CHECK_FALSE(of.fast.is_bound);
          sent += of.sent_per_step;
          saved += of.saved_bytes;
        }
        const std::uint64_t all = 4 * p;
        CHECK(sent == (ranks - 1) * (stage == zero_stage::weights ? 3 * all - 4 * 100 : 2 * all));
        CHECK(saved == 3 * all);  // each element once
      }
    }
  }

  TEST_CASE("outer steps keep 8 bytes for each updated element, and their messages are paid once a round") {
    const training_shape shape = four_layers();
    constexpr std::uint64_t p = 300;
    for (const zero_stage stage : {zero_stage::none, zero_stage::optimizer, zero_stage::weights}) {
      CAPTURE(static_cast<int>(stage));
      for (const std::uint64_t budget : {0ULL, 1ULL << 20}) {
        training_plan plan{.ranks = 2, .zero = stage};
        if (budget != 0) plan.tiers = {budget};
        std::uint64_t outer = 0;
        std::uint64_t sent = 0;
        std::uint64_t saved = 0;
        for (std::uint32_t rank = 0; rank < 6; ++rank) {
          const auto without = predict(plan, shape, rank_id{rank % 2});
          training_plan apart = plan;
          apart.outer = {.local_steps = 16, .workers = 3};
          const auto of = predict(apart, shape, rank_id{rank}, {}, {.bytes_per_second = 1000});
          CHECK(of.kept == without.kept);
          CHECK(of.sent_per_step == without.sent_per_step);
          CHECK(of.resident_outer_bytes == (budget == 0 ? of.outer_bytes : 0));
          const std::uint64_t round = std::max(of.gathered.bytes, of.round_bytes);
          CHECK(of.fast.bytes ==
                without.fast.bytes - without.gathered.bytes + of.resident_outer_bytes + round);
          // The change of the largest layer's part. A message of a third of it goes out and three come in;
          // with the sum, and room for a part of it.
          const std::uint64_t part = stage == zero_stage::none || rank % 2 == 0 ? 100 : 80;
          CHECK(of.round_bytes == (3 + 1 + 2) * 4 * ((part + 2) / 3) + (budget == 0 ? 4 * part : 0));
          if (budget != 0) CHECK(of.tiers.back().bytes > without.tiers.back().bytes + of.outer_bytes);
          CHECK(of.stall_ns ==
                (of.sent_per_step + of.sent_per_round / 16) * 1'000'000 - (of.step_ns - of.stall_ns));
          outer += of.outer_bytes;
          sent += of.sent_per_round;
          saved += of.saved_bytes;
        }
        const std::uint64_t copies = stage == zero_stage::none ? 2 : 1;  // in each worker
        CHECK(outer == 3 * copies * 8 * p);
        // Each of three workers sends two thirds twice, and stage 1 then refreshes its other rank's weights.
        CHECK(sent == copies * 2 * 2 * 4 * p + (stage == zero_stage::optimizer ? 3 * 4 * p : 0));
        CHECK(saved == 3 * 3 * 4 * p + 8 * p);  // base weights and momentum once
      }
    }
    training_shape halves = shape;
    halves.value_bytes = 2;
    CHECK_THROWS_WITH_AS(predict({.outer = {.local_steps = 1, .workers = 0}}, shape, rank_id{0}),
                         "training_plan: outer steps of 0 workers", argument_error);
    CHECK_THROWS_WITH_AS(predict({.outer = {.workers = 2}}, shape, rank_id{0}),
                         "training_plan: 2 workers that never join their weights; give outer.local_steps",
                         argument_error);
    CHECK_THROWS_WITH_AS(predict({.outer = {.local_steps = 1}}, halves, rank_id{0}),
                         "training_plan: outer steps of values of 2 bytes; they change floats only",
                         argument_error);
    CHECK_THROWS_WITH_AS(predict({.ranks = 2, .outer = {.local_steps = 1, .workers = 3}}, shape, rank_id{6}),
                         "training_plan: rank 6 of 6", argument_error);
    // Weights, base weights, momentum and the change: pages of 4096 bytes.
    CHECK_THROWS_WITH_AS(
        predict({.tiers = {4 * 4096 - 1}, .optimizer = optimizer_form::sgd, .outer = {.local_steps = 1}},
                shape, rank_id{0}),
        "training_plan: a first tier of 16383 bytes; an outer step leases 16384 at once; give it at least as "
        "many",
        argument_error);
  }

  TEST_CASE(
      "the optimizer's form determines the bytes of its state, in plain memory, in tiers and in "
      "checkpoints") {
    training_shape shape = four_layers();
    for (training_layer& each : shape.layers)
      each.parameters *= 256;
    constexpr std::uint64_t p = 300 * 256;
    struct row {
      optimizer_form form;
      std::uint32_t value_bytes;
      std::uint64_t bytes;
    };
    for (const row& each :
         {row{optimizer_form::adamw, 4, 8 * p}, row{optimizer_form::sgd, 4, 4 * p},
          row{optimizer_form::adamw_split16, 2, 10 * p}, row{optimizer_form::adamw_stochastic, 2, 8 * p},
          row{optimizer_form::adamw_8bit, 4, 2 * p + 2 * 300 * 4}}) {
      CAPTURE(static_cast<int>(each.form));
      shape.value_bytes = each.value_bytes;
      training_plan plan{.optimizer = each.form};
      const auto of = predict(plan, shape, rank_id{0});
      CHECK(of.kept.weights == each.value_bytes * p);
      CHECK(of.kept.optimizer == each.bytes);
      CHECK(of.kept.weights + of.kept.optimizer == optimizer_bytes(each.form, p));
      CHECK(of.saved_bytes == each.value_bytes * p + each.bytes);
      CHECK(of.resident_state_bytes == of.kept.total());
      plan.tiers = {1 << 20};
      plan.granularity = 1;
      const auto trace = step_trace(plan, shape, rank_id{0});
      std::uint64_t chunks = 0;
      for (const std::uint64_t size : trace.sizes())
        chunks += size;
      CHECK(chunks == of.kept.total() + 4000 + 400 + 4000 + 1000);
    }
  }

  TEST_CASE("every rank keeps all factors of adafactor, saves its share, and sends the sums of its pieces") {
    training_shape shape = four_layers();
    shape.layers[0].tensors = 2;
    shape.layers[0].factors = 20 + 10;
    for (std::size_t i = 1; i < 4; ++i) {
      shape.layers[i].tensors = i;
      shape.layers[i].factors = 11 * i;
    }
    constexpr std::uint64_t factors = 30 + 11 + 22 + 33;
    for (const std::uint32_t ranks : {1U, 3U}) {
      for (const zero_stage stage : {zero_stage::none, zero_stage::optimizer, zero_stage::weights}) {
        CAPTURE(ranks);
        CAPTURE(static_cast<int>(stage));
        training_plan plan{.ranks = ranks, .zero = stage};
        std::uint64_t saved = 0;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          plan.optimizer = optimizer_form::sgd;
          const auto sgd = predict(plan, shape, rank_id{rank});
          plan.optimizer = optimizer_form::adafactor;
          const auto of = predict(plan, shape, rank_id{rank});
          CHECK(of.kept.optimizer == 4 * factors);
          CHECK(of.kept.weights == sgd.kept.weights);
          saved += of.saved_bytes;
          // Factors and sums of weights in one merge, sums of updates in another one.
          const std::uint64_t merged = stage == zero_stage::none ? 0 : factors + 2 * (2 + 1 + 2 + 3);
          CHECK(of.sent_per_step - sgd.sent_per_step == merged * sizeof(unordered_sum) * (ranks - 1));
        }
        CHECK(saved == 4 * 300 + 4 * factors);
      }
    }
    shape.layers[2].factors = 0;
    const training_plan plan{.optimizer = optimizer_form::adafactor};
    CHECK_THROWS_WITH_AS(check_plan(plan, shape),
                         "training_plan: adafactor with a layer of 60 parameters, and no factors or tensors; "
                         "add up factor_count of its tensors",
                         argument_error);
    shape.value_bytes = 2;
    CHECK_THROWS_WITH_AS(check_plan(plan, shape),
                         "training_plan: adafactor with values of 2 bytes; its weights are floats",
                         argument_error);
  }

  TEST_CASE("muon has a variance for what adamw updates, and its ranks send the updates of their matrices") {
    training_shape shape = four_layers();
    shape.layers[1].matrices = {tensor_shape::matrix(4, 4), tensor_shape::matrix(4, 8)};
    training_plan plan{.ranks = 3, .optimizer = optimizer_form::muon};
    std::uint64_t saved = 0;
    std::uint64_t sent = 0;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      plan.optimizer = optimizer_form::sgd;
      const std::uint64_t without = predict(plan, shape, rank_id{rank}).sent_per_step;
      plan.optimizer = optimizer_form::muon;
      const auto of = predict(plan, shape, rank_id{rank});
      CHECK(of.kept.optimizer == 4 * (300 + 300 - 48));
      saved += of.saved_bytes;
      sent += of.sent_per_step - without;
      // One matrix each for the first two ranks, the costlier one for the first.
      CHECK(of.sent_per_step - without == 2 * 4 * (rank == 0 ? 32 : rank == 1 ? 16 : 0));
    }
    CHECK(saved == 4 * (300 + 300 + 300 - 48));
    CHECK(sent == 2 * 4 * 48);
    plan.zero = zero_stage::optimizer;
    CHECK_THROWS_WITH_AS(check_plan(plan, shape),
                         "training_plan: muon with shards, which cut matrices; use zero_stage::none, with "
                         "which the ranks share out whole matrices",
                         argument_error);
    plan.zero = zero_stage::none;
    shape.layers[1].parameters = 47;
    CHECK_THROWS_WITH_AS(check_plan(plan, shape),
                         "training_plan: muon with matrices of 48 elements in a layer of 47 parameters",
                         argument_error);
    shape.value_bytes = 2;
    CHECK_THROWS_WITH_AS(check_plan(plan, shape),
                         "training_plan: muon with values of 2 bytes; its weights are floats",
                         argument_error);
  }

  TEST_CASE(
      "all tiers except the last are bounds, and a first one that is too small is refused with both "
      "numbers") {
    const training_shape shape = four_layers();
    training_plan plan{
        .ranks = 2, .zero = zero_stage::weights, .tiers = {1 << 16, 1 << 18}, .granularity = 512};
    const auto of = predict(plan, shape, rank_id{0});
    REQUIRE(of.tiers.size() == 3);
    CHECK(of.tiers[0].holds(1));
    CHECK(of.tiers[0].holds(1 << 16));
    CHECK_FALSE(of.tiers[0].holds((1 << 16) + 1));
    std::uint64_t chunks = 0;
    const schedule_trace trace = step_trace(plan, shape, rank_id{0});
    for (const std::uint64_t each : trace.sizes())
      chunks += each;
    CHECK(of.tiers[2].holds(chunks));
    CHECK_FALSE(of.tiers[2].holds(chunks - 1));
    CHECK(of.largest_lease_bytes == trace.max_leased_bytes());
    plan.tiers = {of.largest_lease_bytes};
    CHECK(predict(plan, shape, rank_id{0}).tiers.size() == 2);
    plan.tiers = {of.largest_lease_bytes - 1};
    CHECK_THROWS_WITH_AS(static_cast<void>(predict(plan, shape, rank_id{0})),
                         ("training_plan: a first tier of " + std::to_string(of.largest_lease_bytes - 1) +
                          " bytes; a step leases " + std::to_string(of.largest_lease_bytes) +
                          " at once; give it at least as many")
                             .c_str(),
                         argument_error);
  }

  TEST_CASE("leases are counted in the tier's pages, with the weights that gathers ahead hold") {
    training_shape shape;
    for (const std::uint64_t parameters : std::vector<std::uint64_t>{10, 20, 30, 40})
      shape.layers.push_back({.parameters = parameters, .record = {.bytes = 100, .kept = {}}});
    shape.layers.front().record = {};
    training_plan plan{
        .zero = zero_stage::weights, .tiers = {1 << 16}, .granularity = 32, .optimizer = optimizer_form::sgd};
    // The last layer's update has its weights, gradients and mean.
    CHECK(predict(plan, shape, rank_id{0}).largest_lease_bytes == 3 * 160);
    plan.tier_page_bytes = 1024;
    CHECK(predict(plan, shape, rank_id{0}).largest_lease_bytes == 3 * 1024);
    CHECK(predict(plan, shape, rank_id{0}).largest_chunk_bytes == 1024);
    CHECK(predict(plan, shape, rank_id{0}).tiers.back().bytes ==
          3 * 128 + 3 * (64 + 96 + 128 + 160));  // the last tier has no pages
    plan.gather_ahead = 2;                       // three pages of weights, and those of the others at once
    CHECK(predict(plan, shape, rank_id{0}).largest_lease_bytes == (3 + 3) * 1024);
    plan.gather_ahead = 9;
    CHECK(predict(plan, shape, rank_id{0}).largest_lease_bytes == (3 + 4) * 1024);
    plan.tiers = {7 * 1024 - 1};
    CHECK_THROWS_WITH_AS(
        static_cast<void>(predict(plan, shape, rank_id{0})),
        "training_plan: a first tier of 7167 bytes; a step leases 7168 at once, in pages of 1024; give it "
        "at least as many",
        argument_error);
    plan.tiers = {7 * 1024, 1024};
    CHECK(predict(plan, shape, rank_id{0}).tiers.size() == 3);
    plan.tiers = {7 * 1024, 1023};
    CHECK_THROWS_WITH_AS(static_cast<void>(predict(plan, shape, rank_id{0})),
                         "training_plan: tier 1 of 1023 bytes; the largest chunk takes 1024", argument_error);
  }

  TEST_CASE(
      "a slow link stalls the step and a fast one does not, and the network counts in addition to the "
      "tiers") {
    const training_shape shape = four_layers();
    training_plan plan{.ranks = 2, .zero = zero_stage::weights, .tiers = {1 << 13}, .granularity = 512};
    const auto without = predict(plan, shape, rank_id{0});
    CHECK(without.stall_ns == 0);
    CHECK(without.step_ns == 10 + 20 + 5 + 100 + 200 + 5 + 90 + 100 + 200 + 5 + 50 + 100 + 5);
    const std::vector<link_model> slow{{.bytes_per_second = 1'000'000}};
    const std::vector<link_model> fast{{.bytes_per_second = 1'000'000'000'000'000}};
    const auto stalled = predict(plan, shape, rank_id{0}, slow);
    CHECK(stalled.stall_ns > 0);
    CHECK(stalled.min_moved_bytes.size() == 1);
    CHECK(stalled.step_ns == without.step_ns + stalled.stall_ns);
    CHECK(predict(plan, shape, rank_id{0}, fast).stall_ns == 0);
    const auto networked = predict(plan, shape, rank_id{0}, fast, {.bytes_per_second = 1'000'000});
    CHECK(networked.stall_ns == networked.sent_per_step * 1000 - without.step_ns);
  }

  TEST_CASE("a layer in parts keeps, saves and sends as the whole one, and gathers its largest part") {
    training_shape whole = four_layers();
    training_shape parts = whole;
    whole.layers[2].record.kept = parts.layers[2].record.kept = {{0, 400}};
    training_layer second = parts.layers[2];
    second.parameters /= 4;
    const std::uint64_t first = parts.layers[2].parameters -= second.parameters;
    second.continues = true;
    second.record = {};
    second.forward_ns = second.backward_ns = second.update_ns = second.rebuild_ns = 0;
    parts.layers.insert(parts.layers.begin() + 3, second);
    parts.layers[1].parameters = whole.layers[1].parameters = 8;
    parts.layers.back().parameters = whole.layers.back().parameters = 8;
    parts.layers.front().parameters = whole.layers.front().parameters = 8;
    const training_plan plan{.ranks = 2, .zero = zero_stage::weights};
    const training_prediction one = predict(plan, whole, rank_id{0});
    const training_prediction two = predict(plan, parts, rank_id{0});
    CHECK(two.kept == one.kept);
    CHECK(two.saved_bytes == one.saved_bytes);
    CHECK(two.sent_per_step == one.sent_per_step);
    CHECK(two.records_bytes == one.records_bytes);
    CHECK(two.step_ns == one.step_ns);
    CHECK(one.gathered.bytes - two.gathered.bytes >= 8 * second.parameters);
    // The record is computed again from the first part only: its weights are gathered once more.
    parts.layers[2].is_rebuilt_from = true;
    CHECK(predict(plan, parts, rank_id{0}).gathered.bytes == two.gathered.bytes);
    const auto sent = [&](rank_id rank) { return predict(plan, parts, rank).sent_per_step; };
    parts.layers[2].is_rebuilt_from = false;
    const std::uint64_t before = sent(rank_id{0}) + sent(rank_id{1});
    parts.layers[2].is_rebuilt_from = true;
    CHECK(sent(rank_id{0}) + sent(rank_id{1}) - before == 4 * first);
  }

  TEST_CASE("gathers ahead may use the memory of a layer that a rank has completely for other layers") {
    training_shape shape;
    for (const std::uint64_t parameters : std::vector<std::uint64_t>{40, 40, 40, 100, 60})
      shape.layers.push_back({.parameters = parameters});
    // Rank 1 has 80 parameters of the fourth layer, and the last layer completely.
    const training_plan plan{.ranks = 2, .zero = zero_stage::weights, .gather_ahead = 1};
    const std::uint64_t sum_messages = 2 * 4 * 80;
    CHECK(predict(plan, shape, rank_id{1}).gathered.bytes == 4 * (100 + 60) + 4 * 100 + sum_messages);
  }

  TEST_CASE("an impossible plan is refused with the reason") {
    const training_shape shape = four_layers();
    const auto refused = [&](const training_plan& plan, const training_shape& of, const char* why) {
      CHECK_THROWS_WITH_AS(check_plan(plan, of), why, argument_error);
      CHECK_THROWS_WITH_AS(static_cast<void>(predict(plan, of, rank_id{0})), why, argument_error);
      CHECK_THROWS_WITH_AS(static_cast<void>(step_trace(plan, of, rank_id{0})), why, argument_error);
    };
    refused({.ranks = 0}, shape, "training_plan: 0 ranks; 1 means no split");
    refused({.ranks = 2, .zero = zero_stage::gradients, .gather_ahead = 1}, shape,
            "training_plan: gather_ahead 1 with weights that every rank holds completely; use "
            "zero_stage::weights, or 0");
    refused({.tier_page_bytes = 0}, shape,
            "training_plan: a tier_page_bytes of 0 bytes; 1 means that a tier has no pages");
    refused({.granularity = 0}, shape, "training_plan: a granularity of 0 bytes; 1 is the least");
    refused({}, {}, "training_plan: a shape of 0 layers; give an embedding and at least one more");
    training_shape of_nothing = shape;
    of_nothing.value_bytes = 0;
    refused({}, of_nothing, "training_plan: values of 0 bytes");
    training_shape of_parts = shape;
    of_parts.layers[2].continues = true;
    refused({}, of_parts,
            ("training_plan: layer 2, which continues the one before, has a record of " +
             std::to_string(shape.layers[2].record.bytes) + " bytes; give it to the layer's first part")
                .c_str());
    of_parts.layers[2].record = {};
    of_parts.layers[2].factors = of_parts.layers[2].tensors = 1;
    refused({.optimizer = optimizer_form::muon}, of_parts,
            "training_plan: layer 2, which continues the one before, with muon, which works on whole "
            "matrices; use an optimizer of each element");
    of_parts.layers[0].continues = true;
    refused({}, of_parts,
            "training_plan: layer 0, which continues the one before, is the first; clear continues");
    const wire_form int8(wire_format::int8);
    refused({.ranks = 2, .wires = {.gather = int8}}, shape,
            "training_plan: a wire for gathers of weights that every rank holds completely; use "
            "zero_stage::weights, or a plain one");
    refused({.ranks = 2, .wires = {.sum = {int8, int8}, .node_ranks = 3}}, shape,
            "training_plan: nodes of 3 ranks do not divide 2 ranks; give a divisor, or 0 for one hop");
    refused({.ranks = 2, .wires = {.keeps_errors = true}}, shape,
            "training_plan: keeps_errors with plain sums, which lose nothing; give sums another wire");
    refused({.ranks = 2, .wires = {.node_ranks = 2}, .keeps_secondary = true}, shape,
            "training_plan: secondary shards of weights that every rank holds completely; use "
            "zero_stage::weights");
    refused({.ranks = 2, .zero = zero_stage::weights, .wires = {.node_ranks = 1}, .keeps_secondary = true},
            shape,
            "training_plan: secondary shards with nodes of 1 ranks; give wires.node_ranks, at least 2");
    refused({.ranks = 2,
             .zero = zero_stage::weights,
             .gather_ahead = 1,
             .wires = {.node_ranks = 2},
             .keeps_secondary = true},
            shape,
            "training_plan: secondary shards with gather_ahead 1, which gathers from all ranks; use 0");
    const top_k_plan top_k{.density = 0.01};
    constexpr optimizer_form sgd = optimizer_form::sgd;
    refused({.ranks = 2, .optimizer = sgd, .top_k = {.density = 1.5}}, shape,
            "training_plan: top_k.density is not above 0 and at most 1; DGC's is 0.001");
    refused({.ranks = 2, .top_k = top_k}, shape,
            "training_plan: top_k with an optimizer that has moments of its own, of sums that are mostly "
            "zeros; use sgd, whose momentum each rank then adds before it sends");
    refused({.ranks = 2, .zero = zero_stage::optimizer, .optimizer = sgd, .top_k = top_k}, shape,
            "training_plan: top_k with shards: each rank keeps momentum and unsent gradients of all weights; "
            "use zero_stage::none");
    refused({.ranks = 2, .optimizer = sgd, .wires = {.node_ranks = 2}, .top_k = top_k}, shape,
            "training_plan: top_k with wires, nodes or error feedback: its sums have a form of their own, in "
            "one hop, and what is not sent waits already; leave wires as they are");
    refused({.ranks = 2,
             .sums_in_flight = 1,
             .optimizer = sgd,
             .update = optimizer_time::after_backward,
             .top_k = top_k},
            shape, "training_plan: top_k with sums_in_flight 1, which sums all gradients of a layer; use 0");
    training_shape large = shape;
    large.layers[1].parameters = (std::uint64_t{1} << 32U) + 1;
    refused({.ranks = 2, .optimizer = sgd, .top_k = top_k}, large,
            "training_plan: top_k with a layer of 4294967297 parameters; its indices reach 2^32");
    training_shape wide = shape;
    wide.value_bytes = 8;
    refused({.ranks = 2, .optimizer = sgd, .top_k = top_k}, wide,
            "training_plan: top_k with values of 8 bytes; it sums floats only");
    refused({.ranks = 2, .wires = {.sum = {int8, int8}}}, wide,
            "training_plan: wires for values of 8 bytes; they carry floats only");
    CHECK_THROWS_WITH_AS(static_cast<void>(predict({.ranks = 2}, shape, rank_id{2})),
                         "training_plan: rank 2 of 2", argument_error);
    const std::vector<link_model> links(2, {.bytes_per_second = 1});
    CHECK_THROWS_WITH_AS(static_cast<void>(predict({.tiers = {1 << 16}}, shape, rank_id{0}, links)),
                         "training_plan: 2 links for 1 budgets; give one link below each budget",
                         argument_error);
  }

  TEST_CASE("a host space takes whole pages for 1 MiB and more") {
    constexpr memory_rounding usual;
    CHECK(usual.taken((1 << 20) - 1) == (1 << 20) - 1);
    CHECK(usual.taken((1 << 20) + 1) == (1 << 20) + 4096);
    CHECK(usual.taken(1 << 20) == 1 << 20);
    CHECK_THROWS_AS(static_cast<void>(usual.taken(max_bytes)), length_error);
  }

  TEST_CASE("each sum past 2^63 - 1 bytes is refused, and none wraps to a small number") {
    const auto refusal = [](const training_plan& plan, std::size_t layers, std::uint64_t parameters) {
      training_shape shape;
      for (std::size_t i = 0; i < layers; ++i)
        shape.layers.push_back({.parameters = parameters});
      try {
        static_cast<void>(predict(plan, shape, rank_id{0}));
      } catch (const length_error& refused) {
        const std::string text = refused.what();
        return text.substr(0, text.find_first_of("0123456789"));
      }
      return std::string("none");
    };
    constexpr std::uint64_t large = std::uint64_t{1} << 58;
    const wire_form int4(wire_format::int4);
    training_plan plan{.ranks = 64, .zero = zero_stage::weights};
    CHECK(refusal(plan, 16, large) == "training_plan: bytes sent: ");
    plan.wires = {.gather = int4, .sum = {int4, int4}};
    CHECK(refusal(plan, 8, large) == "none");
    plan.wires.keeps_errors = true;
    CHECK(refusal(plan, 8, large) == "training_plan: bytes of state: ");
    plan.wires = {.gather = int4, .sum = {int4, int4}, .node_ranks = 64};
    CHECK(refusal(plan, 8, large) == "none");
    CHECK(refusal({.ranks = 2048, .zero = zero_stage::weights, .gather_ahead = 15}, 16, large / 2) ==
          "training_plan: bytes of gathered layers: ");
    plan = {.ranks = 2, .zero = zero_stage::none, .tiers = {std::uint64_t{1} << 62}};
    CHECK(refusal(plan, 8, large) == "training_plan: bytes of state: ");
  }
}
