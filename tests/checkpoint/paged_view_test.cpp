#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/paged_view.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/changing_state.hpp"
#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

using bytes = std::vector<std::byte>;
using view = paged_state_view<paged_allocator<>, host_space>;

static_assert(state_view<view> && is_stable_view<view> && !view::is_concurrent);

using checkpointer = async_checkpointer<view_traits<view>>;

/// An engine of three requests, whose KV of a token is 8 bytes.
struct generation {
  static constexpr std::uint32_t block_tokens = 4;
  static constexpr std::uint64_t block_bytes = block_tokens * 8;
  static constexpr std::uint64_t rows = 12;
  random_numbers random;
  paged_allocator<> cache;
  host_space host{{.budget = 1 << 20}};
  block_storage<host_space> storage;
  std::vector<sequence_id> sequences{};
  std::vector<state_tensor> tensors{};
  last_snapshot saving{};

  generation(std::uint64_t seed, std::uint64_t blocks, std::uint32_t max_sequences = 16)
      : random(seed),
        cache({.blocks = blocks, .block_tokens = block_tokens, .max_sequences = max_sequences}),
        storage(host, cache.physical_blocks(), block_bytes) {
    for (int i = 0; i < 3; ++i) {
      sequences.push_back(cache.create().value());
      tensors.push_back({.name = "kv" + std::to_string(i),
                         .type = safetensors_type::u8,
                         .shape = {rows, block_bytes},
                         .group = "kv",
                         .part = {}});
    }
  }

  /// What the tensors have to hold, read through the tables.
  [[nodiscard]] std::vector<bytes> now() const {
    std::vector<bytes> all;
    for (const sequence_id each : sequences) {
      bytes& kv = all.emplace_back(static_cast<std::size_t>(rows * block_bytes));
      std::size_t at = 0;
      for (const block_id block : cache.blocks(each)) {
        std::memcpy(kv.data() + at, storage[block].data, block_bytes);
        at += block_bytes;
      }
    }
    return all;
  }

  view view_now() { return view(cache, sequences, storage, rows); }
  [[nodiscard]] auto audit() const { return cache.audit(); }

  void append(std::size_t which) {
    const sequence_id sequence = sequences[which];
    const std::uint64_t left = rows * block_tokens - cache.tokens(sequence);
    if (left == 0) return shorten(which);
    std::vector<token_id> tokens(1 + random.below(left < 9 ? left : 9));
    for (token_id& each : tokens)
      each = static_cast<token_id>(random.below(std::uint64_t{3}));  // prefixes meet
    auto grown = cache.append(sequence, tokens);
    if (grown.code() == errc::out_of_blocks && saving.wait()) grown = cache.append(sequence, tokens);
    if (!grown) return shorten(which);
    REQUIRE(storage.copy_async(host, grown->copy));
    for (std::uint64_t i = grown->first; i < cache.tokens(sequence); ++i) {
      const std::uint64_t kv = random.next();
      std::memcpy(storage[cache.blocks(sequence)[i / block_tokens]].data + (i % block_tokens) * 8, &kv, 8);
    }
  }
  void shorten(std::size_t which) {
    REQUIRE(cache.truncate(sequences[which], random.below(cache.tokens(sequences[which]) + 1)));
  }
  void move_blocks() {
    const auto plan = plan_compaction(cache.compaction_facts_now(), {});
    const auto copy = [&](std::span<const block_move> moves) noexcept {
      for (const block_move& each : moves)
        std::memcpy(storage[each.destination].data, storage[each.source].data, block_bytes);
      return true;
    };
    REQUIRE(cache.compact(plan.moves, copy));
  }
  void act() {
    const std::size_t which = random.below(sequences.size());
    switch (random.below(8U)) {
      case 0:
        return shorten(which);
      case 1:
        static_cast<void>(cache.commit(sequences[which]).value());
        return;
      case 2:  // another request, which may find what is cached
        REQUIRE(cache.release(sequences[which]));
        sequences[which] = cache.create().value();
        static_cast<void>(cache.match(sequences[which], std::vector<token_id>(5, token_id{1})).value());
        return;
      case 3:
        return move_blocks();
      default:
        return append(which);
    }
  }
};

}  // namespace

TEST_SUITE("paged_state_view") {
  TEST_CASE("a save has the KV of the moment when the view was taken, regardless of later tokens") {
    std::uint64_t waits = 0;
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      generation w(seed, seed % 2 == 0 ? 100 : 30);
      simulated_storage storage;
      solo_coordinator coordinator(storage);
      std::vector<bytes> last;
      {
        checkpointer saves(coordinator, w.tensors, random_ring(w.random, 300, 6));
        last = save_while_changing(saves, storage, w,
                                   {.steps = 6, .before = 8, .meanwhile = 16, .stage_ns = 1'000});
        w.saving.guard.reset();
      }
      check_newest(storage, w.tensors, 6, last);
      CHECK(w.cache.stats().sequences == w.sequences.size());
      waits += w.saving.waits;
    }
    CHECK(waits > 0);
  }

  TEST_CASE("copies of a view share its forks, which end with the last copy") {
    generation w(1, 30);
    w.append(0);
    const std::uint64_t tokens = w.cache.tokens(w.sequences[0]);
    std::optional<view> first(std::in_place, w.cache, w.sequences, w.storage, w.rows);
    std::optional<view> second(*first);
    CHECK(w.cache.stats().sequences == 6);
    w.append(0);
    CHECK(second->tokens(0) == tokens);
    CHECK(second->tokens(1) == 0);
    CHECK(second->tokens(3) == 0);
    first.reset();
    CHECK(w.cache.stats().sequences == 6);
    second.reset();
    CHECK(w.cache.stats().sequences == 3);
  }

  TEST_CASE("a refused view reports the reason, and leaves no forks") {
    generation w(2, 30, 5);
    CHECK(text_of([&] { static_cast<void>(w.view_now()); }).find("paged_allocator: ") == 0);
    CHECK_THROWS_AS(w.view_now(), out_of_memory);
    CHECK(w.cache.stats().sequences == 3);
    const std::array two{w.sequences[0], w.sequences[1]};
    static_cast<void>(w.cache.extend(two[1], 9).value());
    CHECK_THROWS_WITH_AS(view(w.cache, two, w.storage, 2),
                         "paged_state_view: sequence 1 has 3 blocks, but its tensor has rows for 2; describe "
                         "the tensor with more rows",
                         length_error);
    CHECK(w.cache.stats().sequences == 3);
    const block_storage<host_space> smaller(w.host, 1, generation::block_bytes);
    CHECK_THROWS_AS(view(w.cache, two, smaller, w.rows), argument_error);
    CHECK(w.cache.stats().sequences == 3);
    REQUIRE(w.cache.release(two[0]));
    CHECK_THROWS_AS(view(w.cache, two, w.storage, w.rows), handle_error);
  }

  TEST_CASE("bytes outside a tensor are refused with their numbers") {
    generation w(3, 30);
    const view of(w.cache, w.sequences, w.storage, 2);
    bytes into(64, std::byte{1});
    of.copy_out(2, 0, into);
    CHECK(into == bytes(64));
    CHECK(text_of([&] { of.copy_out(2, 1, into); }) ==
          "paged_state_view: bytes 1 to 65 of tensor 2 are not in it: there are 3, with 64 bytes each");
    CHECK(text_of([&] { of.copy_out(3, 0, into); }) ==
          "paged_state_view: bytes 0 to 64 of tensor 3 are not in it: there are 3, with 64 bytes each");
  }
}
