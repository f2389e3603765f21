/// Tensors on a schedule: their leases are recorded and planned as those of their chunks.
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/schedule/plan_text.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/persistent_tensors.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

namespace {

struct virtual_meter {
  virtual_clock* clock = nullptr;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock->now().ns; }
};
struct virtual_traits : tiered_traits {
  using clock = virtual_meter;
};

constexpr std::uint64_t page = 4096;
constexpr link_model pcie{.bytes_per_second = 1'000'000'000, .latency_ns = 500, .duplex = link_duplex::half};

/// A device over a host, and one link between.
template <class Eviction>
struct device {
  using buffer_type = basic_tiered_buffer<virtual_traits, tier<simulated_space, Eviction>, tier<host_space>>;

  virtual_clock clock;
  simulated_space space{clock, {.budget = 1 << 24, .link = {pcie.bytes_per_second, pcie.latency_ns}}};
  host_space host{{.budget = 1 << 25}};
  buffer_type buffer;

  explicit device(std::uint64_t pages)
      : buffer(virtual_meter{&clock}, {}, {space, pages * page}, {host, std::uint64_t{1} << 24}) {}
  ~device() {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  device(const device&) = delete;
  device& operator=(const device&) = delete;

  [[nodiscard]] std::uint64_t up() const { return buffer.stats().moved.links[0].onboard.bytes; }
  [[nodiscard]] std::uint64_t down() const { return buffer.stats().moved.links[0].offload.bytes; }
};

/// What a program does to a tensor's part for a while.
struct use {
  std::uint32_t tensor;
  std::uint32_t part;
  bool changes;
};
/// Uses that begin one after another, compute, and end in the same order.
struct task {
  std::vector<use> uses;
  std::uint64_t ns;
};
struct program {
  std::vector<tensor_size> sizes;
  std::vector<task> tasks;
  chunk_mapping mapping;

  /// Layers of a matrix in three chunks, one in its own, and three vectors in one chunk: forward they are
  /// read, backward the large ones are changed, and of the small ones the last.
  explicit program(std::uint32_t layers, std::uint64_t ns, bool and_back = true)
      : mapping(map_to_chunks({}, {})) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      sizes.push_back({.bytes = 12 * page, .set = layer});
      sizes.push_back({.bytes = 3 * page, .set = layer});
      for (int i = 0; i < 3; ++i)
        sizes.push_back({.bytes = 700, .set = layer});
    }
    mapping = map_to_chunks(sizes, {.group_bytes = page, .split_bytes = 4 * page, .unit = page});
    for (std::uint32_t layer = 0; layer < layers; ++layer)
      add(layer, ns, false);
    for (std::uint32_t layer = layers; and_back && layer-- > 0;)
      add(layer, 2 * ns, true);
  }

 private:
  void add(std::uint32_t layer, std::uint64_t ns, bool changes) {
    const std::uint32_t first = 5 * layer;
    tasks.push_back(
        {{{first + 2, 0, false}, {first + 3, 0, false}, {first + 4, 0, changes}, {first + 1, 0, changes}},
         ns});
    for (std::uint32_t part = 0; part < 3; ++part)
      tasks.push_back({{{first, part, changes}}, ns});
  }
};

/// The bytes that all tensors have.
struct oracle {
  std::vector<std::vector<std::byte>> parts;

  explicit oracle(const chunk_mapping& mapping) {
    for (const tensor_part& each : mapping.parts()) {
      parts.emplace_back(each.bytes);
      for (std::size_t i = 0; i < each.bytes; ++i)
        parts.back()[i] = static_cast<std::byte>(i * 7 + parts.size());
    }
  }
};

/// Runs tasks over tensors, checks what they read, and changes what they change.
template <class Tensors, class Device>
class runner {
 public:
  runner(Tensors& tensors, Device& world, const program& does)
      : tensors_(tensors), world_(world), does_(does), expected_(does.mapping) {
    for (std::uint32_t t = 0; t < does.mapping.tensors(); ++t) {
      for (std::uint32_t part = 0; part < does.mapping.parts(tensor_id{t}).size(); ++part) {
        const auto lease = tensors.write(tensor_id{t}, part).value();
        std::ranges::copy(bytes_of(t, part), world.space.device_view(lease.range()).begin());
      }
    }
    REQUIRE(world.buffer.flush());
    for (std::uint32_t t = 0; t < does.mapping.tensors(); ++t)
      REQUIRE(tensors.evict(tensor_id{t}));
  }

