/// What tiers beneath a cache do, one promise at a time.
#include <llmmem/offload/kv_tiers.hpp>

#include <doctest/doctest.h>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/event_log.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/kv_model.hpp"
#include "offload/varied_codec.hpp"
#include "support/event_orders.hpp"
#include "support/manual_transfers.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using offload::answer;

namespace {

struct traits : paged_traits {
  using observer = offload::tier_link;
};
using cache_type = paged_allocator<traits>;
using tiers_type =
    kv_tiers<cache_type, manual_mover, offload::kv_tier<host_space>, offload::kv_tier<manual_space>>;

const std::array one_group{full_attention({"kv", 1, 16, 4})};
constexpr std::uint64_t block_bytes = kv_contents::layers * 4 * 8;

std::vector<token_id> count_up(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::uint64_t read_clock(void* at) noexcept {
  return *static_cast<std::uint64_t*>(at);
}

/// A cache of 8 blocks of 4 tokens over a host tier and one beneath it.
struct rig {
  explicit rig(kv_tiers_options options = {}, offload::store_policy down = write_through{},
               std::uint64_t slots = 8, std::uint64_t lower_slots = 16)
      : cache({.blocks = 8, .block_tokens = 4, .max_sequences = 8, .max_sequence_tokens = 64, .name = "kv"}),
        contents(one_group, cache.max_physical_blocks()),
        host({.budget = slots * block_bytes}),
        below(lower_slots * block_bytes),
        tiers(cache, manual_mover(contents, stream), with_clock(options),
              offload::kv_tier(host, slots * block_bytes, down), lower(lower_slots)) {}

  kv_tiers_options with_clock(kv_tiers_options options) {
    options.load_headroom = 0;
    options.now_ns = &read_clock;
    options.clock_context = &now;
    return options;
  }
  offload::kv_tier<manual_space> lower(std::uint64_t slots) {
    offload::kv_tier<manual_space> out(below, slots * block_bytes);
    out.granularity = 8;
    return out;
  }

  [[nodiscard]] auto table(sequence_id id) {
    return [this, id](std::size_t) { return cache.blocks(id); };
  }
  /// A sequence whose contents are computed and committed.
  kv_sequence written(std::span<const token_id> tokens) {
    kv_sequence out;
    out.id = cache.create().value();
    out.epoch = cache.epoch();
    for (const token_id each : tokens)
      out.push(each);
    cache.append(out.id, tokens).value();
    stream.end_all();
    compute(contents, out, 0, tokens.size(), table(out.id));
    cache.commit(out.id).value();
    return out;
  }
  /// The same, stored in every tier and gone from the cache.
  kv_sequence stored(std::span<const token_id> tokens) {
    kv_sequence out = written(tokens);
    tiers.store(out.id).value();
    tiers.flush();
    cache.release(out.id).value();
    cache.drop_idle();
    contents.wipe();
    return out;
  }
  /// Evicts everything from the first tier by storing other blocks.
  void fill_first_tier(token_id first) {
    const kv_sequence other = written(count_up(first, 32));
    tiers.store(other.id).value();
    tiers.flush();
    cache.release(other.id).value();
    cache.drop_idle();
  }
  [[nodiscard]] std::string wrong(const kv_sequence& like, sequence_id id, std::uint64_t length) {
    kv_sequence copy = like;
    copy.id = id;
    return wrong_contents(contents, copy, length, table(id));
  }

  std::uint64_t now = 1;
  cache_type cache;
  kv_contents contents;
  transfer_list stream{true};
  host_space host;
  manual_space below;
  tiers_type tiers;
};

const std::vector<std::string> sound{};

}  // namespace

TEST_CASE("a load copies layers together up to restore_bytes of each block, and no further") {
  const auto prompt = count_up(0, 20);
  for (const std::uint64_t bytes : {std::uint64_t{1}, block_bytes - 1, block_bytes, 10 * block_bytes}) {
    CAPTURE(bytes);
    rig r({.restore_bytes = bytes});
    const kv_sequence before = r.stored(prompt);
    const kv_chain chain(r.cache, prompt);
    const sequence_id id = r.cache.create().value();
    auto load = r.tiers.prepare_load(id, chain).value();
    load.wait(0).value();
    CHECK(r.contents.at(0, r.cache.blocks(id)[4], 0, 3) == kv_contents::value(before.digests[19], 0, 0));
    const std::uint64_t second = r.contents.at(0, r.cache.blocks(id)[4], 1, 3);
    CHECK((second == kv_contents::value(before.digests[19], 0, 1)) == (bytes >= block_bytes));
    CHECK(load.complete().is_complete());
    CHECK(r.wrong(before, id, 20) == "");
  }
}

TEST_CASE("stored blocks are loaded layer by layer, and match finds them when the load is complete") {
  rig r({.restore_bytes = 1});
  const auto prompt = count_up(0, 20);
  const kv_sequence before = r.stored(prompt);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  const offload::kv_lookup_result where = r.tiers.lookup(id, chain);
  CHECK(where.tokens == 20);
  CHECK(where.next == answer::hit);
  CHECK(where.blocks[0] == 5);

  auto load = r.tiers.prepare_load(id, chain).value();
  CHECK(r.cache.tokens(id) == 20);
  CHECK(r.cache.cached_tokens(prompt) == 0);
  load.wait(0).value();
  CHECK(r.contents.at(0, r.cache.blocks(id)[4], 0, 3) == kv_contents::value(before.digests[19], 0, 0));
  CHECK(r.contents.at(0, r.cache.blocks(id)[4], 1, 3) != kv_contents::value(before.digests[19], 0, 1));
  CHECK(r.cache.cached_tokens(prompt) == 0);
  const offload::load_result came = load.complete();
  CHECK(came.is_complete());
  CHECK(came.tokens == 20);
  CHECK(came.blocks[0] == 5);
  CHECK(r.wrong(before, id, 20) == "");
  CHECK(r.cache.cached_tokens(prompt) == 20);
  CHECK(r.tiers.audit() == sound);
  CHECK(r.cache.audit() == sound);
}

TEST_CASE("lookup moves nothing and has four answers") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const std::uint64_t begun = r.below.transfers().begun();
  CHECK(r.tiers.lookup(chain, 0).tokens == 16);
  CHECK(r.tiers.lookup(chain, 0).blocks[1] == 4);
  CHECK(r.below.transfers().begun() == begun);
  CHECK(r.tiers.lookup_block(chain, 0, 0) == std::pair{answer::hit, std::size_t{1}});
  CHECK(r.tiers.lookup_block(kv_chain(r.cache, count_up(9, 4)), 0, 0) ==
        std::pair{answer::miss, std::size_t{2}});

  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain, 8).value();
  CHECK(load.wanted() == 8);
  CHECK(r.tiers.lookup_block(chain, 0, 0).first == answer::pending);
  CHECK(r.tiers.lookup_block(chain, 0, 3).first == answer::hit);
  const offload::kv_lookup_result other = r.tiers.lookup(chain, 0);
  CHECK(other.tokens == 0);
  CHECK(other.next == answer::pending);
  CHECK(load.complete().is_complete());

  // A tier that failed does not answer for a while, which is no miss.
  r.below.refuse(1);
  const sequence_id second = r.cache.create().value();
  REQUIRE(r.cache.match(second, std::span(prompt).first(8)).value().tokens == 8);
  auto failing = r.tiers.prepare_load(second, chain).value();
  CHECK(r.tiers.lookup_block(chain, 0, 3).first == answer::unknown);
  CHECK(r.tiers.lookup(chain, 8).next == answer::unknown);
  CHECK(failing.complete().tokens == 8);
  r.now += 200'000'000;
  CHECK(r.tiers.lookup_block(chain, 0, 3).first == answer::hit);
}

