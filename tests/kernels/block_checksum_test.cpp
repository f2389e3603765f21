#include <llmmem/hash/crc32c.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "support/cache_world.hpp"
#include "support/comm_job.hpp"
#include "support/guarded_bytes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// The oracle of CRC-32C: bit by bit, as RFC 3720 has it.
std::uint32_t crc_of(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xFFFF'FFFF;
  for (const std::byte each : bytes) {
    crc ^= static_cast<std::uint32_t>(each);
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc & 1U) != 0 ? (crc >> 1) ^ 0x82F6'3B78U : crc >> 1;
  }
  return ~crc;
}

/// The oracle of digests: its definition in the documentation, as it stands.
std::uint64_t digest_of(std::span<const std::byte> bytes) {
  const auto q = [](std::uint64_t x) {
    x &= 0xFFFF'FFFF;
    return (x * x >> 32) ^ (x * x & 0xFFFF'FFFF);
  };
  const auto f = [&](std::uint64_t word, std::uint64_t key) {
    std::uint64_t low = word & 0xFFFF'FFFF;
    std::uint64_t high = word >> 32;
    const std::uint64_t a = key & 0xFFFF'FFFF;
    const std::uint64_t b = key >> 32;
    high ^= q(low + a);
    low ^= q(high + b);
    high ^= q(low + (a ^ b));
    return high << 32 | low;
  };
  std::uint64_t sum = f(bytes.size(), 0xD1B54A32D192ED03U);
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.resize((bytes.size() + 15) / 16 * 16);
  for (std::uint64_t i = 0; i < padded.size() / 8; ++i) {
    std::uint64_t word = 0;
    for (std::uint64_t n = 8; n-- != 0;)
      word = word << 8 | static_cast<std::uint64_t>(padded[i * 8 + n]);
    sum += f(word, (i + 1) * 0x9E3779B97F4A7C15U);
  }
  return sum;
}

/// Lengths around all that kernels divide by.
std::uint64_t any_length(std::mt19937_64& random) {
  constexpr std::uint64_t edges[] = {0,   1,   15,   16,   17,   63,   64,   65,   127,
                                     128, 129, 2047, 2048, 2049, 4095, 4096, 4097, 8192};
  switch (random() % 3) {
    case 0:
      return edges[random() % std::size(edges)];
    case 1:
      return random() % 600;
    default:
      return random() % 40'000;
  }
}

template <class Check>
void on_each(std::mt19937_64& random, const Check& check) {
  check(host_executor{});
  check(grid_executor({.blocks = static_cast<std::uint32_t>(random() % 4)}));
}

constexpr std::uint32_t other_crc = 0xDEAD'BEEF;
constexpr std::uint64_t other_digest = 0xDEAD'BEEF'0BAD'F00D;

/// Sums that are the expected ones; one more, behind them, must stay.
template <class Sum, class Expect>
std::uint64_t right_ones(const std::vector<Sum>& sums, Sum other,
                         const std::vector<std::vector<std::byte>>& blocks, const Expect& expect) {
  CHECK(sums.back() == other);
  std::uint64_t right = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    right += sums[i] == expect(blocks[i]) ? 1U : 0U;
  return right;
}

/// Both sums of each block of a list.
template <class Run, block_list Blocks>
void check_sums(const Run& run, const Blocks& blocks, const std::vector<std::vector<std::byte>>& expected) {
  std::vector<std::uint32_t> crcs(expected.size() + 1, other_crc);
  std::vector<std::uint64_t> digests(expected.size() + 1, other_digest);
  crc32c_blocks(run, blocks, crcs).value();
  digest_blocks(run, blocks, digests).value();
  CHECK(right_ones(crcs, other_crc, expected, crc_of) == expected.size());
  CHECK(right_ones(digests, other_digest, expected, digest_of) == expected.size());
}

/// The same of copies; after each, `look` is to find the blocks where they went, and clear that place.
template <class Run, block_list Blocks, class Look>
void check_copies(const Run& run, const Blocks& blocks, const std::vector<std::vector<std::byte>>& expected,
                  const Look& look) {
  std::vector<std::uint32_t> crcs(expected.size() + 1, other_crc);
  std::vector<std::uint64_t> digests(expected.size() + 1, other_digest);
  copy_and_crc32c(run, blocks, crcs).value();
  look();
  copy_and_digest(run, blocks, digests).value();
  look();
  CHECK(right_ones(crcs, other_crc, expected, crc_of) == expected.size());
  CHECK(right_ones(digests, other_digest, expected, digest_of) == expected.size());
}

/// Runs nothing, and keeps how wide the accesses would be.
struct width_probe {
  unsigned* width;
  template <class Sum, unsigned N, detail::checksum_use Use, block_list Blocks>
  void seen(const detail::checksum_work<Sum, N, Use, Blocks>&) const {
    *width = N;
  }
  template <detail::checksum_use Use, block_list Blocks>
  void seen(const detail::crc32c_rows_work<Use, Blocks>&) const {
    *width = rows;
  }
  template <detail::checksum_use Use, block_list Blocks>
  void seen(const detail::digest_rows_work<Use, Blocks>&) const {
    *width = rows;
  }
  template <class Sum, block_list Blocks>
  void seen(const detail::checksum_start_work<Sum, Blocks>&) const {}
  static constexpr unsigned rows = 32;
  template <class Work>
  result<void> each(const Work& work) const {
    seen(work);
    return {};
  }
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

TEST_SUITE("block_checksum") {
  TEST_CASE("block checksums have known values") {
    CHECK(crc_of(bytes_of("123456789")) == 0xE306'9283);
    const auto check = [](const auto& run) {
      const auto crc = [&](std::span<const std::byte> bytes) {
        const copy_task task{bytes.data(), nullptr, bytes.size()};
        std::uint32_t sum = other_crc;
        crc32c_blocks(run, few_copies({&task, 1}), {&sum, 1}).value();
        return sum;
      };
      CHECK(crc(bytes_of("123456789")) == 0xE306'9283);
      // RFC 3720, B.4.
      std::vector<std::byte> bytes(32);
      CHECK(crc(bytes) == 0x8A91'36AA);
      std::ranges::fill(bytes, std::byte{0xFF});
      CHECK(crc(bytes) == 0x62A8'AB43);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::byte>(i);
      CHECK(crc(bytes) == 0x46DD'794E);
      std::ranges::reverse(bytes);
      CHECK(crc(bytes) == 0x113F'DB5C);
      CHECK(crc({}) == 0);
    };
    check(host_executor{});
    check(grid_executor{});
    // What was written with one version must be known by the next.
    CHECK(block_digest({}) == 0x51FB'D9C0'C400'3A20);
    CHECK(block_digest(bytes_of("123456789")) == 0x8916'720C'28E6'A62F);
  }

  TEST_CASE("a digest follows its definition, also at compile time") {
    constexpr std::array<std::byte, 21> at_compile_time{std::byte{1}, std::byte{0xFF}, std::byte{3}};
    constexpr std::uint64_t digest = block_digest(at_compile_time);
    CHECK(digest == digest_of(at_compile_time));
    for (const auto seed : llmmem_tests::seeds(200)) {
      const auto bytes = bytes_of_seed(seed % 100, seed);
      if (block_digest(bytes) != digest_of(bytes)) CHECK(seed == 0);
    }
  }

  TEST_CASE("tasks of any lengths and alignments have the sums of their bytes, and copies are those bytes") {
    for (const auto seed : llmmem_tests::seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t count = random() % 12;
      const bool are_aligned = random() % 2 == 0;
      std::vector<std::vector<std::byte>> contents;
      std::vector<guarded_bytes> sources;
      std::vector<guarded_bytes> targets;
      std::vector<copy_task> tasks;
      std::uint64_t longest = 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        contents.push_back(bytes_of_seed(any_length(random), random()));
        sources.emplace_back(contents.back(), are_aligned ? 0 : any_skew(random));
        targets.emplace_back(std::vector<std::byte>(contents.back().size()),
                             are_aligned ? 0 : any_skew(random));
        longest = std::max<std::uint64_t>(longest, contents.back().size());
      }
      for (std::uint64_t i = 0; i < count; ++i)
        tasks.push_back({sources[i].data(), targets[i].data(), contents[i].size()});
      const row_alignment aligned = are_aligned ? row_alignment{16, 16} : row_alignment{1, 1};
      const auto look = [&] {
        for (std::uint64_t i = 0; i < count; ++i) {
          CHECK(targets[i].bytes() == contents[i]);
          CHECK(targets[i].is_intact());
          std::fill_n(targets[i].data(), contents[i].size(), std::byte{0});
        }
      };
      on_each(random, [&](const auto& run) {
        const listed_copies listed(tasks, longest, aligned);
        check_sums(run, few_copies(tasks), contents);
        check_sums(run, listed, contents);
        for (guarded_bytes& each : targets)
          CHECK(each.bytes() == std::vector<std::byte>(each.bytes().size()));
        check_copies(run, few_copies(tasks), contents, look);
        check_copies(run, listed, contents, look);
      });
    }
  }

  TEST_CASE("long blocks, of more than a tile, have the same sums on all executors") {
    for (const std::uint64_t bytes :
         {std::uint64_t{300'000}, std::uint64_t{262'144}, std::uint64_t{65'537}}) {
      CAPTURE(bytes);
      const auto contents = bytes_of_seed(bytes, bytes);
      const copy_task task{contents.data(), nullptr, bytes};
      std::mt19937_64 random(bytes);
      on_each(random, [&](const auto& run) { check_sums(run, few_copies({&task, 1}), {contents}); });
    }
  }

  TEST_CASE("tiles of all shapes have the same sums") {
    // As they are where there is far more to sum than a test has.
    const auto contents = bytes_of_seed(70'000, 5);
    const copy_task task{contents.data(), nullptr, contents.size()};
    const few_copies blocks({&task, 1});
    const auto check = [&]<class Sum>(Sum sum, detail::tile_shape shape, auto expected) {
      CAPTURE(shape.lane_bytes);
      CAPTURE(shape.lanes);
      const auto tiles = static_cast<std::uint32_t>((contents.size() + shape.bytes() - 1) / shape.bytes());
      std::mt19937_64 random(1);
      on_each(random, [&](const auto& run) {
        typename Sum::value out = tiles == 1 ? 77 : sum.start(contents.size());
        run.each(detail::checksum_work<Sum, 1, detail::checksum_use::looked_at, few_copies>{
                     blocks, sum, shape, contents.size(), divider(tiles), &out})
            .value();
        CHECK(out == expected);
        if (shape.lanes != 32) return;
        out = tiles == 1 ? 77 : sum.start(contents.size());
        using work =
            std::conditional_t<std::same_as<Sum, detail::crc32c_sum>,
                               detail::crc32c_rows_work<detail::checksum_use::looked_at, few_copies>,
                               detail::digest_rows_work<detail::checksum_use::looked_at, few_copies>>;
        run.each(work{blocks, sum, shape.bytes(), contents.size(), divider(tiles), &out}).value();
        CHECK(out == expected);
      });
    };
    for (const std::uint32_t lane_bytes : {64U, 128U, 256U, 512U, 1024U, 2048U, 65'536U}) {
      for (std::uint32_t lanes = 1; lanes <= 32; lanes *= 2) {
        check(detail::crc32c_sum{}, detail::tile_shape{lane_bytes, lanes}, crc32c(0, contents));
        check(detail::digest_sum{}, detail::tile_shape{lane_bytes, lanes}, block_digest(contents));
      }
    }
  }

  TEST_CASE("blocks of a pool are summed and copied, all of them or by number") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t bytes = random() % 3 == 0 ? 16 * (random() % 300) : random() % 3000;
      const std::uint64_t gap = random() % 2 == 0 ? (16 - bytes % 16) % 16 : random() % 9;
      const std::uint64_t stride = bytes + gap;
      const std::uint64_t blocks = 1 + random() % 20;
      const std::uint64_t outputs = 1 + random() % 20;
      const std::uint64_t skew = random() % 2 == 0 ? 0 : any_skew(random);
      guarded_bytes pool(bytes_of_seed(blocks * stride, random()), skew);
      const block_pool_view from{pool.data(), stride, blocks};
      const auto contents_of = [&](std::uint64_t i) {
        return std::vector<std::byte>(pool.data() + i * stride, pool.data() + i * stride + bytes);
      };
      std::vector<std::vector<std::byte>> all;
      for (std::uint64_t i = 0; i < blocks; ++i)
        all.push_back(contents_of(i));
      // Pairs to different outputs, some padding, some beyond.
      std::vector<block_pair> pairs;
      std::vector<std::vector<std::byte>> of_pairs;
      std::vector<std::vector<std::byte>> of_copied;
      const std::vector<std::byte> empty_outputs(outputs * (stride + 16), std::byte{7});
      std::vector<std::byte> expected = empty_outputs;
      bool is_any_beyond = false;
      bool is_any_copied_beyond = false;
      for (std::uint64_t i = 0; i < outputs; ++i) {
        block_pair pair{static_cast<std::int64_t>(random() % blocks), static_cast<std::int64_t>(i)};
        if (random() % 8 == 0) pair.from = -1;
        if (random() % 8 == 0) pair.to = -1;
        if (random() % 16 == 0) pair.from = static_cast<std::int64_t>(blocks);
        if (random() % 16 == 0) pair.to = static_cast<std::int64_t>(outputs);
        pairs.push_back(pair);
        const bool is_there = pair.from >= 0 && pair.from < static_cast<std::int64_t>(blocks);
        is_any_beyond = is_any_beyond || pair.from == static_cast<std::int64_t>(blocks);
        of_pairs.push_back(is_there ? contents_of(static_cast<std::uint64_t>(pair.from))
                                    : std::vector<std::byte>{});
        const bool goes = is_there && pair.to >= 0 && pair.to < static_cast<std::int64_t>(outputs);
        is_any_copied_beyond =
            is_any_copied_beyond || (pair.from >= 0 && pair.to >= 0 && (!is_there || !goes));
        of_copied.push_back(goes ? of_pairs.back() : std::vector<std::byte>{});
        if (goes)
          std::ranges::copy(of_pairs.back(),
                            expected.begin() + static_cast<std::ptrdiff_t>(i * (stride + 16)));
      }
      on_each(random, [&](const auto& run) {
        check_sums(run, strided_blocks(from, bytes), all);
        std::uint32_t flag = 0;
        check_sums(run, numbered_blocks(from, bytes, pairs, {}, &flag), of_pairs);
        CHECK(flag == (is_any_beyond ? 1 : 0));
        flag = 0;
        guarded_bytes to(empty_outputs, skew);
        const block_pool_output into{to.data(), stride + 16, outputs};
        const auto look_for = [&](const std::vector<std::byte>& bytes_there) {
          CHECK(to.bytes() == bytes_there);
          CHECK(to.is_intact());
          std::ranges::copy(empty_outputs, to.data());
        };
        check_copies(run, numbered_blocks(from, bytes, pairs, into, &flag), of_copied,
                     [&] { look_for(expected); });
        CHECK(flag == (is_any_copied_beyond ? 1 : 0));
        // In order, as many as both have.
        const std::uint64_t both = std::min(blocks, outputs);
        std::vector<std::byte> in_row = empty_outputs;
        for (std::uint64_t i = 0; i < both; ++i)
          std::ranges::copy(all[i], in_row.begin() + static_cast<std::ptrdiff_t>(i * (stride + 16)));
        check_copies(run, strided_blocks(from, bytes, into),
                     {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(both)},
                     [&] { look_for(in_row); });
      });
    }
  }

  TEST_CASE("sums of parts combine to the sum of the whole") {
    const auto bytes = bytes_of_seed(10'000, 3);
    const std::vector<copy_task> tasks{{bytes.data(), nullptr, 1234}, {bytes.data() + 1234, nullptr, 8766}};
    std::vector<std::uint32_t> sums(2);
    crc32c_blocks(grid_executor(), few_copies(tasks), sums).value();
    CHECK(crc32c_combine(sums[0], sums[1], 8766) == crc_of(bytes));
  }

  TEST_CASE("the digest changes with any word, the length, an exchange or a move") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      std::vector<std::byte> bytes = bytes_of_seed(1 + random() % 500, random());
      if (random() % 3 == 0) std::ranges::fill(bytes, std::byte{0});
      const std::uint64_t digest = block_digest(bytes);
      std::vector<std::byte> other = bytes;
      const std::uint64_t first = random() % bytes.size() / 8 * 8;
      for (std::uint64_t i = first; i < std::min<std::uint64_t>(first + 8, bytes.size()); ++i)
        other[i] ^= static_cast<std::byte>(i == first ? 1 + random() % 255 : random());
      CHECK(block_digest(other) != digest);
      other = bytes;
      other.push_back(std::byte{0});
      CHECK(block_digest(other) != digest);
      // The signs of two words.
      if (bytes.size() < 16) continue;
      other = bytes;
      other[7] ^= std::byte{0x80};
      other[15] ^= std::byte{0x80};
      CHECK(block_digest(other) != digest);
      other = bytes;
      std::swap_ranges(other.begin(), other.begin() + 8, other.begin() + 8);
      if (other != bytes) CHECK(block_digest(other) != digest);
    }
  }

  TEST_CASE("places beyond 2^32 bytes are computed correctly, without memory for them") {
    constexpr std::uint64_t stride = (std::uint64_t{1} << 33) + 48;
    auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 20);
    const strided_blocks blocks({base, stride, 10}, 64, {base + 64, 2 * stride, 10});
    const copy_task last = blocks[9];
    CHECK(reinterpret_cast<std::uintptr_t>(last.from) == (std::uintptr_t{1} << 20) + 9 * stride);
    CHECK(reinterpret_cast<std::uintptr_t>(last.to) == (std::uintptr_t{1} << 20) + 64 + 18 * stride);
    const std::vector<block_pair> pairs{{9, 7}};
    const copy_task numbered = numbered_blocks({base, stride, 10}, 64, pairs, {base, stride, 10})[0];
    CHECK(numbered.from == last.from);
    CHECK(reinterpret_cast<std::uintptr_t>(numbered.to) == (std::uintptr_t{1} << 20) + 7 * stride);
    // The last tile of a block of 2^44 + 17 bytes: what it adds stands at its own place.
    constexpr std::uint64_t bytes = (std::uint64_t{1} << 44) + 17;
    const detail::tile_shape shape = detail::crc32c_sum::shape(1, bytes);
    CHECK(shape == detail::tile_shape{2048, 32});
    CHECK(detail::digest_sum::shape(1, bytes) == detail::tile_shape{512, 32});
    const detail::digest_sum digest;
    const detail::crc32c_sum crc;
    const auto end = bytes_of_seed(17, 1);
    // As if the block began so far before: only its end is read.
    const std::byte* const begin =
        reinterpret_cast<const std::byte*>(reinterpret_cast<std::uintptr_t>(end.data()) - (bytes - 17));
    const detail::block_tile tile{{begin, nullptr, bytes}, bytes - 17, bytes};
    const auto low = [&](std::size_t at) {
      std::uint32_t word = 0;
      std::memcpy(&word, end.data() + at, 4);
      return word;
    };
    const std::uint64_t word = (bytes - 17) / 8;
    const std::uint64_t expected =
        detail::digest_word(low(0), low(4), detail::digest_key(word)) +
        detail::digest_word(low(8), low(12), detail::digest_key(word + 1)) +
        detail::digest_word(static_cast<std::uint32_t>(end[16]), 0, detail::digest_key(word + 2)) +
        detail::digest_word(0, 0, detail::digest_key(word + 3));
    CHECK(digest.take<16, detail::checksum_use::looked_at>(tile, {512, 1}, {}) == expected);
    CHECK(crc.take<16, detail::checksum_use::looked_at>(tile, {2048, 1}, {}) ==
          (crc_of(end) ^ crc.start(17)));
    // Zeros behind it: by squaring, as the library's other way.
    CHECK(crc.powers.past(0x1234'5678, bytes) == crc32c_combine(0x1234'5678, 0, bytes));
  }

  TEST_CASE("lanes take more packets of longer blocks, and a block has at most as many lanes as it can use") {
    using detail::crc32c_sum;
    using detail::digest_sum;
    using detail::tile_shape;
    CHECK(crc32c_sum::shape(1, 0) == tile_shape{128, 1});
    CHECK(crc32c_sum::shape(1, 128) == tile_shape{128, 1});
    CHECK(crc32c_sum::shape(1, 129) == tile_shape{128, 2});
    CHECK(crc32c_sum::shape(16, 1 << 20) == tile_shape{256, 32});
    CHECK(crc32c_sum::shape(1'000'000, 4096) == tile_shape{2048, 2});
    CHECK(crc32c_sum::shape(std::uint64_t{1} << 40, std::uint64_t{1} << 44) == tile_shape{2048, 32});
    CHECK(digest_sum::shape(1'000'000, 4096) == tile_shape{512, 32});
    CHECK(digest_sum::shape(4, 65) == tile_shape{64, 2});
  }

  TEST_CASE("accesses are as wide as all addresses of a list allow") {
    alignas(16) std::byte memory[8192];
    constexpr std::pair<std::uint64_t, unsigned> widths[] = {{0, 16}, {8, 4}, {4, 4}, {2, 1}, {1, 1}};
    std::vector<std::uint32_t> sums(2);
    std::vector<std::uint64_t> digests(2);
    const std::vector<block_pair> pairs(2);
    for (const auto& [skew, width] : widths) {
      CAPTURE(skew);
      for (int which = 0; which < 4; ++which) {
        CAPTURE(which);
        const block_pool_view from{memory + (which == 0 ? skew : 0), 128 + (which == 1 ? skew : 0), 2};
        const block_pool_output to{memory + 4096 + (which == 2 ? skew : 0), 128 + (which == 3 ? skew : 0), 2};
        unsigned seen = 0;
        const width_probe run{&seen};
        const auto check = [&](const auto& blocks) {
          copy_and_crc32c(run, blocks, sums).value();
          CHECK(seen == width);
          copy_and_digest(run, blocks, digests).value();
          CHECK(seen == width);
          crc32c_blocks(run, blocks, sums).value();
          CHECK(seen == (which < 2 ? width : 16));
        };
        check(strided_blocks(from, 100, to));
        check(numbered_blocks(from, 100, pairs, to));
        // Long blocks have a warp for each tile, with aligned accesses at any address.
        const strided_blocks long_ones(from, 4096, to);
        copy_and_crc32c(run, long_ones, sums).value();
        CHECK(seen == width_probe::rows);
        copy_and_digest(run, long_ones, digests).value();
        CHECK(seen == (width == 16 ? 16 : width_probe::rows));
      }
    }
    // Of many blocks a lane may have a whole one, but not byte by byte.
    sums.resize(5000);
    unsigned seen = 0;
    for (const std::uint64_t bytes : {2052U, 4096U, 16'384U, 32'768U}) {
      const auto seen_at = [&](std::uint64_t skew) {
        const strided_blocks many({memory + skew, bytes, 5000}, bytes);
        crc32c_blocks(width_probe{&seen}, many, sums).value();
        return seen;
      };
      CHECK(seen_at(1) == width_probe::rows);
      CHECK(seen_at(2) == width_probe::rows);
      CHECK(seen_at(4) == (bytes == 2052 ? width_probe::rows : 4));
      CHECK(seen_at(0) == (bytes == 2052 ? width_probe::rows : 16));
    }
  }

  TEST_CASE("what cannot be is refused with its reason, and nothing has begun") {
    std::vector<std::byte> memory(256);
    std::vector<std::uint32_t> sums(4, other_crc);
    const host_executor run;
    const std::span all(sums.data(), sums.size());
    const strided_blocks five({memory.data(), 32, 5}, 32);
    CHECK(crc32c_blocks(run, five, all).error() == failure{errc::too_short, 0, 5, 4});
    const strided_blocks two({memory.data(), 32, 2}, 32);
    CHECK(crc32c_blocks(run, two, {static_cast<std::uint32_t*>(nullptr), 2}).error() ==
          failure{errc::null_handle});
    CHECK(copy_and_crc32c(run, two, all).error() == failure{errc::null_handle});
    CHECK(crc32c_blocks(run, strided_blocks({nullptr, 32, 2}, 32), all).error() ==
          failure{errc::null_handle});
    const std::vector<block_pair> pairs(2);
    CHECK(crc32c_blocks(run, numbered_blocks({nullptr, 32, 2}, 32, pairs), all).error() ==
          failure{errc::null_handle});
    CHECK(copy_and_crc32c(run, numbered_blocks({memory.data(), 32, 2}, 32, pairs), all).error() ==
          failure{errc::null_handle});
    const copy_task nowhere{memory.data(), nullptr, 1};
    CHECK(copy_and_crc32c(run, few_copies({&nowhere, 1}), all).error() == failure{errc::null_handle});
    const copy_task of_nothing{nullptr, memory.data(), 1};
    CHECK(crc32c_blocks(run, few_copies({&of_nothing, 1}), all).error() == failure{errc::null_handle});
    const std::uint64_t too_long = std::uint64_t{1} << 45;
    CHECK(crc32c_blocks(run, strided_blocks({memory.data(), 32, 2}, too_long), all).error() ==
          failure{errc::past_the_bytes, 0, too_long, too_long - 1});
    CHECK(crc32c_blocks(run, strided_blocks({nullptr, 0, 0}, 32), {}).has_value());
    CHECK(sums == std::vector<std::uint32_t>(4, other_crc));
    // Of no bytes there is a sum all the same.
    CHECK(crc32c_blocks(run, strided_blocks({nullptr, 0, 2}, 0), all).has_value());
    CHECK(sums == std::vector<std::uint32_t>{0, 0, other_crc, other_crc});
  }

  TEST_CASE("at most the list's longest length of a task is summed or copied") {
    const auto bytes = bytes_of_seed(300, 1);
    std::vector<std::byte> to(300);
    const std::vector<copy_task> tasks{{bytes.data(), to.data(), 300}};
    std::vector<std::uint32_t> sums(1);
    copy_and_crc32c(grid_executor(), listed_copies(tasks, 100, {1, 1}), sums).value();
    CHECK(sums[0] == crc_of(std::span(bytes).first(100)));
    CHECK(std::equal(to.begin(), to.begin() + 100, bytes.begin()));
    CHECK(std::all_of(to.begin() + 100, to.end(), [](std::byte each) { return each == std::byte{0}; }));
  }
}
