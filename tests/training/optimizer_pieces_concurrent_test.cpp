#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/loss_scale.hpp>
#include <llmmem/training/memory_chunks.hpp>
#include <llmmem/training/merge_sums.hpp>
#include <llmmem/training/step_pieces.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/optimizer_world.hpp"
#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using memory = memory_chunks<host_space>;
using tiers = tiered_buffer<host_space, host_space>;

/// A tensor's pieces as chunks.
template <class Store>
class chunked_tensor {
 public:
  chunked_tensor(Store& store, optimizer_form form, std::uint64_t count, const optimizer_arrays& state,
                 std::mt19937_64& random)
      : store_(&store), form_(form) {
    const optimizer_widths each = widths_of(form);
    const std::array<std::uint32_t, 6> widths{each.weights,  each.low,         each.mean,
                                              each.variance, each.group_scale, each.group_scale};
    for (std::uint64_t first = 0; first < count;) {
      const std::uint64_t size =
          std::min(count - first, cut_multiple(form) * (1 + random() % (500 / cut_multiple(form))));
      optimizer_chunks<chunk_handle> piece{.first = first, .count = size};
      piece.gradients = store.create(4 * size).value();
      const std::array<chunk_handle*, 6> chunks{&piece.weights,  &piece.low,         &piece.mean,
                                                &piece.variance, &piece.mean_scales, &piece.variance_scales};
      for (std::size_t array = 0; array < 6; ++array) {
        if (widths[array] == 0) continue;
        const std::uint64_t bytes = widths[array] * units(array, size);
        *chunks[array] = store.create(bytes).value();
        const auto lease = store.write(*chunks[array]).value();
        std::memcpy(lease.span().data(),
                    state.of[array].data() + widths[array] * (array < 4 ? first : first / optimizer_group),
                    bytes);
      }
      pieces.push_back(piece);
      first += size;
    }
  }
  void set_gradients(const std::vector<float>& all) {
    for (const auto& each : pieces) {
      const auto lease = store_->write(each.gradients).value();
      std::memcpy(lease.span().data(), all.data() + each.first, 4 * each.count);
    }
  }
  /// Whether an array has the bytes of a whole one.
  bool holds(std::size_t array, const std::vector<std::byte>& whole) {
    const optimizer_widths width = widths_of(form_);
    const std::array<std::uint32_t, 6> widths{width.weights,  width.low,         width.mean,
                                              width.variance, width.group_scale, width.group_scale};
    if (widths[array] == 0) return true;
    for (const auto& each : pieces) {
      const std::array<chunk_handle, 6> chunks{each.weights,  each.low,         each.mean,
                                               each.variance, each.mean_scales, each.variance_scales};
      const auto lease = store_->read(chunks[array]).value();
      const std::uint64_t first = widths[array] * (array < 4 ? each.first : each.first / optimizer_group);
      if (std::memcmp(lease.span().data(), whole.data() + first, widths[array] * units(array, each.count)) !=
          0)
        return false;
    }
    return true;
  }

  std::vector<optimizer_chunks<chunk_handle>> pieces{};

 private:
  static std::uint64_t units(std::size_t array, std::uint64_t elements) {
    return array < 4 ? elements : (elements + optimizer_group - 1) / optimizer_group;
  }
  Store* store_;
  optimizer_form form_;
};

template <class Store>
void check_store(Store& store, optimizer_form form, std::mt19937_64& random) {
  const std::uint64_t count = 700 + random() % 3000;
  const auto start = drawn_floats(count, 0.1, 0, random);
  optimizer_arrays whole(form, count);
  optimizer_begin(host_executor{}, form, whole.whole(form, count), start.data()).value();
  chunked_tensor<Store> tensor(store, form, count, whole, random);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const auto g = drawn_floats(count, 0.01, 0, random);
    const optimizer_hyper by{.step = step, .seed = 9};
    tensor.set_gradients(g);
    step_pieces(host_executor{}, store, form, std::span<const optimizer_chunks<chunk_handle>>(tensor.pieces),
                dtype::f32, by)
        .value();
    optimizer_step(host_executor{}, form, whole.whole(form, count),
                   {reinterpret_cast<const std::byte*>(g.data()), dtype::f32, count}, by)
        .value();
  }
  for (std::size_t array = 0; array < 6; ++array)
    REQUIRE(tensor.holds(array, whole.of[array]));
}

/// The root of a sum of squares, in long double: enough for the sizes below.
double plain_norm(const std::vector<float>& all) {
  long double sum = 0;
  for (const float each : all)
    sum += static_cast<long double>(each) * static_cast<long double>(each);
  return static_cast<double>(std::sqrt(sum));
}

}  // namespace