TEST_CASE("a load with costs leaves to the engine what is cheaper to compute") {
  rig r;
  const auto prompt = count_up(0, 16);
  const kv_sequence one = r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  REQUIRE(r.tiers.prefetch(chain, 0, 8) == 2);  // two blocks in the first tier, two below
  r.tiers.flush();
  kv_sequence two = one;
  two.id = r.cache.create().value();
  // A block of 64 bytes takes 64 ns from below, and 10 ns for each of its 4 tokens to compute.
  offload::load_costs costs{.prefill_ns = 10};
  costs.links[1].link.bytes_per_second = 1'000'000'000;
  CHECK(r.tiers.choose_load(two.id, chain, costs) ==
        offload::load_choice{.tokens = 8, .ns = 80, .waiting_tokens = 0});
  auto load = r.tiers.prepare_load(two.id, chain, {.costs = costs}).value();
  CHECK(load.wanted() == 8);
  CHECK(load.complete().is_complete());
  CHECK(r.wrong(one, two.id, 8) == "");
  CHECK(r.tiers.choose_load(two.id, chain, costs).tokens == 8);  // nothing more is worth it

  costs.links[1].link.bytes_per_second = 2'000'000'000;
  CHECK(r.tiers.choose_load(two.id, chain, costs) ==
        offload::load_choice{.tokens = 16, .ns = 64, .waiting_tokens = 8});
  costs.links[1].pending_bytes = 64;  // other users of the link are before this load
  CHECK(r.tiers.choose_load(two.id, chain, costs).tokens == 8);
  costs.links[1].pending_bytes = 0;
  auto all = r.tiers.prepare_load(two.id, chain, {.costs = costs}).value();
  CHECK(all.wanted() == 16);
  const sequence_id three = r.cache.create().value();
  const offload::load_choice after = r.tiers.choose_load(three, chain, costs);
  CHECK(after.tokens == 8);  // the blocks that `all` brings are pending for it
  CHECK(after.waiting_tokens == 16);
  CHECK(after.waiting_ns == 64);  // two blocks of 64 bytes cross the link before
  CHECK(after.waits());
  costs.links[1].pending_bytes = ~std::uint64_t{0};  // but not for a link that is blocked
  CHECK_FALSE(r.tiers.choose_load(three, chain, costs).waits());
  costs.links[1].pending_bytes = 0;
  costs.pending_ns = 100;  // nor once it has waited for long
  CHECK_FALSE(r.tiers.choose_load(three, chain, costs).waits());
  CHECK(all.complete().is_complete());
  CHECK(r.wrong(one, two.id, 16) == "");
}

