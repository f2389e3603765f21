#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = hybrid_allocator<>;

}  // namespace

TEST_CASE("if forks grow in one batch, all but the last get their own copies") {
  cache_type cache = small_cache();
  const auto one = cache.create().value();
  cache.append(one, count_up(0, 10)).value();
  const auto two = cache.fork(one).value();
  const auto three = cache.fork(one).value();
  const auto token = count_up(50, 1);
  const std::array batch{hybrid_growth{two, token}, hybrid_growth{one, token}, hybrid_growth{three, token}};
  std::array<hybrid_append, 3> out{};
  cache.append_batch(batch, out).value();
  CHECK(out[0].copies.size() == 3);
  CHECK(out[1].copies.size() == 3);
  CHECK(out[2].copies.empty());
  CHECK(out[0].copies[0].copy.destination == cache.table(two, 0)[2]);
  CHECK(out[1].copies[2].copy.destination == cache.table(one, 2)[1]);
  CHECK(out[0].copies[1].copy.source == cache.table(three, 1)[2]);
  CHECK(out[1].new_blocks == 3);
  CHECK(out[2].first == 10);
  CHECK(cache.tokens(three) == 11);
  CHECK(cache.stats().copies == 6);
  CHECK(cache.audit().empty());
}

TEST_CASE("a batch that one group cannot serve grows no sequence, and reports the shortage of all groups") {
  cache_type cache = small_cache(6);
  const auto one = cache.create().value();
  const auto two = cache.create().value();
  const auto tokens = count_up(0, 16);
  const std::array batch{hybrid_growth{one, tokens}, hybrid_growth{two, tokens}};
  std::array<hybrid_append, 2> out{};
  // 8 blocks of the first take 2 pages, 8 of the second 3: the third gets 1 of 4.
  CHECK(cache.append_batch(batch, out).error().message() ==
        "kv: group 2 needs 4 blocks, but 1 are available to it; release sequences, or build it with a larger "
        "budget");
  CHECK(cache.stats().pages.allocations == 0);
  CHECK(cache.stats().tokens == 0);
  CHECK(cache.audit().empty());
  const std::array less{hybrid_growth{one, std::span(tokens).first(8)}, hybrid_growth{two, {}}};
  cache.append_batch(less, out).value();
  CHECK(out[1].new_blocks == 0);
  CHECK(cache.tokens(one) == 8);
}

TEST_CASE("a batch leaves the requested reserve of each group") {
  cache_type cache = small_cache(6);
  const auto one = cache.create().value();
  const auto tokens = count_up(0, 8);
  const std::array batch{hybrid_growth{one, tokens}};
  std::array<hybrid_append, 1> out{};
  // The batch takes a page of each group; 3 are left.
  std::array<std::uint64_t, 3> leave{5, 1, 4};
  CHECK(cache.append_batch(batch, out, leave).error() ==
        failure{.code = errc::out_of_group_blocks, .index = 2, .wanted = 5, .found = 4, .where = "kv"});
  leave = {5, 1, 3};
  cache.append_batch(batch, out, leave).value();
  std::array<group_shortage, 3> lacks{};
  CHECK(cache.pool().shortage(leave, lacks));
  leave = {~std::uint64_t{0}, 0, 0};
  CHECK(cache.append_batch({}, {}, leave).code() == errc::out_of_group_blocks);
  leave = {};
  cache.append_batch({}, {}, leave).value();
}

TEST_CASE("an impossible batch is refused by name") {
  cache_type cache = small_cache();
  const auto one = cache.create().value();
  const auto token = count_up(0, 1);
  const auto many = count_up(0, 101);
  std::array<hybrid_append, 2> out{};
  std::array batch{hybrid_growth{one, token}, hybrid_growth{one, token}};
  CHECK(cache.append_batch(batch, out).error().message() ==
        "kv: sequence 0 is listed again at place 1 of a batch of 2; put its tokens into one entry");
  CHECK(cache.append_batch(batch, std::span(out).first(1)).code() == errc::size_mismatch);
  const std::array<std::uint64_t, 2> leave{};
  CHECK(cache.append_batch(batch, out, leave).error() ==
        failure{.code = errc::size_mismatch, .index = 0, .wanted = 2, .found = 3, .where = "kv"});
  batch[1] = {};
  CHECK(cache.append_batch(batch, out).code() == errc::null_handle);
  batch[1] = {cache.create().value(), many};
  CHECK(cache.append_batch(batch, out).code() == errc::sequence_full);
  CHECK(cache.tokens(one) == 0);
  CHECK(cache.audit().empty());
}

TEST_CASE("the cost of a prompt is reported group by group") {
  cache_type cache = small_cache();
  const auto prompt = count_up(0, 30);
  CHECK(cache.cost(prompt) == hybrid_cost{.cached_tokens = 0, .groups = {{{0, 0, 8}, {0, 0, 8}, {0, 0, 4}}}});
  const auto first = cache.create().value();
  cache.append(first, prompt).value();
  cache.commit(first).value();
  // The sequence has left the window's blocks and the state of 24 behind.
  CHECK(cache.cost(prompt) ==
        hybrid_cost{.cached_tokens = 24, .groups = {{{6, 0, 2}, {2, 2, 2}, {1, 1, 1}}}});
  cache.release(first).value();
  const hybrid_cost idle = cache.cost(prompt);
  CHECK(idle.groups[0] == group_cost{6, 6, 2});
  CHECK(idle.groups[0].needed() == 8);
  CHECK(cache.cost(prompt, {.salt = {1, 0}}).cached_tokens == 0);
  CHECK(cache.cost({}) == hybrid_cost{});
}

TEST_CASE("batches, truncations and fences allocate nothing from the heap") {
  cache_type cache = small_cache(20);
  host_timeline stream;
  random_numbers random(1);
  const auto prompt = count_up(0, 60);
  std::array<hybrid_growth, 3> batch{};
  std::array<hybrid_append, 3> out{};
  std::uint64_t grown = 0;
  std::uint64_t cut = 0;
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 2'000; ++i) {
    const auto one = *cache.create({.salt = {random.below(std::uint64_t{20}), 0}});
    static_cast<void>(cache.match(one, std::span(prompt).first(40)));
    batch[0] = {one, std::span(prompt).first(1 + random.below(std::size_t{6}))};
    batch[1] = {*cache.fork(one), std::span(prompt).first(1)};
    batch[2] = {*cache.fork(one), std::span(prompt).first(1)};
    for (int step = 0; step < 4; ++step) {
      if (!cache.append_batch(batch, out)) break;
      ++grown;
      static_cast<void>(cache.read_until(one, stream.issue()));
      cut += cache.truncate(one, cache.tokens(one) - random.below(std::uint64_t{3})) ? 1U : 0U;
      static_cast<void>(cache.commit(one));
    }
    static_cast<void>(cache.cost(prompt));
    for (const hybrid_growth& each : batch)
      static_cast<void>(cache.release_after(each.sequence, stream.issue()));
    static_cast<void>(stream.pass(stream.issue()));
    cache.collect();
  }
  CHECK(heap_allocations() == before);
  CHECK(grown > 1'000);
  CHECK(cut > 1'000);
  CHECK(cache.audit().empty());
}
