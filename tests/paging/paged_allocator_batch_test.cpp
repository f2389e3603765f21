/// Batches, shortages and what a prompt would cost.
#include <llmmem/paged_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <span>
#include <string>
#include <vector>

#include "support/tokens.hpp"

using namespace llmmem;
using llmmem_tests::tokens;

namespace {

struct ascending_traits : paged_traits {
  using free_list = ascending_free_list;
};

/// Lets go of the sequences it is given, one at each call, latest first.
struct preemptor {
  paged_allocator<>* cache = nullptr;
  std::vector<sequence_id> victims{};
  std::vector<block_shortage> asked{};
  bool claims_more = false;

  static bool call(void* self, const block_shortage& shortage) noexcept {
    auto& me = *static_cast<preemptor*>(self);
    me.asked.push_back(shortage);
    if (shortage.needed == 0) return false;
    if (me.victims.empty()) return me.claims_more;
    static_cast<void>(me.cache->release(me.victims.back()));
    me.victims.pop_back();
    return true;
  }
};

}  // namespace

TEST_CASE("if sequences share their last block, a batch counts a copy for all but the last holder") {
  for (const std::uint64_t spare : {2U, 3U}) {
    CAPTURE(spare);
    paged_allocator<> cache({.blocks = 1 + spare, .block_tokens = 4});
    const sequence_id first = cache.create().value();
    REQUIRE(cache.append(first, tokens(2)));
    // Four hold the block, all four grow: three copies.
    std::array<llmmem::paging::growth, 4> batch{paging::growth{.sequence = first}};
    for (std::size_t i = 1; i < batch.size(); ++i)
      batch[i].sequence = cache.fork(first).value();
    const auto one = tokens(1, 50);
    for (paging::growth& each : batch)
      each.tokens = one;
    std::array<append_result, 4> out{};
    const auto done = cache.append_batch(batch, out);
    if (spare == 2) {
      CHECK(done.error() == failure{errc::out_of_blocks, 0, 3, 2});
      CHECK(cache.pool().record(cache.blocks(first)[0]).references() == 4);
      CHECK(cache.stats().free_blocks == 2);
    } else {
      REQUIRE(done);
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(out[i].first == 2);
        CHECK(out[i].new_blocks == 1);
        CHECK(out[i].copy ==
              block_copy{cache.blocks(batch[3].sequence)[0], cache.blocks(batch[i].sequence)[0], 2});
      }
      CHECK_FALSE(out[3].copy);
      CHECK(cache.stats().free_blocks == 0);
    }
    CHECK(cache.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a batch keeps a watermark, and reports its whole need if it is refused") {
  paged_allocator<> cache({.blocks = 6, .block_tokens = 4, .name = "kv"});
  const std::array<llmmem::paging::growth, 2> batch{
      paging::growth{.sequence = cache.create().value(), .unknown_tokens = 9},
      paging::growth{.sequence = cache.create().value(), .unknown_tokens = 4}};
  std::array<append_result, 2> out{};
  CHECK(cache.append_batch(batch, out, 3).error().message() ==
        "kv: 7 blocks needed, 6 free or evictable; release sequences, or build the cache with more blocks");
  CHECK(cache.append_batch(batch, out, unlimited).code() == errc::out_of_blocks);
  CHECK(cache.stats().free_blocks == 6);
  REQUIRE(cache.append_batch(batch, out, 2));
  CHECK(cache.stats().free_blocks == 2);
  CHECK(cache.tokens(batch[0].sequence) == 9);
}

TEST_CASE("a batch with a bad entry changes nothing and names the entry") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .max_sequence_tokens = 12, .name = "kv"});
  const sequence_id one = cache.create().value();
  const sequence_id two = cache.create().value();
  std::array<append_result, 3> out{};
  const std::array<llmmem::paging::growth, 3> twice{paging::growth{.sequence = one, .unknown_tokens = 1},
                                                    paging::growth{.sequence = two, .unknown_tokens = 1},
                                                    paging::growth{.sequence = one, .unknown_tokens = 1}};
  CHECK(cache.append_batch(twice, out).error().message() ==
        "kv: sequence 0 is listed again at place 2 of a batch of 3; put its tokens into one entry");
  const std::array<llmmem::paging::growth, 3> long_one{paging::growth{.sequence = one, .unknown_tokens = 1},
                                                       paging::growth{.sequence = two, .unknown_tokens = 13},
                                                       paging::growth{}};
  CHECK(cache.append_batch(long_one, out).code() == errc::sequence_full);
  const std::array<llmmem::paging::growth, 3> huge{
      paging::growth{.sequence = one, .unknown_tokens = unlimited}, paging::growth{}, paging::growth{}};
  CHECK(cache.append_batch(huge, out).code() == errc::sequence_full);
  const std::array<llmmem::paging::growth, 3> none{paging::growth{.sequence = one, .unknown_tokens = 1},
                                                   paging::growth{.sequence = two}, paging::growth{}};
  CHECK(cache.append_batch(none, out).code() == errc::null_handle);
  CHECK(cache.append_batch(std::span(none).first(2), out).code() == errc::size_mismatch);
  CHECK(cache.stats().tokens == 0);
  CHECK(cache.stats().free_blocks == 8);
}

