#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/block_pool.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/testing_access.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr block_id operator""_b(unsigned long long i) {
  return block_id{static_cast<std::uint32_t>(i)};
}

/// The pool's definition: counts in a map, lists in deques, searched linearly.
class pool_oracle {
 public:
  explicit pool_oracle(std::uint32_t blocks) {
    for (std::uint32_t i = blocks; i > 0; --i)
      free_.push_front(block_id{i});
  }

  std::vector<block_id> allocate(std::size_t n) {
    std::vector<block_id> out;
    if (n > free_.size() + idle_.size()) return out;
    while (free_.size() < n) {
      free_.push_front(idle_.front());
      cached_.erase(idle_.front());
      idle_.pop_front();
    }
    for (; n > 0; --n) {
      out.push_back(free_.front());
      references_[free_.front()] = 1;
      free_.pop_front();
    }
    return out;
  }
  void share(block_id block) {
    if (references_[block]++ == 0) std::erase(idle_, block);
  }
  void release(block_id block) {
    if (--references_[block] > 0) return;
    if (cached_.contains(block)) {
      idle_.push_back(block);
    } else {
      free_.push_front(block);
    }
  }
  void mark_cached(block_id block) { cached_[block] = true; }

  [[nodiscard]] std::size_t free() const { return free_.size(); }
  [[nodiscard]] std::size_t idle() const { return idle_.size(); }
  [[nodiscard]] bool cached(block_id block) const { return cached_.contains(block); }
  [[nodiscard]] const std::deque<block_id>& idle_blocks() const { return idle_; }

 private:
  std::map<block_id, std::uint32_t> references_;
  std::map<block_id, bool> cached_;
  std::deque<block_id> free_;  // front is handed out next
  std::deque<block_id> idle_;  // front is evicted next
};

}  // namespace

TEST_CASE(
    "a pool behaves as two queues: of free blocks, the last freed first, and of idle ones, the oldest "
    "first") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto blocks = 1 + static_cast<std::uint32_t>(seed % 30);
    block_pool<> pool({.blocks = blocks});
    pool_oracle model(blocks);
    std::vector<block_id> held;
    for (int i = 0; i < 400; ++i) {
      switch (random.below(4U)) {
        case 0: {
          std::vector<block_id> out(random.below(std::uint64_t{5}));
          const bool done = pool.allocate(out).has_value();
          const auto expected = model.allocate(out.size());
          REQUIRE(done == (out.size() == expected.size()));
          if (done) {
            REQUIRE(out == expected);
            held.insert(held.end(), out.begin(), out.end());
          }
          break;
        }
        case 1:
          if (!held.empty()) {
            const block_id block = held[random.below(held.size())];
            REQUIRE(pool.share(block));
            model.share(block);
            held.push_back(block);
          } else if (!model.idle_blocks().empty()) {
            const block_id block = model.idle_blocks()[random.below(model.idle())];
            REQUIRE(pool.share(block));
            model.share(block);
            held.push_back(block);
          }
          break;
        case 2:
          if (!held.empty()) {
            const std::size_t n = random.below(held.size()) + 1;
            const std::vector<block_id> gone(held.end() - static_cast<std::ptrdiff_t>(n), held.end());
            REQUIRE(pool.release(gone));
            for (std::size_t k = n; k > 0; --k)
              model.release(gone[k - 1]);
            held.resize(held.size() - n);
          }
          break;
        default:
          if (!held.empty()) {
            const block_id block = held[random.below(held.size())];
            if (!model.cached(block)) {
              pool.mark_cached(block);
              model.mark_cached(block);
            }
          }
      }
      REQUIRE(pool.free() == model.free());
      REQUIRE(pool.idle() == model.idle());
      REQUIRE(pool.audit() == std::vector<std::string>{});
    }
  }
}

TEST_CASE("a batch of allocations succeeds completely or not at all, and reports the missing blocks") {
  block_pool<> pool({.blocks = 4, .name = "kv"});
  std::array<block_handle, 3> three;
  REQUIRE(pool.allocate(three));
  std::array<block_handle, 2> two;
  const auto refused = pool.allocate(two);
  CHECK(refused.error() == failure{errc::out_of_blocks, 0, 2, 1});
  CHECK(refused.error().message() ==
        "kv: 2 blocks needed, 1 free or evictable; release sequences, or build the cache with more blocks");
  CHECK(pool.free() == 1);
  CHECK(two[0] == block_handle{});
  CHECK(pool.allocate(std::span<block_id>{}));
}

TEST_CASE("the null block is never handed out and never released") {
  block_pool<> pool({.blocks = 2});
  std::array<block_id, 2> all;
  REQUIRE(pool.allocate(all));
  CHECK(all == std::array{1_b, 2_b});
  CHECK(pool.release(null_block).code() == errc::null_handle);
  CHECK(pool.share(null_block).code() == errc::null_handle);
  CHECK(pool.release(block_handle{}).error().message() ==
        "block_pool: null handle; it was never assigned, or was moved from");
}

