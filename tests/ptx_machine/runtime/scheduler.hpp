/// @file
/// `scheduler`: decides when a device performs the operations that a program gives it. It knows nothing of
/// CUDA: streams, events and graphs become operations, each of which is ordered behind others.
#pragma once

#include "ptx_machine/parse.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ptx_machine {

/// Bytes copied, or set to one value.
struct move_of_bytes {
  u64 to = 0;
  u64 from = 0;
  u64 bytes = 0;
  int value = -1;                                 // from 0 on: what the bytes are set to
  std::shared_ptr<const std::vector<u8>> staged;  // what `from` points to, where the call copied it
};

/// Memory that an operation may use.
struct named_bytes {
  u64 at = 0;
  u64 bytes = 0;
  [[nodiscard]] bool meets(const named_bytes& other) const {
    return at < other.at + other.bytes && other.at < at + bytes;
  }
};

/// What one call asks of a device.
struct task {
  std::string call{};  // as a fault names it
  std::function<void()> act{};
  std::vector<move_of_bytes> moves{};  // besides
  std::vector<named_bytes> names{};
  bool is_host_function = false;  // `act` runs in a thread of its own, as a driver's does
  bool is_unordered = false;      // of `moves`, any may be first
};

struct operation;
using operation_pointer = std::shared_ptr<operation>;

/// A pending task. It may be performed once everything that it is ordered behind is done.
struct operation {
  task what{};
  u64 number = 0;  // in the order of submission
  u32 stream = 0;
  bool is_done = false;
  std::vector<operation_pointer> behind{};  // that were pending when it was added
  u32 waits_for = 0;                        // how many of them are pending
  std::vector<operation*> then{};
  u64 needed_by = 0;
  u32 asked = 0;
};

/// Random numbers of a seed (splitmix64).
class seeded_numbers {
 public:
  explicit seeded_numbers(u64 seed) : at_(seed * 0x9E37'79B9'7F4A'7C15 + 1) {}
  u64 next() {
    u64 z = at_ += 0x9E37'79B9'7F4A'7C15;
    z = (z ^ z >> 30) * 0xBF58'476D'1CE4'E5B9;
    z = (z ^ z >> 27) * 0x94D0'49BB'1331'11EB;
    return z ^ z >> 31;
  }
  /// Below `count`.
  u64 below(u64 count) { return next() % count; }

 private:
  u64 at_;
};

/// When operations are performed.
enum class timing {
  at_once,  ///< before the call that asks for them returns
  seeded,   ///< at any time that their order allows; a seed decides
  late      ///< only when a call waits for them
};

/// Holds pending operations and performs them.
///
/// With a seed, each call of the program performs some of the operations that are free to run, of streams
/// that the seed prefers for a while. A call that waits performs what it waits for, in an order that the seed
/// chooses, and little else. Streams fall far behind each other, and run far ahead of the host, more often
/// than by a fair coin, because that is where missing waits show.
///
/// One seed always decides alike as long as one thread makes the calls. Copies and fills of 256 bytes or more
/// may be performed in two parts, the last part first, so that a reader without order finds a half.
///
/// @par Thread safety   the caller holds `lock` in every call; a wait for a host function releases it.
class scheduler {
 public:
  std::mutex lock{};

  /// @param perform  performs a task. It does not throw.
  explicit scheduler(std::function<void(const task&)> perform) : perform_(std::move(perform)) {}

  void use(timing when, u64 seed);
  [[nodiscard]] timing when() const { return when_; }
  [[nodiscard]] u64 seed() const { return seed_; }

  /// Adds an operation of a stream. @return it, or the last part of it.
  operation_pointer add(task what, u32 stream, const std::vector<operation_pointer>& behind);
  /// Performs some operations now, if the timing allows.
  void proceed();
  /// Performs `wanted` and everything that they are ordered behind.
  void settle(const std::vector<operation_pointer>& wanted);
  void settle_all();
  /// Whether it is done. Asking brings a pending operation nearer, so that a host that polls makes progress:
  /// each fourth time performs at least one operation.
  bool ask(operation& of);

  /// Calls `act(operation)` for each pending operation, the oldest first.
  template <class Act>
  void each_pending(const Act& act) const {
    for (const auto& [number, each] : pending_)
      act(*each);
  }
  /// Whether an operation that is ordered behind `behind` is also ordered behind `first`, which is pending.
  [[nodiscard]] bool is_ordered(const operation& first, const std::vector<operation_pointer>& behind);
  /// Whether the calling thread executes a host function.
  [[nodiscard]] static bool is_in_host_function();

 private:
  operation_pointer put(task what, u32 stream, const std::vector<operation_pointer>& behind);
  void split(task& first, task& last);
  void mark(const std::vector<operation_pointer>& wanted);
  void start(operation& next, bool waits);
  void finish(operation& of);
  operation* preferred();
  operation* needed();
  void work_for_host();

  std::function<void(const task&)> perform_;
  timing when_ = timing::at_once;
  u64 seed_ = 0;
  seeded_numbers random_{0};
  u64 eagerness_ = 0;         // of 8, that one more is done
  std::map<u32, u64> wants_;  // how much a stream is preferred; 0: it sleeps
  std::map<u64, operation_pointer> pending_{};
  std::map<u64, operation*> ready_{};
  u64 next_number_ = 1;
  u64 ticket_ = 0;
  std::condition_variable came_{};
  std::deque<operation*> for_host_{};
  bool has_worker_ = false;
};

}  // namespace ptx_machine
