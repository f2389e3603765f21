#include "support/documented.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/pipeline_timeline.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

pipeline_costs equal_costs(const pipeline_shape& shape, std::uint64_t forward, std::uint64_t backward,
                           std::uint64_t send = 0) {
  return {.forward_ns = std::vector<std::uint64_t>(shape.stages(), forward),
          .backward_ns = std::vector<std::uint64_t>(shape.stages(), backward),
          .send_ns = send};
}

pipeline_costs random_costs(const pipeline_shape& shape, random_numbers& random) {
  pipeline_costs costs;
  for (std::uint64_t stage = 0; stage < shape.stages(); ++stage) {
    costs.forward_ns.push_back(1 + random.below(std::uint64_t{9}));
    costs.backward_ns.push_back(1 + random.below(std::uint64_t{19}));
  }
  costs.send_ns = random.below(std::uint64_t{4});
  return costs;
}

/// The oracle: the equations of the start times, repeated until nothing changes. Nothing when they never
/// settle, which is a deadlock.
using named_task = std::tuple<std::uint64_t, std::uint32_t, pipeline_pass>;  // stage, micro-batch, pass

std::optional<std::map<named_task, std::uint64_t>> naive_finishes(const pipeline_order& order,
                                                                  const pipeline_costs& costs) {
  const auto& shape = order.shape;
  std::map<named_task, std::uint64_t> finish;
  const std::uint64_t rounds = 2 * shape.stages() * shape.micro_batches + 1;
  for (std::uint64_t round = 0; round <= rounds; ++round) {
    bool changed = false;
    for (std::uint32_t device = 0; device < shape.devices; ++device) {
      std::uint64_t before = 0;
      for (const auto& task : order.tasks[device]) {
        const std::uint64_t stage = std::uint64_t{task.chunk} * shape.devices + device;
        std::uint64_t start = before;
        const auto after = [&](std::uint64_t other, pipeline_pass pass) {
          const std::uint64_t send = other % shape.devices == device ? 0 : costs.send_ns;
          start = std::max(start, finish[{other, task.micro_batch, pass}] + send);
        };
        if (task.pass == pipeline_pass::forward) {
          if (stage > 0) after(stage - 1, pipeline_pass::forward);
        } else {
          after(stage, pipeline_pass::forward);
          if (stage + 1 < shape.stages()) after(stage + 1, pipeline_pass::backward);
        }
        auto& mine = finish[{stage, task.micro_batch, task.pass}];
        before = start + (task.pass == pipeline_pass::forward ? costs.forward_ns : costs.backward_ns)[stage];
        changed |= mine != before;
        mine = before;
      }
    }
    if (!changed) return finish;
  }
  return std::nullopt;
}

pipeline_order shuffled(const pipeline_shape& shape, random_numbers& random) {
  pipeline_order order{.shape = shape, .tasks = {}};
  for (std::uint32_t device = 0; device < shape.devices; ++device) {
    std::vector<pipeline_task> list;
    for (std::uint32_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (std::uint32_t micro_batch = 0; micro_batch < shape.micro_batches; ++micro_batch) {
        for (const auto pass : {pipeline_pass::forward, pipeline_pass::backward})
          list.push_back({.device = device, .micro_batch = micro_batch, .chunk = chunk, .pass = pass});
      }
    }
    for (std::size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[static_cast<std::size_t>(random.below(std::uint64_t{i}))]);
    order.tasks.push_back(std::move(list));
  }
  return order;
}

/// All lists of one device in which each backward pass comes after its forward pass.
std::vector<std::vector<pipeline_task>> all_lists(std::uint32_t device, std::uint32_t micro_batches) {
  std::vector<std::vector<pipeline_task>> lists;
  std::vector<pipeline_task> list;
  std::vector<int> passes(micro_batches, 0);
  const auto extend = [&](const auto& self) -> void {
    if (list.size() == 2 * std::size_t{micro_batches}) lists.push_back(list);
    for (std::uint32_t i = 0; i < micro_batches; ++i) {
      if (passes[i] == 2) continue;
      list.push_back({.device = device,
                      .micro_batch = i,
                      .pass = passes[i]++ == 0 ? pipeline_pass::forward : pipeline_pass::backward});
      self(self);
      list.pop_back();
      --passes[i];
    }
  };
  extend(extend);
  return lists;
}

