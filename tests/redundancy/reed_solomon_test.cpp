#include <llmmem/redundancy/reed_solomon.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#ifdef LLMMEM_TESTS_ISAL
#include <llmmem/redundancy/isal_reed_solomon.hpp>
#endif

#include "redundancy/pieces.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using pieces = std::vector<byte_vector>;

/// The definition: sums of products, byte by byte.
pieces naive_parity(const code_shape& shape, const pieces& data, std::size_t length) {
  pieces parity(shape.parity, byte_vector(length));
  for (std::uint32_t p = 0; p < shape.parity; ++p) {
    for (std::uint32_t d = 0; d < shape.data; ++d) {
      const std::uint8_t c = code_coefficient(shape, piece_id{shape.data + p}, piece_id{d});
      for (std::size_t i = 0; i < data[d].size(); ++i)
        parity[p][i] ^= std::byte{gf256_multiply(c, static_cast<std::uint8_t>(data[d][i]))};
    }
  }
  return parity;
}

pieces random_pieces(std::mt19937_64& random, std::uint32_t count, std::size_t longest) {
  pieces data(count);
  for (byte_vector& piece : data)
    piece = random_bytes(random, random() % 4 == 0 ? random() % (longest + 1) : longest);
  return data;
}

struct code_case {
  const char* name;
  std::optional<simd_path> path;  // none: ISA-L
};

std::vector<code_case> engines_here() {
  std::vector<code_case> cases;
  for (const simd_path path : paths_here())
    cases.push_back({to_text(path), path});
#ifdef LLMMEM_TESTS_ISAL
  cases.push_back({"isal", std::nullopt});
#endif
  return cases;
}

/// Calls `use` with the code by that engine.
template <class Use>
void with_code(const code_case& engine, const code_shape& shape, Use&& use) {
  if (engine.path) {
    use(reed_solomon<>(shape, portable_gf_engine(*engine.path)));
  } else {
#ifdef LLMMEM_TESTS_ISAL
    use(reed_solomon<isal_gf_engine>(shape));
#endif
  }
}

/// Encodes, and then loses every set of up to m pieces in turn.
template <class Code>
void check_all_losses(const Code& code, const pieces& data, std::size_t length, std::mt19937_64& random) {
  const code_shape& shape = code.shape();
  pieces parity(shape.parity, byte_vector(length, std::byte{0xEE}));
  auto parity_spans = spans_of<std::byte>(parity);
  REQUIRE(code.encode(spans_of<const std::byte>(data), parity_spans).has_value());
  REQUIRE(parity == naive_parity(shape, data, length));

  pieces all = data;
  all.insert(all.end(), parity.begin(), parity.end());
  for (std::uint32_t bits = 0; bits < 1U << shape.pieces(); ++bits) {
    std::vector<piece_id> lost;
    for (std::uint32_t i = 0; i < shape.pieces(); ++i) {
      if ((bits >> i & 1U) != 0) lost.push_back(piece_id{i});
    }
    if (lost.size() > shape.parity) continue;
    const rebuild_plan plan = plan_rebuild(shape, lost);
    std::vector<std::span<const std::byte>> sources;
    for (const piece_id source : plan.sources)
      sources.emplace_back(all[to_index(source)]);
    std::vector<guarded_piece> back;
    for (const piece_id target : plan.targets)
      back.emplace_back(byte_vector(all[to_index(target)].size(), std::byte{0x77}), random() % 64);
    std::vector<std::span<std::byte>> targets;
    for (guarded_piece& each : back)
      targets.push_back(each.bytes());
    REQUIRE(code.rebuild(plan, sources, targets).has_value());
    for (std::size_t t = 0; t < back.size(); ++t) {
      REQUIRE(back[t].contents() == all[to_index(plan.targets[t])]);
      REQUIRE(back[t].guards_stand());
    }
  }
}

}  // namespace