TEST_CASE("two requests for the same block load it once") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const sequence_id one = r.cache.create().value();
  const sequence_id two = r.cache.create().value();
  const std::uint64_t before = r.below.transfers().begun();
  auto load = r.tiers.prepare_load(one, chain).value();
  auto none = r.tiers.prepare_load(two, chain).value();
  CHECK_FALSE(none);
  CHECK(r.cache.tokens(two) == 0);
  CHECK(load.complete().is_complete());
  CHECK(r.below.transfers().begun() - before == 4);
  CHECK(r.cache.match(two, prompt).value().tokens == 16);
  CHECK(r.cache.blocks(one)[0] == r.cache.blocks(two)[0]);
}

TEST_CASE("a flipped bit is a miss of its block, and only tokens after it are computed again") {
  rig r;
  const auto prompt = count_up(0, 16);
  const kv_sequence before = r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain).value();
  const auto reads = r.below.transfers().can_end();
  REQUIRE(reads.size() == 4);
  r.below.transfers().end(reads[2], ending::flipped);
  const offload::load_result came = load.complete();
  CHECK_FALSE(came.is_complete());
  CHECK(came.tokens == 8);
  CHECK(came.failed_blocks == 1);
  CHECK(came.why.code == errc::checksum_differs);
  CHECK(came.why.message().find("manual") != std::string::npos);
  CHECK(r.wrong(before, id, 8) == "");
  CHECK(r.cache.cached_tokens(prompt) == 8);
  CHECK(r.tiers.lookup_block(chain, 0, 2).first == answer::miss);
  CHECK(r.tiers.stats().tiers[1].damaged == 1);
}

namespace {

/// A first tier with space for one block over others in memory, and a block whose checksum is known.
template <class... Lower>
struct summed_block {
  explicit summed_block(std::uint64_t lower_slots = 4)
      : tiers(cache, manual_mover(contents, stream), kv_tiers_options{.load_headroom = 0},
              offload::kv_tier(host, sizeof...(Lower) * block_bytes, write_through{}),
              Lower(below, lower_slots * block_bytes, write_back{})...),
        held(arrival(0)) {
    tiers.note_checksum(held, sum);
  }
  /// A block with its contents, still to be ended.
  offload::held_block arrival(std::size_t at) {
    const auto out = tiers.begin_arrival(0, chain.keys()[at], at).value();
    std::ranges::fill(tiers.bytes_of(out), static_cast<std::byte>(at + 1));
    return out;
  }
  void end(const offload::held_block& block) {
    REQUIRE(tiers.end_arrival(block, true));
    tiers.release(block);
    tiers.flush();
  }

  cache_type cache{
      {.blocks = 8, .block_tokens = 4, .max_sequences = 8, .max_sequence_tokens = 64, .name = "kv"}};
  std::vector<token_id> prompt = count_up(0, 12);
  kv_chain chain{cache, prompt};
  kv_contents contents{one_group, cache.max_physical_blocks()};
  transfer_list stream{true};
  host_space host{{.budget = 2 * block_bytes}};
  host_space below{{.budget = 8 * block_bytes}};
  kv_tiers<cache_type, manual_mover, offload::kv_tier<host_space>, Lower...> tiers;
  std::uint32_t sum = crc32c(0, std::vector<std::byte>(block_bytes, std::byte{1}));
  offload::held_block held;
};

}  // namespace

using coded_tier = offload::kv_tier<host_space, lru_eviction, offload::coded<varied_codec<1>>>;

TEST_CASE("a known checksum stays with a block that goes down in memory and comes back") {
  summed_block<offload::kv_tier<host_space>> r;
  r.end(r.held);
  r.end(r.arrival(1));
  REQUIRE_FALSE(r.tiers.hold(0, r.chain.keys()[0]));
  REQUIRE(r.tiers.prefetch_block(0, r.chain.keys()[0]));
  r.tiers.flush();
  const auto back = r.tiers.hold(0, r.chain.keys()[0]);
  REQUIRE(back);
  CHECK(r.tiers.checksum_of(*back) == r.sum);
  r.tiers.release(*back);
  r.end(r.arrival(2));
  REQUIRE(r.tiers.prefetch_block(0, r.chain.keys()[1]));
  r.tiers.flush();
  const auto other = r.tiers.hold(0, r.chain.keys()[1]);
  REQUIRE(other);
  CHECK_FALSE(r.tiers.checksum_of(*other));
  r.tiers.release(*other);
}

TEST_CASE("a damaged copy is dropped with those of it in other tiers of host memory, and a sound one stays") {
  for (const bool is_damaged : {false, true}) {
    summed_block<offload::kv_tier<host_space>> r;
    const block_key& key = r.chain.keys()[0];
    CHECK(r.tiers.verify_copy(0, key) == offload::copy_state::unknown);  // it is still on its way
    r.tiers.bytes_of(r.held)[3] ^= static_cast<std::byte>(is_damaged);
    r.end(r.held);
    r.end(r.arrival(1));
    CHECK(r.tiers.verify_copy(0, key) == offload::copy_state::unknown);  // it is in the second tier
    CHECK(r.tiers.verify_copy(0, r.chain.keys()[1]) == offload::copy_state::unknown);  // without a checksum
    REQUIRE(r.tiers.prefetch_block(0, key));
    r.tiers.flush();
    REQUIRE(r.tiers.lookup_block(0, key) == std::pair(answer::hit, std::size_t{0}));
    CHECK(r.tiers.verify_copy(0, key) ==
          (is_damaged ? offload::copy_state::damaged : offload::copy_state::sound));
    // A copy that came from the second tier would bring the damage back.
    CHECK(r.tiers.lookup_block(0, key).first == (is_damaged ? answer::miss : answer::hit));
    for (std::size_t tier = 0; tier < 2; ++tier)
      CHECK(r.tiers.stats().tiers[tier].damaged == (is_damaged ? 1 : 0));
    CHECK((r.tiers.stats().last_failure.code == errc::checksum_differs) == is_damaged);
    CHECK(r.tiers.audit().empty());
  }
}

