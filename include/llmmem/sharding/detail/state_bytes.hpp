/// @file
/// What a `sharded_state` does with bytes, where the bytes are: on the host at once, or by the work of their
/// space.
#pragma once

#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/detail/sharded_state_parts.hpp>
#include <llmmem/sharding/working_space.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Bytes that the host can access: every call is done when it returns, and none fails.
template <memory_space Space>
class host_bytes {
 public:
  /// What parts of a sum are aligned to, to add them fast.
  static constexpr std::uint64_t part_alignment = 1;

  explicit host_bytes(Space& /*space*/) noexcept {}

  [[nodiscard]] result<void> clear(std::byte* at, std::uint64_t bytes) const noexcept {
    std::memset(at, 0, bytes);
    return {};
  }
  /// Copies now, or in the next `run`. The two may be the same bytes.
  void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) const noexcept {
    std::memmove(to, from, bytes);
  }
  [[nodiscard]] result<void> run() const noexcept { return {}; }
  [[nodiscard]] result<void> add(const reduce_op& op, std::span<const std::byte* const> parts,
                                 std::byte* into, std::uint64_t bytes) const noexcept {
    std::memcpy(into, parts.front(), bytes);
    for (const std::byte* const each : parts.subspan(1))
      op.combine(into, each, bytes);
    return {};
  }
  /// Messages that begin from now on come after the work so far, and after what it waits for.
  template <class Ranks>
  [[nodiscard]] result<void> precede(Ranks& /*ranks*/) const noexcept {
    return {};
  }
  /// Waits until all work is done, and what it waits for.
  [[nodiscard]] result<void> finish() const noexcept { return {}; }
  /// The same if there is any work.
  void finish_begun() const noexcept {}
};

/// Bytes that their space works on.
template <working_space Space>
class worked_bytes {
 public:
  static constexpr std::uint64_t part_alignment = 16;

  explicit worked_bytes(Space& space) noexcept : space_(&space) {}

  [[nodiscard]] result<void> clear(std::byte* at, std::uint64_t bytes) {
    has_work_ = true;
    return space_->clear(at, bytes);
  }
  void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    if (to != from) tasks_.push_back({.from = from, .to = to, .bytes = bytes});
  }
  [[nodiscard]] result<void> run() {
    if (tasks_.empty()) return {};
    has_work_ = true;
    const result<void> done = space_->copy(tasks_);
    tasks_.clear();
    return done;
  }
  [[nodiscard]] result<void> add(const reduce_op& op, std::span<const std::byte* const> parts,
                                 std::byte* into, std::uint64_t bytes) {
    has_work_ = true;
    return space_->add(op.elements, parts, into, bytes);
  }
  template <class Ranks>
  [[nodiscard]] result<void> precede(Ranks& ranks) {
    return space_->precede(ranks.stream());  // also after what the caller has let the space's stream wait for
  }
  [[nodiscard]] result<void> finish() noexcept {
    tasks_.clear();
    const result<void> done = space_->finish();
    if (done) has_work_ = false;
    return done;
  }
  void finish_begun() noexcept {
    tasks_.clear();
    if (has_work_) static_cast<void>(finish());
  }

 private:
  Space* space_;
  std::vector<copy_task> tasks_{};
  bool has_work_ = false;  // that may not be done
};

template <memory_space Space>
struct bytes_of_space {
  using type = host_bytes<Space>;
};
template <working_space Space>
struct bytes_of_space<Space> {
  using type = worked_bytes<Space>;
};
template <memory_space Space>
using state_bytes = typename bytes_of_space<Space>::type;

/// Ends with all work done, also when an exception leaves the operation: memory of the work may then go.
template <class Bytes>
class finished_work {
 public:
  explicit finished_work(Bytes& bytes) noexcept : bytes_(&bytes) {}
  finished_work(const finished_work&) = delete;
  finished_work& operator=(const finished_work&) = delete;
  ~finished_work() { bytes_->finish_begun(); }

 private:
  Bytes* bytes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
