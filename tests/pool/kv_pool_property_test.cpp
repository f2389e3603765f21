/// Pools of nodes in a simulated network: whatever dies, is cut off, stands still or turns bits, no node
/// reads a wrong token.
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "pool/pool_node.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

const std::array paged_group{full_attention({"kv", 1, 16, 4})};
const std::array window_groups{full_attention({"full", 1, 16, 4}),
                               sliding_window({"local", 1, 16, 4}, 10, 4)};
const std::array state_groups{full_attention({"full", 1, 16, 4}), state_snapshots("states", 1, 64, 8),
                              sliding_window({"local", 1, 16, 8}, 12)};

struct totals {
  std::uint64_t fetched = 0;
  std::uint64_t loaded = 0;
  std::uint64_t failed = 0;
  std::uint64_t late = 0;
  std::uint64_t damaged = 0;
  std::uint64_t copied = 0;
  std::uint64_t read = 0;
  std::string wrong;

  void add(const totals& more) {
    fetched += more.fetched;
    loaded += more.loaded;
    failed += more.failed;
    late += more.late;
    damaged += more.damaged;
    copied += more.copied;
    read += more.read;
    if (wrong.empty()) wrong = more.wrong;
  }
};

/// Prompts of few families, longer than a span, which go on in few ways.
std::vector<token_id> draw_prompt(random_numbers& random) {
  const std::uint32_t family = random.below(std::uint32_t{4});
  const std::uint64_t length = 12 + random.below(std::uint64_t{random.once_in(4) ? 320U : 80U});
  const std::uint64_t parting = 8 + random.below(std::uint64_t{3}) * 16;
  const std::uint32_t way = random.below(std::uint32_t{2});
  std::vector<token_id> out;
  for (std::uint64_t i = 0; i < length; ++i)
    out.push_back(static_cast<token_id>(family * 10'000 + i + (i >= parting ? way * 5'000 + parting : 0)));
  return out;
}

/// How the blocks of a run pass.
enum class by { message, memory };

