#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/refit/refit.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/latest.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/refit_world.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using weights_of = versioned<refit_image, double_buffer>;

/// An engine's rank: two images and the versions in them.
struct engine_rank {
  engine_rank(const refit_plan& plan, rank_id rank)
      : layout(plan, rank),
        memory{std::vector<std::byte>(layout.bytes()), std::vector<std::byte>(layout.bytes())},
        weights({}, [this](std::size_t i) { return refit_image(layout, memory[i]); }) {}

  refit_layout layout;
  std::array<std::vector<std::byte>, 2> memory;
  weights_of weights;
};

/// What a sender holds: the dense pieces of its partition.
struct trainer_rank {
  trainer_rank(const refit_plan& plan, const std::vector<std::vector<std::byte>>& contents,
               std::size_t sender) {
    for (std::size_t t = 0; t < contents.size(); ++t)
      memory.push_back(dense(contents[t], plan.source_set(t, sender), bits_of(plan.source[t].element) / 8));
    for (const auto& each : memory)
      spans.emplace_back(each);
  }
  [[nodiscard]] refit_spans source() const { return refit_spans(spans); }

  std::vector<std::vector<std::byte>> memory;
  std::vector<std::span<const std::byte>> spans;
};

/// One call of `refit` on a rank, by what the rank is in the plan.
template <class Ranks>
result<refit_outcome> call(refit<Ranks>& moving, const refit_plan& plan, Ranks& ranks,
                           const std::vector<std::vector<std::byte>>& contents,
                           const std::unique_ptr<engine_rank>& engine, std::uint64_t number,
                           refit_sends what) {
  const std::size_t sender = refit_plan::place_of(plan.senders, ranks.rank());
  const bool sends = sender != plan.senders.size();
  const deadline by = ranks.after(60'000'000'000);
  if (!sends)
    return engine ? moving.receive(number, engine->weights, what, by) : moving.attend(number, what, by);
  const trainer_rank trainer(plan, contents, sender);
  refit_spans source = trainer.source();
  return engine ? moving.move(number, source, engine->weights, what, by)
                : moving.send(number, source, what, by);
}

std::unique_ptr<engine_rank> engine_of(const refit_plan& plan, rank_id rank) {
  if (refit_plan::place_of(plan.receivers, rank) == plan.receivers.size()) return nullptr;
  return std::make_unique<engine_rank>(plan, rank);
}

/// What a tensor of a rank must be, by the definition: codes and scales of whole rows if it is quantised.
void check_image(const refit_image& image, const refit_plan& plan, const refit_model& model,
                 const std::vector<std::vector<std::byte>>& contents, rank_id rank) {
  const std::size_t receiver = refit_plan::place_of(plan.receivers, rank);
  for (std::uint32_t t = 0; t < model.target.size(); ++t) {
    const refit_tensor& tensor = model.target[t];
    const element_runs set = plan.target_set(t, receiver);
    dtype wire = tensor.element;
    if (tensor.group != 0) wire = model.source[model.origins[t].front().tensor].element;
    if (tensor.group != 0 && wire == dtype::f32) wire = plan.options.quantizes_from;
    std::vector<std::byte> wanted;
    for (std::uint64_t i = 0; i < set.elements(); ++i) {
      const auto element = converted(contents, model, model.origins[t][set.element_at(i)], wire);
      wanted.insert(wanted.end(), element.begin(), element.end());
    }
    if (tensor.group != 0 && !set.empty()) {
      const std::uint64_t columns = tensor.shape.columns();
      const std::uint64_t rows = set.elements() / columns;
      const std::uint64_t groups = columns / tensor.group;
      std::vector<std::byte> codes(rows * columns);
      std::vector<std::byte> scales(rows * groups * 4);
      quantize_groups(host_executor{}, {rows, static_cast<std::uint32_t>(groups), tensor.group},
                      {wanted.data(), wire, columns * bits_of(wire) / 8},
                      {codes.data(), tensor.element, columns}, {scales.data(), groups * 4})
          .value();
      REQUIRE(copy_of(image.scales(tensor_id{t})) == scales);
      wanted = codes;
    }
    REQUIRE(copy_of(image.tensor(tensor_id{t})) == wanted);
  }
}

/// Changes a few elements: what a small step leaves of bf16.
void change_some(random_numbers& random, std::vector<std::vector<std::byte>>& contents) {
  for (auto& each : contents) {
    for (std::size_t i = 0; i < each.size(); i += 2) {
      if (random.once_in(20)) each[i] ^= std::byte{1};
    }
  }
}

}  // namespace

