#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/schedule/shapes.hpp>
#include <llmmem/schedule/use_forecast.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// The definition, in floating point, from a list of all uses.
class listed_uses {
 public:
  listed_uses(std::size_t chunks, double memory) : chunks_(chunks), memory_(memory) { begin_iteration(); }

  void begin_iteration() { iterations_.push_back({}); }
  void used(std::size_t chunk) { iterations_.back().push_back(chunk); }

  [[nodiscard]] double next_use(std::size_t chunk) const {
    double rate = 0;
    double position = 0;
    std::optional<double> last;
    for (std::size_t i = 0; i < iterations_.size(); ++i) {
      const auto& uses = iterations_[i];
      const bool is_now = i + 1 == iterations_.size();
      const auto count = static_cast<double>(std::count(uses.begin(), uses.end(), chunk));
      const double share = std::min(static_cast<double>(i + 1), memory_);
      rate += is_now ? count / share : (count - rate) / share;
      for (const std::size_t each : uses) {
        if (each == chunk) last = position;
        ++position;
      }
    }
    if (!last) return -1;
    const double now = position - static_cast<double>(iterations_.back().size());
    const auto length =
        iterations_.size() == 1 ? position : static_cast<double>(iterations_[iterations_.size() - 2].size());
    if (*last >= now) return *last + length / rate;
    // Its place in the iterations to come, those left out that it is likely to miss.
    double place = *last;
    while (place < now)
      place += length;
    return place + std::max(0.0, length * (1 / rate - 1));
  }

 private:
  std::size_t chunks_;
  double memory_;
  std::vector<std::vector<std::size_t>> iterations_;
};

}  // namespace

TEST_CASE("a forecast follows its definition, for any uses") {
  for (const auto seed : seeds(100, 25)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t chunks = 1 + random.below(std::size_t{12});
    const std::uint32_t memory = 1 + random.below(std::uint32_t{20});
    use_forecast forecast(chunks, memory);
    listed_uses listed(chunks, memory);
    for (int iteration = 0; iteration < 30; ++iteration) {
      const std::size_t uses = 1 + random.below(std::size_t{20});
      for (std::size_t i = 0; i < uses; ++i) {
        const std::size_t chunk = random.below(random.below(chunks) + 1);
        forecast.used(chunk_id{static_cast<std::uint32_t>(chunk)});
        listed.used(chunk);
        for (std::size_t each = 0; each < chunks; ++each) {
          const double expected = listed.next_use(each);
          const std::uint64_t found = forecast.next_use(chunk_id{static_cast<std::uint32_t>(each)});
          if (expected < 0) {
            REQUIRE(found == use_forecast::never);
          } else if (expected < 1e6) {  // rates are in units of 2^-24
            REQUIRE(std::abs(static_cast<double>(found) - expected) <= 1 + expected * 0.05);
          }
        }
      }
      forecast.begin_iteration();
      listed.begin_iteration();
    }
  }
}

TEST_CASE("earlier popularity is forgotten, and an iteration without uses does not count") {
  use_forecast forecast(2, 4);
  const chunk_id old{0};
  const chunk_id current{1};
  for (int i = 0; i < 10; ++i) {
    forecast.used(old);
    forecast.begin_iteration();
    forecast.begin_iteration();
  }
  CHECK(forecast.next_use(old) == forecast.position());
  CHECK(forecast.next_use(current) == use_forecast::never);
  for (int i = 0; i < 3; ++i) {
    forecast.used(current);
    forecast.begin_iteration();
  }
  CHECK(forecast.next_use(current) < forecast.next_use(old));
  for (int i = 0; i < 1'000; ++i) {
    forecast.used(current);
    forecast.begin_iteration();
  }
  CHECK(forecast.next_use(old) > forecast.position() + 1'000'000);
}

namespace {

struct virtual_meter {
  virtual_clock* clock = nullptr;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock->now().ns; }
};
struct virtual_traits : tiered_traits {
  using clock = virtual_meter;
};

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t ms = 1'000'000;
constexpr std::size_t layers = 8;
constexpr std::size_t experts = 32;
constexpr std::size_t active = 4;
// An expert computes for 1 ms and takes 4 ms over the link; of 256, 24 fit.
constexpr link_model bus{.bytes_per_second = page * 250, .latency_ns = 0, .duplex = link_duplex::half};

/// A device over the host, with the experts of a model; each holds its own number.
template <class Eviction>
class expert_device {
 public:
  using buffer_type = basic_tiered_buffer<virtual_traits, tier<simulated_space, Eviction>, tier<host_space>>;

  expert_device() : buffer(virtual_meter{&clock}, {}, {device, 24 * page}, {host, layers * experts * page}) {
    for (std::size_t i = 0; i < layers * experts; ++i) {
      chunks.push_back(buffer.create(page).value());
      auto lease = buffer.write(chunks[i]).value();
      device.device_view(lease.range()).front() = static_cast<std::byte>(i);
      lease.end();
      REQUIRE(buffer.evict(chunks[i]));
    }
    REQUIRE(buffer.flush());
  }