/// The least makespan of all orders that can be run. Micro-batches are alike: that device 0 begins them in
/// the order of their numbers only names them.
std::uint64_t best_makespan(const pipeline_shape& shape, const pipeline_costs& costs) {
  std::vector<std::vector<std::vector<pipeline_task>>> lists;
  for (std::uint32_t device = 0; device < shape.devices; ++device)
    lists.push_back(all_lists(device, shape.micro_batches));
  pipeline_order order{.shape = shape, .tasks = std::vector<std::vector<pipeline_task>>(shape.devices)};
  std::uint64_t best = ~std::uint64_t{0};
  const auto choose = [&](const auto& self, std::uint32_t device) -> void {
    if (device == shape.devices) {
      try {
        best = std::min(best, simulate_pipeline(order, costs).makespan_ns);
      } catch (const argument_error&) {  // a deadlock
      }
      return;
    }
    for (const auto& list : lists[device]) {
      std::uint32_t begun = 0;
      const bool in_order = std::all_of(list.begin(), list.end(), [&](const pipeline_task& task) {
        return task.pass == pipeline_pass::backward || task.micro_batch == begun++;
      });
      if (device == 0 && !in_order) continue;
      order.tasks[device] = list;
      self(self, device + 1);
    }
  };
  choose(choose, 0);
  return best;
}

std::string refusal(const pipeline_order& order, const pipeline_costs& costs) {
  try {
    static_cast<void>(simulate_pipeline(order, costs));
  } catch (const error& refused) {
    return refused.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a timeline is the least solution of the equations of start times, and a deadlock has none") {
  std::uint64_t ran = 0;
  std::uint64_t stuck = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    pipeline_shape shape{.devices = 1 + random.below(4U), .micro_batches = 0, .chunks = 1 + random.below(3U)};
    shape.micro_batches = shape.devices * (1 + random.below(3U));
    pipeline_order order = interleaved_1f1b(shape);
    if (seed % 3 == 1 && shape.chunks == 1) order = gpipe(shape);
    if (seed % 3 == 2) order = shuffled({.devices = 1 + random.below(2U), .micro_batches = 2}, random);
    const auto costs = random_costs(order.shape, random);
    const auto finishes = naive_finishes(order, costs);
    if (!finishes) {
      ++stuck;
      CHECK(refusal(order, costs).find("the order deadlocks: task ") != std::string::npos);
      continue;
    }
    ++ran;
    const auto timeline = simulate_pipeline(order, costs);
    std::uint64_t last = 0;
    for (std::uint32_t device = 0; device < order.shape.devices; ++device) {
      REQUIRE(timeline.tasks[device].size() == order.tasks[device].size());
      std::uint64_t busy = 0;
      for (std::size_t i = 0; i < order.tasks[device].size(); ++i) {
        const auto& span = timeline.tasks[device][i];
        const auto& task = order.tasks[device][i];
        REQUIRE(span.task == task);
        const std::uint64_t stage = std::uint64_t{task.chunk} * order.shape.devices + device;
        REQUIRE(span.finish_ns == finishes->at({stage, task.micro_batch, task.pass}));
        busy += span.finish_ns - span.start_ns;
        last = std::max(last, span.finish_ns);
      }
      REQUIRE(timeline.busy_ns[device] == busy);
    }
    REQUIRE(timeline.makespan_ns == last);
    for (std::uint32_t device = 0; device < order.shape.devices; ++device)
      REQUIRE(timeline.bubble_ns[device] == last - timeline.busy_ns[device]);
    REQUIRE(last >= pipeline_bound_ns(order.shape, costs));
  }
  CHECK(ran > 0);
  CHECK(stuck > 0);
}

