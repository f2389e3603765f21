#include <llmmem/paging/kv_split.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/split_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using paging::kv_share;
using paging::kv_split_plan;

TEST_CASE("between any two splits each vector arrives once, in its place, and nothing else is touched") {
  std::uint64_t shares = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout model = any_split_model(random);
    const std::vector<kv_layout> from = any_side(model, random);
    const std::vector<kv_layout> to = any_side(model, random);
    const std::uint64_t tokens = 1 + random.below(std::uint64_t{40});
    const kv_split_plan plan(from, to);

    std::vector<rank_memory> senders;
    for (const kv_layout& each : from) {
      senders.emplace_back(each, tokens, random);
      for (std::uint32_t layer = 0; layer < each.layers; ++layer)
        senders.back().each_vector(layer, tokens, [&](auto bytes, auto p, auto token, auto head) {
          std::ranges::copy(contents(bytes.size(), layer, p, token, head), bytes.begin());
        });
    }
    std::vector<rank_memory> receivers;
    for (const kv_layout& each : to)
      receivers.emplace_back(each, tokens, random);
    // In two parts, as a prompt is computed in steps.
    const std::uint64_t cut = random.below(tokens + 1);
    std::uint64_t sent = 0;
    for (const kv_share& share : plan.shares()) {
      ++shares;
      for (const token_range range : {token_range{0, cut}, token_range{cut, tokens}}) {
        std::vector<std::byte> packed(static_cast<std::size_t>(plan.bytes(share, range)));
        sent += packed.size() * model.layers;
        for (std::uint32_t layer = 0; layer < model.layers; ++layer) {
          rank_memory& sender = senders[share.from];
          REQUIRE(plan.pack(share, layer, range, sender.memory(), sender.table, packed));
          rank_memory& receiver = receivers[share.to];
          REQUIRE(plan.unpack(share, layer, range, receiver.memory(), receiver.table, packed));
        }
      }
    }
    std::uint64_t needed = 0;
    for (rank_memory& each : receivers) {
      for (std::uint32_t layer = 0; layer < model.layers; ++layer) {
        each.each_vector(layer, tokens, [&](auto bytes, auto p, auto token, auto head) {
          REQUIRE(std::ranges::equal(bytes, contents(bytes.size(), layer, p, token, head)));
          std::ranges::fill(bytes, std::byte{0});
          needed += bytes.size();
        });
      }
      REQUIRE(std::ranges::count(each.bytes, std::byte{0}) == static_cast<std::ptrdiff_t>(each.bytes.size()));
    }
    CHECK(sent == needed);  // no fewer bytes could do, and none travels twice
  }
  CHECK(shares > 1'000);
}

TEST_CASE("receivers of the same heads take turns among the senders that have them") {
  const kv_layout latents{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .has_values = false};
  const kv_split_plan plan(split(latents, 4, 1, 1), split(latents, 8, 1, 1));
  for (std::uint32_t rank = 0; rank < 4; ++rank)
    CHECK(plan.shares_from(rank).size() == 2);
  CHECK(plan.shares_to(7) == std::vector{kv_share{.from = 3, .to = 7, .heads = 1}});
  CHECK(plan.token_bytes(plan.shares()[0]) == 16);
}

TEST_CASE("senders of the same heads send about as many, also with context parallelism on either side") {
  const kv_layout latents{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .has_values = false};
  const std::vector<kv_layout> from = split(latents, 2, 2, 1);
  const auto sent_in = [&](const std::vector<kv_layout>& to) {
    const kv_split_plan plan(from, to);
    std::vector<std::uint64_t> sent(from.size());
    for (const kv_share& share : plan.shares())
      sent[share.from] += plan.bytes(share, {0, 16});
    return sent;
  };
  CHECK(sent_in(split(latents, 4, 1, 1)) == std::vector<std::uint64_t>(4, 2 * 8 * 16));
  // Ranks of every second token, which some senders do not have, in any order.
  std::vector<kv_layout> to = split(latents, 2, 2, 1);
  std::swap(to[1], to[2]);
  CHECK(sent_in(to) == std::vector<std::uint64_t>(4, 8 * 16));
}

TEST_CASE("tokens in common are counted by rounds, for a range of any length") {
  const kv_layout latents{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 6, .has_values = false};
  const std::vector<kv_layout> from = split(latents, 1, 3, 2);
  const std::vector<kv_layout> to = split(latents, 1, 2, 3);
  const kv_split_plan plan(from, to);
  for (const kv_share& share : plan.shares()) {
    CAPTURE(share.from);
    CAPTURE(share.to);
    for (std::uint64_t first = 0; first < 14; ++first) {
      std::uint64_t expected = 0;
      for (std::uint64_t end = first; end < 40; ++end) {
        CHECK(plan.tokens(share, {first, end}) == expected);
        expected += end / 2 % 3 == share.from && end / 3 % 2 == share.to ? 1U : 0U;
      }
    }
    CHECK(plan.tokens(share, {0, std::uint64_t{12} << 50}) == std::uint64_t{plan.tokens(share, {0, 12})}
                                                                  << 50);
  }
}