TEST_CASE("a block that was damaged in memory does not go into a tier with a codec") {
  for (const bool is_damaged : {false, true}) {
    summed_block<coded_tier> r;
    r.tiers.bytes_of(r.held)[3] ^= static_cast<std::byte>(is_damaged);
    r.end(r.held);
    CHECK(r.tiers.stats().tiers[1].failures == (is_damaged ? 1 : 0));
    r.end(r.arrival(1));
    CHECK((r.tiers.lookup_block(0, r.chain.keys()[0]).first == answer::hit) == !is_damaged);
  }
}

TEST_CASE("a block that was damaged in memory does not come sound out of a demotion") {
  for (const bool is_damaged : {false, true}) {
    summed_block<offload::kv_tier<host_space>, coded_tier> r(2);
    r.tiers.bytes_of(r.held)[3] ^= static_cast<std::byte>(is_damaged);
    r.end(r.held);
    r.end(r.arrival(1));
    r.end(r.arrival(2));
    r.tiers.flush();
    CHECK(r.tiers.stats().tiers[2].stored == (is_damaged ? 0 : 1));
    CHECK(r.tiers.lookup_block(0, r.chain.keys()[0]).first == (is_damaged ? answer::miss : answer::hit));
  }
}

TEST_CASE("blocks that do not arrive within the patience are computed, and their late arrival is harmless") {
  rig r({.patience_ns = 100});
  const auto prompt = count_up(0, 16);
  const kv_sequence before = r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain).value();
  const auto reads = r.below.transfers().can_end();
  r.below.transfers().end(reads[0], ending::moved);
  r.now += 100;
  const offload::load_result came = load.complete();
  CHECK(came.tokens == 4);
  CHECK(came.late_blocks == 3);
  r.cache.truncate(id, came.tokens).value();
  r.cache.append(id, std::span(prompt).subspan(4)).value();
  kv_sequence again = before;
  again.id = id;
  compute(r.contents, again, 4, 16, r.table(id));
  // The slots stay taken until the reads have ended, and then have what was read.
  CHECK(r.host.used() == 8 * block_bytes);
  r.below.transfers().end_all();
  r.tiers.progress();
  CHECK(r.wrong(before, id, 16) == "");
  CHECK(r.tiers.lookup_block(chain, 0, 3) == std::pair{answer::hit, std::size_t{0}});
  CHECK(r.tiers.audit() == sound);
}

TEST_CASE("patience counts the engine's kernels, and a call after it takes what has arrived by then") {
  for (const bool asks_in_time : {false, true}) {
    CAPTURE(asks_in_time);
    rig r({.patience_ns = 100}, write_through{}, 3);
    const auto prompt = count_up(0, 32);
    const kv_sequence before = r.written(prompt);
    while (r.tiers.stats().tiers[1].held != 8) {
      r.tiers.store(before.id).value();
      r.tiers.flush();
    }
    r.cache.release(before.id).value();
    r.cache.drop_idle();
    r.contents.wipe();
    const kv_chain chain(r.cache, prompt);
    const sequence_id id = r.cache.create().value();
    auto load = r.tiers.prepare_load(id, chain).value();
    const auto ask = [&] {
      CHECK_FALSE(load.has_arrived());
      r.stream.end_all();  // copies to the cache, after which slots are free again
      CHECK_FALSE(load.has_arrived());
    };
    ask();
    const std::size_t begun = r.below.transfers().can_end().size();
    CHECK(begun == 3);  // the others wait for a slot
    r.below.transfers().end_all();
    if (asks_in_time) {
      r.now += 50;
      ask();
      CHECK(r.below.transfers().can_end().size() == 2);
      r.below.transfers().end_all();
    }
    r.now += 500;  // kernels of the engine
    const offload::load_result came = load.complete();
    CHECK(came.tokens == (asks_in_time ? 32 : 12));
    CHECK(came.late_blocks == (asks_in_time ? 0 : 2));
    CHECK(r.wrong(before, id, came.tokens) == "");
    r.below.transfers().end_all();
    r.tiers.progress();
    CHECK(r.tiers.audit() == sound);
  }
}

TEST_CASE("a load can have its own patience") {
  rig r({.patience_ns = 100});
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto patient = r.tiers.prepare_load(id, chain, {.patience_ns = 1000}).value();
  r.now += 500;
  r.below.transfers().end_all();
  CHECK(patient.complete().is_complete());
  r.cache.release(id).value();
  r.cache.drop_idle();
  r.tiers.flush();
  r.fill_first_tier(900);
  const sequence_id other = r.cache.create().value();
  auto hasty = r.tiers.prepare_load(other, chain, {.upto = 8, .patience_ns = 0}).value();
  CHECK(hasty.wanted() == 8);
  const offload::load_result came = hasty.complete();
  CHECK(came.tokens == 0);
  CHECK(came.late_blocks == 2);
}

