#include <llmmem/comm/communicator.hpp>
#include <llmmem/pool/kv_handover.hpp>

#include <doctest/doctest.h>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/offload/executor_packer.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/split_world.hpp"
#include "support/state_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::vector<rank_id> ranks_from(std::uint32_t first, std::size_t count) {
  std::vector<rank_id> all;
  for (std::size_t i = 0; i < count; ++i)
    all.push_back(rank_id{first + static_cast<std::uint32_t>(i)});
  return all;
}

void fill(rank_memory& memory, std::uint64_t tokens) {
  for (std::uint32_t layer = 0; layer < memory.layout.layers; ++layer)
    memory.each_vector(layer, tokens, [&](auto bytes, auto p, auto token, auto head) {
      std::ranges::copy(contents(bytes.size(), layer, p, token, head), bytes.begin());
    });
}
bool is_filled(rank_memory& memory, std::uint64_t tokens) {
  bool is_right = true;
  for (std::uint32_t layer = 0; layer < memory.layout.layers; ++layer)
    memory.each_vector(layer, tokens, [&](auto bytes, auto p, auto token, auto head) {
      is_right = is_right && std::ranges::equal(bytes, contents(bytes.size(), layer, p, token, head));
    });
  return is_right;
}

constexpr kv_layout model{.layers = 3, .heads = 4, .head_dim = 4, .block_tokens = 4};

/// Keeps the messages that one rank sends, and gives them to another, changed if a test wants it.
struct carried_messages {
  rank_id mine{};
  std::vector<std::vector<std::byte>> messages{};
  std::size_t next = 0;

  [[nodiscard]] rank_id rank() const noexcept { return mine; }
  [[nodiscard]] rank_count world() const noexcept { return rank_count{2}; }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return {ns}; }
  result<void> send(std::span<const std::byte> bytes, rank_id, std::uint32_t, deadline) {
    messages.emplace_back(bytes.begin(), bytes.end());
    return {};
  }
  result<void> recv(std::span<std::byte> into, rank_id, std::uint32_t, deadline) {
    std::ranges::copy(messages.at(next++), into.begin());
    return {};
  }
  result<void> exchange(std::span<const std::byte>, rank_id, std::span<std::byte>, rank_id, std::uint32_t,
                        deadline) {
    return {};
  }
  void revoke() noexcept {}
};
static_assert(transport<carried_messages>);

/// Marks of a device that may be lost.
struct lost_fence {
  bool is_lost = false;
  [[nodiscard]] bool ready() const noexcept { return true; }
  void wait() const {
    if (is_lost) throw error("the device is lost");
  }
};
struct lost_mark {
  using fence_type = lost_fence;
  const bool* is_lost = nullptr;
  [[nodiscard]] result<lost_fence> operator()() const noexcept { return lost_fence{*is_lost}; }
  [[nodiscard]] result<void> wait_for(const lost_fence&) const noexcept { return {}; }
};

}  // namespace

TEST_CASE("prompts reach decode ranks of another split layer by layer, step by step") {
  for (const auto seed : seeds(12, 3)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout whole = any_split_model(random);
    const std::vector<kv_layout> from = small_side(whole, 4, random);
    const std::vector<kv_layout> to = small_side(whole, 4, random);
    const std::uint64_t tokens = 1 + random.below(std::uint64_t{30});
    const std::uint64_t cut = random.below(tokens);
    const paging::kv_split_plan plan(from, to);
    const auto prefill = ranks_from(0, from.size());
    const auto decode = ranks_from(static_cast<std::uint32_t>(from.size()), to.size());
    in_sim_world(static_cast<std::uint32_t>(from.size() + to.size()), seed,
                 [&](auto& ranks, host_space&, std::uint32_t rank) {
                   random_numbers own(seed + rank);
                   // Both packers make the same messages: ranks of one world may differ in it.
                   std::vector<std::byte> staging(1 << 18);
                   offload::executor_packer<host_executor> staged(host_executor{}, {}, staging);
                   kv_handover by_host(ranks, plan, prefill, decode, {.max_tokens = 30});
                   kv_handover by_kernel(ranks, plan, prefill, decode, {.max_tokens = 30}, std::move(staged));
                   CHECK(by_kernel.staging_bytes() <= staging.size());
                   const bool is_kernel = own.below(std::uint32_t{2}) == 0;
                   const auto with_either = [&](auto&& act) {
                     return is_kernel ? act(by_kernel) : act(by_host);
                   };
                   const bool sends = rank < from.size();
                   rank_memory memory(sends ? from[rank] : to[rank - from.size()], tokens, own);
                   if (sends) fill(memory, tokens);
                   for (const token_range range : {token_range{0, cut}, token_range{cut, tokens}}) {
                     for (std::uint32_t layer = 0; layer < whole.layers; ++layer) {
                       const kv_handover_part part{.request = 7, .layer = layer, .range = range};
                       const deadline by = ranks.after(one_second);
                       with_either([&](auto& handover) {
                         return sends ? handover.send(part, memory.memory(), memory.table, by)
                                      : handover.receive(part, memory.memory(), memory.table, by);
                       }).value();
                     }
                   }
                   CHECK(is_filled(memory, tokens));
                 });
  }
}

