#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = hybrid_allocator<>;

std::vector<bool> held(const cache_type& cache, sequence_id sequence, std::size_t group) {
  std::vector<bool> out;
  for (const block_id block : cache.table(sequence, group))
    out.push_back(block != null_block);
  return out;
}

}  // namespace

TEST_CASE("tables keep their length, with null blocks for tokens that no layer reads any longer") {
  cache_type cache = small_cache();
  const auto sequence = cache.create().value();
  const auto room = cache.append(sequence, count_up(0, 18)).value();
  CHECK(room.new_blocks == 5 + 5 + 3);
  CHECK(room.copies.empty());
  cache.commit(sequence).value();
  CHECK(held(cache, sequence, 0) == std::vector<bool>(5, true));
  CHECK(held(cache, sequence, 1) == std::vector{false, false, false, true, true});  // 13 to 17 are looked at
  CHECK(held(cache, sequence, 2) == std::vector{false, false, true});
  CHECK(cache.stats().pages.active_bytes == 5 * 40 + 2 * 100 + 300);
  CHECK(cache.stats().pages.idle_bytes == 3 * 100 + 2 * 300);
  CHECK(cache.stats().released_early == 5);
  CHECK(cache.audit().empty());
}

TEST_CASE("a hit is as long as every group can serve, and takes from each what the next token attends to") {
  cache_type cache = small_cache();
  const auto first = cache.create().value();
  const auto prompt = count_up(0, 30);
  cache.append(first, prompt).value();
  cache.commit(first).value();
  cache.release(first).value();

  const auto second = cache.create().value();
  CHECK(cache.cached_tokens(prompt) == 24);  // full and window reach 28, the last state is that of 24
  const auto hit = cache.match(second, prompt).value();
  CHECK(hit == match_result{.tokens = 24, .blocks = 6 + 2 + 1});
  CHECK(held(cache, second, 1) == std::vector{false, false, false, false, true, true});
  CHECK(held(cache, second, 2) == std::vector{false, false, true});
  // The state goes on in a block of its own; what was kept stays.
  const block_id kept = cache.table(second, 2)[2];
  const auto room = cache.append(second, std::span(prompt).subspan(24)).value();
  REQUIRE(room.copies.size() == 1);
  CHECK(room.copies[0] ==
        group_copy{2, {.source = kept, .destination = cache.table(second, 2)[3], .tokens = 8}});
  CHECK(cache.audit().empty());
}

TEST_CASE("different contexts share no blocks, regardless of the tokens") {
  cache_type cache = small_cache();
  const auto one = cache.create({.salt = {1, 0}}).value();
  cache.append(one, count_up(0, 16)).value();
  cache.commit(one).value();
  CHECK(cache.cached_tokens(count_up(0, 16), {.salt = {1, 0}}) == 16);
  CHECK(cache.cached_tokens(count_up(0, 16), {.salt = {2, 0}}) == 0);
}

TEST_CASE("twins copy in each group the block that both would write, and states completely") {
  cache_type cache = small_cache();
  const auto one = cache.create().value();
  cache.append(one, count_up(0, 10)).value();
  const auto two = cache.fork(one).value();
  const auto room = cache.append(two, count_up(0, 1)).value();
  REQUIRE(room.copies.size() == 3);
  CHECK(room.new_blocks == 3);
  CHECK(room.copies[0].copy.tokens == 2);
  CHECK(room.copies[1].copy.tokens == 2);
  CHECK(room.copies[2].copy.tokens == 8);
  CHECK(room.copies[2].copy.source == cache.table(one, 2)[1]);
  CHECK(cache.append(one, count_up(0, 1)).value().copies.empty());
  CHECK(cache.stats().copies == 3);
  CHECK(cache.audit().empty());
}

TEST_CASE("an append that one group cannot serve changes no group, and reports which group lacks what") {
  cache_type cache = small_cache(4);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 8)).value();  // a page of each
  std::array<group_shortage, 3> lacks{};
  CHECK(cache.shortage(sequence, 12, lacks).value());
  CHECK(lacks[0].missing() == 0);
  CHECK(lacks[1].missing() == 0);
  CHECK(lacks[1].pages == 1);
  CHECK(lacks[2].missing() == 2);
  const auto none = cache.append(sequence, count_up(8, 12));
  CHECK(none.error().message() ==
        "kv: group 2 needs 2 blocks, but 0 are available to it; release sequences, or build it with a larger "
        "budget");
  CHECK(cache.tokens(sequence) == 8);
  CHECK(cache.stats().pages.free_pages == 1);
  CHECK(cache.audit().empty());
  cache.append(sequence, count_up(8, 4)).value();
}