TEST_CASE("a cancelled load keeps its blocks until the copies to them have ended") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain).value();
  load.issue(0).value();
  load.cancel();
  r.cache.release(id).value();
  CHECK(r.cache.stats().free_blocks == 4);
  CHECK(r.tiers.stats().loads == 1);
  r.stream.end_all();
  r.tiers.progress();
  CHECK(r.cache.stats().free_blocks == 8);
  CHECK(r.tiers.stats().loads == 0);
  CHECK(r.cache.audit() == sound);
}

TEST_CASE("a block is stored after its fence, and is not handed out before") {
  rig r;
  const kv_sequence sequence = r.written(count_up(0, 32));
  transfer_list kernels(false);
  const manual_fence done = kernels.begin([](ending) {});
  CHECK(r.tiers.store(sequence.id, done).value() == 8);
  r.cache.release(sequence.id).value();
  const sequence_id other = r.cache.create().value();
  CHECK(r.cache.append(other, count_up(900, 4)).code() == errc::out_of_blocks);
  CHECK(r.stream.can_end().empty());
  kernels.end_all();
  r.stream.end_all();
  r.tiers.progress();
  CHECK(r.cache.append(other, count_up(900, 4)));
  CHECK(r.tiers.stats().tiers[0].held == 8);
}

TEST_CASE("store policies do what their names say") {
  const auto prompt = count_up(0, 8);
  SUBCASE("write_through_selective stores blocks that a second request uses") {
    rig r({.store = write_through_selective<2>{}});
    const kv_sequence one = r.written(prompt);
    CHECK(r.tiers.store(one.id).value() == 0);
    CHECK(r.tiers.store(one.id).value() == 0);
    const sequence_id two = r.cache.create().value();
    r.cache.match(two, prompt).value();
    CHECK(r.tiers.store(two).value() == 2);
  }
  SUBCASE("write_back stores blocks that the cache evicts") {
    rig r({.store = write_back{}});
    const kv_sequence one = r.written(prompt);
    CHECK(r.tiers.store(one.id).value() == 0);
    r.cache.release(one.id).value();
    const kv_chain chain(r.cache, prompt);
    CHECK(r.tiers.lookup(chain, 0).tokens == 0);
    const kv_sequence other = r.written(count_up(100, 32));
    r.tiers.progress();
    CHECK(r.tiers.lookup(chain, 0).tokens == 8);
    r.cache.release(other.id).value();
    const sequence_id id = r.cache.create().value();
    auto load = r.tiers.prepare_load(id, chain).value();
    CHECK(load.complete().is_complete());
    CHECK(r.wrong(one, id, 8) == "");
  }
  SUBCASE("a first tier that writes back sends down the blocks that it evicts") {
    rig r({}, write_back{});
    r.stored(prompt);
    CHECK(r.tiers.stats().tiers[1].held == 0);
    for (int i = 0; i < 3; ++i)
      r.fill_first_tier(500);
    const kv_chain chain(r.cache, prompt);
    CHECK(r.tiers.lookup(chain, 0).blocks[1] == 2);
  }
}

TEST_CASE(
    "invalid contents leave every tier together with all contents that build on them, and with no others") {
  rig r;
  const auto prompt = count_up(0, 16);
  const kv_sequence one = r.written(prompt);
  r.tiers.store(one.id).value();
  r.tiers.flush();
  const auto other = count_up(200, 16);
  const kv_sequence two = r.written(other);
  r.tiers.store(two.id).value();
  r.tiers.flush();
  r.cache.invalidate(one.id, 8).value();
  CHECK(r.tiers.lookup(kv_chain(r.cache, prompt), 0).tokens == 8);
  CHECK(r.tiers.lookup(kv_chain(r.cache, other), 0).tokens == 16);
  CHECK(r.tiers.stats().invalidated != 0);

  // With a block between that no tier has, nobody can tell what follows it was computed from.
  r.tiers.clear();
  CHECK(r.tiers.lookup(kv_chain(r.cache, other), 0).tokens == 0);
  CHECK(r.tiers.audit() == sound);
}

TEST_CASE("no contents of an earlier epoch are found") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  const kv_chain old(r.cache, prompt);
  r.cache.reset();
  CHECK(r.tiers.lookup(old, 0).tokens == 0);
  CHECK(r.tiers.lookup(kv_chain(r.cache, prompt), 0).tokens == 0);
  const sequence_id id = r.cache.create().value();
  CHECK(r.tiers.prepare_load(id, old).code() == errc::epoch_differs);
}

TEST_CASE("tenants are kept apart") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  CHECK(r.tiers.lookup(kv_chain(r.cache, prompt, {.salt = {1, 2}}), 0).tokens == 0);
  CHECK(r.tiers.lookup(kv_chain(r.cache, prompt), 0).tokens == 16);
}

