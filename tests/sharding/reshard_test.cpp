#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/reshard.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::elements_of;
using llmmem_tests::partition_kinds;
using llmmem_tests::random_numbers;
using llmmem_tests::random_partition;
using llmmem_tests::random_runs;
using llmmem_tests::random_tensors;
using llmmem_tests::seeds;

namespace {

/// One value for each element of each tensor, none like another.
std::uint64_t value_of(tensor_id tensor, std::uint64_t element) {
  return random_numbers(to_index(tensor) * 1'000'003ULL + element).next();
}

template <class Piece>
std::vector<std::uint64_t> contents_of(const Piece& piece) {
  std::vector<std::uint64_t> values;
  for (const std::uint64_t element : elements_of(piece.elements))
    values.push_back(value_of(piece.tensor, element));
  return values;
}

/// Carries the plan out on arrays, and checks all that a plan promises whatever it was made from.
void check_plan(const reshard_plan& plan, const std::vector<tensor_facts>& tensors,
                const std::vector<stored_piece>& stored, const std::vector<wanted_piece>& wanted) {
  std::vector<std::vector<std::uint64_t>> sources;
  for (const stored_piece& each : stored)
    sources.push_back(contents_of(each));
  std::vector<std::vector<std::optional<std::uint64_t>>> destinations;
  for (const wanted_piece& each : wanted)
    destinations.emplace_back(each.elements.elements());

  std::map<holder_id, reshard_share<holder_id>> holders;
  std::map<rank_id, reshard_share<rank_id>> ranks;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  const reshard_copy* before = nullptr;
  for (const reshard_copy& copy : plan.copies) {
    REQUIRE(copy.elements() != 0);
    REQUIRE(stored[to_index(copy.source)].tensor == copy.tensor);
    REQUIRE(wanted[to_index(copy.destination)].tensor == copy.tensor);
    if (copy.count == 1) {
      REQUIRE(copy.source_stride == copy.run);
      REQUIRE(copy.destination_stride == copy.run);
    }
    copy.each_run([&](std::uint64_t from, std::uint64_t to, std::uint64_t run) {
      for (std::uint64_t i = 0; i < run; ++i) {
        auto& destination = destinations[to_index(copy.destination)].at(to + i);
        REQUIRE(!destination.has_value());
        destination = sources[to_index(copy.source)].at(from + i);
      }
    });
    if (before != nullptr) {
      REQUIRE(std::tuple(before->source, before->source_offset) <=
              std::tuple(copy.source, copy.source_offset));
    }
    before = &copy;
    const std::uint64_t size = copy.elements() * tensors[to_index(copy.tensor)].element_bytes;
    elements += copy.elements();
    bytes += size;
    const auto count = [&](auto& shares, auto id) {
      auto& share = shares[id];
      share.id = id;
      ++share.copies;
      share.elements += copy.elements();
      share.bytes += size;
    };
    count(holders, stored[to_index(copy.source)].holder);
    count(ranks, wanted[to_index(copy.destination)].rank);
  }
  std::uint64_t minimum = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::vector<std::uint64_t> expected = contents_of(wanted[i]);
    REQUIRE(std::equal(expected.begin(), expected.end(), destinations[i].begin(), destinations[i].end()));
    minimum += expected.size();
  }
  REQUIRE(elements == minimum);
  REQUIRE(plan.elements == minimum);
  REQUIRE(plan.bytes == bytes);
  const auto same = [](const auto& listed, const auto& counted) {
    return std::equal(listed.begin(), listed.end(), counted.begin(), counted.end(),
                      [](const auto& share, const auto& entry) { return share == entry.second; });
  };
  REQUIRE(same(plan.holders, holders));
  REQUIRE(same(plan.ranks, ranks));

