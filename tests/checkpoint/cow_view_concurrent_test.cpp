#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/cow_view.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/changing_state.hpp"
#include "support/error_text.hpp"
#include "support/newest_state.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/stuck_coordinator.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;

namespace {

using bytes = std::vector<std::byte>;

using checkpointer = async_checkpointer<view_traits<cow_state_view, stuck_coordinator>>;

/// Ranges, with tensors of all sizes laid out in them, gaps between.
struct cow_world {
  struct part {
    bytes state;
    bytes pool;
    std::unique_ptr<cow_range> range;
  };
  random_numbers random;
  std::uint64_t page;
  std::vector<part> parts{};
  std::vector<cow_range*> ranges{};
  std::vector<state_place> places{};
  std::vector<state_tensor> tensors{};
  last_snapshot saving{};

  cow_world(std::uint64_t seed, std::uint64_t least_pool, std::uint64_t most_pool,
            std::uint32_t max_snapshots = 8)
      : random(seed), page(std::uint64_t{64} << random.below(std::uint64_t{3})) {
    const std::size_t count = 1 + random.below(std::uint64_t{3});
    for (std::size_t i = 0; i < count; ++i) {
      part& made = parts.emplace_back();
      made.state.resize(static_cast<std::size_t>(1 + random.below(std::uint64_t{3000})));
      made.pool.resize(
          static_cast<std::size_t>(page * (least_pool + random.below(most_pool - least_pool + 1))));
      made.range = std::make_unique<cow_range>(
          made.state, made.pool, copy_on_write{.page_bytes = page, .max_snapshots = max_snapshots}, "part");
    }
    for (part& each : parts)
      ranges.push_back(each.range.get());
    // Neither in the order of the ranges, nor all of their bytes.
    for (int i = 0; i < 7; ++i) {
      const auto source = static_cast<std::uint32_t>(random.below(parts.size()));
      const std::uint64_t size = parts[source].state.size();
      const std::uint64_t first = random.below(size);
      places.push_back({source, first, 1 + random.below(size - first)});
      tensors.push_back(byte_tensor("t" + std::to_string(i), places.back().bytes));
    }
  }

  [[nodiscard]] std::vector<bytes> now() const {
    std::vector<bytes> all;
    for (const state_place& each : places) {
      const auto first = parts[each.source].state.begin() + static_cast<std::ptrdiff_t>(each.offset);
      all.emplace_back(first, first + static_cast<std::ptrdiff_t>(each.bytes));
    }
    return all;
  }

  cow_state_view view_now() { return {ranges, places}; }
  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> broken;
    for (const cow_range* each : ranges) {
      for (std::string& line : each->audit())
        broken.push_back(std::move(line));
    }
    return broken;
  }

  /// Some bytes of some range change, as the doc comment says.
  void act() {
    part& at = parts[random.below(parts.size())];
    const std::uint64_t first = random.below(at.state.size());
    const std::uint64_t count = 1 + random.below(at.state.size() - first);
    const auto by_waiting = [&](std::uint64_t) { return saving.wait(); };
    const auto given = at.range->write(first, count, by_waiting);
    REQUIRE_MESSAGE(given, given.error().message());
    const std::uint64_t value = random.next();
    for (std::size_t i = 0; i < given->size(); ++i)
      (*given)[i] = static_cast<std::byte>(value + i);
  }
};

/// A range of pages of 64 bytes, all of which are one tensor.
struct one_range {
  bytes state;
  bytes pool;
  cow_range range;
  std::array<cow_range*, 1> ranges{&range};
  std::array<state_place, 1> places{state_place{0, 0, state.size()}};

  explicit one_range(std::size_t pages, std::size_t pool_pages = 0)
      : state(64 * pages), pool(64 * pool_pages), range(state, pool, {.page_bytes = 64}) {}

  cow_state_view view_now() { return {ranges, places}; }
};

}  // namespace