TEST_CASE("every element of every rank is what its rule says, after all and after changes") {
  std::uint64_t changed = 0;
  std::uint64_t sparse = 0;
  for (const auto seed : seeds_within(250, 60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const bool quantises = random.once_in(3);
    const refit_model model = random_refit(random, quantises);
    const refit_sides sides = random_sides(random, model, quantises);
    const bool keeps = quantises && random.once_in(2);
    const dtype from = random.once_in(2) ? dtype::f32 : dtype::bf16;
    const refit_plan plan = sides.plan(
        model, {.arrival_bytes = quantises ? 8192U : 0U, .keeps_arrivals = keeps, .quantizes_from = from});
    std::vector<std::vector<std::vector<std::byte>>> versions{source_contents(model, seed)};
    for (int i = 0; i < 2; ++i) {
      versions.push_back(versions.back());
      change_some(random, versions.back());
    }
    in_world(sides.world, seed, [&](sim_ranks& ranks, std::uint32_t) {
      refit moving(ranks, plan, {.staging_bytes = 28672});
      auto engine = engine_of(plan, ranks.rank());
      for (std::uint64_t v = 0; v < versions.size(); ++v) {
        const auto done = call(moving, plan, ranks, versions[v], engine, v + 1, refit_sends::changes);
        done.value();
        if (v != 0) CHECK(done->changed_links == done->links);
        CHECK(done->elements_bytes == plan.sent_bytes(ranks.rank()));
        if (v == 2) changed += done->changed_links;
        if (v != 0 && keeps && done->elements_bytes > 1500) {
          CHECK(done->sent_bytes * 2 < done->elements_bytes);
          ++sparse;
        }
        if (engine) check_image(*engine->weights.snapshot().value(), plan, model, versions[v], ranks.rank());
      }
      CHECK(moving.staging_bytes() <= 28672);
      CHECK(moving.base_bytes() == plan.sent_bytes(ranks.rank()));
    });
  }
  CHECK(changed > 10);
  CHECK(sparse > 3);
}

namespace {

/// Ranks of which one message is changed on its way. @tparam T  the ranks.
template <transport T>
class changing_ranks {
 public:
  explicit changing_ranks(T& ranks) : ranks_(&ranks) {}
  /// The `number`-th message from now on has one bit flipped, or lacks its last byte.
  void change(std::uint64_t number, bool is_short) {
    left_ = number + 1;
    is_short_ = is_short;
  }
  [[nodiscard]] bool has_changed() const { return has_changed_; }

  [[nodiscard]] rank_id rank() const noexcept { return ranks_->rank(); }
  [[nodiscard]] rank_count world() const noexcept { return ranks_->world(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return ranks_->after(ns); }
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) {
    return ranks_->send(changed(bytes), to, tag, by);
  }
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) {
    return ranks_->recv(bytes, from, tag, by);
  }
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by) {
    return ranks_->exchange(changed(out), to, into, from, tag, by);
  }
  void revoke() noexcept { ranks_->revoke(); }
  result<comm::agreed> agree(std::uint64_t bits, deadline by)
    requires requires(T& t) { t.agree(bits, by); }
  {
    return ranks_->agree(bits, by);
  }

 private:
  std::span<const std::byte> changed(std::span<const std::byte> bytes) {
    if (left_ == 0 || --left_ != 0) return bytes;
    copy_.assign(bytes.begin(), bytes.end());
    has_changed_ = true;
    if (is_short_) return std::span(copy_).first(copy_.size() - 1);
    copy_[copy_.size() / 2] ^= std::byte{0x10};
    return copy_;
  }

  T* ranks_;
  std::uint64_t left_ = 0;
  bool is_short_ = false;
  bool has_changed_ = false;
  std::vector<std::byte> copy_;
};