TEST_SUITE("optimizer_pieces") {
  TEST_CASE("pieces are stepped in place, in memory and in tiers that hold a part, to the bits of one step") {
    for (const auto seed : seeds(10)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const optimizer_form form = all_optimizer_forms[seed % all_optimizer_forms.size()];
      host_space host({.budget = 1 << 20});
      memory in_memory(host);
      check_store(in_memory, form, random);
      host_space near({.budget = 1 << 15});
      host_space far({.budget = 1 << 20});
      tiers in_tiers({}, {near, 1 << 15}, {far, 1 << 20});
      check_store(in_tiers, form, random);
    }
  }

  TEST_CASE("a piece whose step fails is named, and those before it are changed") {
    host_space host({.budget = 1 << 20});
    memory store(host);
    std::mt19937_64 random(1);
    constexpr auto form = optimizer_form::sgd;
    const auto start = drawn_floats(2000, 0.1, 0, random);
    optimizer_arrays whole(form, 2000);
    optimizer_begin(host_executor{}, form, whole.whole(form, 2000), start.data()).value();
    chunked_tensor<memory> tensor(store, form, 2000, whole, random);
    REQUIRE(tensor.pieces.size() > 2);
    tensor.set_gradients(start);
    const auto told = [&] {
      const auto done =
          step_pieces(host_executor{}, store, form,
                      std::span<const optimizer_chunks<chunk_handle>>(tensor.pieces), dtype::f32, {});
      return done ? failure{} : done.error();
    };
    const auto well = tensor.pieces[1];
    // Four times that many bytes are 4 in 64 bits.
    tensor.pieces[1].count = (std::uint64_t{1} << 62U) + 1;
    CHECK(told() == failure{errc::out_of_range, 1, tensor.pieces[1].count, (std::uint64_t{1} << 60U) - 1});
    tensor.pieces[1] = well;
    tensor.pieces[1].count += 1;
    CHECK(told() == failure{errc::too_short, 1, 4 * tensor.pieces[1].count, 4 * well.count});
    tensor.pieces[1] = well;
    tensor.pieces[1].mean = store.create(4 * well.count - 4).value();
    static_cast<void>(store.write(tensor.pieces[1].mean).value());
    CHECK(told() == failure{errc::too_short, 1, 4 * well.count, 4 * well.count - 4});
    tensor.pieces[1].mean = store.create(4 * well.count).value();
    CHECK(told().code == errc::no_contents);
    tensor.pieces[1] = well;
    CHECK(told() == failure{});
  }

  TEST_CASE("the norm is exact, for any order and any cuts") {
    for (const auto seed : seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      std::vector<float> all = drawn_floats(random() % 2000, 0.01, 0, random);
      gradient_norm one;
      one.add(all);
      CHECK(one.value() == doctest::Approx(plain_norm(all)).epsilon(1e-15));
      std::shuffle(all.begin(), all.end(), random);
      gradient_norm sum;
      for (std::size_t first = 0; first < all.size();) {
        const std::size_t size = std::min<std::size_t>(all.size() - first, 1 + random() % 300);
        gradient_norm part;
        part.add(std::span(all).subspan(first, size));
        sum.merge(part);
        first += size;
      }
      CHECK(sum.value() == one.value());
    }
    for (const float size : {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
                             std::numeric_limits<float>::denorm_min(), 1.0F, 0.0F}) {
      gradient_norm of;
      for (int i = 0; i < 4; ++i)
        of.add(i % 2 == 0 ? size : -size);
      CHECK(of.value() == 2 * static_cast<double>(size));
    }
    gradient_norm largest;  // as many as a norm takes, each as large as a float can be
    largest.add(std::numeric_limits<float>::max());
    for (int doubled = 1; doubled <= 31; ++doubled) {
      largest.merge(gradient_norm(largest));
      CHECK(largest.value() ==
            doctest::Approx(std::ldexp(std::sqrt(std::ldexp(1.0, doubled)), 128)).epsilon(1e-7));
    }
    for (const float broken : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      gradient_norm of;
      of.add(1.0F);
      CHECK(of.is_finite());
      of.add(broken);
      CHECK_FALSE(of.is_finite());
      CHECK(std::isinf(of.value()));
    }
  }

  TEST_CASE("a loss scale grows, shrinks and skips as in the tables of PyTorch and Megatron") {
    loss_scale torch({.start = 8, .growth_interval = 3});
    const auto after = [](loss_scale& of, std::initializer_list<bool> steps) {
      for (const bool each : steps)
        of.update(each);
      return of.scale();
    };
    CHECK(after(torch, {true, true}) == 8);
    CHECK(after(torch, {true}) == 16);
    CHECK(after(torch, {true, true, false}) == 8);
    CHECK(after(torch, {true, true}) == 8);
    CHECK(after(torch, {true}) == 16);
    // Two overflows, not in a row, before it backs off; then each one does until it grows.
    loss_scale megatron({.start = 64, .growth_interval = 2, .hysteresis = 2, .least = 16});
    CHECK(after(megatron, {false, true}) == 64);
    CHECK(after(megatron, {false}) == 32);
    CHECK(after(megatron, {false}) == 16);
    CHECK(after(megatron, {false}) == 16);  // the least
    CHECK(after(megatron, {true, true}) == 32);
    CHECK(after(megatron, {false}) == 32);  // refilled
    loss_scale other({.start = 64, .growth_interval = 2, .hysteresis = 2, .least = 16});
    other.restore(megatron.saved());
    CHECK(after(other, {false}) == after(megatron, {false}));
    constexpr double none = std::numeric_limits<double>::quiet_NaN();
    constexpr double endless = std::numeric_limits<double>::infinity();
    for (const double broken : {0.0, -64.0, none, endless, 8.0})
      CHECK_THROWS_AS(other.restore({broken, 0, 1}), argument_error);
    CHECK(other.saved().scale == 16);
    gradient_norm some;
    some.add(1.0F);
    const auto before = other.saved();
    for (const double broken : {0.0, -1.0, none})
      CHECK_THROWS_AS(static_cast<void>(decide_step(some, other, broken)), argument_error);
    CHECK(other.saved() == before);
    // At both ends the factor is a float.
    for (const double end : {0x1p-126, 0x1p+126}) {
      loss_scale at_end({.start = end, .growth_interval = 1, .least = 0x1p-126});
      CHECK(static_cast<double>(decide_step(some, at_end).gradient_scale) == 1 / end);
      CHECK(after(at_end, {true}) <= 0x1p+126);
    }
    CHECK_THROWS_AS(loss_scale({.start = 1e-300, .least = 1e-300}), argument_error);
    CHECK_THROWS_AS(loss_scale({.start = 1, .most = endless}), argument_error);
    CHECK_THROWS_AS(loss_scale({.start = 0}), argument_error);
    CHECK_THROWS_AS(loss_scale({.growth = 0.5}), argument_error);
    CHECK_THROWS_AS(loss_scale({.back_off = 1}), argument_error);
    CHECK_THROWS_AS(loss_scale({.growth_interval = 0}), argument_error);
  }

  TEST_CASE("all ranks clip by one factor, and skip a step in which one of them overflows") {
    constexpr std::uint32_t world = 3;
    std::mt19937_64 random(4);
    const auto all = drawn_floats(900, 10, 0, random);
    loss_scale alone({.start = 4});
    gradient_norm whole;
    whole.add(all);
    const step_decision expected = decide_step(whole, alone, 1.0);
    CHECK(expected.norm == doctest::Approx(plain_norm(all) / 4));
    CHECK(static_cast<double>(expected.gradient_scale) == doctest::Approx(1 / plain_norm(all)));
    std::array<step_decision, world> taken;
    std::array<step_decision, world> skipped;
    std::array<double, world> scales{};
    in_thread_world(world, [&](auto& ranks, host_space&, std::uint32_t rank) {
      loss_scale scale({.start = 4});
      collective_call call{.by = ranks.after(10 * one_second)};
      gradient_norm mine;
      mine.add(std::span(all).subspan(300 * rank, 300));
      mine.merge_all(ranks, call).value();
      taken[rank] = decide_step(mine, scale, 1.0);
      gradient_norm next;
      if (rank == 1) next.add(std::numeric_limits<float>::infinity());
      next.merge_all(ranks, call).value();
      skipped[rank] = decide_step(next, scale, 1.0);
      scales[rank] = scale.scale();
    });
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      CHECK(taken[rank].is_taken);
      CHECK(taken[rank].gradient_scale == expected.gradient_scale);
      CHECK(taken[rank].norm == expected.norm);
      CHECK_FALSE(skipped[rank].is_taken);
      CHECK(scales[rank] == 2);
    }
    gradient_norm small;
    small.add(0.5F);
    loss_scale one({.start = 1});
    CHECK(decide_step(small, one, 1.0).gradient_scale == 1.0F);
  }

  TEST_CASE(
      "ranks that merge sums of their own numbers have the bits of one, and send the bytes that are told") {
    constexpr std::uint32_t world = 3;
    std::mt19937_64 random(5);
    for (const std::size_t count :
         {std::size_t{7}, std::size_t{1000}}) {  // a small all-reduce, and a large one
      const auto all = drawn_floats(4 * count, 10, 50, random);
      std::vector<unordered_sum> expected(count);
      for (std::size_t i = 0; i < all.size(); ++i)
        expected[i % count].add_square(all[i]);
      std::array<std::vector<unordered_sum>, world> merged;
      std::array<std::uint64_t, world> sent{};
      in_thread_world(world, [&](auto& ranks, host_space&, std::uint32_t rank) {
        std::vector<unordered_sum>& mine = merged[rank];
        mine.resize(count);
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (i / 5 % world == rank) mine[i % count].add_square(all[i]);
        }
        collective_call call{.by = ranks.after(10 * one_second)};
        const auto told = [&] {
          std::uint64_t bytes = 0;
          for (const seat_id seat : ranks.seats())
            bytes += ranks.traffic(seat).sent_bytes;
          return bytes;
        };
        const std::uint64_t before = told();
        merge_all(ranks, mine, call).value();
        sent[rank] = told() - before;
      });
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        CHECK(merged[rank] == expected);
        CHECK(sent[rank] == merge_bytes(count, rank_count{world}, rank_id{rank}));
      }
    }
  }
}
