#include <llmmem/paging/group_transfer.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/kv_side.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// A cache with groups and its memory. Each token leaves bytes of its whole history in every group, each
/// state those of its last token.
struct group_side {
  group_side(std::span<const layer_group> groups, std::uint64_t pages, std::uint64_t page)
      : cache({.groups = groups,
               .budget_bytes = (pages + 1) * page,
               .page_bytes = page,
               .max_sequences = 4,
               .max_sequence_tokens = 100,
               .name = "kv"}),
        bytes(cache.pool().physical_bytes()) {}

  [[nodiscard]] group_memory memory() { return {bytes, 7}; }

  /// The bytes of block `i` of a group after `tokens` of a sequence.
  [[nodiscard]] std::vector<std::byte> block_of(std::span<const token_id> tokens, std::size_t g,
                                                std::uint64_t i) const {
    const layer_group& of = cache.groups()[g];
    const std::uint64_t end = std::min<std::uint64_t>((i + 1) * of.block_tokens, tokens.size());
    std::uint64_t history = 1 + g;
    std::vector<std::byte> out(of.block_bytes);
    const std::uint64_t token_bytes = of.block_bytes / of.block_tokens;
    for (std::uint64_t t = 0; t < end; ++t) {
      history = random_numbers(history * 31 + static_cast<std::uint64_t>(tokens[t])).next();
      const bool is_state = of.kind == layer_kind::state_snapshots;
      const std::uint64_t first = is_state ? 0 : t % of.block_tokens * token_bytes;
      if (!is_state && t / of.block_tokens != i) continue;
      for (std::uint64_t k = 0; k < (is_state ? of.block_bytes : token_bytes); ++k)
        out[first + k] = static_cast<std::byte>(history + k);
    }
    return out;
  }
  /// Calls `visit(bytes in memory, bytes they should be)` for what the next token reads.
  template <class Visit>
  void each_block(sequence_id sequence, std::span<const token_id> tokens, Visit&& visit) {
    for (std::size_t g = 0; g < cache.groups().size(); ++g) {
      const auto table = cache.table(sequence, g);
      for (std::uint64_t i = 0; i < table.size(); ++i) {
        if (table[i] == null_block) continue;
        const std::vector<std::byte> right = block_of(tokens, g, i);
        visit(std::span(bytes).subspan(cache.pool().offset(table[i]), right.size()), right);
      }
    }
  }
  sequence_id write(const std::vector<token_id>& tokens, const prefix_context& context = {}) {
    const sequence_id sequence = cache.create(context).value();
    const std::uint64_t hit = cache.match(sequence, tokens).value().tokens;
    for (std::size_t i = hit; i < tokens.size(); ++i) {
      cache.append(sequence, std::span(tokens).subspan(i, 1)).value();
      each_block(sequence, std::span(tokens).first(i + 1),
                 [](std::span<std::byte> at, const std::vector<std::byte>& right) {
                   std::ranges::copy(right, at.begin());
                 });
      cache.commit(sequence).value();
    }
    return sequence;
  }
  [[nodiscard]] bool holds(sequence_id sequence, const std::vector<token_id>& tokens) {
    bool all = true;
    each_block(sequence, tokens, [&](std::span<std::byte> at, const std::vector<std::byte>& right) {
      all = all && std::ranges::equal(at, right);
    });
    return all;
  }

  hybrid_allocator<> cache;
  std::vector<std::byte> bytes;
};

}  // namespace

