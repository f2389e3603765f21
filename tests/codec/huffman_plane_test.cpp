#include <llmmem/codec/huffman_plane.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "codec/codecs.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::uint64_t bits_with(const detail::byte_counts& counts, const detail::code_lengths& lengths) {
  std::uint64_t bits = 0;
  for (std::size_t value = 0; value < 256; ++value)
    bits += std::uint64_t{counts[value]} * lengths[value];
  return bits;
}

/// The fewest bits any code of at most 11 bits takes: over all ways to give the rarest values the longest
/// codes, with the room in units of 2^-11.
std::uint64_t fewest_bits(const detail::byte_counts& counts) {
  std::vector<std::uint64_t> weights;
  for (const std::uint32_t count : counts) {
    if (count != 0) weights.push_back(count);
  }
  constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();
  constexpr std::size_t room = 2048;
  std::vector<std::uint64_t> best(room + 1, none);
  best[0] = 0;
  for (const std::uint64_t weight : weights) {
    std::vector<std::uint64_t> next(room + 1, none);
    for (std::size_t used = 0; used <= room; ++used) {
      if (best[used] == none) continue;
      for (std::uint64_t length = 1; length <= 11; ++length) {
        const std::size_t then = used + (room >> length);
        if (then <= room) next[then] = std::min(next[then], best[used] + weight * length);
      }
    }
    best = next;
  }
  return *std::min_element(best.begin(), best.end());
}

detail::byte_counts random_counts(random_numbers& random, std::size_t values) {
  detail::byte_counts counts{};
  for (std::size_t i = 0; i < values; ++i)
    counts[random.below(std::uint64_t{256})] =
        static_cast<std::uint32_t>(1 + (random.next() >> (40 + random.below(std::uint64_t{24}))));
  return counts;
}

/// A compressed plane, in a vector of exactly its size; nothing where it did not fit.
std::optional<byte_string> compressed(huffman_plane& plane, std::span<const std::byte> in, std::size_t room) {
  byte_string out(room);
  const auto length = plane.compress(in, out);
  if (!length) return std::nullopt;
  out.resize(*length);
  out.shrink_to_fit();
  return out;
}

byte_string of(std::initializer_list<int> values) {
  byte_string all;
  for (const int value : values)
    all.push_back(static_cast<std::byte>(value));
  return all;
}

}  // namespace

TEST_CASE("code lengths are optimal up to 11 bits") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::byte_counts counts = random_counts(random, 2 + seed % 40);
    counts[0] = counts[255] = 1;
    const detail::code_lengths lengths = detail::best_lengths(counts);
    REQUIRE(detail::canonical_codes(lengths));
    REQUIRE(bits_with(counts, lengths) == fewest_bits(counts));
    for (std::size_t value = 0; value < 256; ++value)
      REQUIRE((lengths[value] != 0) == (counts[value] != 0));
  }
  // Fibonacci numbers ask for the deepest tree.
  detail::byte_counts deep{};
  std::uint32_t a = 1;
  std::uint32_t b = 1;
  for (std::size_t value = 0; value < 25; ++value) {
    deep[value] = a;
    a = std::exchange(b, a + b);
  }
  CHECK(bits_with(deep, detail::best_lengths(deep)) == fewest_bits(deep));
  detail::byte_counts all{};
  all.fill(1);
  all[7] = 4'000'000'000;
  CHECK(detail::canonical_codes(detail::best_lengths(all)));
  CHECK(detail::best_lengths(all)[7] == 1);
}

TEST_CASE("no code is a prefix of another, and shorter codes come first") {
  random_numbers random(9);
  const auto codes = *detail::canonical_codes(detail::best_lengths(random_counts(random, 60)));
  for (std::size_t one = 0; one < 256; ++one) {
    for (std::size_t other = 0; other < 256; ++other) {
      if (one == other || codes[one].length == 0 || codes[other].length < codes[one].length) continue;
      REQUIRE((codes[other].bits & ((1U << codes[one].length) - 1)) != codes[one].bits);
    }
  }
  detail::code_lengths three{};
  three[5] = 2;
  three[9] = 1;
  three[200] = 2;
  const auto known = *detail::canonical_codes(three);
  CHECK(known[9].bits == 0b0);
  CHECK(known[5].bits == 0b01);  // 10, its first bit lowest
  CHECK(known[200].bits == 0b11);
}

TEST_CASE("code lengths that leave gaps, overlap, or exceed 11 bits are refused") {
  detail::code_lengths lengths{};
  CHECK_FALSE(detail::canonical_codes(lengths));
  lengths[0] = 1;
  CHECK_FALSE(detail::canonical_codes(lengths));  // one value only
  lengths[1] = 2;
  CHECK_FALSE(detail::canonical_codes(lengths));  // room left
  lengths[2] = 2;
  CHECK(detail::canonical_codes(lengths));
  lengths[3] = 11;
  CHECK_FALSE(detail::canonical_codes(lengths));  // too many
  lengths[3] = 12;
  CHECK_FALSE(detail::canonical_codes(lengths));  // too long, and it would not show in the sum
  detail::code_lengths most{};
  most.fill(8);
  CHECK(detail::canonical_codes(most));
}

TEST_CASE("counts equal those of a loop") {
  random_numbers random(10);
  for (std::size_t size = 0; size < 40; ++size) {
    const byte_string plane = chunk_of(filling::few_values, size, random);
    detail::byte_counts counts{};
    for (const std::byte byte : plane)
      ++counts[static_cast<std::size_t>(byte)];
    REQUIRE(detail::count_bytes(plane) == counts);
  }
}

