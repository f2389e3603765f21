#include <llmmem/hash/aes_pmac.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/sha256.hpp>
#include <llmmem/hash/siphash.hpp>
#if __has_include(<xxhash.h>)
#include <llmmem/hash/xxh3.hpp>
#endif

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

using namespace llmmem;

namespace {

constexpr std::uint64_t byte_swap(std::uint64_t x) {
  std::uint64_t y = 0;
  for (int i = 0; i < 8; ++i)
    y = (y << 8) | ((x >> (8 * i)) & 0xFF);
  return y;
}

/// The reference vectors' input: bytes 0, 1, 2..., of the given length, under the key 00 01 .. 0f.
template <int Compression, int Finalization>
constexpr block_key siphash_of_counting_bytes(std::uint64_t length) {
  detail::siphash_state<Compression, Finalization> state(
      {0x0706'0504'0302'0100ULL, 0x0F0E'0D0C'0B0A'0908ULL});
  std::uint64_t word = 0;
  for (std::uint64_t i = 0; i < length; ++i) {
    word |= i << (8 * (i % 8));
    if (i % 8 == 7) {
      state.absorb(word);
      word = 0;
    }
  }
  return state.finish(word, length);
}

constexpr bool is(block_key key, std::uint64_t first_bytes, std::uint64_t last_bytes) {
  return byte_swap(key.low) == first_bytes && byte_swap(key.high) == last_bytes;
}

// From `vectors_sip128` of the authors' reference implementation.
static_assert(is(siphash_of_counting_bytes<2, 4>(0), 0xa3817f04ba25a8e6, 0x6df67214c7550293));
static_assert(is(siphash_of_counting_bytes<2, 4>(1), 0xda87c1d86b99af44, 0x347659119b22fc45));
static_assert(is(siphash_of_counting_bytes<2, 4>(15), 0x5493e99933b0a811, 0x7e08ec0f97cfc3d9));
static_assert(is(siphash_of_counting_bytes<2, 4>(63), 0x5150d1772f50834a, 0x503e069a973fbd7c));

// From OpenSSL 3.0, `openssl mac -macopt c-rounds:1 -macopt d-rounds:3 -macopt size:16 ... SIPHASH`.
static_assert(is(siphash_of_counting_bytes<1, 3>(0), 0xe77ebcb22788a5be, 0xfd62db6add303001));
static_assert(is(siphash_of_counting_bytes<1, 3>(1), 0xfc6f370460d3eda8, 0x5e0573cc2b2ff063));
static_assert(is(siphash_of_counting_bytes<1, 3>(15), 0xc17e5505b2bd526c, 0x2921cdec1e7e0109));
static_assert(is(siphash_of_counting_bytes<1, 3>(63), 0x4c5800e34efe426f, 0x079f6b0aa75260ad));

/// Whatever a hash policy is, these must hold of it.
template <block_hash Hash>
void distinguishes_what_it_must() {
  const Hash hash{};
  const Hash other_seed{hash_seed{1, 2}};
  const std::vector<token_id> tokens{1, 2, 3, 4, 5};
  const auto first = [&](std::size_t n) { return std::span(tokens).first(n); };
  const block_key root = hash.root({});

  std::set<std::pair<std::uint64_t, std::uint64_t>> keys;
  std::size_t made = 0;
  const auto add = [&](block_key key) {
    keys.insert({key.low, key.high});
    ++made;
  };
  add(root);
  add(hash.root({.salt = {1, 0}}));
  add(hash.root({.salt = {0, 1}}));
  add(hash.root({.extra_keys = {1, 0}}));
  add(hash.root({.extra_keys = {0, 1}}));
  add(other_seed.root({}));
  for (std::size_t n = 0; n <= tokens.size(); ++n)
    add(hash.chain(root, first(n)));
  add(hash.chain(hash.chain(root, first(2)), std::span(tokens).subspan(2, 2)));  // not chain(root, first 4)
  add(hash.chain({root.low ^ 1, root.high}, first(4)));
  add(hash.chain({root.low, root.high ^ 1}, first(4)));
  add(other_seed.chain(root, first(4)));
  add(hash.chain(root, std::array<token_id, 1>{-1}));
  add(hash.chain(root, std::array<token_id, 2>{-1, 0}));
  // A context that spells the same words as a block is no block.
  add(hash.chain({7, 8}, std::array<token_id, 4>{9, 0, 10, 0}));
  add(hash.root({.salt = {7, 8}, .extra_keys = {9, 10}}));
  CHECK(keys.size() == made);
  CHECK(hash.chain(root, first(4)) == Hash{}.chain(root, first(4)));
}

}  // namespace

TEST_CASE("sha256 meets the standard's vectors") {
  const auto digest = [](std::initializer_list<std::uint32_t> words) {
    detail::sha256_state state;
    for (const std::uint32_t word : words)
      state.absorb(word);
    return state.finish();
  };
  // sha256sum of nothing, of "abcd", and of 64 bytes "abcdabcd...", which fill a whole block.
  CHECK(digest({})[0] == 0xe3b0c442);
  CHECK(digest({0x61626364}) == std::array<std::uint32_t, 8>{0x88d4266f, 0xd4e6338d, 0x13b845fc, 0xf289579d,
                                                             0x209c8978, 0x23b9217d, 0xa3e16193, 0x6f031589});
  detail::sha256_state block;
  for (int i = 0; i < 16; ++i)
    block.absorb(0x61626364);
  CHECK(block.finish()[0] == 0x625b4149);
}

TEST_CASE("siphash distinguishes contexts, parents, tokens, lengths and seeds") {
  distinguishes_what_it_must<siphash_128>();
  distinguishes_what_it_must<siphash13_128>();
}
TEST_CASE("pmac of AES distinguishes contexts, parents, tokens, lengths and seeds") {
  distinguishes_what_it_must<aes_pmac_128>();
}
TEST_CASE("sha256 distinguishes contexts, parents, tokens, lengths and seeds") {
  distinguishes_what_it_must<sha256_128>();
}
#if __has_include(<xxhash.h>)
TEST_CASE("xxh3 distinguishes contexts, parents, tokens, lengths and seeds") {
  distinguishes_what_it_must<xxh3_128>();
}
#endif

TEST_CASE("neighbouring ids get unrelated keys") {
  std::set<std::uint32_t> tags;
  for (std::uint64_t id = 0; id < 10'000; ++id) {
    tags.insert(static_cast<std::uint32_t>(key_from_id(id).high >> 32));
    // Half of the bits differ, give or take: 64 expected, standard deviation 5.7.
    const block_key a = key_from_id(id);
    const block_key b = key_from_id(id + 1);
    const int differing = std::popcount(a.low ^ b.low) + std::popcount(a.high ^ b.high);
    CHECK(differing > 24);
    CHECK(differing < 104);
  }
  CHECK(tags.size() > 9'990);
}
