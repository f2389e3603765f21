#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

using namespace llmmem;

namespace {

using cache_type = hybrid_allocator<>;

std::vector<token_id> count_up(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Blocks of 4 tokens; states every 8.
const layer_group full = full_attention({"full", 1, 10, 4});
const layer_group local = sliding_window({"local", 1, 25, 4}, 6);
const layer_group chunked = chunked_local({"chunked", 1, 25, 4}, 8);
const layer_group mamba = state_snapshots("mamba", 1, 300, 8);

cache_type cache_of(std::span<const layer_group> groups) {
  return cache_type({.groups = groups,
                     .budget_bytes = 12'000,
                     .page_bytes = 300,
                     .max_sequences = 4,
                     .max_sequence_tokens = 100,
                     .name = "kv"});
}

/// The lengths from 1 to the present one that a sequence can be cut to.
std::vector<std::uint64_t> cuts(const cache_type& cache, sequence_id sequence) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t n = 1; n <= cache.tokens(sequence); ++n) {
    if (cache.nearest_cuts(sequence, n).value() == paging::cut_points{.below = n, .above = n})
      out.push_back(n);
  }
  return out;
}

}  // namespace

TEST_CASE("a rejected draft is truncated under full attention, a window and a chunk") {
  const std::array groups{full, local, chunked};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 18)).value();
  cache.commit(sequence).value();
  const std::uint64_t active = cache.stats().pages.active_bytes;
  cache.append(sequence, count_up(100, 7)).value();  // the draft: 18 to 24
  cache.truncate(sequence, 19).value();              // one of it was right
  CHECK(cache.tokens(sequence) == 19);
  CHECK(cache.stats().tokens == 19);
  CHECK(cache.table(sequence, 0).size() == 5);
  CHECK(cache.stats().pages.active_bytes == active);
  CHECK(cache.append(sequence, count_up(50, 1)).value().first == 19);
  CHECK(cache.commit(sequence).value() == 3);  // block 4 of each
  auto as_it_is = count_up(0, 18);
  as_it_is.insert(as_it_is.end(), {100, 50});
  CHECK(cache.cached_tokens(as_it_is) == 20);
  CHECK(cache.audit().empty());
}

TEST_CASE("blocks that left a window cannot be restored, and the refusal reports the possible lengths") {
  const std::array groups{full, local};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 18)).value();
  CHECK(cuts(cache, sequence).size() == 18);  // nothing was given back yet
  cache.commit(sequence).value();
  CHECK(cuts(cache, sequence) == std::vector<std::uint64_t>{17, 18});  // the token at 17 looks at 12
  const auto refused = cache.truncate(sequence, 16);
  CHECK(refused.error() ==
        failure{.code = errc::not_kept, .index = 1, .wanted = 16, .found = 17, .where = "kv"});
  CHECK(refused.error().message() ==
        "kv: group 1 no longer has the contents needed to continue after 16 tokens; cut to 17, or to the "
        "shorter length that nearest_cuts() returns, and compute the rest again");
  CHECK(cache.nearest_cuts(sequence, 16).value() == paging::cut_points{.below = 0, .above = 17});
  CHECK(cache.tokens(sequence) == 18);
  CHECK(cache.audit().empty());
  cache.truncate(sequence, 17).value();
  CHECK(cuts(cache, sequence) == std::vector<std::uint64_t>{17});
}

TEST_CASE("a chunked sequence can be truncated to within the present chunk, and to where any chunk begins") {
  const std::array groups{full, chunked};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 20)).value();
  cache.commit(sequence).value();
  CHECK(cuts(cache, sequence) == std::vector<std::uint64_t>{8, 16, 17, 18, 19, 20});
  CHECK(cache.nearest_cuts(sequence, 13).value() == paging::cut_points{.below = 8, .above = 16});
  cache.truncate(sequence, 8).value();
  CHECK(cache.table(sequence, 1)[1] == null_block);
  cache.append(sequence, count_up(0, 1)).value();
  CHECK(cache.table(sequence, 1)[2] != null_block);
  CHECK(cache.audit().empty());
}

