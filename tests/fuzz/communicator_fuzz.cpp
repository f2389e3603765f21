// Any bytes as what two peers send over their sockets, through the lanes and the inbox to what a rank calls:
// messages, collectives and agreement. Headers are made right or not, sealed or not. Nothing is written
// outside of a buffer, the store of early messages keeps its bound, and of a sealed connection nothing is
// heard that its peer did not seal.
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/detail/socket_peers.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "support/socket_pair.hpp"

namespace {

using namespace llmmem;
using detail::descriptor;
using detail::frame_sort;
using detail::socket_event;
using detail::socket_lane;

void must(bool holds) {
  if (!holds) std::abort();
}

constexpr std::uint64_t most_early = 4096;
constexpr std::uint32_t most_frame = max_post_bytes;

/// The input, byte by byte; zeros behind its end.
class script {
 public:
  explicit script(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool is_over() const { return bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const auto first = std::to_integer<std::uint8_t>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return first;
  }
  std::span<const std::byte> some(std::size_t count) {
    const auto first = bytes_.first(count < bytes_.size() ? count : bytes_.size());
    bytes_ = bytes_.subspan(first.size());
    return first;
  }
  /// Small, or one of those at which something changes.
  std::uint64_t number() {
    constexpr std::array<std::uint64_t, 8> edges{0xFFFF'FFFFU, 0xFFFF'FFFFU - 63,    ~std::uint64_t{0},
                                                 most_frame,   most_frame + 1,       most_early,
                                                 1U << 31U,    ~std::uint64_t{0} - 8};
    const std::uint8_t first = byte();
    return first < 248 ? first : edges[first - 248U];
  }

 private:
  std::span<const std::byte> bytes_;
};

/// Seat 0 of 3, an `endpoint`: each `poll` does what the script says next.
class scripted_peers {
 public:
  scripted_peers(script& input, bool is_sealed) : input_(&input), is_sealed_(is_sealed) {
    poller_.begin();
    start_ = now_ = poller_.clock().now();
    for (const std::uint32_t seat : {1U, 2U})
      peers_.reserve(seat_id{seat});
  }
  [[nodiscard]] seat_id self() const noexcept { return seat_id{0}; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return 3; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return 10; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now_ - start_; }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return most_frame; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept { return peers_.is_up(seat); }
  template <class Handler>
  result<void> send(seat_id, const frame_header&, std::span<const std::byte>, deadline by, Handler& handler) {
    static_cast<void>(poll(by, handler));
    return handler.keeps_waiting() ? result<void>() : failure{.code = errc::cancelled};
  }
  void post(seat_id seat, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    peers_.post(seat, header, bytes);
  }
  template <class Handler>
  bool poll(deadline by, Handler& handler) {
    detail::handler_call call{detail::refer_to(handler)};
    for (std::uint32_t seat = 1; seat < 3 && lives_ < 2; ++seat)
      meet(seat, call);
    peers_.ask_held(call);
    if (has_joined && !input_->is_over()) step(call);
    look(call);
    if (call.has_come || now_ns() >= by.ns) return call.has_come;
    pass(10'000'000, call);
    return call.has_come;
  }
  void withdraw(seat_id seat) noexcept { peers_.withdraw(seat); }
  void give_up(seat_id seat) noexcept { peers_.give_up(seat); }
  void wake() noexcept {}

  /// Frames that were sealed; as many may be heard.
  std::uint64_t made = 0;
  /// The script is that of what comes later.
  bool has_joined = false;

 private:
  struct other {
    llmmem_tests::socket_pair data;
    llmmem_tests::socket_pair told;
    std::array<detail::frame_seal, 2> seals{};
    std::array<std::uint64_t, 2> numbers{};
  };