TEST_CASE("a batch mixes known and unknown tokens") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id one = cache.create().value();
  const auto told = tokens(8);
  const std::array<llmmem::paging::growth, 1> batch{
      paging::growth{.sequence = one, .tokens = told, .unknown_tokens = 3}};
  std::array<append_result, 1> out{};
  REQUIRE(cache.append_batch(batch, out));
  CHECK(cache.tokens(one) == 11);
  CHECK(cache.commit(one).value() == 2);
  CHECK(cache.cached_tokens(told) == 8);
}

TEST_CASE("before a refusal, the allocator asks for relief as long as that brings blocks") {
  preemptor relief;
  paged_allocator<> cache({.blocks = 4,
                           .block_tokens = 4,
                           .pressure = {.call = &preemptor::call, .context = &relief},
                           .name = "kv"});
  relief.cache = &cache;
  for (int i = 0; i < 3; ++i) {
    relief.victims.push_back(cache.create().value());
    REQUIRE(cache.extend(relief.victims.back(), 4));
  }
  const sequence_id wanting = cache.create().value();
  REQUIRE(cache.extend(wanting, 9));
  CHECK(relief.asked.size() == 2);
  CHECK(relief.asked[0].needed == 3);
  CHECK(relief.asked[0].available == 1);
  CHECK(relief.asked[1].available == 2);
  CHECK(relief.victims.size() == 1);

  SUBCASE("a batch also asks for relief") {
    const std::array<llmmem::paging::growth, 1> batch{
        paging::growth{.sequence = wanting, .unknown_tokens = 4}};
    std::array<append_result, 1> out{};
    REQUIRE(cache.append_batch(batch, out));
    CHECK(relief.victims.empty());
  }
  SUBCASE("relief that brings no blocks ends the requests for it") {
    relief.victims.clear();
    relief.claims_more = true;
    CHECK(cache.extend(wanting, 4).code() == errc::out_of_blocks);
    CHECK(relief.asked.size() == 3);
  }
  SUBCASE("relief may take the sequence that asked") {
    relief.victims = {wanting};
    CHECK(cache.extend(wanting, 4).code() == errc::stale_handle);
    CHECK(cache.audit() == std::vector<std::string>{});
  }
  SUBCASE("relief may take a sequence of the batch that asked") {
    const sequence_id other = cache.create().value();
    relief.victims = {wanting};
    const std::array<llmmem::paging::growth, 2> batch{
        paging::growth{.sequence = other, .unknown_tokens = 4},
        paging::growth{.sequence = wanting, .unknown_tokens = 1}};
    std::array<append_result, 2> out{};
    CHECK(cache.append_batch(batch, out).code() == errc::stale_handle);
    CHECK(cache.tokens(other) == 0);
  }
}

