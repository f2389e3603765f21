/// @file
/// `scheduler`: when the operations that a program gives a device are done. Knows nothing of CUDA: streams,
/// events and graphs become operations, each of which comes behind others.
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

/// A task on its way. It is done once all that it comes behind are.
struct operation {
  task what{};
  u64 number = 0;  // in the order of submission
  u32 stream = 0;
  bool is_done = false;
  std::vector<operation_pointer> behind{};  // that were not done when it came
  u32 waits_for = 0;                        // of them, not done yet
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

/// When operations are done.
enum class timing {
  at_once,  ///< before the call that asks for them returns
  seeded,   ///< at any time that their order allows, as a seed decides
  late      ///< no sooner than somebody waits for them
};

/// Holds the operations that are not done, and does them.
///
/// Of a seed: at each call of the program some operations that may be done are done, of streams that the seed
/// prefers for a while. A call that waits has done what it waits for, in an order that the seed chooses, and
/// little else. Streams fall far behind each other, and run ahead of the host, more often than by a fair
/// coin: that is where missing waits show.
///
/// One seed always decides alike where one thread makes the calls. Copies and fills of 256 bytes or more may
/// be done in two parts, the last first, so that what reads them without order finds a half.
///
/// @par Thread safety   the caller holds `lock` in every call; a wait for a host function releases it.
class scheduler {
 public:
  std::mutex lock{};

  /// @param perform  does what a task asks. It does not throw.
  explicit scheduler(std::function<void(const task&)> perform) : perform_(std::move(perform)) {}

  void use(timing when, u64 seed);
  [[nodiscard]] timing when() const { return when_; }
  [[nodiscard]] u64 seed() const { return seed_; }

  /// Adds an operation of a stream. @return it, or the last part of it.
  operation_pointer add(task what, u32 stream, const std::vector<operation_pointer>& behind);
  /// Some operations are done now, if the timing has it so.
  void go_on();
  /// Does these, and what they come behind.
  void settle(const std::vector<operation_pointer>& wanted);
  void settle_all();
  /// Whether it is done. One that is not is brought nearer, so that a host that polls gets on: at the latest
  /// every fourth time by an operation.
  bool ask(operation& of);

  /// Calls `act(operation)` for those that are not done, the oldest first.
  template <class Act>
  void each_pending(const Act& act) const {
    for (const auto& [number, each] : pending_)
      act(*each);
  }
  /// Whether one comes behind the other, which is not done. `behind` may be the operations that one to come
  /// will come behind.
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
