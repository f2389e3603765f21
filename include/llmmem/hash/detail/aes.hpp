/// @file
/// AES-128, one block at a time or four: by the processor's instructions if it has them, otherwise by table.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/cpu_feature.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Sixteen bytes; the first is the lowest of `low`.
struct aes_block {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend constexpr aes_block operator^(const aes_block& a, const aes_block& b) noexcept {
    return {a.low ^ b.low, a.high ^ b.high};
  }
  friend constexpr bool operator==(const aes_block&, const aes_block&) noexcept = default;
};

/// The key of each round (FIPS 197, section 5.2).
struct aes_key {
  static constexpr std::size_t rounds = 10;
  alignas(16) std::array<aes_block, rounds + 1> of_round{};
};

/// Twice `x` in the field of AES, modulo x^8 + x^4 + x^3 + x + 1.
[[nodiscard]] constexpr std::uint8_t aes_double(std::uint8_t x) noexcept {
  return static_cast<std::uint8_t>((x << 1) ^ ((x & 0x80) != 0 ? 0x1B : 0));
}

/// FIPS 197, section 5.1.1. 3 generates all elements but 0, and 0xF6 is its inverse: the two walk the field
/// in opposite directions.
inline constexpr std::array<std::uint8_t, 256> aes_substitution = [] {
  std::array<std::uint8_t, 256> table{};
  std::uint8_t element = 1;
  std::uint8_t inverse = 1;
  for (int i = 0; i < 255; ++i) {
    std::uint8_t mixed = 0x63;
    for (int turn = 0; turn < 5; ++turn)
      mixed ^= std::rotl(inverse, turn);
    table[element] = mixed;
    element = static_cast<std::uint8_t>(element ^ aes_double(element));
    for (const int shift : {1, 2, 4})  // divides by 3
      inverse = static_cast<std::uint8_t>(inverse ^ (inverse << shift));
    if ((inverse & 0x80) != 0) inverse ^= 0x09;
  }
  table[0] = 0x63;
  return table;
}();

/// A column of MixColumns for a byte of the first row after its substitution. Those of the other rows are
/// this one, rotated.
inline constexpr std::array<std::uint32_t, 256> aes_columns = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::size_t i = 0; i < table.size(); ++i) {
    const std::uint8_t value = aes_substitution[i];
    const std::uint8_t doubled = aes_double(value);
    const auto tripled = static_cast<std::uint8_t>(value ^ doubled);
    table[i] = std::uint32_t{doubled} | (std::uint32_t{value} << 8) | (std::uint32_t{value} << 16) |
               (std::uint32_t{tripled} << 24);
  }
  return table;
}();

using aes_words = std::array<std::uint32_t, 4>;  // the columns of a block

[[nodiscard]] constexpr aes_words aes_words_of(const aes_block& block) noexcept {
  return {static_cast<std::uint32_t>(block.low), static_cast<std::uint32_t>(block.low >> 32),
          static_cast<std::uint32_t>(block.high), static_cast<std::uint32_t>(block.high >> 32)};
}
[[nodiscard]] constexpr aes_block aes_block_of(const aes_words& words) noexcept {
  return {words[0] | (std::uint64_t{words[1]} << 32), words[2] | (std::uint64_t{words[3]} << 32)};
}
[[nodiscard]] constexpr std::uint8_t aes_byte(std::uint32_t word, unsigned row) noexcept {
  return static_cast<std::uint8_t>(word >> (8 * row));
}

[[nodiscard]] constexpr aes_key aes_expand(const aes_block& secret) noexcept {
  aes_key key;
  aes_words words = aes_words_of(secret);
  key.of_round[0] = secret;
  std::uint8_t constant = 1;
  for (std::size_t round = 1; round <= aes_key::rounds; ++round) {
    const std::uint32_t turned = std::rotr(words[3], 8);
    std::uint32_t next = constant;
    for (unsigned row = 0; row < 4; ++row)
      next ^= std::uint32_t{aes_substitution[aes_byte(turned, row)]} << (8 * row);
    for (std::uint32_t& word : words)
      next = word ^= next;
    constant = aes_double(constant);
    key.of_round[round] = aes_block_of(words);
  }
  return key;
}