TEST_CASE("with equal stages the bubble of gpipe and 1F1B is p - 1 micro-batches on every device") {
  for (std::uint32_t p = 1; p <= 6; ++p) {
    for (std::uint32_t m = 1; m <= 12; ++m) {
      CAPTURE(p);
      CAPTURE(m);
      const pipeline_shape shape{.devices = p, .micro_batches = m};
      const auto costs = equal_costs(shape, 3, 5);
      for (const auto& order : {gpipe(shape), one_f_one_b(shape)}) {
        const auto timeline = simulate_pipeline(order, costs);
        // Of the ideal time m (f + b), that is (p - 1) / m.
        for (const auto bubble : timeline.bubble_ns)
          REQUIRE(bubble == std::uint64_t{p - 1} * (3 + 5));
        REQUIRE(timeline.makespan_ns == pipeline_bound_ns(shape, costs));
      }
    }
  }
}

TEST_CASE("with equal chunks interleaving divides the bubble by their number") {
  for (std::uint32_t p = 1; p <= 6; ++p) {
    for (std::uint32_t v = 1; v <= 4; ++v) {
      for (std::uint32_t groups = 1; groups <= 4; ++groups) {
        CAPTURE(p);
        CAPTURE(v);
        CAPTURE(groups);
        const pipeline_shape shape{.devices = p, .micro_batches = p * groups, .chunks = v};
        const auto timeline = simulate_pipeline(interleaved_1f1b(shape), equal_costs(shape, 3, 5));
        // Of the ideal time v m (f + b), f and b of one chunk, that is (p - 1) / (v m).
        for (const auto bubble : timeline.bubble_ns)
          REQUIRE(bubble == std::uint64_t{p - 1} * (3 + 5));
      }
    }
  }
}

TEST_CASE("activations at once: m under gpipe, min(p - i, m) under 1F1B, Megatron's count when interleaved") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const pipeline_shape shape{.devices = 1 + random.below(6U), .micro_batches = 1 + random.below(12U)};
    const auto costs = random_costs(shape, random);
    const auto all = simulate_pipeline(gpipe(shape), costs);
    const auto few = simulate_pipeline(one_f_one_b(shape), costs);
    for (std::uint32_t i = 0; i < shape.devices; ++i) {
      REQUIRE(all.peak_activations[i] == shape.micro_batches);
      REQUIRE(few.peak_activations[i] == std::min(shape.devices - i, shape.micro_batches));
    }
    const pipeline_shape chunked{.devices = shape.devices,
                                 .micro_batches = shape.devices * (1 + random.below(4U)),
                                 .chunks = 2 + random.below(3U)};
    const auto interleaved = simulate_pipeline(interleaved_1f1b(chunked), random_costs(chunked, random));
    for (std::uint32_t i = 0; i < chunked.devices; ++i) {
      const std::uint32_t warm = 2 * (chunked.devices - 1 - i) + (chunked.chunks - 1) * chunked.devices;
      REQUIRE(interleaved.peak_activations[i] == std::min(warm + 1, chunked.micro_batches * chunked.chunks));
    }
  }
}

TEST_CASE("no order is faster than the bound, and gpipe and 1F1B are at most as fast as the best order") {
  constexpr std::array<pipeline_shape, 4> shapes{{{.devices = 1, .micro_batches = 3},
                                                  {.devices = 2, .micro_batches = 2},
                                                  {.devices = 2, .micro_batches = 3},
                                                  {.devices = 3, .micro_batches = 2}}};
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto& shape = shapes[seed % shapes.size()];
    const auto costs = random_costs(shape, random);
    const std::uint64_t best = best_makespan(shape, costs);
    REQUIRE(best >= pipeline_bound_ns(shape, costs));
    const std::uint64_t alternating = simulate_pipeline(one_f_one_b(shape), costs).makespan_ns;
    const std::uint64_t flushing = simulate_pipeline(gpipe(shape), costs).makespan_ns;
    REQUIRE(alternating >= best);
    REQUIRE(flushing >= best);
  }
}

