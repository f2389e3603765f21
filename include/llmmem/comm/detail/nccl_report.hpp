/// @file
/// The failures of an `nccl_transport`. Private to comm/.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <cstdint>
#include <cstdio>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Makes failures that name their transport. They own their texts.
///
/// @par Complexity      O(1), without allocation.
/// @par Thread safety   const throughout.
class nccl_report {
 public:
  /// @param name  outlives the report.
  explicit nccl_report(const char* name) noexcept : name_(name) {}

  [[nodiscard]] const char* name() const noexcept { return name_; }

  [[nodiscard]] failure refuse(error_code code, rank_id rank, std::uint64_t wanted,
                               std::uint64_t found) const noexcept {
    return {.code = code, .index = to_index(rank), .wanted = wanted, .found = found, .where = name_};
  }
  /// Returns the failure for sizes that do not match.
  [[nodiscard]] failure misfit(std::uint64_t wanted, std::uint64_t found) const noexcept {
    return refuse(errc::size_mismatch, rank_id{0}, wanted, found);
  }
  /// Returns the failure of `call` of a library with `status`, described by `text`.
  [[nodiscard]] failure trouble(const char* call, const char* text, int status) const noexcept {
    std::array<char, 256> whole{};
    static_cast<void>(std::snprintf(whole.data(), whole.size(), "%s: %s: %s", name_, call, text));
    return {.code = errc::library_failed, .index = static_cast<std::uint32_t>(status), .where = whole.data()};
  }

 private:
  const char* name_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
