#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/event_log.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct logged : paged_traits {
  using observer = event_log;
};
using logged_cache = paged_allocator<logged>;

using key_numbers = std::pair<std::uint64_t, std::uint64_t>;
key_numbers numbers(const block_key& key) {
  return {key.high, key.low};
}

/// What a router holds: the keys it believes to be stored, with their tokens.
struct mirror {
  std::map<key_numbers, std::uint32_t> stored;
  std::uint64_t next = 0;
  std::uint64_t lost = 0;
  std::uint64_t snapshots = 0;

  void follow(const logged_cache& cache, std::span<cache_event> batch) {
    const event_read got = cache.observer().read(next, batch).value();
    lost += got.lost;
    if (got.lost != 0) {
      stored.clear();
      next = cache.observer().snapshot(
          cache, [&](const stored_key& each) { stored.emplace(numbers(each.key), each.tokens); });
      ++snapshots;
      return;
    }
    for (const cache_event& event : batch.first(got.count)) {
      CHECK(event.number == next++);
      apply(event);
    }
    CHECK(next == got.next);
  }
  void apply(const cache_event& event) {
    if (event.kind == cache_event_kind::cleared) stored.clear();
    if (event.kind == cache_event_kind::stored)
      CHECK(stored.emplace(numbers(event.key), event.tokens).second);
    if (event.kind == cache_event_kind::removed) CHECK(stored.erase(numbers(event.key)) == 1);
    if (event.kind == cache_event_kind::shared) CHECK(stored.contains(numbers(event.key)));
  }
};

std::map<key_numbers, std::uint32_t> index_of(const logged_cache& cache) {
  std::map<key_numbers, std::uint32_t> all;
  for (std::uint32_t i = 1; i < cache.max_physical_blocks(); ++i) {
    if (cache.index().contains(block_id{i}))
      all.emplace(numbers(cache.index().key(block_id{i})), cache.index().tokens(block_id{i}));
  }
  return all;
}

void serve_one(logged_cache& cache, random_numbers& random) {
  std::vector<token_id> prompt(random.below(std::uint64_t{20}));
  for (token_id& token : prompt)
    token = random.once_in(10) ? 1 : 0;
  const auto sequence = cache.create().value();
  const auto hit = cache.match(sequence, prompt).value();
  if (cache.append(sequence, std::span(prompt).subspan(hit.tokens))) cache.commit(sequence).value();
  cache.release(sequence).value();
  if (random.once_in(15)) cache.drop_idle();
  if (random.once_in(15)) cache.resize(4 + random.below(std::uint64_t{9})).value();
}

const std::array<token_id, 8> eight{1, 2, 3, 4, 5, 6, 7, 8};

}  // namespace

TEST_CASE(
    "a mirror that reads at any pace, with losses and snapshots, equals the index when it has caught up") {
  std::uint64_t lost = 0;
  std::uint64_t followed = 0;
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    logged_cache cache(
        {.blocks = 12, .block_tokens = 2},
        event_log({.events = 1 + random.below(std::uint64_t{40}), .shares = random.once_in(2)}));
    std::vector<cache_event> batch(1 + random.below(std::uint64_t{12}));
    mirror router;
    for (int i = 0; i < 120; ++i) {
      serve_one(cache, random);
      for (std::uint64_t reads = random.below(std::uint64_t{4}); reads > 0; --reads)
        router.follow(cache, batch);
      if (router.next == cache.observer().end()) CHECK(router.stored == index_of(cache));
    }
    while (router.next != cache.observer().end())
      router.follow(cache, batch);
    CHECK(router.stored == index_of(cache));
    CHECK(router.next >= router.lost);
    lost += router.lost;
    followed += router.next - router.lost;
  }
  CHECK(lost > 1000);
  CHECK(followed > 10'000);
}

