#include <llmmem/device/batch_copier.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/host_executor.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using copier = batch_copier<fake_runtime>;
static_assert(batching_runtime<fake_runtime>);

/// A plan by which one way is always the quickest.
copy_plan always(copy_way quickest) {
  return copy_plan::measured({}, [&](copy_way way, const copy_shape&) -> std::optional<double> {
    return way == quickest ? 1.0 : 1000.0;
  });
}

/// A device, its calls, and a stream of it.
struct one_stream {
  fake_device device;
  fake_runtime runtime{device};
  fake_runtime::stream stream{};

  explicit one_stream(std::uint64_t seed = 1) : device(seed) {
    REQUIRE(runtime.make_stream(&stream, device_id{0}) == 0);
  }
};

/// Pieces of one memory that go to another, some behind each other, some evenly apart.
struct pieces_world {
  std::vector<std::byte> from;
  std::vector<std::byte> to;
  std::vector<std::byte> expected;
  std::vector<copy_task> pieces{};

  explicit pieces_world(std::mt19937_64& random)
      : from(llmmem_tests::bytes_of_seed(20'000, random())), to(from.size()), expected(from.size()) {
    const bool is_even = random() % 3 == 0;
    const std::size_t bytes = 1 + random() % 100;
    const std::size_t apart = is_even ? bytes + random() % 30 : 0;
    std::size_t at = 0;
    std::size_t source = random() % 100;
    const std::size_t count = random() % 60;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t length = is_even ? bytes : random() % 100;
      if (!is_even && random() % 2 == 0) {
        at += random() % 20;
        source += random() % 20;
      }
      pieces.push_back({from.data() + source, to.data() + at, length});
      std::memcpy(expected.data() + at, from.data() + source, length);
      at += is_even ? apart : length;
      source += is_even ? apart : length;
    }
  }
};

}  // namespace