/// Two trainers with shards (ranks 0 and 1), two engines with columns (2 and 3), and a rank on neither side.
struct small_refit {
  explicit small_refit(std::uint64_t rows = 48) {
    model.source = {{"a", tensor_shape::matrix(rows, 40), dtype::bf16},
                    {"b", tensor_shape::vector(100), dtype::bf16}};
    model.target = model.source;
    for (std::uint32_t t = 0; t < 2; ++t) {
      model.origins.emplace_back();
      for (std::uint64_t i = 0; i < model.source[t].shape.elements(); ++i)
        model.origins[t].push_back({t, i});
    }
    sides.world = 5;
    sides.senders = {rank_id{0}, rank_id{1}};
    sides.receivers = {rank_id{2}, rank_id{3}};
    sides.from = table_partition(
        zero_partition(facts_of(model.source), rank_count{2}, zero_stage::weights, state_kind::weights));
    sides.to = table_partition(
        split_2d(facts_of(model.target), std::vector{split_axis::columns, split_axis::none}, rank_count{2}));
    plan = sides.plan(model);
  }

  refit_model model;
  refit_sides sides;
  refit_plan plan;
};

/// Versions of the contents: each changes some elements of the one before.
std::vector<std::vector<std::vector<std::byte>>> versions_of(const small_refit& world, std::size_t count) {
  random_numbers random(7);
  std::vector<std::vector<std::vector<std::byte>>> versions{source_contents(world.model, 1)};
  while (versions.size() < count) {
    versions.push_back(versions.back());
    change_some(random, versions.back());
  }
  return versions;
}

constexpr refit_sends changes = refit_sends::changes;

}  // namespace

TEST_CASE("a message that is changed on its way, or short, leaves the old version on all ranks") {
  const small_refit world;
  const auto versions = versions_of(world, 3);
  for (const bool is_short : {false, true}) {
    std::uint64_t found = 0;
    for (std::uint64_t n = 0;; ++n) {
      CAPTURE(is_short);
      CAPTURE(n);
      bool is_over = false;
      in_world(5, n, [&](sim_ranks& under, std::uint32_t rank) {
        changing_ranks ranks(under);
        refit moving(ranks, world.plan);
        const auto engine = engine_of(world.plan, under.rank());
        call(moving, world.plan, ranks, versions[0], engine, 1, changes).value();
        if (rank == 0) ranks.change(n, is_short);
        const auto done = call(moving, world.plan, ranks, versions[1], engine, 2, changes);
        if (rank == 0 && !ranks.has_changed()) is_over = true;
        const bool is_published = engine && engine->weights.snapshot().value()->number() == 2;
        if (engine) CHECK(is_published == done.has_value());
        const auto& vote = moving.last_vote();
        REQUIRE(vote);
        if (done) {
          CHECK(vote->bits == 1);
          return;
        }
        CHECK(vote->bits == 0);
        if (engine)
          check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[0],
                      under.rank());
        CHECK(done.code() != errc::other_refit);  // a damaged number is not compared with anything
        if (done.code() == errc::message_damaged) {
          CHECK(done.error().index == 0);
          ++found;
        }
        if (done.code() == errc::size_mismatch) ++found;
        // The epoch was revoked; in the next one the same objects go on.
        under.shrink(*vote);
        call(moving, world.plan, ranks, versions[2], engine, 3, changes).value();
        if (engine)
          check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[2],
                      under.rank());
      });
      if (is_over) {
        CHECK(n > 3);
        CHECK(found >= n);
        break;
      }
    }
  }
}