TEST_CASE("sends make 1F1B slower than gpipe, which hides them behind other micro-batches") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 3};
  const auto costs = equal_costs(shape, 1, 1, 1);
  CHECK(simulate_pipeline(one_f_one_b(shape), costs).makespan_ns == 12);
  CHECK(simulate_pipeline(gpipe(shape), costs).makespan_ns == 10);
  CHECK(best_makespan(shape, costs) == 10);
}

TEST_CASE("with unequal stages 1F1B may be slower than the best order, even if sends are free") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 3};
  const pipeline_costs costs{.forward_ns = {1, 1}, .backward_ns = {2, 1}};
  CHECK(best_makespan(shape, costs) == 9);
  CHECK(simulate_pipeline(one_f_one_b(shape), costs).makespan_ns == 10);
  CHECK(simulate_pipeline(gpipe(shape), costs).makespan_ns == 11);
}

TEST_CASE("with equal stages and free sends 1F1B is as fast as the best of all orders") {
  for (const pipeline_shape shape :
       {pipeline_shape{.devices = 2, .micro_batches = 3}, pipeline_shape{.devices = 3, .micro_batches = 2}}) {
    const auto costs = equal_costs(shape, 2, 5);
    CHECK(simulate_pipeline(one_f_one_b(shape), costs).makespan_ns == best_makespan(shape, costs));
  }
}

TEST_CASE(
    "under 1F1B stage i of n keeps at most n - i versions of its weights, and exactly that many once warm") {
  for (std::uint32_t n = 1; n <= 6; ++n) {
    for (std::uint32_t m = 1; m <= 20; ++m) {
      const auto uses = stashed_versions(one_f_one_b({.devices = n, .micro_batches = m}));
      for (std::uint32_t i = 0; i < n; ++i) {
        CAPTURE(n);
        CAPTURE(m);
        CAPTURE(i);
        std::uint64_t most = 0;
        for (const auto& use : uses[i])
          most = std::max(most, use.live);
        REQUIRE(most <= n - i);
        if (m >= 2 * (n - i)) REQUIRE(most == n - i);
      }
    }
  }
}

TEST_CASE("the count of versions assumes a stage that keeps a copy for each micro-batch begun") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const pipeline_shape shape{
        .devices = 1, .micro_batches = 1 + random.below(8U), .chunks = 1 + random.below(3U)};
    auto order = shuffled(shape, random);
    // Forward passes first: of the two passes of a micro-batch in a chunk, whichever comes first becomes it.
    std::set<std::tuple<std::uint32_t, std::uint32_t>> seen;
    for (auto& task : order.tasks[0]) {
      const bool first = seen.insert({task.chunk, task.micro_batch}).second;
      task.pass = first ? pipeline_pass::forward : pipeline_pass::backward;
    }
    const auto uses = stashed_versions(order);
    std::map<std::uint32_t, std::uint64_t> updates;                           // by chunk
    std::map<std::tuple<std::uint32_t, std::uint32_t>, std::uint64_t> begun;  // by chunk, micro-batch
    for (std::size_t i = 0; i < order.tasks[0].size(); ++i) {
      const auto& task = order.tasks[0][i];
      if (task.pass == pipeline_pass::forward) begun[{task.chunk, task.micro_batch}] = updates[task.chunk];
      std::set<std::uint64_t> kept{updates[task.chunk]};
      for (const auto& [who, version] : begun) {
        if (std::get<0>(who) == task.chunk) kept.insert(version);
      }
      REQUIRE(uses[0][i].live == kept.size());
      const auto version = begun.at({task.chunk, task.micro_batch});
      REQUIRE(uses[0][i].version == version);
      if (task.pass == pipeline_pass::backward) {
        begun.erase({task.chunk, task.micro_batch});
        ++updates[task.chunk];
      }
    }
  }
}