TEST_CASE("a share of a split plan is described by the heads of both sides") {
  const kv_layout model{.layers = 2, .heads = 8, .head_dim = 4, .block_tokens = 4};
  const kv_split_plan plan(split(model, 4, 1, 1), split(model, 2, 2, 4));
  CHECK(plan.shares_to(1) ==
        std::vector{kv_share{.from = 2, .to = 1, .heads = 2},
                    kv_share{.from = 3, .to = 1, .to_head = 2, .heads = 2, .has_common = false}});
  const kv_share& share = plan.shares()[0];
  CHECK(plan.token_bytes(share) == 2 * 2 * 4 * 2);
  CHECK(plan.tokens(share, {0, 10}) == 6);  // runs of four of two ranks: 0 to 3, and 8 and 9
  CHECK(plan.tokens(share, {4, 8}) == 0);
  CHECK(plan.bytes(share, {0, 10}) == 6 * 32);
}

TEST_CASE("layouts that do not describe one model, and wrong calls, are refused with what to change") {
  const kv_layout model{.layers = 2, .heads = 4, .head_dim = 4, .block_tokens = 4};
  const std::vector<kv_layout> four = split(model, 4, 1, 1);
  const std::vector<kv_layout> two = split(model, 2, 1, 1);
  const auto why = [&](std::span<const kv_layout> from, std::span<const kv_layout> to) {
    return text_of([&] { kv_split_plan(from, to, "decode"); });
  };
  CHECK(why({}, two) == "decode: from has no ranks; give the layout of each");
  CHECK(
      why(std::span(four).first(3), two) ==
      "decode: no rank of `from` with part.cp_rank 0 has head 3, which to[1] needs; give the layouts of all "
      "ranks");
  std::vector<kv_layout> mixed = two;
  mixed[1].block_tokens = 8;
  CHECK(why(four, mixed) == "decode: to[1] differs from to[0] in more than part.tp_rank and part.cp_rank");
  kv_layout other = model;
  other.model = 7;
  CHECK(why(four, split(other, 2, 1, 1)).starts_with("decode: the layouts' model: 0 there, 7 here"));
  kv_layout by_channel = model;
  by_channel.element = dtype::int8;
  by_channel.key_scales.group = paging::scale_group::channel;
  CHECK(
      why(split(by_channel, 2, 1, 1), two) ==
      "decode: from[0] has scales of a whole block (by channel, or has_global), which mean nothing in other "
      "blocks; take scales by vector or by run");
  kv_layout huge{.layers = 1, .heads = 1U << 30, .head_dim = 1, .block_tokens = 1, .has_values = false};
  huge.part.tp_size = 8;
  CHECK(why({&huge, 1}, {&huge, 1}) ==
        "decode: from[0] has heads x part.tp_size of 2^32 or more; a model has fewer heads");

  random_numbers random(1);
  rank_memory sender(four[0], 8, random);
  const kv_split_plan plan(four, two, "decode");
  const kv_share share = plan.shares()[0];
  std::vector<std::byte> packed(static_cast<std::size_t>(plan.bytes(share, {0, 8})));
  const auto code = [&](kv_share of, std::uint32_t layer, token_range range, const kv_memory& memory,
                        std::span<const block_id> table) {
    const auto done = plan.pack(of, layer, range, memory, table, packed);
    CHECK(std::ranges::count(packed, std::byte{0}) == static_cast<std::ptrdiff_t>(packed.size()));
    return done.code();
  };
  kv_share wrong = share;
  wrong.heads = 2;
  CHECK(code(wrong, 0, {0, 8}, sender.memory(), sender.table) == errc::out_of_range);
  CHECK(code(share, 2, {0, 8}, sender.memory(), sender.table) == errc::out_of_range);
  CHECK(code(share, 0, {0, 7}, sender.memory(), sender.table) == errc::size_mismatch);
  CHECK(code(share, 0, {1, 9}, sender.memory(), sender.table) == errc::past_the_end);
  CHECK(code(share, 0, {}, sender.memory(), sender.table) == errc::past_the_end);
  rank_memory elsewhere(two[0], 8, random);
  CHECK(code(share, 0, {0, 8}, elsewhere.memory(), sender.table) == errc::layout_mismatch);
  sender.table[1] = null_block;
  CHECK(code(share, 0, {0, 8}, sender.memory(), sender.table) == errc::no_such_block);
  CHECK(plan.pack(share, 0, {6, 6}, sender.memory(), sender.table, {}));  // no token, so no block
  sender.table[1] = block_id{999};
  CHECK(code(share, 0, {0, 8}, sender.memory(), sender.table) == errc::no_such_block);
}