TEST_CASE("a handover writes nothing of a message that is damaged or not the expected one") {
  random_numbers random(1);
  const std::vector<kv_layout> from = split(model, 1, 1, 1);
  const std::vector<kv_layout> to = split(model, 1, 1, 1);
  rank_memory source(from[0], 8, random);
  fill(source, 8);
  const auto sender = ranks_from(0, 1);
  const auto receiver = ranks_from(1, 1);
  const paging::kv_split_plan plan(from, to);
  carried_messages line{.mine = rank_id{0}};
  kv_handover out(line, plan, sender, receiver, {.max_tokens = 8, .name = "prefill"});
  const kv_handover_part part{.request = 5, .layer = 1, .range = {0, 8}};
  REQUIRE(out.send(part, source.memory(), source.table, {}));
  const std::vector<std::byte> sent = line.messages.at(0);
  CHECK(sent.size() == plan.bytes(plan.shares()[0], part.range) + 48);

  rank_memory target(to[0], 8, random);
  const auto receive = [&](const kv_handover_part& expected, const paging::kv_split_plan& by) {
    line.mine = rank_id{1};
    line.next = 0;
    kv_handover in(line, by, sender, receiver, {.max_tokens = 8, .name = "decode"});
    return in.receive(expected, target.memory(), target.table, {});
  };
  const auto is_untouched = [&] {
    return std::ranges::count(target.bytes, std::byte{0}) == static_cast<std::ptrdiff_t>(target.bytes.size());
  };
  for (std::size_t bit = 0; bit < 8 * sent.size(); ++bit) {
    line.messages[0] = sent;
    line.messages[0][bit / 8] ^= std::byte(1U << (bit % 8));
    REQUIRE(receive(part, plan).code() == errc::message_damaged);
  }
  line.messages[0] = sent;
  CHECK(receive({.request = 6, .layer = 1, .range = {0, 8}}, plan).error().message() ==
        "decode: rank 0 sent a part of keys and values with 5 (plan, request, layer, token or share) where 6 "
        "is "
        "expected; send and receive the same parts in the same order, by the same plan");
  CHECK(receive({.request = 5, .layer = 2, .range = {0, 8}}, plan).code() == errc::unexpected_part);
  std::vector<kv_layout> other = to;
  other[0].order = block_order::block_first;
  const paging::kv_split_plan another(from, other);
  CHECK(receive(part, paging::kv_split_plan(other, to)).code() == errc::unexpected_part);
  CHECK(plan.fingerprint() != another.fingerprint());
  CHECK(is_untouched());
  CHECK(receive({.request = 5, .layer = 1, .range = {0, 9}}, plan).code() == errc::out_of_range);
  CHECK(receive(part, plan).has_value());
  CHECK_FALSE(is_untouched());
}

TEST_CASE("a handover sends and reports nothing of a device that is lost") {
  random_numbers random(1);
  const paging::kv_split_plan plan(split(model, 1, 1, 1), split(model, 1, 1, 1));
  rank_memory memory(split(model, 1, 1, 1)[0], 8, random);
  fill(memory, 8);
  carried_messages line{.mine = rank_id{0}};
  std::vector<std::byte> staging(8192);
  bool is_lost = true;
  const auto handover = [&] {
    return kv_handover(line, plan, ranks_from(0, 1), ranks_from(1, 1), {.max_tokens = 8},
                       offload::executor_packer(host_executor{}, lost_mark{&is_lost}, staging));
  };
  const kv_handover_part part{.request = 5, .layer = 1, .range = {0, 8}};
  CHECK(handover().send(part, memory.memory(), memory.table, {}).code() == errc::completion_lost);
  CHECK(line.messages.empty());
  is_lost = false;
  REQUIRE(handover().send(part, memory.memory(), memory.table, {}));
  is_lost = true;
  line.mine = rank_id{1};
  CHECK(handover().receive(part, memory.memory(), memory.table, {}).code() == errc::completion_lost);
}

TEST_CASE("a packer refuses staging memory in which no share fits, and says how much one needs") {
  carried_messages line;
  const paging::kv_split_plan plan(split(model, 1, 1, 1), split(model, 1, 1, 1));
  alignas(64) std::array<std::byte, 1024> staging{};
  const auto with = [&](std::size_t bytes) {
    return text_of([&] {
      kv_handover(line, plan, ranks_from(0, 1), ranks_from(1, 1), {.max_tokens = 8, .name = "kv"},
                  offload::executor_packer<host_executor>({}, {}, std::span(staging).first(bytes)));
    });
  };
  // K and V of 8 tokens, 4 heads of 4 two-byte elements, and a trailer, in units of 64; 24 bytes for each
  // vector.
  constexpr std::size_t message = 2 * 8 * 4 * 8 + 64;
  static_assert(message + 64 * 24 == 2112);
  CHECK(with(1024) ==
        "kv: the staging memory has 1024 bytes, and one share needs 2112; give more, or lower max_tokens");
}

TEST_CASE("a handover refuses ranks that do not fit its plan") {
  const paging::kv_split_plan plan(split(model, 2, 1, 1), split(model, 1, 1, 1));
  carried_messages line;
  const auto why = [&](std::vector<rank_id> senders, std::vector<rank_id> receivers) {
    return text_of([&] { kv_handover(line, plan, senders, receivers, {.name = "kv"}); });
  };
  CHECK(why(ranks_from(0, 1), ranks_from(1, 1)) ==
        "kv: 1 senders, but the plan has 2; give the rank of each layout");
  CHECK(why(ranks_from(0, 2), ranks_from(2, 1)) == "kv: rank 2 of receivers, but the transport has 2 ranks");
  CHECK(why(ranks_from(0, 2), ranks_from(1, 1)) ==
        "kv: rank 1 is on both sides; copy its own shares with pack() and unpack(), and leave it out");
}
