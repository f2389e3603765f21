/// When a node may tell others that a prompt is computed.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pool/pool_cluster.hpp"
#include "support/random.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Lets a node serve a prompt, of which no other node has anything.
void compute_prompt(node_type& node, std::uint32_t number) {
  static_cast<void>(node.serve(prompt_of(number, 17), [](auto&) {}));
}

void post_received(node_and_stranger& two, std::uint64_t number, std::uint64_t nonce) {
  detail::pool_writer out;
  out.put(nonce);
  out.put(number);
  two.other.post(detail::pool_frame::received, out);
  two.node->step();
}

constexpr std::uint32_t most_nodes = 4;
const node_form wide_form{.groups = paged_group, .blocks = 400, .slots = 400, .lower_slots = 400};

/// Nodes that start, end, start again and reset, and step in any order.
struct changing_nodes {
  explicit changing_nodes(std::uint64_t seed) : random(seed) {}

  [[nodiscard]] std::unique_ptr<node_type>& at(std::uint32_t seat) { return nodes.all[seat]; }
  void step_one() {
    const std::uint32_t seat = random.below(most_nodes);
    if (!at(seat)) return;
    at(seat)->step();
    ++steps[seat];
  }
  void end(std::uint32_t seat) {
    at(seat).reset();
    nodes.ends[seat].reset();
  }
  void start(std::uint32_t seat) {
    if (!nodes.ends[seat]) nodes.ends[seat] = std::make_unique<thread_endpoint>(nodes.net, seat_id{seat});
    at(seat) = std::make_unique<node_type>(*nodes.ends[seat], wide_form, kv_pool_options{});
    computed[seat].clear();
    while (at(seat)->cache().epoch() < epoch)
      at(seat)->cache().reset();
  }
  void change() {
    const std::uint32_t seat = random.below(most_nodes);
    const std::uint32_t what = random.below(5U);
    if (what == 4) {  // a new epoch for all, while they step
      ++epoch;
      for (std::vector<std::uint32_t>& each : computed)
        each.clear();
      for (auto& each : nodes.all) {
        for (std::uint32_t k = random.below(3U); k > 0; --k)
          step_one();
        if (each) each->cache().reset();
      }
    } else if (!at(seat)) {
      start(seat);
    } else if (what == 3) {  // a new pool of the same endpoint
      at(seat).reset();
      start(seat);
    } else {
      end(seat);
      if (what == 2) start(seat);
    }
    std::ranges::fill(steps, 0);
  }
  /// Whether each node has heard of the last change, and exchanges blocks with all others.
  [[nodiscard]] bool have_met() {
    const auto live = std::ranges::count_if(nodes.all, [](const auto& each) { return each != nullptr; });
    for (std::uint32_t seat = 0; seat < most_nodes; ++seat) {
      if (at(seat) && (steps[seat] < 2 || at(seat)->pool().peers() + 1 != live)) return false;
    }
    return true;
  }

  random_numbers random;
  cluster nodes{most_nodes, wide_form};
  std::array<std::vector<std::uint32_t>, most_nodes> computed{};                  // prompts, by seat
  std::vector<std::uint32_t> steps = std::vector<std::uint32_t>(most_nodes, 2U);  // since the last change
  std::uint64_t epoch = nodes.all[0]->cache().epoch();
};

}  // namespace

