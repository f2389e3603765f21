#include <llmmem/codec/block_int.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/int_groups.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include "codec/codecs.hpp"
#include "support/random.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

template <class Codec>
constexpr int qmax = 0;
template <unsigned Bits, std::uint32_t Group, dtype Scale>
constexpr int qmax<block_int<Bits, Group, Scale>> = (1 << (Bits - 1)) - 1;

constexpr float smallest = 0x1p-149F;
const std::array scales{1.0F,
                        0.1F,
                        3e-30F,
                        0x1p-126F,
                        1000 * smallest,
                        3 * smallest,
                        smallest,
                        1e30F,
                        std::numeric_limits<float>::max()};

std::vector<float> restored(const std::vector<float>& values, auto codec, const encode_position& at = {}) {
  byte_string form(codec.worst_case_bytes(4 * values.size()));
  REQUIRE(codec.encode(std::as_bytes(std::span(values)), form, at).value() == form.size());
  std::vector<float> back(values.size());
  codec.decode(form, std::as_writable_bytes(std::span(back))).value();
  return back;
}
std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

}  // namespace

#define LLMMEM_TESTS_INTS block_int<8>, block_int<4>, block_int<2>
#define LLMMEM_TESTS_ALL_INTS                                                      \
  LLMMEM_TESTS_INTS, block_int<8, 32, dtype::bf16>, block_int<4, 32, dtype::bf16>, \
      block_int<2, 32, dtype::bf16>

TEST_CASE("of all random bits, exactly the fraction of a step rounds away from zero") {
  using rounding = detail::int_rounding<8>;
  constexpr std::uint32_t draws = 1U << rounding::fraction_bits;
  for (const std::uint32_t fraction : {0U, 1U, 777U, draws / 2, draws - 1}) {
    for (const std::int32_t whole : {0, 1, 126}) {
      std::uint32_t above = 0;
      for (std::uint32_t draw = 0; draw < draws; ++draw) {
        const auto steps = static_cast<std::int32_t>(static_cast<std::uint32_t>(whole) * draws + fraction);
        const std::int32_t code = rounding::rounded(steps, draw << (32 - rounding::fraction_bits) | 0x5AU);
        REQUIRE((code == whole || code == whole + 1));
        above += code != whole ? 1U : 0U;
      }
      CHECK(above == fraction);
    }
  }
}

TEST_CASE_TEMPLATE("the mean over 2^20 draws is the value, within what chance allows", Codec,
                   LLMMEM_TESTS_INTS) {
  // A draw is a step or none, so the mean of n is within 5 sqrt(p (1 - p) / n) steps but for one in 1.7
  // million.
  const std::vector<float> values = [] {
    std::vector<float> all(256, -0.3F);
    all[0] = 1;
    return all;
  }();
  std::uint64_t count = 0;
  double sum = 0;
  const Codec codec(4 * values.size());
  for (std::uint64_t version = 0; count < std::uint64_t{1} << 20U; ++version) {
    const std::vector<float> back = restored(values, codec, {.chunk = 3, .version = version});
    REQUIRE(back[0] == 1.0F);
    for (std::size_t i = 1; i < back.size(); ++i)
      sum += back[i];
    count += back.size() - 1;
  }
  const double exact = 0.3F;
  const double step = 1.0 / qmax<Codec>;
  const double above = exact / step - std::floor(exact / step);
  const double bound = step * 5 * std::sqrt(above * (1 - above) / static_cast<double>(count)) + 0x1p-23;
  CAPTURE(bound);
  CHECK(std::abs(sum / static_cast<double>(count) + exact) < bound);
}

TEST_CASE_TEMPLATE("every value of a grid is within the bound, and is a neighbouring code's", Codec,
                   LLMMEM_TESTS_ALL_INTS) {
  const codec_error promised = Codec::error_bound;
  for (const float scale : scales) {
    CAPTURE(scale);
    std::vector<float> values;
    constexpr int grid = 2048;
    for (int at = -grid; at <= grid; ++at) {
      if (values.size() % Codec::group == 0) values.push_back(scale);
      values.push_back(scale * (static_cast<float>(at) / grid));
    }
    std::set<float> codes;
    const std::vector<float> back = restored(values, Codec(4 * values.size()), {.version = 9});
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(values[i]);
      const double error = std::abs(double{back[i]} - double{values[i]});
      REQUIRE(error <= std::max(promised.absolute, promised.group * scale));
      if (values[i] == 0) REQUIRE(bits_of(back[i]) == 0);
      codes.insert(back[i]);
    }
    if (scale == 1.0F) CHECK(codes.size() == static_cast<std::size_t>(2 * qmax<Codec> + 1));
  }
}

