/// @file
/// `file_queue`: moves bytes between files and host memory, asynchronously, of any size and alignment, and
/// completely or not at all.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/detail/file_table.hpp>
#include <llmmem/transfer/detail/transfer_core.hpp>
#include <llmmem/transfer/file_copy.hpp>
#include <llmmem/transfer/io_engine.hpp>
#include <llmmem/transfer/io_tuner.hpp>
#include <llmmem/transfer/posix_io.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include <time.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Runs file copies on an `io_engine`.
///
///     io_file file("chunks", {.mode = open_mode::create});
///     file_queue<uring_io> queue({}, uring_options{.issuer = uring_issuer::one_thread});
///     auto written = queue.start(write_to(file, 0, bytes)).value();
///     auto back = queue.start(read_from(file, 0, other), transfer::urgency::demand, written).value();
///     back.wait();                              // throws what failed: operation, path, offset, bytes, errno
///
/// - **Complete or failed.** A short transfer is continued; an operation succeeds only when every byte has
///   moved. The end of a file before that is `errc::file_ends`.
/// - **Any size, offset and address.** Aligned parts bypass the page cache; heads and tails, and all of a
///   copy whose memory does not fit its offset, go through it (`file_queue_stats::bytes_buffered`).
/// - **Order** is explicit: operations that use the same bytes of a file, one of them writing, need each
///   other's fences in `after`. If one of these fails, the operation does not begin
///   (`errc::dependency_failed`). A fence of another queue in `after` is polled; that queue must make
///   progress by itself, or be driven by another thread.
/// - **Urgent first**: see `urgency`; call `promote` when a thread starts to wait for a prefetch.
/// - **EINTR, EAGAIN** and EBUSY are retried, after a growing pause; **EINVAL** of an aligned direct transfer
///   makes the file fall back to the page cache (`io_file::fallback`); another error fails only its
///   operation.
/// - **No endless waits**: an engine that fails `max_attempts` consecutive times fails all operations
///   (`errc::engine_failed`); a request that is not answered within `give_up_ns` fails its operation
///   (`errc::completion_lost`); when every slot is lost in this way, all later operations fail until an
///   answer arrives. The device may still write to the memory of a lost request: keep it until the queue is
///   destroyed.
///
/// A failure names the file by a pointer to its path: files must outlive the failures kept about them. A
/// process that forks leaves the queue to its parent: the child must not use or destroy it.
///
/// Durability is separate: call `io_file::sync` once the fences of data that must last have passed.
///
/// @par Complexity      O(1) for each request of `block_bytes`; no allocation after construction. `cancel`,
///   `promote` and a failure walk the queue of that urgency.
/// @par Thread safety   any number of threads; one mutex, held only for bookkeeping. With
///   `driven_by::waiters` one of the waiting threads drives, and the others sleep.
/// @par Errors          the constructor throws `argument_error`, `out_of_memory`, `system_error` and what the
///                      engine's constructor throws; everything else is a value, or reported by the fence.
template <io_engine Engine = posix_io>
class file_queue {
 public:
  using fence_type = transfer_fence;
  static constexpr std::uint64_t most_block_bytes = std::uint64_t{1} << 30;

  /// @param engine  the arguments from which the engine is constructed in place.
  template <class... Args>
  explicit file_queue(file_queue_options options = {}, Args&&... engine);
  file_queue(const file_queue&) = delete;
  file_queue& operator=(const file_queue&) = delete;

  /// Cancels operations that have not begun, and waits for all requests to the system, including lost ones.
  /// Fences must not be used afterwards.
  ~file_queue();

