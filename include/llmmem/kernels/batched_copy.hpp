/// @file
/// Many copies of any lengths in one launch.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/shifted_rows.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Bytes of a tile of a copy.
inline constexpr std::uint32_t copy_tile_bytes = 16 * 1024;

/// From this size on 31 bits cannot count the tiles.
inline constexpr std::uint64_t most_copy_bytes = std::uint64_t{1} << 45U;

/// Checks what can be checked of a list without reading it.
[[nodiscard]] inline result<void> check_batch(std::span<const copy_task> tasks, std::uint64_t longest,
                                              row_alignment aligned) noexcept {
  if (tasks.empty()) return {};
  if (tasks.data() == nullptr) return failure{errc::too_short, 0, tasks.size(), 0, "copy_batch: tasks"};
  if (longest >= most_copy_bytes)
    return failure{errc::past_the_bytes, 0, longest, most_copy_bytes - 1, "copy_batch: longest"};
  for (const std::uint32_t each : {aligned.from, aligned.to}) {
    if (!std::has_single_bit(each)) return failure{errc::bad_alignment, 0, each, 0, "copy_batch: aligned"};
  }
  return {};
}

/// Returns tile `number` of a task; nothing past its end.
[[nodiscard]] LLMMEM_HD inline row_move tile_of(const copy_task& task, std::uint64_t number) noexcept {
  const std::uint64_t first = number * copy_tile_bytes;
  if (first >= task.bytes) return {};
  const std::uint64_t left = task.bytes - first;
  return {task.from + first, task.to + first,
          static_cast<std::uint32_t>(left < copy_tile_bytes ? left : copy_tile_bytes)};
}

/// Returns the tiles of the longest task, at least one.
[[nodiscard]] inline divider tiles_of(std::uint64_t longest) noexcept {
  return divider(std::max(static_cast<std::uint32_t>((longest + copy_tile_bytes - 1) / copy_tile_bytes), 1U));
}

}  // namespace detail

/// Tasks in the executor's memory.
class listed_copies {
 public:
  /// @param longest  bytes of the longest task.
  /// @param aligned  what all addresses are multiples of.
  listed_copies(std::span<const copy_task> tasks, std::uint64_t longest, row_alignment aligned) noexcept
      : task_(tasks.data()), tasks_(tasks.size()), longest_(longest), aligned_(aligned) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return tasks_; }
  [[nodiscard]] LLMMEM_HD const copy_task& operator[](std::uint64_t i) const noexcept { return task_[i]; }
  [[nodiscard]] std::uint64_t longest() const noexcept { return longest_; }
  [[nodiscard]] row_alignment alignment() const noexcept { return aligned_; }

 private:
  const copy_task* task_;
  std::uint64_t tasks_;
  std::uint64_t longest_;
  row_alignment aligned_;
};

/// A few tasks that the launch carries, so no upload is needed.
class few_copies {
 public:
  /// As many as an argument of 4 KiB holds in addition to what a launch itself needs.
  static constexpr std::uint32_t most = 128;

  /// @pre at most `most` tasks
  explicit few_copies(std::span<const copy_task> tasks) noexcept
      : tasks_(static_cast<std::uint32_t>(tasks.size())) {
    for (std::uint32_t i = 0; i < tasks_; ++i) {
      task_[i] = tasks[i];
      if (tasks[i].bytes == 0) continue;
      longest_ = std::max(longest_, tasks[i].bytes);
      aligned_.from = std::min(aligned_.from, alignment_of(reinterpret_cast<std::uintptr_t>(tasks[i].from)));
      aligned_.to = std::min(aligned_.to, alignment_of(reinterpret_cast<std::uintptr_t>(tasks[i].to)));
    }
  }

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return tasks_; }
  [[nodiscard]] LLMMEM_HD const copy_task& operator[](std::uint64_t i) const noexcept { return task_[i]; }
  [[nodiscard]] std::uint64_t longest() const noexcept { return longest_; }
  [[nodiscard]] row_alignment alignment() const noexcept { return aligned_; }

 private:
  copy_task task_[most]{};
  std::uint64_t longest_ = 0;
  std::uint32_t tasks_;
  row_alignment aligned_{16, 16};
};