TEST_CASE("docs/pipelines.md shows the times of the orders") {
  const auto most = [](const auto& list) {
    return std::to_string(*std::max_element(list.begin(), list.end()));
  };
  std::string table =
      "| order | makespan | bubble of the ideal time | makespan, sends of 2 | activations of device 0 | "
      "weight "
      "versions of device 0, updated at once |\n|---|---|---|---|---|---|\n";
  const auto line = [&](const char* name, const pipeline_order& order, std::uint64_t forward,
                        std::uint64_t backward) {
    const auto timeline = simulate_pipeline(order, equal_costs(order.shape, forward, backward));
    const auto sending = simulate_pipeline(order, equal_costs(order.shape, forward, backward, 2));
    std::vector<std::uint64_t> live;
    const auto uses = stashed_versions(order);
    for (const auto& use : uses[0])
      live.push_back(use.live);
    const double bubble =
        static_cast<double>(timeline.bubble_ns[0]) / static_cast<double>(timeline.busy_ns[0]);
    table += "| " + std::string(name) + " | " + std::to_string(timeline.makespan_ns) + " | " +
             llmmem_tests::decimal(100 * bubble, 1) + " % | " + std::to_string(sending.makespan_ns) + " | " +
             std::to_string(timeline.peak_activations[0]) + " | " + most(live) + " |\n";
  };
  line("`gpipe`", gpipe({.devices = 4, .micro_batches = 8}), 12, 24);
  line("`one_f_one_b`", one_f_one_b({.devices = 4, .micro_batches = 8}), 12, 24);
  line("`interleaved_1f1b`, 2 chunks", interleaved_1f1b({.devices = 4, .micro_batches = 8, .chunks = 2}), 6,
       12);
  line("`interleaved_1f1b`, 4 chunks", interleaved_1f1b({.devices = 4, .micro_batches = 8, .chunks = 4}), 3,
       6);
  llmmem_tests::check_documented("pipelines.md", table);
}

TEST_CASE("docs/pipelines.md shows how far 1F1B and gpipe are from the best of all orders") {
  constexpr std::uint64_t cases = 50;
  std::string table =
      "| devices, micro-batches | sends | 1F1B is not the best | at worst | gpipe is not the best | at worst "
      "|\n"
      "|---|---|---|---|---|---|\n";
  for (const pipeline_shape shape : {pipeline_shape{.devices = 2, .micro_batches = 2},
                                     {.devices = 2, .micro_batches = 3},
                                     {.devices = 3, .micro_batches = 2},
                                     {.devices = 4, .micro_batches = 2}}) {
    for (const bool sends : {false, true}) {
      std::array<std::uint64_t, 2> slower{};
      std::array<double, 2> worst{1, 1};
      for (std::uint64_t seed = 1; seed <= cases; ++seed) {
        random_numbers random(seed);
        auto costs = random_costs(shape, random);
        if (!sends) costs.send_ns = 0;
        const auto best = best_makespan(shape, costs);
        const std::array<std::uint64_t, 2> takes{simulate_pipeline(one_f_one_b(shape), costs).makespan_ns,
                                                 simulate_pipeline(gpipe(shape), costs).makespan_ns};
        for (std::size_t i = 0; i < 2; ++i) {
          slower[i] += takes[i] > best ? 1U : 0U;
          worst[i] = std::max(worst[i], static_cast<double>(takes[i]) / static_cast<double>(best));
        }
      }
      table += "| " + std::to_string(shape.devices) + ", " + std::to_string(shape.micro_batches) + " | " +
               (sends ? "0 to 3" : "free") + " | " + std::to_string(slower[0]) + " of 50 | " +
               llmmem_tests::decimal(worst[0], 2) + "x | " + std::to_string(slower[1]) + " of 50 | " +
               llmmem_tests::decimal(worst[1], 2) + "x |\n";
    }
  }
  llmmem_tests::check_documented("pipelines.md", table);
}

