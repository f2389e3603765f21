#include <llmmem/comm/communicator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

// What members tell each other, by `frame_header::kind`.
constexpr std::uint16_t hello = 1;
constexpr std::uint16_t welcome = 2;
constexpr std::uint16_t revoke = 3;
constexpr std::uint16_t fenced = 4;
constexpr std::uint16_t agrees = 5;

/// An endpoint to which what is written down happens, one thing a poll; then time passes.
class scripted_endpoint {
 public:
  scripted_endpoint(seat_id self, std::uint32_t seats, std::uint64_t nonce)
      : self_(self), seats_(seats), nonce_(nonce) {}

  void comes(seat_id seat) { script_.push_back({what::came, seat, {}, {}, {}}); }
  void dies(seat_id seat, comm::death how = comm::death::certain) {
    script_.push_back({what::died, seat, how, {}, {}});
  }
  /// A message of one byte, which is lost where it is not taken.
  void sends(seat_id seat, std::uint64_t epoch, std::uint32_t tag, std::byte byte) {
    script_.push_back({what::sent, seat, {}, {.epoch = epoch, .message = 1, .bytes = 1, .tag = tag}, {byte}});
  }
  void says_hello(seat_id seat, std::uint64_t epoch, std::uint64_t nonce) {
    says(seat, hello, epoch, {nonce});
  }
  /// Members, and the nonces of these.
  void says_welcome(seat_id seat, std::uint64_t epoch, std::uint64_t members,
                    std::initializer_list<std::uint64_t> nonces) {
    std::vector<std::uint64_t> words{members};
    words.insert(words.end(), nonces);
    says(seat, welcome, epoch, words);
  }
  void says_revoke(seat_id seat, std::uint64_t epoch) { says(seat, revoke, epoch, {}); }
  void says_fenced(seat_id seat, std::uint64_t epoch) { says(seat, fenced, epoch, {}); }
  void says_agree(seat_id seat, std::uint64_t epoch, const agree_message& message) {
    detail::told_bytes room;
    const auto bytes = detail::encode(message, seats_, room);
    says_bytes(seat, agrees, epoch, std::vector(bytes.begin(), bytes.end()));
  }
  [[nodiscard]] const seat_set& given_up() const { return given_up_; }
  /// Who was told of that kind, and of which epoch.
  [[nodiscard]] std::vector<std::pair<seat_id, std::uint64_t>> told(std::uint16_t kind) const {
    std::vector<std::pair<seat_id, std::uint64_t>> all;
    for (const auto& [seat, header] : told_) {
      if (header.kind == kind) all.emplace_back(seat, header.epoch);
    }
    return all;
  }
  /// Which founders those go back to who speak: as a communicator says it of itself.
  std::uint64_t founding = 0;
  /// Nobody takes what is sent: what is written down happens while the sender waits.
  bool is_stuck = false;

  [[nodiscard]] seat_id self() const noexcept { return self_; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return seats_; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now_; }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return 4096; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept { return connected_.contains(seat); }
  template <class Handler>
  result<void> send(seat_id, const frame_header&, std::span<const std::byte>, deadline by, Handler& handler) {
    if (!is_stuck) return {};
    do {
      if (!handler.keeps_waiting()) return failure{.code = errc::cancelled};
    } while (poll(by, handler));
    return failure{.code = errc::peer_timed_out};
  }
  void post(seat_id seat, const frame_header& header, std::span<const std::byte>) noexcept {
    told_.emplace_back(seat, header);
  }
  template <class Handler>
  bool poll(deadline by, Handler& handler) {
    if (script_.empty()) {
      now_ = by.ns > now_ ? by.ns : now_;
      return false;
    }
    const event next = script_.front();
    script_.pop_front();
    switch (next.kind) {
      case what::came:
        connected_.insert(next.seat);
        handler.on_joined(next.seat);
        break;
      case what::died:
        connected_.erase(next.seat);
        handler.on_death(next.seat, next.how);
        break;
      case what::told:
        handler.on_message(next.seat, next.header, next.bytes);
        break;
      case what::sent:
        if (const frame_buffer into = handler.buffer_for(next.seat, next.header);
            into.what == frame_buffer::answer::take) {
          std::ranges::copy(next.bytes, into.bytes.begin());
          handler.on_frame(next.seat, next.header);
        }
        break;
    }
    return true;
  }
  void withdraw(seat_id) noexcept {}
  void give_up(seat_id seat) noexcept { given_up_.insert(seat); }
  void wake() noexcept {}