  // No copy goes on where another one between the same two pieces ends. (One may, across the end of a row,
  // where a preferred holder has the middle of each.)
  if (std::any_of(wanted.begin(), wanted.end(), [](const wanted_piece& w) { return w.prefers != no_holder; }))
    return;
  std::set<std::tuple<stored_index, wanted_index, std::uint64_t, std::uint64_t>> ends;
  for (const reshard_copy& copy : plan.copies) {
    copy.each_run([&](std::uint64_t from, std::uint64_t to, std::uint64_t run) {
      ends.emplace(copy.source, copy.destination, from + run, to + run);
    });
  }
  for (const reshard_copy& copy : plan.copies) {
    copy.each_run([&](std::uint64_t from, std::uint64_t to, std::uint64_t) {
      REQUIRE(!ends.contains({copy.source, copy.destination, from, to}));
    });
  }
}

reshard_plan checked_reshard(const std::vector<tensor_facts>& tensors,
                             const std::vector<stored_piece>& stored,
                             const std::vector<wanted_piece>& wanted) {
  reshard_plan plan = make_reshard(tensors, stored, wanted);
  check_plan(plan, tensors, stored, wanted);
  return plan;
}

std::vector<tensor_facts> one_tensor(const tensor_shape& shape, std::uint32_t element_bytes = 1) {
  return {{.name = "w", .shape = shape, .element_bytes = element_bytes}};
}

wanted_piece want_all(std::uint64_t elements, std::uint32_t rank = 0) {
  return {.tensor = tensor_id{0}, .rank = rank_id{rank}, .elements = element_runs::all_of(elements)};
}

}  // namespace

TEST_CASE("any partition over 1 to 5 ranks loads into any other over 1 to 5, and reads each element once") {
  for (const auto seed : seeds(4)) {
    CAPTURE(seed);
    random_numbers random(seed);
    for (std::uint32_t n = 1; n <= 5; ++n) {
      for (std::uint32_t m = 1; m <= 5; ++m) {
        for (std::uint32_t kinds = 0; kinds < partition_kinds * partition_kinds; ++kinds) {
          CAPTURE(n);
          CAPTURE(m);
          CAPTURE(kinds);
          const auto tensors = random_tensors(random, 6);
          const auto from = random_partition(random, tensors, kinds % partition_kinds, rank_count{n});
          const auto to = random_partition(random, tensors, kinds / partition_kinds, rank_count{m});
          const auto owned = std::visit([](const auto& p) { return sharding::owned_pieces(p); }, from);
          const auto held = std::visit([](const auto& p) { return sharding::held_pieces(p); }, from);
          const auto wanted = std::visit([](const auto& p) { return wanted_pieces(p); }, to);
          const auto local = std::visit(
              [](const auto& p) { return wanted_pieces(p, llmmem::sharding::read_first::own_number); }, to);
          checked_reshard(tensors, owned, wanted);
          checked_reshard(tensors, held, wanted);
          checked_reshard(tensors, held, local);
        }
      }
    }
  }
}

TEST_CASE("with more ranks than elements, most ranks store and read nothing") {
  random_numbers random(1);
  const std::vector<tensor_facts> tensors{{.name = "scalar", .shape = tensor_shape::scalar()},
                                          {.name = "none", .shape = tensor_shape::matrix(0, 3)},
                                          {.name = "few", .shape = tensor_shape::matrix(2, 3)}};
  for (std::uint32_t kinds = 0; kinds < partition_kinds * partition_kinds; ++kinds) {
    CAPTURE(kinds);
    const auto from = random_partition(random, tensors, kinds % partition_kinds, rank_count{13});
    const auto to = random_partition(random, tensors, kinds / partition_kinds, rank_count{19});
    checked_reshard(tensors, std::visit([](const auto& p) { return sharding::owned_pieces(p); }, from),
                    std::visit([](const auto& p) { return wanted_pieces(p); }, to));
  }
  CHECK(make_reshard({}, {}, {}) == reshard_plan{});
  CHECK(checked_reshard(tensors, {{.tensor = tensor_id{1}}}, {{.tensor = tensor_id{1}}}) == reshard_plan{});
}

