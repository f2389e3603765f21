/// @file
/// `redundant_replica`: the destination of a restored part, and how the part is assembled there.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/copy_crc32c.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/gf256.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Memory for a part, not cleared, because all of it is written. It does not request huge pages, because a
/// recovery must not wait until the system has found some.
class part_memory {
 public:
  part_memory() noexcept = default;
  /// @throws std::bad_alloc
  explicit part_memory(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes)))), bytes_(bytes) {}
  part_memory(part_memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  part_memory& operator=(part_memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~part_memory() { ::operator delete(data_); }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return {data_, static_cast<std::size_t>(bytes_)};
  }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// A part assembled at its destination from pieces that are copied or summed. The previous contents do not
/// matter: the first piece of a sum is written, and zeros are written only where no piece arrived.
class part_arrival {
 public:
  part_arrival() noexcept = default;
  explicit part_arrival(std::span<std::byte> destination) noexcept : destination_(destination) {}

  [[nodiscard]] std::span<std::byte> destination() const noexcept { return destination_; }

  /// Returns the memory where the caller may receive those bytes before it calls `landed`; an empty span if
  /// the caller must `add` them.
  [[nodiscard]] std::span<std::byte> landing(std::uint64_t offset, std::uint64_t bytes,
                                             bool is_summed) const noexcept {
    if (is_summed && offset < filled_) return {};
    return destination_.subspan(offset, bytes);
  }
  /// Notes that the caller has received bytes there; the part is `coefficient` times these.
  void landed(std::uint64_t offset, std::uint64_t bytes, std::uint8_t coefficient) noexcept {
    const std::span<std::byte> there = destination_.subspan(offset, bytes);
    if (coefficient != 1) static_cast<void>(gf256_multiply_into(there, there, coefficient));
    count(offset, there);
  }
  /// Adds bytes from elsewhere.
  void add(std::uint64_t offset, std::span<const std::byte> bytes, std::uint8_t coefficient) noexcept {
    clear_up_to(offset + bytes.size());
    is_in_order_ = false;
    static_cast<void>(gf256_multiply_add(destination_.subspan(offset, bytes.size()), bytes, coefficient));
  }
  /// Takes bytes from elsewhere, outside the destination.
  void take(std::uint64_t offset, std::span<const std::byte> bytes, std::uint8_t coefficient,
            bool is_summed) noexcept {
    const std::span<std::byte> there = landing(offset, bytes.size(), is_summed);
    if (there.size() != bytes.size()) return add(offset, bytes, coefficient);
    if (coefficient == 1 && is_in_order_ && offset == filled_) {
      sum_ = copy_crc32c(sum_, bytes, there);
      filled_ += bytes.size();
      return;
    }
    if (!bytes.empty()) std::memcpy(there.data(), bytes.data(), bytes.size());
    landed(offset, bytes.size(), coefficient);
  }

  /// Completes the part. @return its CRC-32C
  [[nodiscard]] std::uint32_t finish() noexcept {
    clear_up_to(destination_.size());
    return is_in_order_ ? sum_ : crc32c(0, destination_);
  }

 private:
  void clear_up_to(std::uint64_t end) noexcept {
    if (end <= filled_) return;
    std::memset(destination_.data() + filled_, 0, static_cast<std::size_t>(end - filled_));
    filled_ = end;
    is_in_order_ = false;
  }
  /// Updates the checksum while the bytes are in the cache.
  void count(std::uint64_t offset, std::span<const std::byte> written) noexcept {
    if (offset > filled_) clear_up_to(offset);
    is_in_order_ = is_in_order_ && offset == filled_;
    if (is_in_order_) sum_ = crc32c(sum_, written);
    if (offset + written.size() > filled_) filled_ = offset + written.size();
  }

  std::span<std::byte> destination_{};
  std::uint64_t filled_ = 0;  // the end of the written bytes
  std::uint32_t sum_ = 0;     // CRC-32C of the bytes before `filled_`
  bool is_in_order_ = true;   // every byte was written once, from the first to the last
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
