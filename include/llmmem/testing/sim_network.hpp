/// @file
/// `sim_network`: the processes of a job in one process, with time, delays and deaths drawn by a seed.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// Thrown from an endpoint's call when its process is killed. It is not a `std::exception`, so that no
/// handler takes it for an error and continues: a killed process does nothing more.
struct process_killed {};

/// No process can ever continue: a hang. The text says which process waits for what.
class sim_stuck : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// How a simulated network behaves. Times in nanoseconds.
struct sim_options {
  std::uint32_t seats = 4;
  std::uint64_t seed = 1;
  std::uint64_t min_delay_ns = 2'000;  ///< the shortest delay of a frame
  std::uint64_t max_delay_ns = 100'000;
  std::uint64_t min_notice_ns = 10'000;  ///< the shortest time until a process notices a death
  std::uint64_t max_notice_ns = 10'000'000;
  std::uint64_t hard_silence_ns = 1'000'000'000;  ///< until an unreachable process is suspected
  std::uint32_t frame_bytes = 4096;
  std::uint64_t lane_bytes = 16384;  ///< the most data in flight between two processes: further data waits
  /// Data that a process can send, and equally much that it can take, from all others together; 0: unlimited.
  std::uint64_t bytes_per_second = 0;
  std::uint32_t corrupts_one_in = 0;  ///< frames of data in which one bit is flipped; 0: none
  std::uint64_t corrupts_until_ns = ~std::uint64_t{0};  ///< no frame is damaged after that time
  std::uint64_t max_calls = 10'000'000;                 ///< the most calls of all together; more counts as a
                                                        ///< hang
};

/// Enumerates all orders in which a process can receive what has arrived, with one run of a network for each.
///
///     order_choices orders;
///     do {
///       sim_network net({.seats = 3, .seed = seed});
///       net.choose(seat_id{2}, from_ns, until_ns, orders);
///       net.run(body);
///     } while (orders.next());
///
/// @par Complexity      as many runs as there are orders; memory for the choices of one run.
/// @par Thread safety   one thread at a time.
/// @par Errors          `choose` throws `std::logic_error` if a run does not repeat the one before it.
class order_choices {
 public:
  /// Returns which to receive next, below `of`.
  [[nodiscard]] std::uint32_t choose(std::uint32_t of) {
    if (of < 2) return 0;
    if (at_ == path_.size()) path_.push_back({.taken = 0, .of = of});
    const choice& next = path_[at_++];
    if (next.of == of) return next.taken;
    throw std::logic_error("order_choices: " + std::to_string(of) + " things to choose from, " +
                           std::to_string(next.of) +
                           " in the run before; let nothing but the choices differ between two runs");
  }
  /// Continues with the next order. Returns whether there is one.
  [[nodiscard]] bool next() noexcept {
    ++orders_;
    at_ = 0;
    while (!path_.empty() && path_.back().taken + 1 == path_.back().of)
      path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().taken;
    return true;
  }
  /// Returns the orders completed.
  [[nodiscard]] std::uint64_t orders() const noexcept { return orders_; }

 private:
  struct choice {
    std::uint32_t taken = 0;
    std::uint32_t of = 0;
  };
  std::vector<choice> path_{};
  std::size_t at_ = 0;
  std::uint64_t orders_ = 0;
};

class sim_network;

/// One process of a `sim_network`: the argument of its body. An `endpoint`.
class sim_endpoint {
 public:
  sim_endpoint(const sim_endpoint&) = delete;
  sim_endpoint& operator=(const sim_endpoint&) = delete;

