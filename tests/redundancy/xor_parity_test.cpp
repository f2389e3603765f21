#include <llmmem/redundancy/xor_parity.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "redundancy/pieces.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using const_spans = std::vector<std::span<const std::byte>>;

/// The definition: byte by byte, and nothing where a piece has ended.
byte_vector naive_xor(const std::vector<byte_vector>& pieces, std::size_t count) {
  byte_vector sum(count);
  for (const byte_vector& piece : pieces) {
    for (std::size_t i = 0; i < piece.size() && i < count; ++i)
      sum[i] ^= piece[i];
  }
  return sum;
}

}  // namespace

TEST_CASE("xor_into adds byte by byte at every length and alignment, by every path") {
  std::mt19937_64 random(1);
  for (const simd_path path : paths_here()) {
    CAPTURE(to_text(path));
    for (std::size_t length = 0; length <= 200; ++length) {
      CAPTURE(length);
      const std::size_t longer = length + random() % 5;
      const byte_vector was = random_bytes(random, longer);
      const byte_vector source = random_bytes(random, length);
      guarded_piece destination(was, random() % 64);
      guarded_piece from(source, random() % 64);
      REQUIRE(xor_into(destination.bytes(), from.bytes(), path).has_value());
      REQUIRE(destination.contents() == naive_xor({was, source}, longer));
      REQUIRE(from.contents() == source);
      REQUIRE(destination.guards_stand());
    }
    for (const std::size_t length : {255U, 256U, 257U, 511U, 512U, 1023U, 4099U}) {
      const byte_vector was = random_bytes(random, length);
      const byte_vector source = random_bytes(random, length);
      guarded_piece destination(was, 1);
      REQUIRE(xor_into(destination.bytes(), source, path).has_value());
      REQUIRE(destination.contents() == naive_xor({was, source}, length));
      REQUIRE(destination.guards_stand());
    }
  }
}

TEST_CASE("xor_all is the sum of any number of pieces of any lengths, by every path") {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::size_t longest = seed % 10 == 0 ? 20'000 + random() % 5'000 : random() % 700;
    std::vector<byte_vector> pieces(random() % 13);
    std::vector<guarded_piece> guarded;
    for (byte_vector& piece : pieces) {
      piece = random_bytes(random, random() % 3 == 0 ? random() % (longest + 1) : longest);
      guarded.emplace_back(piece, random() % 64);
    }
    const_spans sources;
    for (guarded_piece& piece : guarded)
      sources.emplace_back(piece.bytes());
    for (const simd_path path : paths_here()) {
      CAPTURE(to_text(path));
      guarded_piece destination(random_bytes(random, longest), random() % 64);
      REQUIRE(xor_all(destination.bytes(), sources, path).has_value());
      REQUIRE(destination.contents() == naive_xor(pieces, longest));
      REQUIRE(destination.guards_stand());
    }
  }
}

TEST_CASE("a source may be the destination") {
  std::mt19937_64 random(2);
  for (const simd_path path : paths_here()) {
    CAPTURE(to_text(path));
    const byte_vector bytes = random_bytes(random, 777);
    byte_vector same = bytes;
    REQUIRE(xor_into(same, same, path).has_value());
    CHECK(same == byte_vector(777));

    std::vector<byte_vector> pieces;
    for (int i = 0; i < 8; ++i)
      pieces.push_back(random_bytes(random, 777));
    byte_vector sum = pieces[0];
    const_spans sources{sum};
    for (std::size_t i = 1; i < pieces.size(); ++i)
      sources.emplace_back(pieces[i]);
    REQUIRE(xor_all(sum, sources, path).has_value());
    CHECK(sum == naive_xor(pieces, 777));
  }
}

TEST_CASE("an updated parity equals the parity of the present pieces") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::size_t longest = 1 + random() % 600;
    std::vector<byte_vector> pieces(1 + random() % 6);
    for (byte_vector& piece : pieces)
      piece = random_bytes(random, random() % (longest + 1));
    for (const simd_path path : paths_here()) {
      CAPTURE(to_text(path));
      guarded_piece parity(naive_xor(pieces, longest), random() % 64);
      for (int change = 0; change < 5; ++change) {
        byte_vector& piece = pieces[random() % pieces.size()];
        const byte_vector after = random_bytes(random, random() % (longest + 1));  // often of another length
        REQUIRE(update_parity(parity.bytes(), piece, after, path).has_value());
        piece = after;
        REQUIRE(parity.contents() == naive_xor(pieces, longest));
        REQUIRE(parity.guards_stand());
      }
    }
  }
}

TEST_CASE("any one piece is restored from the parity and the others") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::size_t longest = seed % 10 == 0 ? 20'000 + random() % 5'000 : 1 + random() % 400;
    std::vector<byte_vector> pieces(1 + random() % 12);
    for (byte_vector& piece : pieces)
      piece = random_bytes(random, random() % (longest + 1));
    const byte_vector parity = naive_xor(pieces, longest);
    for (const simd_path path : paths_here()) {
      CAPTURE(to_text(path));
      for (std::size_t lost = 0; lost < pieces.size(); ++lost) {
        const_spans others;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
          if (i != lost) others.emplace_back(pieces[i]);
        }
        guarded_piece back(byte_vector(pieces[lost].size()), random() % 64);
        REQUIRE(rebuild_lost(back.bytes(), parity, others, path).has_value());
        REQUIRE(back.contents() == pieces[lost]);
        REQUIRE(back.guards_stand());
      }
    }
  }
}

TEST_CASE("a piece longer than its parity is refused, and nothing is written") {
  const byte_vector was(10, std::byte{7});
  byte_vector destination = was;
  const byte_vector longer(11, std::byte{1});
  CHECK(xor_into(destination, longer).error().message() ==
        "xor_into: bytes up to 11 requested, but it has 10; request fewer, or make it larger");
  const const_spans sources{was, longer};
  const result<void> all = xor_all(destination, sources);
  CHECK(all.error().message() ==
        "xor_all: bytes up to 11 requested, but it has 10; request fewer, or make it larger");
  CHECK(all.error().index == 1);
  CHECK(update_parity(destination, was, longer).error().message() ==
        "update_parity: bytes up to 11 requested, but it has 10; request fewer, or make it larger");
  CHECK(update_parity(destination, longer, was).code() == errc::past_the_bytes);
  CHECK(destination == was);
  byte_vector lost(12, std::byte{9});
  CHECK(rebuild_lost(lost, longer, {}).error().message() ==
        "rebuild_lost: bytes up to 12 requested, but it has 11; request fewer, or make it larger");
  CHECK(lost == byte_vector(12, std::byte{9}));
}

TEST_CASE("the best path is available on the machine, and a missing one is refused by name") {
  CHECK(has_simd_path(best_simd_path()));
  CHECK(has_simd_path(simd_path::portable));
  for (const simd_path path : simd_paths) {
    CAPTURE(to_text(path));
    if (has_simd_path(path)) {
      CHECK(checked_simd_path(path) == path);
    } else {
      CHECK_THROWS_WITH_AS(checked_simd_path(path),
                           (std::string("simd_path: this processor has no ") + to_text(path) +
                            "; use best_simd_path(), here " + to_text(best_simd_path()))
                               .c_str(),
                           argument_error);
    }
  }
}