  /// Begins all of `copies` as one operation, once all of `after` have passed; returns its fence. Files and
  /// memory must stay unchanged until it has passed.
  /// @return `errc::table_full` (operations or copies), `errc::failures_kept` (see `clear_failures`),
  ///         `errc::out_of_range` (more than 4 of `after`, or bytes no file has), `errc::null_handle`,
  ///         `errc::not_opened`.
  result<transfer_fence> start(std::span<const file_copy> copies,
                               transfer::urgency how = transfer::urgency::demand,
                               std::span<const transfer_fence> after = {}) noexcept;
  result<transfer_fence> start(const file_copy& copy,
                               transfer::urgency how = transfer::urgency::demand) noexcept {
    return start(std::span(&copy, 1), how);
  }
  result<transfer_fence> start(const file_copy& copy, transfer::urgency how,
                               const transfer_fence& after) noexcept {
    return start(std::span(&copy, 1), how, std::span(&after, 1));
  }

  /// Stops the operation: it fails with `errc::cancelled`, which is kept like all failures, once the begun
  /// requests have returned. Bytes moved so far stay moved. No effect on a completed operation.
  void cancel(const transfer_fence& of) noexcept;

  /// Makes the operation more urgent; never less.
  void promote(const transfer_fence& of, transfer::urgency how) noexcept;

  /// Returns the bytes moved so far; for completion ask the fence.
  [[nodiscard]] std::uint64_t bytes_done(const transfer_fence& of) const noexcept;

  /// Makes progress without waiting. Call it regularly with `driven_by::waiters`; otherwise it has no effect.
  void poll() noexcept;

  /// Returns when no operation is in flight.
  void wait_idle() noexcept;

  /// Forgets failures: see `transfer_board`.
  void clear_failures() noexcept { core_.board().clear_failures(); }

  [[nodiscard]] file_queue_stats stats() const noexcept {
    const std::scoped_lock lock(mutex_);
    file_queue_stats now = core_.stats(now_ns());
    now.files_registered = files_.told();
    now.files_plain = files_.plain();
    now.best = options_.tuning == io_tuning::on ? tuner_.best() : now.setting;
    now.is_at_rest = options_.tuning == io_tuning::on && tuner_.is_at_rest();
    return now;
  }
  [[nodiscard]] io_caps caps() const noexcept { return engine_.caps(); }

  /// Registers memory with the engine that most copies will use: see `registers_memory`.
  /// @pre nothing was started yet.
  result<void> register_memory(std::span<const std::span<std::byte>> ranges) noexcept
    requires registers_memory<Engine>
  {
    const std::scoped_lock lock(mutex_);
    return engine_.register_memory(ranges);
  }

  /// Registers a file with the engine that many copies will use: see `registers_files`; no effect for an
  /// engine without that. Takes effect before the next request; without a free entry its copies continue as
  /// before (`file_queue_stats::files_registered`, `files_plain`). Spaces over files do so themselves.
  void register_file(const io_file& file) noexcept;
  /// Unregisters a file. A registered file must be unregistered before it is closed, unless the queue is
  /// destroyed first: otherwise the system keeps it open, and a file opened later would be confused with it.
  /// No copy of it may be in flight or waiting. With `driven_by::waiters` the system releases it when a
  /// thread drives again.
  void forget_file(const io_file& file) noexcept;

 private:
  static constexpr std::size_t batch = 64;
  static constexpr std::uint64_t poll_ns = 100'000;  // between checks of other fences; unit of a pause

