/// @file
/// Which bytes of which chunk each tensor has: small tensors share a chunk, large ones take several.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {
class chunk_mapper;
}  // namespace detail

/// The index of a tensor, from 0.
enum class tensor_id : std::uint32_t {};

/// The number in a strong type, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(tensor_id tensor) noexcept {
  return static_cast<std::uint32_t>(tensor);
}

/// The properties of a tensor that a mapping needs.
struct tensor_size {
  std::uint64_t bytes = 0;        ///< at least 1
  std::uint64_t alignment = 256;  ///< of its first byte within the chunk; a power of two
  /// Only tensors of one set share a chunk, such as those of a layer or of a kind of state.
  std::uint32_t set = 0;
};

/// The bytes of a tensor in one chunk.
struct tensor_part {
  chunk_id chunk{};
  std::uint64_t offset = 0;  ///< in the chunk
  std::uint64_t begin = 0;   ///< in the tensor
  std::uint64_t bytes = 0;

  friend constexpr bool operator==(const tensor_part&, const tensor_part&) noexcept = default;
};

/// Limits of the chunks that a mapping makes.
struct chunk_mapping_options {
  std::uint64_t group_bytes = 1 << 20;  ///< most bytes of a shared chunk; 0: no chunk is shared
  std::uint64_t split_bytes = 8 << 20;  ///< most bytes of any chunk
  /// Every chunk is a multiple of this, and so is every part except a tensor's last one.
  std::uint64_t unit = 4096;
};

/// Tensors in chunks: a *chunk-tensor mapping*. Made by `map_to_chunks`; never changes.
///
/// @par Complexity      every call O(1).
/// @par Thread safety   const throughout.
class chunk_mapping {
 public:
  [[nodiscard]] std::uint32_t tensors() const noexcept {
    return static_cast<std::uint32_t>(first_part_.size() - 1);
  }
  /// Bytes of each chunk, in the order in which the tensors first need them.
  [[nodiscard]] std::span<const std::uint64_t> chunks() const noexcept { return chunks_; }
  /// Returns where a tensor is: one part, or several, each alone in its chunk. @pre the mapping has that
  /// tensor.
  [[nodiscard]] std::span<const tensor_part> parts(tensor_id tensor) const noexcept {
    const std::uint32_t first = first_part_[to_index(tensor)];
    return std::span(parts_).subspan(first, first_part_[to_index(tensor) + 1] - first);
  }
  /// Returns the parts of all tensors, one tensor after another; `first_part` is where those of a tensor
  /// begin.
  [[nodiscard]] std::span<const tensor_part> parts() const noexcept { return parts_; }
  [[nodiscard]] std::uint32_t first_part(tensor_id tensor) const noexcept {
    return first_part_[to_index(tensor)];
  }
  [[nodiscard]] std::uint64_t bytes(tensor_id tensor) const noexcept {
    const tensor_part& last = parts_[first_part_[to_index(tensor) + 1] - 1];
    return last.begin + last.bytes;
  }
  /// Returns how many tensors a chunk holds.
  [[nodiscard]] std::uint32_t sharers(chunk_id chunk) const noexcept { return sharers_[to_index(chunk)]; }
  /// Bytes of all tensors, and bytes of all chunks in addition to these.
  [[nodiscard]] std::uint64_t tensor_bytes() const noexcept { return tensor_bytes_; }
  [[nodiscard]] std::uint64_t padding_bytes() const noexcept { return padding_bytes_; }
  [[nodiscard]] std::size_t memory_bytes() const noexcept {
    return chunks_.capacity() * sizeof(std::uint64_t) + parts_.capacity() * sizeof(tensor_part) +
           (first_part_.capacity() + sharers_.capacity()) * sizeof(std::uint32_t);
  }

 private:
  friend class detail::chunk_mapper;
  chunk_mapping() = default;

  std::vector<std::uint64_t> chunks_;
  std::vector<std::uint32_t> sharers_;  // by chunk
  std::vector<tensor_part> parts_;
  std::vector<std::uint32_t> first_part_;  // by tensor, and one more
  std::uint64_t tensor_bytes_ = 0;
  std::uint64_t padding_bytes_ = 0;
};

/// Maps tensors, in the order in which they are used, to chunks of a size that moves well.
///
///     const chunk_mapping mapping = map_to_chunks(sizes, {.group_bytes = 1 << 20, .split_bytes = 8 << 20});
///
/// - A tensor of more than `split_bytes` becomes the fewest chunks that can hold it, all of one size except
///   the last, which may be smaller.
/// - A tensor of at most `group_bytes` follows the previous one of its set in the same chunk if that has
///   space, and otherwise opens the set's next chunk. Larger tensors between them make no difference: the
///   biases of a layer share a chunk although a matrix follows each.
/// - Any other tensor is alone in a chunk.
///
/// **Waste.** In addition to the tensors' own bytes, each chunk has less than `unit` bytes of padding, and
/// each tensor after the first of its chunk has less than its alignment. Of two consecutive shared chunks of
/// a set, the tensors of the first and the first tensor of the second together exceed `group_bytes`. A set
/// therefore has fewer than 1 + 2 P / `group_bytes` shared chunks, where P is the bytes and alignments of its
/// small tensors.
///
/// Appending tensors to a chunk until one does not fit is PatrickStar's mapping (Fang et al., "Parallel
/// Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", IEEE TPDS 2023), whose chunks
/// are all of one size and hold at most one tensor each; its lists of chunks by kind of state are sets here.
/// A part may begin in the middle of a tensor's row, as in ZeRO's flat partitions (Rajbhandari et al., SC
/// 2020).
///
/// @par Complexity   O(tensors log sets + chunks + sets^2), the last term with one move of a word each.
/// @throws argument_error  for an impossible option or tensor, which the text names.
/// @throws length_error    past 2^63 - 1 bytes, or 2^32 - 1 tensors or parts.
[[nodiscard]] chunk_mapping map_to_chunks(std::span<const tensor_size> tensors,
                                          const chunk_mapping_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/chunk_mapping_body.hpp>