/// One process of the network: an engine that serves some prompts.
template <class Cache, class... Movers>
totals live(testing::sim_endpoint& end, std::span<const layer_group> groups, std::uint64_t seed, bool faults,
            Movers&... mover) {
  random_numbers random(seed * 1000 + to_index(end.self()) * 10 + end.incarnation());
  const node_form form{.groups = groups,
                       .blocks = 96 + random.below(std::uint64_t{64}),
                       .slots = 24 + random.below(std::uint64_t{96}),
                       .lower_slots = 16 + random.below(std::uint64_t{64})};
  kv_pool_options options{.patience_ns = faults ? std::uint64_t{3'000'000} : std::uint64_t{1'000'000'000}};
  options.max_gets = 1 + random.below(std::uint32_t{32});
  options.max_serving = 1 + random.below(std::uint32_t{random.once_in(2) ? 4U : 64U});
  options.send_ns = random.once_in(2) ? 5'000 : 500'000;
  options.slow_ns = 2'000'000;
  options.directory_spans = 8 + random.below(std::uint32_t{24});
  options.domain = random.below(std::uint32_t{3});
  options.copies = random.below(std::uint32_t{3});
  options.hot_uses = 1 + random.below(std::uint32_t{2});
  options.max_copying = random.below(std::uint32_t{4});
  using kind = std::tuple_element_t<0, std::tuple<Movers&..., pool::message_mover>>;
  pool_node<Cache, testing::sim_endpoint, pool::embedded_directory, kind> node(end, form, options, mover...);
  totals out;
  for (int i = 0; i < 12 && node.wrong().empty(); ++i) {
    const auto prompt = draw_prompt(random);
    const bool is_hasty = random.once_in(5);
    const auto served = node.serve(prompt, [&](auto& request) {
      request.wait_for_answers();
      request.fetch(random.once_in(4) ? random.below(std::uint64_t{200}) : unlimited);
      if (!is_hasty) return request.wait();
      node.step();
    });
    out.fetched += served.fetched.blocks;
    out.loaded += served.loaded;
    out.failed += served.fetched.failed_blocks;
    out.late += served.fetched.late_blocks;
    if (random.once_in(25)) node.cache().reset();
    for (std::uint64_t k = random.below(std::uint64_t{6}); k > 0; --k) {
      end.work(100'000);
      node.step();
    }
  }
  // Others still ask.
  for (int k = 0; k < 40; ++k) {
    end.work(200'000);
    node.step();
  }
  for (const std::string& each : node.tiers().audit())
    if (out.wrong.empty()) out.wrong = each;
  if (out.wrong.empty()) out.wrong = node.wrong();
  out.damaged = node.pool().stats().damaged_blocks;
  out.copied = node.pool().stats().copied_spans;
  out.read = node.pool().stats().read_blocks;
  return out;
}

template <class Cache, by Way = by::message>
totals run(std::span<const layer_group> groups, bool faults, std::uint64_t count, std::uint64_t watched) {
  totals all;
  for (const std::uint64_t seed : seeds(count, watched)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t nodes = 2 + random.below(std::uint32_t{3});
    testing::sim_options options{.seats = nodes, .seed = seed};
    options.frame_bytes = 4096;
    if (random.once_in(2)) {  // a block is several frames, and few are in flight
      options.frame_bytes = 16;
      options.lane_bytes = 32;
    }
    options.hard_silence_ns = 5'000'000;
    if (faults && random.once_in(2)) options.corrupts_one_in = 20;
    testing::sim_network net(options);
    if (faults) {
      const seat_id victim{random.below(nodes)};
      if (random.once_in(2)) net.kill_in_call(victim, random.below(std::uint64_t{600}));
      if (random.once_in(2)) net.restart_after(victim, 1'000'000 + random.below(std::uint64_t{4'000'000}));
      const seat_id other{random.below(nodes)};
      const std::uint64_t from = random.below(std::uint64_t{8'000'000});
      if (random.once_in(3)) net.stop(other, from, from + random.below(std::uint64_t{10'000'000}));
      if (random.once_in(3)) net.part(seat_set{other}, from, from + random.below(std::uint64_t{10'000'000}));
    }
    std::mutex mutex;
    totals seen;
    net.run([&](testing::sim_endpoint& end) {
      totals one;
      if constexpr (Way == by::memory) {
        shared_memory_mover mover({.bytes = std::uint64_t{1} << 20, .blocks = 256});
        one = live<Cache>(end, groups, seed, faults, mover);
      } else {
        one = live<Cache>(end, groups, seed, faults);
      }
      const std::scoped_lock held(mutex);
      seen.add(one);
    });
    CHECK(seen.wrong == "");
    all.add(seen);
    if (!seen.wrong.empty()) break;
  }
  MESSAGE("fetched " << all.fetched << " loaded " << all.loaded << " failed " << all.failed << " late "
                     << all.late << " damaged " << all.damaged);
  return all;
}

}  // namespace

TEST_CASE("no node of a healthy pool reads a wrong token") {
  const totals paged = run<paged_allocator<pooled_traits>>(paged_group, false, 40, 10);
  CHECK(paged.fetched > 0);
  CHECK(paged.copied > 0);
  const totals windows = run<hybrid_allocator<pooled_hybrid_traits>>(window_groups, false, 20, 5);
  CHECK(windows.fetched > 0);
  const totals states = run<hybrid_allocator<pooled_hybrid_traits>>(state_groups, false, 20, 5);
  CHECK(states.fetched > 0);
  CHECK(states.copied > 0);
}

TEST_CASE("no node reads a wrong token if others die, return, stop, are cut off, or flip bits") {
  const totals paged = run<paged_allocator<pooled_traits>>(paged_group, true, 80, 20);
  CHECK(paged.fetched > 0);
  CHECK(paged.failed + paged.late > 0);
  CHECK(paged.damaged > 0);
  CHECK(paged.copied > 0);
  const totals states = run<hybrid_allocator<pooled_hybrid_traits>>(state_groups, true, 40, 10);
  CHECK(states.fetched > 0);
}

TEST_CASE("no node reads a wrong token from the memory of others, which evict, reset, die, and return") {
  const totals paged = run<paged_allocator<pooled_traits>, by::memory>(paged_group, true, 40, 10);
  CHECK(paged.read > 0);
  CHECK(paged.damaged > 0);  // some came by message
  const totals states = run<hybrid_allocator<pooled_hybrid_traits>, by::memory>(state_groups, true, 20, 5);
  CHECK(states.read > 0);
}