TEST_CASE("any pieces give a right plan, or the first element that is in no piece") {
  std::uint64_t plans = 0;
  std::uint64_t refusals = 0;
  for (const auto seed : seeds(3000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t elements = 1 + random.below(std::uint64_t{70});
    const auto tensors = one_tensor(tensor_shape::vector(elements));
    // Bands of one matrix now and then, so that both ways of planning meet ragged covers.
    const std::uint64_t row = random.once_in(2) ? 1 + random.below(elements) : 0;
    const auto runs = [&] {
      if (row == 0 || random.once_in(3)) return random_runs(random, elements);
      const auto shape = tensor_shape::matrix(elements / row, row);
      return element_runs::box(shape, llmmem_tests::random_range(random, shape.rows()),
                               llmmem_tests::random_range(random, row));
    };
    std::vector<stored_piece> stored(random.below(std::uint64_t{12}));
    for (auto& each : stored)
      each = {.holder = holder_id{random.below(4U)}, .elements = runs()};
    if (!random.once_in(4)) {
      stored.push_back({.holder = holder_id{9}, .elements = element_runs::flat_range(0, elements / 2)});
      stored.push_back({.elements = element_runs::flat_range(elements / 2, elements - elements / 2)});
    }
    std::vector<wanted_piece> wanted(1 + random.below(std::uint64_t{4}));
    for (auto& each : wanted) {
      each = {.rank = rank_id{random.below(3U)}, .elements = runs()};
      if (random.once_in(2)) each.prefers = holder_id{random.below(5U)};
    }

    std::set<std::uint64_t> missing;
    for (const wanted_piece& want : wanted) {
      for (const std::uint64_t e : elements_of(want.elements)) {
        if (std::none_of(stored.begin(), stored.end(),
                         [&](const auto& s) { return s.elements.contains(e); })) {
          missing.insert(e);
        }
      }
    }
    if (!missing.empty()) {
      ++refusals;
      const std::string begins = "make_reshard: no stored piece has element " +
                                 std::to_string(*missing.begin()) + " of tensor 'w', which rank ";
      try {
        static_cast<void>(make_reshard(tensors, stored, wanted));
        FAIL("made a plan");
      } catch (const argument_error& e) {
        REQUIRE(std::string(e.what()).starts_with(begins));
      }
      continue;
    }
    ++plans;
    const reshard_plan plan = checked_reshard(tensors, stored, wanted);

    // Whatever the preferred holder has, it is read from there.
    for (const reshard_copy& copy : plan.copies) {
      const wanted_piece& want = wanted[to_index(copy.destination)];
      const stored_piece& from = stored[to_index(copy.source)];
      if (want.prefers == no_holder || from.holder == want.prefers) continue;
      copy.each_run([&](std::uint64_t offset, std::uint64_t, std::uint64_t run) {
        for (std::uint64_t i = 0; i < run; ++i) {
          const std::uint64_t element = from.elements.element_at(offset + i);
          for (const stored_piece& each : stored)
            REQUIRE(!(each.holder == want.prefers && each.elements.contains(element)));
        }
      });
    }
  }
  CHECK(plans > 500);
  CHECK(refusals > 300);
}

TEST_CASE("overlapping ranges are covered by the fewest of them") {
  for (const auto seed : seeds(500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t elements = 5 + random.below(std::uint64_t{40});
    std::vector<stored_piece> stored;
    for (std::uint32_t i = 0; i < 12; ++i) {
      const std::uint64_t first = random.below(elements);
      stored.push_back({.holder = holder_id{i},
                        .elements = element_runs::flat_range(first, 1 + random.below(elements - first))});
    }
    // The fewest pieces that reach each element from the first on.
    std::vector<std::size_t> fewest(elements + 1, stored.size() + 1);
    fewest[0] = 0;
    for (std::uint64_t x = 0; x < elements; ++x) {
      for (const stored_piece& each : stored) {
        if (!each.elements.contains(x)) continue;
        for (std::uint64_t y = x + 1; y <= each.elements.end(); ++y)
          fewest[y] = std::min(fewest[y], fewest[x] + 1);
      }
    }
    if (fewest[elements] > stored.size()) continue;
    const auto plan =
        checked_reshard(one_tensor(tensor_shape::vector(elements)), stored, {want_all(elements)});
    REQUIRE(plan.copies.size() == fewest[elements]);
  }
}

TEST_CASE("bands of a matrix of any height take one copy per overlapping pair") {
  // Eight thousand million rows: none is looked at for itself.
  const auto tensors = one_tensor(tensor_shape::matrix(std::uint64_t{960} << 23, 960), 2);
  const std::vector columns{split_axis::columns};
  const std::vector rows{split_axis::rows};
  for (const auto& [n, m] : {std::pair(4U, 2U), std::pair(3U, 5U), std::pair(64U, 48U), std::pair(1U, 1U)}) {
    CAPTURE(n);
    CAPTURE(m);
    const auto pairs = [&](const auto& from, const auto& to) {
      return make_reshard(tensors, sharding::owned_pieces(from), wanted_pieces(to)).copies.size();
    };
    const split_2d from_columns(tensors, columns, rank_count{n});
    const split_2d to_columns(tensors, columns, rank_count{m});
    const split_2d from_rows(tensors, rows, rank_count{n});
    const split_2d to_rows(tensors, rows, rank_count{m});
    const std::size_t along = n + m - std::gcd(n, m);
    CHECK(pairs(from_columns, to_columns) == along);
    CHECK(pairs(from_rows, to_rows) == along);
    CHECK(pairs(from_rows, to_columns) == std::size_t{n} * m);
    CHECK(pairs(from_columns, to_rows) == std::size_t{n} * m);
  }
}

TEST_CASE("a range that cuts rows takes at most three copies for each band it meets") {
  const auto tensors = one_tensor(tensor_shape::matrix(1000, 10));
  const std::vector columns{split_axis::columns};
  const split_2d to(tensors, columns, rank_count{2});
  const std::vector<std::uint64_t> boundaries{0, 3333, 10000};
  const auto plan = make_reshard(tensors, llmmem::sharding::owned_pieces(flat_uneven(tensors, boundaries)),
                                 wanted_pieces(to));
  check_plan(plan, tensors, llmmem::sharding::owned_pieces(flat_uneven(tensors, boundaries)),
             wanted_pieces(to));
  // Row 333 ends range 0 after 3 of its 10: 5 | 5 becomes 3 + 2 | 5.
  CHECK(to_text(plan) ==
        "reshard: 6 copies, 10000 elements, 10000 bytes\n"
        "holder 0: 3 copies, 3333 elements, 3333 bytes\n"
        "holder 1: 3 copies, 6667 elements, 6667 bytes\n"
        "rank 0: 4 copies, 5000 elements, 5000 bytes\n"
        "rank 1: 2 copies, 5000 elements, 5000 bytes\n"
        "copy tensor 0: stored 0 + 0 step 10 -> wanted 0 + 0 step 5: 333 x 5\n"
        "copy tensor 0: stored 0 + 5 step 10 -> wanted 1 + 0 step 5: 333 x 5\n"
        "copy tensor 0: stored 0 + 3330 -> wanted 0 + 1665: 3\n"
        "copy tensor 0: stored 1 + 0 -> wanted 0 + 1668: 2\n"
        "copy tensor 0: stored 1 + 2 step 10 -> wanted 1 + 1665 step 5: 667 x 5\n"
        "copy tensor 0: stored 1 + 7 step 10 -> wanted 0 + 1670 step 5: 666 x 5\n");
}

TEST_CASE("replicas share the reads, unless a rank has its own piece") {
  const std::uint32_t world = 4;
  std::vector<tensor_facts> tensors;
  for (std::uint32_t i = 0; i < 16; ++i)
    tensors.push_back({.name = "w", .shape = tensor_shape::vector(100), .element_bytes = 2});
  const llmmem::sharding::replicated all(tensors, rank_count{world});
  const auto plan = checked_reshard(tensors, held_pieces(all),
                                    wanted_pieces(llmmem::sharding::replicated(tensors, rank_count{3})));
  REQUIRE(plan.holders.size() == world);
  for (const auto& each : plan.holders)
    CHECK(each.bytes == 16 * 3 * 200 / world);
  CHECK(plan.copies.size() == 16 * 3);

  const auto own = checked_reshard(tensors, held_pieces(all),
                                   wanted_pieces(llmmem::sharding::replicated(tensors, rank_count{3}),
                                                 llmmem::sharding::read_first::own_number));
  CHECK(own.holders.size() == 3);
  for (const auto& each : own.copies) {
    // By tensor, then rank, both lists: of 4 stored, 3 wanted.
    CHECK(to_index(each.source) % 4 == to_index(each.destination) % 3);
  }
}

TEST_CASE("a plan is the same regardless of other requests and of the order of pieces") {
  random_numbers random(7);
  const auto tensors = random_tensors(random, 6);
  auto stored = held_pieces(llmmem::sharding::replicated(tensors, rank_count{3}));
  auto wanted = wanted_pieces(flat_uneven::even(tensors, rank_count{4}));
  const auto plan = make_reshard(tensors, stored, wanted);
  CHECK(make_reshard(tensors, stored, wanted) == plan);
  std::reverse(stored.begin(), stored.end());
  std::reverse(wanted.begin(), wanted.end());
  const auto turned = checked_reshard(tensors, stored, wanted);
  CHECK(turned.copies.size() == plan.copies.size());
  CHECK(turned.bytes == plan.bytes);
}

TEST_CASE("invalid pieces are refused with their number, tensor and reason") {
  const auto tensors = one_tensor(tensor_shape::vector(10));
  const auto refuses = [&](const std::vector<stored_piece>& stored, const std::vector<wanted_piece>& wanted,
                           const char* text) {
    CHECK_THROWS_WITH_AS(make_reshard(tensors, stored, wanted), text, argument_error);
  };
  const stored_piece good{.elements = element_runs::all_of(10)};
  refuses({good, {.tensor = tensor_id{1}}}, {},
          "make_reshard: stored piece 1 is of tensor 1, and there are 1");
  refuses({good}, {{.tensor = tensor_id{7}}}, "make_reshard: wanted piece 0 is of tensor 7, and there are 1");
  refuses({good, good, {.elements = {0, 3, 2, 2}}}, {},
          "make_reshard: stored piece 2 of tensor 'w': elements {begin 0, run 3, stride 2, count 2}: runs "
          "overlap: the "
          "stride is less than the run");
  CHECK_THROWS_WITH_AS(
      make_reshard(tensors, std::vector{good}, std::vector{wanted_piece{.elements = {0, 11, 11, 1}}}),
      "make_reshard: wanted piece 0 of tensor 'w': elements {begin 0, run 11, stride 11, count 1}: they pass "
      "the end "
      "of the tensor, which has 10 elements",
      length_error);
  refuses({{.elements = element_runs::flat_range(0, 4)}, {.elements = element_runs::flat_range(5, 5)}},
          {want_all(3), want_all(10, 6)},
          "make_reshard: no stored piece has element 4 of tensor 'w', which rank 6 wants");
  refuses({}, {want_all(10, 2)},
          "make_reshard: no stored piece has element 0 of tensor 'w', which rank 2 wants");
}

TEST_CASE("too many sets of runs are refused before any memory is taken for them") {
  const auto tensors = one_tensor(tensor_shape::vector(std::uint64_t{1} << 60));
  const std::uint64_t many = std::uint64_t{1} << 50;
  const std::vector<stored_piece> stored{{.elements = {0, 1, 3, many}}, {.elements = {1, 1, 5, many}}};
  CHECK_THROWS_WITH_AS(make_reshard(tensors, stored, std::vector{want_all(1)}),
                       "make_reshard: the pieces of tensor 'w' have no row length in common and more than "
                       "16777216 runs; store them as "
                       "bands of one matrix, or in fewer runs",
                       length_error);
  const auto wide = one_tensor(tensor_shape::vector(max_bytes), 2);
  const std::vector<stored_piece> whole{{.elements = element_runs::all_of(max_bytes)}};
  CHECK_THROWS_AS(make_reshard(wide, whole, std::vector{want_all(max_bytes)}), length_error);
}