TEST_CASE("a double free, a stale handle and a foreign one are distinguished, and change nothing") {
  block_pool<> pool({.blocks = 3, .name = "kv"});
  block_pool<> other({.blocks = 3, .name = "other"});
  const block_handle first = pool.allocate().value();
  REQUIRE(pool.release(first));
  CHECK(pool.release(first).error().message() ==
        "kv: stale handle to slot 1 (generation 0, now 1): it was already released; keep one owner for each "
        "handle");
  CHECK(pool.release(first.block).error().message() ==
        "kv: double free: block 1 has no references left; release each reference once, through one owner");

  const block_handle second = pool.allocate().value();  // the same block, in its next life
  REQUIRE(second.block == first.block);
  CHECK(pool.release(first).code() == errc::stale_handle);
  CHECK(pool.share(first).code() == errc::stale_handle);
  CHECK(other.release(second).error().message() ==
        "other: the handle (slot 1) belongs to another object; use it with the object that made it");
  CHECK(pool.release(block_id{4}).code() == errc::foreign_handle);
  CHECK(pool.check(second));
  CHECK(pool.stats().active == 1);

  pool.mark_cached(second.block);
  REQUIRE(pool.release(second));
  CHECK(pool.release(second).code() == errc::double_free);  // idle: the life goes on, but nobody holds it
  CHECK(pool.share(second));                                // and it can be revived by the same handle
  CHECK(pool.audit() == std::vector<std::string>{});
}