/// The tiles of copies, as rows. Each task has as many as the longest.
template <class Copies>
class copy_map {
 public:
  explicit copy_map(const Copies& copies) noexcept
      : copies_(copies),
        tiles_(detail::tiles_of(copies.longest())),
        longest_(
            static_cast<std::uint32_t>(std::min<std::uint64_t>(copies.longest(), detail::copy_tile_bytes))) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return copies_.size() * tiles_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t parts() const noexcept { return 1; }
  [[nodiscard]] LLMMEM_HD row_move at(std::uint64_t row, std::uint32_t /*part*/) const noexcept {
    const std::uint64_t number = tiles_.quotient(row);
    return detail::tile_of(copies_[number], row - number * tiles_.by());
  }
  [[nodiscard]] std::uint32_t longest_row() const noexcept { return longest_; }
  [[nodiscard]] row_alignment alignment() const noexcept { return copies_.alignment(); }
  /// A lane's share of a long row whose ends are not aligned to 16.
  template <unsigned N, cache_hint Read, cache_hint Write>
  LLMMEM_HD static void move_shifted(const row_move& row, std::uint32_t lane, std::uint32_t lanes) noexcept {
    detail::move_shifted<N, Read, Write>(row, lane, lanes);
  }

 private:
  Copies copies_;
  divider tiles_;
  std::uint32_t longest_;
};
static_assert(row_map<copy_map<listed_copies>> && row_map<copy_map<few_copies>>);
static_assert(sizeof(copy_map<few_copies>) <= 4096 - 64);

/// Runs copies whose list is in the executor's memory: a graph may change it between replays.
///
/// Every task gets as many threads as the longest: sort very different lengths into separate batches. Tasks
/// of 0 bytes are skipped.
///
/// @param run      `host_executor` or `device_executor`.
/// @param longest  bytes of the longest task; bytes beyond it are not copied. Below 2^45.
/// @param aligned  what all addresses are multiples of, powers of two up to 16: the caller guarantees it.
/// @pre no byte is written twice, or both read and written
/// @return if there are tasks: `errc::past_the_bytes` for `longest` of 2^45 or more, `errc::bad_alignment`
///      for another alignment, `errc::too_short` for a null list. Then nothing has begun. Otherwise the
///      result of `run`.
/// @par Complexity   the tasks' bytes, read and written once; a lookup for each 16 KiB of tasks x longest.
template <class Run>
result<void> copy_batch(const Run& run, std::span<const copy_task> tasks, std::uint64_t longest,
                        row_alignment aligned = {16, 16}) {
  if (auto fits = detail::check_batch(tasks, longest, aligned); !fits) return fits;
  return run.template move<cache_hint::streaming, cache_hint::streaming>(
      copy_map(listed_copies(tasks, longest, aligned)), copy_op{});
}

/// Runs copies whose list the caller holds. The list travels with the launches, 128 tasks each, and may
/// change when this returns; in a graph it stays fixed. Otherwise as `copy_batch`, but it finds lengths and
/// alignment itself.
/// @return `errc::past_the_bytes` for a task of 2^45 bytes and more: index = its place. Then nothing has
///      begun. Otherwise the result of `run`.
template <class Run>
result<void> copy_few(const Run& run, std::span<const copy_task> tasks) {
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].bytes >= detail::most_copy_bytes)
      return failure{errc::past_the_bytes, static_cast<std::uint32_t>(i), tasks[i].bytes,
                     detail::most_copy_bytes - 1, "copy_few: bytes of a task"};
  }
  for (std::size_t first = 0; first < tasks.size(); first += few_copies::most) {
    const std::size_t count = std::min<std::size_t>(tasks.size() - first, few_copies::most);
    const copy_map map(few_copies(tasks.subspan(first, count)));
    if (auto done = run.template move<cache_hint::streaming, cache_hint::streaming>(map, copy_op{}); !done)
      return done;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
