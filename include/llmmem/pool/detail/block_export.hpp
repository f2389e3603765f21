/// @file
/// Memory of a node that others read without asking: its header, the index of its blocks, and the copy that
/// verifies what it reads.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/copy_crc32c.hpp>
#include <llmmem/pool/mover.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The beginning of exported memory.
struct export_header {
  static constexpr std::uint64_t right_magic = 0x6C6C'6D65'6D70'6F31;  // "llmmempo1"

  std::uint64_t magic = 0;
  std::uint64_t nonce_low = 0;  ///< of the mover that made it
  std::uint64_t nonce_high = 0;
  std::uint64_t buckets = 0;  ///< a power of two
  std::uint64_t first = 0;    ///< where the bytes of blocks begin; the index is before them
  std::uint64_t bytes = 0;    ///< of all of it
};

/// One block in the index. Its owner alone writes it; `sequence` is odd meanwhile, and never comes back.
struct export_entry {
  std::uint64_t sequence = 0;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;  ///< 0: no block
  std::uint64_t crc = 0;
  std::array<std::uint64_t, 2> unused{};

  friend constexpr bool operator==(const export_entry&, const export_entry&) noexcept = default;
};
static_assert(sizeof(export_entry) == 64 && std::is_trivially_copyable_v<export_entry>);

inline constexpr std::size_t bucket_entries = 8;
using export_bucket = std::array<export_entry, bucket_entries>;
inline constexpr std::uint64_t export_index_at = 4096;

/// Where the parts of exported memory are.
struct export_shape {
  std::uint64_t buckets = 0;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;

  /// Returns the shape for an index of `blocks` blocks at least, and `bytes` of them.
  /// @pre  both are below 2^56
  [[nodiscard]] static constexpr export_shape of(std::uint64_t blocks, std::uint64_t bytes) noexcept {
    // At most four blocks a bucket on average: the fuller of two is never chosen, so that none overflows.
    const std::uint64_t buckets = std::bit_ceil((blocks + 3) / 4);
    const std::uint64_t end = export_index_at + buckets * sizeof(export_bucket);
    constexpr std::uint64_t page = 65536;  // no smaller than any system's
    const std::uint64_t first = (end + page - 1) / page * page;
    return {.buckets = buckets, .first = first, .bytes = first + (bytes + page - 1) / page * page};
  }
  /// Reads another node's header: hostile input.
  /// @param bytes  of the memory that can be read
  [[nodiscard]] static constexpr bool is_right(const export_header& header, std::uint64_t bytes) noexcept {
    if (header.magic != export_header::right_magic || header.bytes != bytes) return false;
    if (!std::has_single_bit(header.buckets) || bytes < export_index_at) return false;
    if (header.buckets > (bytes - export_index_at) / sizeof(export_bucket)) return false;
    return header.first >= export_index_at + header.buckets * sizeof(export_bucket) && header.first <= bytes;
  }
  /// Returns where one of the two buckets is that may have a block.
  [[nodiscard]] constexpr std::uint64_t bucket_at(const block_key& name, std::size_t choice) const noexcept {
    return export_index_at + ((choice == 0 ? name.low : name.high) & (buckets - 1)) * sizeof(export_bucket);
  }
  /// Whether an entry is about a block of `wanted` bytes within the memory.
  [[nodiscard]] constexpr bool is_right(const export_entry& entry, std::uint64_t wanted) const noexcept {
    return entry.bytes == wanted && entry.at >= first && entry.at <= bytes && wanted <= bytes - entry.at;
  }
};

/// Memory of another process: each word is read whole, in an order that the owner's stores agree with.
[[nodiscard]] inline std::uint64_t load_word(const std::uint64_t& from) noexcept {
  return __atomic_load_n(&from, __ATOMIC_ACQUIRE);
}
inline void store_word(std::uint64_t& into, std::uint64_t value) noexcept {
  __atomic_store_n(&into, value, __ATOMIC_RELEASE);
}

/// The owner's side of an index.
class export_index {
 public:
  export_index() noexcept = default;
  /// Writes a header, and an empty index. @param base  zeroed memory of `shape.bytes`
  export_index(std::byte* base, const export_shape& shape, std::uint64_t nonce_low,
               std::uint64_t nonce_high) noexcept
      : base_(base), shape_(shape) {
    const export_header header{.magic = export_header::right_magic,
                               .nonce_low = nonce_low,
                               .nonce_high = nonce_high,
                               .buckets = shape.buckets,
                               .first = shape.first,
                               .bytes = shape.bytes};
    std::memcpy(base, &header, sizeof(header));
  }