TEST_CASE_TEMPLATE("every code is restored as its steps, and those that no encoder writes are refused", Codec,
                   LLMMEM_TESTS_INTS) {
  constexpr std::size_t per_byte = 8 / (qmax<Codec> == 127 ? 8 : qmax<Codec> == 7 ? 4 : 2);
  constexpr std::uint32_t mask = (1U << (8 / per_byte)) - 1;
  Codec codec(4 * per_byte);
  std::vector<float> back(per_byte);
  const auto room = std::as_writable_bytes(std::span(back));
  for (const float scale : scales) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      byte_string form(5);
      std::memcpy(form.data(), &scale, 4);
      form[4] = static_cast<std::byte>(byte);
      std::uint32_t wrong = 0;
      for (std::size_t i = 0; i < per_byte; ++i)
        wrong += ((byte >> (i * 8 / per_byte)) & mask) == mask / 2 + 1 ? 1U : 0U;
      const result<void> done = codec.decode(form, room);
      if (wrong != 0) {
        REQUIRE(done.code() == errc::damaged_encoding);
        REQUIRE(done.error().found == wrong);
        continue;
      }
      REQUIRE(done.has_value());
      for (std::size_t i = 0; i < per_byte; ++i) {
        const auto code = static_cast<int>((byte >> (i * 8 / per_byte)) & mask);
        const int steps = code > qmax<Codec> ? code - static_cast<int>(mask + 1) : code;
        REQUIRE(back[i] == static_cast<float>(steps * (double{scale} / qmax<Codec>)));
      }
    }
  }
}