TEST_CASE("a load larger than the first tier passes through it") {
  rig r({}, write_through{}, 3);
  const auto prompt = count_up(0, 32);
  kv_sequence before = r.written(prompt);
  while (r.tiers.stats().tiers[1].held != 8) {
    r.tiers.store(before.id).value();
    r.tiers.flush();
  }
  r.cache.release(before.id).value();
  r.cache.drop_idle();
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain).value();
  load.wait(0).value();
  load.wait(1).value();
  CHECK(load.complete().is_complete());
  CHECK(r.wrong(before, id, 32) == "");
}

TEST_CASE("a refusal is reported, and changes nothing") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  r.cache.append(id, count_up(0, 3)).value();
  CHECK(r.tiers.prepare_load(id, chain).code() == errc::not_whole_blocks);
  CHECK(r.tiers.prepare_load(sequence_id{}, chain).code() == errc::null_handle);
  CHECK(r.tiers.store(sequence_id{}).code() == errc::null_handle);
  const kv_sequence full = r.written(count_up(300, 20));
  const sequence_id late = r.cache.create().value();
  const auto refused = r.tiers.prepare_load(late, chain);
  CHECK(refused.code() == errc::out_of_blocks);
  CHECK(r.cache.tokens(late) == 0);
  CHECK(r.tiers.lookup(chain, 0).tokens == 16);
  CHECK(r.tiers.stats().loads == 0);
  CHECK(r.tiers.audit() == sound);

  const auto mover = [&] { return manual_mover(r.contents, r.stream); };
  host_space small({.budget = 64});
  CHECK_THROWS_WITH_AS(
      kv_tiers(r.cache, mover(), {.name = "t"}, offload::kv_tier(small, 63)),
      "t: host_space: 63 bytes for group 0 hold no block of 64 bytes; give the tier a larger budget, or "
      "the group a larger share",
      length_error);
  CHECK_THROWS_WITH_AS(kv_tiers(r.cache, mover(), {.max_loads = 0, .name = "t"}, offload::kv_tier(small, 64)),
                       "t: max_loads is 0; at least 1 is needed", argument_error);
}

TEST_CASE("a commit during a load caches no missing contents") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  r.fill_first_tier(500);
  const kv_chain chain(r.cache, prompt);
  const sequence_id id = r.cache.create().value();
  auto load = r.tiers.prepare_load(id, chain).value();
  CHECK(r.cache.commit(id).value() == 0);
  CHECK(r.cache.cached_tokens(prompt) == 0);
  const auto reads = r.below.transfers().can_end();
  r.below.transfers().end(reads[1], ending::failed);
  const offload::load_result came = load.complete();
  CHECK(came.tokens == 4);
  r.cache.commit(id).value();
  CHECK(r.cache.cached_tokens(prompt) == 4);
  // Until what did not come is cut off, nothing behind it is cached.
  r.cache.truncate(id, 4).value();
  r.cache.append(id, std::span(prompt).subspan(4)).value();
  r.cache.commit(id).value();
  CHECK(r.cache.cached_tokens(prompt) == 16);
}

TEST_CASE("a paged sequence may grow while its load runs, so that layers are computed as they arrive") {
  rig r;
  const auto prompt = count_up(0, 16);
  kv_sequence before = r.stored(prompt);
  for (const token_id each : count_up(16, 6))
    before.push(each);
  const kv_chain chain(r.cache, prompt);
  for (const bool fails : {false, true}) {
    CAPTURE(fails);
    if (fails) r.fill_first_tier(500);
    before.id = r.cache.create().value();
    auto load = r.tiers.prepare_load(before.id, chain).value();
    r.cache.append(before.id, std::span(before.tokens).subspan(16)).value();
    if (fails) r.below.transfers().end(r.below.transfers().can_end().back(), ending::flipped);
    load.wait(0).value();
    r.stream.end_all();
    compute(r.contents, before, 16, 22, r.table(before.id));
    CHECK(r.cache.commit(before.id).value() == 0);
    const offload::load_result came = load.complete();
    CHECK(came.is_complete() == !fails);
    CHECK(came.tokens == (fails ? 12 : 16));
    CHECK(r.cache.cached_tokens(before.tokens) == came.tokens);
    CHECK(r.wrong(before, before.id, came.tokens) == "");
    if (!fails) {
      r.cache.commit(before.id).value();
      CHECK(r.cache.cached_tokens(before.tokens) == 20);
      CHECK(r.wrong(before, before.id, 22) == "");
    }
    r.cache.release(before.id).value();
    r.cache.drop_idle();
    r.contents.wipe();
  }
}

TEST_CASE("a chain of another context or prompt is refused") {
  rig r;
  const auto prompt = count_up(0, 16);
  r.stored(prompt);
  const sequence_id other_tenant = r.cache.create({.salt = {1, 2}}).value();
  const kv_chain plain(r.cache, prompt);
  CHECK(r.tiers.prepare_load(other_tenant, plain).code() == errc::not_a_prefix);
  const kv_sequence started = r.written(count_up(700, 8));
  const kv_chain chain(r.cache, prompt);
  CHECK(r.tiers.prepare_load(started.id, chain).code() == errc::not_a_prefix);
  CHECK(r.cache.tokens(started.id) == 8);
}