  /// Nanoseconds that it took.
  template <class Progress>
  std::uint64_t run(Progress progress) {
    const std::uint64_t began = world_.clock.now().ns;
    for (const task& each : does_.tasks) {
      using read_lease = typename Tensors::read_lease;
      using update_lease = typename Tensors::update_lease;
      std::vector<std::pair<read_lease, update_lease>> held;
      for (const use& one : each.uses) {
        if (one.changes) {
          held.emplace_back(read_lease{}, tensors_.update(tensor_id{one.tensor}, one.part).value());
          change(one, held.back().second.range());
        } else {
          held.emplace_back(tensors_.read(tensor_id{one.tensor}, one.part).value(), update_lease{});
          check(one, held.back().first.range());
        }
      }
      world_.clock.advance(each.ns / 2);
      progress();
      world_.clock.advance(each.ns - each.ns / 2);
      for (auto& lease : held) {
        lease.first.end();
        lease.second.end();
      }
    }
    return world_.clock.now().ns - began;
  }
  [[nodiscard]] const oracle& expected() const { return expected_; }

 private:
  [[nodiscard]] std::vector<std::byte>& bytes_of(std::uint32_t tensor, std::uint32_t part) {
    return expected_.parts[does_.mapping.first_part(tensor_id{tensor}) + part];
  }
  void check(const use& one, simulated_space::range_type range) {
    CHECK(std::ranges::equal(world_.space.device_view(range), bytes_of(one.tensor, one.part)));
  }
  void change(const use& one, simulated_space::range_type range) {
    check(one, range);
    std::vector<std::byte>& all = bytes_of(one.tensor, one.part);
    for (std::byte& each : all)
      each = static_cast<std::byte>(std::to_integer<unsigned>(each) * 5 + 1);
    std::ranges::copy(all, world_.space.device_view(range).begin());
  }

  Tensors& tensors_;
  Device& world_;
  const program& does_;
  oracle expected_;
};

struct outcome {
  std::vector<std::uint64_t> ns;  // of each iteration
  std::uint64_t up = 0;           // bytes, of the iterations
  std::uint64_t down = 0;
  std::uint64_t hits = 0;  // in tier 0
  std::string plan{};
  prefetch_stats stats{};
};

/// Tensors on a schedule.
[[nodiscard]] outcome with_schedule(const program& does, std::uint64_t pages, int iterations) {
  using world_type = device<min_eviction>;
  world_type world(pages);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  outcome made;
  {
    tiered_tensors tensors(schedule, does.mapping);
    runner running(tensors, world, does);
    const std::uint64_t up = world.up();
    const std::uint64_t down = world.down();
    for (int i = 0; i < iterations; ++i) {
      schedule.begin_iteration();
      made.ns.push_back(running.run([&] { schedule.progress(); }));
      schedule.end_iteration();
    }
    made.up = world.up() - up;
    made.down = world.down() - down;
    made.hits = world.buffer.stats().tiers[0].hits;
    made.plan = write_plan(schedule.plan());
    made.stats = schedule.stats();
    for (const std::string& broken : tensors.audit())
      FAIL_CHECK(broken);
  }
  CHECK(world.buffer.stats().tiers[1].chunks == 0);
  return made;
}

