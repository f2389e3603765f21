/// Tokens whose values come later, equal blocks, kept blocks and hints in a cache with groups of layers.
#include <llmmem/eviction/min.hpp>
#include <llmmem/eviction/retention.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = hybrid_allocator<>;
const std::vector<std::string> sound{};

template <class Eviction>
struct with_eviction : hybrid_traits {
  using eviction = Eviction;
};

/// Two pages of two blocks of full attention, and the null page.
template <class Eviction>
hybrid_allocator<with_eviction<Eviction>> four_blocks() {
  const std::array groups{full_attention({"full", 1, 10, 4})};
  return hybrid_allocator<with_eviction<Eviction>>({.groups = groups,
                                                    .budget_bytes = 3 * 80,
                                                    .page_bytes = 80,
                                                    .max_sequences = 4,
                                                    .max_sequence_tokens = 16,
                                                    .name = "kv"});
}

/// Calls that `paged_allocator` has and that docs/layer_groups.md says make no sense for groups.
template <class Cache>
constexpr bool has_calls_of_one_size =
    requires(Cache& cache, sequence_id sequence, const keyed_blocks& keyed,
             std::span<const block_move> moves) { cache.match(sequence, keyed); } ||
    requires(Cache& cache, sequence_id sequence, const keyed_blocks& keyed) {
      cache.commit(sequence, keyed);
    } || requires(Cache& cache) { cache.compaction_facts_now(); } ||
    requires(Cache& cache) { cache.block_tokens(); };
static_assert(!has_calls_of_one_size<cache_type>);

}  // namespace

TEST_CASE("tokens without values are cached in every group once they have them, also after a batch") {
  cache_type cache = small_cache();
  const std::vector<token_id> all = count_up(1, 16);
  const sequence_id one = cache.create().value();
  cache.append(one, std::span(all).first(6)).value();
  CHECK(cache.extend(one, 2)->first == 6);
  CHECK(cache.commit(one).value() == 2);  // the first block of full attention and of the window
  CHECK(cache.cached_tokens(all) == 0);
  CHECK(cache.name_tokens(one, std::span(all).subspan(6, 3)).error().message() ==
        "kv: 9 tokens named, but sequence 0 holds 8; name fewer, or append them first");
  REQUIRE(cache.name_tokens(one, std::span(all).subspan(6, 1)));
  CHECK(cache.commit(one).value() == 0);
  REQUIRE(cache.name_tokens(one, std::span(all).subspan(7, 1)));
  CHECK(cache.commit(one).value() == 3);
  CHECK(cache.cached_tokens(all) == 8);

  const std::array batch{hybrid_growth{one, std::span(all).subspan(8, 5), 3}};
  std::array<hybrid_append, 1> out{};
  std::array<group_shortage, 3> lacks{};
  CHECK_FALSE(cache.shortage(batch, lacks).value());
  CHECK(lacks[0].wanted == 2);
  REQUIRE(cache.append_batch(batch, out));
  CHECK(cache.tokens(one) == 16);
  REQUIRE(cache.name_tokens(one, std::span(all).subspan(13)));
  REQUIRE(cache.commit(one));
  CHECK(cache.cached_tokens(all) == 16);
  CHECK(cache.name_tokens({}, all).code() == errc::null_handle);
  const std::array huge{hybrid_growth{one, {}, ~std::uint64_t{0}}};
  CHECK(cache.append_batch(huge, out).code() == errc::sequence_full);
  CHECK(cache.extend(one, ~std::uint64_t{0}).code() == errc::sequence_full);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a limit of releases keeps a cut into a committed draft possible") {
  for (const bool limited : {false, true}) {
    CAPTURE(limited);
    const std::array groups{sliding_window({"local", 1, 25, 4}, 6)};
    cache_type cache({.groups = groups,
                      .budget_bytes = 33 * 300,
                      .page_bytes = 300,
                      .max_sequences = 4,
                      .max_sequence_tokens = 100,
                      .name = "kv"});
    const sequence_id sequence = cache.create().value();
    cache.append(sequence, count_up(1, 20)).value();
    cache.commit(sequence).value();
    if (limited) REQUIRE(cache.limit_releases(sequence, 20));
    cache.append(sequence, count_up(21, 12)).value();
    cache.commit(sequence).value();
    CHECK(cache.truncate(sequence, 21).has_value() == limited);
    if (!limited) continue;
    REQUIRE(cache.limit_releases(sequence, unlimited));
    cache.append(sequence, count_up(60, 12)).value();
    cache.commit(sequence).value();
    CHECK(cache.table(sequence, 0)[5] == null_block);  // released again
    CHECK(cache.audit() == sound);
  }
  cache_type cache = small_cache();
  CHECK(cache.limit_releases({}, 1).code() == errc::null_handle);
}