 private:
  enum class what : std::uint8_t { came, died, told, sent };
  struct event {
    what kind = what::came;
    seat_id seat{};
    comm::death how = comm::death::certain;
    frame_header header{};
    std::vector<std::byte> bytes{};
  };

  void says(seat_id seat, std::uint16_t kind, std::uint64_t epoch, const std::vector<std::uint64_t>& words) {
    std::vector<std::byte> bytes(words.size() * 8);
    detail::wire_writer out(bytes);
    for (const std::uint64_t each : words)
      out.put(each);
    says_bytes(seat, kind, epoch, std::move(bytes));
  }
  void says_bytes(seat_id seat, std::uint16_t kind, std::uint64_t epoch, std::vector<std::byte> bytes) {
    const auto size = static_cast<std::uint32_t>(bytes.size());
    script_.push_back({what::told,
                       seat,
                       {},
                       {.epoch = epoch, .message = size, .offset = founding, .bytes = size, .kind = kind},
                       std::move(bytes)});
  }

  seat_id self_;
  std::uint32_t seats_;
  std::uint64_t nonce_;
  std::uint64_t now_ = 0;
  seat_set connected_{};
  seat_set given_up_{};
  std::vector<std::pair<seat_id, frame_header>> told_{};
  std::deque<event> script_{};
};
static_assert(endpoint<scripted_endpoint>);

const seat_id zero{0};
const seat_id one{1};
const seat_id two{2};

/// Seat 2 of three, which comes to a job in its fifth epoch: seats 0 and 1 have nonces 10 and 21 there.
scripted_endpoint newcomer() {
  scripted_endpoint end(two, 3, 30);
  end.comes(zero);
  end.says_hello(zero, 5, 10);
  return end;
}

/// Seat 0 of three, all of which are fresh: seats 1 and 2 have nonces 21 and 22.
scripted_endpoint first_of_three() {
  scripted_endpoint end(zero, 3, 10);
  for (const seat_id seat : {one, two}) {
    end.comes(seat);
    end.says_hello(seat, 0, 20 + to_index(seat));
  }
  return end;
}

}  // namespace