/// Column `column` after a round by table; `now` is the state before it.
[[nodiscard]] constexpr std::uint32_t aes_column(const aes_words& now, std::size_t column) noexcept {
  return aes_columns[aes_byte(now[column], 0)] ^
         std::rotl(aes_columns[aes_byte(now[(column + 1) % 4], 1)], 8) ^
         std::rotl(aes_columns[aes_byte(now[(column + 2) % 4], 2)], 16) ^
         std::rotl(aes_columns[aes_byte(now[(column + 3) % 4], 3)], 24);
}
[[nodiscard]] constexpr std::uint32_t aes_last_column(const aes_words& now, std::size_t column) noexcept {
  std::uint32_t out = 0;
  for (unsigned row = 0; row < 4; ++row)
    out |= std::uint32_t{aes_substitution[aes_byte(now[(column + row) % 4], row)]} << (8 * row);
  return out;
}

/// Encrypts a block by table. Which lines of the tables it reads depends on the key, so a process that shares
/// the caches can learn about the key from its times.
[[nodiscard]] constexpr aes_block aes_encrypt_by_table(const aes_key& key, const aes_block& block) noexcept {
  aes_words now = aes_words_of(block ^ key.of_round[0]);
  for (std::size_t round = 1; round < aes_key::rounds; ++round) {
    const aes_words sums{aes_column(now, 0), aes_column(now, 1), aes_column(now, 2), aes_column(now, 3)};
    now = aes_words_of(aes_block_of(sums) ^ key.of_round[round]);
  }
  const aes_words last{aes_last_column(now, 0), aes_last_column(now, 1), aes_last_column(now, 2),
                       aes_last_column(now, 3)};
  return aes_block_of(last) ^ key.of_round[aes_key::rounds];
}

}  // namespace detail

/// How AES is computed. All give the same bits.
enum class aes_path : std::uint8_t {
  table,              ///< on every processor
  instructions,       ///< one block an instruction: x86-64 with AES-NI, aarch64 under Linux
  wide_instructions,  ///< four blocks an instruction: x86-64 with VAES and AVX-512 F and VL
};

/// Whether this machine has it. Uses what the compiler's runtime detected at the program's start.
[[nodiscard]] inline bool has_aes_path(aes_path path) noexcept {
  if (path == aes_path::table) return true;
#if defined(__x86_64__)
  const bool narrow = __builtin_cpu_supports("aes") != 0;
  if (path == aes_path::instructions) return narrow;
  return narrow && detail::has_cpu_feature(detail::cpu_feature::vaes) &&
         __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0;
#elif defined(__aarch64__) && defined(__linux__)
  return path == aes_path::instructions && (getauxval(AT_HWCAP) & (1UL << 3)) != 0;  // HWCAP_AES
#else
  return false;
#endif
}

/// Returns the quickest path of this machine. A few nanoseconds.
[[nodiscard]] inline aes_path best_aes_path() noexcept {
  for (const aes_path path : {aes_path::wide_instructions, aes_path::instructions}) {
    if (has_aes_path(path)) return path;
  }
  return aes_path::table;
}

namespace detail {

/// Four blocks of AES.
using aes_four = std::array<aes_block, 4>;

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))
#define LLMMEM_AES_INSTRUCTIONS 1

// NOLINTNEXTLINE(modernize-use-using): `using` would lose the vector's size
typedef std::uint64_t aes_register __attribute__((vector_size(16)));

[[nodiscard]] inline aes_register aes_load(const aes_block& block) noexcept {
  return aes_register{block.low, block.high};
}
[[nodiscard]] inline aes_block aes_store(aes_register block) noexcept {
  return {block[0], block[1]};
}

