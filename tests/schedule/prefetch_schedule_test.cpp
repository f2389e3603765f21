#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/schedule/plan_text.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// A buffer measures by the clock that the simulated device and the program's computing go by.
struct virtual_meter {
  virtual_clock* clock = nullptr;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock->now().ns; }
};
struct virtual_traits : tiered_traits {
  using clock = virtual_meter;
};

constexpr std::uint64_t page = 4096;
constexpr link_model pcie{.bytes_per_second = 1'000'000'000, .latency_ns = 500, .duplex = link_duplex::half};

/// A program over chunks of `sizes` pages on a device of `budget` pages, with one link to the host.
class device_program {
 public:
  using buffer_type =
      basic_tiered_buffer<virtual_traits, tier<simulated_space, min_eviction>, tier<host_space>>;
  using schedule_type = prefetch_schedule<buffer_type>;

  device_program(const std::vector<std::uint64_t>& sizes, std::uint64_t budget, prefetch_options options = {})
      : buffer(virtual_meter{&clock}, {}, {device, budget * page}, {host, std::uint64_t{1} << 24}) {
    options.links = {pcie};
    schedule.emplace(buffer, std::move(options));
    for (const std::uint64_t pages : sizes) {
      chunks.push_back(buffer.create(pages * page).value());
      schedule->add(chunks.back());
      values.push_back(0);
      const auto lease = buffer.write(chunks.back()).value();
      put(lease.range(), 0);
    }
    REQUIRE(buffer.flush());
    for (const chunk_handle each : chunks)
      REQUIRE(buffer.evict(each));
  }

  /// Computes, looking up from it as often as was asked.
  void compute(std::uint64_t ns) {
    while (ns > slice_ns) {
      clock.advance(slice_ns);
      schedule->progress();
      ns -= slice_ns;
    }
    clock.advance(ns);
  }
  /// Reads a chunk, computes, checks what was there.
  void use(std::size_t at, std::uint64_t compute_ns) {
    auto lease = schedule->read(chunks[at]).value();
    compute(compute_ns);
    CHECK(get(lease.range()) == values[at]);
  }
  /// Changes a chunk.
  void change(std::size_t at, std::uint64_t compute_ns) {
    auto lease = schedule->update(chunks[at]).value();
    CHECK(get(lease.range()) == values[at]);
    compute(compute_ns);
    put(lease.range(), ++values[at]);
  }

  virtual_clock clock;
  simulated_space device{clock, {.budget = 1 << 24, .link = {pcie.bytes_per_second, pcie.latency_ns}}};
  host_space host{{.budget = 1 << 25}};
  buffer_type buffer;
  std::optional<schedule_type> schedule;
  std::vector<chunk_handle> chunks;
  std::vector<int> values;
  std::uint64_t slice_ns = ~std::uint64_t{0};

 private:
  // A chunk's value is in its first and its last byte. They are reached past the link: the program's own
  // loads and stores take no time of it.
  void put(simulated_space::range_type range, int value) {
    const auto bytes = device.device_view(range);
    bytes.front() = bytes.back() = static_cast<std::byte>(value);
  }
  [[nodiscard]] int get(simulated_space::range_type range) {
    const auto bytes = device.device_view(range);
    return bytes.front() == bytes.back() ? std::to_integer<int>(bytes.front()) : -1;
  }
};

/// Nanoseconds that `body` takes on the program's clock.
template <class Body>
[[nodiscard]] std::uint64_t time_of(device_program& program, Body body) {
  const std::uint64_t began = program.clock.now().ns;
  body();
  return program.clock.now().ns - began;
}

}  // namespace