TEST_CASE("states can be truncated to the ends of blocks that the last append filled, and to 0") {
  const std::array groups{full, mamba};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 18)).value();
  CHECK(cuts(cache, sequence) == std::vector<std::uint64_t>{8, 16, 18});
  CHECK(cache.truncate(sequence, 17).error() ==
        failure{.code = errc::not_kept, .index = 1, .wanted = 17, .found = 18, .where = "kv"});
  const block_id kept = cache.table(sequence, 1)[1];
  cache.truncate(sequence, 16).value();
  // It goes on from the snapshot there.
  const auto again = cache.append(sequence, count_up(16, 1)).value();
  REQUIRE(again.copies.size() == 1);
  CHECK(again.copies[0] ==
        group_copy{1, {.source = kept, .destination = cache.table(sequence, 1)[2], .tokens = 8}});
  cache.commit(sequence).value();
  CHECK(cuts(cache, sequence) == std::vector<std::uint64_t>{17});
  CHECK(cache.audit().empty());
}

TEST_CASE("a draft on a fork can be truncated regardless of what the groups keep") {
  const std::array groups{full, local, mamba};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 18)).value();
  cache.commit(sequence).value();
  const auto draft = cache.fork(sequence).value();
  CHECK(cache.append(draft, count_up(100, 4)).value().copies.size() == 3);
  cache.release(draft).value();
  CHECK(cache.append(sequence, count_up(18, 2)).value().copies.empty());
  CHECK(cache.audit().empty());
}

TEST_CASE("cached contents survive a truncation into them until the sequence writes there") {
  const std::array groups{full, local};
  cache_type cache = cache_of(groups);
  const auto prompt = count_up(0, 12);
  const auto sequence = cache.create().value();
  cache.append(sequence, prompt).value();
  cache.commit(sequence, 8).value();
  cache.truncate(sequence, 7).value();
  CHECK(cache.cached_tokens(prompt) == 8);
  CHECK(cache.append(sequence, count_up(100, 1)).value().copies.empty());
  CHECK(cache.cached_tokens(prompt) == 4);
  CHECK(cache.commit(sequence).value() == 2);
  CHECK(cache.audit().empty());
}

TEST_CASE("cached contents that another sequence holds stay, and the truncated sequence gets a copy") {
  const std::array groups{full, local};
  cache_type cache = cache_of(groups);
  const auto prompt = count_up(0, 12);
  const auto sequence = cache.create().value();
  cache.append(sequence, prompt).value();
  cache.commit(sequence, 8).value();
  const auto other = cache.create().value();
  CHECK(cache.match(other, prompt).value().tokens == 8);
  cache.truncate(sequence, 7).value();
  const block_id shared = cache.table(other, 0)[1];
  const auto grown = cache.append(sequence, count_up(100, 1)).value();
  REQUIRE(grown.copies.size() == 2);
  CHECK(grown.copies[0] ==
        group_copy{0, {.source = shared, .destination = cache.table(sequence, 0)[1], .tokens = 3}});
  CHECK(cache.cached_tokens(prompt) == 8);
  CHECK(cache.audit().empty());
}

TEST_CASE("a sequence truncated to 0 tokens is like a new one") {
  const std::array groups{full, local, chunked, mamba};
  cache_type cache = cache_of(groups);
  const auto prompt = count_up(0, 30);
  const auto sequence = cache.create().value();
  cache.append(sequence, prompt).value();
  cache.commit(sequence).value();
  cache.truncate(sequence, 0).value();
  CHECK(cache.stats().pages.active_bytes == 0);
  CHECK(cache.match(sequence, prompt).value().tokens == 24);
  CHECK(cache.audit().empty());
}

TEST_CASE("a truncation past the end, or of an invalid sequence, is refused by name") {
  const std::array groups{full};
  cache_type cache = cache_of(groups);
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 5)).value();
  CHECK(cache.truncate(sequence, 6).error().message() ==
        "kv: 6 tokens named, but sequence 0 holds 5; name fewer, or append them first");
  CHECK(cache.nearest_cuts(sequence, 6).code() == errc::past_the_end);
  cache.truncate(sequence, 5).value();
  cache.release(sequence).value();
  CHECK(cache.truncate(sequence, 0).code() == errc::stale_handle);
  CHECK(cache.truncate_after(sequence, 0, {}).code() == errc::stale_handle);
  CHECK(cache.nearest_cuts(sequence, 0).code() == errc::stale_handle);
}