TEST_SUITE("batch_copier") {
  TEST_CASE("every piece arrives at its place by the fastest path, whether captured or not") {
    for (const auto seed : llmmem_tests::seeds(200)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      one_stream made(seed);
      auto& [device, runtime, stream] = made;
      const auto wanted = static_cast<copy_way>(random() % copy_ways);
      copier copies(random() % 5 == 0 ? copy_plan{} : always(wanted), device);
      for (int round = 0; round < 3; ++round) {
        pieces_world world(random);
        device.is_capturing = random() % 2 == 0;
        const auto kernel = [](std::span<const copy_task> all) { return copy_few(host_executor{}, all); };
        const copy_route route = random() % 2 == 0 ? copy_route{copy_direction::down}
                                                   : copy_route{copy_direction::down, world.from, world.to};
        const auto done = random() % 2 == 0 ? copies.copy(world.pieces, route, stream)
                                            : copies.copy(world.pieces, route, stream, kernel);
        CHECK(done.has_value());
        CHECK(runtime.wait_stream(stream) == 0);
        CHECK(world.to == world.expected);
      }
      CHECK(runtime.end_stream(stream) == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("the copier takes the plan's preferred path if it is open, otherwise the next best") {
    one_stream made;
    auto& [device, runtime, stream] = made;
    std::vector<std::byte> bytes(1000);
    const auto even = [&] {
      return std::vector<copy_task>{{bytes.data(), bytes.data() + 500, 10},
                                    {bytes.data() + 20, bytes.data() + 530, 10},
                                    {bytes.data() + 40, bytes.data() + 560, 10}};
    };
    const auto uneven = [&] {
      auto all = even();
      all[2].from += 1;
      return all;
    };
    int launched = 0;
    const auto kernel = [&](std::span<const copy_task>) -> result<void> {
      ++launched;
      return {};
    };
    const auto way = [&](copy_way wanted, std::vector<copy_task> pieces) {
      copier copies(always(wanted), device);
      return copies.copy(pieces, {copy_direction::up, bytes, bytes}, stream, kernel).value().way;
    };
    CHECK(way(copy_way::strided, even()) == copy_way::strided);
    CHECK(device.strided == 1);
    CHECK(way(copy_way::strided, uneven()) == copy_way::loop);
    CHECK(way(copy_way::batch, even()) == copy_way::batch);
    CHECK(device.batches == 1);
    device.is_capturing = true;
    CHECK(way(copy_way::batch, even()) == copy_way::loop);
    CHECK(device.batches == 1);
    CHECK(way(copy_way::kernel, uneven()) == copy_way::kernel);
    CHECK(launched == 1);
    copier copies(always(copy_way::kernel), device);
    auto pieces = uneven();
    CHECK(copies.copy(pieces, {copy_direction::up, bytes, bytes}, stream).value().way == copy_way::loop);
    CHECK(runtime.wait_stream(stream) == 0);
  }

  TEST_CASE("pieces that are adjacent at both ends become one") {
    std::vector<std::byte> bytes(1000);
    std::byte* const a = bytes.data();
    std::vector<copy_task> pieces{{a, a + 500, 10},     {a + 10, a + 510, 20}, {a + 30, a + 530, 0},
                                  {a + 30, a + 530, 5}, {a + 36, a + 535, 5},  {a + 41, a + 541, 5},
                                  {a + 46, a + 546, 5}};
    CHECK(join_pieces(pieces) == 3);
    CHECK(pieces[0].bytes == 35);
    CHECK(pieces[1].bytes == 5);
    CHECK(pieces[2].from == a + 41);
    CHECK(pieces[2].bytes == 10);
    CHECK(join_pieces({}) == 0);
    fake_device device;
    copier copies({}, device);
    std::vector<copy_task> nothing{{a, a, 0}};
    CHECK(copies.copy(nothing, {copy_direction::up}, 0).value().pieces == 0);
    CHECK(device.calls == 0);
  }

  TEST_CASE("pieces of memory that is not declared as one allocation stay separate") {
    one_stream made;
    auto& [device, runtime, stream] = made;
    std::vector<std::byte> bytes(1000);
    const auto copied = [&](const copy_route& route, std::uint64_t apart) {
      std::byte* const a = bytes.data();
      std::vector<copy_task> pieces{{a, a + 500, 10},
                                    {a + 5, a + 600, 0},
                                    {a + 10 + apart, a + 510 + apart, 10},
                                    {a + 20 + 2 * apart, a + 520 + 2 * apart, 10}};
      copier copies(always(copy_way::strided), device);
      return copies.copy(pieces, route, stream).value();
    };
    const std::span<std::byte> all(bytes);
    for (const auto& [from, to] : {std::pair{all.first(0), all.first(0)}, std::pair{all, all.first(0)},
                                   std::pair{all.first(0), all}}) {
      const copy_route route{copy_direction::up, from, to};
      CHECK(copied(route, 0).pieces == 3);
      CHECK(copied(route, 3).way == copy_way::loop);
    }
    CHECK(device.strided == 0);
    CHECK(copied({copy_direction::up, all, all}, 0).pieces == 1);
    CHECK(copied({copy_direction::up, all, all}, 3).way == copy_way::strided);
    CHECK(runtime.wait_stream(stream) == 0);
  }

  TEST_CASE("a piece outside the memory of its route is refused before anything is copied") {
    one_stream made;
    auto& [device, runtime, stream] = made;
    std::vector<std::byte> bytes(1000);
    const std::span<std::byte> all(bytes);
    const copy_route route{copy_direction::up, all.subspan(100, 100), all.subspan(500, 100)};
    const auto refused = [&](std::uint64_t from, std::uint64_t to, std::uint64_t length) {
      std::vector<copy_task> pieces{{all.data() + 100, all.data() + 500, 8},
                                    {all.data() + from, all.data() + to, length}};
      copier copies({}, device);
      const auto before = device.calls;
      const auto done = copies.copy(pieces, route, stream);
      CHECK((done.has_value() || device.calls == before));
      return done ? failure{} : done.error();
    };
    CHECK(refused(110, 510, 90) == failure{});
    CHECK(refused(0, 0, 0) == failure{});
    CHECK(refused(110, 510, 91) == failure{errc::out_of_range, 1, 100, 10});
    CHECK(refused(201, 510, 1) == failure{errc::out_of_range, 1, 100, 101});
    CHECK(refused(99, 510, 1) == failure{errc::out_of_range, 1, 100, ~std::uint64_t{0}});
    CHECK(refused(110, 511, 90) == failure{errc::out_of_range, 1, 100, 11});
    CHECK(refused(110, 499, 1) == failure{errc::out_of_range, 1, 100, ~std::uint64_t{0}});
    CHECK(refused(150, 550, ~std::uint64_t{0}) == failure{errc::out_of_range, 1, 100, 50});
    CHECK(runtime.wait_stream(stream) == 0);
  }

  TEST_CASE("pieces count as evenly spaced if all their distances are equal and positive") {
    std::vector<std::byte> bytes(1000);
    std::byte* const a = bytes.data();
    const auto apart = [&](std::vector<copy_task> pieces) { return even_pieces_of(pieces).has_value(); };
    CHECK(apart({{a, a + 500, 10}, {a + 10, a + 530, 10}, {a + 20, a + 560, 10}}));
    CHECK_FALSE(apart({{a, a + 500, 10}}));
    CHECK_FALSE(apart({{a, a + 500, 10}, {a + 10, a + 530, 10}, {a + 21, a + 560, 10}}));
    CHECK_FALSE(apart({{a, a + 500, 10}, {a + 10, a + 530, 10}, {a + 20, a + 561, 10}}));
    CHECK_FALSE(apart({{a, a + 500, 10}, {a + 10, a + 530, 10}, {a + 20, a + 560, 11}}));
    CHECK_FALSE(apart({{a, a + 500, 10}, {a + 9, a + 530, 10}}));   // overlap
    CHECK_FALSE(apart({{a, a + 500, 10}, {a + 10, a + 509, 10}}));  // overlap
    CHECK_FALSE(apart({{a + 20, a + 500, 10}, {a, a + 530, 10}}));  // falls
  }

  TEST_CASE("a refusal of the driver is reported on every path") {
    for (const copy_way wanted : {copy_way::loop, copy_way::batch, copy_way::strided}) {
      CAPTURE(static_cast<int>(wanted));
      one_stream made;
      auto& [device, runtime, stream] = made;
      std::vector<std::byte> bytes(1000);
      std::vector<copy_task> pieces{{bytes.data(), bytes.data() + 500, 10},
                                    {bytes.data() + 20, bytes.data() + 530, 10}};
      copier copies(always(wanted), device);
      device.refuse_at = device.calls + 1;
      CHECK(copies.copy(pieces, {copy_direction::up, bytes, bytes}, stream).error() ==
            failure{errc::device_failed, fake_device::refused, 2, 0});
      CHECK(runtime.wait_stream(stream) == 0);
    }
    fake_device device;
    copier copies(always(copy_way::kernel), device);
    std::vector<std::byte> bytes(1000);
    std::vector<copy_task> pieces{{bytes.data(), bytes.data() + 500, 10}};
    const auto kernel = [](std::span<const copy_task>) -> result<void> {
      return failure{errc::device_failed, 9};
    };
    CHECK(copies.copy(pieces, {copy_direction::up}, 0, kernel).error() == failure{errc::device_failed, 9});
  }
}