TEST_CASE("a sequence of several groups is sent bit for bit, and other sequences find it there") {
  std::uint64_t reused = 0;
  std::uint64_t found = 0;
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    group_side prefill(three_kinds, 40, 300);
    group_side decode(three_kinds, 40, 300 + random.below(std::uint64_t{2}) * 400);
    const prefix_context context{.salt = {random.below(std::uint64_t{2}), 0}};
    const std::vector<token_id> tokens = count_up(1, 1 + random.below(std::uint64_t{50}));
    const std::size_t known = random.below(std::uint64_t{tokens.size()} + 1);
    REQUIRE(decode.cache.release(
        decode.write({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(known)}, context)));

    const sequence_id sent = prefill.write(tokens, context);
    REQUIRE(prefill.holds(sent, tokens));
    wire line;
    const auto written = export_sequence(prefill.cache, sent, tokens, prefill.memory(), line.sink());
    REQUIRE(written);
    CHECK(*written == line.bytes.size());
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    REQUIRE(received);
    CHECK(received->tokens == tokens.size());
    CHECK(line.at == line.bytes.size());
    CHECK(decode.cache.tokens(received->sequence) == tokens.size());
    for (std::size_t g = 0; g < three_kinds.size(); ++g) {
      const auto here = prefill.cache.table(sent, g);
      const auto there = decode.cache.table(received->sequence, g);
      for (std::size_t i = 0; i < here.size(); ++i)
        CHECK((here[i] == null_block) == (there[i] == null_block));
    }
    CHECK(decode.holds(received->sequence, tokens));
    REQUIRE(decode.cache.release(received->sequence));
    const sequence_id other = decode.cache.create(context).value();
    const std::uint64_t hit = decode.cache.match(other, tokens).value().tokens;
    // A state inside its block is no snapshot that a hit can end at.
    CHECK(hit == (tokens.size() % 8 == 0 ? tokens.size() : received->reused_tokens));
    CHECK(decode.holds(other, {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(hit)}));
    CHECK(decode.cache.audit() == std::vector<std::string>{});
    reused += received->reused_tokens;
    found += hit;
  }
  CHECK(reused > 100);
  CHECK(found > 300);
}

TEST_CASE("only what the receiver lacks is sent, of windows and states only what the next token reads") {
  std::uint64_t saved = 0;
  std::uint64_t refused = 0;
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    group_side prefill(three_kinds, 40, 300);
    group_side decode(three_kinds, 40, 300);
    const std::vector<token_id> tokens = count_up(1, 1 + random.below(std::uint64_t{50}));
    const std::size_t known = random.below(std::uint64_t{tokens.size()} + 1);
    decode.cache.release(decode.write({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(known)}))
        .value();
    const std::uint64_t cached = decode.cache.cached_tokens(tokens);
    const std::uint64_t first = random.once_in(2) ? cached : random.below(std::uint64_t{tokens.size()} + 1);
    const sequence_id sent = prefill.write(tokens);
    wire whole;
    wire line;
    const std::uint64_t all =
        export_sequence(prefill.cache, sent, tokens, prefill.memory(), whole.sink()).value();
    const std::uint64_t part =
        export_sequence(prefill.cache, sent, tokens, prefill.memory(), line.sink(), first).value();
    // The blocks omitted, and which of them are cached there, counted from the tables.
    std::uint64_t omitted = 0;
    std::uint64_t bytes = 0;
    std::uint64_t missing = 0;
    for (std::size_t g = 0; g < three_kinds.size(); ++g) {
      const auto table = prefill.cache.table(sent, g);
      for (std::uint64_t i = 0; i < table.size(); ++i) {
        const std::uint64_t end = (i + 1) * three_kinds[g].block_tokens;
        if (table[i] == null_block || end > first) continue;
        ++omitted;
        bytes += three_kinds[g].block_bytes + sizeof(block_key);
        missing += end > cached ? 1U : 0U;
      }
    }
    CHECK(all - part + (first == 0 ? 0 : sizeof(std::uint64_t)) == bytes);
    saved += bytes;
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    REQUIRE(received.has_value() == (missing == 0));
    if (!received) {
      CHECK(received.code() == errc::missing_prefix);
      CHECK(received.error().wanted == omitted);
      CHECK(received.error().found == omitted - missing);
      CHECK(decode.cache.stats().sequences == 0);
      ++refused;
      continue;
    }
    CHECK(line.at == line.bytes.size());
    CHECK(received->reused_tokens == cached);
    CHECK(decode.cache.tokens(received->sequence) == tokens.size());
    CHECK(decode.holds(received->sequence, tokens));
    decode.cache.release(received->sequence).value();
    CHECK(decode.cache.audit().empty());
  }
  CHECK(saved > 10'000);
  CHECK(refused > 20);
  // A receiver with fewer tokens than promised, none of which the next token reads.
  const std::array window{three_kinds[1]};
  group_side prefill(window, 40, 300);
  group_side decode(window, 40, 300);
  const std::vector<token_id> tokens = count_up(1, 40);
  wire line;
  const sequence_id sent = prefill.write(tokens);
  export_sequence(prefill.cache, sent, tokens, prefill.memory(), line.sink(), 16).value();
  const auto received = import_sequence(decode.cache, decode.memory(), line.source());
  REQUIRE(received);
  CHECK(decode.holds(received->sequence, tokens));
  CHECK(export_sequence(prefill.cache, sent, tokens, prefill.memory(), line.sink(), 41).code() ==
        errc::past_the_end);
}

