/// @file
/// Every codec there is, and chunks for them.
#pragma once

#include <llmmem/codec/bf16_cast.hpp>
#include <llmmem/codec/block_int.hpp>
#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/codec/huffman_plane.hpp>
#include <llmmem/codec/identity.hpp>
#ifdef LLMMEM_TESTS_ZSTD
#include <llmmem/codec/zstd_plane.hpp>
#endif

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <tuple>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

#ifdef LLMMEM_TESTS_ZSTD
#define LLMMEM_TESTS_ZSTD_CODECS                                  \
  , llmmem::byte_plane<llmmem::dtype::bf16, llmmem::zstd_plane>,  \
      llmmem::byte_plane<llmmem::dtype::f16, llmmem::zstd_plane>, \
      llmmem::byte_plane<llmmem::dtype::f32, llmmem::zstd_plane>
#else
#define LLMMEM_TESTS_ZSTD_CODECS
#endif

/// For TEST_CASE_TEMPLATE.
#define LLMMEM_TESTS_CODECS                                                           \
  llmmem::identity_codec, llmmem::bf16_cast, llmmem::byte_plane<llmmem::dtype::bf16>, \
      llmmem::byte_plane<llmmem::dtype::f16>, llmmem::block_int<4>,                   \
      llmmem::byte_plane<llmmem::dtype::f32> LLMMEM_TESTS_ZSTD_CODECS

using byte_string = std::vector<std::byte>;

/// What `encode` writes, in a vector of exactly that size.
template <llmmem::codec Codec>
[[nodiscard]] byte_string encoded(Codec& object, std::span<const std::byte> chunk) {
  byte_string all(Codec::worst_case_bytes(chunk.size()));
  all.resize(object.encode(chunk, all).value());
  all.shrink_to_fit();  // so that the address sanitizer sees a byte read behind it
  return all;
}

/// What `decode` makes of it.
template <llmmem::codec Codec>
[[nodiscard]] byte_string decoded(Codec& object, std::span<const std::byte> form, std::size_t chunk_bytes) {
  byte_string all(chunk_bytes);
  object.decode(form, all).value();
  return all;
}

/// A copy of bytes that ends where a page does, before one that nobody may read: a read past the end ends the
/// program, with or without a sanitizer.
class fenced_bytes {
 public:
  explicit fenced_bytes(std::span<const std::byte> of) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    readable_ = (of.size() + page - 1) / page * page;
    mapped_ = readable_ + page;
    void* const memory = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(memory);
    if (::mprotect(memory_ + readable_, page, PROT_NONE) != 0) throw std::bad_alloc();
    size_ = of.size();
    if (!of.empty()) std::memcpy(memory_ + readable_ - size_, of.data(), size_);
  }
  fenced_bytes(const fenced_bytes&) = delete;
  fenced_bytes& operator=(const fenced_bytes&) = delete;
  ~fenced_bytes() { ::munmap(memory_, mapped_); }

  operator std::span<const std::byte>() const { return {memory_ + readable_ - size_, size_}; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t readable_ = 0;
  std::size_t mapped_ = 0;
  std::size_t size_ = 0;
};

/// What chunks are filled with.
enum class filling : std::uint8_t { zeros, noise, bell_f32, bell_bf16, few_values, ramp };
inline constexpr std::array fillings{filling::zeros,     filling::noise,      filling::bell_f32,
                                     filling::bell_bf16, filling::few_values, filling::ramp};

/// A float with about the distribution of a trained weight: a sum of twelve even numbers, less their mean.
[[nodiscard]] inline float bell(random_numbers& random) noexcept {
  std::int64_t sum = 0;
  for (int i = 0; i < 12; ++i)
    sum += static_cast<std::int64_t>(random.next() >> 40);
  return static_cast<float>(sum - (std::int64_t{12} << 23)) * 0x1p-24F * 0.02F;
}

[[nodiscard]] inline byte_string chunk_of(filling how, std::size_t size, random_numbers& random) {
  byte_string all(size);
  const auto repeat = [&](auto make) {
    for (std::size_t i = 0; i < size;) {
      const auto value = make(i);
      const std::size_t part = std::min(sizeof(value), size - i);
      std::memcpy(all.data() + i, &value, part);
      i += part;
    }
  };
  const std::uint64_t values = 2 + random.below(std::uint64_t{20});
  switch (how) {
    case filling::zeros:
      break;
    case filling::noise:
      repeat([&](std::size_t) { return random.next(); });
      break;
    case filling::bell_f32:
      repeat([&](std::size_t) { return bell(random); });
      break;
    case filling::bell_bf16:
      repeat([&](std::size_t) {
        return llmmem::bf16_from_f32_bits(std::bit_cast<std::uint32_t>(bell(random)));
      });
      break;
    case filling::few_values:  // the first as often as all others together, and so on: the longest codes
      repeat([&](std::size_t) {
        const auto zeros =
            static_cast<std::uint64_t>(std::countr_zero(random.next() | std::uint64_t{1} << 63));
        return static_cast<std::uint8_t>(std::min(zeros, values) * 11);
      });
      break;
    case filling::ramp:
      repeat([&](std::size_t i) { return static_cast<std::uint8_t>(i); });
      break;
  }
  return all;
}

}  // namespace llmmem_tests