TEST_CASE("planes of every length are restored to outputs that are just large enough") {
  huffman_plane plane(1 << 20);
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    for (std::size_t size = 1; size < 3000; size += 1 + size / 8) {
      CAPTURE(size);
      const byte_string in = chunk_of(filling::few_values, size, random);
      const auto form = compressed(plane, in, 4 * size + 400);
      REQUIRE(form);
      byte_string out(size);
      REQUIRE(plane.decompress(*form, out));
      REQUIRE(out == in);
      // With as much room as it says it needs at most, the same; with none to spare, less or nothing.
      if (const auto tight = compressed(plane, in, form->size() + 12)) REQUIRE(*tight == *form);
      if (form->size() > 1) REQUIRE_FALSE(compressed(plane, in, form->size() - 1));
    }
  }
}

TEST_CASE("the compressed form is as the class documents") {
  huffman_plane plane(100);
  // 3 four times, 5 twice, 6 and 9 once: codes 0, 10, 110 and 111, their first bits lowest.
  const byte_string in = of({3, 5, 3, 6, 3, 9, 3, 5});
  const auto form = compressed(plane, in, 100);
  REQUIRE(form);
  CHECK(*form == of({3,     9,      0x01,   0x32, 0x00, 0x03,                    // lengths of 3 to 9
                     1,     0,      0,      0,    1,    0,    0, 0, 1, 0, 0, 0,  // bytes of three streams
                     0b010, 0b0110, 0b1110, 0b010}));                            // two values each
  CHECK(compressed(plane, byte_string(50, std::byte{7}), 1) == of({7}));
  CHECK_FALSE(compressed(plane, byte_string(50, std::byte{7}), 0));
  CHECK_FALSE(compressed(plane, {}, 10));
}

TEST_CASE("damaged forms that no bit flip would produce are refused") {
  huffman_plane plane(100);
  const byte_string in = of({3, 5, 3, 6, 3, 9, 3, 5});
  const byte_string good = *compressed(plane, in, 100);
  byte_string out(8);
  const auto refuses = [&](const byte_string& form) { return !plane.decompress(fenced_bytes(form), out); };
  REQUIRE_FALSE(refuses(good));
  CHECK(refuses({}));
  CHECK(refuses(of({9, 3})));                                // values from the last to the first
  CHECK(refuses(of({3, 9, 1, 2})));                          // fewer lengths than values
  CHECK(refuses(of({3, 9, 0x01, 0x32, 0x00, 0x03, 1, 0})));  // no lengths of streams
  byte_string bad = good;
  bad[2] = std::byte{0x02};  // 3 as 2 bits: room left
  CHECK(refuses(bad));
  bad = good;
  bad[6] = std::byte{5};  // a stream longer than there are bytes
  CHECK(refuses(bad));
  bad[6] = std::byte{0};  // a stream of no bytes for two values
  CHECK(refuses(bad));
  bad[6] = std::byte{2};  // one with a byte too many
  CHECK(refuses(bad));
  bad = good;
  bad.push_back(std::byte{0});  // the last with one
  CHECK(refuses(bad));
  bad = good;
  bad[18] = std::byte{0b111111};  // 9 9: six bits for what was three
  CHECK_FALSE(refuses(bad));      // which is a plane, only another
  CHECK(out == of({9, 9, 3, 6, 3, 9, 3, 5}));
  // Three values of three bits each in a stream of eight bits.
  byte_string twelve(12);
  byte_string nine_bits =
      of({3, 9, 0x01, 0x32, 0x00, 0x03, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xFF, 1});
  CHECK(plane.decompress(nine_bits, twelve));
  CHECK(twelve == of({3, 3, 3, 3, 3, 3, 3, 3, 3, 9, 9, 9}));
  nine_bits.pop_back();
  CHECK_FALSE(plane.decompress(fenced_bytes(nine_bits), twelve));
  // As many values of one bit as there are bits, and one more.
  byte_string out_of_bits(4 * 9);
  bad = of({3, 9, 0x01, 0x32, 0x00, 0x03, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0});
  CHECK_FALSE(plane.decompress(bad, out_of_bits));
  byte_string in_bits(4 * 8);
  CHECK(plane.decompress(bad, in_bits));
}

TEST_CASE("a decompression of arbitrary bytes writes only the plane") {
  huffman_plane plane(1 << 16);
  constexpr std::byte untouched{0xC3};
  for (const auto seed : seeds(500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t size = 1 + random.below(std::uint64_t{600});
    byte_string form = *compressed(plane, chunk_of(filling::few_values, 600, random), 4000);
    if (form.size() > 1) {
      // Codes and lengths hold; the streams are noise of another length.
      form.erase(form.end() - static_cast<std::ptrdiff_t>(random.below(form.size() / 2)), form.end());
      for (std::size_t i = form.size() / 2; i < form.size(); ++i)
        form[i] = static_cast<std::byte>(random.next());
    }
    form.shrink_to_fit();
    byte_string out(size + 8, untouched);
    static_cast<void>(plane.decompress(fenced_bytes(form), std::span(out).first(size)));
    REQUIRE(std::all_of(out.end() - 8, out.end(), [&](std::byte byte) { return byte == untouched; }));
  }
}