/// One round, without the sum with a key that precedes the first round. In assembly, because the intrinsics
/// need a compiler option in every translation unit, or a target attribute, which nvcc does not support.
inline void aes_round(aes_register& state, const aes_register& key) noexcept {
#if defined(__x86_64__) && defined(__AVX__)
  asm("vaesenc %1, %0, %0" : "+x"(state) : "x"(key));
#elif defined(__x86_64__)
  asm("aesenc %1, %0" : "+x"(state) : "x"(key));
#else
  aes_register none{};  // the instruction adds a key before the round, and not after it
  asm(".arch_extension aes\n\taese %0.16b, %1.16b\n\taesmc %0.16b, %0.16b" : "+w"(state) : "w"(none));
  state ^= key;
#endif
}
/// The same with a key in an `aes_key`, at an address that is a multiple of 16: the instruction reads it
/// itself.
inline void aes_round(aes_register& state, const aes_block& key) noexcept {
#if defined(__x86_64__) && defined(__AVX__)
  asm("vaesenc %1, %0, %0" : "+x"(state) : "m"(key));
#elif defined(__x86_64__)
  asm("aesenc %1, %0" : "+x"(state) : "m"(key));
#else
  aes_round(state, aes_load(key));
#endif
}
inline void aes_last_round(aes_register& state, const aes_register& key) noexcept {
#if defined(__x86_64__) && defined(__AVX__)
  asm("vaesenclast %1, %0, %0" : "+x"(state) : "x"(key));
#elif defined(__x86_64__)
  asm("aesenclast %1, %0" : "+x"(state) : "x"(key));
#else
  aes_register none{};
  asm(".arch_extension aes\n\taese %0.16b, %1.16b" : "+w"(state) : "w"(none));
  state ^= key;
#endif
}

/// Encrypts one block. @pre has_aes_path(aes_path::instructions).
inline void aes_encrypt(const aes_key& key, aes_register& block) noexcept {
  block ^= aes_load(key.of_round[0]);
  for (std::size_t round = 1; round < aes_key::rounds; ++round)
    aes_round(block, key.of_round[round]);
  aes_last_round(block, aes_load(key.of_round[aes_key::rounds]));
}

/// Encrypts four blocks, and takes little longer than for one: a round takes three or four cycles, and one or
/// two can begin in each cycle. @pre has_aes_path(aes_path::instructions)
inline void aes_encrypt(const aes_key& key, aes_register& a, aes_register& b, aes_register& c,
                        aes_register& d) noexcept {
  const aes_register first = aes_load(key.of_round[0]);
  a ^= first;
  b ^= first;
  c ^= first;
  d ^= first;
  for (std::size_t round = 1; round < aes_key::rounds; ++round) {
    const aes_register of_round = aes_load(key.of_round[round]);
    aes_round(a, of_round);
    aes_round(b, of_round);
    aes_round(c, of_round);
    aes_round(d, of_round);
  }
  const aes_register last = aes_load(key.of_round[aes_key::rounds]);
  aes_last_round(a, last);
  aes_last_round(b, last);
  aes_last_round(c, last);
  aes_last_round(d, last);
}

/// Whether the compiler accepts the names of registers 16 and above: g++ only where it may use AVX-512.
#if defined(__AVX512F__) || defined(__clang__)
#define LLMMEM_AES_NAMES_WIDE_REGISTERS 1
#else
#define LLMMEM_AES_NAMES_WIDE_REGISTERS 0
#endif

