/// @file
/// safetensors, the file format of model weights: reads its header as untrusted input and writes it byte for
/// byte.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors_type.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A tensor to write.
struct safetensors_tensor {
  std::string name;
  safetensors_type type = safetensors_type::f32;
  std::vector<std::uint64_t> shape{};  ///< row-major; none: one element; a 0: no bytes
};

/// A tensor in a file.
struct safetensors_entry {
  std::string name;
  safetensors_type type = safetensors_type::f32;
  std::vector<std::uint64_t> shape{};
  std::uint64_t begin = 0;  ///< where its bytes begin, from the beginning of the data
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return end - begin; }
  friend bool operator==(const safetensors_entry&, const safetensors_entry&) = default;
};

/// Strings in addition to the tensors, by key.
using safetensors_metadata = std::vector<std::pair<std::string, std::string>>;

/// The contents of a file's header.
struct safetensors_header {
  std::vector<safetensors_entry> entries{};  ///< in the order of the file
  safetensors_metadata metadata{};           ///< in the header's order
  std::uint64_t data_begin = 0;              ///< where the data begins in the file: after the header
  std::uint64_t data_bytes = 0;

  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return data_begin + data_bytes; }
  friend bool operator==(const safetensors_header&, const safetensors_header&) = default;
};

/// The longest header, without its length, of the reference reader and writer.
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

/// Returns the bytes of the header of a file that begins with these bytes, its length included; read this
/// many before `read_safetensors`.
/// @param what  names the file, for error texts.
/// @throws format_error  for less than 8 bytes, and a length beyond `max_safetensors_header`.
[[nodiscard]] std::uint64_t safetensors_header_bytes(std::span<const std::byte> begin,
                                                     const std::string& what);

/// Reads a header. It treats the header as untrusted input: names and metadata must be UTF-8 and occur once;
/// types must be known; shapes, sizes and offsets must fit each other, without holes, overlaps or overflow,
/// and end where the file does. Accepts what a writer may add: white space before, in and after the JSON, and
/// unknown keys of a tensor, nested at most 32 deep.
///
/// @param begin       the file's beginning, the header's bytes at least.
/// @param file_bytes  the whole file's length.
/// @param what        names the file, for error texts.
/// @throws format_error  which names the byte of the file, or the tensor, and what is wrong with it.
/// @par Complexity   O(header), and O(n log n) for n tensors.
/// @par Source   huggingface/safetensors, README.md and `tensor.rs` at 24b0b28 (2026-05): as lenient as that
///      reader, except for keys that occur twice, of which that reader takes the last.
[[nodiscard]] safetensors_header read_safetensors(std::span<const std::byte> begin, std::uint64_t file_bytes,
                                                  const std::string& what);

/// The places of tensors in a file to write, and the bytes before them.
struct safetensors_layout {
  std::string head;             ///< the file's first bytes: length, JSON, spaces
  safetensors_header header{};  ///< the same, as it will be read

  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return header.file_bytes(); }
};

/// Lays out a file of these tensors as the reference writer does: by type, the widest first, then by name;
/// metadata first, by key.
///
/// @param data_alignment  of the data in the file, by spaces after the JSON; a multiple of 8, which is what
///                        the reference writer takes. 4096 allows direct reads of data, and mapped pages
///                        begin with it.
/// @throws argument_error  for names or metadata keys that occur twice or are not UTF-8, a tensor called
///      `__metadata__`, elements of less than a byte that do not fill whole bytes, an alignment that is not a
///      multiple of 8.
/// @throws length_error    for a shape whose bytes pass 2^63 - 1, or a header that is too long.
[[nodiscard]] safetensors_layout lay_out_safetensors(std::vector<safetensors_tensor> tensors,
                                                     safetensors_metadata metadata = {},
                                                     std::uint64_t data_alignment = 4096);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/model/detail/safetensors_body.hpp>
