/// @file
/// Sums of a few elements of each rank: lists of indices and values, gathered to all ranks and added.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The form of a list's values. Its indices have 4 bytes each.
enum class sparse_values : std::uint8_t {
  f32,   ///< exactly: 8 bytes an element with its index
  bf16,  ///< rounded to bfloat16: 6 bytes an element with its index
};

/// Returns the bytes of a list of `count` elements. @pre `count` is below 2^32
[[nodiscard]] constexpr std::uint64_t sparse_list_bytes(std::uint64_t count, sparse_values form) noexcept {
  return count * (form == sparse_values::f32 ? 8U : 6U);
}

/// A list of elements, as it is sent: all indices, then all values. A view of its bytes, at any alignment.
class sparse_list {
 public:
  /// @param bytes  `sparse_list_bytes(count, form)`.
  sparse_list(std::byte* bytes, std::uint64_t count, sparse_values form) noexcept
      : bytes_(bytes), count_(count), form_(form) {}

  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  /// Return the index, or the value, of element `i` of the list. @pre i < count()
  /// @{
  [[nodiscard]] std::uint32_t index(std::uint64_t i) const noexcept { return load<std::uint32_t>(4 * i); }
  [[nodiscard]] float value(std::uint64_t i) const noexcept {
    if (form_ == sparse_values::f32) return load<float>(4 * count_ + 4 * i);
    return std::bit_cast<float>(f32_from_bf16_bits(load<std::uint16_t>(4 * count_ + 2 * i)));
  }
  /// @}
  /// Writes element `i`, rounded to the list's form. @pre i < count()
  void set(std::uint64_t i, std::uint32_t index, float value) noexcept {
    store(4 * i, index);
    if (form_ == sparse_values::f32) return store(4 * count_ + 4 * i, value);
    store(4 * count_ + 2 * i, bf16_from_f32_bits(std::bit_cast<std::uint32_t>(value)));
  }

 private:
  template <class V>
  [[nodiscard]] V load(std::uint64_t at) const noexcept {
    V value;
    std::memcpy(&value, bytes_ + at, sizeof(V));
    return value;
  }
  template <class V>
  void store(std::uint64_t at, V value) noexcept {
    std::memcpy(bytes_ + at, &value, sizeof(V));
  }

  std::byte* bytes_;
  std::uint64_t count_;
  sparse_values form_;
};

/// Returns the bytes of the lists of all ranks.
/// @throws length_error  past 2^63 - 1.
[[nodiscard]] inline std::uint64_t sparse_scratch_bytes(std::uint64_t count, rank_count world,
                                                        sparse_values form) {
  return checked_multiply(sparse_list_bytes(count, form), to_number(world), "sparse_all_reduce: bytes");
}

/// Returns the bytes that each rank sends in `sparse_all_reduce`: its list, to each other rank.
/// @throws length_error  past 2^63 - 1.
[[nodiscard]] inline std::uint64_t sparse_sent_bytes(std::uint64_t count, rank_count world,
                                                     sparse_values form) {
  return checked_multiply(sparse_list_bytes(count, form), to_number(world) - 1, "sparse_all_reduce: bytes");
}

/// Returns this rank's list among those of all ranks, to be filled.
/// @param lists  `sparse_scratch_bytes(count, world, form)`; list r is rank r's.
template <transport T>
[[nodiscard]] sparse_list own_sparse_list(const T& ranks, std::span<std::byte> lists, std::uint64_t count,
                                          sparse_values form) noexcept {
  return {lists.data() + to_index(ranks.rank()) * sparse_list_bytes(count, form), count, form};
}

namespace detail {

/// Adds the zeros of a rank's filled list to what rank 0 sent, so that a -0 stays only where all have one.
inline void add_missing_zeros(std::span<float> sum, const sparse_list& first,
                              const sparse_list& other) noexcept {
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < first.count(); ++i) {
    const std::uint32_t index = first.index(i);
    while (at < other.count() && other.index(at) < index)
      ++at;
    if (at == other.count() || other.index(at) != index) sum[index] += 0.0F;
  }
}