TEST_SUITE("cow_state_view") {
  TEST_CASE(
      "a save has the state of the moment when the view was taken, regardless of later writes, with any "
      "pool") {
    std::uint64_t waits = 0;
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      cow_world w(seed, 0, seed % 3 == 0 ? 200 : seed % 3 == 1 ? 4 : 0);
      simulated_storage storage;
      stuck_coordinator coordinator(storage);
      std::vector<bytes> last;
      {
        checkpointer saves(coordinator, w.tensors, random_ring(w.random, 400, 20));
        last = save_while_changing(saves, storage, w, {.steps = 6, .meanwhile = 12});
        saves.flush();
        CHECK(saves.stats().committed == 6);
        w.saving.guard.reset();
      }
      check_newest(storage, w.tensors, 6, last);
      for (const cow_range* each : w.ranges) {
        CHECK(each->live() == 0);
        CHECK(each->stats().used_pages == 0);
        CHECK(each->audit().empty());
      }
      waits += w.saving.waits;
    }
    CHECK(waits > 0);
  }

  TEST_CASE("a hung disk stalls the writer only after the pool is exhausted, and then for max_stall_ns") {
    one_range w(64, 8);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer saves(coordinator, {byte_tensor("all", w.state.size())},
                       {.ring_bytes = 1024, .chunk_bytes = 256, .max_stall_ns = 3'000'000});
    last_snapshot saving{saves.begin_snapshot(1, w.view_now())};
    const commit_ticket ticket = saving.guard->ticket();
    std::optional<mutation_permit> permit(saves.gate().mutate());
    for (std::uint64_t page = 63; page > 55; --page)
      REQUIRE(w.range.write(page * 64, 64));
    CHECK(saves.stats().stall_ns == 0);
    CHECK(w.range.write(0, 64).code() == errc::out_of_bytes);
    const auto by_waiting = [&](std::uint64_t) { return saving.wait(); };
    REQUIRE(w.range.write(0, 64 * 64, by_waiting));  // more pages than the pool has: none is needed any more
    CHECK(saving.waits == 1);
    CHECK(saves.stats().stall_ns >= 3'000'000);
    CHECK(w.range.live() == 0);
    coordinator.open();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why() ==
          "async_checkpointer: step 1 was abandoned: it stalled the training for longer than max_stall_ns");
    permit.reset();
    CHECK(saves.begin_snapshot(2, w.view_now()).ticket().wait() == commit_status::committed);
  }

  TEST_CASE("a snapshot returns its pages once it has been read, before it is on the disk") {
    cow_world w(4, 0, 200);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer saves(coordinator, w.tensors, {.ring_bytes = 1 << 16, .chunk_bytes = 256});
    const snapshot_guard guard = saves.begin_snapshot(1, w.view_now());
    guard.wait_staged();
    for (const cow_range* each : w.ranges)
      CHECK(each->live() == 0);
    CHECK(guard.ticket().status() == commit_status::pending);
    coordinator.open();
  }

  TEST_CASE("bytes are unchanged since a tag if none of their pages was given out between the snapshots") {
    for (const auto seed : seeds(100)) {
      CAPTURE(seed);
      cow_world w(seed, 1000, 1000, 16);
      // Of each tag: the bytes, and how often each page had been given out.
      struct moment {
        std::vector<bytes> state;
        std::vector<std::vector<std::uint64_t>> writes;
      };
      std::map<std::uint64_t, moment> moments;
      std::vector<std::vector<std::uint64_t>> writes;
      for (const auto& each : w.parts)
        writes.emplace_back(each.range->pages());
      std::vector<cow_state_view> views;
      std::uint64_t newest = 0;
      for (int step = 0; step < 30; ++step) {
        for (std::uint64_t i = w.random.below(std::uint64_t{3}); i > 0; --i) {
          const std::size_t source = w.random.below(w.parts.size());
          auto& at = w.parts[source];
          const std::uint64_t first = w.random.below(at.state.size());
          const std::uint64_t count = 1 + w.random.below(std::uint64_t{200});
          const std::uint64_t end = std::min<std::uint64_t>(first + count, at.state.size());
          const auto given = at.range->write(first, end - first);
          REQUIRE(given);
          for (std::byte& each : *given)
            each = static_cast<std::byte>(w.random.next());
          for (std::uint64_t page = first / w.page; page <= (end - 1) / w.page; ++page)
            ++writes[source][page];
        }
        // Others look at one of the ranges too.
        if (w.random.once_in(3)) REQUIRE(w.ranges[w.random.below(w.ranges.size())]->snapshot());
        if (views.size() < 8 && w.random.once_in(2)) {
          views.emplace_back(w.ranges, w.places);
          CHECK(views.back().version() > newest);
          newest = views.back().version();
          moments[newest] = {w.now(), writes};
        } else if (!views.empty() && w.random.once_in(3)) {
          views.erase(views.begin() + static_cast<std::ptrdiff_t>(w.random.below(views.size())));
        }
        if (views.empty()) continue;
        const cow_state_view& view = views[w.random.below(views.size())];
        const moment& then = moments[view.version()];
        for (int asked = 0; asked < 10; ++asked) {
          auto since = moments.begin();
          std::advance(since, static_cast<std::ptrdiff_t>(w.random.below(moments.size())));
          const auto tensor = static_cast<std::uint32_t>(w.random.below(w.places.size()));
          const state_place& place = w.places[tensor];
          const std::uint64_t offset = w.random.below(place.bytes);
          const std::uint64_t count = 1 + w.random.below(place.bytes - offset);
          bool same = since->first <= view.version();
          const std::uint64_t begin = place.offset + offset;
          for (std::uint64_t page = begin / w.page; page <= (begin + count - 1) / w.page; ++page)
            same = same && then.writes[place.source][page] == since->second.writes[place.source][page];
          REQUIRE(view.is_unchanged_since(since->first, tensor, offset, count) == same);
          if (same) {
            const auto at = static_cast<std::ptrdiff_t>(offset);
            const bytes& now = then.state[tensor];
            const bytes& before = since->second.state[tensor];
            REQUIRE(bytes(now.begin() + at, now.begin() + at + static_cast<std::ptrdiff_t>(count)) ==
                    bytes(before.begin() + at, before.begin() + at + static_cast<std::ptrdiff_t>(count)));
          }
        }
        bytes read(static_cast<std::size_t>(w.places[0].bytes));
        view.copy_out(0, 0, read);
        REQUIRE(read == then.state[0]);
      }
    }
  }

  TEST_CASE("unknown tags, such as 0 and future ones, prove nothing unchanged") {
    one_range w(4);
    const cow_state_view view = w.view_now();
    CHECK(view.version() != 0);
    CHECK(!view.is_unchanged_since(0, 0, 0, 256));
    CHECK(!view.is_unchanged_since(0, 0, 0, 0));
    CHECK(!view.is_unchanged_since(view.version() + 1, 0, 0, 256));
    CHECK(view.is_unchanged_since(view.version(), 0, 0, 256));
  }

  TEST_CASE("a tag of a destroyed range is unknown to a new one in its place") {
    bytes state(256);
    std::optional<cow_range> range;
    const auto view_of = [&] {
      const std::array<cow_range*, 1> ranges{&*range};
      return cow_state_view(ranges, std::array{state_place{0, 0, 256}});
    };
    range.emplace(state, std::span<std::byte>(), copy_on_write{.page_bytes = 64});
    const std::uint64_t before = view_of().version();
    CHECK(view_of().is_unchanged_since(before, 0, 0, 256));
    range.reset();
    state[0] = std::byte{1};  // while nobody looks
    range.emplace(state, std::span<std::byte>(), copy_on_write{.page_bytes = 64});
    for (int i = 0; i < 10; ++i)  // also once it has had as many versions
      CHECK(!view_of().is_unchanged_since(before, 0, 0, 256));
    bytes other(256);
    cow_range beside(other, {}, {.page_bytes = 64});
    const std::array<cow_range*, 1> ranges{&beside};
    CHECK(!cow_state_view(ranges, std::array{state_place{0, 0, 256}}).is_unchanged_since(before, 0, 0, 256));
    CHECK(range->identity() != beside.identity());
  }

  TEST_CASE("a tag proves nothing about tensors that were elsewhere in the same range") {
    one_range w(4);
    const auto view_of = [&](std::vector<state_place> places) { return cow_state_view(w.ranges, places); };
    const std::uint64_t before = view_of({{0, 0, 64}, {0, 128, 64}}).version();
    CHECK(view_of({{0, 0, 64}, {0, 128, 64}}).is_unchanged_since(before, 0, 0, 64));
    // Two halves by turns: no page was written, and each tensor has the bytes of the other.
    CHECK(!view_of({{0, 128, 64}, {0, 0, 64}}).is_unchanged_since(before, 0, 0, 64));
    CHECK(!view_of({{0, 0, 64}, {0, 192, 64}}).is_unchanged_since(before, 1, 0, 64));
    CHECK(!view_of({{0, 0, 64}, {0, 128, 65}}).is_unchanged_since(before, 1, 0, 64));
    CHECK(!view_of({{0, 0, 64}}).is_unchanged_since(before, 0, 0, 64));
    bytes other_state(256);
    cow_range other(other_state, {}, {.page_bytes = 64});
    const std::array<cow_range*, 2> both{&w.range, &other};
    const auto tag = cow_state_view(both, std::array{state_place{0, 0, 64}}).version();
    CHECK(!cow_state_view(both, std::array{state_place{1, 0, 64}}).is_unchanged_since(tag, 0, 0, 64));
  }

  TEST_CASE("another thread may query changes while the state changes further") {
    one_range w(200, 400);
    const std::uint64_t before = w.view_now().version();
    for (std::uint64_t page = 0; page < 200; page += 3)
      REQUIRE(w.range.write(page * 64, 64));
    const cow_state_view view = w.view_now();
    std::thread asks([&, copy = view] {
      for (std::uint64_t page = 0; page < 200; ++page)
        CHECK(copy.is_unchanged_since(before, 0, page * 64, 64) == (page % 3 != 0));
      bytes read(w.state.size());
      copy.copy_out(0, 0, read);
      CHECK(read == bytes(w.state.size()));
    });
    for (std::uint64_t page = 0; page < 200; ++page)
      w.range.write(page * 64, 64).value()[0] = std::byte{1};
    asks.join();
    CHECK(w.range.live() == 1);
  }

  TEST_CASE("copies of a view share its snapshots, which end with the last copy") {
    one_range w(2);
    std::optional<cow_state_view> first(w.view_now());
    const std::uint64_t version = first->version();
    std::optional<cow_state_view> second(*first);
    CHECK(w.range.live() == 1);
    CHECK(w.range.stats().snapshots == 1);
    first.reset();
    CHECK(w.range.live() == 1);
    CHECK(second->version() == version);
    second.reset();
    CHECK(w.range.live() == 0);
  }

  TEST_CASE("a refused view reports the reason, and holds nothing") {
    bytes state(128);
    bytes other(128);
    cow_range one(state, {}, {.page_bytes = 64, .max_snapshots = 1}, "weights");
    cow_range two(other, {}, {.page_bytes = 64, .max_snapshots = 1}, "moments");
    const std::array both{&one, &two};
    const std::array places{state_place{0, 0, 128}};
    {
      const cow_snapshot held = two.snapshot().value();
      CHECK_THROWS_WITH_AS(cow_state_view(both, places),
                           "cow_state_view: 1 snapshots of moments are alive, the maximum; wait until one is "
                           "staged, or raise copy_on_write::max_snapshots",
                           out_of_memory);
      CHECK(one.live() == 0);
    }
    static_cast<void>(cow_state_view(both, places));
    CHECK(one.newest() == version_id{3});  // as the refused one took a number of `weights`
    CHECK(two.newest() == version_id{3});
    const std::array<cow_range*, 2> twice{&one, &one};
    CHECK_THROWS_WITH_AS(cow_state_view(twice, places), "cow_state_view: weights is listed twice",
                         argument_error);
    const std::array<cow_range*, 2> none{&one, nullptr};
    CHECK_THROWS_WITH_AS(cow_state_view(none, places), "cow_state_view: a range is null", argument_error);
    CHECK_THROWS_WITH_AS(cow_state_view({}, places),
                         "cow_state_view: no ranges; pass the ranges that hold the tensors", argument_error);
    CHECK(one.live() == 0);
    CHECK(two.live() == 0);
  }

  TEST_CASE("bytes outside every place, and places outside every range, are refused with their numbers") {
    bytes state(128);
    cow_range range(state, {}, {.page_bytes = 64});
    const std::array<cow_range*, 1> ranges{&range};
    constexpr std::uint64_t huge = ~std::uint64_t{0};
    const std::array places{state_place{0, 100, 28}, state_place{1, 0, 4}, state_place{0, 101, 28},
                            state_place{0, huge, 28}};
    const cow_state_view view(ranges, places);
    bytes into(28);
    view.copy_out(0, 0, into);
    const auto asks = [&](std::uint32_t tensor, std::uint64_t offset, std::uint64_t count) {
      const std::string copying =
          text_of([&] { view.copy_out(tensor, offset, std::span(into).first(count)); });
      CHECK(text_of([&] { static_cast<void>(view.is_unchanged_since(1, tensor, offset, count)); }) ==
            copying);
      return copying;
    };
    CHECK(asks(0, 1, 28) ==
          "cow_state_view: bytes 1 to 29 of tensor 0 do not exist: pass a place for each described tensor, "
          "in that order");
    CHECK(asks(4, 0, 1) ==
          "cow_state_view: bytes 0 to 1 of tensor 4 do not exist: pass a place for each described tensor, in "
          "that order");
    CHECK(asks(1, 0, 4) == "cow_state_view: tensor 1 is in range 1, but the number of ranges is 1");
    CHECK(asks(2, 0, 28) ==
          "cow_state_view: the place of tensor 2, 28 bytes from 101, is past the end of source 0, which has "
          "128");
    CHECK(asks(3, 1, 4) ==
          "cow_state_view: the place of tensor 3, 28 bytes from 18446744073709551615, is past the end of "
          "source 0, which has 128");
  }

  TEST_CASE("a skipped snapshot holds no pages") {
    cow_world w(5, 0, 10);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer saves(coordinator, w.tensors,
                       {.ring_bytes = 512, .chunk_bytes = 256, .max_pending = 1, .busy = when_busy::skip});
    const snapshot_guard first = saves.begin_snapshot(1, w.view_now());
    const snapshot_guard skipped = saves.begin_snapshot(2, w.view_now());
    CHECK(skipped.is_staged());
    CHECK(skipped.ticket().status() == commit_status::not_committed);
    CHECK(w.ranges[0]->live() == 1);
    coordinator.open();
    first.wait_staged();
    CHECK(w.ranges[0]->live() == 0);
  }
}
