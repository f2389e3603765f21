#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/codec/from_base.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "codec/codecs.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/tiny_gpt.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::size_t block = std::size_t{1} << 18;

std::string damage(std::uint32_t at, std::uint64_t wanted, std::uint64_t found) {
  return "byte_plane: the encoded bytes are damaged at block " + std::to_string(at) + ": " +
         std::to_string(found) + " found, " + std::to_string(wanted) +
         " expected; discard the decoded bytes, and fetch the encoded ones again";
}

template <class Codec>
std::string refusal(Codec& codec, const byte_string& form, std::size_t size) {
  byte_string out(size);
  return codec.decode(form, out).error().message();
}

/// How many times smaller `chunk` is encoded; that it comes back is looked at as well.
template <class Codec>
double ratio_of(const byte_string& chunk) {
  Codec codec(chunk.size());
  const byte_string form = encoded(codec, chunk);
  REQUIRE(decoded(codec, form, chunk.size()) == chunk);
  return static_cast<double>(chunk.size()) / static_cast<double>(form.size());
}

template <class Number>
void put(byte_string& form, std::size_t at, Number value) {
  std::memcpy(form.data() + at, &value, sizeof(value));
}

byte_string as_bf16(const byte_string& floats) {
  bf16_cast cast(floats.size());
  return encoded(cast, floats);
}

/// Stores a plane as it is, but for its last byte, which it says is the first one again; and looks at the
/// room.
class watching_plane {
 public:
  static constexpr std::uint64_t format_id = 1;

  explicit watching_plane(std::uint64_t most, const metadata_source& = {}) : most_(most) {}

  [[nodiscard]] std::optional<std::uint64_t> compress(std::span<const std::byte> in,
                                                      std::span<std::byte> out) const noexcept {
    CHECK(in.size() <= most_);
    CHECK(out.size() == in.size() - 1);
    if (in.size() < 2 || in.front() != in.back()) return std::nullopt;
    std::copy(in.begin(), in.end() - 1, out.begin());
    return in.size() - 1;
  }
  [[nodiscard]] bool decompress(std::span<const std::byte> in, std::span<std::byte> out) const noexcept {
    if (in.size() + 1 != out.size()) return false;
    std::copy(in.begin(), in.end(), out.begin());
    out.back() = out.front();
    return true;
  }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  std::uint64_t most_;
};

}  // namespace

TEST_CASE(
    "a custom compressor receives planes of the size it was built for, and an output smaller than these") {
  random_numbers random(8);
  for (const std::size_t size : {std::size_t{2}, std::size_t{100}, block, block + 500}) {
    byte_plane<dtype::bf16, watching_plane> codec(size);
    for (int round = 0; round < 8; ++round) {
      const byte_string chunk = chunk_of(filling::few_values, size, random);
      CHECK(decoded(codec, encoded(codec, chunk), size) == chunk);
    }
  }
}

TEST_CASE(
    "a compressed plane longer than the plane itself counts as damage, even if it could be decompressed") {
  random_numbers random(9);
  const byte_string plane = chunk_of(filling::few_values, 8, random);
  huffman_plane compressor(8);
  byte_string compressed(100);
  compressed.resize(compressor.compress(plane, compressed).value());
  REQUIRE(compressed.size() > plane.size());
  byte_plane<dtype::bf16> codec(16);
  byte_string form = encoded(codec, {});
  put(form, 16, std::uint64_t{16});
  for (int i = 0; i < 2; ++i) {
    form.resize(form.size() + 4);
    put(form, form.size() - 4, static_cast<std::uint32_t>(compressed.size()));
    form.insert(form.end(), compressed.begin(), compressed.end());
  }
  CHECK(refusal(codec, form, 16) == damage(0, 8, compressed.size()));
}