TEST_CASE("a sequence gives its own blocks up for equal cached ones, behind a fence if kernels read them") {
  cache_type cache = small_cache();
  const std::vector<token_id> tokens = count_up(1, 16);
  const sequence_id first = cache.create().value();
  const sequence_id second = cache.create().value();
  for (const sequence_id each : {first, second}) {
    cache.append(each, tokens).value();
    cache.commit(each).value();
  }
  const std::uint64_t active = cache.stats().pages.active_bytes;
  host_timeline stream;
  const host_fence reads = stream.issue();
  // Four blocks of full attention, two of the window, a state.
  CHECK(cache.deduplicate_after(second, reads).value() == 7);
  CHECK(cache.stats().deduplicated == 7);
  CHECK(cache.stats().deferred == 7);
  CHECK(cache.stats().pages.active_bytes == active);
  for (std::size_t g = 0; g < 3; ++g)
    CHECK(cache.table(first, g).back() == cache.table(second, g).back());
  stream.pass(reads).value();
  cache.collect();
  CHECK(cache.stats().pages.active_bytes < active);
  CHECK(cache.deduplicate(second).value() == 0);
  CHECK(cache.deduplicate({}).code() == errc::null_handle);
  CHECK(cache.audit() == sound);
}

TEST_CASE("contents of higher priority stay, by the hints of a request or of a range") {
  for (const bool by_range : {false, true}) {
    CAPTURE(by_range);
    auto cache = four_blocks<retention_eviction>();
    CHECK(cache.create({}, {.keep = {.priority = 101}}).code() == errc::bad_priority);
    const retention keep{.priority = 90};
    for (const token_id first : {1, 100}) {
      const sequence_id sequence =
          cache.create({}, first == 1 && !by_range ? request_hints{.keep = keep} : request_hints{}).value();
      cache.append(sequence, count_up(first, 8)).value();
      cache.commit(sequence).value();
      if (first == 1 && by_range) REQUIRE(cache.retain(sequence, {0, 8}, keep));
      CHECK(cache.retain(sequence, {3, 3}, keep).code() == errc::empty_range);
      CHECK(cache.retain(sequence, {}, {.priority = 101}).code() == errc::bad_priority);
      cache.release(sequence).value();
    }
    cache.append(cache.create().value(), count_up(200, 8)).value();
    CHECK(cache.cached_tokens(count_up(1, 8)) == 8);
    CHECK(cache.cached_tokens(count_up(100, 8)) == 0);
  }
  // A priority that ends: the time is the caller's.
  auto cache = four_blocks<retention_eviction>();
  for (const token_id first : {1, 100}) {
    const sequence_id sequence = cache.create().value();
    cache.append(sequence, count_up(first, 8)).value();
    cache.commit(sequence).value();
    if (first == 1) REQUIRE(cache.retain(sequence, {}, {.priority = 90, .until = 5}));
    cache.release(sequence).value();
  }
  cache.advance(6);
  cache.append(cache.create().value(), count_up(200, 8)).value();
  CHECK(cache.cached_tokens(count_up(1, 8)) == 0);
}

TEST_CASE("a policy learns which contents a waiting request will read") {
  for (const token_id wanted : {1, 100}) {
    CAPTURE(wanted);
    auto cache = four_blocks<min_eviction>();
    for (const token_id first : {1, 100}) {
      const sequence_id sequence = cache.create().value();
      cache.append(sequence, count_up(first, 8)).value();
      cache.commit(sequence).value();
      cache.release(sequence).value();
    }
    CHECK(cache.expect(count_up(500, 8), {}, 3) == 0);
    CHECK(cache.expect(count_up(wanted, 12), {}, 3) == 8);
    cache.append(cache.create().value(), count_up(200, 8)).value();
    CHECK(cache.cached_tokens(count_up(1, 8)) == (wanted == 1 ? 8 : 0));
    CHECK(cache.cached_tokens(count_up(100, 8)) == (wanted == 1 ? 0 : 8));
  }
}