  /// One batch, whose experts are leased from a buffer or a schedule.
  template <class From>
  void run(From& from, std::uint64_t seed) {
    const auto trace = shapes::skewed_experts(layers, experts, active, page, ms, seed);
    for (const trace_event& each : trace.events()) {
      if (each.call != trace_call::acquire) continue;
      const auto lease = from.read(chunks[to_index(each.chunk)]).value();
      const auto number = static_cast<std::byte>(to_index(each.chunk));
      REQUIRE(device.device_view(lease.range()).front() == number);
      for (int part = 0; part < 10; ++part) {
        clock.advance(ms / 10);
        from.progress();
      }
    }
  }

  virtual_clock clock;
  simulated_space device{clock, {.budget = 1 << 24, .link = {bus.bytes_per_second, bus.latency_ns}}};
  host_space host{{.budget = 1 << 25}};
  buffer_type buffer;
  std::vector<chunk_handle> chunks;
};

constexpr std::uint64_t warm_up = 6;
constexpr std::uint64_t measured = 12;

/// Nanoseconds that the batches after the warm-up take, each with another draw.
template <class Device, class Batch>
std::uint64_t time_of_batches(Device& on, std::uint64_t seed, Batch batch) {
  std::uint64_t began = 0;
  for (std::uint64_t i = 0; i < warm_up + measured; ++i) {
    if (i == warm_up) began = on.clock.now().ns;
    batch(seed * 1'000'003 + i * 17);
  }
  CHECK(on.buffer.audit().empty());
  return on.clock.now().ns - began;
}

std::uint64_t least_recently_used(std::uint64_t seed) {
  expert_device<lru_eviction> on;
  return time_of_batches(on, seed, [&](std::uint64_t draw) { on.run(on.buffer, draw); });
}

std::uint64_t scheduled(std::uint64_t seed, on_divergence what, bool is_foreseen = false) {
  expert_device<min_eviction> on;
  prefetch_schedule schedule(on.buffer, {.links = {bus}, .divergence = what});
  for (const chunk_handle each : on.chunks)
    schedule.add(each);
  if (is_foreseen) {
    trace_recorder known = schedule.recorder();
    const auto trace = shapes::skewed_experts(layers, experts, active, page, ms, seed * 1'000'003);
    for (const trace_event& each : trace.events()) {
      if (each.call == trace_call::acquire) known.acquire(each.chunk, each.mode);
      if (each.call == trace_call::release) known.release(each.chunk);
    }
    schedule.plan_known_trace(known.freeze());
  }
  const std::uint64_t took = time_of_batches(on, seed, [&](std::uint64_t draw) {
    schedule.begin_iteration();
    on.run(schedule, draw);
    schedule.end_iteration();
  });
  CHECK(schedule.stats().diverged != 0);
  return took;
}

/// All measured batches as one iteration: recorded, followed once, and measured.
std::uint64_t foreknown(std::uint64_t seed) {
  expert_device<min_eviction> on;
  prefetch_schedule schedule(on.buffer, {.links = {bus}});
  for (const chunk_handle each : on.chunks)
    schedule.add(each);
  std::uint64_t began = 0;
  for (int round = 0; round < 3; ++round) {
    began = on.clock.now().ns;
    schedule.begin_iteration();
    for (std::uint64_t i = warm_up; i < warm_up + measured; ++i)
      on.run(schedule, seed * 1'000'003 + i * 17);
    schedule.end_iteration();
  }
  CHECK(schedule.stats().diverged == 0);
  return on.clock.now().ns - began;
}

}  // namespace

TEST_CASE("a forecast foresees popular experts, and the plan of another draw is worth little") {
  std::uint64_t lru = 0;
  std::uint64_t repair = 0;
  std::uint64_t re_record = 0;
  std::uint64_t fall_back = 0;
  std::uint64_t by_frequency = 0;
  std::uint64_t oracle = 0;
  for (const auto seed : seeds(6)) {
    lru += least_recently_used(seed);
    repair += scheduled(seed, on_divergence::repair);
    re_record += scheduled(seed, on_divergence::re_record);
    fall_back += scheduled(seed, on_divergence::fall_back);
    by_frequency += scheduled(seed, on_divergence::by_frequency);
    oracle += foreknown(seed);
  }
  CAPTURE(lru);
  CAPTURE(repair);
  CAPTURE(re_record);
  CAPTURE(fall_back);
  CAPTURE(by_frequency);
  CAPTURE(oracle);
  CHECK(oracle < by_frequency);
  CHECK(by_frequency < repair);
  CHECK(by_frequency < re_record);
  CHECK(by_frequency < fall_back);
  // Of what knowing all draws would save over least recently used, at least a quarter.
  CHECK((lru - by_frequency) * 4 > lru - oracle);
  // A plan that does not hold costs nothing, and saves little.
  for (const std::uint64_t each : {repair, re_record, fall_back}) {
    CHECK(each < lru);
    CHECK((lru - each) * 3 < lru - oracle);
  }
}

TEST_CASE("a forecast foresees popular experts also if the plan was made of a trace known in advance") {
  std::uint64_t fall_back = 0;
  std::uint64_t by_frequency = 0;
  for (const auto seed : seeds(4)) {
    fall_back += scheduled(seed, on_divergence::fall_back, true);
    by_frequency += scheduled(seed, on_divergence::by_frequency, true);
  }
  CAPTURE(fall_back);
  CAPTURE(by_frequency);
  CHECK(by_frequency * 10 < fall_back * 9);
}
