/// @file
/// `safetensors_file`: a file of model weights, mapped to be read, its tensors where they lie.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/space/file.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A safetensors file, whole in the address space; pages come when they are touched.
///
///     const safetensors_file model("model-00001-of-00002.safetensors");
///     for (const safetensors_entry& each : model.header().entries) {
///       const std::span<const std::byte> bytes = model.bytes(each);       // no copy
///     }
///     buffer.adopt(model.offset(*model.find("lm_head.weight")), ...);    // or leased through tiers
///
/// The header is checked by the constructor (`read_safetensors`); the tensors' bytes are whatever they are:
/// the format has no checksums. The bytes are aligned as the file has them, which need not be to elements:
/// see `is_aligned`.
///
/// A file that somebody shortens while it is mapped ends the process that touches what is gone (SIGBUS), as
/// with any mapping: replace files by rename, never in place.
///
/// @par Complexity      `find` O(log n). Opening reads the header only.
/// @par Thread safety   const throughout. Movable; spans stay where they are then.
/// @par Errors          the constructor throws `io_error` for what cannot be opened or mapped, `format_error`
///                      for what is no safetensors file; both name the path.
class safetensors_file {
 public:
  explicit safetensors_file(std::string path) : path_(std::move(path)) {
    map();
    try {
      header_ = read_safetensors({data_, bytes_}, bytes_, path_);
      by_name_.resize(header_.entries.size());
      for (std::uint32_t i = 0; i < by_name_.size(); ++i)
        by_name_[i] = i;
      std::ranges::sort(by_name_, [&](std::uint32_t a, std::uint32_t b) {
        return header_.entries[a].name < header_.entries[b].name;
      });
    } catch (...) {
      unmap();
      throw;
    }
  }
  safetensors_file(safetensors_file&& other) noexcept
      : path_(std::move(other.path_)),
        header_(std::move(other.header_)),
        by_name_(std::move(other.by_name_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  safetensors_file& operator=(safetensors_file&& other) noexcept {
    if (this != &other) {
      unmap();
      path_ = std::move(other.path_);
      header_ = std::move(other.header_);
      by_name_ = std::move(other.by_name_);
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  ~safetensors_file() { unmap(); }

  [[nodiscard]] const std::string& path() const noexcept LLMMEM_LIFETIMEBOUND { return path_; }
  [[nodiscard]] const safetensors_header& header() const noexcept { return header_; }
  /// The tensor of that name, or null.
  [[nodiscard]] const safetensors_entry* find(std::string_view name) const noexcept {
    const auto name_of_entry = [&](std::uint32_t i) -> std::string_view { return header_.entries[i].name; };
    const auto found = std::ranges::lower_bound(by_name_, name, {}, name_of_entry);
    if (found == by_name_.end() || header_.entries[*found].name != name) return nullptr;
    return &header_.entries[*found];
  }
  /// A tensor's bytes. @pre the entry is of this file.
  [[nodiscard]] std::span<const std::byte> bytes(const safetensors_entry& entry) const noexcept {
    return {data_ + offset(entry), static_cast<std::size_t>(entry.bytes())};
  }
  /// Where they lie in the file.
  [[nodiscard]] std::uint64_t offset(const safetensors_entry& entry) const noexcept {
    return header_.data_begin + entry.begin;
  }
  /// Whether they lie where the processor may read them as elements.
  [[nodiscard]] bool is_aligned(const safetensors_entry& entry) const noexcept {
    const std::uint64_t element = bits_of(entry.type) < 8 ? 1 : bits_of(entry.type) / 8;
    return offset(entry) % element == 0;
  }

 private:
  void map() {
    if (path_.find('\0') != std::string::npos)
      throw io_error(std::string(path_.c_str()) + ": cannot be opened: the path goes on behind a zero byte");
    // Without waiting for whoever might write to a pipe of that name.
    const int file = detail::open_again(path_.c_str(), O_RDONLY | O_NONBLOCK, 0);
    if (file < 0) detail::cannot_open(path_, "cannot be opened", errno);
    struct ::stat seen{};
    int error = ::fstat(file, &seen) != 0 ? errno : 0;
    const char* what = "cannot be examined";
    if (error == 0 && !S_ISREG(seen.st_mode)) {
      ::close(file);
      throw io_error(path_ + ": cannot be mapped: it is no regular file");
    }
    if (error == 0 && seen.st_size != 0) {
      void* const at =
          ::mmap(nullptr, static_cast<std::size_t>(seen.st_size), PROT_READ, MAP_SHARED, file, 0);
      if (at == MAP_FAILED) {
        error = errno;
        what = "cannot be mapped";
      } else {
        data_ = static_cast<const std::byte*>(at);
        bytes_ = static_cast<std::size_t>(seen.st_size);
      }
    }
    ::close(file);
    if (error != 0) detail::cannot_open(path_, what, error);
  }
  void unmap() noexcept {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
    data_ = nullptr;
  }

  std::string path_;
  safetensors_header header_;
  std::vector<std::uint32_t> by_name_;  // entries
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace v0
}  // namespace llmmem