TEST_CASE("a trainer that dies at any call leaves one version on all engines, and is named") {
  const small_refit world;
  const auto versions = versions_of(world, 2);
  std::uint64_t named = 0;
  std::uint64_t kept = 0;
  std::uint64_t refused = 0;
  for (std::uint64_t n = 0; n < 60; ++n) {
    CAPTURE(n);
    std::array<std::uint64_t, 5> numbers{};
    llmmem::testing::sim_network net({.seats = 5, .seed = n});
    net.kill_in_call(seat_id{0}, 12 + 2 * n);
    net.run([&](llmmem::testing::sim_endpoint& end) {
      sim_ranks ranks(end);
      ranks.join(ranks.after(1'000'000'000)).value();
      refit moving(ranks, world.plan);
      const auto engine = engine_of(world.plan, ranks.rank());
      for (std::uint64_t v = 0; v < 2; ++v) {
        const auto done = call(moving, world.plan, ranks, versions[v], engine, v + 1, changes);
        if (!done) {
          if (done.code() == errc::peer_failed) {
            CHECK(done.error().index == 0);
            ++named;
          }
          break;
        }
      }
      if (engine) {
        const auto served = engine->weights.snapshot();
        numbers[to_index(ranks.rank())] = served ? (*served)->number() : 0;
        if (served && (*served)->number() != 0)
          check_image(**served, world.plan, world.model, versions[(*served)->number() - 1], ranks.rank());
      }
      if (!moving.last_vote() || moving.last_vote()->failed.empty()) return;
      // Without the dead one, ranks have other numbers than in the plan.
      ranks.shrink(*moving.last_vote());
      ++refused;
      CHECK_THROWS_WITH_AS(
          static_cast<void>(moving.attend(3, changes, ranks.after(1))),
          ("refit: rank " + std::to_string(to_index(ranks.rank()) + 1) + " of 5 is now rank " +
           std::to_string(to_index(ranks.rank())) + " of 4; make a plan for these ranks, and a refit of it")
              .c_str(),
          argument_error);
    });
    if (!net.was_killed(seat_id{0})) break;
    CHECK(numbers[2] == numbers[3]);
    if (numbers[2] == 1) ++kept;
  }
  CHECK(named > 5);
  CHECK(kept > 5);
  CHECK(refused > 20);
}

TEST_CASE("a version waits for its readers, an old number is refused, and all ranks agree on both") {
  const small_refit world;
  const auto versions = versions_of(world, 4);
  in_world(5, 3, [&](sim_ranks& ranks, std::uint32_t rank) {
    refit moving(ranks, world.plan);
    const auto engine = engine_of(world.plan, ranks.rank());
    const auto refit_to = [&](std::uint64_t v) {
      return call(moving, world.plan, ranks, versions[v - 1], engine, v, changes);
    };
    refit_to(1).value();
    pinned_version<weights_of> reader;
    if (rank == 2) reader = engine->weights.snapshot().value();
    refit_to(2).value();
    const auto refused = refit_to(3);
    REQUIRE_FALSE(refused);
    CHECK(refused.code() == (rank == 2 ? errc::version_pinned : errc::refit_abandoned));
    if (engine) CHECK(engine->weights.snapshot().value()->number() == 2);
    if (rank == 2) check_image(*reader, world.plan, world.model, versions[0], ranks.rank());
    reader.release();
    const auto done = refit_to(3);
    done.value();
    CHECK(done->changed_links == done->links);  // a refusal before anything was sent costs nothing later
    const auto old = refit_to(3);
    CHECK(old.code() == (engine ? errc::old_weights : errc::refit_abandoned));
    refit_to(4).value();
  });
}

TEST_CASE("a receiver without the base gets every element, or the refit is refused as asked") {
  const small_refit world;
  const auto versions = versions_of(world, 4);
  for (const bool is_damaged : {false, true}) {
    CAPTURE(is_damaged);
    in_world(5, 5, [&](sim_ranks& ranks, std::uint32_t rank) {
      refit moving(ranks, world.plan);
      auto engine = engine_of(world.plan, ranks.rank());
      const auto refit_to = [&](std::uint64_t v, refit_sends what) {
        return call(moving, world.plan, ranks, versions[v - 1], engine, v, what);
      };
      refit_to(1, changes).value();
      if (rank == 3 && is_damaged) engine->weights.snapshot().value()->memory()[0] ^= std::byte{4};
      if (rank == 3 && !is_damaged) engine = engine_of(world.plan, ranks.rank());  // it has started again
      const auto refused = refit_to(2, refit_sends::only_changes);
      REQUIRE_FALSE(refused);
      const bool lacks = rank == 0 || (rank == 1 && !is_damaged);  // the damaged byte came from rank 0
      CHECK(refused.code() == (lacks ? errc::other_base : errc::refit_abandoned));
      if (lacks) CHECK(refused.error().index == 3);
      const auto done = refit_to(2, changes);
      done.value();
      if (rank < 2) {
        CHECK(done->links == 2);
        CHECK(done->changed_links == (lacks ? 1 : 2));
      }
      if (engine)
        check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[1], ranks.rank());
      const auto next = refit_to(3, refit_sends::only_changes);
      next.value();
      if (rank < 2) {
        // 5% of the units of the low bytes changed: a gap, a count and a unit for each.
        CHECK(next->sent_bytes * 4 < next->elements_bytes + 4 * 4 * sizeof(detail::refit_header));
      }
      if (engine)
        check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[2], ranks.rank());
    });
  }
}

