/// A rank stands still while two others suspect it, go on without it and end. Then it reads what came of
/// them, in every order in which the kernel can report it: it must not decide alone. The test plays the other
/// two.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/detail/socket_peers.hpp>

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/socket_pair.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::descriptor;
using detail::frame_sort;
using detail::handler_call;
using detail::ready_event;
using detail::socket_event;
using detail::socket_lane;

namespace {

constexpr std::uint64_t ms = 1'000'000;
constexpr std::uint16_t hello = 1;

/// One thing that happens at a peer's connections, or that the rank reads of them.
enum class step_kind : std::uint8_t {
  says_given_up,
  says_leaving,
  says_no_frame,   ///< on the lane of what is told
  sends_no_frame,  ///< on the lane of data
  ends_told,
  ends_data,
  exits,
  read_told,  ///< the rank takes what came, as epoll would report it
  read_data,
  see_exit,
};
struct step {
  std::uint32_t peer = 0;
  step_kind kind = step_kind::read_told;

  friend bool operator<(const step& a, const step& b) {
    return std::pair(a.peer, a.kind) < std::pair(b.peer, b.kind);
  }
};

/// The rank: an `endpoint` in seat 2 of 3, whose `poll` does the next step.
class zombie_endpoint {
 public:
  explicit zombie_endpoint(bool is_unix) : options_(options_of(is_unix)) {
    poller_.begin();
    now_ = start_ = poller_.clock().now();
    poller_.clock().restart_timers();
    for (std::uint32_t seat = 0; seat < 2; ++seat) {
      peers_.reserve(seat_id{seat});
      others_[seat].process = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    }
  }

  void does(const step& next) { script_.push_back(next); }
  /// Whether the peer told that it had given this rank up, or sent what no rank sends.
  [[nodiscard]] bool is_suspect(std::uint32_t peer) const { return others_[peer].is_suspect; }

  [[nodiscard]] seat_id self() const noexcept { return seat_id{2}; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return 3; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return 32; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now_ - start_; }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return options_.frame_bytes; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept { return peers_.is_up(seat); }
  template <class Handler>
  result<void> send(seat_id, const frame_header&, std::span<const std::byte>, deadline, Handler&) {
    return {};
  }
  void post(seat_id seat, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    peers_.post(seat, header, bytes);
  }
  template <class Handler>
  bool poll(deadline by, Handler& handler) {
    handler_call call{detail::refer_to(handler)};
    if (!has_met_) {
      has_met_ = true;
      for (std::uint32_t seat = 0; seat < 2; ++seat)
        meet(seat, call);
    }
    if (!script_.empty()) {
      const step next = script_.front();
      script_.pop_front();
      act(next, call);
      return true;
    }
    look(call);
    if (now_ns() >= by.ns) return call.has_come;
    constexpr std::uint64_t quantum = 50 * ms;
    now_ += quantum;
    poller_.clock().look(now_, quantum);
    peers_.run_timers(call);
    return call.has_come;
  }
  void withdraw(seat_id seat) noexcept { peers_.withdraw(seat); }
  void give_up(seat_id seat) noexcept { peers_.give_up(seat); }
  void wake() noexcept {}

 private:
  struct other {
    socket_pair data;
    socket_pair told;
    descriptor process;  // readable, as a pidfd, once it "exits"
    std::uint32_t told_sequence = 0;
    bool is_suspect = false;
  };

  static socket_options options_of(bool is_unix) {
    socket_options options;
    options.seats = 3;
    options.frame_bytes = max_post_bytes;
    options.post_queue_bytes = 2 * max_post_bytes;
    options.confirm_ns = 100 * ms;
    options.hard_silence_ns = 0;  // it is not silence that is judged here
    if (is_unix) options.folder = "/tmp";
    return options;
  }

