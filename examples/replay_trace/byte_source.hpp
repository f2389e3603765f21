/// @file
/// Where a trace's bytes come from: a file, memory, or anything else that can be read forward.
#pragma once

#include <llmmem/error.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/text.hpp"

namespace replay_trace {

/// Gives bytes in order. `read` fills up to `into.size()` bytes and returns how many; 0 means the end.
template <class Source>
concept byte_source = requires(Source& source, const Source& named, std::span<char> into) {
  { source.read(into) } -> std::same_as<std::size_t>;
  { named.name() } -> std::convertible_to<std::string_view>;
};

/// A file, read without a buffer, because the line reader has one.
///
/// @par Errors   the constructor throws `llmmem::system_error` for a file that cannot be opened, or a
///               directory; `read` throws it if the system refuses. Both texts have the path and the system's
///               reason.
class file_source {
 public:
  explicit file_source(std::string path) : name_(std::move(path)) {
    if (name_.find('\0') != std::string::npos) {
      throw llmmem::argument_error("\"" + shown() + "\": a path cannot contain a NUL byte");
    }
    do {
      descriptor_ = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ < 0) fail("cannot open it", errno);
    struct stat status{};
    const bool known = ::fstat(descriptor_, &status) == 0;
    if (known && S_ISDIR(status.st_mode)) {
      ::close(descriptor_);
      throw llmmem::system_error(shown() + ": is a directory; name one trace file");
    }
  }
  file_source(const file_source&) = delete;
  file_source& operator=(const file_source&) = delete;
  ~file_source() { ::close(descriptor_); }

  [[nodiscard]] std::size_t read(std::span<char> into) {
    for (;;) {
      const auto got = ::read(descriptor_, into.data(), into.size());
      if (got >= 0) return static_cast<std::size_t>(got);
      if (errno != EINTR) fail("cannot read it", errno);
    }
  }

  [[nodiscard]] std::string_view name() const noexcept { return name_; }

 private:
  [[nodiscard]] std::string shown() const { return example::printable(name_, 512); }
  [[noreturn]] void fail(const char* what, int code) const {
    throw llmmem::system_error(shown() + ": " + what + ": " + std::generic_category().message(code));
  }

  std::string name_;
  int descriptor_ = -1;
};

/// Bytes already in memory, which the caller keeps alive.
class memory_source {
 public:
  explicit memory_source(std::string_view bytes, std::string name = "memory")
      : rest_(bytes), name_(std::move(name)) {}

  [[nodiscard]] std::size_t read(std::span<char> into) noexcept {
    const std::size_t count = std::min(into.size(), rest_.size());
    if (count > 0) std::memcpy(into.data(), rest_.data(), count);
    rest_.remove_prefix(count);
    return count;
  }

  [[nodiscard]] std::string_view name() const noexcept { return name_; }

 private:
  std::string_view rest_;
  std::string name_;
};

static_assert(byte_source<file_source> && byte_source<memory_source>);

}  // namespace replay_trace
