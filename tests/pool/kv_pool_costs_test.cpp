/// How much of a prompt a node fetches, and from which nodes, against all choices that exist.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <llmmem/paging/outside_keys.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "pool/pool_cluster.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t never = ~std::uint64_t{0};
constexpr std::uint64_t block_bytes = 64;
constexpr std::uint64_t block_tokens = 4;

std::uint64_t ns_of(const link_model& link, std::uint64_t bytes) {
  if (bytes == 0 || link.bytes_per_second == 0) return 0;
  return link.latency_ns + (bytes * 1'000'000'000 + link.bytes_per_second - 1) / link.bytes_per_second;
}

link_model any_link(random_numbers& random) {
  if (random.once_in(5)) return {};
  return {.bytes_per_second = 100'000'000 + random.below(std::uint64_t{2'000'000'000}),
          .latency_ns = random.below(std::uint64_t{300})};
}

/// Blocks that nodes hold, and what the nodes still send.
struct sources {
  std::vector<link_model> links{};
  std::vector<std::uint64_t> before{};
  link_model inward{};
};

/// The definition: tries every holder of every block.
std::uint64_t least_arrival(const sources& of, std::span<const std::vector<std::uint32_t>> holders) {
  std::uint64_t all = 0;
  for (const std::uint64_t each : of.before)
    all += each;
  const std::uint64_t inward = holders.empty() ? 0 : ns_of(of.inward, all + holders.size() * block_bytes);
  std::vector<std::size_t> chosen(holders.size(), 0);
  std::uint64_t least = never;
  for (;;) {
    std::vector<std::uint64_t> bytes(of.links.size(), 0);
    for (std::size_t i = 0; i < holders.size(); ++i)
      bytes[holders[i][chosen[i]]] += block_bytes;
    std::uint64_t last = inward;
    for (std::size_t s = 0; s < bytes.size(); ++s) {
      if (bytes[s] != 0) last = std::max(last, ns_of(of.links[s], of.before[s] + bytes[s]));
    }
    least = std::min(least, last);
    std::size_t i = 0;
    while (i < holders.size() && ++chosen[i] == holders[i].size())
      chosen[i++] = 0;
    if (i == holders.size()) return least;
  }
}

/// Node 0 asks; the others hold what a test gives them.
template <class Cache>
struct priced_cluster {
  using node = pool_node<Cache, thread_endpoint>;

  explicit priced_cluster(std::uint32_t nodes, std::span<const layer_group> groups = paged_group)
      : net(nodes, {.copied_bytes = 65536, .lane_bytes = 1 << 20}) {
    for (std::uint32_t i = 0; i < nodes; ++i)
      ends.push_back(std::make_unique<thread_endpoint>(net, seat_id{i}));
    const node_form form{.groups = groups, .blocks = 128, .slots = 128, .lower_slots = 128};
    for (std::uint32_t i = 0; i < nodes; ++i)
      all.push_back(std::make_unique<node>(*ends[i], form,
                                           kv_pool_options{.patience_ns = never, .directory_spans = 256}));
    settle();
  }
  void settle() {
    for (int i = 0; i < 8; ++i) {
      for (auto& each : all)
        each->step();
    }
  }
  /// Puts a block of the chain into a node's first tier; the caller ends its arrival.
  auto begin(std::size_t at, const kv_chain& chain, std::size_t chunk) {
    const std::uint64_t parent = chunk == 0 ? 0 : paging::key_digest(chain.keys()[chunk - 1]);
    return all[at]->tiers().begin_arrival(0, chain.keys()[chunk], parent).value();
  }
  void hold(std::size_t at, const kv_chain& chain, std::size_t chunk) {
    const auto slot = begin(at, chain, chunk);
    CHECK(all[at]->tiers().end_arrival(slot, true));
    all[at]->tiers().release(slot);
  }
  auto ask(const kv_chain& chain, std::uint64_t first = 0) {
    auto request = all[0]->pool().ask(chain, first).value();
    settle();
    return request;
  }

  thread_network net;
  std::vector<std::unique_ptr<thread_endpoint>> ends;
  std::vector<std::unique_ptr<node>> all;
};

link_model link_from(void* context, seat_id seat, bool is_read) noexcept {
  CHECK_FALSE(is_read);
  return static_cast<const sources*>(context)->links[to_index(seat)];
}

}  // namespace

TEST_CASE("no other sharing of blocks among their holders has the last one earlier") {
  std::uint64_t moved = 0;
  for (const auto seed : seeds(800, 300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    sources of{.inward = random.once_in(2) ? any_link(random) : link_model{}};
    const std::uint32_t count = 1 + random.below(std::uint32_t{4});
    detail::fetch_shares shares(of.inward);
    for (std::uint32_t s = 0; s < count; ++s) {
      of.links.push_back(any_link(random));
      of.before.push_back(random.once_in(2) ? 0 : random.below(std::uint64_t{400}));
      REQUIRE(shares.source(seat_id{s}, of.links[s]) == s);
      shares.expect(s, of.before[s]);
    }
    std::vector<std::vector<std::uint32_t>> holders;
    std::vector<detail::block_sources> blocks;
    for (std::uint32_t i = random.below(std::uint32_t{6}); i-- > 0;) {
      detail::block_sources block{.block_bytes = block_bytes};
      std::vector<std::uint32_t> has;
      for (std::uint32_t s = 0; s < count; ++s) {
        if (random.once_in(2)) has.push_back(s);
      }
      if (has.empty()) has.push_back(random.below(count));
      for (const std::uint32_t each : has)
        block.of[block.count++] = each;
      holders.push_back(has);
      blocks.push_back(block);
      shares.add(block);
      REQUIRE(shares.arrival_ns() == least_arrival(of, holders));
    }
    CHECK(shares.bytes() == blocks.size() * block_bytes);
    // Each block comes from a node that has it, and the nodes together need that long.
    const std::uint64_t arrival = shares.arrival_ns();
    sources taken = of;
    std::vector<std::vector<std::uint32_t>> from;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const seat_id seat = shares.take(blocks[i]);
      REQUIRE(std::ranges::count(holders[i], to_index(seat)) == 1);
      moved += to_index(seat) == holders[i][0] ? 0U : 1U;
      from.push_back({static_cast<std::uint32_t>(to_index(seat))});
      if (i + 1 == blocks.size()) CHECK(least_arrival(taken, from) == arrival);
    }
    if (!blocks.empty()) CHECK(shares.take(blocks[0]) == no_seat);
  }
  CHECK(moved > 100);
}

TEST_CASE("no length of a prompt, from no choice of holders, is here or computed earlier") {
  std::uint64_t partial = 0;
  std::uint64_t waits = 0;
  std::uint64_t all_of_it = 0;
  std::uint64_t nothing = 0;
  priced_cluster<cache_type> nodes(4);
  for (const auto seed : seeds(150, 40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    for (auto& each : nodes.all)
      each->cache().reset();
    nodes.settle();
    auto& tiers = nodes.all[0]->tiers();
    sources of{.links = {{}, any_link(random), any_link(random), any_link(random)}, .before = {0, 0, 0, 0}};
    of.inward = random.once_in(2) ? any_link(random) : link_model{};

    // Where each block is: nowhere, on its way, here, or in these nodes.
    const std::uint64_t goal =
        block_tokens * (1 + random.below(std::uint64_t{7})) + random.below(std::uint64_t{3});
    const kv_chain chain(nodes.all[0]->cache(), prompt_of(1, goal));
    const kv_chain other(nodes.all[0]->cache(), prompt_of(2, 24));
    enum class place { nowhere, pending, here, elsewhere };
    std::vector<place> places;
    std::vector<std::vector<std::uint32_t>> holders(chain.keys().size());
    std::vector<offload::held_block> open;
    for (std::size_t i = 0; i < chain.keys().size(); ++i) {
      const std::uint32_t drawn = random.below(std::uint32_t{12});
      places.push_back(drawn == 0   ? place::nowhere
                       : drawn == 1 ? place::pending
                       : drawn < 4  ? place::here
                                    : place::elsewhere);
      if (places[i] == place::pending) open.push_back(nodes.begin(0, chain, i));
      if (places[i] == place::here) nodes.hold(0, chain, i);
      if (places[i] != place::elsewhere) continue;
      for (std::uint32_t s = 1; s < 4; ++s) {
        if (random.once_in(2)) holders[i].push_back(s);
      }
      if (holders[i].empty()) holders[i].push_back(1 + random.below(std::uint32_t{3}));
      for (const std::uint32_t s : holders[i])
        nodes.hold(s, chain, i);
    }
    const std::size_t awaited = random.below(std::size_t{5});
    for (std::size_t i = 0; i < awaited; ++i)
      nodes.hold(1, other, i);
    nodes.settle();
    for (std::size_t s = 1; s < 4; ++s) {
      nodes.all[s]->pool().publish(chain, chain.tokens());
      nodes.all[s]->pool().publish(other, other.tokens());
    }
    nodes.settle();
    auto before = nodes.ask(other);
    auto request = nodes.ask(chain);
    before.fetch();  // no node takes a step meanwhile
    of.before[1] = awaited * block_bytes;

    pool::fetch_costs costs{.inward = of.inward, .link_from = &link_from, .context = &of};
    costs.load.prefill_ns = random.below(std::uint64_t{200});
    costs.load.overlap = random.once_in(2) ? offload::load_overlap::none : offload::load_overlap::by_layer;
    costs.load.links[0].link = any_link(random);
    const offload::load_choice choice = request.choose(costs);

    const std::uint64_t compute_all = goal * costs.load.prefill_ns;
    std::uint64_t now = compute_all;
    std::uint64_t later = never;
    std::uint64_t longest_now = 0;
    std::uint64_t longest_later = 0;
    bool has_waited = false;
    std::vector<std::vector<std::uint32_t>> far;
    std::uint64_t longest = 0;
    for (std::size_t n = 1; n <= places.size() && places[n - 1] != place::nowhere; ++n) {
      longest = chain.tokens_of(n);
      has_waited = has_waited || places[n - 1] == place::pending;
      if (places[n - 1] == place::elsewhere) far.push_back(holders[n - 1]);
      sources as = of;
      std::uint64_t wait = 0;
      if (has_waited) {
        for (std::size_t s = 1; s < 4; ++s)
          wait = std::max(wait, ns_of(of.links[s], of.before[s]));
        wait = std::max(wait, ns_of(of.inward, of.before[1]));
        as.before = {0, 0, 0, 0};
      }
      const std::uint64_t load =
          std::max(least_arrival(as, far), ns_of(costs.load.links[0].link, n * block_bytes));
      const std::uint64_t compute = (goal - longest) * costs.load.prefill_ns;
      const std::uint64_t both =
          wait +
          (costs.load.overlap == offload::load_overlap::none ? load + compute : std::max(load, compute));
      if (both > (has_waited ? later : now)) continue;
      (has_waited ? later : now) = both;
      (has_waited ? longest_later : longest_now) = longest;
    }
    REQUIRE(choice.ns == now);
    REQUIRE(choice.tokens == longest_now);
    REQUIRE(choice.waiting_ns == later);
    if (later != never) REQUIRE(choice.waiting_tokens == longest_later);
    waits += choice.waits() ? 1U : 0U;
    const std::uint64_t upto = request.fetched_upto(choice);
    partial += upto != 0 && upto < longest ? 1U : 0U;
    all_of_it += upto == longest ? 1U : 0U;
    nothing += upto == 0 && longest != 0 ? 1U : 0U;

    // The fetch brings just that.
    request.fetch(costs);
    for (const offload::held_block& each : open) {
      CHECK(tiers.end_arrival(each, true));
      tiers.release(each);
    }
    for (int i = 0; i < 8 && !request.has_arrived(); ++i)
      nodes.settle();
    REQUIRE(request.has_arrived());
    std::uint64_t wanted = 0;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const bool is_wanted = places[i] == place::elsewhere && i * block_tokens < upto;
      wanted += is_wanted ? 1U : 0U;
      if (places[i] == place::elsewhere)
        CHECK(tiers.lookup_block(chain, 0, i).first ==
              (is_wanted ? offload::answer::hit : offload::answer::miss));
    }
    before.end();
    const auto came = request.end();
    CHECK(came.blocks == wanted);
    CHECK(came.failed_blocks + came.late_blocks == 0);
    if (open.empty()) CHECK(came.costly_tokens == longest - upto);
    nodes.settle();
    CHECK(tiers.stats().tiers[0].in_use == 0);
    CHECK(tiers.audit().empty());
  }
  CHECK(partial != 0);
  CHECK(waits != 0);
  CHECK(all_of_it != 0);
  CHECK(nothing != 0);
}

TEST_CASE("of several requests that want the same blocks, each block crosses one link once") {
  priced_cluster<cache_type> nodes(4);
  const kv_chain chain(nodes.all[0]->cache(), prompt_of(1, 160));  // 40 blocks
  for (std::size_t i = 0; i < 40; ++i) {
    nodes.hold(1, chain, i);
    if (i % 4 != 3) nodes.hold(2, chain, i);
    if (i % 2 == 0) nodes.hold(3, chain, i);
  }
  nodes.settle();
  for (std::size_t s = 1; s < 4; ++s)
    nodes.all[s]->pool().publish(chain, chain.tokens());
  nodes.settle();
  // Node 3 is twice as fast.
  sources of{.links = {{},
                       {.bytes_per_second = 1'000'000'000},
                       {.bytes_per_second = 1'000'000'000},
                       {.bytes_per_second = 2'000'000'000}}};
  pool::fetch_costs costs{.link_from = &link_from, .context = &of};
  costs.load.prefill_ns = 1'000;
  auto first = nodes.ask(chain);
  auto second = nodes.ask(chain);
  auto third = nodes.ask(chain);
  const auto brings = [&](auto& request) { return request.fetched_upto(request.fetch(costs)); };
  CHECK(brings(first) == 160);
  CHECK(second.choose(costs).waits());
  CHECK(brings(second) == 160);
  CHECK(brings(third) == 160);
  for (int i = 0; i < 8 && !(first.has_arrived() && second.has_arrived() && third.has_arrived()); ++i)
    nodes.settle();
  CHECK(first.end().blocks == 40);
  CHECK(second.end().blocks == 0);
  CHECK(third.end().blocks == 0);
  const auto served = [&](std::size_t s) { return nodes.all[s]->pool().stats().served_blocks; };
  CHECK(served(1) + served(2) + served(3) == 40);
  CHECK(served(1) == 10);
  CHECK(served(2) == 10);
  CHECK(served(3) == 20);
  CHECK(nodes.all[0]->pool().stats().fetched_blocks == 40);
  // What is here costs no link from elsewhere.
  auto again = nodes.ask(chain);
  CHECK(again.choose(costs).ns == 0);
  CHECK(again.where().elsewhere == 0);
}

TEST_CASE(
    "a choice is never slower than all that can be moved, or than all computed, also of hybrid caches") {
  const std::array groups{full_attention({"full", 1, 16, 4}), state_snapshots("states", 1, 64, 8),
                          sliding_window({"local", 1, 16, 8}, 12)};
  priced_cluster<hybrid_allocator<pooled_hybrid_traits>> nodes(3, groups);
  std::uint64_t moves = 0;
  std::uint64_t computes = 0;
  for (const auto seed : seeds(60, 30)) {
    CAPTURE(seed);
    random_numbers random(seed);
    for (auto& each : nodes.all)
      each->cache().reset();
    nodes.settle();
    const auto prompt = prompt_of(static_cast<std::uint32_t>(10 + seed % 100'000), 97);
    for (std::size_t s = 0; s < 3; ++s) {
      const auto length = static_cast<std::size_t>(1 + random.below(std::uint64_t{s == 0 ? 24U : 96U}));
      nodes.all[s]->serve(std::span(prompt).first(length), [](auto&) {});
      nodes.settle();
    }
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    sources of{.links = {{}, any_link(random), any_link(random)}};
    pool::fetch_costs costs{.link_from = &link_from, .context = &of};
    costs.load.links[0].link = any_link(random);
    costs.load.prefill_ns = random.below(std::uint64_t{250});
    auto request = nodes.ask(chain);
    const offload::load_choice choice = request.choose(costs);
    pool::fetch_costs dear = costs;
    dear.load.prefill_ns = std::uint64_t{1} << 32;  // everything moves
    const offload::load_choice most = request.choose(dear);
    CHECK(most.tokens == request.where().tokens);
    const std::uint64_t rest = prompt.size() - most.tokens;
    const std::uint64_t moved = most.ns - rest * dear.load.prefill_ns;
    CHECK(choice.ns <= moved + rest * costs.load.prefill_ns);
    CHECK(choice.ns <= prompt.size() * costs.load.prefill_ns);
    moves += choice.tokens > 0 ? 1U : 0U;
    computes += choice.tokens < most.tokens ? 1U : 0U;
    const std::uint64_t upto = request.fetched_upto(request.fetch(costs));
    for (int i = 0; i < 8 && !request.has_arrived(); ++i)
      nodes.settle();
    CHECK(request.end().tokens >= upto);
    nodes.settle();
    CHECK(nodes.all[0]->tiers().lookup(chain, 0).tokens >= upto);
    CHECK(nodes.all[0]->wrong() == "");
  }
  CHECK(moves > 5);
  CHECK(computes > 0);
}