TEST_CASE("an order with a missing, repeated or foreign task is refused by the task's name") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 2};
  const auto costs = equal_costs(shape, 1, 1);
  auto order = gpipe(shape);
  order.tasks[1].pop_back();
  CHECK(refusal(order, costs) ==
        "simulate_pipeline: the order lacks backward of micro-batch 1 in chunk 0 on device 1");
  order.tasks[1].push_back(order.tasks[1].front());
  CHECK(refusal(order, costs) ==
        "simulate_pipeline: the order lists a task twice: forward of micro-batch 0 in chunk 0 on device 1");
  order.tasks[1].back() = {.device = 1, .micro_batch = 2};
  CHECK(refusal(order, costs) ==
        "simulate_pipeline: task 3 of device 1 is forward of micro-batch 2 in chunk 0 on device 1, which its "
        "shape does not have");
  order.tasks[1].back() = {.device = 0, .micro_batch = 1, .pass = pipeline_pass::backward};
  CHECK(refusal(order, costs) ==
        "simulate_pipeline: task 3 of device 1 is backward of micro-batch 1 in chunk 0 on device 0, which "
        "its shape does not have");
  order.tasks.pop_back();
  CHECK(refusal(order, costs) ==
        "simulate_pipeline: the order lists tasks of 1 devices, but its shape has 2");
}

TEST_CASE("an order in which devices wait for each other is refused with both tasks") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 2};
  auto order = gpipe(shape);
  // Device 0 wants the gradient of 1 first, while device 1 makes that of 0 only after its forward pass of 1.
  order.tasks[0] = {{.device = 0, .micro_batch = 0},
                    {.device = 0, .micro_batch = 0, .pass = pipeline_pass::backward},
                    {.device = 0, .micro_batch = 1},
                    {.device = 0, .micro_batch = 1, .pass = pipeline_pass::backward}};
  CHECK(refusal(order, equal_costs(shape, 1, 1)) ==
        "simulate_pipeline: the order deadlocks: task 1 of device 0, backward of micro-batch 0 in chunk 0 "
        "on "
        "device 0, waits for backward of micro-batch 0 in chunk 0 on device 1, which never begins; list that "
        "earlier");
  order = gpipe({.devices = 1, .micro_batches = 1});
  std::swap(order.tasks[0][0], order.tasks[0][1]);
  CHECK(refusal(order, equal_costs(order.shape, 1, 1)) ==
        "simulate_pipeline: the order deadlocks: task 0 of device 0, backward of micro-batch 0 in chunk 0 "
        "on "
        "device 0, waits for forward of micro-batch 0 in chunk 0 on device 0, which never begins; list that "
        "earlier");
  CHECK_THROWS_WITH_AS(static_cast<void>(stashed_versions(order)),
                       "stashed_versions: backward of micro-batch 0 in chunk 0 on device 0 comes before its "
                       "forward pass; list that pass earlier",
                       argument_error);
}

TEST_CASE("costs of the wrong number, or past the largest time, are refused") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 2};
  auto costs = equal_costs(shape, 1, 1);
  costs.backward_ns.pop_back();
  CHECK(refusal(gpipe(shape), costs) ==
        "simulate_pipeline: backward_ns has 1 entries, the pipeline 2 stages");
  costs = equal_costs(shape, std::uint64_t{1} << 62, 0);
  CHECK(refusal(gpipe(shape), costs) ==
        "simulate_pipeline: 4611686018427387904 x 2 exceeds the latest time, 2^63 - 1 ns; lower the times");
  costs = equal_costs(shape, 0, 0, std::uint64_t{1} << 61);
  CHECK_THROWS_AS(static_cast<void>(pipeline_bound_ns(shape, costs)), length_error);
}
