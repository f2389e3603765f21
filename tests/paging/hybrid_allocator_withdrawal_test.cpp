/// Contents of groups that are withdrawn, that are cached again, and that never were: resets, invalid blocks,
/// removed tokens, twins, sinks, states inside a step.
#include <doctest/doctest.h>

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/event_log.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = hybrid_allocator<>;

std::uint64_t held(const auto& cache, sequence_id sequence, std::size_t group) {
  const auto table = cache.table(sequence, group);
  return static_cast<std::uint64_t>(
      std::count_if(table.begin(), table.end(), [](block_id block) { return block != null_block; }));
}

sequence_id written(auto& cache, std::span<const token_id> tokens) {
  const sequence_id id = cache.create().value();
  cache.append(id, tokens).value();
  cache.commit(id).value();
  return id;
}

const std::vector<std::string> sound{};

}  // namespace

TEST_CASE("after a reset no group finds earlier contents, nor a running sequence's later commits") {
  cache_type cache = small_cache();
  const auto prompt = count_up(0, 24);
  const sequence_id running = written(cache, std::span(prompt).first(12));
  CHECK(cache.cached_tokens(prompt) == 8);
  const sequence_id waiting = cache.create().value();
  CHECK(cache.reset(4).value() > 0);
  CHECK(cache.cached_tokens(prompt) == 0);
  cache.append(running, std::span(prompt).subspan(12)).value();
  CHECK(cache.commit(running).value() == 0);
  CHECK(cache.cached_tokens(prompt) == 0);
  CHECK(cache.epoch(running) == 0);
  CHECK(cache.epoch(waiting) == 4);
  cache.append(waiting, prompt).value();
  cache.commit(waiting).value();
  CHECK(cache.cached_tokens(prompt) == 24);
  CHECK(cache.reset(4).code() == errc::old_epoch);
  CHECK(cache.audit() == sound);
}

TEST_CASE("an invalid block and its followers leave the cache in every group, and no other block does") {
  cache_type cache = small_cache();
  const auto prompt = count_up(0, 24);
  const auto other = count_up(500, 24);
  cache.release(written(cache, other)).value();
  const sequence_id first = written(cache, prompt);
  const sequence_id second = cache.create().value();
  CHECK(cache.match(second, prompt)->tokens == 24);
  const block_id bad = cache.table(first, 0)[3];  // tokens 12 to 15 under full attention
  CHECK(cache.invalidate(bad).value() > 0);
  CHECK(cache.stats().invalidated > 0);
  CHECK(cache.cached_tokens(prompt) == 8);  // the last state before
  CHECK(cache.cached_tokens(other) == 24);
  CHECK(cache.prefix_tokens(first) == 12);
  CHECK(cache.prefix_tokens(second) == 12);
  cache.append(second, count_up(700, 8)).value();
  CHECK(cache.commit(second).value() == 0);
  CHECK(cache.audit() == sound);

  // Windows and states are cut where they can be, and what is computed again is found.
  const auto nearest = cache.nearest_cuts(first, cache.prefix_tokens(first)).value();
  cache.truncate(first, nearest.below).value();
  cache.append(first, std::span(prompt).subspan(static_cast<std::size_t>(nearest.below))).value();
  CHECK(cache.prefix_tokens(first) == 24);
  cache.commit(first).value();
  CHECK(cache.cached_tokens(prompt) == 24);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a sequence whose window has left an invalid block that it read caches nothing after it") {
  const std::array groups{sliding_window({"w", 1, 16, 4}, 4)};
  cache_type cache({.groups = groups, .budget_bytes = 8192, .page_bytes = 256, .max_sequence_tokens = 64});
  const sequence_id id = written(cache, count_up(0, 8));
  const block_id bad = cache.table(id, 0)[1];
  cache.append(id, count_up(8, 12)).value();
  cache.append(id, count_up(20, 4)).value();  // it is behind the window now
  REQUIRE(cache.table(id, 0)[1] == null_block);
  CHECK(cache.invalidate(bad).value() == 1);
  CHECK(cache.prefix_tokens(id) == 8);
  CHECK(cache.commit(id).value() == 0);
  CHECK(cache.cached_tokens(count_up(0, 24)) == 4);  // what comes before it
  CHECK(cache.audit() == sound);
}