TEST_CASE("changes travel in the shortest of their forms") {
  const small_refit world;
  std::vector<std::vector<std::vector<std::byte>>> versions{source_contents(world.model, 1)};
  versions.push_back(versions.back());
  versions.back()[0][1000] ^= std::byte{1};  // one element
  versions.push_back(versions.back());
  random_numbers random(3);
  for (auto& each : versions.back()) {
    for (std::size_t i = 0; i < each.size(); i += 2)
      each[i] ^= static_cast<std::byte>(random.below(2U));  // the lowest bit of half of the elements
  }
  versions.push_back(source_contents(world.model, 99));  // other elements
  in_world(5, 8, [&](sim_ranks& ranks, std::uint32_t rank) {
    refit moving(ranks, world.plan);
    const auto engine = engine_of(world.plan, ranks.rank());
    std::vector<std::uint64_t> sent;
    for (std::uint64_t v = 0; v < versions.size(); ++v) {
      const auto done = call(moving, world.plan, ranks, versions[v], engine, v + 1, changes);
      sent.push_back(done.value().sent_bytes);
      if (engine)
        check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[v], ranks.rank());
    }
    const std::uint64_t elements = world.plan.sent_bytes(ranks.rank());
    if (rank >= 2) return;
    const std::uint64_t heads = 2 * sizeof(detail::refit_header);  // one message for each engine
    CHECK(sent[0] == elements + heads);
    CHECK(sent[1] <= heads + 5);
    CHECK(sent[2] > heads + elements / 16);
    CHECK(sent[2] < heads + elements / 4);  // a bit for each low byte, and the tables
    CHECK(sent[3] > heads + elements / 2);
    CHECK(sent[3] <= heads + elements);
  });
}

namespace {

/// A source whose pieces are counted, and which fails when one is held.
struct counted_source {
  refit_spans under;
  std::uint64_t holds = 0;
  std::uint64_t fails_at = ~std::uint64_t{0};  // from 0 on
  bool throws = false;

  [[nodiscard]] result<refit_spans::held> hold(tensor_id tensor) {
    if (holds++ != fails_at) return under.hold(tensor);
    if (throws) throw std::runtime_error("no such file");
    return failure{errc::out_of_range, 0, 1, 0, "source"};
  }
};

}  // namespace