TEST_SUITE("communicator_membership") {
  TEST_CASE(
      "the death of a seat's earlier process does not count for the member that a newcomer has yet to meet") {
    scripted_endpoint end = newcomer();
    end.comes(one);
    end.says_hello(one, 5, 20);  // a process that has died since, which this one has not noticed
    end.says_welcome(zero, 6, 0b111, {10, 21, 30});
    end.dies(one);
    communicator ranks(end);
    const auto waits = ranks.join({100});
    CHECK(waits.error() ==
          failure{errc::seat_missing, 1, static_cast<std::uint64_t>(seat_absence::ended), 1});
    CHECK(ranks.epoch() == 6);
    CHECK(ranks.failed().empty());
    end.comes(one);
    end.says_hello(one, 6, 21);
    ranks.join({200}).value();
    CHECK(ranks.failed().empty());
    CHECK(ranks.rank() == rank_id{2});
    end.dies(one);
    ranks.poll();
    CHECK(to_text(ranks.failed()) == "seat 1");
  }

  TEST_CASE(
      "a process that ended before it identified itself may have been the member, which is then suspected") {
    for (const bool is_known : {true, false}) {
      CAPTURE(is_known);
      scripted_endpoint end = newcomer();
      end.comes(one);
      if (is_known) end.says_hello(one, 5, 21);
      end.says_welcome(zero, 6, 0b111, {10, 21, 30});
      end.dies(one);
      communicator ranks(end);
      ranks.join({100}).value();
      ranks.poll();
      CHECK(to_text(ranks.failed()) == "seat 1");
      // It may be another one, and the member go on with others.
      end.dies(zero);
      CHECK(ranks.agree(1, {200}).code() == (is_known ? errc::ok : errc::no_quorum));
    }
  }

  TEST_CASE("a newcomer does not wait for a member it has yet to meet once others have revoked the epoch") {
    for (const bool is_at_once : {true, false}) {
      CAPTURE(is_at_once);
      scripted_endpoint end = newcomer();
      end.says_welcome(zero, 6, 0b111, {10, 21, 30});
      communicator ranks(end);
      if (!is_at_once) CHECK(ranks.join({100}).code() == errc::seat_missing);
      end.says_revoke(one, 5);  // of an epoch that is over
      if (is_at_once) ranks.poll();
      CHECK(ranks.join({200}).code() == errc::seat_missing);
      end.says_revoke(zero, 6);
      ranks.join({300}).value();
      CHECK(ranks.is_revoked());
      CHECK(ranks.epoch() == 6);
      CHECK(end.now_ns() < 300);
    }
    // It may come before the newcomer has looked at its welcome.
    scripted_endpoint end = newcomer();
    end.says_welcome(zero, 6, 0b111, {10, 21, 30});
    end.says_revoke(zero, 6);
    communicator ranks(end);
    ranks.poll();
    ranks.join({300}).value();
    CHECK(ranks.is_revoked());
    CHECK(end.now_ns() == 0);
  }

  TEST_CASE("a member that reported itself as fresh after the epoch had begun waits for no later message") {
    scripted_endpoint end(zero, 3, 10);
    end.comes(one);
    end.comes(two);
    end.says_hello(two, 0, 22);
    end.says_welcome(two, 1, 0b111, {10, 21, 22});  // seat 1 had met all before this one did
    end.says_hello(one, 0, 21);
    communicator ranks(end);
    ranks.join({100}).value();
    CHECK(ranks.epoch() == 1);
    // Of seat 1's death all but this one know already.
    ranks.shrink({.failed = {one}});
    CHECK(ranks.waiting().empty());
    ranks.shrink({});
    CHECK(ranks.waiting().empty());
  }

  TEST_CASE(
      "a fresh process in the seat of a member that died before this process began is not given up for that "
      "death") {
    scripted_endpoint end(zero, 3, 10);
    end.comes(one);
    end.comes(two);
    end.says_hello(two, 0, 22);
    end.dies(two);
    end.comes(two);
    end.says_hello(two, 0, 99);                     // it is in no epoch
    end.says_welcome(one, 1, 0b111, {10, 21, 22});  // seat 1 began with the process that has died
    end.says_revoke(one, 1);
    communicator ranks(end);
    ranks.join({100}).value();
    CHECK(ranks.epoch() == 1);
    CHECK(to_text(ranks.waiting()) == "seat 2");
    ranks.shrink({.failed = {two}});
    CHECK(end.given_up().empty());
    CHECK(to_text(ranks.waiting()) == "seat 2");
    ranks.admit({.joining = {two}});
    CHECK(ranks.failed().empty());
  }

  TEST_CASE(
      "a process that was admitted before it introduced itself counts as a member once it has done so") {
    scripted_endpoint end(zero, 2, 10);
    end.comes(one);
    end.says_hello(one, 0, 21);
    communicator ranks(end);
    ranks.join({100}).value();
    end.dies(one);
    ranks.poll();
    ranks.shrink({.failed = {one}});
    end.comes(one);
    ranks.poll();
    ranks.admit({.joining = {one}});
    end.says_hello(one, 0, 99);
    end.sends(one, 3, 7, std::byte{5});
    std::byte byte{};
    ranks.recv({&byte, 1}, rank_id{1}, 7, {200}).value();
    CHECK(byte == std::byte{5});
    CHECK(ranks.waiting().empty());
    CHECK(ranks.failed().empty());
  }

  TEST_CASE("messages of an epoch from a process outside it are ignored, and the process is fenced") {
    scripted_endpoint end(zero, 3, 10);
    end.comes(one);
    end.comes(two);
    end.says_hello(one, 0, 21);
    end.says_hello(two, 0, 22);
    communicator ranks(end);
    ranks.join({100}).value();
    end.dies(two);
    end.comes(two);
    end.says_hello(two, 0, 99);
    end.says_welcome(two, 1, 0b111, {10, 21, 99});  // it took the others for fresh, and began alone
    ranks.poll();
    CHECK(end.told(fenced) == std::vector{std::pair{two, std::uint64_t{2}}});
    end.says_agree(two, 1, {.kind = llmmem::agree_kind::report, .instance = 0});
    end.says_revoke(two, 1);
    end.sends(two, 1, 7, std::byte{5});
    ranks.poll();
    CHECK(end.told(fenced).size() == 2);
    CHECK_FALSE(ranks.is_revoked());
    CHECK(ranks.stats().stale_frames == 1);
  }

  TEST_CASE("an answer of the former epoch goes to its member alone, not to another process in that seat") {
    const auto decided_for = [](std::uint64_t hello_epoch, bool is_admitted) {
      scripted_endpoint end = first_of_three();
      communicator ranks(end);
      ranks.join({100}).value();
      end.dies(two);
      ranks.poll();
      end.says_agree(one, 1, {.kind = llmmem::agree_kind::report, .certain = seat_set::from_words({0b100})});
      end.says_agree(one, 1, {.kind = llmmem::agree_kind::accept, .certain = seat_set::from_words({0b100})});
      REQUIRE(ranks.agree(1, {200}));
      end.comes(two);
      end.says_hello(two, hello_epoch, 99);  // it may have begun epoch 1 by what was true before
      ranks.poll();
      if (is_admitted) {
        ranks.admit({.failed = {two}, .joining = {two}});
      } else {
        ranks.shrink({.failed = {two}});
      }
      const std::size_t before = end.told(agrees).size();
      end.says_agree(one, 1, {.kind = llmmem::agree_kind::query, .instance = 0});
      end.says_agree(two, 1, {.kind = llmmem::agree_kind::query, .instance = 0});
      ranks.poll();
      auto told = end.told(agrees);
      told.erase(told.begin(), told.begin() + static_cast<std::ptrdiff_t>(before));
      CHECK(end.told(fenced).size() == (is_admitted ? 0 : 1));
      return told;
    };
    // The member asks for what was decided, and is told; the other one is not.
    const std::vector to_the_member{std::pair{one, std::uint64_t{1}}};
    CHECK(decided_for(1, false) == to_the_member);
    CHECK(decided_for(0, true) == to_the_member);
  }

  TEST_CASE(
      "a welcome to a later epoch fences a process that is in an epoch, and a welcome to an earlier one "
      "fences its author") {
    const auto after = [](auto says) {
      scripted_endpoint end = first_of_three();
      communicator ranks(end);
      ranks.join({100}).value();
      ranks.shrink({.failed = {two}});
      says(end);
      ranks.poll();
      std::byte byte{};
      const error_code why = ranks.recv({&byte, 1}, rank_id{1}, 1, {200}).code();
      return std::pair{why, end.told(fenced).size()};
    };
    using outcome = std::pair<error_code, std::size_t>;
    const outcome is_out{errc::no_quorum, 0};
    const outcome goes_on{errc::peer_timed_out, 0};
    CHECK(after([](auto& end) { end.says_welcome(one, 3, 0b011, {10, 21}); }) == is_out);
    CHECK(after([](auto& end) { end.says_welcome(two, 4, 0b111, {10, 21, 22}); }) == is_out);
    // For a process that sat here before, or one that leaves this seat out: nothing is known by it.
    CHECK(after([](auto& end) { end.says_welcome(two, 4, 0b101, {9, 22}); }) == goes_on);
    CHECK(after([](auto& end) { end.says_welcome(two, 4, 0b110, {21, 22}); }) == goes_on);
    CHECK(after([](auto& end) { end.says_welcome(one, 2, 0b011, {10, 21}); }) == goes_on);
    // Its author is out of this epoch.
    CHECK(after([](auto& end) { end.says_welcome(two, 2, 0b111, {10, 21, 22}); }) ==
          outcome{errc::peer_timed_out, 1});
  }

  TEST_CASE("a member whose epoch has other founders is suspected, whenever that becomes known") {
    const std::uint64_t ours = llmmem::detail::founding_of({10, 21, 22});
    CHECK(ours != llmmem::detail::founding_of({10, 21, 23}));
    CHECK(ours != llmmem::detail::founding_of({21, 10, 22}));
    for (const std::uint64_t theirs : {std::uint64_t{0}, ours, ours + 2}) {
      for (const bool is_before : {true, false}) {
        CAPTURE(theirs == ours);
        CAPTURE(is_before);
        scripted_endpoint end = first_of_three();
        communicator ranks(end);
        if (!is_before) ranks.join({100}).value();
        end.founding = theirs;
        end.says_welcome(one, 1, 0b111, {9, 21, 99});
        if (is_before) ranks.join({100}).value();
        ranks.poll();
        CHECK(to_text(ranks.failed()) == (theirs > ours ? "seat 1" : "no seat"));
        end.founding = 0;
        end.dies(one);
        end.dies(two);
        // It may have agreed on something else with the process that took the seat of the third one.
        CHECK(ranks.agree(1, {200}).code() == (theirs > ours ? errc::no_quorum : errc::ok));
      }
    }
    // A newcomer takes the founders of those that welcome it.
    scripted_endpoint end = newcomer();
    end.founding = 77;
    end.says_welcome(zero, 6, 0b101, {10, 30});
    communicator ranks(end);
    ranks.join({100}).value();
    end.says_revoke(zero, 6);
    ranks.poll();
    CHECK(ranks.failed().empty());
  }

  TEST_CASE("a process that this one has given up is suspected in the epoch to which others admit it") {
    scripted_endpoint end(zero, 3, 10);
    end.comes(one);
    end.comes(two);
    end.says_hello(one, 0, 21);
    end.says_hello(two, 0, 22);
    communicator ranks(end);
    ranks.join({100}).value();
    ranks.shrink({.failed = {two}});
    CHECK(to_text(end.given_up()) == "seat 2");
    ranks.admit({.joining = {two}});
    CHECK(to_text(ranks.failed()) == "seat 2");
    ranks.shrink({.failed = {two}});
    end.dies(two);
    end.comes(two);  // a fresh one
    end.says_hello(two, 0, 99);
    ranks.poll();
    ranks.admit({.joining = {two}});
    CHECK(ranks.failed().empty());
  }

  TEST_CASE("at the deadline, the error names each missing seat and what is known of it") {
    const auto missing = [](seat_id seat, seat_absence why, std::uint64_t count) {
      return failure{errc::seat_missing, to_index(seat), static_cast<std::uint64_t>(why), count};
    };
    scripted_endpoint end(two, 3, 30);
    communicator ranks(end, {.name = "job"});
    CHECK(ranks.join({100}).error() == missing(zero, seat_absence::no_contact, 2));
    CHECK(ranks.join({100}).error().message() ==
          "job: seat 0 and 1 more are missing at the deadline: nothing has arrived from it; start its "
          "process, and give all processes the same folder or addresses");
    end.comes(zero);
    CHECK(ranks.join({200}).error() == missing(zero, seat_absence::no_answer, 2));
    end.says_hello(zero, 5, 10);
    CHECK(ranks.join({300}).error() == missing(zero, seat_absence::in_epoch, 2));
    end.dies(zero);
    CHECK(ranks.join({400}).error() == missing(zero, seat_absence::ended, 2));
    end.comes(zero);
    end.says_hello(zero, 0, 11);
    CHECK(ranks.join({500}).error() == missing(one, seat_absence::no_contact, 1));
    CHECK(ranks.epoch() == 0);
  }

  TEST_CASE("what the endpoint knows of a missing seat is reported, unless its death says more") {
    struct knowing_endpoint : scripted_endpoint {
      using scripted_endpoint::scripted_endpoint;
      [[nodiscard]] seat_absence why_missing(seat_id) const noexcept { return knows; }
      seat_absence knows = seat_absence::no_contact;
    };
    static_assert(endpoint<knowing_endpoint> && detail::reports_absence<knowing_endpoint>);
    static_assert(!detail::reports_absence<scripted_endpoint>);
    knowing_endpoint end(one, 2, 21);
    communicator ranks(end);
    const auto why = [&](std::uint64_t by) { return seat_absence(ranks.join({by}).error().wanted); };
    end.knows = seat_absence::no_listener;
    CHECK(why(100) == seat_absence::no_listener);
    end.comes(zero);
    CHECK(why(200) == seat_absence::no_answer);
    end.dies(zero);
    CHECK(why(300) == seat_absence::ended);
    end.knows = seat_absence::other_secret;
    CHECK(why(400) == seat_absence::other_secret);
  }

  TEST_CASE("calls that concern a rank whose frames were forged end with the endpoint's error") {
    struct knowing_endpoint : scripted_endpoint {
      using scripted_endpoint::scripted_endpoint;
      [[nodiscard]] error_code why_failed(seat_id seat) const noexcept {
        return seat == one ? errc::frame_forged : errc::peer_failed;
      }
    };
    static_assert(endpoint<knowing_endpoint> && llmmem::detail::reports_failure<knowing_endpoint>);
    static_assert(!llmmem::detail::reports_failure<scripted_endpoint>);
    knowing_endpoint end(zero, 3, 10);
    for (const seat_id seat : {one, two}) {
      end.comes(seat);
      end.says_hello(seat, 0, 20 + to_index(seat));
    }
    communicator ranks(end, {.name = "job"});
    ranks.join({100}).value();
    end.dies(one, comm::death::suspected);
    end.dies(two);
    ranks.poll();
    std::byte byte{};
    const auto received = ranks.recv({&byte, 1}, rank_id{1}, 1, {200});
    CHECK(received.code() == errc::frame_forged);
    CHECK(received.error().message() ==
          "job: the connection to rank 1 carried a frame that its process did not send, or not at that time, "
          "and was closed; find the machine that writes into the network, then revoke(), agree() and "
          "continue without the rank");
    CHECK(ranks.recv({&byte, 1}, rank_id{2}, 1, {200}).code() == errc::peer_failed);
    CHECK(ranks.probe(rank_id{1}, 1, {200}).code() == errc::frame_forged);
  }

  TEST_CASE("a welcome to the earlier process of this seat is ignored, and counted") {
    scripted_endpoint end = newcomer();
    end.says_welcome(zero, 6, 0b101, {10, 29});
    end.says_welcome(zero, 6, 0b011, {10, 21});  // nor one without this seat
    end.says_welcome(zero, 6, 0b101, {10});
    end.says_welcome(zero, 6, std::uint64_t{1} << 50 | 0b101, {10, 30, 9});  // there are three seats
    communicator ranks(end);
    CHECK_FALSE(ranks.join({100}));
    CHECK(ranks.epoch() == 0);
    CHECK(ranks.stats().bad_frames == 4);
    end.says_welcome(zero, 7, 0b101, {10, 30});
    ranks.join({200}).value();
    CHECK(ranks.epoch() == 7);
    CHECK(ranks.world() == rank_count{2});
  }

  TEST_CASE("if two fresh processes meet before one is admitted, the other also waits for that one") {
    scripted_endpoint end = newcomer();
    end.comes(one);
    end.says_hello(one, 0, 22);
    end.says_welcome(zero, 6, 0b101, {10, 30});
    communicator ranks(end);
    ranks.join({100}).value();
    CHECK(ranks.world() == rank_count{2});
    CHECK(to_text(ranks.waiting()) == "seat 1");
    ranks.admit({.joining = {one}});
    CHECK(ranks.world() == rank_count{3});
    CHECK(ranks.waiting().empty());
  }

  TEST_CASE("a member that is left alone hears of a fresh process when it agrees") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    ranks.shrink({.failed = {one, two}});
    CHECK(ranks.agree(1, {200}).value().joining.empty());
    ranks.shrink({});
    end.comes(two);
    end.says_hello(two, 0, 99);
    const comm::agreed outcome = ranks.agree(1, {200}).value();
    CHECK(to_text(outcome.joining) == "seat 2");
    ranks.admit(outcome);
    CHECK(ranks.world() == rank_count{2});
  }

  TEST_CASE(
      "a failed process that is still a member of the next epoch has failed in it, even if another process "
      "has its seat") {
    for (const comm::death how : {comm::death::certain, comm::death::suspected}) {
      scripted_endpoint end = first_of_three();
      communicator ranks(end);
      ranks.join({100}).value();
      CHECK(ranks.epoch() == 1);
      end.dies(two, how);
      end.comes(two);
      end.says_hello(two, 0, 99);
      ranks.poll();
      CHECK(to_text(ranks.failed()) == "seat 2");
      CHECK(to_text(ranks.waiting()) == "seat 2");
      // Agreed on before the death was known: so the dead one is a member once more.
      ranks.shrink({.bits = 0});
      CHECK(ranks.epoch() == 2);
      CHECK(ranks.world() == rank_count{3});
      CHECK(to_text(ranks.failed()) == "seat 2");
      CHECK(to_text(ranks.waiting()) == "seat 2");
      ranks.admit({.failed = {two}, .joining = {two}});
      CHECK(ranks.world() == rank_count{3});
      CHECK(ranks.failed().empty());
      CHECK(ranks.waiting().empty());
      CHECK(end.given_up().empty());  // who sits there is the one that was admitted
      ranks.shrink({.failed = {one}});
      CHECK(to_text(end.given_up()) == "seat 1");
    }
  }

  TEST_CASE(
      "a member that died before the epoch began is dead in it, with the certainty of the earlier report") {
    for (const comm::death how : {comm::death::certain, comm::death::suspected}) {
      scripted_endpoint end = newcomer();
      end.comes(one);
      end.says_hello(one, 5, 21);
      end.dies(one, how);
      end.says_welcome(zero, 6, 0b111, {10, 21, 30});
      communicator ranks(end);
      ranks.join({100}).value();
      CHECK(ranks.epoch() == 6);
      CHECK(to_text(ranks.failed()) == "seat 1");
      // One that may live may have agreed with the other on something else.
      end.dies(zero);
      CHECK(ranks.agree(1, {200}).code() == (how == comm::death::certain ? errc::ok : errc::no_quorum));
    }
  }

  TEST_CASE("a process that dies while it waits for admission no longer counts as waiting") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    end.dies(two);
    end.comes(two);
    end.says_hello(two, 0, 99);
    ranks.poll();
    CHECK(to_text(ranks.waiting()) == "seat 2");
    end.dies(two);
    ranks.poll();
    CHECK(ranks.waiting().empty());
  }

  TEST_CASE("a revoke from a rank that has begun the next epoch ends that epoch and no other") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    end.says_revoke(one, 2);
    ranks.poll();
    CHECK_FALSE(ranks.is_revoked());
    ranks.shrink({});
    CHECK(ranks.epoch() == 2);
    CHECK(ranks.is_revoked());
    ranks.shrink({});
    CHECK_FALSE(ranks.is_revoked());
    end.says_revoke(one, 5);  // there is one between
    ranks.poll();
    ranks.shrink({});
    ranks.shrink({});
    CHECK(ranks.epoch() == 5);
    CHECK_FALSE(ranks.is_revoked());
  }

  TEST_CASE("a process that is not a member revokes neither this epoch nor the next") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    ranks.shrink({.failed = {two}});
    end.says_revoke(two, 2);
    end.says_revoke(two, 3);
    ranks.poll();
    CHECK_FALSE(ranks.is_revoked());
    ranks.shrink({});
    CHECK(ranks.epoch() == 3);
    CHECK_FALSE(ranks.is_revoked());
    end.says_revoke(one, 3);
    ranks.poll();
    CHECK(ranks.is_revoked());
    // Nor the one that a newcomer is about to begin.
    scripted_endpoint fresh = newcomer();
    fresh.comes(one);
    fresh.says_hello(one, 0, 22);
    fresh.says_welcome(zero, 6, 0b101, {10, 30});
    fresh.says_revoke(one, 6);
    communicator later(fresh);
    later.poll();
    later.join({100}).value();
    CHECK(later.epoch() == 6);
    CHECK_FALSE(later.is_revoked());
  }

  TEST_CASE("a process that was left behind learns that it is fenced when it agrees in its old epoch") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    ranks.shrink({.failed = {two}});
    end.says_agree(one, 1, {});  // a member that is an epoch behind
    ranks.poll();
    CHECK(end.told(fenced).empty());
    end.says_agree(two, 1, {});
    ranks.poll();
    CHECK(end.told(fenced) == std::vector{std::pair{two, std::uint64_t{2}}});
    CHECK(ranks.stats().stale_frames == 2);
  }

  TEST_CASE(
      "a process that learns that a later epoch began without it decides nothing from then on, and reports "
      "that") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    end.says_fenced(one, 1);  // of no later one
    CHECK(ranks.agree(1, {200}).code() == errc::peer_timed_out);
    end.says_fenced(one, 2);
    CHECK(ranks.agree(1, {300}).code() == errc::no_quorum);
    std::byte byte{};
    CHECK(ranks.send({}, rank_id{1}, 1, {300}).code() == errc::no_quorum);
    CHECK(ranks.recv({&byte, 1}, rank_id{1}, 1, {300}).code() == errc::no_quorum);
    CHECK(end.now_ns() < 300);
  }

  TEST_CASE("messages of an epoch that is over are not received in the next") {
    scripted_endpoint end = first_of_three();
    communicator ranks(end);
    ranks.join({100}).value();
    ranks.shrink({});
    end.sends(one, 1, 7, std::byte{1});
    end.sends(one, 2, 7, std::byte{2});
    std::byte byte{};
    ranks.recv({&byte, 1}, rank_id{1}, 7, {200}).value();
    CHECK(byte == std::byte{2});
    CHECK(ranks.stats().stale_frames == 1);
    CHECK(ranks.stats().early_bytes == 0);
  }

  TEST_CASE("a waiting send ends when its epoch is revoked, this process is out, or its receiver dies") {
    const auto sent_while = [](auto happens) {
      scripted_endpoint end = first_of_three();
      communicator ranks(end);
      ranks.join({100}).value();
      end.is_stuck = true;
      happens(end);
      const auto sent = ranks.send(std::array{std::byte{1}}, rank_id{2}, 1, {200});
      CHECK((end.now_ns() < 200 || sent.code() == errc::peer_timed_out));
      return sent.code();
    };
    CHECK(sent_while([](auto& end) { end.says_revoke(one, 1); }) == errc::epoch_revoked);
    CHECK(sent_while([](auto& end) { end.says_fenced(one, 2); }) == errc::no_quorum);
    CHECK(sent_while([](auto& end) { end.dies(two); }) == errc::peer_failed);
    CHECK(sent_while([](auto& end) { end.dies(one); }) == errc::peer_timed_out);
  }
}