TEST_CASE("an event has key, parent, context, block, tokens and their position") {
  logged_cache cache({.blocks = 4, .block_tokens = 4}, event_log({.events = 8, .group = 3, .medium = 2}));
  const prefix_context context{.salt = {7, 8}, .extra_keys = {9, 0}};
  const auto sequence = cache.create(context).value();
  cache.append(sequence, eight).value();
  cache.commit(sequence).value();
  const auto held = cache.blocks(sequence);
  std::array<cache_event, 8> out{};
  CHECK(cache.observer().read(0, out).value() == event_read{.count = 2, .first = 0, .lost = 0, .next = 2});
  const block_key first = cache.index().key(held[0]);
  CHECK(out[0] == cache_event{.number = 0,
                              .key = first,
                              .context = context,
                              .block = held[0],
                              .tokens = 4,
                              .group = 3,
                              .kind = cache_event_kind::stored,
                              .medium = 2});
  CHECK(out[1].parent == first);
  CHECK(out[1].number == 1);

  const block_key second = cache.index().key(held[1]);
  cache.release(sequence).value();
  CHECK(cache.drop_idle() == 2);
  CHECK(cache.observer().read(2, out).value().count == 2);
  CHECK(out[0].kind == cache_event_kind::removed);
  CHECK(out[0].key == second);  // tails are given up first
  CHECK(out[0].medium == 2);
}

TEST_CASE(
    "a reader that fell behind learns how many events are lost, and continues from the oldest one kept") {
  event_log log({.events = 4});
  for (int i = 0; i < 7; ++i)
    log.clear();
  std::array<cache_event, 3> out{};
  CHECK(log.begin() == 3);
  CHECK(log.end() == 7);
  CHECK(log.read(1, out).value() == event_read{.count = 3, .first = 3, .lost = 2, .next = 6});
  CHECK(out[0].number == 3);
  CHECK(out[2].number == 5);
  CHECK(log.read(3, out).value().lost == 0);
  CHECK(log.read(7, out).value() == event_read{.count = 0, .first = 7, .lost = 0, .next = 7});
}

TEST_CASE("a log that replaces another continues its numbers, with a cleared event") {
  event_log before({.events = 4});
  before.clear();
  event_log after({.events = 4, .first = before.end()});
  std::array<cache_event, 4> out{};
  CHECK(after.read(1, out).value() == event_read{.count = 1, .first = 1, .lost = 0, .next = 2});
  CHECK(out[0].kind == cache_event_kind::cleared);
  CHECK(after.read(0, out).value().lost == 1);
}

TEST_CASE("a number from another log is refused") {
  const event_log log({.events = 4, .name = "router feed"});
  std::array<cache_event, 4> out{};
  CHECK(log.read(1, out).error().message() == "router feed: 1 requested, but the highest allowed is 0");
}

TEST_CASE("shares and moves are logged on request only") {
  for (const bool asked : {false, true}) {
    logged_cache cache({.blocks = 8, .block_tokens = 4},
                       event_log({.events = 16, .shares = asked, .moves = asked}));
    const auto sequence = cache.create().value();
    cache.append(sequence, eight).value();
    cache.commit(sequence).value();
    const auto other = cache.create().value();
    CHECK(cache.match(other, eight).value().blocks == 2);
    const block_id from = cache.blocks(sequence)[0];
    const std::array moves{block_move{from, block_id{8}}};
    CHECK(cache.compact(moves, [](std::span<const block_move>) noexcept { return true; }).value() == 1);
    std::array<cache_event, 16> out{};
    const event_read got = cache.observer().read(0, out).value();
    CHECK(got.count == (asked ? 5U : 2U));
    if (!asked) continue;
    CHECK(out[2].kind == cache_event_kind::shared);
    CHECK(out[2].key == out[0].key);
    CHECK(out[4].kind == cache_event_kind::moved);
    CHECK(out[4].block == from);
    CHECK(out[4].to == block_id{8});
  }
}

TEST_CASE("a log of 0 events, or of too many, is refused with both numbers") {
  CHECK_THROWS_WITH_AS(event_log({.events = 0}), "event_log: 0 events; use 1 to 4294967296", length_error);
  CHECK_THROWS_WITH_AS(event_log({.events = 4'294'967'297, .name = "feed"}),
                       "feed: 4294967297 events; use 1 to 4294967296", length_error);
}

TEST_CASE("neither writers nor readers of a log allocate") {
  event_log log({.events = 4});
  std::array<cache_event, 4> out{};
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 10; ++i)
    log.on_dropped(block_id{1}, {});
  static_cast<void>(log.read(0, out));
  CHECK(heap_allocations() == before);
}