TEST_CASE("a piece is held once for each rank that needs it, in however many messages it travels") {
  const small_refit world(480);
  const auto versions = versions_of(world, 1);
  in_world(5, 17, [&](sim_ranks& ranks, std::uint32_t rank) {
    refit moving(ranks, world.plan, {.staging_bytes = 28672});  // messages of 4 KiB
    const auto engine = engine_of(world.plan, ranks.rank());
    if (rank >= 2)
      return static_cast<void>(call(moving, world.plan, ranks, versions[0], engine, 1, changes).value());
    const trainer_rank trainer(world.plan, versions[0], rank);
    counted_source source{trainer.source()};
    const auto done = moving.send(1, source, changes, ranks.after(60'000'000'000));
    CHECK(done.value().links == 2);
    CHECK(done->messages == 6);
    CHECK(source.holds == (rank == 0 ? 2 : 4));  // for each engine "a", and what rank 1 has of "b"
  });
}

TEST_CASE(
    "a source that fails at any piece leaves the old version, and the next refit has the right bytes on all "
    "ranks") {
  std::uint64_t failed = 0;
  std::uint64_t threw = 0;
  for (const auto seed : seeds_within(80, 30)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const refit_model model = random_refit(random, true);
    const refit_sides sides = random_sides(random, model, true);
    const refit_plan plan = sides.plan(model, {.arrival_bytes = 8192, .keeps_arrivals = random.once_in(2)});
    std::vector<std::vector<std::vector<std::byte>>> versions{source_contents(model, seed)};
    for (int i = 0; i < 2; ++i) {
      versions.push_back(versions.back());
      change_some(random, versions.back());
    }
    const std::uint64_t fails_at = random.below(std::uint64_t{6});
    const bool throws = random.once_in(2);
    in_world(sides.world, seed, [&](sim_ranks& ranks, std::uint32_t) {
      refit moving(ranks, plan, {.staging_bytes = 28672});
      const auto engine = engine_of(plan, ranks.rank());
      const auto check = [&](std::uint64_t number) {
        if (engine)
          check_image(*engine->weights.snapshot().value(), plan, model, versions[number - 1], ranks.rank());
      };
      call(moving, plan, ranks, versions[0], engine, 1, changes).value();
      bool is_done = false;
      if (ranks.rank() == plan.senders.front()) {
        const trainer_rank trainer(plan, versions[1], 0);
        counted_source source{trainer.source(), 0, fails_at, throws};
        const deadline by = ranks.after(60'000'000'000);
        try {
          is_done = (engine ? moving.move(2, source, engine->weights, changes, by)
                            : moving.send(2, source, changes, by))
                        .has_value();
        } catch (const std::runtime_error&) {
          ++threw;
        }
        CHECK(is_done == (source.holds <= fails_at));
        failed += is_done ? 0U : 1U;
      } else {
        const std::uint64_t before = ranks.after(0).ns;
        is_done = call(moving, plan, ranks, versions[1], engine, 2, changes).has_value();
        CHECK(ranks.after(0).ns - before < 30'000'000'000);  // it did not wait until its deadline
      }
      check(is_done ? 2 : 1);
      REQUIRE(moving.last_vote());
      if (!is_done) ranks.shrink(*moving.last_vote());
      const auto done = call(moving, plan, ranks, versions[2], engine, 3, changes);
      done.value();
      CHECK(done->changed_links == (is_done ? done->links : 0));
      check(3);
    });
  }
  CHECK(failed > 10);
  CHECK(threw > 3);
}

TEST_CASE("ranks without agree vote by messages") {
  const small_refit world;
  const auto versions = versions_of(world, 2);
  in_world(6, 9, [&](sim_ranks& under, std::uint32_t rank) {
    if (rank == 0) return;
    const std::array members{rank_id{1}, rank_id{2}, rank_id{3}, rank_id{4}, rank_id{5}};
    rank_group ranks(under, members);
    refit moving(ranks, world.plan);
    const auto engine = engine_of(world.plan, ranks.rank());
    for (std::uint64_t v = 0; v < 2; ++v) {
      call(moving, world.plan, ranks, versions[v], engine, v + 1, changes).value();
      if (engine)
        check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[v], ranks.rank());
    }
    CHECK(call(moving, world.plan, ranks, versions[1], engine, 2, changes).code() ==
          (engine ? errc::old_weights : errc::refit_abandoned));
    CHECK_FALSE(moving.last_vote());
  });
}

TEST_CASE("all memory is taken at construction, within its budgets") {
  const small_refit world;
  const auto versions = versions_of(world, 2);
  in_world(5, 11, [&](sim_ranks& ranks, std::uint32_t rank) {
    counting_metadata counted;
    refit moving(ranks, world.plan, {.staging_bytes = 1 << 20, .metadata = counted.source()});
    const auto engine = engine_of(world.plan, ranks.rank());
    const std::uint64_t allocations = counted.allocations();
    const std::size_t live = counted.live_bytes();
    CHECK(live == moving.staging_bytes() + moving.base_bytes() + moving.arrival_bytes());
    CHECK(moving.staging_bytes() <= 1 << 20);
    CHECK(moving.base_bytes() == (rank < 2 ? world.plan.sent_bytes(ranks.rank()) : 0));
    for (std::uint64_t v = 0; v < 2; ++v)
      call(moving, world.plan, ranks, versions[v], engine, v + 1, changes).value();
    CHECK(counted.allocations() == allocations);
    CHECK(counted.live_bytes() == live);
  });
}

TEST_CASE("calls that do not fit the plan are refused before any rank waits") {
  const small_refit world;
  in_world(5, 13, [&](sim_ranks& ranks, std::uint32_t rank) {
    if (rank != 2) return;
    CHECK_THROWS_WITH_AS(refit(ranks, world.plan, {.staging_bytes = 28000}),
                         "refit: staging_bytes is 28000; give it at least 28672", argument_error);
    refit moving(ranks, world.plan);
    CHECK_THROWS_WITH_AS(static_cast<void>(moving.attend(1, changes, ranks.after(1))),
                         "refit: rank 2 has an image in the plan; call receive() or move()", argument_error);
    const refit_layout layout(world.plan, ranks.rank());
    std::vector<std::byte> memory(layout.bytes());
    versioned<refit_image, latest> one_slot({.versions = 1},
                                            [&](std::size_t) { return refit_image(layout, memory); });
    CHECK_THROWS_WITH_AS(static_cast<void>(moving.receive(1, one_slot, changes, ranks.after(1))),
                         "refit: a refit into the only slot would lose both versions if it failed; give the "
                         "versions double_buffer, or latest with two slots",
                         argument_error);
    CHECK_THROWS_WITH_AS(refit_layout(world.plan, rank_id{4}),
                         "refit_layout: rank 4 receives nothing in this plan; only receivers have an image",
                         argument_error);
  });
}

TEST_CASE("a sharded state is a source, and caches begin the epoch of the new weights") {
  const small_refit world;
  const auto versions = versions_of(world, 2);
  in_world(5, 15, [&](sim_ranks& ranks, std::uint32_t rank) {
    refit moving(ranks, world.plan);
    const auto engine = engine_of(world.plan, ranks.rank());
    const deadline by = ranks.after(60'000'000'000);
    if (rank < 2) {
      const std::array members{rank_id{0}, rank_id{1}};
      rank_group trainers(ranks, members);
      host_space space({.budget = 1 << 20, .name = "rank"});
      sharded_state weights(world.sides.from, facts_of(world.model.source), trainers, space);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto piece = dense(versions[0][t], world.plan.source_set(t, rank), 2);
        std::copy(piece.begin(), piece.end(), weights.local(tensor_id{t}).begin());
      }
      refit_state source(weights);
      moving.send(7, source, changes, by).value();
      return;
    }
    if (!engine) {
      moving.attend(7, changes, by).value();
      return;
    }
    paged_allocator<> cache({.blocks = 16, .block_tokens = 4, .name = "kv"});
    const std::vector<token_id> prompt(12, 5);
    const sequence_id running = cache.create().value();
    cache.append(running, prompt).value();
    cache.commit(running).value();
    CHECK(cache.cached_tokens(prompt) > 0);
    hybrid_allocator<> hybrid = small_cache();
    const sequence_id waiting = hybrid.create().value();
    hybrid.append(waiting, prompt).value();
    const std::uint64_t cached = hybrid.commit(waiting).value();
    CHECK(hybrid.cached_tokens(prompt) > 0);
    const auto done = moving.receive(7, engine->weights, changes, by);
    CHECK(finish_refit(done.value(), cache, hybrid).value() == 3 + cached);
    CHECK(cache.epoch() == 7);
    CHECK(hybrid.epoch() == 7);
    CHECK(hybrid.cached_tokens(prompt) == 0);
    hybrid.append(waiting, prompt).value();
    CHECK(hybrid.commit(waiting).value() == 0);
    CHECK(hybrid.cached_tokens(prompt) == 0);
    CHECK(hybrid.audit().empty());
    CHECK(cache.cached_tokens(prompt) == 0);
    cache.append(running, prompt).value();  // its tokens were computed with the old weights
    CHECK(cache.commit(running).value() == 0);
    CHECK(cache.cached_tokens(prompt) == 0);
    CHECK(finish_refit(*done, cache).code() == errc::old_epoch);
    check_image(*engine->weights.snapshot().value(), world.plan, world.model, versions[0], ranks.rank());
  });
}