  [[nodiscard]] static file_queue_options checked(file_queue_options options);
  [[nodiscard]] static std::uint32_t depth_of(const file_queue_options& options,
                                              const io_caps& caps) noexcept {
    return options.depth == 0 || options.depth > caps.depth ? caps.depth : options.depth;
  }
  [[nodiscard]] static std::uint64_t now_ns() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }
  void ring() noexcept {
    bell_.fetch_add(1, std::memory_order_relaxed);
    bell_.notify_all();
  }
  static void sleep_for(std::uint64_t ns) noexcept {
    constexpr std::uint64_t second = 1'000'000'000;
    const timespec span{static_cast<time_t>(ns / second), static_cast<long>(ns % second)};
    ::nanosleep(&span, nullptr);
  }
  /// Whether the engine has failed too often to be called again.
  [[nodiscard]] bool gave_up() const noexcept { return engine_failures_ >= options_.max_attempts; }
  /// Whether the system has no requests of this queue.
  [[nodiscard]] bool is_quiet() const noexcept { return engine_.in_flight() == 0 || gave_up(); }

  [[nodiscard]] static io_tuner_options tuner_options(const file_queue_options& options, std::uint32_t depth);
  void tune(std::uint64_t now) noexcept;
  void tell_files() noexcept {
    if constexpr (registers_files<Engine>) files_.apply(engine_);
  }
  /// Called by the driving thread, because others may not.
  void forget_files() noexcept {
    if constexpr (registers_files<Engine>) engine_.forget_files();
  }
  void run() noexcept;
  void turn(std::unique_lock<std::mutex>& lock) noexcept;
  void drive(std::unique_lock<std::mutex>& lock, std::uint32_t least) noexcept;
  void kick(std::unique_lock<std::mutex>& lock) noexcept;
  template <class Action>
  void with(const transfer_fence& of, Action action) const noexcept;

  file_queue_options options_;
  mutable std::mutex mutex_;
  std::atomic<std::uint32_t> bell_{0};  // rung when a sleeper should check again
  Engine engine_;
  detail::transfer_core core_;
  detail::file_table files_;
  io_tuner tuner_;
  std::uint64_t window_ns_ = 0;     // start of the tuner's present window; 0 between two
  std::uint64_t window_bytes_ = 0;  // moved before it
  std::uint64_t quiet_until_ = 0;   // by now_ns(): the system asked for a pause
  std::uint32_t engine_failures_ = 0;
  std::uint32_t followers_ = 0;  // waiters that let another thread drive
  bool kicked_ = false;          // an operation was started, or ended, while a thread drove
  bool driven_ = false;          // a thread is in the engine, without the lock
  bool stopping_ = false;
  std::thread thread_;
};

template <io_engine Engine>
file_queue_options file_queue<Engine>::checked(file_queue_options options) {
  const auto refuse = [&](const char* what, std::uint64_t value, const char* allowed) {
    throw argument_error(options.name + ": " + what + " is " + std::to_string(value) + "; it must be " +
                         allowed);
  };
  const std::uint64_t block = options.block_bytes;
  if (block < 4096 || block > most_block_bytes || (block & (block - 1)) != 0) {
    refuse("block_bytes", block, "a power of two from 4096 to 2^30");
  }
  if (options.max_operations == 0) refuse("max_operations", 0, "at least 1");
  if (options.max_copies == 0) refuse("max_copies", 0, "at least 1");
  if (options.max_failures == 0) refuse("max_failures", 0, "at least 1");
  if (options.max_attempts == 0) refuse("max_attempts", 0, "at least 1");
  return options;
}

template <io_engine Engine>
template <class... Args>
file_queue<Engine>::file_queue(file_queue_options options, Args&&... engine)
    : options_(checked(std::move(options))),
      engine_(std::forward<Args>(engine)...),
      core_(options_, depth_of(options_, engine_.caps())),
      tuner_(tuner_options(options_, depth_of(options_, engine_.caps()))) {
  if (options_.tuning == io_tuning::on) core_.use(tuner_.setting());
  if (options_.driver == transfer::driven_by::waiters) {
    core_.board().driven_by(
        [](void* self, const transfer_fence& awaited) noexcept {
          auto& me = *static_cast<file_queue*>(self);
          std::unique_lock lock(me.mutex_);
          while (!awaited.ready())
            me.turn(lock);
        },
        this);
    return;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& why) {
    throw system_error(options_.name + ": cannot start a thread: " + why.what());
  }
}

template <io_engine Engine>
file_queue<Engine>::~file_queue() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  core_.cancel_all();
  if (thread_.joinable()) {
    kick(lock);
    lock.unlock();
    thread_.join();
    return;
  }
  while (core_.flying() != 0 || !is_quiet())
    drive(lock, 1);
  forget_files();
}

template <io_engine Engine>
result<transfer_fence> file_queue<Engine>::start(std::span<const file_copy> copies, transfer::urgency how,
                                                 std::span<const transfer_fence> after) noexcept {
  std::unique_lock lock(mutex_);
  const result<transfer_fence> begun = core_.start(copies, how, after);
  if (begun) kick(lock);
  return begun;
}

