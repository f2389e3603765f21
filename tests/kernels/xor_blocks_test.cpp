#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/xor_blocks.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
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

/// Lengths around all that kernels divide by.
std::uint64_t any_length(std::mt19937_64& random) {
  constexpr std::uint64_t edges[] = {0, 1, 15, 16, 17, 511, 512, 2047, 2048, 2049, 4096, 20480};
  switch (random() % 3) {
    case 0:
      return edges[random() % std::size(edges)];
    case 1:
      return random() % 6000;
    default:
      return random() % 300'000;
  }
}

/// The oracle: bytes one by one.
std::vector<std::byte> xor_of(std::span<const std::byte> a, std::span<const std::byte> b) {
  std::vector<std::byte> out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    out[i] = a[i] ^ b[i];
  return out;
}

/// New contents: the old ones with some bits flipped, in few pages, in many or in none.
std::vector<std::byte> changed(const std::vector<std::byte>& old, std::mt19937_64& random) {
  std::vector<std::byte> out = old;
  if (out.empty()) return out;
  const std::uint64_t flips = random() % 3 == 0 ? 0 : random() % 40;
  for (std::uint64_t i = 0; i < flips; ++i)
    out[random() % out.size()] ^= static_cast<std::byte>(1U << random() % 8);
  if (random() % 3 == 0) out.back() ^= std::byte{0x80};
  if (random() % 4 == 0) out = bytes_of_seed(out.size(), random());
  return out;
}

/// The oracle of bitmaps: a page differs when a byte of it does.
std::vector<std::uint32_t> dirty_of(const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                                    std::uint64_t page) {
  std::vector<std::uint32_t> out((a.size() + 32 * page - 1) / (32 * page));
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) out[i / page / 32] |= 1U << (i / page % 32);
  }
  return out;
}

/// Runs nothing, and keeps how wide the accesses would be.
struct width_probe {
  unsigned* width;
  template <unsigned N>
  void seen(const detail::xor_parity_work<N>&) const {
    *width = N;
  }
  template <unsigned N, detail::delta_use Use>
  void seen(const detail::xor_delta_work<N, Use>&) const {
    *width = N;
  }
  template <unsigned N>
  void seen(const detail::apply_delta_work<N>&) const {
    *width = N;
  }
  void seen(const detail::clear_words_work&) const {}
  template <class Work>
  result<void> each(const Work& work) const {
    seen(work);
    return {};
  }
};

template <class Check>
void on_each(std::mt19937_64& random, const Check& check) {
  check(host_executor{});
  check(grid_executor({.blocks = static_cast<std::uint32_t>(random() % 4)}));
}

}  // namespace