/// The same accesses, made of chunks by hand.
[[nodiscard]] outcome with_chunks(const program& does, std::uint64_t pages, int iterations) {
  device<min_eviction> world(pages);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  std::vector<chunk_handle> chunks;
  for (const std::uint64_t bytes : does.mapping.chunks()) {
    chunks.push_back(world.buffer.create(bytes).value());
    schedule.add(chunks.back());
  }
  // As tensors fill them: of the shared ones, each but the first knows that others are there.
  for (const tensor_part& each : does.mapping.parts()) {
    const chunk_handle chunk = chunks[to_index(each.chunk)];
    if (each.offset == 0) {
      static_cast<void>(schedule.write(chunk).value());
    } else {
      static_cast<void>(schedule.update(chunk, each.offset, each.bytes).value());
    }
  }
  REQUIRE(world.buffer.flush());
  for (const chunk_handle each : chunks)
    REQUIRE(world.buffer.evict(each));
  outcome made;
  const std::uint64_t up = world.up();
  const std::uint64_t down = world.down();
  for (int i = 0; i < iterations; ++i) {
    schedule.begin_iteration();
    const std::uint64_t began = world.clock.now().ns;
    for (const task& each : does.tasks) {
      using read_lease = decltype(schedule)::read_lease;
      using update_lease = decltype(schedule)::update_lease;
      // A chunk is leased once, for all of its tensors: changed where one of them is.
      std::vector<std::pair<read_lease, update_lease>> held;
      std::optional<chunk_id> last;
      for (const use& one : each.uses) {
        const tensor_part& place = does.mapping.parts(tensor_id{one.tensor})[one.part];
        if (std::exchange(last, place.chunk) == place.chunk) continue;
        const use* changing = nullptr;
        for (const use& other : each.uses) {
          if (other.changes && does.mapping.parts(tensor_id{other.tensor})[other.part].chunk == place.chunk)
            changing = &other;
        }
        const chunk_handle chunk = chunks[to_index(place.chunk)];
        if (changing == nullptr) {
          held.emplace_back(schedule.read(chunk).value(), update_lease{});
        } else {
          const tensor_part& part = does.mapping.parts(tensor_id{changing->tensor})[changing->part];
          held.emplace_back(read_lease{}, schedule.update(chunk, part.offset, part.bytes).value());
        }
      }
      world.clock.advance(each.ns / 2);
      schedule.progress();
      world.clock.advance(each.ns - each.ns / 2);
      for (auto& lease : held) {
        lease.first.end();
        lease.second.end();
      }
    }
    made.ns.push_back(world.clock.now().ns - began);
    schedule.end_iteration();
  }
  made.up = world.up() - up;
  made.down = world.down() - down;
  made.hits = world.buffer.stats().tiers[0].hits;
  made.plan = write_plan(schedule.plan());
  made.stats = schedule.stats();
  return made;
}

/// Tensors on the buffer alone, least recently used.
[[nodiscard]] outcome without_schedule(const program& does, std::uint64_t pages, int iterations) {
  device<lru_eviction> world(pages);
  outcome made;
  tiered_tensors tensors(world.buffer, does.mapping);
  runner running(tensors, world, does);
  const std::uint64_t up = world.up();
  const std::uint64_t down = world.down();
  for (int i = 0; i < iterations; ++i)
    made.ns.push_back(running.run([&] { world.buffer.progress(); }));
  made.up = world.up() - up;
  made.down = world.down() - down;
  made.hits = world.buffer.stats().tiers[0].hits;
  return made;
}

}  // namespace

