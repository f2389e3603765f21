#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/tiered_view.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_storage.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/changing_state.hpp"
#include "support/error_text.hpp"
#include "support/newest_state.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

using bytes = std::vector<std::byte>;
using buffer_type = tiered_buffer<host_space, host_space>;
using view = tiered_state_view<buffer_type>;

static_assert(change_tracking_view<view> && is_stable_view<view> && !view::is_concurrent);

using checkpointer = async_checkpointer<view_traits<view>>;

/// Chunks with tensors in them, and a model of what is in each.
struct tiered_state {
  static constexpr std::uint64_t most = 1024;  // bytes of a chunk
  random_numbers random;
  host_space space{{.budget = 1 << 20}};
  buffer_type buffer;
  std::vector<chunk_handle> chunks{};
  std::vector<bytes> contents{};
  std::vector<state_place> places{};
  std::vector<state_tensor> tensors{};
  last_snapshot saving{};

  /// @param beneath  bytes of the last tier, besides those that the chunks take at first.
  tiered_state(std::uint64_t seed, std::uint64_t beneath, std::uint32_t max_chunks = 64)
      : random(seed),
        buffer({.max_chunks = max_chunks}, {space, 4 * most, 64}, {space, 8 * most + beneath, 64}) {
    for (int i = 0; i < 8; ++i) {
      bytes& made = contents.emplace_back(static_cast<std::size_t>(1 + random.below(most)));
      chunks.push_back(buffer.create(made.size()).value());
      write(chunks.size() - 1);
      const auto source = static_cast<std::uint32_t>(i);
      const std::uint64_t first = random.below(made.size());
      places.push_back({source, first, made.size() - first});
      if (first != 0) places.push_back({source, 0, first});
    }
    for (const state_place& each : places)
      tensors.push_back(byte_tensor("t" + std::to_string(tensors.size()), each.bytes));
  }

  [[nodiscard]] std::vector<bytes> now() const {
    std::vector<bytes> all;
    for (const state_place& each : places) {
      const auto first = contents[each.source].begin() + static_cast<std::ptrdiff_t>(each.offset);
      all.emplace_back(first, first + static_cast<std::ptrdiff_t>(each.bytes));
    }
    return all;
  }

  view view_now() { return view(buffer, chunks, places); }
  [[nodiscard]] auto audit() const { return buffer.audit(); }

  /// Again after waiting for the snapshot, where there is no second place for the chunk.
  template <class Lease>
  auto leased(Lease lease) {
    auto given = lease();
    if (given.code() == errc::out_of_bytes && saving.wait()) given = lease();
    REQUIRE_MESSAGE(given, given.error().message());
    return std::move(given).value();
  }
  void write(std::size_t at) {
    auto lease = leased([&] { return buffer.write(chunks[at]); });
    const std::uint64_t value = random.next();
    for (std::size_t i = 0; i < contents[at].size(); ++i)
      lease.span()[i] = contents[at][i] = static_cast<std::byte>(value + i * 3);
  }
  void update(std::size_t at) {
    const std::uint64_t first = random.below(contents[at].size());
    const std::uint64_t count = 1 + random.below(contents[at].size() - first);
    auto lease = leased([&] { return buffer.update(chunks[at], first, count); });
    for (auto i = static_cast<std::size_t>(first); i < first + count; ++i)
      lease.span()[i] = contents[at][i] = static_cast<std::byte>(random.next());
  }
  void act() {
    const std::size_t at = random.below(chunks.size());
    switch (random.below(6U)) {
      case 0:
        return write(at);
      case 1:
        return static_cast<void>(buffer.evict(chunks[at]));
      case 2:
        return static_cast<void>(buffer.flush(chunks[at]));
      default:
        return update(at);
    }
  }
};

}  // namespace

