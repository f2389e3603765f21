/// @file
/// The exceptions of the library, and checked byte arithmetic.
///
/// Errors are reported in two ways. **Setup** (constructors, parsing, anything done once) throws a type
/// derived from `llmmem::error` whose text says what, how much, where and how to resolve it. **Hot paths**
/// are `noexcept` and return `result<T>` (see result.hpp) with a `failure` in it; `result::value()` turns
/// that into the exceptions below.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The base of all exceptions of the library.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A size, a count or their product is zero, too large or does not fit its purpose.
class length_error : public error {
 public:
  using error::error;
};

/// An argument that can never be right: an unknown name, a malformed option, a span of the wrong length.
class argument_error : public error {
 public:
  using error::error;
};

/// Memory, blocks or slots have run out. The object that threw is unchanged.
class out_of_memory : public error {
 public:
  using error::error;
};

/// A handle that is null, stale or belongs to another object.
class handle_error : public error {
 public:
  using error::error;
};

/// The operating system refused a call; the text carries the call, its argument and `errno`'s meaning.
class system_error : public error {
 public:
  using error::error;
};

/// Bytes could not be moved to or from a file; the text carries the operation, path, offset, bytes and
/// `errno`'s meaning.
class io_error : public error {
 public:
  using error::error;
};

/// Bytes do not follow their format; the text carries the file, the place and what is wrong there.
class format_error : public error {
 public:
  using error::error;
};

/// A rank died or is unreachable, an epoch was revoked, or a message was damaged in transit.
class comm_error : public error {
 public:
  using error::error;
};

/// The largest byte count the library computes with: 2^63 - 1, so that a difference of two fits a signed
/// integer.
inline constexpr std::uint64_t max_bytes = (std::uint64_t{1} << 63) - 1;

/// Returns `a * b`, or throws `length_error` when the product exceeds `max_bytes`.
/// @param what  names the bytes, for the error text: `"block pool: blocks x bytes a block"`.
[[nodiscard]] constexpr std::uint64_t checked_multiply(std::uint64_t a, std::uint64_t b, const char* what) {
  if (b != 0 && a > max_bytes / b) {
    throw length_error(std::string(what) + ": " + std::to_string(a) + " x " + std::to_string(b) +
                       " exceeds the limit of 2^63 - 1 bytes; lower one of the two");
  }
  return a * b;
}

/// Returns `a + b`, or throws `length_error` when the sum exceeds `max_bytes`.
[[nodiscard]] constexpr std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, const char* what) {
  if (a > max_bytes || b > max_bytes - a) {
    throw length_error(std::string(what) + ": " + std::to_string(a) + " + " + std::to_string(b) +
                       " exceeds the limit of 2^63 - 1 bytes; lower one of the two");
  }
  return a + b;
}

}  // namespace v0
}  // namespace llmmem