TEST_CASE_TEMPLATE("a value that is not finite makes its own group NaNs, and zeros stay zeros", Codec,
                   LLMMEM_TESTS_ALL_INTS) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float broken :
       {infinity, -infinity, std::bit_cast<float>(0xFFFF'FFFFU), std::bit_cast<float>(0x7F80'0001U)}) {
    std::vector<float> values(3 * Codec::group + 1, -0.0F);
    for (std::size_t i = Codec::group; i < 2 * Codec::group; ++i)
      values[i] = 1;
    values[2 * Codec::group - 1] = broken;
    values.back() = -2;
    const std::vector<float> back = restored(values, Codec(4 * values.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(i);
      const std::uint32_t group = static_cast<std::uint32_t>(i) / Codec::group;
      REQUIRE(bits_of(back[i]) == (group == 1 ? 0x7FC0'0000U : group == 3 ? bits_of(-2) : 0U));
    }
  }
}

TEST_CASE_TEMPLATE("the form depends on the position, and not on the cut into parts of whole groups", Codec,
                   LLMMEM_TESTS_ALL_INTS) {
  random_numbers random(5);
  const byte_string chunk = chunk_of(filling::bell_f32, 4 * (5 * Codec::group + 3), random);
  Codec codec(chunk.size());
  const auto form_of = [&](std::span<const std::byte> part, const encode_position& at) {
    byte_string form(Codec::worst_case_bytes(part.size()));
    form.resize(encode_at(codec, part, form, at).value());
    return form;
  };
  const byte_string all = form_of(chunk, {.chunk = 1, .version = 2});
  for (std::size_t cut = 0; cut <= 5; ++cut) {
    const std::size_t bytes = 4 * cut * Codec::group;
    byte_string both = form_of(std::span(chunk).first(bytes), {.chunk = 1, .version = 2});
    const byte_string rest =
        form_of(std::span(chunk).subspan(bytes), {.chunk = 1, .version = 2, .group = cut});
    both.insert(both.end(), rest.begin(), rest.end());
    REQUIRE(both == all);
  }
  CHECK(form_of(chunk, {}) == encoded(codec, chunk));
  std::set<std::uint32_t> sums;
  for (const encode_position& at : {encode_position{},
                                    {.chunk = 1},
                                    {.version = 1},
                                    {.group = 1},
                                    {.chunk = 1, .version = 2},
                                    {.chunk = 2, .version = 1}})
    sums.insert(crc32c(0, form_of(chunk, at)));
  CHECK(sums.size() == 6);

  identity_codec plain(chunk.size());
  byte_string same(chunk.size());
  CHECK(encode_at(plain, std::span<const std::byte>(chunk), same, {.chunk = 7}).value() == chunk.size());
  CHECK(same == chunk);
}

TEST_CASE("the forms are the same bits on every machine") {
  random_numbers random(1);
  const byte_string chunk = chunk_of(filling::bell_f32, 4 * 1000, random);
  const auto sum = [&](auto codec) {
    byte_string form(codec.worst_case_bytes(chunk.size()));
    form.resize(codec.encode(chunk, form, {.chunk = 11, .version = 12, .group = 13}).value());
    return crc32c(0, form);
  };
  CHECK(sum(block_int<8>(4000)) == 3871673895U);
  CHECK(sum(block_int<4>(4000)) == 208033487U);
  CHECK(sum(block_int<2>(4000)) == 4179933181U);
  CHECK(sum(block_int<8, 32, dtype::bf16>(4000)) == 2858698804U);
}

TEST_CASE("what it costs, and what is damaged") {
  static_assert(block_int<8>::worst_case_bytes(4 * 256) == 4 + 256);
  static_assert(block_int<2>::worst_case_bytes(4 * 257) == 4 + 64 + 4 + 1);
  static_assert(block_int<4, 32, dtype::bf16>::worst_case_bytes(4 * 64) == 2 * (2 + 16));
  static_assert(!positioned_codec<identity_codec> && !positioned_codec<bf16_cast>);
  static_assert(block_int<8>::format_id != block_int<8, 128>::format_id);
  static_assert(block_int<8>::format_id != block_int<8, 256, dtype::bf16>::format_id);
  static_assert(block_int<8>::format_id != block_int<4>::format_id);

  block_int<4> codec(4 * 3);
  std::vector<float> back(3);
  const auto refused = [&](std::uint32_t scale, std::uint8_t first, std::uint8_t second) {
    byte_string form(6);
    std::memcpy(form.data(), &scale, 4);
    form[4] = std::byte{first};
    form[5] = std::byte{second};
    return codec.decode(form, std::as_writable_bytes(std::span(back))).error().message();
  };
  const std::string where = "block_int: the encoded bytes are damaged at block 0: ";
  const std::string rest = " expected; discard the decoded bytes, and fetch the encoded ones again";
  CHECK(refused(bits_of(1), 0, 0x10) == where + "1 found, 0" + rest);  // behind the last code
  CHECK(refused(0, 0, 1) == where + "1 found, 0" + rest);
  CHECK(refused(0x7FC0'0000U, 1, 1) == where + "2 found, 0" + rest);
  CHECK(refused(bits_of(-1), 0, 0) == where + "3212836864 found, 2143289344" + rest);
  CHECK(refused(0x7F80'0000U, 0, 0) == where + "2139095040 found, 2143289344" + rest);
}

template <unsigned Bits, std::uint32_t Group, dtype Scale>
constexpr int_group_form form_of(const block_int<Bits, Group, Scale>&) {
  return {Bits, Group, Scale};
}

TEST_CASE_TEMPLATE("kernels of a grid have the codec's bytes at any address, and find what it refuses", Codec,
                   LLMMEM_TESTS_ALL_INTS, block_int<8, 8>, block_int<2, 512, dtype::bf16>) {
  const Codec codec(1U << 20U);
  const int_group_form form = form_of(codec);
  constexpr std::uint64_t untouched = ~std::uint64_t{0};
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{515}, std::size_t{1536}}) {
    CAPTURE(count);
    std::vector<std::byte> memory(4 * count + 16);
    for (const std::size_t skew : {0U, 1U, 2U, 4U}) {
      CAPTURE(skew);
      const std::span<std::byte> values = std::span(memory).subspan(skew, 4 * count);
      for (std::size_t i = 0; i < count; ++i) {
        float x = static_cast<float>(i * 7919 % 1009) / 504 - 1;
        if (i / 8 % 5 == 1) x = 0;
        if (i / Codec::group == 1) x *= 0x1p-140F;
        if (i == 600) x = std::numeric_limits<float>::quiet_NaN();
        if (i / Codec::group == 3) x = std::numeric_limits<float>::max();
        std::memcpy(values.data() + 4 * i, &x, 4);
      }
      const encode_position at{.chunk = 5, .version = skew, .group = 9};
      std::vector<std::byte> wanted(form.bytes(count));
      REQUIRE(form.bytes(count) == Codec::worst_case_bytes(4 * count));
      codec.encode(values, wanted, at).value();
      std::vector<std::byte> made(wanted.size() + 8);
      const std::span<std::byte> out = std::span(made).subspan(skew, wanted.size());
      const auto encode = [&](const auto& run) {
        std::ranges::fill(made, std::byte{0xA5});
        encode_int_groups(run, form, values, out, {.chunk = 5, .version = skew, .group = 9}).value();
        CHECK(std::ranges::equal(out, wanted));
        CHECK(made[skew + wanted.size()] == std::byte{0xA5});
      };
      encode(host_executor{});
      encode(llmmem::testing::grid_executor({.blocks = 2}));
      std::vector<std::byte> back(4 * count);
      codec.decode(wanted, back).value();
      std::vector<std::byte> came(4 * count + 8);
      std::uint64_t damaged = untouched;
      decode_int_groups(llmmem::testing::grid_executor(), form, out, std::span(came).subspan(skew, 4 * count),
                        &damaged)
          .value();
      CHECK(std::ranges::equal(std::span(came).subspan(skew, 4 * count), back));
      CHECK(damaged == untouched);
      // Any byte that the codec refuses, in the same group.
      for (std::size_t i = 0; i < out.size(); i += 1 + out.size() / 37) {
        for (const unsigned bits : {0x80U, 0xFFU, 0x01U}) {
          const std::byte kept = out[i];
          out[i] = static_cast<std::byte>(bits);
          const result<void> said = codec.decode(out, back);
          damaged = untouched;
          decode_int_groups(host_executor{}, form, out, std::span(came).first(4 * count), &damaged).value();
          CHECK((damaged == untouched) == said.has_value());
          if (!said) {
            CHECK(damaged == said.error().index);
            decode_int_groups(host_executor{}, form, out, std::span(came).first(4 * count)).value();
          } else {
            CHECK(std::ranges::equal(std::span(came).first(4 * count), back));
          }
          out[i] = kept;
        }
      }
    }
  }
}

TEST_CASE("kernels of integers in groups refuse other forms, and memory that is too short") {
  std::vector<std::byte> values(64);
  std::vector<std::byte> out(64);
  const auto told = [&](const int_group_form& form, std::size_t value_bytes = 64, std::size_t bytes = 64) {
    const result<void> done = encode_int_groups(host_executor{}, form, std::span(values).first(value_bytes),
                                                std::span(out).first(bytes));
    return done ? failure{} : done.error();
  };
  CHECK(told({}).code == errc::ok);
  CHECK(told({.bits = 3}) == failure{errc::out_of_range, 0, 3, 8, "encode_int_groups"});
  CHECK(told({.group = 0}) == failure{errc::out_of_range, 1, 0, 65536, "encode_int_groups"});
  CHECK(told({.group = 1U << 17U}).code == errc::out_of_range);
  CHECK(told({.group = 20}) == failure{errc::bad_granularity, 0, 20, 8, "encode_int_groups"});
  CHECK(told({.scale = dtype::f16}).index == 2);
  CHECK(told({}, 63) == failure{errc::bad_granularity, 0, 63, 4, "encode_int_groups"});
  CHECK(told({}, 64, 19) == failure{errc::too_short, 0, 20, 19, "encode_int_groups: out"});
  CHECK(told({}, 0, 0).code == errc::ok);
  const result<void> done = decode_int_groups(host_executor{}, {}, std::span(out).first(21), values);
  CHECK(done.error() == failure{errc::too_short, 0, 20, 21, "decode_int_groups: in"});
}
