/// @file
/// The exceptions of the library, and checked byte arithmetic.
///
/// Two ways to report, by place. **Setup** (constructors, parsing, anything done once) throws a type derived
/// from `llmmem::error` whose text says what, how much, where and how to mend it. **Hot paths** are
/// `noexcept` and return `result<T>` (see result.hpp) with a `failure` in it; `result::value()` turns that
/// into the exceptions below.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The base of everything the library throws.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A size, count or product of both that is zero, too large or does not fit what it must fit.
class length_error : public error {
 public:
  using error::error;
};

/// An argument that can never be right: an unknown name, a malformed option, a span of the wrong length.
class argument_error : public error {
 public:
  using error::error;
};

/// Memory, blocks or slots have run out. The object that threw is as it was before the call.
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

/// Bytes that could not be moved to or from a file; the text carries the operation, path, offset, bytes and
/// `errno`'s meaning.
class io_error : public error {
 public:
  using error::error;
};

/// Bytes that are not what a format asks for; the text carries the file, the place and what is wrong there.
class format_error : public error {
 public:
  using error::error;
};

/// A rank that has died or is not heard, an epoch that was revoked, a message that was damaged on its way.
class comm_error : public error {
 public:
  using error::error;
};

/// The largest byte count the library computes with: 2^63 - 1, so that a difference of two fits a signed
/// integer.
inline constexpr std::uint64_t max_bytes = (std::uint64_t{1} << 63) - 1;

/// `a * b`, or `length_error` when the product passes `max_bytes`.
/// @param what  what is being sized, for the error text: `"block pool: blocks x bytes a block"`.
[[nodiscard]] constexpr std::uint64_t checked_multiply(std::uint64_t a, std::uint64_t b, const char* what) {
  if (b != 0 && a > max_bytes / b) {
    throw length_error(std::string(what) + ": " + std::to_string(a) + " x " + std::to_string(b) +
                       " passes the limit of 2^63 - 1 bytes; lower one of the two");
  }
  return a * b;
}

/// `a + b`, or `length_error` when the sum passes `max_bytes`.
[[nodiscard]] constexpr std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, const char* what) {
  if (a > max_bytes || b > max_bytes - a) {
    throw length_error(std::string(what) + ": " + std::to_string(a) + " + " + std::to_string(b) +
                       " passes the limit of 2^63 - 1 bytes; lower one of the two");
  }
  return a + b;
}

}  // namespace v0
}  // namespace llmmem