  void put(std::uint32_t seat, socket_lane lane, std::span<const std::byte> bytes) {
    other& of = others_[seat - 1];
    static_cast<void>((lane == socket_lane::data ? of.data : of.told).say_there(bytes));
  }
  void frame(std::uint32_t seat, socket_lane lane, frame_sort sort, const frame_header& header,
             std::span<const std::byte> bytes) {
    other& of = others_[seat - 1];
    const auto at = static_cast<std::size_t>(lane);
    std::vector<std::byte> all(detail::wire_header_bytes);
    const std::span<std::byte, detail::wire_header_bytes> head(all.data(), all.size());
    const std::uint64_t number = of.numbers[at]++;
    detail::write_header({header, lane, sort, static_cast<std::uint32_t>(number)}, head);
    of.seals[at].close(head, bytes, number);
    all.insert(all.end(), bytes.begin(), bytes.end());
    ++made;
    put(seat, lane, all);
  }
  /// A process takes the seat, where it is free.
  void meet(std::uint32_t seat, detail::handler_call& call) {
    other& of = others_[seat - 1];
    if (!peers_.is_free(seat_id{seat})) return;
    of = other();
    detail::wire_proof key{};
    key[0] = std::byte(++lives_);
    std::array<detail::lane_seals, 2> seals{};
    for (std::size_t lane = 0; is_sealed_ && lane < 2; ++lane) {
      key[1] = std::byte(lane);
      of.seals[lane] = detail::frame_seal(key);
      seals[lane] = {of.seals[lane], of.seals[lane]};
    }
    detail::incarnation_id life{};
    life.fill(std::byte(lives_));
    peers_.connect(seat_id{seat}, std::move(of.data.here), std::move(of.told.here), {}, life, false, call,
                   seals);
    std::array<std::byte, 8> nonce{};
    detail::wire_writer(nonce).put(std::uint64_t{20} + seat);
    frame(seat, socket_lane::told, frame_sort::frame, {.message = 8, .bytes = 8, .kind = 1}, nonce);
    look(call);
  }
  void step(detail::handler_call& call) {
    const std::uint8_t what = input_->byte();
    const std::uint32_t seat = 1 + what % 2;
    const socket_lane lane = (what & 2U) != 0 ? socket_lane::data : socket_lane::told;
    switch ((what >> 2U) % 8) {
      case 0:
        return put(seat, lane, input_->some(input_->byte()));
      case 1:
      case 2:
      case 3: {
        frame_header header{.epoch = input_->byte() % 4U,
                            .message = input_->number(),
                            .offset = input_->number(),
                            .tag = input_->byte() % 4U};
        header.kind = static_cast<std::uint16_t>(input_->byte() % 7U);
        header.is_checked = input_->byte() % 8 == 7 ? 1 : 0;
        const auto content = input_->some(input_->byte());
        header.bytes = static_cast<std::uint32_t>(content.size());
        if ((what >> 2U) % 8 == 2)
          header = {.epoch = 1,
                    .message = header.bytes,
                    .bytes = header.bytes,
                    .tag = header.tag,
                    .kind = header.kind};
        return frame(seat, lane, frame_sort::frame, header, content);
      }
      case 4: {
        // In several frames.
        const auto content = input_->some(input_->byte());
        const std::size_t half = content.size() / 2;
        const frame_header first{
            .epoch = 1, .message = content.size(), .bytes = static_cast<std::uint32_t>(half), .tag = 1};
        frame_header second = first;
        second.offset = half;
        second.bytes = static_cast<std::uint32_t>(content.size() - half);
        frame(seat, socket_lane::data, frame_sort::frame, first, content.first(half));
        return frame(seat, socket_lane::data, frame_sort::frame, second, content.subspan(half));
      }
      case 5:
        return frame(seat, socket_lane::told, static_cast<frame_sort>(input_->byte() % 4U), {}, {});
      case 6:
        (lane == socket_lane::data ? others_[seat - 1].data : others_[seat - 1].told).there.close();
        return;
      default:
        if (const std::uint8_t how = input_->byte(); how % 4 == 0) {
          meet(seat, call);
        } else {
          pass(std::uint64_t{how} * 1'000'000, call);
        }
    }
  }
  void look(detail::handler_call& call) {
    for (int i = 0; i < 4; ++i) {
      detail::socket_poller::event_array events{};
      poller_.begin();
      const auto found = poller_.wait(0, -1, -1, events);
      poller_.clock().begin(now_);
      if (found.events == 0) return;
      for (std::size_t at = 0; at < found.events; ++at) {
        const detail::ready_event event(events[at]);
        if (event.is_of(peers_.generation(seat_id{event.index}))) peers_.handle(event, call);
      }
    }
  }
  void pass(std::uint64_t ns, detail::handler_call& call) {
    now_ += ns;
    poller_.clock().look(now_, ns);
    peers_.run_timers(call);
  }

  static socket_options options_of() {
    socket_options options;
    options.seats = 3;
    options.frame_bytes = most_frame;
    options.post_queue_bytes = 2 * max_post_bytes;
    return options;
  }

  script* input_;
  bool is_sealed_;
  socket_options options_ = options_of();
  detail::socket_poller poller_{true};
  detail::control_channel control_{poller_, 3, options_.post_queue_bytes};
  detail::call_schedule calls_{poller_.clock(), 3, options_.first_call_ns, options_.last_call_ns};
  detail::socket_peers peers_{poller_, control_, calls_, options_, 3};
  std::array<other, 2> others_;
  std::uint8_t lives_ = 0;
  std::uint64_t start_ = 0;
  std::uint64_t now_ = 0;
};
static_assert(endpoint<scripted_peers>);

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  script input(std::as_bytes(std::span(data, size)));
  const bool is_sealed = input.byte() % 2 == 1;
  scripted_peers end(input, is_sealed);
  communicator ranks(end, {.early_bytes = most_early, .check = comm::payload_check::crc32c});
  must(ranks.join(ranks.after(1'000'000'000)).has_value());
  end.has_joined = true;
  const auto soon = [&] { return ranks.after(50'000'000); };
  std::vector<std::byte> room(600);
  while (!input.is_over()) {
    const std::uint8_t what = input.byte();
    const rank_id with{1U + what % 2U};
    const std::uint32_t tag = (what >> 1U) % 4U;
    const std::span<std::byte> some = std::span(room).first(input.byte());
    switch ((what >> 3U) % 8) {
      case 0:
      case 1:
        static_cast<void>(ranks.recv(some, with, tag, soon()));
        break;
      case 2:
        static_cast<void>(ranks.probe(with, tag, soon()));
        break;
      case 3:
        static_cast<void>(ranks.exchange(std::span(room).last(9), with, some, with, tag, soon()));
        break;
      case 4: {
        collective_call call{.by = soon(), .tag = tag};
        static_cast<void>(all_reduce(ranks, some.first(some.size() / 4 * 4), sum_f32, call));
        break;
      }
      case 5:
        ranks.revoke();
        break;
      case 6:
        if (const auto outcome = ranks.agree(what, soon()); outcome && ranks.epoch() < 50) {
          what % 2 == 0 ? ranks.shrink(*outcome) : ranks.admit(*outcome);
        }
        break;
      default:
        ranks.poll();
    }
    must(ranks.stats().early_bytes <= most_early);
    must(to_number(ranks.world()) <= 3);
  }
  std::uint64_t heard = 0;
  for (std::uint32_t seat = 1; seat < 3; ++seat)
    heard += ranks.traffic(seat_id{seat}).received_messages;
  must(heard <= end.made);
  return 0;
}
