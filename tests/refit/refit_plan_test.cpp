#include <llmmem/refit/refit_device.hpp>
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/latest.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/refit_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The queue of a space, which refuses one copy.
struct refusing_queue {
  using fence_type = host_space::fence_type;

  host_space* space = nullptr;
  std::size_t refused = ~std::size_t{0};
  std::size_t copies = 0;
  std::size_t waits = 0;  // fences that a copy was given

  result<fence_type> copy_in_async(host_space::range_type to, std::span<const std::byte> from,
                                   std::span<const fence_type> after) {
    waits += after.size();
    if (copies++ == refused) return failure{.code = errc::dead_range};
    return space->copy_in_async(to, from, after);
  }
};

/// A queue whose copies end at the wait for them; a device that fails throws there, or at the call.
struct failing_queue {
  struct fence_type {
    failing_queue* queue = nullptr;
    bool fails = false;
    void wait() const {
      --queue->in_flight;
      if (fails) throw system_error("the device has failed");
    }
  };

  std::size_t failed_wait = ~std::size_t{0};
  std::size_t failed_call = ~std::size_t{0};
  std::size_t copies = 0;
  std::size_t in_flight = 0;

  result<fence_type> copy_in_async(host_space::range_type, std::span<const std::byte>,
                                   std::span<const fence_type>) {
    const std::size_t copy = copies++;
    if (copy == failed_call) throw system_error("the device refuses");
    ++in_flight;
    return fence_type{this, copy == failed_wait};
  }
};

}  // namespace