TEST_SUITE("xor_blocks") {
  TEST_CASE("a parity is the exclusive or of its shards, and restores any of them from the others") {
    for (const auto seed : llmmem_tests::seeds(80)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t bytes = any_length(random);
      const std::uint64_t count = random() % (most_parity_shards + 1);
      std::vector<guarded_bytes> shards;
      std::vector<const std::byte*> list;
      std::vector<std::byte> expected(bytes);
      for (std::uint64_t i = 0; i < count; ++i) {
        const auto contents = bytes_of_seed(bytes, random());
        expected = xor_of(expected, contents);
        shards.emplace_back(contents, random() % 3 == 0 ? any_skew(random) : 0);
      }
      for (guarded_bytes& each : shards)
        list.push_back(each.data());
      on_each(random, [&](const auto& run) {
        guarded_bytes parity(bytes_of_seed(bytes, 7), any_skew(random));
        xor_parity(run, list, parity.data(), bytes).value();
        CHECK(parity.bytes() == expected);
        CHECK(parity.is_intact());
        if (count == 0) return;
        const std::uint64_t lost = random() % count;
        std::vector<const std::byte*> left = list;
        left[lost] = parity.data();
        guarded_bytes rebuilt(std::vector<std::byte>(bytes), any_skew(random));
        xor_parity(run, left, rebuilt.data(), bytes).value();
        CHECK(rebuilt.bytes() == shards[lost].bytes());
        CHECK(rebuilt.is_intact());
        // Into the place of one of them.
        std::vector<const std::byte*> again = list;
        guarded_bytes first(shards[0].bytes(), 0);
        again[0] = first.data();
        xor_parity(run, again, first.data(), bytes).value();
        CHECK(first.bytes() == expected);
      });
    }
  }

  TEST_CASE(
      "a delta has the differences, its bits say where, and its application turns one state into the other") {
    for (const auto seed : llmmem_tests::seeds(120)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t bytes = any_length(random);
      const dirty_page_options pages{.page_bytes = 512U << random() % 6};
      const auto old_contents = bytes_of_seed(bytes, random());
      const auto new_contents = changed(old_contents, random);
      const auto dirty = dirty_of(old_contents, new_contents, pages.page_bytes);
      CHECK(dirty_words(bytes, pages) == dirty.size());
      guarded_bytes before(old_contents, any_skew(random));
      guarded_bytes after(new_contents, random() % 2 == 0 ? any_skew(random) : 0);
      on_each(random, [&](const auto& run) {
        // A word more than is needed, and none of it cleared.
        std::vector<std::uint32_t> bits(dirty.size() + 1, 0xDEAD'BEEF);
        guarded_bytes delta(bytes_of_seed(bytes, 3), any_skew(random));
        xor_delta(run, before.data(), after.data(), delta.data(), bytes, bits, pages).value();
        CHECK(delta.bytes() == xor_of(old_contents, new_contents));
        CHECK(delta.is_intact());
        CHECK(std::equal(dirty.begin(), dirty.end(), bits.begin()));
        CHECK(bits.back() == 0xDEAD'BEEF);
        std::vector<std::uint32_t> looked(dirty.size() + 1, 0xDEAD'BEEF);
        compare_dirty(run, before.data(), after.data(), bytes, looked, pages).value();
        CHECK(looked == bits);
        guarded_bytes target(old_contents, any_skew(random));
        apply_delta(run, target.data(), delta.data(), bytes, bits, pages).value();
        CHECK(target.bytes() == new_contents);
        CHECK(target.is_intact());
        apply_delta(run, target.data(), delta.data(), bytes, bits, pages).value();
        CHECK(target.bytes() == old_contents);
        // In the place of the old bytes.
        xor_delta(run, target.data(), after.data(), target.data(), bytes, bits, pages).value();
        CHECK(target.bytes() == delta.bytes());
      });
      CHECK(before.is_intact());
      CHECK(after.is_intact());
      CHECK(before.bytes() == old_contents);
      CHECK(after.bytes() == new_contents);
    }
  }

  TEST_CASE("bits are added to existing ones on request") {
    const std::vector<std::byte> old_contents(40 * 512);
    std::vector<std::byte> new_contents = old_contents;
    new_contents[33 * 512 + 511] = std::byte{1};
    const dirty_page_options added{.page_bytes = 512, .mark = dirty_mark::added};
    std::mt19937_64 random(1);
    on_each(random, [&](const auto& run) {
      std::vector<std::uint32_t> bits{1, 0x10};
      compare_dirty(run, old_contents.data(), new_contents.data(), old_contents.size(), bits, added).value();
      CHECK(bits == std::vector<std::uint32_t>{1, 0x12});
    });
  }

  TEST_CASE("the application of a delta skips pages whose bit is not set, regardless of its bytes there") {
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t bytes = 1 + any_length(random);
      const dirty_page_options pages{.page_bytes = 512U << random() % 4};
      const auto contents = bytes_of_seed(bytes, random());
      const auto delta = bytes_of_seed(bytes, random());
      std::vector<std::uint32_t> bits(dirty_words(bytes, pages));
      std::ranges::generate(bits, [&] { return static_cast<std::uint32_t>(random()); });
      std::vector<std::byte> expected = contents;
      for (std::uint64_t i = 0; i < bytes; ++i) {
        const std::uint64_t page = i / pages.page_bytes;
        if ((bits[page / 32] >> (page % 32) & 1U) != 0) expected[i] ^= delta[i];
      }
      on_each(random, [&](const auto& run) {
        guarded_bytes target(contents, any_skew(random));
        apply_delta(run, target.data(), delta.data(), bytes, bits, pages).value();
        CHECK(target.bytes() == expected);
        CHECK(target.is_intact());
      });
    }
  }

  TEST_CASE("every item past 2^32 packets has its place, without memory for them") {
    // Bits of units far up, where a 32-bit offset would come round: found by what a unit's lane gives.
    std::vector<std::uint32_t> bits(4);
    const std::uint64_t bytes = (std::uint64_t{1} << 40) + 3 * 2048 + 5;
    const detail::xor_delta_work<16, detail::delta_use::looked_at> work{
        nullptr, nullptr, nullptr, bits.data(), detail::packet_frame<16>(bytes), 30};
    CHECK(work.items() == (std::uint64_t{1} << 29) + 4);
    // Pages of 2^39 bytes: the last unit is of page 2.
    work.give(work.items() - 1, {0, 32}, {}, 2);
    CHECK(bits == std::vector<std::uint32_t>{4, 0, 0, 0});
    CHECK(dirty_words(bytes) == (std::uint64_t{1} << 23) + 1);
    CHECK(dirty_words(std::uint64_t{1} << 17) == 1);
    CHECK(dirty_words((std::uint64_t{1} << 17) + 1) == 2);
    CHECK(dirty_words(0) == 0);
    CHECK(detail::xor_unit::count(4096) == 2);
    CHECK(detail::xor_unit::count(4097) == 3);
    const detail::packet_frame<16> frame(bytes);
    const detail::xor_parity_work<16> parity{.shard = {}, .parity = nullptr, .frame = frame, .shards = 0};
    CHECK(parity.items() == 32 * ((std::uint64_t{1} << 29) + 4));
    CHECK(frame.at(bytes - 5).end == 5);
    CHECK(frame.at(bytes).is_empty());
    CHECK(frame.at(bytes - 16).is_whole());
  }

  TEST_CASE("packets are aligned without a shift where all addresses of a call allow") {
    alignas(16) std::byte memory[4096];
    std::vector<std::uint32_t> bits(1);
    constexpr std::pair<std::uint64_t, unsigned> widths[] = {{0, 16}, {8, 1}, {4, 1}, {2, 1}, {1, 1}};
    for (const auto& [skew, width] : widths) {
      CAPTURE(skew);
      for (std::uint64_t skewed = 0; skewed < 3; ++skewed) {
        CAPTURE(skewed);
        std::byte* at[3] = {memory, memory + 1024, memory + 2048};
        at[skewed] += skew;
        unsigned seen = 0;
        const width_probe run{&seen};
        xor_parity(run, std::vector<const std::byte*>{at[0], at[1]}, at[2], 512).value();
        CHECK(seen == width);
        xor_delta(run, at[0], at[1], at[2], 512, bits).value();
        CHECK(seen == width);
        if (skewed == 2) continue;
        compare_dirty(run, at[0], at[1], 512, bits).value();
        CHECK(seen == width);
        apply_delta(run, at[0], at[1], 512, bits).value();
        CHECK(seen == width);
      }
    }
  }

  TEST_CASE("what cannot be is refused with its reason, and nothing has begun") {
    std::vector<std::byte> memory(64 * 1024, poison);
    const std::vector<std::byte> as_it_was = memory;
    std::byte* const at = memory.data();
    std::vector<std::uint32_t> bits(8, 77);
    const std::vector<std::uint32_t> bits_as_they_were = bits;
    const host_executor run;
    const std::vector<const std::byte*> many(most_parity_shards + 1, at);
    CHECK(xor_parity(run, many, at + 4096, 16).error() == failure{errc::out_of_range, 0, 17, 16});
    const std::vector<const std::byte*> shards{at, nullptr};
    CHECK(xor_parity(run, shards, at + 4096, 16).error() == failure{errc::null_handle, 1});
    CHECK(xor_parity(run, std::span(shards).first(1), nullptr, 16).error() == failure{errc::null_handle, 1});
    CHECK(xor_parity(run, std::span(shards).first(1), at + 15, 16).error() ==
          failure{errc::overlapping_ranges, 0, 16, 1});
    CHECK(xor_parity(run, shards, nullptr, 0).has_value());
    // Beside each other is no overlap.
    CHECK(xor_parity(run, std::span(many).first(1), at + 16, 16).has_value());
    CHECK(memory == as_it_was);

    const auto delta = [&](std::byte* old_bytes, std::byte* new_bytes, std::byte* to, std::uint64_t bytes,
                           std::span<std::uint32_t> dirty, const dirty_page_options& pages = {}) {
      return xor_delta(run, old_bytes, new_bytes, to, bytes, dirty, pages).error();
    };
    constexpr std::uint64_t size = 8192;
    std::byte* const second = at + size;
    std::byte* const third = at + 2 * size;
    CHECK(delta(at, second, third, size, bits, {.page_bytes = 256}) ==
          failure{errc::bad_granularity, 0, 256, 512});
    CHECK(delta(at, second, third, size, bits, {.page_bytes = 5000}) ==
          failure{errc::bad_alignment, 0, 5000});
    CHECK(delta(at, second, third, size, bits, {.page_bytes = 0}) == failure{errc::bad_alignment});
    CHECK(delta(at, second, third, size, {}) == failure{errc::too_short, 0, 1, 0});
    CHECK(delta(nullptr, second, third, size, bits) == failure{errc::null_handle, 0});
    CHECK(delta(at, nullptr, third, size, bits) == failure{errc::null_handle, 1});
    CHECK(delta(at, second, nullptr, size, bits) == failure{errc::null_handle, 2});
    CHECK(delta(at, second, third, size, {static_cast<std::uint32_t*>(nullptr), 1}) ==
          failure{errc::null_handle, 3});
    CHECK(delta(at, second, at + 100, size, bits) == failure{errc::overlapping_ranges, 0, size, size - 100});
    CHECK(delta(at, second, third - 100, size, bits) == failure{errc::overlapping_ranges, 1, size, 100});
    const std::span<std::uint32_t> inside(reinterpret_cast<std::uint32_t*>(second + 64), 1);
    CHECK(delta(at, second, third, size, inside) == failure{errc::overlapping_ranges, 3, size, 4});
    CHECK(compare_dirty(run, at, second, size, inside).error() ==
          failure{errc::overlapping_ranges, 3, size, 4});
    CHECK(apply_delta(run, second, at, size, inside).error() ==
          failure{errc::overlapping_ranges, 3, size, 4});
    CHECK(apply_delta(run, at, at + 1, size, bits).error() ==
          failure{errc::overlapping_ranges, 1, size, size - 1});
    CHECK(apply_delta(run, nullptr, at, size, bits).error() == failure{errc::null_handle, 0});
    CHECK(compare_dirty(run, nullptr, nullptr, 0, {}).has_value());
    CHECK(memory == as_it_was);
    CHECK(bits == bits_as_they_were);
  }
}