  [[nodiscard]] seat_id self() const noexcept { return self_; }
  [[nodiscard]] std::uint32_t seats() const noexcept;
  [[nodiscard]] std::uint64_t nonce() const noexcept { return std::uint64_t{number_} + 1; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept;
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept;
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept;
  /// Returns how many processes had this seat before.
  [[nodiscard]] std::uint32_t incarnation() const noexcept { return incarnation_; }

  template <frame_handler Handler>
  result<void> send(seat_id to, const frame_header& frame, std::span<const std::byte> bytes, deadline by,
                    Handler& handler);
  void post(seat_id to, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  [[deprecated("call post()")]] void tell(seat_id to, const frame_header& frame,
                                          std::span<const std::byte> bytes) noexcept {
    post(to, frame, bytes);
  }
  template <frame_handler Handler>
  [[nodiscard]] bool poll(deadline by, Handler& handler);
  void withdraw(seat_id from) noexcept;
  void give_up(seat_id seat) noexcept;
  void wake() noexcept;

  /// Computes: time passes, and the process receives nothing.
  void work(std::uint64_t ns);

 private:
  friend class sim_network;
  struct frame_on_wire {
    frame_header header{};
    std::vector<std::byte> bytes{};
    std::uint64_t due = 0;
  };
  /// The frames from one process to another.
  struct wire {
    std::deque<frame_on_wire> told{};
    std::deque<frame_on_wire> data{};
    std::uint64_t data_bytes = 0;
    std::uint64_t last_due[2] = {0, 0};  // of notices, of data: order is kept
    bool is_held = false;                // the handler answered `ask_again`
  };
  struct notice {
    std::uint64_t due = 0;
    std::uint32_t process = 0;
    enum class kind : std::uint8_t { came, died, suspected } what = kind::came;
  };
  enum class phase : std::uint8_t { not_started, ready, waits, works, over };

  sim_endpoint(sim_network& net, seat_id self, std::uint32_t number, std::uint32_t incarnation)
      : net_(&net), self_(self), number_(number), incarnation_(incarnation) {}

  template <frame_handler Handler>
  [[nodiscard]] bool deliver_one(Handler& handler);
  void ask_again() noexcept;
  [[nodiscard]] bool is_next_of_its_seat(std::size_t at) const noexcept;

  sim_network* net_;
  seat_id self_;
  std::uint32_t number_;       // of the process, in the network
  std::uint32_t incarnation_;  // of the seat
  phase phase_ = phase::not_started;
  bool is_dead_ = false;
  bool is_woken_ = false;
  std::uint64_t resumes_at_ = 0;   // while it waits or works
  std::uint64_t sends_until_ = 0;  // its sends occupy its link until then
  std::uint64_t takes_until_ = 0;
  std::uint32_t full_receiver_ = ~0U;  // process that must take its data first, or none
  std::uint64_t bytes_to_send_ = 0;    // the number of its bytes
  std::uint64_t calls_ = 0;
  std::uint64_t dies_in_call_ = ~std::uint64_t{0};
  std::vector<std::uint32_t> connected_{};  // by seat: the process there, or none
  std::vector<std::uint32_t> speaks_{};     // by seat: the process that notices can reach there, or none
  std::vector<notice> notices_{};
  std::condition_variable turn_{};
};

/// Runs a body for each seat, in its own thread, one at a time: the seed draws which continues, and time is
/// virtual, so every run of a seed is the same.
///
///     sim_network net({.seats = 4, .seed = seed});
///     net.kill_in_call(seat_id{2}, 17);
///     net.run([](sim_endpoint& end) { communicator ranks(end); ... });
///
/// Its model: frames take time, each its own, in order within a lane, and longer over busy links
/// (`bytes_per_second`). A process that sends too much waits. A process dies in any of its calls or at any
/// time; its frames in flight then arrive or not, and every other process notices in its own time. A process
/// pauses for a while. Two groups cannot reach each other for a while, or for ever. Bits are flipped. A fresh
/// process takes the seat of a dead one. A process that is unreachable for `hard_silence_ns` is suspected.
///
/// @par Complexity      a call O(seats) and a change of threads, some 5 microseconds.
/// @par Thread safety   plan from one thread, before `run`.
/// @par Errors          `run` throws what a body threw, if several threw that of the lowest process;
///      `sim_stuck` if no process can continue.
/// @par Source          the method: FoundationDB's simulation (apple.github.io/foundationdb/testing.html).
class sim_network {
 public:
  /// @throws argument_error  for no seats, or delays whose least exceeds the most.
  explicit sim_network(const sim_options& options);
  sim_network(const sim_network&) = delete;
  sim_network& operator=(const sim_network&) = delete;

  /// The first process of the seat, or its `incarnation`-th, dies within its `call`-th call of its endpoint,
  /// from 0.
  void kill_in_call(seat_id seat, std::uint64_t call, std::uint32_t incarnation = 0);
  void kill_at(seat_id seat, std::uint64_t ns);
  /// The seat does nothing from `from_ns` until `until_ns`.
  void stop(seat_id seat, std::uint64_t from_ns, std::uint64_t until_ns);
  /// Nothing passes between `group` and all others from `from_ns` until `until_ns`.
  void part(const seat_set& group, std::uint64_t from_ns, std::uint64_t until_ns);
  /// `orders` chooses, instead of the seed, the order in which the seat's processes receive what has arrived,
  /// from `from_ns` until `until_ns`. `orders` outlives the run.
  void choose(seat_id seat, std::uint64_t from_ns, std::uint64_t until_ns, order_choices& orders);
  /// A fresh process takes the seat `ns` after the last one died. May be called several times.
  void restart_after(seat_id seat, std::uint64_t ns);

  /// Runs all processes until they have returned or were killed. Call it once.
  template <class Body>
  void run(Body body);

  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now_; }
  /// Whether the process was killed.
  [[nodiscard]] bool was_killed(seat_id seat, std::uint32_t incarnation = 0) const noexcept;
  /// Returns how many calls of its endpoint the process made.
  [[nodiscard]] std::uint64_t calls(seat_id seat, std::uint32_t incarnation = 0) const noexcept;
  [[nodiscard]] std::uint64_t frames_corrupted() const noexcept { return corrupted_; }

 private:
  friend class sim_endpoint;
  using lock = std::unique_lock<std::mutex>;
  struct pause {
    seat_id seat{};
    std::uint64_t from = 0;
    std::uint64_t until = 0;
  };
  struct parting {
    seat_set group{};
    std::uint64_t from = 0;
    std::uint64_t until = 0;
  };
  struct timed_death {
    seat_id seat{};
    std::uint64_t at = 0;
  };
  struct start {
    std::uint64_t after = 0;  // the death of the process before
    std::uint64_t at = ~std::uint64_t{0};
  };

  [[nodiscard]] sim_endpoint* find(seat_id seat, std::uint32_t incarnation) const noexcept;
  [[nodiscard]] sim_endpoint::wire& wire_between(std::uint32_t from, std::uint32_t to) noexcept {
    return wires_[std::size_t{from} * processes_.size() + to];
  }
  [[nodiscard]] std::uint64_t draw(std::uint64_t least, std::uint64_t most) {
    return least + random_() % (most - least + 1);
  }
  sim_endpoint& add(seat_id seat, std::uint64_t after);
  template <class Body>
  void live(sim_endpoint& process, Body& body, std::exception_ptr& thrown);
  void plan_silences();
  [[nodiscard]] std::size_t choose_next(seat_id seat, std::size_t of);

  // All under the lock, by the process whose turn it is.
  void begin_call(sim_endpoint& process);
  void give_way(sim_endpoint& process, lock& held);
  void pass_on();
  [[nodiscard]] std::uint64_t resumes(sim_endpoint& process) noexcept;
  [[nodiscard]] std::uint64_t next_due(sim_endpoint& process) noexcept;
  [[nodiscard]] std::uint64_t past_pauses(seat_id seat, std::uint64_t time) const noexcept;
  [[nodiscard]] std::uint64_t past_partings(seat_id a, seat_id b, std::uint64_t time) const noexcept;
  [[nodiscard]] std::uint64_t past_links(sim_endpoint& from, sim_endpoint& to, std::uint64_t delay,
                                         std::uint64_t bytes) const;
  void reach(std::uint64_t time);
  [[nodiscard]] bool fits_in_flight(std::uint32_t from, std::uint32_t to, std::uint64_t bytes) noexcept;
  void die(sim_endpoint& process);
  void leave(sim_endpoint& process);
  void connect(sim_endpoint& process);
  void notify(sim_endpoint& whom, std::uint64_t due, std::uint32_t of, sim_endpoint::notice::kind what);
  void put(sim_endpoint& from, sim_endpoint& to, const frame_header& frame, std::span<const std::byte> bytes,
           std::size_t lane);
  [[nodiscard]] std::string who_waits() const;

  sim_options options_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::uint64_t now_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t corrupted_ = 0;
  std::vector<std::unique_ptr<sim_endpoint>> processes_{};
  std::vector<start> starts_{};
  std::vector<sim_endpoint::wire> wires_{};
  std::vector<pause> pauses_{};
  std::vector<parting> partings_{};
  std::vector<timed_death> deaths_{};
  seat_id chosen_seat_ = no_seat;
  std::uint64_t chosen_from_ = 0;
  std::uint64_t chosen_until_ = 0;
  order_choices* orders_ = nullptr;
  sim_endpoint* turn_ = nullptr;
  bool is_stuck_ = false;
  std::string stuck_{};
};

static_assert(endpoint<sim_endpoint>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem

#include <llmmem/testing/detail/sim_network_body.hpp>
