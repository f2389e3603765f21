#include <llmmem/paging/kv_split.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/kv_forms_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using paging::kv_share;
using paging::kv_split_plan;

namespace {

/// The memory of one rank, and its blocks of one sequence.
struct rank_memory {
  kv_layout layout;
  std::uint64_t blocks = 0;
  std::vector<std::byte> bytes;
  std::vector<block_id> table;
  std::vector<std::byte*> planes;  // where each layer's plane begins; empty: one allocation

  rank_memory(const kv_layout& of, std::uint64_t tokens, random_numbers& random)
      : layout(of), blocks(2 * (tokens / of.block_tokens + 2)), bytes(of.total_bytes(blocks)) {
    for (std::uint32_t i = 1; i < blocks; ++i)
      table.push_back(block_id{i});
    for (std::size_t i = table.size(); i > 1; --i)
      std::swap(table[i - 1], table[static_cast<std::size_t>(random.below(i))]);
    table.resize((of.part.local_tokens(tokens) + of.block_tokens - 1) / of.block_tokens);
    if (random.below(std::uint32_t{2}) == 0) return;
    for (std::uint32_t p = 0; p < of.planes(); ++p) {
      const plane_strides strides = of.strides(p, blocks);
      for (std::uint32_t layer = 0; layer < of.layers; ++layer)
        planes.push_back(bytes.data() + strides.offset(layer, 0, 0, 0));
    }
  }
  [[nodiscard]] kv_memory memory() {
    if (planes.empty()) return {.data = bytes.data(), .blocks = blocks, .layout = layout};
    return {.blocks = blocks, .layout = layout, .plane_table = planes.data()};
  }
  /// The head of the model that is `head` here.
  [[nodiscard]] std::uint64_t model_head(std::uint64_t head) const {
    const kv_part_of part{layout};
    return part.first_head + head;
  }

  /// Calls `visit(bytes, plane, token, model head)` for each vector of the first `tokens` tokens in a layer.
  template <class Visit>
  void each_vector(std::uint32_t layer, std::uint64_t tokens, Visit&& visit) {
    for (std::uint64_t token = 0; token < tokens; ++token) {
      if (layout.part.cp_rank_of(token) != layout.part.cp_rank) continue;
      const std::uint64_t local = layout.part.local_of(token);
      const auto block = to_index(table.at(static_cast<std::size_t>(local / layout.block_tokens)));
      for (std::uint32_t p = 0; p < layout.planes(); ++p) {
        const bool is_common = layout.role_of(p) >= paging::plane_role::index_key;
        const kv_plane plane = kv_plane_of(memory(), p);
        for (std::uint64_t head = 0; head < layout.heads_of(p); ++head) {
          std::byte* const at =
              plane_base(plane, layer) + plane.strides.offset(0, block, local % layout.block_tokens, head);
          visit(std::span(at, static_cast<std::size_t>(layout.vector_bytes(p))), p, token,
                is_common ? 0 : model_head(head));
        }
      }
    }
  }

 private:
  struct kv_part_of {
    std::uint64_t first_head;
    explicit kv_part_of(const kv_layout& of) {
      const bool is_repeated = of.part.heads_of_model != 0 && of.part.heads_of_model < of.part.tp_size;
      const std::uint64_t ranks_of_a_head = is_repeated ? of.part.tp_size / of.part.heads_of_model : 1;
      first_head = of.part.tp_rank / ranks_of_a_head * of.heads;
    }
  };
};

/// What a vector of the model holds.
std::vector<std::byte> contents(std::size_t bytes, std::uint32_t layer, std::uint32_t plane,
                                std::uint64_t token, std::uint64_t head) {
  random_numbers random(((layer * 16 + plane) * 1000 + token) * 100 + head);
  std::vector<std::byte> out(bytes);
  for (std::byte& each : out)
    each = std::byte(1 + random.below(std::uint32_t{255}));
  return out;
}

/// The layouts of all ranks of one side.
std::vector<kv_layout> split(kv_layout model, std::uint32_t tp, std::uint32_t cp, std::uint32_t interleave) {
  std::vector<kv_layout> all;
  const std::uint32_t heads = model.heads;
  model.heads = heads >= tp ? heads / tp : 1;
  model.part = {.tp_size = tp, .heads_of_model = heads, .cp_size = cp, .cp_interleave = interleave};
  for (std::uint32_t c = 0; c < cp; ++c) {
    for (std::uint32_t t = 0; t < tp; ++t) {
      model.part.tp_rank = t;
      model.part.cp_rank = c;
      all.push_back(model.checked());
    }
  }
  return all;
}

bool is_per_token(const kv_layout& of) {
  return std::ranges::all_of(
      std::array{of.key_scales, of.value_scales, of.index_scales},
      [](const auto& each) { return each.group != paging::scale_group::channel && !each.has_global; });
}

/// A model, and a side of its ranks.
std::vector<kv_layout> any_side(const kv_layout& model, random_numbers& random) {
  kv_layout of = rearranged(model, random);
  const std::uint32_t cp = 1 + random.below(std::uint32_t{3});
  const std::uint32_t interleave = 1 + random.below(std::uint32_t{3});
  of.block_tokens = interleave * (1 + random.below(std::uint32_t{4}));
  std::uint32_t tp = 1U << random.below(std::uint32_t{4});
  while (of.heads >= tp ? of.heads % tp != 0 : tp % of.heads != 0)
    tp /= 2;
  return split(of, tp, cp, interleave);
}

}  // namespace

TEST_CASE("between any two splits each vector arrives once, in its place, and nothing else is touched") {
  std::uint64_t shares = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    kv_layout model = any_forms(random);
    while (!is_per_token(model))
      model = any_forms(random);
    model.heads = 1U << random.below(std::uint32_t{4});
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