TEST_CASE("the encoded form is as the class documents: header, then planes, the exponents' last") {
  byte_plane<dtype::bf16> codec(64);
  // 1, -1 and 1.5, whose bits are 3F80, BF80, 3FC0; rotated left by one: 7F00, 7F01, 7F80.
  byte_string chunk(6);
  put(chunk, 0, std::uint16_t{0x3F80});
  put(chunk, 2, std::uint16_t{0xBF80});
  put(chunk, 4, std::uint16_t{0x3FC0});
  byte_string expected(24 + 4 + 3 + 4 + 1);
  std::memcpy(expected.data(), "llmmemBP", 8);
  put(expected, 8, std::uint64_t{codec.format_id});
  put(expected, 16, std::uint64_t{6});
  put(expected, 24, std::uint32_t{3});  // as many as there are: stored as they are
  put(expected, 28, std::array<std::uint8_t, 3>{0x00, 0x01, 0x80});
  put(expected, 31, std::uint32_t{1});  // compressed: all the same
  put(expected, 35, std::uint8_t{0x7F});
  CHECK(encoded(codec, chunk) == expected);

  byte_plane<dtype::f32> wide(64);
  byte_string floats(4);
  put(floats, 0, std::uint32_t{0xC048'F5C3});  // rotated left by one: 8091EB87
  const byte_string form = encoded(wide, floats);
  REQUIRE(form.size() == 24 + 4 * 5);
  std::size_t at = 24;
  for (const int byte : {0x87, 0xEB, 0x91, 0x80}) {
    std::uint32_t length = 0;
    std::memcpy(&length, form.data() + at, sizeof(length));
    CHECK(length == 1);
    CHECK(form[at + 4] == static_cast<std::byte>(byte));
    at += 5;
  }
}

TEST_CASE("an empty chunk is encoded as the header alone") {
  byte_plane<dtype::f32> codec(64);
  const byte_string form = encoded(codec, {});
  CHECK(form.size() == 24);
  CHECK(decoded(codec, form, 0).empty());
}

TEST_CASE("noise is stored unchanged, with a header and four bytes per plane") {
  random_numbers random(1);
  for (const std::size_t size : {block / 2, block, 2 * block, 2 * block + 2}) {
    const byte_string noise = chunk_of(filling::noise, size, random);
    byte_plane<dtype::bf16> codec(size);
    const std::size_t blocks = (size + block - 1) / block;
    CHECK(encoded(codec, noise).size() == 24 + size + blocks * 2 * 4);
  }
}

TEST_CASE("every damage is named with its block and the numbers that disagree") {
  random_numbers random(2);
  byte_plane<dtype::bf16> codec(2 * block);
  const std::size_t size = block + 2000;
  const byte_string chunk = chunk_of(filling::bell_bf16, size, random);
  const byte_string good = encoded(codec, chunk);
  std::uint64_t magic = 0;
  std::memcpy(&magic, good.data(), sizeof(magic));

  CHECK(refusal(codec, byte_string(23), size) == damage(0, 24, 23));
  byte_string bad = good;
  bad[7] = std::byte{'Q'};
  std::uint64_t other = 0;
  std::memcpy(&other, bad.data(), sizeof(other));
  CHECK(refusal(codec, bad, size) == damage(0, magic, other));
  CHECK(refusal(codec, good, size - 2) == damage(0, size - 2, size));

  // The first block's planes of 2^17 bytes, then the second's of 1000.
  bad = good;
  put(bad, 24, std::uint32_t{block / 2 + 1});
  CHECK(refusal(codec, bad, size) == damage(0, block / 2, block / 2 + 1));
  const std::size_t exponents = 28 + block / 2;
  std::uint32_t length = 0;
  std::memcpy(&length, good.data() + exponents, sizeof(length));
  REQUIRE(length < block / 4);
  bad = good;
  put(bad, exponents, length - 1);
  CHECK(refusal(codec, bad, size) == damage(0, block / 2, length - 1));
  const std::size_t second = exponents + 4 + length;
  bad = good;
  put(bad, second, std::uint32_t{1001});
  CHECK(refusal(codec, bad, size) == damage(1, 1000, 1001));
  bad.resize(second + 3);
  CHECK(refusal(codec, bad, size) == damage(1, 4, 3));
  bad = good;
  bad.resize(second + 4 + 999);
  CHECK(refusal(codec, bad, size) == damage(1, 1000, 999));
  bad = good;
  bad.resize(good.size() + 5);
  CHECK(refusal(codec, bad, size) == damage(2, 0, 5));
}

#ifdef LLMMEM_TESTS_ZSTD
TEST_CASE("a frame of zstd cut short, or of another plane, is damage") {
  byte_plane<dtype::bf16, zstd_plane> codec(2000);
  random_numbers random(10);
  const byte_string chunk = chunk_of(filling::bell_bf16, 2000, random);
  const byte_string good = encoded(codec, chunk);
  const std::size_t exponents = 24 + 4 + 1000;
  std::uint32_t length = 0;
  std::memcpy(&length, good.data() + exponents, sizeof(length));
  byte_string bad = good;
  bad.pop_back();
  put(bad, exponents, length - 1);
  CHECK(refusal(codec, bad, 2000) == damage(0, 1000, length - 1));

  byte_plane<dtype::bf16, zstd_plane> shorter(1998);
  bad = encoded(shorter, byte_string(chunk.begin(), chunk.end() - 2));
  put(bad, 16, std::uint64_t{2000});
  put(bad, 24, std::uint32_t{1000});
  bad.insert(bad.begin() + 28, std::byte{0});
  std::memcpy(&length, bad.data() + exponents, sizeof(length));
  CHECK(refusal(codec, bad, 2000) == damage(0, 1000, length));
}
#endif

TEST_CASE("the form of another element type or compressor is refused") {
  random_numbers random(3);
  const byte_string chunk = chunk_of(filling::bell_bf16, 4000, random);
  byte_plane<dtype::bf16> codec(4000);
  byte_plane<dtype::f16> halves(4000);
  const auto theirs = std::uint64_t{byte_plane<dtype::f16>::format_id};
  const auto ours = std::uint64_t{byte_plane<dtype::bf16>::format_id};
  CHECK(refusal(codec, encoded(halves, chunk), 4000) ==
        "byte_plane: the contents' fingerprints differ, " + std::to_string(theirs) + " there, " +
            std::to_string(ours) +
            " here: different shape, element type, block size or model; nothing was copied");
}

TEST_CASE("bell-shaped weights shrink by their entropy") {
  // bf16: 8 bits of sign and mantissa, some 2.6 of exponent: 16 / 10.6. fp32: 32 / 26.6.
  random_numbers random(4);
  const byte_string floats = chunk_of(filling::bell_f32, 4'000'000, random);
  CHECK(ratio_of<byte_plane<dtype::bf16>>(as_bf16(floats)) > 1.5);
  CHECK(ratio_of<byte_plane<dtype::bf16>>(as_bf16(floats)) < 1.53);
  CHECK(ratio_of<byte_plane<dtype::f32>>(floats) > 1.195);
#ifdef LLMMEM_TESTS_ZSTD
  CHECK(ratio_of<byte_plane<dtype::bf16, zstd_plane>>(as_bf16(floats)) > 1.5);
  CHECK(ratio_of<byte_plane<dtype::f32, zstd_plane>>(floats) > 1.195);
#endif
}

TEST_CASE("a constant chunk takes a few bytes per block") {
  const byte_string zeros(4 * block);
  CHECK(ratio_of<byte_plane<dtype::bf16>>(zeros) > 1e4);
  CHECK(ratio_of<byte_plane<dtype::f32>>(zeros) > 1e4);
#ifdef LLMMEM_TESTS_ZSTD
  CHECK(ratio_of<byte_plane<dtype::bf16, zstd_plane>>(zeros) > 1e3);
#endif
}

TEST_CASE("a plane is compressed if a sample promises to save a sixth") {
  random_numbers random(6);
  const auto even_up_to = [&](std::uint64_t values, std::size_t size) {
    byte_string plane(size);
    for (std::byte& each : plane)
      each = static_cast<std::byte>(random.below(values));
    return plane;
  };
  for (const std::size_t size : {std::size_t{4096}, std::size_t{4097}, block / 2}) {
    CHECK_FALSE(detail::has_uneven_bytes(even_up_to(256, size)));
    CHECK_FALSE(detail::has_uneven_bytes(even_up_to(128, size)));
    CHECK(detail::has_uneven_bytes(even_up_to(85, size)));
  }
  CHECK_FALSE(detail::has_uneven_bytes({}));
  CHECK_FALSE(detail::has_uneven_bytes(byte_string(1)));
  CHECK(detail::has_uneven_bytes(byte_string(2)));
  // The last bytes count: a sixteenth of the sample.
  byte_string plane = even_up_to(256, 100'000);
  CHECK_FALSE(detail::has_uneven_bytes(plane));
  std::fill(plane.end() - 256, plane.end(), std::byte{1});
  std::fill(plane.begin(), plane.begin() + 256, std::byte{1});
  CHECK(detail::has_uneven_bytes(plane));
}

TEST_CASE("floats that are bfloat16 values take little more than those") {
  // Of 32 bits: 2.6 of exponent, a plane of 7-bit mantissas, one of zeros, one of signs at a bit each.
  random_numbers random(5);
  byte_string floats = chunk_of(filling::bell_f32, 1'000'000, random);
  bf16_cast cast(floats.size());
  cast.decode(as_bf16(floats), floats).value();
  CHECK(ratio_of<byte_plane<dtype::f32>>(floats) > 2.7);
}

TEST_CASE("the weights of a model that learned shrink by a third as bfloat16, and its state as fp32") {
  tiny_training<float> run({.blocks = 2, .width = 64, .heads = 4, .context = 16, .batch = 2});
  for (std::uint64_t step = 0; step < 6; ++step)
    run.trainer.step(run.text.batch(run.shape, 1, step), step);
  const auto all_of = [&](train_gpt::state_kind kind) {
    byte_string all;
    for (std::size_t layer = 0; layer < run.shape.layers(); ++layer) {
      const auto values = run.state.acquire(run.shape.layer(layer), kind, train_gpt::lease_mode::read);
      const auto part = std::as_bytes(std::span(values));
      all.insert(all.end(), part.begin(), part.end());
      run.state.release(run.shape.layer(layer), kind, train_gpt::lease_mode::read);
    }
    return all;
  };
  const byte_string weights = all_of(train_gpt::state_kind::weights);
  CHECK(ratio_of<byte_plane<dtype::bf16>>(as_bf16(weights)) > 1.45);
  CHECK(ratio_of<byte_plane<dtype::f32>>(weights) > 1.17);
  CHECK(ratio_of<byte_plane<dtype::f32>>(all_of(train_gpt::state_kind::mean)) > 1.15);
  CHECK(ratio_of<byte_plane<dtype::f32>>(all_of(train_gpt::state_kind::variance)) > 1.15);
}

TEST_CASE(
    "a chunk comes back from its difference to a base, in fewer bytes if few bits differ, and from no other "
    "base") {
  using coder_type = from_base<byte_plane<dtype::bf16>>;
  random_numbers random(11);
  std::vector<std::byte> base(20'000);
  for (std::byte& each : base)
    each = static_cast<std::byte>(random.below(std::uint32_t{256}));
  std::vector<std::byte> chunk = base;
  for (std::size_t i = 0; i < chunk.size(); i += 2)
    chunk[i] ^= static_cast<std::byte>(random.below(std::uint32_t{4}));
  coder_type coder(chunk.size());
  std::vector<std::byte> form(coder_type::worst_case_bytes(chunk.size()));
  const std::uint64_t length = coder.encode(chunk, base, form).value();
  CHECK(length < chunk.size() / 4);  // noise that changes in two bits of sixteen
  byte_plane<dtype::bf16> alone(chunk.size());
  std::vector<std::byte> whole(byte_plane<dtype::bf16>::worst_case_bytes(chunk.size()));
  CHECK(alone.encode(chunk, whole).value() >= chunk.size());
  const std::span<const std::byte> stored = std::span<const std::byte>(form).first(length);
  std::vector<std::byte> back(chunk.size());
  coder.decode(stored, base, back).value();
  CHECK(back == chunk);
  std::vector<std::byte> other = base;
  other[777] ^= std::byte{1};
  CHECK(coder.decode(stored, other, back).error().code == errc::base_differs);
  CHECK(coder.decode(stored.first(3), base, back).error().code == errc::damaged_encoding);
  CHECK(coder.decode(stored.first(100), base, back).error().code == errc::damaged_encoding);
  std::vector<std::byte> in_place = base;  // a refusal leaves it, and success makes it the chunk
  CHECK(coder.decode(stored.first(100), in_place, in_place).error().code == errc::damaged_encoding);
  CHECK(in_place == base);
  coder.decode(stored, in_place, in_place).value();
  CHECK(in_place == chunk);
  CHECK(coder.encode(chunk, std::span(base).first(100), form).error().code == errc::too_short);
  CHECK(coder.encode(std::span(chunk).first(100), base, form).error().code == errc::out_of_range);
  CHECK(coder.encode(chunk, base, std::span(form).first(100)).error().code == errc::too_short);
  // A moved-from coder has no memory, and says so.
  coder_type moved = std::move(coder);
  CHECK(coder.max_chunk_bytes() == 0);
  CHECK(coder.encode(chunk, base, form).error().code == errc::out_of_range);
  CHECK(coder.decode(stored, base, back).error().code == errc::out_of_range);
  moved.decode(stored, base, back).value();
  CHECK(back == chunk);
}