/// Checks that a list's indices ascend, and are below `elements`.
[[nodiscard]] inline result<void> check_sparse_list(const sparse_list& list, std::uint32_t rank,
                                                    std::uint64_t elements) {
  constexpr const char* where = "sparse_all_reduce";
  for (std::uint64_t i = 0; i < list.count(); ++i) {
    const std::uint32_t index = list.index(i);
    if (index >= elements) return failure{errc::sparse_index_beyond, rank, elements, index, where};
    if (i != 0 && index <= list.index(i - 1))
      return failure{errc::sparse_indices_unordered, rank, list.index(i - 1), index, where};
  }
  return {};
}

}  // namespace detail

/// Sums a few elements of each rank: `sum` becomes the sum of all ranks' lists, and 0 where no rank has an
/// element. All ranks get the same bits: those of the dense sum, in the order of ranks, of the lists filled
/// up with zeros. Each rank adds what the list restores, its own too.
///
/// All ranks make the same call with the same number of elements, count and form; ranks with another one find
/// a failure where the lengths of messages differ. (f32 lists of 3 elements and bf16 lists of 4 have equal
/// lengths.)
///
/// @param lists  `sparse_scratch_bytes(count, world, form)` bytes, with this rank's list at
///               `own_sparse_list`; its indices ascend. Afterwards: the lists of all ranks.
/// @par Complexity      O(elements + count x world). Sends `sparse_sent_bytes`, directly or around a ring
///                      (`call.algorithm`), in pieces of `call.segment_bytes`.
/// @par Thread safety   as the transport.
/// @par Errors          those of the transport. `errc::size_mismatch` for lists of another length, and
///                      `errc::out_of_range` for more than 2^32 elements, or a count above them: nothing was
///                      sent then. `errc::sparse_index_beyond` and `errc::sparse_indices_unordered` name the
///                      rank whose list is wrong: nothing was sent if it is this one, and otherwise the
///                      transport is revoked. After a failure, `sum` is undefined after the transport's own
///                      failures, and unchanged after all others.
/// @par Source          the gathered lists of Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv
///                      1712.01887).
template <transport T>
result<void> sparse_all_reduce(T& ranks, std::span<float> sum, std::uint64_t count, sparse_values form,
                               std::span<std::byte> lists, const collective_call& call) {
  constexpr const char* where = "sparse_all_reduce";
  constexpr std::uint64_t most = std::uint64_t{1} << 32U;
  if (sum.size() > most) return failure{errc::out_of_range, 0, sum.size(), most, where};
  if (count > sum.size()) return failure{errc::out_of_range, 0, count, sum.size(), where};
  const std::uint32_t world = to_number(ranks.world());
  const std::uint64_t each = sparse_list_bytes(count, form);
  if (lists.size() / world != each || lists.size() % world != 0)
    return failure{errc::size_mismatch, 0, each * world, lists.size(), where};
  const std::uint32_t self = to_index(ranks.rank());
  const auto list = [&](std::uint32_t rank) { return sparse_list(lists.data() + rank * each, count, form); };
  if (const auto good = detail::check_sparse_list(list(self), self, sum.size()); !good) return good;
  if (count != 0) {
    std::vector<std::uint64_t> blocks(std::size_t{world} + 1);
    for (std::uint32_t rank = 0; rank < world; ++rank)
      blocks[rank + 1] = blocks[rank] + each;
    if (const auto done = all_gather(ranks, lists, blocks, call); !done) return done;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if (const auto good = detail::check_sparse_list(list(rank), rank, sum.size()); !good) {
        ranks.revoke();
        return good;
      }
    }
  }
  std::ranges::fill(sum, 0.0F);
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const sparse_list from = list(rank);
    for (std::uint64_t i = 0; i < count; ++i) {
      float& into = sum[from.index(i)];
      into = rank == 0 ? from.value(i) : into + from.value(i);  // -0 stays
    }
    if (rank != 0) detail::add_missing_zeros(sum, list(0), from);
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
