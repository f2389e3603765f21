/// @file
/// `memory_file`: memory without an address, which can be mapped any number of times. Linux.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/write_signals.hpp>

#if !defined(__linux__)
#error "llmmem/space/memory_file.hpp needs Linux: it is a memfd."
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Returns the bytes of a page, as reported by the system.
[[nodiscard]] inline std::uint64_t system_page_bytes() noexcept {
  const long size = ::sysconf(_SC_PAGESIZE);
  return size > 0 ? static_cast<std::uint64_t>(size) : 65536;
}

/// The owner of a memfd: a file in memory without a name. Its pages are allocated when they are touched, all
/// zero.
///
/// A process that forks shares the bytes with its child: mappings of it are `MAP_SHARED`.
///
/// @par Thread safety   as a file descriptor.
/// @par Errors          every call returns 0 or an `errno`; nothing throws.
class memory_file {
 public:
  memory_file() noexcept = default;

  /// @param name  its name in /proc/PID/maps. `is_open` says whether the system granted it, else `errno`.
  explicit memory_file(const char* name) noexcept
      : file_(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)) {}

  memory_file(memory_file&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  memory_file& operator=(memory_file&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~memory_file() {
    if (file_ >= 0) ::close(file_);
  }

  [[nodiscard]] bool is_open() const noexcept { return file_ >= 0; }

  /// Sets the length.
  [[nodiscard]] int resize(std::uint64_t bytes) noexcept {
    return again([&] { return ::ftruncate(file_, static_cast<off_t>(bytes)); });
  }

  /// Forbids every process to change the length again, so that no mapping of the file can fault.
  [[nodiscard]] int seal_length() noexcept {
    return again([&] { return ::fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL); });
  }

  /// Returns the file's descriptor in this process.
  [[nodiscard]] int descriptor() const noexcept { return file_; }

  /// Allocates pages for `[offset, offset + bytes)` now instead of when they are touched.
  [[nodiscard]] int fill(std::uint64_t offset, std::uint64_t bytes) noexcept {
    return again(
        [&] { return ::fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)); });
  }

  /// Returns the pages there to the system; they read as zero from then on.
  [[nodiscard]] int punch(std::uint64_t offset, std::uint64_t bytes) noexcept {
    return again([&] {
      return ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                         static_cast<off_t>(bytes));
    });
  }

  /// Bytes of the pages that it holds now.
  [[nodiscard]] std::uint64_t held_bytes() const noexcept {
    struct stat status{};
    return ::fstat(file_, &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
  }

  /// Maps `[offset, offset + bytes)` at `address`, replacing what is there, or anywhere for null. Null when
  /// the system refuses.
  [[nodiscard]] std::byte* map(std::byte* address, std::uint64_t offset, std::uint64_t bytes,
                               int protection) const noexcept {
    void* const at =
        ::mmap(address, static_cast<std::size_t>(bytes), protection,
               address == nullptr ? MAP_SHARED : MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(offset));
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }

 private:
  template <class Call>
  [[nodiscard]] static int again(Call call) noexcept {
    while (detail::without_write_signals(call) != 0) {
      if (errno != EINTR) return errno;
    }
    return 0;
  }

  int file_ = -1;
};

/// Reserves `bytes` of addresses at a multiple of `boundary`, without memory: touching them faults. Null when
/// the system refuses. @pre both are multiples of the page size, `boundary` is not 0.
[[nodiscard]] inline std::byte* reserve_addresses(std::uint64_t bytes, std::uint64_t boundary) noexcept {
  const std::uint64_t page = system_page_bytes();
  constexpr std::uint64_t most = std::uint64_t{1} << 62;
  if (bytes > most || boundary > most) {
    errno = ENOMEM;
    return nullptr;
  }
  const std::uint64_t reserved = bytes + boundary - page;
  void* const start = ::mmap(nullptr, static_cast<std::size_t>(reserved), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const std::uint64_t before = (boundary - reinterpret_cast<std::uintptr_t>(start) % boundary) % boundary;
  std::byte* const data = static_cast<std::byte*>(start) + before;
  if (before != 0) ::munmap(start, static_cast<std::size_t>(before));
  if (const std::uint64_t behind = reserved - before - bytes; behind != 0) {
    ::munmap(data + bytes, static_cast<std::size_t>(behind));
  }
  return data;
}

/// Replaces any mapping at `address` by addresses without memory. Null when the system refuses.
[[nodiscard]] inline std::byte* reserve_addresses_at(std::byte* address, std::uint64_t bytes) noexcept {
  void* const at = ::mmap(address, static_cast<std::size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

}  // namespace v0
}  // namespace llmmem