  void meet(std::uint32_t seat, handler_call& call) {
    detail::incarnation_id life{};
    life.fill(std::byte(seat + 1));
    other& of = others_[seat];
    peers_.connect(seat_id{seat}, std::move(of.data.here), std::move(of.told.here),
                   descriptor(::dup(of.process.get())), life, false, call);
    std::array<std::byte, 8> nonce{};
    detail::wire_writer(nonce).put(std::uint64_t{seat} + 10);
    say(seat, frame_sort::frame, {.message = 8, .bytes = 8, .kind = hello}, nonce);
    handle(socket_event::told, seat, call);
  }
  void say(std::uint32_t seat, frame_sort sort, frame_header header = {},
           std::span<const std::byte> bytes = {}) {
    std::vector<std::byte> all(detail::wire_header_bytes);
    detail::write_header({header, socket_lane::told, sort, others_[seat].told_sequence++},
                         std::span<std::byte, detail::wire_header_bytes>(all.data(), all.size()));
    all.insert(all.end(), bytes.begin(), bytes.end());
    REQUIRE(others_[seat].told.say_there(all));
  }
  void handle(socket_event what, std::uint32_t seat, handler_call& call) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = detail::event_key(what, peers_.generation(seat_id{seat}), seat);
    // An event of a connection that is closed is none of the next one's.
    if (!peers_.has(seat_id{seat}) || is_closed(seat)) return;
    peers_.handle(ready_event(event), call);
  }
  [[nodiscard]] bool is_closed(std::uint32_t seat) const { return peers_.generation(seat_id{seat}) != 1; }
  void act(const step& next, handler_call& call) {
    other& of = others_[next.peer];
    const std::vector<std::byte> no_frame(detail::wire_header_bytes, std::byte{0xFF});
    switch (next.kind) {
      case step_kind::says_given_up:
        of.is_suspect = true;
        return say(next.peer, frame_sort::given_up);
      case step_kind::says_leaving:
        return say(next.peer, frame_sort::leaving);
      case step_kind::says_no_frame:
        of.is_suspect = true;
        REQUIRE(of.told.say_there(no_frame));
        return;
      case step_kind::sends_no_frame:
        of.is_suspect = true;
        REQUIRE(of.data.say_there(no_frame));
        return;
      case step_kind::ends_told:
        return of.told.there.close();
      case step_kind::ends_data:
        return of.data.there.close();
      case step_kind::exits: {
        const std::uint64_t one = 1;
        REQUIRE(::write(of.process.get(), &one, sizeof(one)) == sizeof(one));
        return;
      }
      case step_kind::read_told:
        return handle(socket_event::told, next.peer, call);
      case step_kind::read_data:
        return handle(socket_event::data, next.peer, call);
      case step_kind::see_exit:
        return handle(socket_event::process, next.peer, call);
    }
  }
  /// What epoll reports.
  void look(handler_call& call) {
    for (int i = 0; i < 4; ++i) {
      detail::socket_poller::event_array events{};
      poller_.begin();  // the poller measures the machine's time, the test its own
      const auto found = poller_.wait(0, -1, -1, events);
      poller_.clock().begin(now_);
      if (found.events == 0) return;
      for (std::size_t at = 0; at < found.events; ++at) {
        const ready_event event(events[at]);
        if (event.is_of(peers_.generation(seat_id{event.index}))) peers_.handle(event, call);
      }
    }
  }

  socket_options options_;
  detail::socket_poller poller_{true};
  detail::control_channel control_{poller_, 3, options_.post_queue_bytes};
  detail::call_schedule calls_{poller_.clock(), 3, options_.first_call_ns, options_.last_call_ns};
  detail::socket_peers peers_{poller_, control_, calls_, options_, 3};
  std::array<other, 2> others_;
  std::deque<step> script_;
  bool has_met_ = false;
  std::uint64_t now_ = 0;  // the test's time
  std::uint64_t start_ = 0;
};
static_assert(endpoint<zombie_endpoint>);