TEST_CASE("every loss of up to m pieces of every code of up to 8 is restored exactly") {
  for (const code_case& engine : engines_here()) {
    CAPTURE(engine.name);
    std::mt19937_64 random(1);
    for (std::uint32_t k = 1; k <= 7; ++k) {
      for (std::uint32_t m = 1; k + m <= 8; ++m) {
        CAPTURE(k);
        CAPTURE(m);
        const std::size_t length = 1 + random() % 150;
        const pieces data = random_pieces(random, k, length);
        with_code(engine, {k, m}, [&](const auto& code) { check_all_losses(code, data, length, random); });
      }
    }
  }
}

TEST_CASE("pieces of every length from 0 to 200 are encoded and rebuilt") {
  for (const code_case& engine : engines_here()) {
    CAPTURE(engine.name);
    std::mt19937_64 random(2);
    for (std::size_t length = 0; length <= 200; ++length) {
      CAPTURE(length);
      const pieces data = random_pieces(random, 3, length);
      with_code(engine, {3, 2}, [&](const auto& code) { check_all_losses(code, data, length, random); });
    }
    for (const std::size_t length : {2047U, 2048U, 2049U, 5000U}) {
      CAPTURE(length);
      const pieces data = random_pieces(random, 2, length);
      with_code(engine, {2, 2}, [&](const auto& code) { check_all_losses(code, data, length, random); });
    }
  }
}

TEST_CASE("codes with many pieces of parity are encoded completely") {
  for (const code_case& engine : engines_here()) {
    CAPTURE(engine.name);
    std::mt19937_64 random(3);
    for (const code_shape shape :
         {code_shape{10, 9}, code_shape{17, 13}, code_shape{200, 56}, code_shape{1, 255}}) {
      const pieces data = random_pieces(random, shape.data, 333);
      pieces parity(shape.parity, byte_vector(340));
      with_code(engine, shape, [&](const auto& code) {
        REQUIRE(code.encode(spans_of<const std::byte>(data), spans_of<std::byte>(parity)).has_value());
        REQUIRE_FALSE(
            code.verify(spans_of<const std::byte>(data), spans_of<const std::byte>(parity)).value());
      });
      REQUIRE(parity == naive_parity(shape, data, 340));
    }
  }
}

TEST_CASE("an update by the changed piece equals a new encoding") {
  for (const code_case& engine : engines_here()) {
    CAPTURE(engine.name);
    for (const auto seed : seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const code_shape shape{1 + static_cast<std::uint32_t>(random() % 6),
                             1 + static_cast<std::uint32_t>(random() % 6)};
      const std::size_t length = seed % 5 == 0 ? 5'000 : 1 + random() % 400;
      pieces data = random_pieces(random, shape.data, length);
      pieces parity = naive_parity(shape, data, length);
      with_code(engine, shape, [&](const auto& code) {
        for (int change = 0; change < 4; ++change) {
          const auto changed = static_cast<std::uint32_t>(random() % shape.data);
          const byte_vector after = random_bytes(random, random() % (length + 1));
          REQUIRE(
              code.update(piece_id{changed}, data[changed], after, spans_of<std::byte>(parity)).has_value());
          data[changed] = after;
          REQUIRE(parity == naive_parity(shape, data, length));
        }
      });
    }
  }
}

