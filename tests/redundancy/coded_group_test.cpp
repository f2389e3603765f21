#include <llmmem/redundancy/coded_group.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

using namespace llmmem;

TEST_CASE("stripes are equal units of 64 bytes and cover a state once") {
  for (std::uint32_t stripes = 1; stripes <= 9; ++stripes) {
    for (std::uint64_t bytes = 0; bytes <= 2'000; ++bytes) {
      const std::uint64_t each = stripe_bytes(bytes, stripes);
      REQUIRE(each % 64 == 0);
      REQUIRE(each * stripes >= bytes);
      REQUIRE((each == 0 || (each - 64) * stripes < bytes));  // none smaller would do
      std::uint64_t at = 0;
      for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
        const llmmem::redundancy::byte_range range = stripe_of(bytes, stripes, stripe);
        REQUIRE(range.first == at);
        REQUIRE(range.count <= each);
        at += range.count;
      }
      REQUIRE(at == bytes);
    }
  }
  CHECK(stripe_bytes((std::uint64_t{1} << 63) - 1, 1) == std::uint64_t{1} << 63);
}

TEST_CASE("every member has exactly one piece of every codeword, and every stripe is in one") {
  for (std::uint32_t k = 1; k <= 9; ++k) {
    for (std::uint32_t m = 1; m <= 9; ++m) {
      CAPTURE(k);
      CAPTURE(m);
      const coded_group group({k, m});
      REQUIRE(group.members() == k + m);
      std::set<std::pair<std::uint32_t, std::uint32_t>> stripes;
      std::vector<std::uint32_t> parities(k + m, 0);
      for (std::uint32_t codeword = 0; codeword < group.codewords(); ++codeword) {
        std::set<piece_id> pieces;
        for (std::uint32_t member = 0; member < group.members(); ++member) {
          const piece_id piece = group.piece_of(member, codeword);
          REQUIRE(to_index(piece) < k + m);
          REQUIRE(group.member_of(piece, codeword) == member);
          pieces.insert(piece);
          if (to_index(piece) >= k) {
            ++parities[member];
            continue;
          }
          const std::uint32_t stripe = group.stripe_in(member, codeword);
          REQUIRE(stripe < k);
          REQUIRE(group.codeword_of(member, stripe) == codeword);
          stripes.emplace(member, stripe);
        }
        REQUIRE(pieces.size() == k + m);
      }
      REQUIRE(stripes.size() == std::size_t{k + m} * k);
      REQUIRE(parities == std::vector<std::uint32_t>(k + m, m));  // as much for each
    }
  }
}

TEST_CASE("parity rotates as in the picture") {
  const coded_group group({3, 1});
  // Rows are codewords, columns members; -1 is the parity.
  const int picture[4][4] = {{-1, 2, 1, 0}, {0, -1, 2, 1}, {1, 0, -1, 2}, {2, 1, 0, -1}};
  for (std::uint32_t codeword = 0; codeword < 4; ++codeword) {
    for (std::uint32_t member = 0; member < 4; ++member) {
      const bool parity = group.piece_of(member, codeword) == piece_id{3};
      CHECK((parity ? -1 : static_cast<int>(group.stripe_in(member, codeword))) == picture[codeword][member]);
    }
  }
}