TEST_CASE("low blocks are reported once for each fall below the line") {
  preemptor relief;
  paged_allocator<> cache(
      {.blocks = 8, .block_tokens = 4, .pressure = {.call = &preemptor::call, .context = &relief, .low = 4}});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 16));
  CHECK(relief.asked.empty());
  REQUIRE(cache.extend(one, 4));
  REQUIRE(relief.asked.size() == 1);
  CHECK(relief.asked[0].needed == 0);
  CHECK(relief.asked[0].available == 3);
  REQUIRE(cache.extend(one, 4));
  CHECK(relief.asked.size() == 1);
  REQUIRE(cache.truncate(one, 4));
  REQUIRE(cache.extend(one, 20));
  CHECK(relief.asked.size() == 2);
}

TEST_CASE("a match that revives blocks and a pool that is shrunk are also reported as low") {
  preemptor relief;
  paged_allocator<> cache(
      {.blocks = 8, .block_tokens = 4, .pressure = {.call = &preemptor::call, .context = &relief, .low = 4}});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 8));
  const sequence_id two = cache.create().value();
  const std::array keys{key_from_id(1), key_from_id(2)};
  REQUIRE(cache.append(two, tokens(8)));
  REQUIRE(cache.commit(two));
  REQUIRE(cache.release(two));
  REQUIRE(cache.extend(one, 4));  // available: 5, two of them idle
  CHECK(relief.asked.empty());
  const sequence_id three = cache.create().value();
  SUBCASE("by tokens") {
    REQUIRE(cache.match(three, tokens(8)).value().tokens == 8);
  }
  SUBCASE("by keys") {
    cache.drop_idle();
    REQUIRE(cache.extend(three, 8));
    relief.asked.clear();
    REQUIRE(cache.commit(three, {.keys = keys, .tokens = 8}));
    REQUIRE(cache.release(three));
    const sequence_id four = cache.create().value();
    REQUIRE(cache.match(four, keyed_blocks{.keys = keys, .tokens = 8}).value().tokens == 8);
  }
  SUBCASE("by resize") {
    REQUIRE(cache.resize(5));
  }
  REQUIRE(relief.asked.size() == 1);
  CHECK(relief.asked[0].needed == 0);
  CHECK(relief.asked[0].available < 4);
}

namespace {

/// Forks, and writes into the fork, whenever it is told that blocks are low.
struct forker {
  paged_allocator<>* cache = nullptr;
  sequence_id original{};
  sequence_id twin{};

  static bool call(void* self, const block_shortage& shortage) noexcept {
    auto& me = *static_cast<forker*>(self);
    if (shortage.needed != 0 || me.twin != sequence_id{}) return false;
    me.twin = *me.cache->fork(me.original);
    return false;
  }
};

}  // namespace

