/// @file
/// `tensor_table`: which tensors rest in which chunks of a tier, and which of them have contents, in a file
/// that is replaced as a whole.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/tensor_names.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What a set of tensors is.
struct tensor_table {
  chunk_key file_id{};                      ///< of the tier's file (`persistent_file_space::file_id`)
  std::vector<std::string> names{};         ///< by tensor
  std::vector<std::uint32_t> first_part{};  ///< by tensor, and one more
  std::vector<tensor_part> parts{};         ///< of all tensors
  std::vector<std::uint8_t> filled{};       ///< by part: 1 where it has contents

  /// A table of these, without contents. @pre as many names as tensors.
  [[nodiscard]] static tensor_table of(const chunk_key& file_id, const tensor_names& names,
                                       const chunk_mapping& mapping);
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(names.size()); }
  [[nodiscard]] std::uint64_t bytes(std::uint32_t tensor) const noexcept {
    const tensor_part& last = parts[first_part[tensor + 1] - 1];
    return last.begin + last.bytes;
  }
};

/// Where two tables differ first in names, sizes or places, for an error text: what `now` has, and what
/// `kept` had. Empty when they do not.
[[nodiscard]] std::string first_difference(const tensor_table& kept, const tensor_table& now);

namespace tiering {

/// What was found where a table was to be.
enum class table_state : std::uint8_t {
  absent,   ///< no file
  damaged,  ///< its checksum differs, or it ends early
  read,     ///< a table
};

}  // namespace tiering

using table_state [[deprecated("its name is tiering::table_state")]] = tiering::table_state;

/// The table in a file. Bytes that come from there are held to a CRC-32C, and to what a table can be.
/// @throws io_error  when the file cannot be read, is another kind of file, or of another version.
[[nodiscard]] tiering::table_state read_tensor_table(const std::string& path, tensor_table& into);

/// Puts the table in place of the file's, and returns once that is on the device. Whoever reads the file, at
/// any time and after any crash, finds the one or the other. `errc::not_opened`, `errc::write_failed` and
/// `errc::sync_failed`; but for the last, the file is then as it was.
result<void> write_tensor_table(const std::string& path, const tensor_table& table);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/tensor_table_body.hpp>