TEST_CASE("a stream of groups with any wrong bit, or cut anywhere, is refused and leaves nothing behind") {
  group_side prefill(three_kinds, 8, 300);
  const std::vector<token_id> tokens = count_up(1, 13);
  const sequence_id sent = prefill.write(tokens);
  for (const std::uint64_t first : {0U, 8U}) {
    CAPTURE(first);
    wire line;
    REQUIRE(export_sequence(prefill.cache, sent, tokens, prefill.memory(), line.sink(), first));
    group_side decode(three_kinds, 8, 300);
    decode.cache.release(decode.write(count_up(1, first))).value();
    const std::uint64_t known = decode.cache.stats().registrations;
    const auto refused = [&] {
      const auto received = import_sequence(decode.cache, decode.memory(), line.source());
      REQUIRE_FALSE(received);
      const hybrid_stats now = decode.cache.stats();
      REQUIRE(now.sequences == 0);
      REQUIRE(now.registrations == known);
      REQUIRE(now.pages.active_bytes == 0);
    };
    for (std::size_t i = 0; i < line.bytes.size(); ++i) {
      CAPTURE(i);
      line.bytes[i] ^= std::byte{1};
      refused();
      line.bytes[i] ^= std::byte{1};
    }
    const std::vector<std::byte> whole = line.bytes;
    for (std::size_t size = 0; size < whole.size(); size += 7) {
      line.bytes.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
      refused();
    }
    line.bytes = whole;
    CHECK(import_sequence(decode.cache, decode.memory(), line.source()));
  }
}

TEST_CASE("a stream of groups is refused where the groups, the contents or the weights differ") {
  group_side prefill(three_kinds, 8, 300);
  const std::vector<token_id> tokens = count_up(1, 13);
  const sequence_id sequence = prefill.write(tokens);
  wire line;
  REQUIRE(export_sequence(prefill.cache, sequence, tokens, prefill.memory(), line.sink()));
  auto groups = three_kinds;
  groups[1].reach = 9;
  group_side wider(groups, 8, 300);
  CHECK(import_sequence(wider.cache, wider.memory(), line.source()).error().message() ==
        "kv: group 1: reach: 6 there, 9 here; both sides must hold the same values; nothing was copied");
  group_side fewer({groups.data(), 2}, 8, 300);
  CHECK(import_sequence(fewer.cache, fewer.memory(), line.source()).error().message() ==
        "kv: groups: 3 there, 2 here; both sides must hold the same values; nothing was copied");
  group_side same(three_kinds, 8, 300);
  group_memory other = same.memory();
  other.contents = 8;
  CHECK(import_sequence(same.cache, other, line.source()).code() == errc::layout_mismatch);
  group_memory small = same.memory();
  small.bytes = small.bytes.first(small.bytes.size() - 1);
  CHECK(import_sequence(same.cache, small, line.source()).code() == errc::no_such_block);
  group_side full(three_kinds, 2, 300);
  CHECK(import_sequence(full.cache, full.memory(), line.source()).code() == errc::out_of_group_blocks);
  CHECK(full.cache.stats().sequences == 0);
  same.cache.reset();
  CHECK(import_sequence(same.cache, same.memory(), line.source()).code() == errc::epoch_differs);

  const auto to = line.sink();
  CHECK(export_sequence(prefill.cache, sequence, std::span(tokens).first(12), prefill.memory(), to).code() ==
        errc::size_mismatch);
  CHECK(export_sequence(prefill.cache, sequence, tokens, {}, to).code() == errc::no_such_block);
  const auto stops = [](std::span<const std::byte>) noexcept { return false; };
  CHECK(export_sequence(prefill.cache, sequence, tokens, prefill.memory(), stops).code() == errc::stopped);
  CHECK(export_sequence(prefill.cache, {}, tokens, prefill.memory(), to).code() == errc::null_handle);
  prefill.cache.invalidate(sequence, 8).value();
  CHECK(export_sequence(prefill.cache, sequence, tokens, prefill.memory(), to).code() == errc::not_a_prefix);
}
