/// Nodes that do not read for a while, over sockets.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/socket_endpoint.hpp>

#include <array>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "pool/pool_node.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using node_type = pool_node<paged_allocator<pooled_traits>, socket_endpoint>;

constexpr std::uint64_t spans = 600;
constexpr std::uint64_t looked_at = 100;  // one span of so many is looked for
constexpr std::uint64_t span_tokens = std::uint64_t{4} * pool::span_chunks;
const std::array small_group{full_attention({"kv", 1, 16, 4})};

/// The smallest buffers that a socket has: a few messages of a pool fill them.
socket_options options_of(const std::string& folder, std::uint32_t seat, std::uint32_t seats = 2) {
  return {.seat = seat_id{seat},
          .seats = seats,
          .folder = folder,
          .post_queue_bytes = 8 * max_post_bytes,
          .socket_bytes = 4096};
}

std::vector<token_id> long_prompt(token_id first = 1) {
  std::vector<token_id> out(spans * span_tokens);
  std::iota(out.begin(), out.end(), first);
  return out;
}

/// Puts the first block of each span of a chain into a node's tiers.
void hold_first_blocks(node_type& node, const kv_chain& chain) {
  for (std::uint64_t span = 0; span < spans; ++span) {
    const std::uint64_t chunk = span * pool::span_chunks;
    const std::uint64_t parent = chunk == 0 ? 0 : paging::key_digest(chain.keys()[chunk - 1]);
    const auto slot = node.tiers().begin_arrival(0, chain.keys()[chunk], parent).value();
    CHECK(node.tiers().end_arrival(slot, true));
    node.tiers().release(slot);
  }
}

/// Two nodes; one holds the first block of each span of a chain.
struct pair_of_nodes {
  explicit pair_of_nodes(const kv_pool_options& how = {.ask_again_ns = 1'000'000}) : options(how) {
    hold_first_blocks(holder, chain);
  }
  void meet() {
    for (int i = 0; i < 2000 && (holder.pool().peers() == 0 || asker.pool().peers() == 0); ++i)
      step_both();
    REQUIRE(asker.pool().peers() == 1);
    REQUIRE(holder.pool().peers() == 1);
  }
  void step_both() {
    holder.pool().progress();
    asker.pool().progress();
  }
  /// How many of the blocks of these spans the asker finds.
  std::uint64_t found() {
    std::uint64_t count = 0;
    for (std::uint64_t span = 0; span < spans; span += looked_at) {
      auto request = asker.pool().ask(chain, span * span_tokens, ~std::uint64_t{0}).value();
      for (int i = 0; i < 100'000 && request.where().next == offload::answer::pending; ++i)
        step_both();
      count += request.where().elsewhere;
    }
    return count;
  }
  void check_peers() {
    CHECK(holder.pool().peers() == 1);
    CHECK(asker.pool().peers() == 1);
  }

  temporary_folder folder;
  socket_endpoint one{options_of(folder.path(), 0)};
  socket_endpoint other{options_of(folder.path(), 1)};
  node_form form{.groups = small_group, .slots = 2 * spans + 8, .lower_slots = 4};
  kv_pool_options options;
  node_type holder{one, form, options};
  node_type asker{other, form, options};
  std::vector<token_id> prompt = long_prompt();
  kv_chain chain{holder.cache(), prompt};
};

/// Three nodes, the last of which stops reading once they have met.
struct trio_of_nodes {
  trio_of_nodes() {
    const auto have_met = [this] {
      return first.pool().peers() == 2 && second.pool().peers() == 2 && silent.pool().peers() == 2;
    };
    for (int i = 0; i < 4000 && !have_met(); ++i) {
      step_two();
      silent.pool().progress();
    }
    REQUIRE(have_met());
  }
  void step_two() {
    first.pool().progress();
    second.pool().progress();
  }

  /// Asks more than nodes take that read nothing.
  void fill() {
    for (int i = 0; i < 32; ++i)
      static_cast<void>(first.pool().ask(chain, 0).value());
  }