template <io_engine Engine>
void file_queue<Engine>::register_file(const io_file& file) noexcept {
  if constexpr (registers_files<Engine>) {
    // Wakes no thread, because the calling thread would then become the ring's single issuer.
    const std::scoped_lock lock(mutex_);
    files_.add(file.opened_direct());
    files_.add(file.buffered());
  }
}

template <io_engine Engine>
void file_queue<Engine>::forget_file(const io_file& file) noexcept {
  if constexpr (registers_files<Engine>) {
    std::unique_lock lock(mutex_);
    files_.drop(file.opened_direct());
    files_.drop(file.buffered());
    if (files_.has_changes() && options_.driver == transfer::driven_by::own_thread) kick(lock);
  }
}

/// Begins all possible work: by the driving thread, or here.
template <io_engine Engine>
void file_queue<Engine>::kick(std::unique_lock<std::mutex>& lock) noexcept {
  if (driven_) {
    kicked_ = true;
    engine_.wake();
  } else if (options_.driver == transfer::driven_by::waiters) {
    drive(lock, 0);
  } else {
    ring();
  }
}

template <io_engine Engine>
template <class Action>
void file_queue<Engine>::with(const transfer_fence& of, Action action) const noexcept {
  const std::scoped_lock lock(mutex_);
  if (!of.ready() && core_.board().gave(of)) action(transfer_board::slot_of(of));
}

template <io_engine Engine>
void file_queue<Engine>::cancel(const transfer_fence& of) noexcept {
  std::unique_lock lock(mutex_);
  if (of.ready() || !core_.board().gave(of)) return;
  core_.cancel(transfer_board::slot_of(of));
  kick(lock);  // it may be over, and operations after it too
}

template <io_engine Engine>
void file_queue<Engine>::promote(const transfer_fence& of, transfer::urgency how) noexcept {
  with(of, [&](std::uint32_t slot) { core_.promote(slot, how); });
}

template <io_engine Engine>
std::uint64_t file_queue<Engine>::bytes_done(const transfer_fence& of) const noexcept {
  std::uint64_t bytes = 0;
  with(of, [&](std::uint32_t slot) { bytes = core_.done(slot); });
  return bytes;
}

template <io_engine Engine>
void file_queue<Engine>::poll() noexcept {
  if (options_.driver != transfer::driven_by::waiters) return;
  std::unique_lock lock(mutex_);
  if (!driven_) drive(lock, 0);
}

template <io_engine Engine>
void file_queue<Engine>::wait_idle() noexcept {
  std::unique_lock lock(mutex_);
  while (core_.board().running() != 0) {
    if (options_.driver == transfer::driven_by::waiters) {
      turn(lock);
    } else {
      const transfer_fence some = core_.some_running();
      lock.unlock();
      static_cast<void>(some.settled());
      lock.lock();
    }
  }
}

/// Returns the options' limits within those of the queue.
template <io_engine Engine>
io_tuner_options file_queue<Engine>::tuner_options(const file_queue_options& options, std::uint32_t depth) {
  io_tuner_options t = options.tuner;
  if (options.tuning == io_tuning::off) return {};
  const std::uint32_t most = std::bit_floor(depth);
  t.most.depth = detail::smaller(t.most.depth, most);
  t.least.depth = detail::smaller(t.least.depth, most);
  const auto within = [](auto value, auto least, auto high) {
    return detail::smaller(detail::larger(value, least), high);
  };
  t.first = {within(most, t.least.depth, t.most.depth),
             within(options.block_bytes, t.least.block_bytes, t.most.block_bytes)};
  if (t.least.block_bytes < 4096 || t.most.block_bytes > most_block_bytes) {
    throw argument_error(options.name + ": tuner: blocks must be from 4096 to 2^30 bytes");
  }
  return t;
}