TEST_SUITE("kv_pool announcements") {
  TEST_CASE("a node finds at its first question what another one has announced, in any order of steps") {
    std::uint32_t announced_at_once = 0;
    std::uint32_t missed_early = 0;
    constexpr std::uint32_t prompts = 240;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      CAPTURE(seed);
      random_numbers random(seed);
      cluster nodes(3, {.groups = paged_group, .blocks = 300, .slots = 300, .lower_slots = 300});
      const auto step_one = [&] { nodes.all[random.below(std::uint32_t{3})]->step(); };
      const auto finds = [&](node_type& asker, std::uint32_t number) {
        const auto prompt = prompt_of(number, 16);
        const kv_chain chain(asker.cache(), prompt);
        const auto request = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
        while (request.where().next == offload::answer::pending)
          step_one();
        return request.where().tokens == 16;
      };
      for (std::uint32_t i = 0; i < prompts / 4; ++i) {
        compute_prompt(*nodes.all[0], i);
        node_type& asker = *nodes.all[1 + random.below(std::uint32_t{2})];
        const bool is_early = random.below(std::uint32_t{2}) == 0;
        if (is_early) {
          missed_early += finds(asker, i) ? 0U : 1U;
          continue;
        }
        announced_at_once += nodes.all[0]->pool().is_announced() ? 1U : 0U;
        while (!nodes.all[0]->pool().is_announced())
          step_one();
        CHECK(finds(asker, i));
      }
    }
    // The node's own part of the directory has a third of the spans.
    CHECK(announced_at_once < 3 * prompts / 8);
    CHECK(missed_early > prompts / 32);
  }

  TEST_CASE("a node awaits the keeper of each span, and refuses numbers that it has not used") {
    node_and_stranger two;
    const auto announced_to_other = [&] {
      std::uint64_t last = 0;
      two.other.hear();
      for (const auto& [kind, what] : two.other.words) {
        if (kind != detail::pool_frame::publish) continue;
        const std::span<const std::byte> bytes(what);
        last = detail::pool_reader(bytes.last(sizeof(last))).take<std::uint64_t>();
      }
      return last;
    };
    while (!two.node->pool().is_announced())
      two.node->step();  // it looks through its record, a slice in each step, because the stranger has joined
    for (std::uint32_t i = 0; announced_to_other() < 3; ++i) {
      REQUIRE(i < 200);
      compute_prompt(*two.node, i);
      two.node->step();
      CHECK(two.node->pool().is_announced() == (announced_to_other() == 0));
    }
    const std::uint64_t refused = two.node->pool().stats().refused_frames;
    const std::uint64_t nonce = [&] {
      for (const auto& [kind, what] : two.other.words) {
        const std::span<const std::byte> bytes(what);
        if (kind == detail::pool_frame::hello)
          return detail::pool_reader(bytes.last(sizeof(std::uint64_t))).take<std::uint64_t>();
      }
      return std::uint64_t{0};
    }();
    post_received(two, 4, nonce);
    CHECK(two.node->pool().stats().refused_frames == refused + 1);
    CHECK_FALSE(two.node->pool().is_announced());
    post_received(two, 2, nonce);
    post_received(two, 3, nonce + 1);  // to an earlier pool of this seat
    CHECK_FALSE(two.node->pool().is_announced());
    post_received(two, 3, nonce);
    CHECK(two.node->pool().is_announced());
    post_received(two, 1, nonce);  // an answer from before
    CHECK(two.node->pool().is_announced());
    for (std::uint32_t i = 200; announced_to_other() < 4; ++i) {
      REQUIRE(i < 400);
      compute_prompt(*two.node, i);
      two.node->step();
    }
    CHECK_FALSE(two.node->pool().is_announced());
    two.node->cache().reset();  // a new epoch: what was announced counts no more
    two.node->step();
    CHECK(two.node->pool().is_announced());
  }

  TEST_CASE("the announcements of a node whose keeper ends or starts again are heard by the next keeper") {
    cluster nodes(2, {.groups = paged_group, .blocks = 200, .slots = 200, .lower_slots = 200});
    constexpr std::uint32_t prompts = 32;
    for (std::uint32_t i = 0; i < prompts; ++i)
      compute_prompt(*nodes.all[0], i);
    CHECK_FALSE(nodes.all[0]->pool().is_announced());
    nodes.all[1].reset();
    nodes.ends[1].reset();
    const auto announced = [&] {
      for (int i = 0; i < 64 && !nodes.all[0]->pool().is_announced(); ++i)
        nodes.settle();
      return nodes.all[0]->pool().is_announced();
    };
    nodes.settle();
    CHECK(nodes.all[0]->pool().peers() == 0);
    CHECK(announced());
    nodes.ends[1] = std::make_unique<thread_endpoint>(nodes.net, seat_id{1});
    nodes.all[1] = std::make_unique<node_type>(
        *nodes.ends[1], node_form{.groups = paged_group, .blocks = 200, .slots = 200}, kv_pool_options{});
    while (nodes.all[0]->pool().peers() == 0) {
      nodes.all[1]->step();
      nodes.all[0]->step();
    }
    CHECK(announced());
    CHECK(nodes.all[0]->pool().stats().directory_spans >= 1);
    CHECK(nodes.all[1]->pool().stats().directory_spans >= 1);
    for (std::uint32_t i = 0; i < prompts; ++i)
      CHECK(nodes.serve(1, prompt_of(i, 17)).loaded == 16);
  }

  TEST_CASE("nodes that know each other find what is announced, whichever joined, left or began again") {
    std::uint32_t asked = 0;
    std::uint32_t missed_by_strangers = 0;
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      changing_nodes world(seed);
      random_numbers& random = world.random;
      for (std::uint32_t number = 1; number <= 120; ++number) {
        CAPTURE(seed);
        CAPTURE(number);
        if (random.once_in(3)) world.change();
        for (std::uint32_t k = random.below(16U); k > 0; --k)
          world.step_one();
        const std::uint32_t from = random.below(most_nodes);
        const std::uint32_t to = (from + 1 + random.below(most_nodes - 1)) % most_nodes;
        if (!world.at(from) || !world.at(to)) continue;
        if (world.computed[from].empty() || random.once_in(2)) {
          compute_prompt(*world.at(from), number);
          world.computed[from].push_back(number);
        }
        for (int i = 0; i < 20'000 && !world.at(from)->pool().is_announced(); ++i)
          world.step_one();
        REQUIRE(world.at(from)->pool().is_announced());
        const bool have_met = world.have_met();
        const std::vector<std::uint32_t>& all = world.computed[from];
        const auto prompt = prompt_of(all[random.below(std::uint64_t{all.size()})], 16);
        const kv_chain chain(world.at(to)->cache(), prompt);
        const auto request = world.at(to)->pool().ask(chain, 0, ~std::uint64_t{0}).value();
        while (request.where().next == offload::answer::pending)
          world.step_one();
        const bool is_found = request.where().tokens == 16;
        asked += have_met ? 1U : 0U;
        if (have_met) CHECK(is_found);
        if (!have_met && !is_found) ++missed_by_strangers;
      }
    }
    CHECK(asked > 200);
    CHECK(missed_by_strangers > 10);  // of them, some missed a keeper that the asker did not know yet
  }
}
