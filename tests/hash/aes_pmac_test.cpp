#include <doctest/doctest.h>

#include <llmmem/hash/aes_pmac.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/chained_keys.hpp>
#include <llmmem/hash/detail/aes.hpp>
#include <llmmem/hash/siphash.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace {

using namespace llmmem;
using detail::aes_block;

// FIPS 197, appendices B and C.1.
constexpr aes_block secret_b{0xA6D2'AE28'1615'7E2B, 0x3C4F'CF09'8815'F7AB};
constexpr aes_block secret_c{0x0706'0504'0302'0100, 0x0F0E'0D0C'0B0A'0908};
constexpr aes_block plain_b{0x8D30'5A88'A8F6'4332, 0x3407'37E0'A298'3131};
constexpr aes_block plain_c{0x7766'5544'3322'1100, 0xFFEE'DDCC'BBAA'9988};
constexpr aes_block cipher_b{0xFB09'DC02'1D84'2539, 0x320B'6A19'9785'11DC};
constexpr aes_block cipher_c{0x3004'7B6A'D8E0'C469, 0x5AC5'B470'80B7'CDD8};

static_assert(detail::aes_encrypt_by_table(detail::aes_expand(secret_b), plain_b) == cipher_b);
static_assert(detail::aes_encrypt_by_table(detail::aes_expand(secret_c), plain_c) == cipher_c);

/// `mask` times the polynomial of `factor`'s bits in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1: bit by bit.
aes_block product(std::uint64_t factor, aes_block mask) {
  aes_block sum{};
  for (; factor != 0; factor >>= 1) {
    if ((factor & 1) != 0) sum = sum ^ mask;
    const bool carries = (mask.high >> 63) != 0;
    mask = {mask.low << 1, (mask.high << 1) | (mask.low >> 63)};
    if (carries) mask.low ^= 0x87;
  }
  return sum;
}

/// PMAC by its definition.
class pmac_by_definition {
 public:
  explicit pmac_by_definition(hash_seed seed)
      : key_(detail::aes_expand({seed.low, seed.high})), zero_(encrypt({})) {
    half_ = halved(zero_);
    quarter_ = halved(half_);
  }

  [[nodiscard]] block_key root(const prefix_context& context) const {
    const aes_block sum = encrypt(aes_block{context.salt[0], context.salt[1]} ^ product(1, zero_));
    return named(encrypt(sum ^ aes_block{context.extra_keys[0], context.extra_keys[1]} ^ half_ ^ quarter_));
  }

  [[nodiscard]] block_key chain(const block_key& parent, std::span<const token_id> tokens) const {
    std::vector<token_id> padded(tokens.begin(), tokens.end());
    if (tokens.size() % 4 != 0) padded.push_back(1);
    while (padded.size() % 4 != 0)
      padded.push_back(0);
    aes_block sum{parent.low, parent.high};
    for (std::uint64_t i = 1; 4 * i <= padded.size(); ++i) {
      const auto word = [&](std::size_t k) {
        return std::uint64_t{static_cast<std::uint32_t>(padded[4 * (i - 1) + k])};
      };
      const aes_block block{word(0) | (word(1) << 32), word(2) | (word(3) << 32)};
      sum = sum ^ encrypt(block ^ product(i ^ (i >> 1), zero_));
    }
    return named(encrypt(sum ^ (tokens.size() % 4 == 0 ? half_ : quarter_)));
  }

 private:
  [[nodiscard]] aes_block encrypt(const aes_block& block) const {
    return detail::aes_encrypt_by_table(key_, block);
  }
  /// The value whose double is `mask`, by trying both: a carry, or none.
  [[nodiscard]] static aes_block halved(const aes_block& mask) {
    for (const bool carried : {false, true}) {
      const aes_block sum = carried ? mask ^ aes_block { 0x87, 0 } : mask;
      if ((sum.low & 1) != 0) continue;
      const aes_block half{(sum.low >> 1) | (sum.high << 63),
                           (sum.high >> 1) | (carried ? std::uint64_t{1} << 63 : 0)};
      if (product(2, half) == mask) return half;
    }
    FAIL("no half");
    return {};
  }
  [[nodiscard]] static block_key named(const aes_block& block) { return {block.low, block.high}; }

  detail::aes_key key_;
  aes_block zero_;
  aes_block half_;
  aes_block quarter_;
};

std::vector<token_id> random_tokens(std::size_t count, std::mt19937_64& random) {
  std::vector<token_id> tokens(count);
  std::ranges::generate(tokens, [&] { return static_cast<token_id>(random()); });
  return tokens;
}

}  // namespace