  temporary_folder folder;
  socket_endpoint first_end{options_of(folder.path(), 0, 3)};
  socket_endpoint second_end{options_of(folder.path(), 1, 3)};
  socket_endpoint silent_end{options_of(folder.path(), 2, 3)};
  node_form form{.groups = small_group, .slots = spans + 8, .lower_slots = 4};
  node_type first{first_end, form, {}};
  node_type second{second_end, form, {}};
  node_type silent{silent_end, form, {}};
  std::vector<token_id> prompt = long_prompt();
  kv_chain chain{first.cache(), prompt};
};

}  // namespace

TEST_SUITE("kv_pool busy") {
  TEST_CASE("a node that reads nothing delays no question to another node") {
    trio_of_nodes nodes;
    nodes.fill();
    const std::uint64_t before = nodes.first.pool().stats().asked_spans;
    const auto request = nodes.first.pool().ask(nodes.chain, 0, ~std::uint64_t{0}).value();
    for (int i = 0; i < 200; ++i)
      nodes.step_two();
    // Two nodes of three keep the entries of some 400 spans.
    CHECK(nodes.first.pool().stats().asked_spans > before + spans / 2);
    CHECK(nodes.first.pool().stats().asked_spans < before + spans);
    CHECK(nodes.first.pool().peers() == 2);
  }

  TEST_CASE("a node that reads nothing delays no announcement to another node, and gets its own later") {
    trio_of_nodes nodes;
    hold_first_blocks(nodes.first, nodes.chain);
    nodes.fill();
    const auto known = [](node_type& node) { return node.pool().stats().directory_spans; };
    nodes.first.pool().publish(nodes.chain, nodes.chain.tokens());
    for (int i = 0; i < 200; ++i)
      nodes.step_two();
    const std::uint64_t of_two = known(nodes.first) + known(nodes.second);
    CHECK(of_two > spans / 2);
    CHECK(of_two < spans);
    CHECK_FALSE(nodes.first.pool().is_announced());
    for (int i = 0; i < 1000; ++i) {
      nodes.step_two();
      nodes.silent.pool().progress();
    }
    CHECK(known(nodes.first) + known(nodes.second) == of_two);
    CHECK(of_two + known(nodes.silent) == spans);
    CHECK(nodes.first.pool().is_announced());
    CHECK(nodes.first.pool().peers() == 2);
  }

  TEST_CASE(
      "a node that asks faster than the other one reads keeps its peer, and every question is answered") {
    pair_of_nodes nodes;
    nodes.holder.pool().publish(nodes.chain, nodes.chain.tokens());
    nodes.meet();
    for (int i = 0; i < 32; ++i) {
      const auto request = nodes.asker.pool().ask(nodes.chain, 0).value();
      nodes.asker.pool().progress();
    }
    for (int i = 0; i < 100; ++i)
      nodes.step_both();
    nodes.check_peers();
    CHECK(nodes.found() == spans / looked_at);
    CHECK(nodes.other.stats().overflowed == 0);
  }

  TEST_CASE("answers that a busy node dropped are asked for again, also with unlimited patience") {
    pair_of_nodes nodes;
    nodes.meet();
    // Announcements to a node that reads nothing leave no space for answers to it.
    nodes.holder.pool().publish(nodes.chain, nodes.chain.tokens());
    for (int i = 0; i < 20; ++i)
      nodes.holder.pool().progress();
    using request_type = std::remove_cvref_t<decltype(*nodes.asker.pool().ask(nodes.chain, 0))>;
    std::vector<request_type> requests;
    for (std::uint64_t span = 0; span < spans; span += 25) {
      requests.push_back(nodes.asker.pool().ask(nodes.chain, span * span_tokens, ~std::uint64_t{0}).value());
      for (int j = 0; j < 20; ++j)
        nodes.holder.pool().progress();
    }
    CHECK(nodes.holder.pool().stats().dropped_messages > 0);
    const auto has_pending = [&] {
      for (const request_type& each : requests) {
        if (each.where().next == offload::answer::pending) return true;
      }
      return false;
    };
    for (int i = 0; i < 20'000 && has_pending(); ++i)
      nodes.step_both();
    CHECK_FALSE(has_pending());
    CHECK(nodes.asker.pool().stats().asked_again > 0);
    nodes.check_peers();
  }

  TEST_CASE("blocks whose request a busy node dropped are asked for again, also with unlimited patience") {
    pair_of_nodes nodes({.ask_again_ns = 1'000'000, .max_serving = 1, .send_ns = 1'000'000, .slow_ns = 1});
    nodes.holder.pool().publish(nodes.chain, nodes.chain.tokens());
    nodes.meet();
    for (int i = 0; i < 1000; ++i)
      nodes.step_both();
    using request_type = std::remove_cvref_t<decltype(*nodes.asker.pool().ask(nodes.chain, 0))>;
    std::vector<request_type> requests;
    for (std::uint64_t span = 0; span < spans; span += 25)
      requests.push_back(nodes.asker.pool().ask(nodes.chain, span * span_tokens, ~std::uint64_t{0}).value());
    for (int i = 0; i < 1000; ++i)
      nodes.step_both();
    const std::vector<token_id> other = long_prompt(1'000'000);
    const kv_chain others{nodes.holder.cache(), other};
    hold_first_blocks(nodes.holder, others);
    nodes.holder.pool().publish(others, others.tokens());
    for (int i = 0; i < 20; ++i)
      nodes.holder.pool().progress();
    for (request_type& each : requests)
      each.fetch();
    for (int i = 0; i < 20; ++i)
      nodes.holder.pool().progress();
    CHECK(nodes.holder.pool().stats().dropped_messages > 0);
    const auto is_waiting = [&] {
      for (const request_type& each : requests) {
        if (!each.has_arrived()) return true;
      }
      return false;
    };
    for (int i = 0; i < 20'000 && is_waiting(); ++i)
      nodes.step_both();
    CHECK_FALSE(is_waiting());
    CHECK(nodes.asker.pool().stats().asked_again > 0);
    CHECK(nodes.asker.pool().stats().fetched_blocks > 0);
    nodes.check_peers();
  }

  TEST_CASE("a keeper that cannot answer at once says later what has been announced to it") {
    pair_of_nodes nodes;
    nodes.meet();
    // The asker keeps none of 40 spans once in 10^12 runs.
    nodes.holder.pool().publish(nodes.chain, 40 * span_tokens);
    CHECK_FALSE(nodes.holder.pool().is_announced());
    for (int i = 0; i < 32; ++i)
      static_cast<void>(nodes.asker.pool().ask(nodes.chain, 0).value());
    for (int i = 0; i < 20; ++i)
      nodes.asker.pool().progress();  // the holder reads none of the questions
    CHECK(nodes.asker.pool().stats().directory_spans > 0);
    CHECK_FALSE(nodes.holder.pool().is_announced());
    for (int i = 0; i < 1000; ++i)
      nodes.step_both();
    CHECK(nodes.holder.pool().is_announced());
    nodes.check_peers();
  }

  TEST_CASE("a node that announces more than the other one reads keeps its peer, and the rest follows") {
    pair_of_nodes nodes;
    nodes.meet();
    nodes.holder.pool().publish(nodes.chain, nodes.chain.tokens());
    for (int i = 0; i < 100; ++i)
      nodes.holder.pool().progress();
    CHECK_FALSE(nodes.holder.pool().is_announced());
    for (int i = 0; i < 1000; ++i)
      nodes.step_both();
    CHECK(nodes.holder.pool().is_announced());
    nodes.check_peers();
    CHECK(nodes.found() == spans / looked_at);
    CHECK(nodes.one.stats().overflowed == 0);
    CHECK(nodes.holder.pool().stats().directory_spans + nodes.asker.pool().stats().directory_spans == spans);
  }
}