/// Returns the sum of four blocks, each encrypted after its mask was added to it. The blocks are the 64 bytes
/// at `message`, at any address.
///
/// In assembly for the reason that `aes_round` gives. Registers 16 and above exist only with AVX-512, so a
/// compiler that may not use it has nothing in them, and instructions without VEX pay no transition for them.
/// Only `aes_sum_of_fours` may call it. @pre has_aes_path(aes_path::wide_instructions).
[[nodiscard]] inline aes_register aes_sum_of_four([[maybe_unused]] const aes_key& key,
                                                  [[maybe_unused]] const aes_four& masks,
                                                  [[maybe_unused]] const void* message) noexcept {
#if defined(__x86_64__)
  static_assert(aes_key::rounds == 10 && sizeof(key.of_round[0]) == 16);
  const auto& blocks = *static_cast<const std::array<std::byte, 64>*>(message);
  aes_register sum;
  asm("vmovdqu64 %[blocks], %%zmm16\n\t"
      "vbroadcasti32x4 (%[key]), %%zmm17\n\t"
      "vpternlogq $0x96, %[masks], %%zmm17, %%zmm16\n\t"  // the sum of three
#define LLMMEM_AES_WIDE_ROUND(round, at) \
  "vbroadcasti32x4 " #at "(%[key]), %%zmm17\n\t" round " %%zmm17, %%zmm16, %%zmm16\n\t"
      LLMMEM_AES_WIDE_ROUND("vaesenc", 16) LLMMEM_AES_WIDE_ROUND("vaesenc", 32)
          LLMMEM_AES_WIDE_ROUND("vaesenc", 48) LLMMEM_AES_WIDE_ROUND("vaesenc", 64)
              LLMMEM_AES_WIDE_ROUND("vaesenc", 80) LLMMEM_AES_WIDE_ROUND("vaesenc", 96)
                  LLMMEM_AES_WIDE_ROUND("vaesenc", 112) LLMMEM_AES_WIDE_ROUND("vaesenc", 128)
                      LLMMEM_AES_WIDE_ROUND("vaesenc", 144) LLMMEM_AES_WIDE_ROUND("vaesenclast", 160)
#undef LLMMEM_AES_WIDE_ROUND
                          "vextracti64x4 $1, %%zmm16, %%ymm17\n\t"
                          "vpxorq %%ymm17, %%ymm16, %%ymm16\n\t"
                          "vextracti32x4 $1, %%ymm16, %%xmm17\n\t"
                          "vpxorq %%xmm17, %%xmm16, %%xmm16\n\t"
                          "vmovdqa64 %%xmm16, %[sum]"
      : [sum] "=x"(sum)
      : [key] "r"(&key), [masks] "m"(masks), [blocks] "m"(blocks), "m"(key)
#if LLMMEM_AES_NAMES_WIDE_REGISTERS
      : "xmm16", "xmm17"
#endif
  );
  return sum;
#else
  return aes_register{};
#endif
}

/// Adds the encrypted blocks of `fours` times 64 bytes at `message` to `sum`.
#if !LLMMEM_AES_NAMES_WIDE_REGISTERS
// A caller with `target("avx512f")` may have values in these registers, and g++ accepts no clobber of them
// here. It knows nothing of what this function leaves alone, so the caller saves them.
[[gnu::noipa]]
#endif
[[nodiscard]] inline aes_register
aes_sum_of_fours(const aes_key& key, const aes_four* masks, const void* message, std::size_t fours,
                 aes_register sum) noexcept {
  for (std::size_t i = 0; i < fours; ++i)
    sum ^= aes_sum_of_four(key, masks[i], static_cast<const std::byte*>(message) + 64 * i);
  return sum;
}