TEST_CASE("tensors on a schedule act as the same accesses of chunks, to the nanosecond") {
  // A chunk of four pages comes up in 16,884 ns: the link is slower than computing, as fast, and faster.
  for (const std::uint64_t ns : {4'000U, 17'000U, 60'000U}) {
    CAPTURE(ns);
    for (const std::uint64_t pages : {30U, 48U}) {
      CAPTURE(pages);
      const program does(6, ns);
      const outcome tensors = with_schedule(does, pages, 5);
      const outcome chunks = with_chunks(does, pages, 5);
      CHECK(tensors.plan == chunks.plan);
      CHECK(tensors.ns == chunks.ns);
      CHECK(tensors.up == chunks.up);
      CHECK(tensors.down == chunks.down);
      CHECK(tensors.hits == chunks.hits);
      CHECK(tensors.stats.on_plan == chunks.stats.on_plan);
      CHECK(tensors.stats.steps == chunks.stats.steps);
      CHECK(tensors.stats.late == chunks.stats.late);
      CHECK(tensors.stats.skipped + tensors.stats.inserted + tensors.stats.diverged == 0);
      CHECK(tensors.stats.on_plan == 4 * 2 * (does.tasks.size() + 12));
    }
  }
}

TEST_CASE("tensors on a schedule wait no longer than without one, and find more of their chunks there") {
  for (const std::uint64_t ns : {4'000U, 17'000U, 60'000U}) {
    CAPTURE(ns);
    for (const std::uint64_t pages : {30U, 48U, 90U}) {
      CAPTURE(pages);
      const program does(6, ns);
      const outcome planned = with_schedule(does, pages, 5);
      const outcome recent = without_schedule(does, pages, 5);
      for (std::size_t i = 1; i < 5; ++i)
        CHECK(planned.ns[i] <= recent.ns[i]);
      CHECK(planned.hits > recent.hits);
      // All of 96 pages fits nowhere here, so that there is something to gain.
      CHECK(planned.ns.back() < recent.ns.back());
    }
  }
}

TEST_CASE("a plan brings up tensors of a loop less often") {
  for (const std::uint64_t pages : {30U, 48U, 70U}) {
    CAPTURE(pages);
    // There and back the least recently used moves as little as can be; in a loop it moves all of it.
    const program does(6, 17'000, false);
    const outcome planned = with_schedule(does, pages, 5);
    const outcome recent = without_schedule(does, pages, 5);
    CHECK(planned.up < recent.up);
    CHECK(planned.ns.back() < recent.ns.back());
    CHECK(planned.down == 0);
  }
}

TEST_CASE("a small tensor that is only read leaves its chunk clean") {
  device<min_eviction> world(8);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  const std::vector<tensor_size> sizes{{.bytes = 700}, {.bytes = 700}, {.bytes = 8 * page}};
  tiered_tensors tensors(schedule, map_to_chunks(sizes, {.group_bytes = page, .split_bytes = 4 * page}));
  for (std::uint32_t i = 0; i < 2; ++i)
    static_cast<void>(tensors.write(tensor_id{i}).value());
  for (const bool changes : {false, true}) {
    schedule.record();
    {
      const auto one = tensors.read(tensor_id{0}).value();
      if (changes) static_cast<void>(tensors.update(tensor_id{1}).value());
      if (!changes) static_cast<void>(tensors.read(tensor_id{1}).value());
    }
    const schedule_trace& trace = schedule.freeze();
    REQUIRE(trace.events().size() == 2);
    CHECK(trace.events()[0].mode == (changes ? access_mode::read_write : access_mode::read));
    schedule.make_plan();
    for (int i = 0; i < 3; ++i) {
      schedule.begin_iteration();
      const auto one = tensors.read(tensor_id{0}).value();
      if (changes) static_cast<void>(tensors.update(tensor_id{1}).value());
      schedule.end_iteration();
    }
    CHECK(schedule.stats().inserted + schedule.stats().skipped == 0);
  }
}

TEST_CASE("a tensor in parts is read as planned, without prefetches in addition to the plan") {
  device<min_eviction> world(12);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  const std::vector<tensor_size> sizes{{.bytes = 40 * page}};
  tiered_tensors tensors(schedule, map_to_chunks(sizes, {.group_bytes = 0, .split_bytes = 4 * page}));
  const auto fill = [](auto&, const tensor_part&) {};
  REQUIRE(tensors.for_each_part<access_mode::write>(tensor_id{0}, fill));
  REQUIRE(world.buffer.flush());
  REQUIRE(tensors.evict(tensor_id{0}));
  std::uint64_t last = 0;
  for (int i = 0; i < 5; ++i) {
    schedule.begin_iteration();
    const std::uint64_t began = world.clock.now().ns;
    REQUIRE(tensors.for_each_part<access_mode::read>(tensor_id{0}, [&](auto&, const tensor_part&) {
      world.clock.advance(20'000);
      schedule.progress();
    }));
    last = world.clock.now().ns - began;
    schedule.end_iteration();
  }
  CHECK(schedule.stats().on_plan == 4 * 2 * 10);
  CHECK(schedule.stats().inserted + schedule.stats().skipped == 0);
  CHECK(last == schedule.plan().steady.forecast.iteration_ns);
}

TEST_CASE("a prefetch moves nothing while a plan is followed, and moves its chunk without one") {
  device<min_eviction> world(24);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  const std::vector<tensor_size> sizes(2, {.bytes = 4 * page});
  tiered_tensors tensors(schedule, map_to_chunks(sizes, {.group_bytes = 0, .split_bytes = 4 * page}));
  for (std::uint32_t i = 0; i < 2; ++i)
    static_cast<void>(tensors.write(tensor_id{i}).value());
  schedule.record();
  static_cast<void>(tensors.read(tensor_id{0}).value());
  schedule.end_iteration();
  REQUIRE(tensors.evict(tensor_id{1}));
  REQUIRE(world.buffer.flush());
  schedule.begin_iteration();
  const std::uint64_t before = world.up();
  for (const bool moves : {false, true}) {
    if (moves) schedule.stop();
    REQUIRE(tensors.prefetch(tensor_id{1}));
    world.clock.advance(100'000);
    world.buffer.progress();
    CHECK(world.up() - before == (moves ? 4 * page : 0));
  }
}

TEST_CASE("a removed chunk ends the plan, and the next iteration is recorded") {
  device<min_eviction> world(24);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  const std::vector<tensor_size> sizes(4, {.bytes = 4 * page});
  const chunk_mapping mapping = map_to_chunks(sizes, {.group_bytes = 0, .split_bytes = 4 * page});
  std::optional<tiered_tensors<decltype(schedule)>> first(std::in_place, schedule, mapping, "first");
  tiered_tensors second(schedule, mapping, "second");
  const auto iterate = [&](auto& tensors) {
    schedule.begin_iteration();
    for (std::uint32_t i = 0; i < 4; ++i)
      static_cast<void>(tensors.read(tensor_id{i}).value());
    schedule.end_iteration();
  };
  for (std::uint32_t i = 0; i < 4; ++i) {
    static_cast<void>(first->write(tensor_id{i}).value());
    static_cast<void>(second.write(tensor_id{i}).value());
  }
  iterate(second);
  iterate(second);
  CHECK(schedule.stats().on_plan == 8);
  CHECK_THROWS_WITH_AS(tiered_tensors(schedule, mapping),
                       "prefetch_schedule: a chunk was added after recording began; add all of them first",
                       argument_error);
  CHECK(world.buffer.stats().tiers[1].chunks == 8);
  first.reset();
  CHECK(!schedule.has_plan());
  CHECK(world.buffer.stats().tiers[1].chunks == 4);
  iterate(second);
  CHECK(schedule.trace().sizes().size() == 4);
  iterate(second);
  CHECK(schedule.stats().on_plan == 16);
  CHECK(schedule.stats().recordings == 2);
}

TEST_CASE("a lease of bytes that no event has named yet also follows an empty plan") {
  device<min_eviction> world(24);
  prefetch_schedule schedule(world.buffer, {.links = {pcie}});
  const chunk_handle chunk = schedule.create(page).value();
  static_cast<void>(schedule.write(chunk).value());
  schedule.record();
  schedule.freeze();
  schedule.make_plan();
  schedule.replay();
  auto lease = schedule.update(chunk, 0, 0).value();
  REQUIRE(lease.also_changes(0, 8));
  CHECK(lease.also_changes(page, 1).code() == errc::past_the_bytes);
}

TEST_CASE("persistent tensors work on a schedule") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  using file_buffer = tiered_buffer<host_space, persistent_file_space<>>;
  const std::vector<tensor_size> sizes{{.bytes = 700}, {.bytes = 700}, {.bytes = 10 * page}};
  const chunk_mapping mapping = map_to_chunks(sizes, {.group_bytes = page, .split_bytes = 4 * page});
  for (int round = 0; round < 2; ++round) {
    host_space host({.budget = 1 << 20});
    persistent_file_space<> disk(path, {.space = {.budget = 1 << 20}});
    file_buffer buffer({.max_chunks = 64}, {host, 12 * page}, {disk, 1 << 20});
    prefetch_schedule<file_buffer> schedule(buffer, {.links = {pcie}});
    persistent_tensors tensors(schedule, disk, "weights", tensor_names({"gain", "bias", "matrix"}), mapping);
    CHECK(tensors.recovery().kept == (round == 0 ? 0 : 3));
    if (round == 0) {
      for (std::uint32_t i = 0; i < 3; ++i) {
        REQUIRE(tensors.for_each_part<access_mode::write>(tensor_id{i}, [](auto& lease, const tensor_part&) {
          std::ranges::fill(lease.span(), std::byte{3});
        }));
      }
    }
    for (int i = 0; i < 3; ++i) {
      schedule.begin_iteration();
      {
        const auto gain = tensors.read(*tensors.find("gain")).value();
        const auto bias = tensors.update(*tensors.find("bias")).value();
        CHECK(gain.span()[0] == std::byte{3});
        REQUIRE(tensors.for_each_part<access_mode::read>(tensor_id{2}, [](auto& lease, const tensor_part&) {
          CHECK(lease.span().back() == std::byte{3});
        }));
      }
      schedule.end_iteration();
    }
    CHECK(schedule.stats().inserted + schedule.stats().skipped == 0);
    REQUIRE(tensors.persist());
  }
}