TEST_CASE("kernels get tables in units, with zeros for missing blocks") {
  cache_type cache = small_cache();
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 18)).value();
  cache.commit(sequence).value();
  CHECK(cache.layout().unit == 20);
  std::array<std::int32_t, 7> out{};
  out.fill(-1);
  CHECK(cache.write_table(sequence, 1, out).value() == 5);
  CHECK(out[0] == 0);
  CHECK(out[6] == 0);
  CHECK(std::uint64_t(out[4]) * 20 == cache.pool().offset(cache.table(sequence, 1)[4]));
  CHECK(cache.write_table(sequence, 1, std::span(out).first(4)).code() == errc::size_mismatch);
}

TEST_CASE("a full prefix chain makes space by evicting idle blocks") {
  const std::array groups{full_attention({"full", 1, 10, 4})};
  cache_type cache({.groups = groups,
                    .budget_bytes = 4000,
                    .page_bytes = 400,
                    .max_sequence_tokens = 20,
                    .max_chunks = 5,
                    .name = "kv"});
  for (token_id first = 0; first < 10; ++first) {
    const auto sequence = cache.create().value();
    cache.append(sequence, count_up(first * 100, 16)).value();
    cache.commit(sequence).value();
    CHECK(cache.cached_tokens(count_up(first * 100, 16)) == 16);
    cache.release(sequence).value();
    CHECK(cache.stats().chunks <= 5);
  }
  CHECK(cache.audit().empty());
}

TEST_CASE("what cannot be is refused by name") {
  cache_type cache = small_cache();
  CHECK(cache.append({}, count_up(0, 1)).code() == errc::null_handle);
  const auto sequence = cache.create().value();
  CHECK(cache.append(sequence, count_up(0, 101)).error().message() ==
        "kv: sequence 0 would hold 101 tokens, more than the 100 allowed; raise max_sequence_tokens, or "
        "blocks");
  CHECK(cache.commit(sequence, 1).code() == errc::past_the_end);
  cache.append(sequence, count_up(0, 1)).value();
  CHECK(cache.match(sequence, count_up(0, 1)).code() == errc::not_fresh);
  cache.release(sequence).value();
  CHECK(cache.release(sequence).code() == errc::stale_handle);
  CHECK(cache.table(sequence, 0).empty());

  CHECK_THROWS_WITH_AS(cache_type({.name = "kv"}), "kv: 0 groups; use 1 to 16", length_error);
  CHECK_THROWS_WITH_AS(
      cache_type({.groups = three_kinds, .budget_bytes = 900, .page_bytes = 200, .name = "kv"}),
      "kv: blocks of 300 bytes in group 2; use 1 to the bytes of a page, 200", length_error);
  CHECK_THROWS_WITH_AS(
      cache_type(
          {.groups = three_kinds, .budget_bytes = 900, .page_bytes = 300, .max_sequences = 0, .name = "kv"}),
      "kv: max_sequences is 0; at least 1 is needed", length_error);
}

TEST_CASE("nothing is allocated from the heap after construction") {
  cache_type cache = small_cache(20);
  random_numbers random(1);
  const auto prompt = count_up(0, 60);
  std::array<group_shortage, 3> lacks{};
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 2'000; ++i) {
    const auto sequence = cache.create({.salt = {random.below(std::uint64_t{20}), 0}});
    const auto hit = cache.match(*sequence, prompt);
    for (std::uint64_t at = hit->tokens; at < 33; at += 5) {
      static_cast<void>(cache.shortage(*sequence, 5, lacks));
      if (!cache.append(*sequence, std::span(prompt).subspan(at, 5))) break;
      if (!random.once_in(5)) static_cast<void>(cache.commit(*sequence));
    }
    const auto twin = cache.fork(*sequence);
    static_cast<void>(cache.append(*twin, std::span(prompt).first(3)));
    static_cast<void>(cache.release(*twin));
    static_cast<void>(cache.release(*sequence));
  }
  CHECK(heap_allocations() == before);
  CHECK(cache.stats().pages.evictions > 1'000);
  CHECK(cache.stats().hit_tokens > 1'000);
  CHECK(cache.stats().copies > 100);
}