TEST_CASE("a mover whose memory lacks blocks of the cache is refused") {
  cache_type cache({.blocks = 8, .block_tokens = 4, .max_sequences = 2, .max_sequence_tokens = 32});
  const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4};
  std::vector<std::byte> kv(layout.total_bytes(9));
  host_space host({.budget = 4096});
  CHECK_THROWS_WITH_AS(
      kv_tiers(cache,
               offload::layout_mover(host_executor{}, {.data = kv.data(), .blocks = 8, .layout = layout}),
               {.name = "t"}, offload::kv_tier(host, 4096)),
      "t: the mover's memory has 8 blocks, the cache uses 9, the null block among them; give the mover all "
      "of the "
      "cache's memory",
      argument_error);
}

TEST_CASE("a cache reports to one kv_tiers only") {
  rig r;
  host_space other({.budget = 4096});
  CHECK_THROWS_WITH_AS(
      kv_tiers(r.cache, manual_mover(r.contents, r.stream), {.name = "t"}, offload::kv_tier(other, 1024)),
      "t: the cache has tiers already, and reports to one kv_tiers only; destroy the other first, or give "
      "one of them more tiers",
      argument_error);
}

TEST_CASE("invalid contents that only the tiers still have also leave them") {
  struct hybrid : hybrid_traits {
    using observer = offload::tier_link;
  };
  const std::array groups{sliding_window({"local", 1, 16, 4}, 8)};
  hybrid_allocator<hybrid> cache({.groups = groups,
                                  .budget_bytes = 64 * 64,
                                  .page_bytes = 64,
                                  .max_sequences = 4,
                                  .max_sequence_tokens = 64});
  kv_contents contents(groups, cache.pool().block_ids());
  transfer_list stream{true};
  host_space host({.budget = 1 << 16});
  kv_tiers tiers(cache, manual_mover(contents, stream), {}, offload::kv_tier(host, 1 << 16));
  const auto prompt = count_up(0, 32);
  const sequence_id id = cache.create().value();
  for (std::size_t first = 0; first < prompt.size(); first += 4) {
    cache.append(id, std::span(prompt).subspan(first, 4)).value();
    cache.commit(id).value();
    tiers.store(id).value();
    tiers.flush();
  }
  cache.drop_idle();
  const kv_chain chain(cache, prompt);
  REQUIRE(tiers.lookup(chain, 0).tokens == 32);
  cache.invalidate(id, 4).value();
  CHECK(tiers.lookup(chain, 0).tokens == 4);
}

TEST_CASE("a cache may have other observers next to the link") {
  struct two_observers : paged_traits {
    using observer = paging::observers<event_log, offload::tier_link>;
  };
  paged_allocator<two_observers> cache(
      {.blocks = 4, .block_tokens = 4, .max_sequences = 2, .max_sequence_tokens = 16},
      two_observers::observer(event_log({.events = 64}), offload::tier_link{}));
  kv_contents contents(one_group, cache.max_physical_blocks());
  transfer_list stream{true};
  host_space host({.budget = 4 * block_bytes});
  kv_tiers tiers(cache, manual_mover(contents, stream), {.store = write_back{}, .load_headroom = 0},
                 offload::kv_tier(host, 4 * block_bytes));
  const auto prompt = count_up(0, 8);
  const sequence_id id = cache.create().value();
  cache.append(id, prompt).value();
  cache.commit(id).value();
  cache.release(id).value();
  cache.drop_idle();
  tiers.flush();
  CHECK(tiers.lookup(kv_chain(cache, prompt), 0).tokens == 8);
}

TEST_CASE("in a hybrid cache, windows load their window, and states their last snapshot") {
  struct hybrid : hybrid_traits {
    using observer = offload::tier_link;
  };
  const std::array groups{full_attention({"full", 1, 16, 4}), sliding_window({"local", 1, 16, 4}, 8),
                          state_snapshots("states", 1, 64, 8)};
  hybrid_allocator<hybrid> cache({.groups = groups,
                                  .budget_bytes = 64 * 128,
                                  .page_bytes = 128,
                                  .max_sequences = 4,
                                  .max_sequence_tokens = 64});
  kv_contents contents(groups, cache.pool().block_ids());
  transfer_list stream{true};
  host_space host({.budget = 1 << 16});
  kv_tiers tiers(cache, manual_mover(contents, stream), {}, offload::kv_tier(host, 1 << 16));
  const auto table_of = [&](sequence_id id) { return [&, id](std::size_t g) { return cache.table(id, g); }; };
  kv_sequence one;
  one.id = cache.create().value();
  for (const token_id each : count_up(0, 32))
    one.push(each);
  cache.append(one.id, one.tokens).value();
  compute(contents, one, 0, 32, table_of(one.id));
  cache.commit(one.id).value();
  tiers.store(one.id).value();
  tiers.flush();
  cache.release(one.id).value();
  cache.drop_idle();

  const kv_chain chain(cache, one.tokens);
  kv_sequence two = one;
  two.id = cache.create().value();
  const offload::kv_lookup_result where = tiers.lookup(two.id, chain);
  CHECK(where.tokens == 32);
  CHECK(where.blocks[0] == 8 + 2 + 1);
  // Half of the prompt needs as many blocks of the window and the states: all of it is cheaper.
  offload::load_costs costs{.prefill_ns = 1000};
  costs.links[0].link.bytes_per_second = 1'000'000'000;
  const offload::load_choice choice = tiers.choose_load(two.id, chain, costs);
  CHECK(choice.tokens == 32);
  CHECK(choice.ns == 10 * contents.block_bytes(0) + contents.block_bytes(2));
  costs.links[0].link.bytes_per_second = 1'000;
  CHECK(tiers.choose_load(two.id, chain, costs).tokens == 0);
  auto load = tiers.prepare_load(two.id, chain).value();
  for (std::size_t g = 0; g < groups.size(); ++g)
    load.wait(1, g).value();
  CHECK(load.complete().is_complete());
  CHECK(wrong_contents(contents, two, 32, table_of(two.id)) == "");
  CHECK(cache.cached_tokens(one.tokens) == 32);
  CHECK(cache.audit() == sound);
  cache.release(two.id).value();
}

