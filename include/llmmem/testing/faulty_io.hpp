/// @file
/// `faulty_io`: an I/O engine with planned faults of its device.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// The fault of a request.
enum class io_fault : std::uint8_t {
  none,
  error,       ///< refused with `number` as errno; nothing is moved
  short_move,  ///< about half of it is moved, in whole pages if it has several; one page completely
  nothing,     ///< 0 bytes are moved, and reported as a success
  lost,        ///< never answered; nothing is moved or in flight: its place is lost too
  late,        ///< answered `number` reaps later
  bit_flip,    ///< one bit of a read is wrong, without an error
};

/// A fault, and the requests that it hits.
struct planned_fault {
  io_fault what = io_fault::none;
  std::uint64_t first = 1;  ///< number of the first request, counted from 1
  std::uint64_t every = 0;  ///< and each `every`-th request after it; 0: only the first
  std::uint64_t count = 1;  ///< how many requests at most
  int number = EIO;         ///< see `io_fault`
  enum class side : std::uint8_t { both, reads, writes } way = side::both;  ///< which requests are counted
};

/// Requests seen, and faults made.
struct fault_counts {
  std::uint64_t requests = 0;
  std::uint64_t faults = 0;
};

/// Inserts the faults of a plan between a queue and a real engine. The same requests in the same order get
/// the same faults.
///
///     using namespace testing;
///     file_queue<faulty_io<posix_io>> queue({}, std::vector{planned_fault{io_fault::short_move, 3}});
///
/// @par Thread safety   as the engine's.
template <io_engine Engine>
class faulty_io {
 public:
  /// @param engine  the engine's constructor arguments.
  template <class... Args>
  explicit faulty_io(std::vector<planned_fault> plan, Args&&... engine)
      : plan_(std::move(plan)), seen_(plan_.size()), engine_(std::forward<Args>(engine)...) {}

  [[nodiscard]] io_caps caps() const noexcept { return engine_.caps(); }
  [[nodiscard]] std::uint32_t in_flight() const noexcept {
    return engine_.in_flight() + static_cast<std::uint32_t>(held_.size());
  }

  [[nodiscard]] bool try_queue(const io_request& request) noexcept {
    if (in_flight() + lost_ >= caps().depth) return false;
    const planned_fault fault = next_fault(request.way);
    io_request passed = request;
    switch (fault.what) {
      case io_fault::error:
        held_.push_back({{request.tag, -fault.number}, 0});
        return true;
      case io_fault::nothing:
        held_.push_back({{request.tag, 0}, 0});
        return true;
      case io_fault::lost:
        ++lost_;
        return true;
      case io_fault::short_move:
        passed.bytes = half(request.bytes);
        break;
      case io_fault::late:
        late_.push_back({request.tag, fault.number});
        break;
      case io_fault::bit_flip:
        flipped_.push_back(request);
        break;
      case io_fault::none:
        break;
    }
    return engine_.try_queue(passed);
  }

  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept {
    std::size_t count = release(out);
    const bool waits = count == 0 && held_.empty();
    const result<std::size_t> more =
        engine_.reap(out.subspan(count), waits ? wait : io_wait{.least = 0, .timeout_ns = wait.timeout_ns});
    if (!more) return count != 0 ? result<std::size_t>(count) : more;
    std::size_t kept = count;
    for (std::size_t i = count; i < count + *more; ++i) {
      spoil(out[i]);
      if (!hold_back(out[i])) out[kept++] = out[i];
    }
    return kept;
  }

  void wake() noexcept { engine_.wake(); }

  [[nodiscard]] fault_counts counts() const noexcept { return counts_; }

 private:
  struct held {
    io_completion what;
    int reaps = 0;
  };
  struct late {
    std::uint64_t tag = 0;
    int reaps = 0;
  };

  [[nodiscard]] static std::uint32_t half(std::uint32_t bytes) noexcept {
    constexpr std::uint32_t page = 4096;
    if (bytes >= 2 * page) return bytes / 2 / page * page;
    return bytes > 1 && bytes != page ? bytes / 2 : bytes;
  }

  [[nodiscard]] planned_fault next_fault(io_direction way) noexcept {
    ++counts_.requests;
    planned_fault found;
    for (std::size_t i = 0; i < plan_.size(); ++i) {
      planned_fault& fault = plan_[i];
      const bool counted = fault.way == planned_fault::side::both ||
                           (fault.way == planned_fault::side::reads) == (way == io_direction::read);
      if (!counted) continue;
      const std::uint64_t number = ++seen_[i];
      if (fault.count == 0 || number < fault.first) continue;
      const std::uint64_t since = number - fault.first;
      if (since != 0 && (fault.every == 0 || since % fault.every != 0)) continue;
      --fault.count;
      if (found.what == io_fault::none) found = fault;
    }
    if (found.what != io_fault::none) ++counts_.faults;
    return found;
  }

  /// Returns completions that are due.
  [[nodiscard]] std::size_t release(std::span<io_completion> out) noexcept {
    std::size_t count = 0;
    for (std::size_t i = 0; i < held_.size();) {
      if (held_[i].reaps-- > 0 || count == out.size()) {
        ++i;
        continue;
      }
      out[count++] = held_[i].what;
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return count;
  }

  void spoil(const io_completion& done) noexcept {
    for (std::size_t i = 0; i < flipped_.size(); ++i) {
      const io_request& request = flipped_[i];
      if (request.tag != done.tag) continue;
      if (request.way == io_direction::read && done.outcome > 0) {
        request.data[static_cast<std::uint32_t>(done.outcome) / 2] ^= std::byte{1};
      }
      flipped_.erase(flipped_.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  [[nodiscard]] bool hold_back(const io_completion& done) noexcept {
    for (std::size_t i = 0; i < late_.size(); ++i) {
      if (late_[i].tag != done.tag) continue;
      held_.push_back({done, late_[i].reaps});
      late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return false;
  }

  std::vector<planned_fault> plan_;
  std::vector<std::uint64_t> seen_;
  std::vector<held> held_;
  std::vector<late> late_;
  std::vector<io_request> flipped_;
  std::uint32_t lost_ = 0;
  fault_counts counts_;
  Engine engine_;
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