TEST_CASE("a fork that named its tokens has read an invalid block of which its parent has not named them") {
  const std::array groups{sliding_window({"w", 1, 16, 4}, 4)};
  cache_type cache({.groups = groups, .budget_bytes = 8192, .page_bytes = 256, .max_sequence_tokens = 64});
  const sequence_id parent = written(cache, count_up(1, 4));
  const sequence_id other = written(cache, count_up(500, 12));
  cache.extend(parent, 4).value();
  const block_id bad = cache.table(parent, 0)[1];
  const sequence_id fork = cache.fork(parent).value();
  cache.name_tokens(fork, count_up(5, 4)).value();
  cache.append(fork, count_up(9, 12)).value();
  cache.append(fork, count_up(21, 4)).value();  // it is behind the window now
  REQUIRE(cache.table(fork, 0)[1] == null_block);
  cache.invalidate(bad).value();
  CHECK(cache.prefix_tokens(fork) == 8);
  CHECK(cache.prefix_tokens(other) == 12);
  CHECK(cache.audit() == sound);
}

TEST_CASE(
    "a sequence that has left an invalid block caches nothing after it, though a resize had dropped it") {
  const std::array groups{sliding_window({"w", 1, 16, 4}, 4)};
  cache_type cache({.groups = groups,
                    .budget_bytes = 10 * 64,
                    .page_bytes = 64,
                    .max_sequences = 5,
                    .max_sequence_tokens = 64});
  const sequence_id below = written(cache, count_up(500, 4));
  const sequence_id holder = written(cache, count_up(0, 8));
  const block_id bad = cache.table(holder, 0)[1];
  const sequence_id other = written(cache, count_up(700, 12));
  const sequence_id reader = cache.create().value();
  REQUIRE(cache.match(reader, count_up(0, 8))->tokens == 8);
  const sequence_id twin = cache.fork(other).value();
  for (const sequence_id each : {reader, twin}) {
    for (token_id first = 100; first < 112; first += 4) {
      cache.append(each, count_up(first, 4)).value();
      cache.commit(each).value();
    }
  }
  REQUIRE(cache.table(reader, 0)[1] == null_block);
  cache.resize(cache.layout().page_of(bad) * 64).value();
  REQUIRE(cache.pool().is_retiring(bad));
  REQUIRE_FALSE(cache.cached_key(bad));
  cache.invalidate(bad).value();
  CHECK(cache.prefix_tokens(holder) == 4);
  CHECK(cache.prefix_tokens(reader) == 8);
  CHECK(cache.prefix_tokens(below) == 4);
  CHECK(cache.prefix_tokens(other) == 12);
  CHECK(cache.prefix_tokens(twin) == 24);
  CHECK(cache.resize(10 * 64).value() == 0);
  cache.append(reader, count_up(112, 4)).value();
  CHECK(cache.commit(reader).value() == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE(
    "what a sequence committed is cached again once its blocks leave retiring pages, or these are back") {
  for (const bool moves_away : {true, false}) {
    CAPTURE(moves_away);
    cache_type cache = small_cache();
    const sequence_id below = written(cache, count_up(500, 60));
    const auto prompt = count_up(0, 24);
    const sequence_id holder = written(cache, prompt);
    const sequence_id twin = cache.fork(holder).value();
    cache.release(below).value();
    cache.drop_idle();
    REQUIRE(cache.cached_tokens(prompt) == 24);
    const std::uint64_t retiring = cache.resize(12 * 300).value();
    REQUIRE(retiring != 0);
    CHECK(cache.cached_tokens(prompt) == 0);
    cache.resize(12 * 300).value();
    CHECK(cache.commit(holder).value() == 0);
    CHECK(cache.commit(twin).value() == 0);
    std::array<group_copy, 32> moves{};
    if (moves_away) {
      REQUIRE(cache.evacuate(moves) != 0);
      REQUIRE(cache.stats().pages.retiring_pages == 0);
    } else {
      cache.resize(33 * 300).value();
    }
    CHECK(cache.cached_tokens(prompt) == 0);
    CHECK(cache.commit(twin).value() != 0);
    CHECK(cache.cached_tokens(prompt) == 24);
    CHECK(cache.commit(holder).value() == 0);
    CHECK(cache.audit() == sound);
  }
}

TEST_CASE("a prefix that two sequences computed outlives the one whose blocks were cached") {
  const std::array two{full_attention({"full", 1, 64, 4}), sliding_window({"w", 1, 64, 4}, 12)};
  for (const std::span<const layer_group> groups :
       {std::span(two).first(1), std::span<const layer_group>(two)}) {
    for (const bool goes_on : {true, false}) {
      cache_type cache({.groups = groups,
                        .budget_bytes = 128 * 256,
                        .page_bytes = 256,
                        .max_sequences = 4,
                        .max_sequence_tokens = 4096});
      auto text = count_up(1, 64);
      const sequence_id early = cache.create().value();
      const sequence_id late = cache.create().value();
      cache.append(early, text).value();
      cache.append(late, text).value();
      cache.commit(early).value();
      CHECK(cache.commit(late).value() == 0);
      cache.release(early).value();
      cache.drop_idle();
      if (goes_on) {
        for (token_id each = 1000; each < 1016; ++each)
          text.push_back(each);
        cache.append(late, std::span(text).subspan(64)).value();
        cache.commit(late).value();
      }
      cache.release(late).value();
      CHECK(cache.cached_tokens(text) == text.size());
      CHECK(cache.audit() == sound);
    }
  }
}

TEST_CASE("sequences longer than the chain's capacity are still cached in windows and states") {
  const std::array groups{sliding_window({"w", 1, 16, 4}, 8), state_snapshots("s", 1, 64, 4)};
  cache_type cache({.groups = groups,
                    .budget_bytes = 4096,
                    .page_bytes = 256,
                    .max_sequences = 2,
                    .max_sequence_tokens = 2000,
                    .max_chunks = 8});
  const sequence_id id = cache.create().value();
  const auto text = count_up(0, 2000);
  for (std::size_t at = 0; at < text.size(); at += 20) {
    cache.append(id, std::span(text).subspan(at, 20)).value();
    cache.commit(id).value();
  }
  CHECK(cache.cached_tokens(text) == 2000);
}

TEST_CASE("states inside a step take no memory and give no hits if only its last state is written") {
  const std::array groups{full_attention({"full", 4, 16, 16}),
                          state_snapshots("mamba", 28, 64, 512, snapshot_times::end_of_step)};
  cache_type cache({.groups = groups,
                    .budget_bytes = 1 << 22,
                    .page_bytes = 1 << 14,
                    .max_sequences = 4,
                    .max_sequence_tokens = 65'536});
  const auto prompt = count_up(1, 8192);
  CHECK(cache.cost(prompt).groups[1].new_blocks == 1);
  const sequence_id id = cache.create().value();
  const auto step = cache.append(id, prompt).value();
  CHECK(step.new_blocks == 8192 / 16 + 1);
  CHECK(held(cache, id, 1) == 1);
  cache.commit(id).value();
  for (std::uint64_t n = 512; n < 8192; n += 512)
    CHECK(cache.cached_tokens(std::span(prompt).first(static_cast<std::size_t>(n))) == 0);
  CHECK(cache.cached_tokens(prompt) == 8192);
  CHECK(cache.audit() == sound);

  // A step that begins inside a block takes the state along, and leaves nothing that could be a hit.
  const auto more = count_up(20'000, 1200);
  const auto part = cache.append(id, std::span(more).first(100)).value();
  REQUIRE(part.copies.size() == 1);
  cache.commit(id).value();
  const auto rest = cache.append(id, std::span(more).subspan(100)).value();
  REQUIRE(rest.copies.size() == 1);
  CHECK(rest.copies[0].copy.source == cache.table(id, 1)[16]);
  CHECK(rest.copies[0].copy.destination == cache.table(id, 1)[18]);
  CHECK(cache.table(id, 1)[17] == null_block);
  CHECK(cache.nearest_cuts(id, 8704).value().below ==
        0);  // the state there was overwritten by none, nor written
  cache.commit(id).value();
  auto whole = prompt;
  whole.insert(whole.end(), more.begin(), more.end());
  CHECK(cache.cached_tokens(whole) == 8192);
  CHECK(held(cache, id, 1) == 1);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a window sees its sinks, holds their blocks and needs them for a hit") {
  const std::array groups{sliding_window({"w", 1, 16, 4}, 8, 6)};
  CHECK(groups[0].sink_blocks() == 2);
  cache_type cache({.groups = groups, .budget_bytes = 8192, .page_bytes = 256, .max_sequence_tokens = 400});
  const auto text = count_up(0, 200);
  const sequence_id id = cache.create().value();
  for (std::size_t at = 0; at < text.size(); at += 20) {
    cache.append(id, std::span(text).subspan(at, 20)).value();
    cache.commit(id).value();
  }
  CHECK(held(cache, id, 0) == 2 + 2);
  CHECK(cache.table(id, 0)[0] != null_block);
  CHECK(cache.table(id, 0)[1] != null_block);
  CHECK(cache.table(id, 0)[2] == null_block);
  const sequence_id reader = cache.create().value();
  CHECK(cache.match(reader, text).value() == match_result{.tokens = 200, .blocks = 4});
  CHECK(cache.table(reader, 0)[0] == cache.table(id, 0)[0]);
  // Without one of the sinks nothing behind it is a hit.
  CHECK(cache.invalidate(cache.table(id, 0)[1]).value() > 0);
  CHECK(cache.cached_tokens(text) == 4);
  CHECK(cache.audit() == sound);

  CHECK_THROWS_WITH_AS(
      cache_type({.groups = std::array{layer_group{.name = "f", .block_bytes = 16, .sinks = 4}},
                  .budget_bytes = 8192,
                  .page_bytes = 256}),
      "layer_group f: sinks are given, but only windows have them; leave them out", argument_error);
}

TEST_CASE("tokens leave the middle of a sequence in every group, where its kinds of layers allow it") {
  const std::array groups{full_attention({"full", 1, 16, 4}), sliding_window({"w", 1, 16, 4}, 12)};
  cache_type cache({.groups = groups,
                    .budget_bytes = 1 << 14,
                    .page_bytes = 256,
                    .max_sequence_tokens = 32,
                    .name = "kv"});
  const sequence_id id = cache.create().value();
  cache.append(id, count_up(0, 32)).value();
  CHECK(cache.append(id, count_up(32, 1)).code() == errc::sequence_full);
  const std::vector<block_id> full(cache.table(id, 0).begin(), cache.table(id, 0).end());
  CHECK(cache.remove(id, {2, 16}).code() == errc::not_whole_blocks);
  CHECK(cache.remove(id, {4, 20}).value() == 8);
  CHECK(cache.tokens(id) == 16);
  CHECK(cache.prefix_tokens(id) == 4);
  CHECK(cache.table(id, 0)[0] == full[0]);
  CHECK(cache.table(id, 0)[1] == full[5]);
  cache.append(id, count_up(32, 16)).value();
  CHECK(cache.commit(id).value() == 1);  // the first block under full attention; the window's was given back
  CHECK(cache.audit() == sound);

  // A window that would look at blocks it gave up.
  const sequence_id late = written(cache, count_up(100, 32));
  CHECK(cache.remove(late, {4, 28}).error().message() ==
        "kv: tokens 4 to 28 cannot be removed from group 1: its states include them, its chunks would begin "
        "elsewhere, or its window would reach dropped tokens or lose its sinks; compute the sequence again "
        "without them");
  CHECK(cache.tokens(late) == 32);
  cache_type states = small_cache();
  const sequence_id with_states = written(states, count_up(0, 24));
  CHECK(states.remove(with_states, {0, 8}).code() == errc::cannot_remove);
  CHECK(cache.audit() == sound);
}

namespace {

struct logged_traits : hybrid_traits {
  using observer = event_log;
};

}  // namespace

TEST_CASE("an event names a parent only if its group has it, and reports where its tokens begin") {
  const std::array full_and_window{full_attention({"full", 1, 64, 16}), sliding_window({"w", 1, 64, 8}, 20)};
  const std::array full_and_states{full_attention({"full", 1, 64, 16}), state_snapshots("s", 1, 512, 32)};
  const std::array states_and_window{state_snapshots("s", 1, 512, 32), sliding_window({"w", 1, 64, 8}, 20)};
  for (const std::span<const layer_group> groups :
       {std::span<const layer_group>(full_and_window).first(1), std::span<const layer_group>(full_and_window),
        std::span<const layer_group>(full_and_states), std::span<const layer_group>(states_and_window)}) {
    for (const std::uint64_t budget : {std::uint64_t{8} << 20, std::uint64_t{40} << 10}) {
      hybrid_allocator<logged_traits> cache({.groups = groups,
                                             .budget_bytes = budget,
                                             .page_bytes = 1024,
                                             .max_sequences = 4,
                                             .max_sequence_tokens = 1024},
                                            event_log({.events = 1 << 14}));
      std::array<std::set<std::pair<std::uint64_t, std::uint64_t>>, 2> now;
      std::uint64_t next = 0;
      std::uint64_t stored = 0;
      for (std::size_t round = 0; round < 40; ++round) {
        auto prompt = count_up(1, 40 + round * 7 % 200);
        for (std::size_t i = 32 + (round % 5) * 16; i < prompt.size(); ++i)
          prompt[i] += static_cast<token_id>(1000 * (round % 6));
        const sequence_id id = cache.create().value();
        for (auto at = static_cast<std::size_t>(cache.match(id, prompt)->tokens); at < prompt.size();) {
          const std::size_t count = std::min<std::size_t>(24, prompt.size() - at);
          if (!cache.append(id, std::span(prompt).subspan(at, count))) break;
          cache.commit(id).value();
          at += count;
        }
        cache.release(id).value();
        std::vector<cache_event> batch(1 << 14);
        const event_read got = cache.observer().read(next, batch).value();
        REQUIRE(got.lost == 0);
        next = got.next;
        for (std::size_t i = 0; i < got.count; ++i) {
          const cache_event& event = batch[i];
          const std::pair key(event.key.low, event.key.high);
          if (event.kind == cache_event_kind::removed) now[event.group].erase(key);
          if (event.kind != cache_event_kind::stored) continue;
          ++stored;
          CHECK(event.first % event.tokens == 0);
          if (event.parent != block_key{}) {
            CHECK(now[event.group].contains({event.parent.low, event.parent.high}));
            CHECK(event.first != 0);
          }
          now[event.group].insert(key);
        }
      }
      CHECK(stored > 100);
    }
  }
}