namespace {

struct request {
  sequence_id id{};
  tiers_type::load load;
};

/// Two requests for one prompt of four blocks, over a first tier of three slots and a lower one of five.
class two_requests {
 public:
  static constexpr std::uint32_t events = 10;

  two_requests() : before_(r_.written(prompt_)) {
    while (r_.tiers.stats().tiers[1].held != 4) {
      r_.tiers.store(before_.id).value();
      r_.tiers.flush();
    }
    // Another block pushes two of the four out of the first tier.
    r_.cache.release(before_.id).value();
    const kv_sequence other = r_.written(count_up(900, 4));
    r_.tiers.store(other.id).value();
    r_.tiers.flush();
    r_.cache.release(other.id).value();
    r_.cache.drop_idle();
    r_.contents.wipe();
  }
  /// What is wrong, if anything is.
  std::string happen(std::uint32_t event) {
    switch (event) {
      case 0:
      case 1:
        begin(event);
        break;
      case 2:
      case 3:
        complete(event - 2);
        break;
      case 4:
        if (asked_[0]) asked_[0]->load.cancel();
        break;
      case 5:
        leave(0);
        break;
      case 6:
        r_.cache.drop_idle();
        break;
      case 7:
      case 8:
        if (const auto ready = r_.below.transfers().can_end(); !ready.empty())
          r_.below.transfers().end(ready[0], event == 7 ? ending::moved : ending::failed);
        r_.tiers.progress();
        break;
      default:
        if (const auto ready = r_.stream.can_end(); !ready.empty()) r_.stream.end(ready[0], ending::moved);
        r_.tiers.progress();
    }
    return wrong_;
  }
  std::string end() {
    complete(0);
    complete(1);
    leave(0);
    leave(1);
    r_.stream.end_all();
    r_.tiers.flush();
    for (const auto& found : {r_.cache.audit(), r_.tiers.audit()}) {
      if (!found.empty() && wrong_.empty()) wrong_ = found[0];
    }
    if (r_.tiers.stats().loads != 0 && wrong_.empty()) wrong_ = "a load is left";
    for (std::size_t k = 0; k < 2; ++k) {
      if (r_.tiers.stats().tiers[k].in_use != 0 && wrong_.empty()) wrong_ = "a slot is left in use";
    }
    r_.cache.drop_idle();
    if (r_.cache.stats().free_blocks != 8 && wrong_.empty()) wrong_ = "a block is left";
    return wrong_;
  }

 private:
  void begin(std::uint32_t which) {
    if (asked_[which]) return;
    asked_[which].emplace();
    request& of = *asked_[which];
    of.id = r_.cache.create().value();
    const std::uint64_t hit = r_.cache.match(of.id, prompt_).value().tokens;
    look(of.id, hit);
    auto load = r_.tiers.prepare_load(of.id, chain_);
    if (load) of.load = std::move(*load);
  }
  void complete(std::uint32_t which) {
    if (!asked_[which]) return;
    request& of = *asked_[which];
    const bool was_cancelled = !of.load && of.load.wanted() != of.load.first();
    const offload::load_result came = of.load.complete();
    const std::uint64_t right = was_cancelled ? came.first : came.tokens;
    if (right > r_.cache.tokens(of.id)) return;
    r_.cache.truncate(of.id, right).value();
    look(of.id, right);
    const auto rest = std::span(prompt_).subspan(static_cast<std::size_t>(right));
    if (!rest.empty() && r_.cache.append(of.id, rest)) {
      r_.stream.end_all();
      kv_sequence like = before_;
      like.id = of.id;
      compute(r_.contents, like, right, prompt_.size(), r_.table(of.id));
      r_.cache.commit(of.id).value();
      look(of.id, prompt_.size());
    }
    r_.tiers.store(of.id).value();
  }
  void leave(std::uint32_t which) {
    if (!asked_[which]) return;
    r_.cache.release(asked_[which]->id).value();
    asked_[which].reset();
  }
  void look(sequence_id id, std::uint64_t tokens) {
    if (wrong_.empty() && tokens != 0) wrong_ = r_.wrong(before_, id, tokens);
  }

  std::vector<token_id> prompt_ = count_up(0, 16);
  rig r_{{}, demoting<write_through>{}, 3, 5};
  kv_sequence before_;
  kv_chain chain_{r_.cache, prompt_};
  std::array<std::optional<request>, 2> asked_;
  std::string wrong_;
};

}  // namespace

TEST_CASE("in every order of five events of two requests no token is wrong and no block is left behind") {
  const std::uint32_t orders =
      llmmem_tests::run_event_orders(5, [](std::uint32_t) { return two_requests(); });
  CHECK(orders == 100'000);
}