  [[nodiscard]] bool holds(std::span<const std::byte> bytes) const noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    const auto first = reinterpret_cast<std::uintptr_t>(base_) + shape_.first;
    const auto end = reinterpret_cast<std::uintptr_t>(base_) + shape_.bytes;
    return begin >= first && begin <= end && bytes.size() <= end - begin;
  }
  [[nodiscard]] bool has(const block_key& name) const noexcept { return find(name) != nullptr; }
  /// @param crc  CRC-32C of the block
  /// @pre `holds(bytes)`
  void put(const block_key& name, std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
    export_entry* into = find(name);
    if (into == nullptr) {
      export_entry* const first = bucket_of(name, 0);
      export_entry* const second = bucket_of(name, 1);
      export_entry* const bucket = used(second) < used(first) ? second : first;
      for (std::size_t i = 0; into == nullptr && i < bucket_entries; ++i)
        into = bucket[i].bytes == 0 ? &bucket[i] : nullptr;
      if (into == nullptr) into = &bucket[turn_++ % bucket_entries];
    }
    begin_change(*into);
    store_word(into->low, name.low);
    store_word(into->high, name.high);
    store_word(into->at, static_cast<std::uint64_t>(bytes.data() - base_));
    store_word(into->bytes, bytes.size());
    store_word(into->crc, crc);
    store_word(into->sequence, into->sequence + 1);
  }
  void remove(const block_key& name) noexcept {
    if (export_entry* const found = find(name)) clear(*found);
  }
  void clear() noexcept {
    if (base_ == nullptr) return;
    auto* const all = entries();
    for (std::uint64_t i = 0; i < shape_.buckets * bucket_entries; ++i) {
      if (all[i].bytes != 0) clear(all[i]);
    }
  }

 private:
  [[nodiscard]] export_entry* entries() const noexcept {
    return reinterpret_cast<export_entry*>(base_ + export_index_at);
  }
  [[nodiscard]] export_entry* bucket_of(const block_key& name, std::size_t choice) const noexcept {
    return reinterpret_cast<export_entry*>(base_ + shape_.bucket_at(name, choice));
  }
  [[nodiscard]] static std::size_t used(const export_entry* bucket) noexcept {
    std::size_t count = 0;
    for (std::size_t i = 0; i < bucket_entries; ++i)
      count += bucket[i].bytes != 0 ? 1U : 0U;
    return count;
  }
  [[nodiscard]] export_entry* find(const block_key& name) const noexcept {
    for (std::size_t choice = 0; choice < 2; ++choice) {
      export_entry* const bucket = bucket_of(name, choice);
      for (std::size_t i = 0; i < bucket_entries; ++i) {
        if (bucket[i].bytes != 0 && bucket[i].low == name.low && bucket[i].high == name.high)
          return &bucket[i];
      }
    }
    return nullptr;
  }
  /// What the caller writes after it, also to the block, is seen after the odd number.
  static void begin_change(export_entry& entry) noexcept {
    store_word(entry.sequence, entry.sequence + 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }
  static void clear(export_entry& entry) noexcept {
    begin_change(entry);
    store_word(entry.bytes, 0);
    store_word(entry.sequence, entry.sequence + 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }

  std::byte* base_ = nullptr;
  export_shape shape_{};
  std::size_t turn_ = 0;
};

/// Copies an entry that its owner may be changing. Returns whether the copy is one state of it.
[[nodiscard]] inline bool copy_entry(const export_entry& from, export_entry& into) noexcept {
  into.sequence = load_word(from.sequence);
  into.low = load_word(from.low);
  into.high = load_word(from.high);
  into.at = load_word(from.at);
  into.bytes = load_word(from.bytes);
  into.crc = load_word(from.crc);
  return into.sequence % 2 == 0 && load_word(from.sequence) == into.sequence;
}

/// Copies a block from another node's memory, which this process has mapped, and verifies it. `after_copy` is
/// called between the copy and the second look at the index: for tests.
template <class F>
[[nodiscard]] pool::moved copy_exported(const std::byte* base, const export_shape& shape,
                                        const block_key& name, std::span<std::byte> into,
                                        F&& after_copy) noexcept {
  for (std::size_t i = 0; i < 2 * bucket_entries; ++i) {
    const std::uint64_t bucket = shape.bucket_at(name, i / bucket_entries);
    const auto& seen = reinterpret_cast<const export_entry*>(base + bucket)[i % bucket_entries];
    if (load_word(seen.low) != name.low) continue;
    export_entry entry;
    if (!copy_entry(seen, entry) || entry.bytes == 0) continue;
    if (entry.low != name.low || entry.high != name.high) continue;
    if (!shape.is_right(entry, into.size())) return pool::moved::changed;
    const std::uint32_t crc = copy_crc32c(0, {base + entry.at, into.size()}, into);
    after_copy();
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (load_word(seen.sequence) != entry.sequence) return pool::moved::changed;
    return crc == entry.crc ? pool::moved::here : pool::moved::damaged;
  }
  return pool::moved::absent;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