/// A window begins once the bytes that may be in flight have moved at the new setting. It lasts for eight
/// times as many, and at least as long as the options say. Only a window with waiting work at all times
/// measures the device's speed.
template <io_engine Engine>
void file_queue<Engine>::tune(std::uint64_t now) noexcept {
  const std::uint64_t moved = core_.bytes_moved();
  const io_setting setting = tuner_.setting();
  const std::uint64_t flight = setting.depth * setting.block_bytes;
  if (!core_.has_work()) {
    window_ns_ = 0;
    window_bytes_ = moved;
  } else if (window_ns_ == 0) {
    if (moved - window_bytes_ < flight) return;
    window_ns_ = now;
    window_bytes_ = moved;
  } else if (moved - window_bytes_ >= 8 * flight && now - window_ns_ >= options_.tuner.window_ns) {
    core_.use(tuner_.window(moved - window_bytes_, now - window_ns_));
    window_ns_ = 0;
    window_bytes_ = moved;
  }
}

/// A waiting thread: it drives, or sleeps until the driving thread has a result.
template <io_engine Engine>
void file_queue<Engine>::turn(std::unique_lock<std::mutex>& lock) noexcept {
  if (!driven_) return drive(lock, 1);
  ++followers_;
  const std::uint32_t heard = bell_.load(std::memory_order_relaxed);
  lock.unlock();
  bell_.wait(heard, std::memory_order_relaxed);
  lock.lock();
  --followers_;
}

/// One turn: begins all possible work, takes completions, waits for `least` of these. Releases the lock while
/// the engine waits; `driven_` keeps other threads away from the engine.
/// @pre not `driven_`.
template <io_engine Engine>
void file_queue<Engine>::drive(std::unique_lock<std::mutex>& lock, std::uint32_t least) noexcept {
  driven_ = true;
  // A waiting caller's thread writes here; the queue's own thread blocks the signals permanently.
  std::optional<detail::write_signals_held> held;
  if (options_.driver == transfer::driven_by::waiters) held.emplace().raised();
  tell_files();
  core_.admit();
  const std::uint64_t now = now_ns();
  if (const std::uint32_t asked = core_.take_pause(); asked != 0) quiet_until_ = now + asked * poll_ns;
  const bool quiet = now < quiet_until_;
  if (!quiet) core_.issue(engine_, now);
  std::uint64_t limit = core_.give_up(now);
  if (quiet) limit = detail::smaller(limit, quiet_until_ - now);
  if (core_.waits_for_others()) limit = detail::smaller(limit, poll_ns);
  const bool sleeps = least != 0 && core_.flying() == 0;
  if (followers_ != 0) ring();  // some may be complete before any completion arrives
  lock.unlock();
  if (sleeps) sleep_for(detail::smaller(limit, quiet ? limit : poll_ns));
  std::array<io_completion, batch> completions{};
  const result<std::size_t> count = engine_.reap(completions, {sleeps ? 0 : least, limit});
  if (!count) sleep_for(poll_ns);
  lock.lock();
  driven_ = false;
  engine_failures_ = count ? 0 : engine_failures_ + 1;
  const std::uint64_t then = now_ns();
  core_.settle(std::span(completions).first(count ? *count : 0), then);
  if (options_.tuning == io_tuning::on) tune(then);
  if (gave_up()) core_.engine_failed(count.error());
  if (followers_ != 0) ring();  // one of them drives next
  // Operations started in the meantime were left to this thread.
  if (std::exchange(kicked_, false) && least == 0) drive(lock, 0);
}

template <io_engine Engine>
void file_queue<Engine>::run() noexcept {
  detail::block_write_signals();
  std::unique_lock lock(mutex_);
  for (;;) {
    tell_files();
    core_.admit();
    const bool idle = !core_.has_work() && core_.flying() == 0 && !core_.waits_for_others();
    if (idle && stopping_ && is_quiet()) return forget_files();
    if (idle && !stopping_) {
      const std::uint32_t heard = bell_.load(std::memory_order_relaxed);
      lock.unlock();
      bell_.wait(heard, std::memory_order_relaxed);
      lock.lock();
    } else {
      drive(lock, 1);
    }
  }
}

}  // namespace v0
}  // namespace llmmem
