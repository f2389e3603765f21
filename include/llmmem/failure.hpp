/// @file
/// `failure`: why an operation was refused, and how much was lacking. Also defines error codes.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

struct failure;

/// The exception that a refusal raises.
enum class error_kind : std::uint8_t {
  argument,       ///< `argument_error`
  out_of_memory,  ///< `out_of_memory`: a shortage
  handle,         ///< `handle_error`: handles and dead ranges
  length,         ///< `length_error`: an empty request, or an impossible size
  io,             ///< `io_error`: files, transfers and devices
  comm            ///< `comm_error`: ranks
};

/// The description of a code. Each room has a table of its own, `<llmmem/<room>/errors.hpp>`. An engine may
/// have one too, for its own spaces, queues or policies, with numbers from `error_code::first_of_users` on.
struct error_info {
  std::uint8_t number = 0;  ///< recorded in journals: it never changes, and is unique
  const char* name = "";
  error_kind raises = error_kind::argument;
  const char* index = "";   ///< the meaning of `failure::index`; empty: none
  const char* wanted = "";  ///< the meaning of `failure::wanted`
  const char* found = "";   ///< the meaning of `failure::found`
  /// The text after the name of the refusing object: `{index}`, `{wanted}` and `{found}` are numbers.
  const char* sentence = "";
  const char* (*sentence_for)(const failure&) noexcept = nullptr;   ///< replaces `sentence` if the text
                                                                    ///< depends on the numbers
  std::string (*term)(const failure&, std::string_view) = nullptr;  ///< text for other names in braces
};

/// Why an operation was refused: one of the constants of `llmmem::errc`. The object that refused is
/// unchanged.
///
/// Codes are equal when their numbers are. Use `number()` in `switch`, also for the constants.
class error_code {
 public:
  /// Numbers from here on belong to users.
  static constexpr std::uint8_t first_of_users = 128;

  constexpr error_code() noexcept = default;  ///< `errc::ok`
  /// @pre `info` lives as long as the program, and its number is not 0.
  constexpr explicit error_code(const error_info& info) noexcept : info_(&info) {}
  explicit error_code(const error_info&& info) = delete;

  [[nodiscard]] constexpr std::uint8_t number() const noexcept {
    return info_ == nullptr ? std::uint8_t{0} : info_->number;
  }
  [[nodiscard]] constexpr const char* name() const noexcept { return info_ == nullptr ? "ok" : info_->name; }
  /// Returns the description of the code; null for `errc::ok`.
  [[nodiscard]] constexpr const error_info* info() const noexcept { return info_; }

  friend constexpr bool operator==(error_code a, error_code b) noexcept {
    if (a.info_ == nullptr || b.info_ == nullptr) return a.info_ == b.info_;
    return a.info_->number == b.info_->number;
  }

 private:
  const error_info* info_ = nullptr;
};

/// The codes. Each room declares its own.
namespace errc {

/// No failure.
inline constexpr error_code ok{};

}  // namespace errc

/// The highest number of the library's own codes: readers check stored numbers against it.
inline constexpr std::uint8_t last_error_number = 115;

namespace detail {

/// Returns the code with that number in a room's table.
template <std::uint8_t Number, class Table>
[[nodiscard]] consteval error_code code_of(const Table& table) {
  for (const error_info& each : table) {
    if (each.number == Number) return error_code(each);
  }
  throw "the table has no code with that number";
}

}  // namespace detail

/// The name of the object that refused, or the path of its file: a copy, so that it outlives the object.
///
/// A name of more than `max_size` bytes is shortened when it is copied: its first third, `...`, and its end
/// remain; of a path, that is the first folder and the file.
///
/// @par Complexity   an empty name writes one byte, any other as many as it has; never allocates.
class failure_name {
 public:
  /// The bytes of a name that are kept, without the terminating zero.
  static constexpr std::size_t max_size = 95;

  constexpr failure_name() noexcept : kept_(nothing()) {}
  constexpr failure_name(const char* name) noexcept
      : kept_(copy_of(name == nullptr ? std::string_view() : std::string_view(name))) {}
  constexpr failure_name(const std::string& name) noexcept : kept_(copy_of(name)) {}
  constexpr failure_name(std::string_view name) noexcept : kept_(copy_of(name)) {}

  [[nodiscard]] constexpr bool empty() const noexcept { return kept_.text[0] == '\0'; }
  [[nodiscard]] constexpr const char* c_str() const noexcept LLMMEM_LIFETIMEBOUND { return kept_.text; }
  [[nodiscard]] constexpr std::string_view view() const noexcept LLMMEM_LIFETIMEBOUND { return kept_.text; }
  constexpr operator std::string_view() const noexcept LLMMEM_LIFETIMEBOUND { return view(); }

  friend constexpr bool operator==(const failure_name& a, const failure_name& b) noexcept {
    return a.view() == b.view();
  }

 private:
  static constexpr std::string_view gap = "...";

  struct letters {
    char text[max_size + 1];

    constexpr std::size_t append(std::size_t at, std::string_view part) noexcept {
      part.copy(text + at, part.size());
      return at + part.size();
    }
    /// A constant must have a value in each byte; an object made at run time need not.
    constexpr void end_at(std::size_t at) noexcept {
      text[at] = '\0';
      if (std::is_constant_evaluated()) {
        for (; at <= max_size; ++at)
          text[at] = '\0';
      }
    }
  };

  [[nodiscard]] static constexpr letters nothing() noexcept {
    letters out;  // NOLINT(cppcoreguidelines-pro-type-member-init): writes only the bytes used
    out.end_at(0);
    return out;
  }
  [[nodiscard]] LLMMEM_COLD LLMMEM_OUTLINED static constexpr letters copy_of(std::string_view name) noexcept {
    letters out;  // NOLINT(cppcoreguidelines-pro-type-member-init): writes only the bytes used
    if (name.size() <= max_size) {
      out.end_at(out.append(0, name));
      return out;
    }
    std::size_t head = max_size / 3;
    while (head != 0 && is_inside_character(name[head]))
      --head;
    std::size_t tail = name.size() - (max_size - head - gap.size());
    while (tail != name.size() && is_inside_character(name[tail]))
      ++tail;
    out.end_at(out.append(out.append(out.append(0, name.substr(0, head)), gap), name.substr(tail)));
    return out;
  }
  /// Whether `byte` continues a UTF-8 character, which must not be split.
  [[nodiscard]] static constexpr bool is_inside_character(char byte) noexcept {
    return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U;
  }

  letters kept_;
};

/// A refusal: its reason, the two numbers that show it, and the object that refused. A value: it may be kept,
/// copied and passed up after that object has been destroyed.
struct failure {
  error_code code{};
  std::uint32_t index = 0;   ///< its meaning depends on the code: `error_info::index`
  std::uint64_t wanted = 0;  ///< `error_info::wanted`
  std::uint64_t found = 0;   ///< `error_info::found`
  failure_name where = {};   ///< the name given to the object at construction, or the path of a file

  /// Returns one sentence for a person: which object, what, how much, and how to resolve it. Allocates: not
  /// for hot paths.
  [[nodiscard]] LLMMEM_COLD std::string message() const;

  /// Throws the exception for `code`: see `error_kind`.
  [[noreturn]] LLMMEM_COLD void raise() const;

  friend constexpr bool operator==(const failure& a, const failure& b) noexcept {
    return a.code == b.code && a.index == b.index && a.wanted == b.wanted && a.found == b.found;
  }
};

static_assert(std::is_trivially_copyable_v<failure>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/detail/failure_text.hpp>
#include <llmmem/errors.hpp>
