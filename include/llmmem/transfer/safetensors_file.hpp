/// @file
/// `safetensors_file`: a file of model weights, mapped for reading, with tensors in place.
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

/// How the bytes of a file's tensors are accessed.
enum class tensor_access : std::uint8_t {
  map,  ///< in the address space: `bytes` returns them in place
  read  ///< only by `read`: no change of the file can end the process
};

/// A safetensors file, mapped as a whole; pages are loaded when they are touched.
///
///     const safetensors_file model("model-00001-of-00002.safetensors");
///     for (const safetensors_entry& each : model.header().entries) {
///       const std::span<const std::byte> bytes = model.bytes(each);       // no copy
///     }
///     buffer.adopt(model.offset(*model.find("lm_head.weight")), ...);    // or leased through tiers
///
/// The constructor checks the header (`read_safetensors`). The tensors' bytes are not checked: the format has
/// no checksums. The bytes have the file's alignment, which need not suit the elements: see `is_aligned`.
///
/// If a file is shortened while it is mapped, accessing the missing part ends the process (SIGBUS), as with
/// any mapping: replace files by rename, never in place. If others write to the file (a network mount, a
/// synchronised folder), use `tensor_access::read` and `read`: there a truncated file is an `io_error`.
///
///     const safetensors_file model("model.safetensors", tensor_access::read);
///     model.read(*model.find("lm_head.weight"), memory);
///
/// @par Complexity      `find` O(log n). Opening reads the header only, never through the mapping.
/// @par Thread safety   const throughout. Movable; spans stay valid.
/// @par Errors          the constructor throws `io_error` for a file that cannot be opened, mapped or read,
///   `format_error` for a file that is not a safetensors file; both name the path.
class safetensors_file {
 public:
  explicit safetensors_file(std::string path, tensor_access how = tensor_access::map)
      : path_(std::move(path)) {
    try {
      open();
      read_header();
      if (how == tensor_access::map && bytes_ != 0) map();
    } catch (...) {
      close();
      throw;
    }
  }
  safetensors_file(safetensors_file&& other) noexcept
      : path_(std::move(other.path_)),
        header_(std::move(other.header_)),
        by_name_(std::move(other.by_name_)),
        file_(std::exchange(other.file_, -1)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  safetensors_file& operator=(safetensors_file&& other) noexcept {
    if (this != &other) {
      close();
      path_ = std::move(other.path_);
      header_ = std::move(other.header_);
      by_name_ = std::move(other.by_name_);
      file_ = std::exchange(other.file_, -1);
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  ~safetensors_file() { close(); }

  [[nodiscard]] const std::string& path() const noexcept LLMMEM_LIFETIMEBOUND { return path_; }
  [[nodiscard]] const safetensors_header& header() const noexcept { return header_; }
  /// Returns the tensor of that name, or null.
  [[nodiscard]] const safetensors_entry* find(std::string_view name) const noexcept {
    const auto name_of_entry = [&](std::uint32_t i) -> std::string_view { return header_.entries[i].name; };
    const auto found = std::ranges::lower_bound(by_name_, name, {}, name_of_entry);
    if (found == by_name_.end() || header_.entries[*found].name != name) return nullptr;
    return &header_.entries[*found];
  }
  /// Whether `bytes` returns anything.
  [[nodiscard]] bool is_mapped() const noexcept { return data_ != nullptr; }
  /// Returns a tensor's bytes; empty unless the file is mapped. @pre the entry belongs to this file.
  [[nodiscard]] std::span<const std::byte> bytes(const safetensors_entry& entry) const noexcept {
    if (data_ == nullptr) return {};
    return {data_ + offset(entry), static_cast<std::size_t>(entry.bytes())};
  }
  /// Copies bytes of a tensor, from byte `from` of it on, whether or not the file is mapped.
  /// @pre the entry belongs to this file.
  /// @throws argument_error  for bytes past the tensor's end.
  /// @throws io_error        when the system refuses, or the file was truncated since it was opened.
  void read(const safetensors_entry& entry, std::span<std::byte> into, std::uint64_t from = 0) const {
    if (from > entry.bytes() || into.size() > entry.bytes() - from) {
      throw argument_error(path_ + ": tensor " + entry.name + ": bytes " + std::to_string(from) + " to " +
                           std::to_string(from + into.size()) + " requested, but it has " +
                           std::to_string(entry.bytes()));
    }
    read_at(offset(entry) + from, into);
  }
  /// Returns the tensor's place in the file.
  [[nodiscard]] std::uint64_t offset(const safetensors_entry& entry) const noexcept {
    return header_.data_begin + entry.begin;
  }
  /// Whether the processor may read them in place as elements.
  [[nodiscard]] bool is_aligned(const safetensors_entry& entry) const noexcept {
    const std::uint64_t element = bits_of(entry.type) < 8 ? 1 : bits_of(entry.type) / 8;
    return offset(entry) % element == 0;
  }

 private:
  void open() {
    if (path_.find('\0') != std::string::npos)
      throw io_error(std::string(path_.c_str()) + ": cannot be opened: the path contains a zero byte");
    // Does not wait for a writer of a pipe of that name.
    file_ = detail::open_again(path_.c_str(), O_RDONLY | O_NONBLOCK, 0);
    if (file_ < 0) detail::cannot_open(path_, "cannot be opened", errno);
    struct ::stat seen{};
    if (::fstat(file_, &seen) != 0) detail::cannot_open(path_, "cannot be examined", errno);
    if (!S_ISREG(seen.st_mode)) throw io_error(path_ + ": cannot be mapped: it is not a regular file");
    bytes_ = static_cast<std::size_t>(seen.st_size);
  }
  void read_header() {
    std::vector<std::byte> begin(std::min<std::size_t>(8, bytes_));
    read_at(0, begin);
    const std::uint64_t header_bytes =
        std::min<std::uint64_t>(safetensors_header_bytes(begin, path_), bytes_);
    begin.resize(static_cast<std::size_t>(header_bytes));
    read_at(0, begin);
    header_ = read_safetensors(begin, bytes_, path_);
    by_name_.resize(header_.entries.size());
    for (std::uint32_t i = 0; i < by_name_.size(); ++i)
      by_name_[i] = i;
    std::ranges::sort(by_name_, [&](std::uint32_t a, std::uint32_t b) {
      return header_.entries[a].name < header_.entries[b].name;
    });
  }
  void read_at(std::uint64_t offset, std::span<std::byte> into) const {
    while (!into.empty()) {
      const ssize_t got = ::pread(file_, into.data(), into.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) detail::cannot_open(path_, "cannot be read", errno);
      if (got == 0) {
        throw io_error(path_ + ": it has no byte " + std::to_string(offset) + ", and had " +
                       std::to_string(bytes_) +
                       " bytes when it was opened: another process truncated it; replace files by rename, "
                       "never in place");
      }
      offset += static_cast<std::uint64_t>(got);
      into = into.subspan(static_cast<std::size_t>(got));
    }
  }
  void map() {
    void* const at = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file_, 0);
    if (at == MAP_FAILED) detail::cannot_open(path_, "cannot be mapped", errno);
    data_ = static_cast<const std::byte*>(at);
  }
  void close() noexcept {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
    data_ = nullptr;
    if (file_ >= 0) ::close(std::exchange(file_, -1));
  }

  std::string path_;
  safetensors_header header_;
  std::vector<std::uint32_t> by_name_;  // entries
  int file_ = -1;
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace v0
}  // namespace llmmem