/// What the rank comes to when all that happens to it while it agrees with the others.
error_code ends_with(bool is_unix, const std::vector<step>& steps, bool* has_suspects = nullptr) {
  zombie_endpoint end(is_unix);
  communicator ranks(end);
  ranks.join({1'000 * ms}).value();
  REQUIRE(ranks.world() == rank_count{3});
  for (const step& each : steps)
    end.does(each);
  const auto outcome = ranks.agree(1, {10'000 * ms});
  if (has_suspects != nullptr) *has_suspects = end.is_suspect(0) || end.is_suspect(1);
  return outcome.code();
}

std::string to_text(const std::vector<step>& steps) {
  constexpr std::array names{"says given up", "says leaving", "says no frame", "sends no frame", "ends told",
                             "ends data",     "exits",        "read told",     "read data",      "see exit"};
  std::string text;
  for (const step& each : steps)
    text += std::to_string(each.peer) + " " + names[static_cast<std::size_t>(each.kind)] + "; ";
  return text;
}

/// A peer's last words, before its lanes end and it exits.
using last_words = std::vector<step_kind>;

}  // namespace

TEST_CASE("a rank that was given up decides nothing alone, in any order in which it reads what arrived") {
  const std::vector<std::pair<last_words, last_words>> pairs{
      {{step_kind::says_given_up, step_kind::says_leaving},
       {step_kind::says_given_up, step_kind::says_leaving}},
      {{step_kind::says_given_up}, {step_kind::says_given_up, step_kind::says_leaving}},
      {{step_kind::says_given_up, step_kind::says_no_frame},
       {step_kind::says_given_up, step_kind::sends_no_frame}},
      {{step_kind::says_given_up, step_kind::sends_no_frame},
       {}},  // the second one is killed before it knows
      {{step_kind::says_leaving}, {step_kind::says_given_up, step_kind::says_leaving}},
      {{step_kind::says_no_frame, step_kind::says_given_up}, {step_kind::sends_no_frame}},
      {{step_kind::says_leaving}, {}},  // nobody had given it up: it is all that is left
      {{}, {}},
  };
  std::uint64_t orders = 0;
  std::uint64_t alone = 0;
  for (const bool is_unix : {false, true}) {
    CAPTURE(is_unix);
    for (const auto& [first, second] : pairs) {
      std::vector<step> came;
      for (const step_kind each : first)
        came.push_back({0, each});
      for (const step_kind each : second)
        came.push_back({1, each});
      std::vector<step> reads;
      for (std::uint32_t peer = 0; peer < 2; ++peer) {
        for (const step_kind each : {step_kind::ends_told, step_kind::ends_data, step_kind::exits})
          came.push_back({peer, each});
        for (const step_kind each : {step_kind::read_told, step_kind::read_data, step_kind::see_exit})
          reads.push_back({peer, each});
      }
      do {
        std::vector<step> all = came;
        all.insert(all.end(), reads.begin(), reads.end());
        CAPTURE(to_text(all));
        bool has_suspects = false;
        const error_code how = ends_with(is_unix, all, &has_suspects);
        REQUIRE((how == errc::no_quorum) == has_suspects);
        REQUIRE((how == errc::ok) != has_suspects);
        alone += has_suspects ? 0U : 1U;
        ++orders;
      } while (std::next_permutation(reads.begin(), reads.end()));
    }
  }
  CHECK(orders == 2 * 8 * 720);
  CHECK(alone == 2 * 2 * 720);
}

TEST_CASE(
    "a rank that was given up decides nothing alone if the lanes of two peers deliver messages and ends one "
    "by one") {
  // Over TCP from other machines nothing but the order within a lane holds.
  const std::array<step_kind, 3> told{step_kind::says_given_up, step_kind::says_leaving,
                                      step_kind::ends_told};
  std::vector<std::uint32_t> channels{0, 0, 0, 1,
                                      2, 2, 2, 3};  // of told and of data, of the first and the second
  std::uint64_t orders = 0;
  do {
    std::array<std::size_t, 4> at{};
    std::vector<step> all;
    for (const std::uint32_t channel : channels) {
      const std::uint32_t peer = channel / 2;
      const bool is_told = channel % 2 == 0;
      all.push_back({peer, is_told ? told[at[channel]++] : step_kind::ends_data});
      all.push_back({peer, is_told ? step_kind::read_told : step_kind::read_data});
    }
    CAPTURE(to_text(all));
    REQUIRE((ends_with(false, all) == errc::no_quorum));
    ++orders;
  } while (std::next_permutation(channels.begin(), channels.end()));
  CHECK(orders == 1120);
}
