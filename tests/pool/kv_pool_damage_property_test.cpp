/// Pools in a simulated network, one node of which has memory that turns bits: no node reads a wrong token,
/// and blocks of which a lower tier has a sound copy are served again.
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
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

using cache_type = paged_allocator<pooled_traits>;
const std::array groups{full_attention({"kv", 1, 16, 4})};

constexpr std::uint32_t prompts = 6;

struct totals {
  std::uint64_t turned = 0;  // blocks of the owner of which a bit was turned
  std::uint64_t checked = 0;
  std::uint64_t dropped = 0;
  std::uint64_t damaged = 0;
  std::uint64_t fetched = 0;
  std::uint64_t missed = 0;  // tokens that readers had to compute
  std::string wrong;

  void add(const totals& more) {
    turned += more.turned;
    checked += more.checked;
    dropped += more.dropped;
    damaged += more.damaged;
    fetched += more.fetched;
    missed += more.missed;
    if (wrong.empty()) wrong = more.wrong;
  }
};

std::vector<token_id> prompt_of_seed(std::uint64_t seed, std::uint32_t which) {
  random_numbers random(seed * 100 + which);
  const std::uint64_t length = 9 + random.below(std::uint64_t{which == 0 ? 320U : 60U});
  std::vector<token_id> out;
  for (std::uint64_t i = 0; i < length; ++i)
    out.push_back(static_cast<token_id>(which * 10'000 + i));
  return out;
}

/// Turns a bit of a block in the first tier, once for each block: a second bit, before the sound copy that
/// the tiers bring up is sent, would make the block a miss. Without faults, only if the lower tier has a
/// copy.
template <class Node>
bool turn_a_bit(Node& node, const std::vector<token_id>& prompt, bool faults, random_numbers& random,
                std::vector<bool>& turned) {
  const kv_chain chain(node.cache(), prompt);
  const std::size_t place = random.below(std::uint64_t{chain.keys().size()});
  if (turned.empty()) turned.resize(chain.keys().size());
  if (turned[place]) return false;
  const auto held = node.tiers().hold(0, chain.keys()[place]);
  if (!held) return false;
  const std::span<std::byte> bytes = node.tiers().bytes_of(*held);
  // Before a block has a checksum no damage is noticed.
  turned[place] = node.tiers().checksum_of(*held).has_value() &&
                  (faults || !std::ranges::search(node.lower_bytes(), bytes).empty());
  if (turned[place]) bytes[random.below(std::uint64_t{bytes.size()})] ^= std::byte{4};
  node.tiers().release(*held);
  return turned[place];
}

/// The node whose memory turns bits: its own cache has all that it needs.
template <class Node>
void own(Node& node, testing::sim_endpoint& end, std::uint64_t seed, bool faults,
         const std::atomic<std::uint32_t>& readers, totals& out) {
  random_numbers random(seed * 7 + 1);
  std::array<std::vector<bool>, prompts> turned{};
  for (std::uint32_t which = 0; which < prompts; ++which) {
    node.serve(prompt_of_seed(seed, which), [](auto&) {});
    for (int i = 0; i < 8; ++i)  // until the lower tier has its copy: of the sound bytes
      node.step();
    for (int i = 0; i < 4; ++i)
      out.turned += turn_a_bit(node, prompt_of_seed(seed, which), faults, random, turned[which]) ? 1U : 0U;
  }
  for (std::uint32_t i = 0; i < 4000 && readers != 0; ++i) {
    end.work(100'000);
    node.step();
    const std::uint32_t which = random.below(prompts);
    if (random.once_in(4))
      out.turned += turn_a_bit(node, prompt_of_seed(seed, which), faults, random, turned[which]) ? 1U : 0U;
  }
}

template <class Node>
void read(Node& node, testing::sim_endpoint& end, std::uint64_t seed, std::atomic<std::uint32_t>& readers,
          totals& out) {
  random_numbers random(seed * 7 + 2 + to_index(end.self()));
  for (int i = 0; i < 30; ++i) {  // until the owner has computed and published
    end.work(100'000);
    node.step();
  }
  for (std::uint32_t i = 0; i < prompts && node.wrong().empty(); ++i) {
    const auto prompt = prompt_of_seed(seed, random.below(prompts));
    const auto served = node.serve(prompt, [](auto& request) {
      request.wait_for_answers();
      request.fetch();
      request.wait();
    });
    out.fetched += served.fetched.blocks;
    out.missed += (prompt.size() - 1) / 4 * 4 - served.matched - served.loaded;
    for (std::uint64_t k = random.below(std::uint64_t{4}); k > 0; --k) {
      end.work(100'000);
      node.step();
    }
  }
  --readers;
  for (std::uint32_t i = 0; i < 4000 && readers != 0; ++i) {  // its part of the directory would leave with it
    end.work(100'000);
    node.step();
  }
}

template <class... Movers>
totals live(testing::sim_endpoint& end, std::uint64_t seed, bool faults, std::atomic<std::uint32_t>& readers,
            Movers&... mover) {
  const node_form form{.groups = groups,
                       .blocks = 256,
                       .slots = 200,
                       .lower_slots = faults ? std::uint64_t{40} : std::uint64_t{256}};
  kv_pool_options options{.patience_ns = faults ? std::uint64_t{5'000'000} : std::uint64_t{10'000'000'000}};
  options.max_checks = 1000;
  using kind = std::tuple_element_t<0, std::tuple<Movers&..., pool::message_mover>>;
  pool_node<cache_type, testing::sim_endpoint, pool::embedded_directory, kind> node(end, form, options,
                                                                                    mover...);
  totals out;
  if (to_index(end.self()) == 0) {
    own(node, end, seed, faults, readers, out);
  } else {
    read(node, end, seed, readers, out);
  }
  for (const std::string& each : node.tiers().audit())
    if (out.wrong.empty()) out.wrong = each;
  if (out.wrong.empty()) out.wrong = node.wrong();
  const pool::stats stats = node.pool().stats();
  out.checked = stats.checked_blocks;
  out.dropped = stats.dropped_blocks;
  out.damaged = stats.damaged_blocks;
  return out;
}

enum class by { message, memory };

totals run(by way, bool faults, std::uint64_t count, std::uint64_t watched) {
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
    if (faults) options.corrupts_one_in = 20;
    testing::sim_network net(options);
    if (faults && random.once_in(2)) net.kill_in_call(seat_id{1}, random.below(std::uint64_t{600}));
    std::mutex mutex;
    std::atomic<std::uint32_t> readers = nodes - 1;
    totals seen;
    net.run([&](testing::sim_endpoint& end) {
      totals one;
      if (way == by::memory) {
        shared_memory_mover mover({.bytes = std::uint64_t{1} << 20, .blocks = 256});
        one = live(end, seed, faults, readers, mover);
      } else {
        one = live(end, seed, faults, readers);
      }
      const std::scoped_lock held(mutex);
      seen.add(one);
    });
    CHECK(seen.wrong == "");
    if (!faults) CHECK(seen.missed == 0);
    all.add(seen);
    if (!seen.wrong.empty()) break;
  }
  MESSAGE("turned " << all.turned << " damaged " << all.damaged << " checked " << all.checked << " dropped "
                    << all.dropped << " fetched " << all.fetched << " missed " << all.missed);
  CHECK(all.fetched > 0);
  CHECK(all.damaged > 0);
  CHECK(all.dropped > 0);
  return all;
}

}  // namespace

TEST_CASE("blocks whose holder's memory turned bits come right from its lower tier, at the first request") {
  const totals messages = run(by::message, false, 30, 8);
  CHECK(messages.dropped == messages.checked);  // nothing else damaged them
  const totals memory = run(by::memory, false, 30, 8);
  CHECK(memory.dropped == memory.checked);
}

TEST_CASE("no node reads a wrong token if a holder's memory and the network turn bits, and nodes die") {
  const totals messages = run(by::message, true, 40, 10);
  CHECK(messages.dropped < messages.checked);
  run(by::memory, true, 20, 5);
}