TEST_CASE("a plan fills every element from its origin once, and sends what brute force says") {
  for (const auto seed : seeds_within(400, 100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const refit_model model = random_refit(random, false);
    const refit_sides sides = random_sides(random, model, false);
    const refit_plan plan = sides.plan(model);
    CAPTURE(to_text(plan));

    // By target tensor, receiver and element of its storage: the source's rank and element.
    struct found {
      std::uint32_t times = 0;
      std::uint32_t tensor = 0;
      rank_id rank{};
      std::uint64_t element = 0;
    };
    std::vector<std::vector<std::vector<found>>> filled(model.target.size());
    for (std::size_t t = 0; t < model.target.size(); ++t) {
      for (std::size_t r = 0; r < sides.receivers.size(); ++r)
        filled[t].emplace_back(plan.target_set(t, r).elements());
    }
    std::uint64_t sent = 0;
    for (const refit_copy& copy : plan.copies) {
      const refit_part& part = plan.part_of(copy);
      const std::size_t s = refit_plan::place_of(plan.senders, copy.from);
      const std::size_t r = refit_plan::place_of(plan.receivers, copy.to);
      plan.each_run(copy, [&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
        for (std::uint64_t i = 0; i < count; ++i) {
          found& at = filled[to_index(part.target)][r][to + i];
          ++at.times;
          at = {at.times, to_index(part.source), copy.from,
                plan.source_set(to_index(part.source), s).element_at(from + i)};
        }
        if (copy.from != copy.to) sent += count * bits_of(part.wire) / 8;
      });
    }
    std::uint64_t least = 0;
    for (std::uint32_t t = 0; t < model.target.size(); ++t) {
      for (std::size_t r = 0; r < sides.receivers.size(); ++r) {
        const element_runs set = plan.target_set(t, r);
        for (std::uint64_t i = 0; i < set.elements(); ++i) {
          const origin& from = model.origins[t][set.element_at(i)];
          const found& at = filled[t][r][i];
          REQUIRE(at.times == 1);
          REQUIRE(at.tensor == from.tensor);
          REQUIRE(at.element == from.element);
          const std::size_t same = refit_plan::place_of(plan.senders, sides.receivers[r]);
          const bool has =
              same != plan.senders.size() && plan.source_set(from.tensor, same).contains(from.element);
          if (!has)
            least +=
                std::min(bits_of(model.source[from.tensor].element), bits_of(model.target[t].element)) / 8;
        }
      }
    }
    CHECK(sent == least);
    CHECK(plan.bytes == least);
    std::uint64_t of_links = 0;
    for (const refit_link& each : plan.links)
      of_links += each.bytes;
    CHECK(of_links == plan.bytes);
    CHECK(sides.plan(model).fingerprint == plan.fingerprint);
  }
}

namespace {

std::vector<refit_tensor> one(std::string name, std::uint64_t rows, std::uint64_t columns,
                              dtype element = dtype::bf16, std::uint32_t group = 0) {
  return {{std::move(name), tensor_shape::matrix(rows, columns), element, group}};
}

refit_plan plan_of(const std::vector<refit_tensor>& source, const std::vector<refit_tensor>& target,
                   const std::vector<refit_rule>& rules, std::uint32_t receivers = 1,
                   split_axis axis = split_axis::rows, const refit_plan_options& options = {}) {
  const sharding::replicated from(facts_of(source), rank_count{1});
  const split_2d to(facts_of(target), std::vector<split_axis>(target.size(), axis), rank_count{receivers});
  std::vector<rank_id> ranks;
  for (std::uint32_t r = 0; r < receivers; ++r)
    ranks.push_back(rank_id{1 + r});
  const rank_id first{0};
  return make_refit(refit_side<sharding::replicated>{source, from, {&first, 1}},
                    refit_side<split_2d>{target, to, ranks}, rules, options);
}

}  // namespace

TEST_CASE("rules that do not fill a target tensor once are refused with names and numbers") {
  const auto refused = [](const char* text, auto&&... arguments) {
    CHECK_THROWS_WITH_AS(static_cast<void>(plan_of(arguments...)), text, argument_error);
  };
  refused("refit: target tensor 'b' takes 'b', which no source tensor is named; add a rule for it",
          one("a", 2, 2), one("b", 2, 2), std::vector<refit_rule>{});
  refused(
      "refit: 'a' (2 x 3) -> 'b' (3 x 2): the shapes differ; name rows or columns, and transpose before: a "
      "refit does not",
      one("a", 2, 3), one("b", 3, 2), std::vector<refit_rule>{{"a", "b"}});
  refused("refit: the rules fill 4 of the 6 elements of target tensor 'b'", one("a", 2, 2), one("b", 3, 2),
          std::vector<refit_rule>{{"a", "b", {}, refit_bands::rows(0, 2)}});
  refused("refit: two rules fill element 2 of target tensor 'b'", one("a", 2, 2), one("b", 2, 2),
          std::vector<refit_rule>{{"a", "b"}, {"a", "b", refit_bands::rows(0, 1), refit_bands::rows(1, 1)}});
  refused("refit: 1 bands of 3 rows from 0 on, 3 apart, overlap or pass the end of 'a', which has 2",
          one("a", 2, 2), one("b", 3, 2), std::vector<refit_rule>{{"a", "b", refit_bands::rows(0, 3), {}}});
  refused(
      "refit: 'a' (2 x 2) -> 'b' (2 x 2): rows of one do not become columns of the other: transpose before",
      one("a", 2, 2), one("b", 2, 2),
      std::vector<refit_rule>{{"a", "b", refit_bands::rows(0, 2), refit_bands::columns(0, 2)}});
  refused("refit: 'a' is bf16, 'b' is f16: only f32 is converted to and from bf16 and f16", one("a", 2, 2),
          one("b", 2, 2, dtype::f16), std::vector<refit_rule>{{"a", "b"}});
  refused("refit: rule 'a.*' -> 'b': both names have one *, or none", one("a", 2, 2), one("b", 2, 2),
          std::vector<refit_rule>{{"a.*", "b"}});
  refused("refit: rule 'a' -> 'c': no target tensor has that name", one("a", 2, 2), one("b", 2, 2),
          std::vector<refit_rule>{{"a", "c"}});
  refused(
      "refit: the partition cuts groups of 32 elements of 'b', whose rows have 64: split rows, or columns at "
      "multiples of the group",
      one("a", 2, 64), one("b", 2, 64, dtype::int8, 32), std::vector<refit_rule>{{"a", "b"}}, 3U,
      split_axis::columns);
  CHECK_THROWS_WITH_AS(static_cast<void>(plan_of(one("a", 2, 64), one("b", 2, 64, dtype::int8, 32),
                                                 {{"a", "b"}}, 1U, split_axis::rows, {.arrival_bytes = 255})),
                       "refit: 256 bytes of 'b' are quantised on arrival at rank 1, but arrival_bytes is 255",
                       length_error);
}

TEST_CASE("a tensor without elements takes a rule, and a set of whole groups is accepted in any form") {
  const refit_plan empty = plan_of(one("a", 0, 4), one("b", 0, 4), {{"a", "b"}}, 2);
  CHECK(empty.copies.empty());
  CHECK(empty.unused.empty());
  // A single row cut in columns is a range, and not a band of a matrix.
  const refit_plan row =
      plan_of(one("a", 1, 128), one("a", 1, 128, dtype::int8, 32), {}, 2, split_axis::columns);
  CHECK(refit_layout(row, rank_id{2}).of(tensor_id{0}).scales_bytes == 8);
}

TEST_CASE("one rule with a star maps the tensors of all layers, and replicas share the sending") {
  std::vector<refit_tensor> source;
  std::vector<refit_tensor> target;
  for (const char* layer : {"0", "1", "17"}) {
    source.push_back({"h." + std::string(layer) + ".qkv", tensor_shape::matrix(24, 4)});
    for (const char* part : {"q", "k", "v"})
      target.push_back(
          {"layers." + std::string(layer) + "." + part, tensor_shape::matrix(*part == 'q' ? 16 : 4, 4)});
  }
  // Two key heads, each with two query heads of four rows: sizes 8, 2 and 2 of a group.
  const auto rules =
      split_interleaved("h.*.qkv", split_axis::rows, 2,
                        std::vector<fused_part>{{"layers.*.q", 8}, {"layers.*.k", 2}, {"layers.*.v", 2}});
  const sharding::replicated from(facts_of(source), rank_count{2});
  const sharding::replicated to(facts_of(target), rank_count{1});
  const rank_id senders[] = {rank_id{0}, rank_id{1}};
  const rank_id receiver{2};
  const refit_plan plan = make_refit(refit_side<sharding::replicated>{source, from, senders},
                                     refit_side<sharding::replicated>{target, to, {&receiver, 1}}, rules);
  CHECK(plan.bytes == 3 * 24 * 4 * 2);
  REQUIRE(plan.links.size() == 2);
  CHECK(plan.links[0].bytes + plan.links[1].bytes == plan.bytes);
  CHECK(plan.links[0].bytes * 3 <= plan.links[1].bytes * 4);
  CHECK(plan.links[1].bytes * 3 <= plan.links[0].bytes * 4);
  CHECK(plan.unused.empty());
}

TEST_CASE("an upload publishes a version on a device whole, and a failure leaves the version before it") {
  std::vector<refit_tensor> tensors{{.name = "a", .shape = tensor_shape::matrix(7, 32)},
                                    {.name = "b", .shape = tensor_shape::vector(129)}};
  const std::array one{rank_id{0}};
  const sharding::replicated all(facts_of(tensors), rank_count{1});
  const refit_plan plan = make_refit(refit_side<sharding::replicated>{tensors, all, one},
                                     refit_side<sharding::replicated>{tensors, all, one});
  const refit_layout layout(plan, rank_id{0});
  host_space device({.budget = 1 << 20, .name = "device"});
  host_space pinned({.budget = 1 << 10, .name = "pinned"});
  std::vector<std::byte> memory(layout.bytes());
  refit_image image(layout, memory);
  const auto fill = [&](std::uint64_t number) {
    for (std::size_t i = 0; i < memory.size(); ++i)
      memory[i] = static_cast<std::byte>(i * number + number);
    image.set_number(number);
  };
  for (const std::uint64_t piece : {64U, 100U, 512U}) {
    CAPTURE(piece);
    versioned<refit_device_image<host_space>, double_buffer> weights(
        {}, [&](std::size_t) { return refit_device_image(layout, device); });
    refusing_queue queue{.space = &device};
    refit_upload upload(queue, pinned, piece);
    CHECK(upload.staging_bytes() == 2 * piece);
    const std::array kernels{host_space::fence_type{}};
    fill(3);
    REQUIRE(upload.publish(image, weights, kernels).has_value());
    const std::uint64_t pieces = (layout.bytes() + piece - 1) / piece;
    CHECK(queue.copies == pieces);
    CHECK(queue.waits == pieces);
    const std::vector<std::byte> third = memory;
    const auto holds = [&](const std::vector<std::byte>& bytes, std::uint64_t number) {
      const auto now = weights.snapshot().value();
      const auto has = now->memory().span();
      return now->number() == number && std::equal(has.begin(), has.end(), bytes.begin(), bytes.end());
    };
    CHECK(holds(third, 3));
    {
      const auto now = weights.snapshot().value();
      const auto b = now->tensor(tensor_id{1});
      CHECK(b.bytes == image.tensor(tensor_id{1}).size());
      CHECK(std::equal(b.span().begin(), b.span().end(), image.tensor(tensor_id{1}).begin()));
      CHECK(now->scales(tensor_id{1}).bytes == 0);
    }
    CHECK(upload.publish(image, weights).error().code == errc::old_weights);
    fill(4);
    for (std::size_t refused = 0; refused < pieces; ++refused) {
      queue.refused = queue.copies + refused;
      CHECK(upload.publish(image, weights).error().code == errc::dead_range);
      CHECK(holds(third, 3));
    }
    queue.refused = ~std::size_t{0};
    {
      const auto reader = weights.snapshot().value();  // of the third, while the fourth is written
      REQUIRE(upload.publish(image, weights).has_value());
      CHECK(holds(memory, 4));
      CHECK(std::equal(third.begin(), third.end(), reader->memory().span().begin()));
      fill(5);
      CHECK(upload.publish(image, weights).error().code == errc::version_pinned);
    }
    CHECK(upload.publish(image, weights).has_value());
    CHECK(holds(memory, 5));
  }
  CHECK(device.used() == 0);
  CHECK(pinned.used() == 0);

  // Of a device that fails, and the exception says so: both pieces have ended, and the next upload works.
  for (const bool at_wait : {true, false}) {
    CAPTURE(at_wait);
    versioned<refit_device_image<host_space>, double_buffer> weights(
        {}, [&](std::size_t) { return refit_device_image(layout, device); });
    failing_queue queue;
    refit_upload upload(queue, pinned, 64);
    fill(1);
    for (std::size_t failed = 0; failed < (layout.bytes() + 63) / 64; ++failed) {
      (at_wait ? queue.failed_wait : queue.failed_call) = queue.copies + failed;
      CHECK_THROWS_AS(static_cast<void>(upload.publish(image, weights)), system_error);
      CHECK(queue.in_flight == 0);
      CHECK(weights.newest() == no_version);
    }
    CHECK(upload.publish(image, weights).has_value());
    CHECK(queue.in_flight == 0);
  }

  versioned<refit_device_image<host_space>, latest> alone(
      latest{.versions = 1}, [&](std::size_t) { return refit_device_image(layout, device); });
  refit_upload upload(device, pinned, 64);
  fill(1);
  CHECK(upload.publish(image, alone).error().code == errc::version_pinned);
  CHECK(alone.newest() == no_version);
  versioned<refit_device_image<host_space>, stash<2>> both(
      {}, [&](std::size_t) { return refit_device_image(layout, device); });
  const version_id first = upload.publish(image, both).value();
  fill(2);
  REQUIRE(upload.publish(image, both).has_value());
  CHECK(upload.publish(image, both).error().code == errc::old_weights);
  CHECK(both.pin(first).has_value());  // a refusal ends no version
  CHECK_THROWS_AS(refit_upload(device, pinned, 0), argument_error);
}