TEST_CASE("the low notice follows the operation, so its receiver may use the sequence") {
  forker told;
  paged_allocator<> cache(
      {.blocks = 4, .block_tokens = 4, .pressure = {.call = &forker::call, .context = &told, .low = 3}});
  told.cache = &cache;
  told.original = cache.create().value();
  REQUIRE(cache.append(told.original, tokens(8)));
  REQUIRE(told.twin != sequence_id{});
  CHECK(cache.tokens(told.twin) == 8);
  CHECK(cache.commit(told.twin).value() == 2);
  CHECK(cache.cached_tokens(tokens(8)) == 8);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("relief that removes the need for a copy suffices") {
  preemptor relief;
  paged_allocator<> cache(
      {.blocks = 1, .block_tokens = 4, .pressure = {.call = &preemptor::call, .context = &relief}});
  relief.cache = &cache;
  const sequence_id one = cache.create().value();
  REQUIRE(cache.append(one, tokens(2)));
  SUBCASE("for one") {
    relief.victims = {cache.fork(one).value()};
    CHECK(cache.append(one, tokens(1)).value().new_blocks == 0);
  }
  SUBCASE("for a batch") {
    relief.victims = {cache.fork(one).value()};
    const std::array<llmmem::paging::growth, 1> batch{paging::growth{.sequence = one, .unknown_tokens = 1}};
    std::array<append_result, 1> out{};
    CHECK(cache.append_batch(batch, out));
  }
  CHECK(relief.victims.empty());
}

TEST_CASE("the cost of a prompt is the number of blocks that it then takes") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const auto prompt = tokens(18);
  CHECK(cache.cost(prompt) == prompt_cost{.new_blocks = 5});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.append(one, std::span(prompt).first(12)));
  REQUIRE(cache.commit(one));
  CHECK(cache.cost(prompt) == prompt_cost{.cached_tokens = 12, .cached_blocks = 3, .new_blocks = 2});
  REQUIRE(cache.release(one));
  const prompt_cost idle = cache.cost(prompt);
  CHECK(idle == prompt_cost{.cached_tokens = 12, .cached_blocks = 3, .revived_blocks = 3, .new_blocks = 2});
  CHECK(idle.needed() == 5);
  const sequence_id two = cache.create().value();
  REQUIRE(cache.match(two, prompt));
  REQUIRE(cache.append(two, std::span(prompt).subspan(12)));
  CHECK(cache.pool().available() == 8 - idle.needed());
  CHECK(cache.cost(prompt, {.salt = {1, 2}}) == prompt_cost{.new_blocks = 5});
}

TEST_CASE("an allocator grows and shrinks while sequences live") {
  paged_allocator<ascending_traits> cache(
      {.blocks = 4, .block_capacity = 8, .block_tokens = 4, .name = "kv"});
  CHECK(cache.max_physical_blocks() == 9);
  const sequence_id one = cache.create().value();
  CHECK(cache.extend(one, 20).code() == errc::out_of_blocks);
  CHECK(cache.resize(8).value() == 0);
  REQUIRE(cache.append(one, tokens(28)));
  CHECK(cache.resize(2).value() == 5);
  CHECK(cache.physical_blocks() == 3);
  CHECK(cache.commit(one).value() == 2);  // what retires is not cached
  CHECK(cache.stats().retiring_blocks == 5);
  CHECK(cache.cached_tokens(tokens(28)) == 8);
  REQUIRE(cache.release(one));
  CHECK(cache.stats().retiring_blocks == 0);
  CHECK(cache.stats().idle_blocks == 2);
  CHECK(cache.resize(9).code() == errc::bad_block_count);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("a sequence whose blocks retired for a while is cached completely again, head first") {
  paged_allocator<ascending_traits> cache({.blocks = 4, .block_capacity = 8, .block_tokens = 4});
  // Its table: block 1, then one above the later end, then blocks below it.
  const sequence_id first = cache.create().value();
  REQUIRE(cache.extend(first, 4));
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(first, 8));
  REQUIRE(cache.append(one, tokens(4)));  // block 4
  REQUIRE(cache.truncate(first, 4));
  REQUIRE(cache.append(one, tokens(4, 5)));  // block 2
  REQUIRE(cache.commit(one).value() == 2);
  CHECK(cache.resize(3).value() == 1);
  CHECK(cache.cached_tokens(tokens(8)) == 0);
  REQUIRE(cache.append(one, tokens(4, 9)));
  CHECK(cache.commit(one).value() == 0);  // nobody could find it behind a block that is not cached
  CHECK(cache.resize(8).value() == 0);
  CHECK(cache.commit(one).value() == 3);
  CHECK(cache.cached_tokens(tokens(12)) == 12);
  CHECK(cache.audit() == std::vector<std::string>{});
}