TEST_CASE_TEMPLATE("a batch with one bad member at any position releases none", Eviction, lru_eviction,
                   any_eviction) {
  for (std::size_t bad = 0; bad < 4; ++bad) {
    CAPTURE(bad);
    block_pool<Eviction> pool({.blocks = 8});
    std::array<block_handle, 4> handles;
    REQUIRE(pool.allocate(handles));
    pool.mark_cached(handles[1].block);
    REQUIRE(pool.share(handles[2]));
    auto batch = handles;
    batch[bad].generation += 1;
    CHECK(pool.release(batch).code() == errc::stale_handle);
    for (const auto& handle : handles)
      CHECK(pool.check(handle));
    CHECK(pool.record(handles[2].block).references() == 2);
    CHECK(pool.stats().free == 4);
    CHECK(pool.audit() == std::vector<std::string>{});

    batch = handles;
    batch[bad] = batch[(bad + 1) % 4];  // a double free within the batch
    if (batch[bad].block != handles[2].block) {
      CHECK_FALSE(pool.release(batch));
      for (const auto& handle : handles)
        CHECK(pool.check(handle));
      CHECK(pool.stats().free == 4);
      CHECK(pool.audit() == std::vector<std::string>{});
    }
    REQUIRE(pool.release(handles));
    CHECK(pool.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a batch with one bad member shares none, and keeps the order of idle blocks") {
  block_pool<> pool({.blocks = 4});
  std::array<block_id, 3> ids;
  REQUIRE(pool.allocate(ids));
  for (const block_id id : ids)
    pool.mark_cached(id);
  REQUIRE(pool.release(std::array{3_b, 2_b, 1_b}));  // 1 is the oldest
  CHECK(pool.share(std::array{1_b, 4_b}).code() == errc::double_free);
  CHECK(pool.eviction().victim() == slot_id{1});
  CHECK(pool.stats().idle == 3);
}

TEST_CASE("references stop at their limit and do not wrap around") {
  block_pool<> pool({.blocks = 1, .name = "kv"});
  const block_handle block = pool.allocate().value();
  for (std::uint32_t i = 1; i < block_record::max_references; ++i)
    REQUIRE(pool.share(block.block).has_value());
  CHECK(pool.record(block.block).references() == block_record::max_references);
  CHECK(pool.share(block).error().message() ==
        "kv: block 1 has 16777215 references; 1 more could exceed the limit of 2^24 - 1; release some first");
  CHECK(pool.check(block));
}

TEST_CASE(
    "an eviction reports the blocks that lose their contents, in order, before the block is handed out") {
  block_pool<> pool({.blocks = 3});
  std::array<block_id, 3> ids;
  REQUIRE(pool.allocate(ids));
  for (const block_id id : ids)
    pool.mark_cached(id);
  const block_handle first = pool.handle(3_b);
  REQUIRE(pool.release(ids));  // back to front: 3 is evicted first
  std::vector<block_id> told;
  told.reserve(3);
  std::array<block_id, 2> out;
  REQUIRE(pool.allocate(
      out, [&](std::span<const block_id> gone) noexcept { told.assign(gone.begin(), gone.end()); }));
  CHECK(told == std::vector{3_b, 2_b});
  CHECK(pool.share(first).code() ==
        errc::stale_handle);  // what it named is gone, though somebody holds the block
  CHECK(pool.stats().evictions == 2);
  CHECK(pool.stats().idle == 1);
}

TEST_CASE("the withdrawal of 'cached' frees an idle block at once") {
  block_pool<> pool({.blocks = 2});
  const block_handle block = pool.allocate().value();
  pool.mark_cached(block.block);
  REQUIRE(pool.release(block));
  pool.unmark_cached(block.block);
  pool.unmark_cached(block.block);  // a second time: nothing
  CHECK(pool.stats().free == 2);
  CHECK(pool.stats().idle == 0);
  CHECK(pool.release(block).code() == errc::stale_handle);
  CHECK(pool.audit() == std::vector<std::string>{});
}

TEST_CASE("sizes that cannot be are refused, with the reason") {
  CHECK_THROWS_WITH_AS(block_pool<>({.blocks = 0, .name = "kv"}), "kv: 0 blocks; a pool needs at least one",
                       length_error);
  CHECK_THROWS_WITH_AS(
      block_pool<>({.blocks = max_blocks + 1, .name = "kv"}),
      "kv: 2147483647 blocks, more than the limit of 2147483646 (block ids are non-negative int32)",
      length_error);
  CHECK_THROWS_WITH_AS(
      block_pool<>({.blocks = ~std::uint64_t{0}, .name = "kv"}),
      "kv: 18446744073709551615 blocks, more than the limit of 2147483646 (block ids are non-negative int32)",
      length_error);
}

TEST_CASE("a policy that is too small for the pool is refused before it is used") {
  CHECK_THROWS_WITH_AS(
      block_pool<>({.blocks = 9, .name = "kv"}, lru_eviction(slot_count{9})),
      "kv: the eviction policy has 9 slots, but 10 are needed: one per block and one for the null block",
      length_error);
  CHECK_NOTHROW(block_pool<>({.blocks = 9}, lru_eviction(slot_count{10})));
}

TEST_CASE("a pool whose metadata cannot be allocated says so and leaks nothing") {
  CHECK(fail_each_allocation(
            [](const metadata_source& source) { block_pool<>({.blocks = 10, .metadata = source}); }) == 3);
}

TEST_CASE("a moved pool keeps its handles valid") {
  block_pool<> first({.blocks = 2});
  const block_handle block = first.allocate().value();
  block_pool<> second = std::move(first);
  CHECK(second.check(block));
  CHECK(second.release(block));
  CHECK(second.audit() == std::vector<std::string>{});
}

TEST_CASE("audit names the broken block and its last transition") {
  using corrupt = testing_access;
  const auto fresh = [] {
    block_pool<> pool({.blocks = 3, .name = "kv"});
    std::array<block_id, 2> ids;
    REQUIRE(pool.allocate(ids));
    pool.mark_cached(2_b);
    REQUIRE(pool.release(2_b));
    REQUIRE(pool.audit() == std::vector<std::string>{});
    return pool;  // 1 active, 2 idle, 3 free
  };
  SUBCASE("leaked") {
    auto pool = fresh();
    corrupt::forget_free_block(pool);
    CHECK(pool.audit() ==
          std::vector<std::string>{"kv: block 3 is leaked: neither held, kept nor free (last: never used)"});
  }
  SUBCASE("free and held") {
    auto pool = fresh();
    corrupt::list_as_free(pool, 1_b);
    CHECK(pool.audit() ==
          std::vector<std::string>{"kv: block 1 is in the free list with 1 references (last: allocated)"});
  }
  SUBCASE("free and cached") {
    auto pool = fresh();
    corrupt::list_as_free(pool, 2_b);
    CHECK(pool.audit() ==
          std::vector<std::string>{"kv: block 2 is in the free list and cached (last: idled)"});
  }
  SUBCASE("free twice") {
    auto pool = fresh();
    corrupt::list_as_free(pool, 3_b);
    CHECK(pool.audit() ==
          std::vector<std::string>{"kv: block 3 is in the free list twice (last: never used)"});
  }
  SUBCASE("a free block that does not exist") {
    auto pool = fresh();
    corrupt::list_as_free(pool, 9_b);
    CHECK(pool.audit() == std::vector<std::string>{"kv: the free list names block 9, which does not exist"});
  }
  SUBCASE("idle, but the policy does not know") {
    auto pool = fresh();
    corrupt::withdraw_candidate(pool, 2_b);
    CHECK(pool.audit() ==
          std::vector<std::string>{"kv: block 2 is idle but not an eviction candidate (last: idled)"});
  }
  SUBCASE("the null block in use") {
    auto pool = fresh();
    corrupt::hold_null_block(pool);
    CHECK(pool.audit() ==
          std::vector<std::string>{
              "kv: block 0 is the null block, which must not be held or cached (last: allocated)"});
  }
  SUBCASE("miscounted") {
    auto pool = fresh();
    corrupt::miscount_idle(pool);
    CHECK(pool.audit() == std::vector<std::string>{"kv: 1 blocks are idle, the count says 2"});
  }
}