TEST_CASE("pmac of AES by table is what its definition says, for any number of tokens") {
  std::mt19937_64 random(1);
  for (int seed = 0; seed < 4; ++seed) {
    const hash_seed secret{random(), random()};
    const aes_pmac_128 hash(secret, aes_path::table);
    const pmac_by_definition expected(secret);
    for (std::size_t n = 0; n <= 150; ++n) {
      const std::vector<token_id> tokens = random_tokens(n, random);
      const block_key parent{random(), random()};
      CHECK(hash.chain(parent, tokens) == expected.chain(parent, tokens));
    }
    const prefix_context context{.salt = {random(), random()}, .extra_keys = {random(), random()}};
    CHECK(hash.root(context) == expected.root(context));
  }
}

#if defined(LLMMEM_AES_INSTRUCTIONS)
// Skipped on a processor without AES instructions: there they cannot be executed, and the hash uses the
// table, which the test above compares with the definition.
TEST_CASE("AES by instructions is AES by table" * doctest::skip(!has_aes_path(aes_path::instructions))) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 1'000; ++i) {
    const detail::aes_key key = detail::aes_expand({random(), random()});
    const aes_block plain{random(), random()};
    detail::aes_register block = detail::aes_load(plain);
    detail::aes_encrypt(key, block);
    CHECK(detail::aes_store(block) == detail::aes_encrypt_by_table(key, plain));
  }
}

void check_same_keys(aes_path path) {
  std::mt19937_64 random(3);
  for (int seed = 0; seed < 4; ++seed) {
    const hash_seed secret{random(), random()};
    const aes_pmac_128 quick(secret, path);
    const aes_pmac_128 portable(secret, aes_path::table);
    for (std::size_t n = 0; n <= 600; n += n < 140 ? 1 : 37) {
      const std::vector<token_id> tokens = random_tokens(n, random);
      const block_key parent{random(), random()};
      CHECK(quick.chain(parent, tokens) == portable.chain(parent, tokens));
    }
    const prefix_context context{.salt = {random(), random()}, .extra_keys = {random(), random()}};
    CHECK(quick.root(context) == portable.root(context));
  }
}

// Skipped as the one above.
TEST_CASE("pmac of AES gives the same keys by instructions and by table" *
          doctest::skip(!has_aes_path(aes_path::instructions))) {
  check_same_keys(aes_path::instructions);
}

// Skipped on a processor without VAES and AVX-512: there the hash uses narrower instructions.
TEST_CASE("pmac of AES gives the same keys by wide instructions and by table" *
          doctest::skip(!has_aes_path(aes_path::wide_instructions))) {
  check_same_keys(aes_path::wide_instructions);
}
#endif

TEST_CASE("pmac of AES reads tokens at any address") {
  std::mt19937_64 random(4);
  const std::vector<token_id> tokens = random_tokens(40, random);
  const aes_pmac_128 hash;
  for (std::size_t from = 0; from < 8; ++from) {
    const std::span part = std::span(tokens).subspan(from, 32);
    const std::vector<token_id> copy(part.begin(), part.end());
    CHECK(hash.chain({1, 2}, part) == hash.chain({1, 2}, copy));
  }
}

template <class Hash>
void check_chained_keys(const Hash& hash) {
  std::mt19937_64 random(5);
  for (const std::size_t block_tokens : {1U, 3U, 16U, 32U, 64U, 80U, 100U}) {
    // From the third block on, a hash may fold four at once: 15 blocks end behind three of these.
    for (std::size_t n = 0; n <= 15 * block_tokens; n += block_tokens / 2 + 1) {
      const std::vector<token_id> tokens = random_tokens(n, random);
      block_key expected{random(), random()};
      std::size_t made = 0;
      for (chained_keys keys(hash, expected, tokens, block_tokens); keys.has_next(); ++made) {
        expected = hash.chain(expected, std::span(tokens).subspan(made * block_tokens, block_tokens));
        REQUIRE(keys.next() == expected);
      }
      CHECK(made == n / block_tokens);
    }
  }
}

TEST_CASE("chained keys are those of chain, for any number of tokens") {
  static_assert(folding_block_hash<aes_pmac_128> && !folding_block_hash<siphash13_128>);
  check_chained_keys(siphash13_128{});
  for (const aes_path path : {aes_path::table, aes_path::instructions, aes_path::wide_instructions}) {
    CAPTURE(static_cast<int>(path));
    if (has_aes_path(path)) check_chained_keys(aes_pmac_128({}, path));
  }
}
