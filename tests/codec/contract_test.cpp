#include <llmmem/codec/concepts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "codec/codecs.hpp"
#include "support/counting_metadata.hpp"
#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

// What byte planes encode at a time.
constexpr std::size_t block = std::size_t{1} << 18;

/// Sizes where something begins or ends, in elements of `of` bytes.
std::vector<std::size_t> edges(std::size_t of) {
  std::vector<std::size_t> all{0, of, 2 * of, 3 * of, 4 * of, 5 * of, 63 * of, 64 * of, 65 * of, 1000 * of};
  for (const std::size_t whole : {block, 2 * block}) {
    all.push_back(whole - of);
    all.push_back(whole);
    all.push_back(whole + of);
  }
  return all;
}

template <class... Codecs>
std::set<std::uint64_t> format_ids() {
  return {Codecs::format_id...};
}
template <class... Codecs>
constexpr std::size_t count_of = sizeof...(Codecs);

std::string text_of(const failure& why) {
  return why.message();
}

}  // namespace

TEST_CASE_TEMPLATE("a codec decodes what was encoded, or a value within its bound", Codec,
                   LLMMEM_TESTS_CODECS) {
  for (const auto seed : seeds(3)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::size_t> sizes = edges(Codec::element_bytes);
    for (int i = 0; i < 20; ++i)
      sizes.push_back(random.below(std::uint64_t{5000}) * Codec::element_bytes);
    Codec codec(3 * block);
    for (const std::size_t size : sizes) {
      for (const filling how : fillings) {
        if (size > block && random.once_in(2)) continue;  // for time
        CAPTURE(size);
        CAPTURE(static_cast<int>(how));
        const byte_string chunk = chunk_of(how, size, random);
        const byte_string form = encoded(codec, chunk);
        REQUIRE(form.size() <= Codec::worst_case_bytes(size));
        const byte_string back = decoded(codec, form, size);
        if constexpr (Codec::is_lossless) {
          REQUIRE(back == chunk);
        } else {
          // What was lossy once is exact from then on.
          REQUIRE(encoded(codec, back) == form);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("encode and decode access nothing outside their spans, at any alignment", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(7);
  constexpr std::byte untouched{0xA5};
  Codec codec(1 << 16);
  for (std::size_t shift = 0; shift < 9; ++shift) {
    for (const filling how : fillings) {
      const std::size_t size = (1000 + shift) * Codec::element_bytes;
      const std::size_t most = Codec::worst_case_bytes(size);
      byte_string source(shift);
      const byte_string chunk = chunk_of(how, size, random);
      source.insert(source.end(), chunk.begin(), chunk.end());
      const byte_string source_before = source;
      byte_string form(shift + most + 16, untouched);
      const std::uint64_t length =
          codec.encode(std::span(source).subspan(shift), std::span(form).subspan(shift, most)).value();
      byte_string back(shift + size + 16, untouched);
      codec.decode(std::span(form).subspan(shift, length), std::span(back).subspan(shift, size)).value();
      REQUIRE(source == source_before);
      const auto is_untouched = [&](std::byte byte) { return byte == untouched; };
      REQUIRE(std::all_of(form.begin(), form.begin() + static_cast<std::ptrdiff_t>(shift), is_untouched));
      REQUIRE(std::all_of(form.end() - 16, form.end(), is_untouched));
      REQUIRE(std::all_of(back.begin(), back.begin() + static_cast<std::ptrdiff_t>(shift), is_untouched));
      REQUIRE(std::all_of(back.end() - 16, back.end(), is_untouched));
    }
  }
}

TEST_CASE_TEMPLATE("an encoded form cut short anywhere, or made longer, is refused", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(3);
  Codec codec(1 << 16);
  for (const filling how : fillings) {
    CAPTURE(static_cast<int>(how));
    const std::size_t size = 400 * Codec::element_bytes;
    byte_string form = encoded(codec, chunk_of(how, size, random));
    byte_string out(size);
    for (std::size_t length = 0; length < form.size(); ++length) {
      CAPTURE(length);
      const fenced_bytes part(std::span<const std::byte>(form).first(length));
      REQUIRE(codec.decode(part, out).code() == errc::damaged_encoding);
    }
    form.push_back(std::byte{0});
    REQUIRE(codec.decode(form, out).code() == errc::damaged_encoding);
  }
}

TEST_CASE_TEMPLATE("a form with any wrong bit is refused, or decoded to the requested number of bytes", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(5);
  constexpr std::byte untouched{0x5A};
  Codec codec(1 << 16);
  for (const filling how : {filling::bell_bf16, filling::few_values, filling::zeros}) {
    CAPTURE(static_cast<int>(how));
    const std::size_t size = 300 * Codec::element_bytes;
    const byte_string chunk = chunk_of(how, size, random);
    byte_string form = encoded(codec, chunk);
    for (std::size_t bit = 0; bit < 8 * form.size(); ++bit) {
      CAPTURE(bit);
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      form[bit / 8] ^= mask;
      byte_string out(size + 1, untouched);
      const error_code code = codec.decode(fenced_bytes(form), std::span(out).first(size)).code();
      REQUIRE((code == errc::ok || code == errc::damaged_encoding || code == errc::layout_mismatch));
      REQUIRE(out.back() == untouched);
      form[bit / 8] ^= mask;
    }
    if constexpr (Codec::is_lossless) REQUIRE(decoded(codec, form, size) == chunk);
  }
}

TEST_CASE_TEMPLATE("arbitrary bytes are harmless", Codec, LLMMEM_TESTS_CODECS) {
  for (const auto seed : seeds_within(200, 40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    Codec codec(1 << 16);
    const std::size_t size = random.below(std::uint64_t{2000}) * Codec::element_bytes;
    // A true beginning, so that what lies behind it is reached.
    byte_string form = encoded(codec, chunk_of(fillings[seed % fillings.size()], size, random));
    for (std::size_t i = random.below(form.size() + 1); i < form.size(); ++i)
      form[i] = static_cast<std::byte>(random.next());
    byte_string out(size);
    const auto done = codec.decode(fenced_bytes(form), out);
    REQUIRE((done || done.code() == errc::damaged_encoding || done.code() == errc::layout_mismatch));
  }
}

TEST_CASE_TEMPLATE("no form is longer than the codec's bound, which grows with the chunk", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(11);
  Codec codec(2 * block);
  std::uint64_t before = 0;
  for (std::uint64_t size = 0; size < 4 * block; size += 1 + size / 10) {
    REQUIRE(Codec::worst_case_bytes(size) >= before);
    before = Codec::worst_case_bytes(size);
  }
  REQUIRE(Codec::worst_case_bytes(max_bytes) >= before);
  const byte_string noise = chunk_of(filling::noise, block + 4, random);
  CHECK(encoded(codec, noise).size() == Codec::worst_case_bytes(noise.size()));
}

TEST_CASE_TEMPLATE("a codec allocates only in its constructor, and reports how much", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(13);
  const byte_string chunk = chunk_of(filling::bell_f32, 70'000 * Codec::element_bytes, random);
  byte_string form(Codec::worst_case_bytes(chunk.size()));
  byte_string back(chunk.size());
  counting_metadata counting;
  {
    const std::uint64_t heap_before = heap_allocations();
    Codec codec(chunk.size(), counting.source());
    CHECK(heap_allocations() - heap_before == counting.allocations());
    CHECK(codec.metadata_bytes() == counting.live_bytes());
    CHECK(codec.max_chunk_bytes() == chunk.size());
    const std::uint64_t heap = heap_allocations();
    for (std::size_t size : {chunk.size(), Codec::element_bytes * 100, chunk.size()}) {
      const std::uint64_t length = codec.encode(std::span(chunk).first(size), form).value();
      codec.decode(std::span(form).first(length), std::span(back).first(size)).value();
    }
    CHECK(heap_allocations() == heap);
  }
  CHECK(counting.live_bytes() == 0);
  CHECK(fail_each_allocation([](const metadata_source& source) { Codec(1 << 20, source); }) ==
        static_cast<std::int64_t>(counting.allocations()));
}

TEST_CASE_TEMPLATE("a moved codec works, and any object decodes another's forms", Codec,
                   LLMMEM_TESTS_CODECS) {
  random_numbers random(17);
  const byte_string chunk = chunk_of(filling::bell_bf16, 5000 * Codec::element_bytes, random);
  Codec first(chunk.size());
  const byte_string form = encoded(first, chunk);
  const byte_string back = decoded(first, form, chunk.size());
  Codec moved(std::move(first));
  CHECK(encoded(moved, chunk) == form);
  CHECK(decoded(moved, form, chunk.size()) == back);
  Codec assigned(64);
  assigned = std::move(moved);
  CHECK(assigned.max_chunk_bytes() == chunk.size());
  CHECK(encoded(assigned, chunk) == form);
  Codec larger(10 * chunk.size());
  CHECK(encoded(larger, chunk) == form);
  CHECK(decoded(larger, form, chunk.size()) == back);
}

TEST_CASE_TEMPLATE(
    "a codec refuses chunks of the wrong size, and outputs that are too small, with the numbers", Codec,
    LLMMEM_TESTS_CODECS) {
  const std::string who = Codec::name;
  constexpr std::uint64_t size = 64;
  Codec codec(size);
  const byte_string chunk(size + Codec::element_bytes);
  byte_string room(4096);
  const std::string above =
      who + ": " + std::to_string(chunk.size()) + " requested, but the highest allowed is 64";
  CHECK(text_of(codec.encode(chunk, room).error()) == above);
  CHECK(text_of(codec.decode(room, std::span(room).first(chunk.size())).error()) == above);
  if (Codec::element_bytes > 1) {
    const std::string odd = who + ": 61 bytes is not a multiple of the granularity, " +
                            std::to_string(Codec::element_bytes) + " bytes";
    CHECK(text_of(codec.encode(std::span(chunk).first(61), room).error()) == odd);
    CHECK(text_of(codec.decode(room, std::span(room).first(61)).error()) == odd);
  }
  const std::uint64_t most = Codec::worst_case_bytes(size);
  CHECK(text_of(codec.encode(std::span(chunk).first(size), std::span(room).first(most - 1)).error()) ==
        who + ": " + std::to_string(most) + " entries needed, but " + std::to_string(most - 1) +
            " given; make it longer");
  CHECK(codec.encode(std::span(chunk).first(size), std::span(room).first(most)));
}

TEST_CASE_TEMPLATE("a codec for chunks of 0 bytes, or of too many, is refused", Codec, LLMMEM_TESTS_CODECS) {
  const std::string who = Codec::name;
  const std::string none = who + ": max_chunk_bytes is 0; it must be at least 1";
  CHECK_THROWS_WITH_AS(Codec(0), none.c_str(), length_error);
  const std::string many = who + ": max_chunk_bytes 9223372036854775808 exceeds 2^63 - 1 bytes";
  CHECK_THROWS_WITH_AS(Codec(max_bytes + 1), many.c_str(), length_error);
}

TEST_CASE("no two codecs share a format") {
  CHECK(format_ids<LLMMEM_TESTS_CODECS>().size() == count_of<LLMMEM_TESTS_CODECS>);
}
