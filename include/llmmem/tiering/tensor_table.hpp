/// @file
/// `tensor_table`: which tensors are stored in which chunks of a tier, and which of them have contents, in a
/// file that is replaced as a whole.
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

/// The contents of a set of tensors.
struct tensor_table {
  chunk_key file_id{};                      ///< of the tier's file (`persistent_file_space::file_id`)
  std::vector<std::string> names{};         ///< by tensor
  std::vector<std::uint32_t> first_part{};  ///< by tensor, and one entry in addition
  std::vector<tensor_part> parts{};         ///< of all tensors
  std::vector<std::uint8_t> filled{};       ///< by part: 1 if it has contents

  /// Returns a table of these tensors, without contents. @pre there are as many names as tensors.
  [[nodiscard]] static tensor_table of(const chunk_key& file_id, const tensor_names& names,
                                       const chunk_mapping& mapping);
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(names.size()); }
  [[nodiscard]] std::uint64_t bytes(std::uint32_t tensor) const noexcept {
    const tensor_part& last = parts[first_part[tensor + 1] - 1];
    return last.begin + last.bytes;
  }
};

/// Returns the first difference of two tables in names, sizes or places, for an error text: the value of
/// `now` and that of `kept`. Empty if they are equal.
[[nodiscard]] std::string first_difference(const tensor_table& kept, const tensor_table& now);

namespace tiering {

/// What a read found at the path of a table.
enum class table_state : std::uint8_t {
  absent,   ///< no file
  damaged,  ///< its checksum differs, or it ends early
  read,     ///< a table
};

}  // namespace tiering

using table_state [[deprecated("its name is tiering::table_state")]] = tiering::table_state;

/// Reads the table in a file. The bytes must match their CRC-32C and describe a possible table.
/// @throws io_error  if the file cannot be read, is another kind of file, or has another version.
[[nodiscard]] tiering::table_state read_tensor_table(const std::string& path, tensor_table& into);

/// Replaces the file's table, and returns when the new one is on the device. A reader of the file, at any
/// time and after any crash, finds one of the two tables. `errc::not_opened`, `errc::write_failed` and
/// `errc::sync_failed`; except for the last, the file is then as it was.
result<void> write_tensor_table(const std::string& path, const tensor_table& table);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/tensor_table_body.hpp>