TEST_CASE("verify names the first parity piece that differs in a byte") {
  for (const code_case& engine : engines_here()) {
    CAPTURE(engine.name);
    std::mt19937_64 random(4);
    const code_shape shape{3, 3};
    const std::size_t length = 9'001;
    const pieces data = random_pieces(random, 3, length);
    pieces parity = naive_parity(shape, data, length);
    parity[2].resize(length + 5);  // zeros behind are right
    with_code(engine, shape, [&](const auto& code) {
      const auto found = [&] {
        return code.verify(spans_of<const std::byte>(data), spans_of<const std::byte>(parity)).value();
      };
      CHECK_FALSE(found());
      for (std::uint32_t p = 0; p < 3; ++p) {
        for (const std::size_t at : {std::size_t{0}, std::size_t{4'000}, parity[p].size() - 1}) {
          parity[p][at] ^= std::byte{1};
          CHECK(found() == piece_id{3 + p});
          parity[p][at] ^= std::byte{1};
        }
      }
      parity[1][8'999] ^= std::byte{1};
      parity[2][0] ^= std::byte{1};
      CHECK(found() == piece_id{4});  // the first by number, not by place
      parity[0][0] ^= std::byte{1};
      CHECK(found() == piece_id{3});
      parity[0][0] ^= std::byte{1};
      parity[1][8'999] ^= std::byte{1};
      parity[2][0] ^= std::byte{1};
    });
  }
}

TEST_CASE("spans of another code are refused, and nothing is written") {
  const reed_solomon<> code({2, 2});
  const pieces data{byte_vector(8, std::byte{1}), byte_vector(9, std::byte{2})};
  pieces parity{byte_vector(9, std::byte{3}), byte_vector(8, std::byte{4})};
  const pieces was = parity;
  const auto data_spans = spans_of<const std::byte>(data);
  const auto parity_spans = spans_of<std::byte>(parity);

  const result<void> shorter = code.encode(data_spans, parity_spans);
  CHECK(shorter.error().message() ==
        "reed_solomon::encode: bytes up to 9 requested, but it has 8; request fewer, or make it larger");
  CHECK(shorter.error().index == 1);
  CHECK(code.encode(std::span(data_spans).first(1), parity_spans).error().message() ==
        "reed_solomon::encode: two lengths must be equal, but are 2 and 1");
  CHECK(code.encode(data_spans, std::span(parity_spans).first(1)).error().message() ==
        "reed_solomon::encode: two lengths must be equal, but are 2 and 1");
  CHECK(code.update(piece_id{2}, data[0], data[1], parity_spans).error().message() ==
        "reed_solomon::update: 2 requested, but the highest allowed is 1");
  CHECK(code.update(piece_id{0}, data[0], data[1], parity_spans).error().message() ==
        "reed_solomon::update: bytes up to 9 requested, but it has 8; request fewer, or make it larger");
  CHECK(code.update(piece_id{0}, data[0], data[0], std::span(parity_spans).first(1)).error().message() ==
        "reed_solomon::update: two lengths must be equal, but are 2 and 1");
  CHECK(code.verify(std::span(data_spans).first(1), spans_of<const std::byte>(parity)).code() ==
        errc::size_mismatch);

  const rebuild_plan plan = plan_rebuild({2, 2}, std::vector{piece_id{0}});
  CHECK(code.rebuild(plan, std::span(data_spans).first(1), std::span(parity_spans).first(1))
            .error()
            .message() == "reed_solomon::rebuild: two lengths must be equal, but are 2 and 1");
  CHECK(code.rebuild(plan, data_spans, parity_spans).error().message() ==
        "reed_solomon::rebuild: two lengths must be equal, but are 1 and 2");
  CHECK(code.rebuild(plan_rebuild({3, 2}, std::vector{piece_id{0}}), data_spans, parity_spans)
            .error()
            .message() == "reed_solomon::rebuild: two lengths must be equal, but are 2 and 3");
  rebuild_plan cut = plan;
  cut.coefficients.pop_back();
  CHECK(code.rebuild(cut, data_spans, std::span(parity_spans).first(1)).error().message() ==
        "reed_solomon::rebuild: two lengths must be equal, but are 2 and 1");
  CHECK(parity == was);

  CHECK_THROWS_WITH_AS(reed_solomon<>({200, 57}),
                       "reed_solomon: a code of 200+57; use at most 256 pieces of data and parity together",
                       argument_error);
}

#ifdef LLMMEM_TESTS_ISAL
TEST_CASE("the code's matrix is the one ISA-L generates") {
  for (const code_shape shape :
       {code_shape{1, 1}, code_shape{4, 2}, code_shape{10, 4}, code_shape{200, 56}}) {
    std::vector<unsigned char> theirs(std::size_t{shape.pieces()} * shape.data);
    gf_gen_cauchy1_matrix(theirs.data(), static_cast<int>(shape.pieces()), static_cast<int>(shape.data));
    for (std::uint32_t piece = 0; piece < shape.pieces(); ++piece) {
      for (std::uint32_t d = 0; d < shape.data; ++d)
        REQUIRE(code_coefficient(shape, piece_id{piece}, piece_id{d}) == theirs[piece * shape.data + d]);
    }
  }
}
#endif