/// Four messages, each the 64 bytes after those of the one before or further on: adds the sum of each
/// message's four encrypted blocks to its own of `sums`. Takes little longer than one message: the rounds of
/// one wait for each other, those of different messages do not.
///
/// In assembly, and only for `aes_sums_of_fours`, for the reasons that `aes_sum_of_four` gives.
inline void aes_sums_of_four([[maybe_unused]] const aes_key& key, [[maybe_unused]] const aes_four& masks,
                             [[maybe_unused]] const std::byte* message, [[maybe_unused]] std::size_t stride,
                             [[maybe_unused]] std::array<aes_block, 4>& sums) noexcept {
#if defined(__x86_64__)
  static_assert(aes_key::rounds == 10 && sizeof(key.of_round[0]) == 16);
  using piece = std::array<std::byte, 64>;
  const auto& first = *reinterpret_cast<const piece*>(message);
  const auto& second = *reinterpret_cast<const piece*>(message + stride);
  const auto& third = *reinterpret_cast<const piece*>(message + 2 * stride);
  const auto& fourth = *reinterpret_cast<const piece*>(message + 3 * stride);
  asm("vbroadcasti32x4 (%[key]), %%zmm20\n\t"
      "vpxorq %[masks], %%zmm20, %%zmm20\n\t"
      "vpxorq %[first], %%zmm20, %%zmm16\n\t"
      "vpxorq %[second], %%zmm20, %%zmm17\n\t"
      "vpxorq %[third], %%zmm20, %%zmm18\n\t"
      "vpxorq %[fourth], %%zmm20, %%zmm19\n\t"
#define LLMMEM_AES_WIDE_ROUND(round, at)                                                      \
  "vbroadcasti32x4 " #at "(%[key]), %%zmm20\n\t" round " %%zmm20, %%zmm16, %%zmm16\n\t" round \
  " %%zmm20, %%zmm17, %%zmm17\n\t" round " %%zmm20, %%zmm18, %%zmm18\n\t" round               \
  " %%zmm20, %%zmm19, %%zmm19\n\t"
      LLMMEM_AES_WIDE_ROUND("vaesenc", 16) LLMMEM_AES_WIDE_ROUND("vaesenc", 32)
          LLMMEM_AES_WIDE_ROUND("vaesenc", 48) LLMMEM_AES_WIDE_ROUND("vaesenc", 64)
              LLMMEM_AES_WIDE_ROUND("vaesenc", 80) LLMMEM_AES_WIDE_ROUND("vaesenc", 96)
                  LLMMEM_AES_WIDE_ROUND("vaesenc", 112) LLMMEM_AES_WIDE_ROUND("vaesenc", 128)
                      LLMMEM_AES_WIDE_ROUND("vaesenc", 144) LLMMEM_AES_WIDE_ROUND("vaesenclast", 160)
#undef LLMMEM_AES_WIDE_ROUND
#define LLMMEM_AES_ADD_TO_SUM(state, at)                                                        \
  "vextracti64x4 $1, %%zmm" #state ", %%ymm20\n\tvpxorq %%ymm20, %%ymm" #state ", %%ymm" #state \
  "\n\tvextracti32x4 $1, %%ymm" #state ", %%xmm20\n\tvpternlogq $0x96, " #at                    \
  "(%[sums]), %%xmm20, %%xmm" #state "\n\tvmovdqu64 %%xmm" #state ", " #at "(%[sums])\n\t"
                          LLMMEM_AES_ADD_TO_SUM(16, 0) LLMMEM_AES_ADD_TO_SUM(17, 16)
                              LLMMEM_AES_ADD_TO_SUM(18, 32) LLMMEM_AES_ADD_TO_SUM(19, 48)
#undef LLMMEM_AES_ADD_TO_SUM
      : "+m"(sums)
      : [key] "r"(&key), [sums] "r"(sums.data()), [masks] "m"(masks), [first] "m"(first),
        [second] "m"(second), [third] "m"(third), [fourth] "m"(fourth), "m"(key)
#if LLMMEM_AES_NAMES_WIDE_REGISTERS
      : "xmm16", "xmm17", "xmm18", "xmm19", "xmm20"
#endif
  );
#endif
}

/// The same as `aes_sum_of_fours` for four messages that follow each other.
#if !LLMMEM_AES_NAMES_WIDE_REGISTERS
[[gnu::noipa]]
#endif
inline void aes_sums_of_fours(const aes_key& key, const aes_four* masks, const void* messages,
                              std::size_t fours, std::array<aes_block, 4>& sums) noexcept {
  for (std::size_t i = 0; i < fours; ++i)
    aes_sums_of_four(key, masks[i], static_cast<const std::byte*>(messages) + 64 * i, 64 * fours, sums);
}
#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
