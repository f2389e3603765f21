/// @file
/// Transfers that end when, how and in the order in which a test says.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// How a transfer ends.
enum class ending : std::uint8_t {
  moved,    ///< its bytes are there
  failed,   ///< some of its bytes are there, and it says so
  flipped,  ///< one bit is wrong, and it does not say so
};

class transfer_list;

/// A transfer of a list. Waiting for it ends it well.
class manual_fence {
 public:
  manual_fence() = default;
  manual_fence(transfer_list& list, std::size_t number) : list_(&list), number_(number) {}
  [[nodiscard]] bool ready() const noexcept;
  void wait() const noexcept;
  [[nodiscard]] llmmem::result<void> settled() const noexcept {
    wait();
    return conclude();
  }
  [[nodiscard]] llmmem::result<void> conclude() const noexcept;
  friend bool operator==(const manual_fence&, const manual_fence&) = default;

 private:
  transfer_list* list_ = nullptr;
  std::size_t number_ = 0;
};

/// What is under way. A transfer reads its source when it ends, and fills its destination with 0xDD when it
/// begins: bytes that are used too early, or reused too early, are wrong every time.
class transfer_list {
 public:
  /// `in_order`: only the oldest can end, as on a stream.
  explicit transfer_list(bool in_order) : in_order_(in_order) {}

  /// @param move  called with how it ends.
  manual_fence begin(std::function<void(ending)> move, const manual_fence& after = {}) {
    transfers_.push_back({std::move(move), after, false, false});
    ++begun_;
    return {*this, transfers_.size() - 1};
  }
  [[nodiscard]] bool is_over(std::size_t number) const { return transfers_[number].is_over; }
  [[nodiscard]] bool has_failed(std::size_t number) const { return transfers_[number].has_failed; }
  /// Numbers of those that could end now.
  [[nodiscard]] std::vector<std::size_t> can_end() const {
    std::vector<std::size_t> out;
    for (std::size_t i = first_; i < transfers_.size(); ++i) {
      if (transfers_[i].is_over || !transfers_[i].after.ready()) {
        if (in_order_ && !transfers_[i].is_over) break;
        continue;
      }
      out.push_back(i);
      if (in_order_) break;
    }
    return out;
  }
  void end(std::size_t number, ending how) {
    transfers_[number].move(how);
    transfers_[number].is_over = true;
    transfers_[number].has_failed = how == ending::failed;
    while (first_ < transfers_.size() && transfers_[first_].is_over)
      ++first_;
  }
  void end_through(std::size_t number) {
    if (!in_order_) {
      if (!transfers_[number].is_over) end(number, ending::moved);
      return;
    }
    for (std::size_t i = first_; i <= number; ++i) {
      if (transfers_[i].is_over) continue;
      transfers_[i].after.wait();
      end(i, ending::moved);
    }
  }
  void end_all() {
    if (!transfers_.empty()) {
      for (std::size_t i = first_; i < transfers_.size(); ++i)
        end_through(i);
    }
  }
  [[nodiscard]] std::size_t under_way() const {
    std::size_t count = 0;
    for (std::size_t i = first_; i < transfers_.size(); ++i)
      count += transfers_[i].is_over ? 0U : 1U;
    return count;
  }
  [[nodiscard]] std::uint64_t begun() const { return begun_; }

 private:
  struct transfer {
    std::function<void(ending)> move;
    manual_fence after;
    bool is_over;
    bool has_failed;
  };
  bool in_order_;
  std::vector<transfer> transfers_;
  std::size_t first_ = 0;
  std::uint64_t begun_ = 0;
};

inline bool manual_fence::ready() const noexcept {
  return list_ == nullptr || list_->is_over(number_);
}
inline void manual_fence::wait() const noexcept {
  if (list_ != nullptr) list_->end_through(number_);
}
inline llmmem::result<void> manual_fence::conclude() const noexcept {
  if (list_ == nullptr || !list_->has_failed(number_)) return {};
  return llmmem::failure{llmmem::errc::read_failed, EIO, 1, 0, "manual"};
}

/// The bytes of a transfer, ended so or so.
inline void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes, ending how) {
  std::memcpy(to, from, how == ending::failed ? bytes / 2 : bytes);
  if (how == ending::flipped) to[bytes / 3] ^= std::byte{0x10};
}

/// A memory whose copies a test ends. What is in it is verified when it comes back, as a file's bytes are.
class manual_space {
 public:
  using range_type = llmmem::memory_range<manual_space>;
  using fence_type = manual_fence;
  static constexpr bool is_host_accessible = false;
  static constexpr bool leaves_memory = true;

  manual_space(std::uint64_t budget, bool in_order = false) : list_(in_order), memory_(budget) {}
  manual_space(const manual_space&) = delete;
  manual_space& operator=(const manual_space&) = delete;

  [[nodiscard]] llmmem::result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t) noexcept {
    if (bytes > memory_.size() - used_)
      return llmmem::failure{llmmem::errc::out_of_bytes, 0, bytes, memory_.size() - used_, "manual"};
    used_ += bytes;
    return range_type{memory_.data(), bytes};
  }
  void deallocate(range_type range) noexcept { used_ -= range.bytes; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return memory_.size(); }
  [[nodiscard]] std::uint64_t used() const noexcept { return used_; }
  [[nodiscard]] std::string_view name() const noexcept { return "manual"; }

  [[nodiscard]] llmmem::result<manual_fence> copy_in_async(range_type to, std::span<const std::byte> from,
                                                           std::span<const manual_fence>) {
    return begin(to.data, from.data(), to.bytes);
  }
  [[nodiscard]] llmmem::result<manual_fence> copy_out_async(std::span<std::byte> to, range_type from,
                                                            std::span<const manual_fence>) {
    return begin(to.data(), from.data, from.bytes);
  }
  [[nodiscard]] llmmem::result<manual_fence> copy_within_async(range_type to, range_type from,
                                                               std::span<const manual_fence>) {
    return begin(to.data, from.data, from.bytes);
  }

  [[nodiscard]] transfer_list& transfers() noexcept { return list_; }
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return memory_; }
  /// The next `count` copies are refused.
  void refuse(std::uint32_t count) noexcept { refused_ = count; }

 private:
  [[nodiscard]] llmmem::result<manual_fence> begin(std::byte* to, const std::byte* from,
                                                   std::uint64_t bytes) {
    if (refused_ != 0) {
      --refused_;
      return llmmem::failure{llmmem::errc::write_failed, ENOSPC, 1, 0, "manual"};
    }
    std::memset(to, 0xDD, static_cast<std::size_t>(bytes));
    return list_.begin([=](ending how) { move_bytes(to, from, static_cast<std::size_t>(bytes), how); });
  }

  transfer_list list_;
  std::vector<std::byte> memory_;
  std::uint64_t used_ = 0;
  std::uint32_t refused_ = 0;
};

static_assert(llmmem::memory_space<manual_space> && llmmem::copy_queue<manual_space, manual_space>);

}  // namespace llmmem_tests