TEST_CASE("weights streamed in a loop arrive as predicted, and their fetches hide behind computation") {
  device_program program(std::vector<std::uint64_t>(20, 4), 24);
  constexpr std::uint64_t compute = 20'000;  // a chunk takes 16,884 ns to come up
  const auto iteration = [&] {
    program.schedule->begin_iteration();
    for (std::size_t layer = 0; layer < 20; ++layer)
      program.use(layer, compute);
    program.schedule->end_iteration();
  };
  const std::uint64_t recorded = time_of(program, iteration);
  CHECK(recorded > 20 * (compute + 16'000));
  const schedule_plan& plan = program.schedule->plan();
  CHECK(plan.steady.forecast.stalls.total() == 0);
  iteration();
  const std::uint64_t followed = time_of(program, iteration);
  CHECK(followed == plan.steady.forecast.iteration_ns);
  CHECK(followed == 20 * compute);
  CHECK(program.schedule->stats().late == 0);
  CHECK(program.buffer.audit().empty());
}

TEST_CASE("a bottleneck link stays busy, and an iteration takes the predicted time") {
  device_program program(std::vector<std::uint64_t>(12, 4), 16);
  const auto iteration = [&] {
    program.schedule->begin_iteration();
    for (std::size_t layer = 0; layer < 12; ++layer)
      program.use(layer, 3'000);
    program.schedule->end_iteration();
  };
  const std::uint64_t recorded = time_of(program, iteration);
  iteration();
  iteration();
  const std::uint64_t followed = time_of(program, iteration);
  const plan_iteration& steady = program.schedule->plan().steady;
  CHECK(steady.forecast.stalls.total() != 0);
  CHECK(followed == steady.forecast.iteration_ns);
  CHECK(followed < recorded);
}

namespace {

/// Of the plans of random programs, what an iteration was predicted to take and what it took.
struct race {
  std::uint64_t predicted = 0;
  std::uint64_t took = 0;
};

[[nodiscard]] race run_random_programs(std::uint64_t slice_ns, bool equal_sizes) {
  race sum;
  for (const auto seed : seeds(40, 10)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t i = 0; i < 6 + random.below(8U); ++i)
      sizes.push_back(equal_sizes ? 4 : 1 + random.below(4U));
    device_program program(sizes, 14 + random.below(10U));
    program.slice_ns = slice_ns;
    struct access {
      std::size_t at;
      bool changes;
      std::uint64_t ns;
    };
    std::vector<access> accesses;
    for (std::uint64_t i = 0; i < 30; ++i)
      accesses.push_back({random.below(sizes.size()), random.once_in(3), random.below(20'000U)});
    const auto iteration = [&] {
      program.schedule->begin_iteration();
      for (const access& each : accesses) {
        if (each.changes) {
          program.change(each.at, each.ns);
        } else {
          program.use(each.at, each.ns);
        }
      }
      program.schedule->end_iteration();
    };
    iteration();
    iteration();
    iteration();
    sum.took += time_of(program, iteration);
    sum.predicted += program.schedule->plan().steady.forecast.iteration_ns;
    CHECK(program.buffer.audit().empty());
    CHECK(program.schedule->stats().diverged == 0);
  }
  return sum;
}

}  // namespace

TEST_CASE("random programs take the predicted time if they call progress now and then") {
  const race often = run_random_programs(500, true);
  CHECK(often.took < often.predicted * 101 / 100);
  // Room that comes free in the middle of computing is not used before the next call.
  const race seldom = run_random_programs(~std::uint64_t{0}, true);
  CHECK(seldom.took > often.took);
}

TEST_CASE("random programs over chunks of unequal size get their data, with delays by fragmented memory") {
  const race unequal = run_random_programs(500, false);
  CHECK(unequal.took < unequal.predicted * 5 / 4);
}

TEST_CASE("a program that leaves the plan gets its data, and rejoins the plan where it matches") {
  for (const on_divergence what :
       {on_divergence::repair, on_divergence::re_record, on_divergence::fall_back}) {
    device_program program(std::vector<std::uint64_t>(10, 4), 16,
                           {.divergence = what, .follow = {.reach = 4, .patience = 3}});
    const auto iteration = [&](std::size_t from, std::size_t step) {
      program.schedule->begin_iteration();
      for (std::size_t i = 0; i < 10; ++i)
        program.change((from + i * step) % 10, 1'000);
      program.schedule->end_iteration();
    };
    iteration(0, 1);
    iteration(0, 1);
    CHECK(program.schedule->state() == schedule_state::replaying);
    iteration(0, 7);
    iteration(3, 3);
    CHECK(program.schedule->stats().diverged != 0);
    CHECK(program.schedule->state() != schedule_state::recording);
    iteration(0, 1);
    iteration(0, 1);
    iteration(0, 1);
    const bool follows = program.schedule->state() == schedule_state::replaying;
    CHECK(follows == (what != on_divergence::fall_back));
    CHECK(program.schedule->stats().recordings == (what == on_divergence::re_record ? 3 : 1));
    CHECK(program.buffer.audit().empty());
  }
}

TEST_CASE("the schedule follows omitted and additional calls without giving up the plan") {
  device_program program(std::vector<std::uint64_t>(10, 4), 16);
  const auto iteration = [&](std::size_t left_out, std::size_t put_in) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 10; ++i) {
      if (i != left_out) program.use(i, 5'000);
      if (i == put_in) program.use((i + 5) % 10, 5'000);
    }
    program.schedule->end_iteration();
  };
  constexpr std::size_t nowhere = 99;
  iteration(nowhere, nowhere);
  iteration(nowhere, nowhere);
  iteration(4, nowhere);
  CHECK(program.schedule->stats().skipped == 1);
  iteration(9, nowhere);
  iteration(nowhere, nowhere);
  iteration(nowhere, 8);
  CHECK(program.schedule->stats().diverged == 0);
  const std::uint64_t on_plan = program.schedule->stats().on_plan;
  iteration(nowhere, nowhere);
  CHECK(program.schedule->stats().on_plan == on_plan + 20);
}

TEST_CASE(
    "a plan is data that can be taken out, written, read and given to another schedule of the same program") {
  const std::vector<std::uint64_t> sizes(8, 4);
  const auto run = [](device_program& program) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 8; ++i)
      program.use(i, 30'000);
    program.schedule->end_iteration();
  };
  device_program first(sizes, 12);
  run(first);
  const schedule_plan other =
      schedule::lookahead{.accesses = 1}(first.schedule->trace(), first.schedule->machine());
  const schedule_plan read = read_plan(write_plan(other));
  CHECK(read == other);
  first.schedule->replay(read);
  run(first);
  CHECK(first.schedule->plan().planner == other.planner);
  CHECK(first.schedule->simulate(1).iterations.size() == 1);

  device_program longer(std::vector<std::uint64_t>(9, 4), 12);
  run(longer);
  CHECK_THROWS_WITH_AS(longer.schedule->replay(read),
                       "prefetch_schedule: the plan was made for another trace; plan the one that is frozen",
                       argument_error);
}

TEST_CASE(
    "an iteration without leases is not a recording, and an interrupted one keeps the next one's plan") {
  device_program program(std::vector<std::uint64_t>(10, 4), 16);
  const auto iteration = [&](std::size_t layers) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < layers; ++i)
      program.use(i, 20'000);
    program.schedule->end_iteration();
  };
  iteration(0);
  CHECK_FALSE(program.schedule->has_plan());
  iteration(10);
  CHECK(program.schedule->has_plan());
  iteration(10);
  iteration(3);
  const std::uint64_t on_plan = program.schedule->stats().on_plan;
  iteration(10);
  CHECK(program.schedule->stats().on_plan == on_plan + 20);
  CHECK(program.schedule->stats().skipped + program.schedule->stats().inserted == 0);
}

TEST_CASE("a program that changes permanently is recorded again") {
  device_program program(std::vector<std::uint64_t>(10, 4), 16, {.follow = {.reach = 4, .patience = 3}});
  const auto iteration = [&](std::size_t step) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 10; ++i)
      program.use(i * step % 10, 1'000);
    program.schedule->end_iteration();
  };
  iteration(1);
  for (int i = 0; i < 8; ++i)
    iteration(7);
  CHECK(program.schedule->stats().recordings == 2);
  CHECK(program.schedule->state() == schedule_state::replaying);
  CHECK(program.schedule->stats().diverged == 3);
}

TEST_CASE("a refused lease is an event neither of a recording nor of a plan") {
  device_program program(std::vector<std::uint64_t>(6, 4), 12);
  for (int step = 0; step < 3; ++step) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 6; ++i) {
      const auto early = program.schedule->read(program.chunks[i], llmmem::tiering::best_effort);
      if (!early) CHECK(early.code() == errc::timed_out);
      if (!early) program.use(i, 10'000);
    }
    CHECK_NOTHROW(program.schedule->end_iteration());
  }
  CHECK(program.schedule->plan().events == 12);
  CHECK(program.schedule->stats().skipped + program.schedule->stats().inserted == 0);
}

TEST_CASE("a plan outlives its recording if only the times differ") {
  const std::vector<std::uint64_t> sizes(8, 4);
  const auto run = [](device_program& program, std::uint64_t ns) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 8; ++i)
      program.use(i, ns);
    program.schedule->end_iteration();
  };
  device_program first(sizes, 12);
  run(first, 30'000);
  device_program second(sizes, 12);
  run(second, 31'000);
  CHECK_NOTHROW(second.schedule->replay(read_plan(write_plan(first.schedule->plan()))));
  run(second, 31'000);
  CHECK(second.schedule->stats().on_plan == 16);
}

TEST_CASE("a plan is remade with the times of iterations that followed it, as often as configured") {
  device_program program(std::vector<std::uint64_t>(20, 4), 24, {.replans = 2});
  const auto iteration = [&](std::uint64_t ns, std::size_t left_out = 20) {
    program.schedule->begin_iteration();
    for (std::size_t layer = 0; layer < 20; ++layer) {
      if (layer != left_out) program.use(layer, ns);
    }
    program.clock.advance(7);
    program.schedule->end_iteration();
  };
  const auto& schedule = *program.schedule;
  iteration(50'000);
  CHECK(schedule.trace().compute_ns() == 20 * 50'000 + 7);
  const std::uint64_t fingerprint = schedule.trace().fingerprint();
  iteration(40'000, 5);  // not what was recorded: its times are of something else
  CHECK(schedule.stats().replans == 0);
  iteration(10'000);  // waits for the link, which is no computing
  CHECK(schedule.stats().replans == 1);
  CHECK(schedule.trace().compute_ns() == 20 * 10'000 + 7);
  CHECK(schedule.trace().tail_ns() == 7);
  CHECK(schedule.trace().fingerprint() == fingerprint);
  CHECK(schedule.plan().steady.forecast.compute_ns == 20 * 10'000 + 7);
  iteration(20'000);
  CHECK(schedule.stats().replans == 2);
  iteration(60'000);
  CHECK(schedule.stats().replans == 2);
  CHECK(schedule.trace().compute_ns() == 20 * 20'000 + 7);
  CHECK(schedule.stats().recordings == 1);
  CHECK(schedule.stats().diverged == 0);
  static_cast<void>(time_of(program, [&] { iteration(20'000); }));
  CHECK(time_of(program, [&] { iteration(20'000); }) == schedule.plan().steady.forecast.iteration_ns);
  CHECK(program.buffer.audit().empty());
}

TEST_CASE("a program that knows its calls in advance has a plan from its first iteration on") {
  device_program program(std::vector<std::uint64_t>(20, 4), 24, {.replans = 1});
  trace_recorder known = program.schedule->recorder();
  for (std::uint32_t layer = 0; layer < 20; ++layer) {
    known.acquire(chunk_id{layer}, access_mode::read);
    known.compute(18'000);
    known.release(chunk_id{layer});
  }
  const schedule_plan plan = program.schedule->plan_known_trace(known.freeze());
  CHECK(plan == program.schedule->plan());
  const auto iteration = [&] {
    program.schedule->begin_iteration();
    for (std::size_t layer = 0; layer < 20; ++layer)
      program.use(layer, 20'000);
    program.schedule->end_iteration();
  };
  // But for the first chunk, everything comes up beside computing: 4 pages and the latency.
  CHECK(time_of(program, iteration) == 20 * 20'000 + 16'884);
  CHECK(program.schedule->stats().on_plan == 40);
  CHECK(program.schedule->stats().recordings == 0);
  CHECK(program.schedule->trace().compute_ns() == 20 * 20'000);
  iteration();
  CHECK(time_of(program, iteration) == 20 * 20'000);
  CHECK(program.buffer.audit().empty());
}

TEST_CASE("each step of a plan reports how often and why it was late, and its useless work") {
  // Two chunks of four fit. Computing hides each transfer, as it is recorded.
  const auto per_chunk = transfer_ns(pcie, 4 * page) + pcie.latency_ns;
  device_program program({4, 4, 4, 4}, 8);
  const auto iterate = [&](std::uint64_t compute_ns) {
    program.schedule->begin_iteration();
    for (std::size_t i = 0; i < 4; ++i)
      program.use(i, compute_ns);
    program.schedule->end_iteration();
  };
  const auto sum = [&](auto member) {
    std::uint64_t all = 0;
    for (const auto* of : {&program.schedule->records().first, &program.schedule->records().steady}) {
      for (const step_record& each : *of)
        all += member(each);
    }
    return all;
  };
  const auto late = [](const step_record& each) { return each.late; };
  const auto late_ns = [](const step_record& each) { return each.late_ns; };
  const auto cause = [](step_cause which) {
    return [which](const step_record& each) { return each.causes[static_cast<std::size_t>(which)]; };
  };
  for (int i = 0; i < 6; ++i)
    iterate(4 * per_chunk);
  CHECK(program.schedule->records().steady.size() == program.schedule->plan().steady.steps.size());
  const std::uint64_t late_before = sum(late);
  const std::uint64_t ns_before = sum(late_ns);
  iterate(4 * per_chunk);
  CHECK(sum(late) == late_before);  // in step with what was recorded
  CHECK(sum([](const step_record& each) { return each.begun; }) == program.schedule->stats().steps);

  // A program that computes less than was recorded: the steps begin when they are due, and arrive late.
  const std::uint64_t stalled = program.buffer.stats().moved.stalls.total();
  for (int i = 0; i < 3; ++i)
    iterate(per_chunk / 8);
  CHECK(sum(late) > late_before);
  CHECK(sum(late_ns) - ns_before == program.buffer.stats().moved.stalls.total() - stalled);
  CHECK(sum(cause(step_cause::issued_late)) + sum(cause(step_cause::link_busy)) +
            sum(cause(step_cause::no_room)) + sum(cause(step_cause::leased)) ==
        sum(late));
  CHECK(sum(cause(step_cause::issued_late)) > 0);
}

TEST_CASE("impossible calls of a schedule are refused with how to resolve them") {
  device_program program({4, 4}, 12);
  prefetch_schedule<device_program::buffer_type> fresh(program.buffer, {.links = {pcie}});
  const auto refused = [](auto call, const char* text) {
    CHECK_THROWS_WITH_AS(call(), text, argument_error);
  };
  refused([&] { fresh.freeze(); }, "prefetch_schedule: nothing is being recorded; call record() first");
  refused([&] { fresh.make_plan(); }, "prefetch_schedule: there is no trace; record and freeze one first");
  refused([&] { fresh.replay(); }, "prefetch_schedule: there is no plan; call make_plan() first");
  refused([&] { static_cast<void>(fresh.read(program.chunks[0])); },
          "prefetch_schedule: chunk 0 is not known here; add() it before the first iteration");
  CHECK(fresh.add(program.chunks[0]) == chunk_id{0});
  CHECK(fresh.add(program.chunks[0]) == chunk_id{0});
  {
    const auto first = program.buffer.read(program.chunks[0]).value();
    const auto second = program.buffer.read(program.chunks[1]).value();
    const auto third = program.buffer.write(program.buffer.create(4 * page).value()).value();
    refused([&] { prefetch_schedule<device_program::buffer_type>(program.buffer, {}); },
            "prefetch_schedule: prefetch_options::links is empty, and they cannot be measured "
            "(tiered_buffer: tier 0: 12288 bytes needed, but 0 left in its budget; release ranges, or raise "
            "the budget); give the link below each tier, or space for two more chunks");
  }
  refused([&] { fresh.plan_known_trace(trace_recorder().freeze()); },
          "prefetch_schedule: a trace of 0 chunks was given to plan_known_trace(), but its chunks are not "
          "the 1 that "
          "were added; make it "
          "with recorder()");
  trace_recorder other;
  other.add_chunk(page);
  refused([&] { fresh.plan_known_trace(other.freeze()); },
          "prefetch_schedule: a trace of 1 chunks was given to plan_known_trace(), but its chunks are not "
          "the 1 that "
          "were added; make it "
          "with recorder()");
  fresh.record();
  refused(
      [&] { fresh.plan_known_trace(fresh.recorder().freeze()); },
      "prefetch_schedule: plan_known_trace() is not possible while a trace is recorded; freeze() that first");
  refused([&] { fresh.add(program.chunks[1]); },
          "prefetch_schedule: a chunk was added after recording began; add all of them first");
  const auto held = fresh.read(program.chunks[0]).value();
  CHECK_THROWS_AS(fresh.freeze(), argument_error);
}

TEST_CASE("memory for overwritten contents is a step of the plan, and does not count as unneeded") {
  device_program program(std::vector<std::uint64_t>(6, 4), 12);
  for (int step = 0; step < 4; ++step) {
    program.schedule->begin_iteration();
    for (const chunk_handle each : program.chunks) {
      static_cast<void>(program.schedule->write(each).value());
      program.compute(40'000);
      REQUIRE(program.schedule->discard(each));
    }
    program.schedule->end_iteration();
  }
  std::size_t rooms = 0;
  std::size_t others = 0;
  for (const plan_step& each : program.schedule->plan().steady.steps)
    ++(each.operation == plan_operation::allocate ? rooms : others);
  CHECK(rooms == 6);
  CHECK(others == 6);  // drops of what was discarded: that is done by then
  CHECK(program.schedule->stats().steps == 0);
  CHECK(program.schedule->stats().unneeded == 3 * others);
}

TEST_CASE("chunks added after an iteration without leases are counted with the others") {
  device_program program(std::vector<std::uint64_t>(2, 4), 12, {.divergence = on_divergence::by_frequency});
  program.schedule->begin_iteration();  // begins to count the uses of two chunks
  program.schedule->end_iteration();
  for (std::size_t i = 2; i < 40; ++i) {
    program.chunks.push_back(program.schedule->create(page).value());
    program.values.push_back(0);
  }
  program.schedule->begin_iteration();
  for (const chunk_handle each : program.chunks)
    CHECK(program.schedule->write(each));
  program.schedule->end_iteration();
  CHECK(program.schedule->trace().sizes().size() == 40);
  CHECK(program.schedule->plan().events == 80);
}

TEST_CASE("an impossible trace also ends the plan of the previous trace") {
  device_program program(std::vector<std::uint64_t>(3, 4), 8);
  const auto plan_known_trace = [&](bool overlapping) {
    trace_recorder known = program.schedule->recorder();
    for (std::uint32_t i = 0; i < 3; ++i) {
      known.acquire(chunk_id{i}, access_mode::read);
      if (!overlapping) known.release(chunk_id{i});
    }
    for (std::uint32_t i = 0; i < 3 && overlapping; ++i)
      known.release(chunk_id{i});
    program.schedule->plan_known_trace(known.freeze());
  };
  plan_known_trace(false);
  CHECK(program.schedule->has_plan());
  CHECK_THROWS_AS(plan_known_trace(true), argument_error);  // 12 pages at once do not fit
  CHECK_FALSE(program.schedule->has_plan());
  CHECK_THROWS_AS(program.schedule->replay(), argument_error);
}

TEST_CASE("patience ends even if the buffer's clock never moves") {
  device_program program({4, 4}, 12);
  const std::uint64_t began = program.clock.now().ns;
  CHECK(program.buffer.read(program.chunks[0], tiering::timeout(1'000'000)).code() == errc::timed_out);
  CHECK(program.clock.now().ns == began);
  CHECK(program.buffer.read(program.chunks[0], llmmem::tiering::wait_complete));
}