TEST_SUITE("tiered_state_view") {
  TEST_CASE(
      "a save has the state of the moment when the view was taken, regardless of later moves and changes") {
    std::uint64_t waits = 0;
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      tiered_state w(seed, seed % 2 == 0 ? 24 * tiered_state::most : 0);
      const std::uint64_t beneath = w.buffer.stats().tiers[1].used;
      simulated_storage storage;
      solo_coordinator coordinator(storage);
      std::vector<bytes> last;
      {
        checkpointer saves(coordinator, w.tensors, random_ring(w.random, 400, 20));
        last = save_while_changing(saves, storage, w, {.steps = 5, .meanwhile = 16, .stage_ns = 2'000});
        w.saving.guard.reset();
      }
      check_newest(storage, w.tensors, 5, last);
      CHECK(w.buffer.stats().shared == 0);
      CHECK(w.buffer.stats().tiers[1].used == beneath);
      waits += w.saving.waits;
    }
    CHECK(waits > 0);
  }

  TEST_CASE("taking a view moves nothing and takes no memory; its clones end with its last copy") {
    tiered_state w(1, 0);
    const auto before = w.buffer.stats();
    std::optional<view> first(std::in_place, w.buffer, w.chunks, w.places);
    std::optional<view> second(*first);
    const auto taken = w.buffer.stats();
    CHECK(taken.shared == 2 * w.chunks.size());
    CHECK(taken.tiers[0].used == before.tiers[0].used);
    CHECK(taken.tiers[1].used == before.tiers[1].used);
    CHECK(taken.moved.links == before.moved.links);
    first.reset();
    CHECK(w.buffer.stats().shared == 2 * w.chunks.size());
    second.reset();
    CHECK(w.buffer.stats().shared == 0);
  }

  TEST_CASE("a snapshot is copied by stage_for, and its clones no longer exist before it is on the disk") {
    tiered_state w(2, 0);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, w.tensors, {.ring_bytes = 1 << 16, .chunk_bytes = 256});
    const snapshot_guard guard = saves.begin_snapshot(1, w.view_now());
    CHECK(w.buffer.stats().shared != 0);
    CHECK(saves.stage_for(commit_ticket::forever));
    CHECK(guard.is_staged());
    CHECK(w.buffer.stats().shared == 0);
    CHECK(guard.ticket().wait() == commit_status::committed);
  }

  TEST_CASE("bytes are unchanged since a tag if no lease wrote their chunk between the snapshots") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      tiered_state w(seed, 64 * tiered_state::most, 200);
      struct moment {
        std::uint64_t tag;
        std::vector<bytes> contents;
        std::vector<int> writes;
      };
      std::vector<int> writes(w.chunks.size());
      std::vector<moment> moments;
      std::optional<view> held;
      for (int step = 0; step < 20; ++step) {
        for (std::uint64_t i = w.random.below(std::uint64_t{4}); i > 0; --i) {
          const std::size_t at = w.random.below(w.chunks.size());
          switch (w.random.below(5U)) {
            case 0:
              w.write(at);
              ++writes[at];
              break;
            case 1:
              w.update(at);
              ++writes[at];
              break;
            case 2:
              REQUIRE(w.buffer.read(w.chunks[at]));
              break;
            case 3:
              static_cast<void>(w.buffer.evict(w.chunks[at]));
              break;
            default:
              static_cast<void>(w.buffer.flush(w.chunks[at]));
          }
        }
        view taken = w.view_now();
        moments.push_back({taken.version(), w.now(), writes});
        if (w.random.once_in(2)) held.emplace(taken);  // so that chunks part, and else are written in place
        if (w.random.once_in(4)) held.reset();
        for (const moment& since : moments) {
          for (std::uint32_t tensor = 0; tensor < w.places.size(); ++tensor) {
            const state_place& place = w.places[tensor];
            const bool same = since.writes[place.source] == writes[place.source];
            REQUIRE(taken.is_unchanged_since(since.tag, tensor, 0, place.bytes) == same);
            if (same) REQUIRE(since.contents[tensor] == moments.back().contents[tensor]);
          }
        }
      }
      for (const moment& later : moments) {
        const view& first = w.view_now();
        CHECK(first.is_unchanged_since(later.tag + 1'000'000, 0, 0, 1) == false);
      }
    }
  }

  TEST_CASE("views of other chunks, places and buffers do not know a tag") {
    tiered_state w(6, 0);
    tiered_state other(6, 0);
    const std::uint64_t tag = w.view_now().version();
    CHECK(w.view_now().is_unchanged_since(tag, 0, 0, 1));
    CHECK(!w.view_now().is_unchanged_since(0, 0, 0, 1));
    CHECK(!other.view_now().is_unchanged_since(tag, 0, 0, 1));
    std::vector<chunk_handle> swapped = w.chunks;
    std::swap(swapped[0], swapped[1]);
    const std::array one{state_place{0, 0, 1}};
    const std::uint64_t of_one = view(w.buffer, w.chunks, one).version();
    CHECK(view(w.buffer, w.chunks, one).is_unchanged_since(of_one, 0, 0, 1));
    CHECK(!view(w.buffer, swapped, one).is_unchanged_since(of_one, 0, 0, 1));
    CHECK(!view(w.buffer, w.chunks, std::array{state_place{1, 0, 1}}).is_unchanged_since(of_one, 0, 0, 1));
    CHECK(!view(w.buffer, w.chunks, one).is_unchanged_since(tag, 0, 0, 1));
  }

  TEST_CASE("an incremental save writes the changed chunks, and the restored state is right") {
    tiered_state w(7, 64 * tiered_state::most);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, w.tensors, {.ring_bytes = 1 << 12, .chunk_bytes = 64, .full_every = 4});
    for (std::uint64_t step = 1; step <= 8; ++step) {
      w.update(static_cast<std::size_t>(step) % w.chunks.size());
      const std::vector<bytes> expected = w.now();
      const std::uint64_t before = saves.stats().persisted_bytes;
      REQUIRE(saves.begin_snapshot(step, w.view_now()).ticket().wait() == commit_status::committed);
      const std::uint64_t wrote = saves.stats().persisted_bytes - before;
      if (step % 4 != 1) CHECK(wrote < tiered_state::most + 4 * 64);
      if (step % 4 == 1) CHECK(wrote >= saves.plan().bytes);
      check_newest(storage, w.tensors, step, expected);
    }
    CHECK(saves.stats().unchanged_bytes != 0);
  }

  TEST_CASE("a refused lease during the copy ends the checkpoint, and the training continues") {
    tiered_state w(3, 24 * tiered_state::most);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, w.tensors, {.ring_bytes = 1 << 16, .chunk_bytes = 256});
    const snapshot_guard guard = saves.begin_snapshot(1, w.view_now());
    {
      const chunk_handle all = w.buffer.create(4 * tiered_state::most).value();
      const auto fills_tier_0 = w.buffer.write(all).value();
      CHECK(saves.stage_for(commit_ticket::forever));
      CHECK(guard.is_staged());
    }
    CHECK(guard.ticket().wait() == commit_status::not_committed);
    CHECK(guard.ticket().why().find("step 1 was abandoned: the state could not be copied: ") !=
          std::string::npos);
    CHECK(w.buffer.stats().shared == 0);
    CHECK(saves.begin_snapshot(2, w.view_now()).ticket().wait() == commit_status::committed);
  }

  TEST_CASE("a refused view reports the reason, and leaves no clones") {
    tiered_state w(4, 0, 11);
    CHECK(text_of([&] { static_cast<void>(w.view_now()); }).find("the table of chunks is full") !=
          std::string::npos);
    CHECK(w.buffer.stats().shared == 0);
    const std::array some{w.chunks[0], w.chunks[1]};
    {
      const auto lease = w.buffer.write(w.chunks[1]).value();
      CHECK_THROWS_AS(view(w.buffer, some, w.places), argument_error);
    }
    CHECK(w.buffer.stats().shared == 0);
    REQUIRE(w.buffer.discard(w.chunks[1]));
    CHECK_THROWS_AS(view(w.buffer, some, w.places), argument_error);
    CHECK(w.buffer.stats().shared == 0);
  }

  TEST_CASE("a view that was moved from reports it, and a list that was moved from is unchanged") {
    tiered_state w(8, 0);
    view taken = w.view_now();
    const view moved = std::move(taken);
    bytes into(1);
    // NOLINTNEXTLINE(bugprone-use-after-move): that is what is asked
    CHECK(text_of([&] { taken.copy_out(0, 0, into); }) ==
          "tiered_state_view: it was moved from; take another view, or copy it first");
    moved.copy_out(0, 0, into);
    view_list<state_place> places{{0, 0, 1}, {1, 0, 1}};
    const view_list<state_place> same = std::move(places);
    CHECK(same.entries().size() == 2);
    CHECK(places.entries().data() == same.entries().data());  // NOLINT(bugprone-use-after-move)
    CHECK(view_list<state_place>().entries().empty());
  }

  TEST_CASE("bytes outside every place, and places outside every chunk, are refused with their numbers") {
    tiered_state w(5, 0);
    const chunk_handle chunk = w.buffer.create(100).value();
    w.buffer.write(chunk).value().span()[99] = std::byte{7};
    const std::array places{state_place{0, 90, 10}, state_place{1, 0, 4}, state_place{0, 91, 10}};
    const view of(w.buffer, std::array{chunk}, places);
    bytes into(10);
    of.copy_out(0, 0, into);
    CHECK(into[9] == std::byte{7});
    CHECK(text_of([&] { of.copy_out(0, 1, into); }) ==
          "tiered_state_view: bytes 1 to 11 of tensor 0 do not exist: pass a place for each described "
          "tensor, in that order");
    CHECK(text_of([&] { of.copy_out(1, 0, std::span(into).first(4)); }) ==
          "tiered_state_view: tensor 1 is in chunk 1, but the number of chunks is 1");
    CHECK(text_of([&] { of.copy_out(2, 0, into); }) ==
          "tiered_state_view: the place of tensor 2, 10 bytes from 91, is past the end of source 0, which "
          "has 100");
  }
}
