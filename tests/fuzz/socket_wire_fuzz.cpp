// Any bytes as what comes over a socket: to a listener, to a caller, and on both lanes, as they are and with
// headers made right, cut anywhere. Nothing is written outside of a buffer, and every frame that comes is one
// that was said.
#include <llmmem/comm/detail/socket_handshake.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace {

using namespace llmmem;

void must(bool holds) {
  if (!holds) std::abort();
}

constexpr std::uint32_t most_bytes = 20'000;

struct taker {
  frame_buffer buffer_for(seat_id from, const frame_header& header) noexcept {
    must(from == seat_id{3} && header.bytes <= most_bytes);
    ++asked;
    if (asked % 5 == 0) return {frame_buffer::answer::ask_again, {}};
    if (asked % 7 == 0) return {frame_buffer::answer::drop, {}};
    room.assign(header.bytes, std::byte{0});
    return {frame_buffer::answer::take, room};
  }
  void on_frame(seat_id, const frame_header& header) noexcept { must(room.size() == header.bytes); }
  void on_message(seat_id, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    must(bytes.size() == header.bytes && bytes.size() <= max_post_bytes);
    for (const std::byte each : bytes)
      sum ^= each;
  }
  void on_death(seat_id, comm::death) noexcept {}
  void on_joined(seat_id) noexcept {}
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }

  std::uint64_t asked = 0;
  std::byte sum{};
  std::vector<std::byte> room;
};

void shake_hands(std::span<const std::byte> bytes, bool calls) {
  const detail::hmac_sha256 secret(std::span<const std::byte>{});
  detail::wire_hello mine;
  mine.from = seat_id{1};
  mine.to = seat_id{0};
  mine.seats = 4;
  detail::socket_handshake shaking;
  if (calls) {
    shaking.call(mine);
  } else {
    shaking.listen(mine);
  }
  while (!bytes.empty()) {
    const std::span<std::byte> into = shaking.wanted();
    must(!into.empty());
    const std::size_t part = bytes.size() < into.size() ? bytes.size() : into.size();
    std::memcpy(into.data(), bytes.data(), part);
    bytes = bytes.subspan(part);
    const auto turn = shaking.took(part, secret);
    must(shaking.says().size() <= detail::wire_hello_bytes);
    if (turn == detail::socket_handshake::turn::judge) shaking.answer(detail::hello_answer::busy, secret);
    if (turn != detail::socket_handshake::turn::wait && turn != detail::socket_handshake::turn::say) return;
  }
}

/// `cuts` says how much is read at a time.
void read_data(std::span<const std::byte> bytes, std::span<const std::byte> cuts) {
  taker mine;
  const auto handler = detail::refer_to(mine);
  detail::data_reader reader;
  detail::lane_count counted;
  bool has_come = false;
  reader.reserve();
  reader.restart(most_bytes);
  std::array<std::byte, 300> scratch{};
  std::size_t turn = 0;
  while (!bytes.empty()) {
    auto state = detail::read_state::more;
    if (reader.is_held()) {
      state = reader.ask_again(seat_id{3}, handler, counted, has_come);
    } else {
      std::array<iovec, 2> places{};
      const std::size_t count = reader.places(places, scratch);
      std::size_t limit =
          cuts.empty() ? bytes.size() : 1 + 97 * std::to_integer<std::size_t>(cuts[turn % cuts.size()]);
      std::size_t filled = 0;
      for (std::size_t i = 0; i < count; ++i) {
        std::size_t part = places[i].iov_len < limit ? places[i].iov_len : limit;
        if (part > bytes.size()) part = bytes.size();
        if (part != 0) std::memcpy(places[i].iov_base, bytes.data(), part);
        bytes = bytes.subspan(part);
        limit -= part;
        filled += part;
      }
      must(filled != 0);
      state = reader.took(filled, seat_id{3}, handler, counted, has_come);
    }
    if (state == detail::read_state::malformed) return;
    if (++turn % 11 == 0) reader.withdraw();
  }
}

void read_told(std::span<const std::byte> bytes, std::span<const std::byte> cuts) {
  taker mine;
  const auto handler = detail::refer_to(mine);
  detail::told_reader reader;
  detail::lane_count counted;
  bool has_come = false;
  reader.reserve();
  reader.restart();
  std::size_t turn = 0;
  while (!bytes.empty()) {
    const iovec place = reader.place();
    must(place.iov_len != 0);
    std::size_t part =
        cuts.empty() ? bytes.size() : 1 + 97 * std::to_integer<std::size_t>(cuts[turn++ % cuts.size()]);
    if (part > place.iov_len) part = place.iov_len;
    if (part > bytes.size()) part = bytes.size();
    std::memcpy(place.iov_base, bytes.data(), part);
    bytes = bytes.subspan(part);
    if (reader.took(part, seat_id{3}, handler, counted, has_come) == detail::read_state::malformed) return;
  }
}

/// Frames with right headers, their lengths and their bytes from the input.
std::vector<std::byte> framed(std::span<const std::byte> input, detail::socket_lane lane) {
  std::vector<std::byte> all;
  std::uint32_t sequence = 0;
  while (input.size() >= 3 && all.size() < 200'000) {
    const auto n = std::to_integer<std::uint32_t>(input[0]) | (std::to_integer<std::uint32_t>(input[1]) << 8);
    const auto what = std::to_integer<std::uint32_t>(input[2]);
    input = input.subspan(3);
    const std::uint32_t limit = lane == detail::socket_lane::data ? most_bytes + 50 : max_post_bytes + 50;
    detail::wire_header header;
    header.lane = lane;
    header.sort = what % 9 == 0 ? static_cast<detail::frame_sort>(what % 5) : detail::frame_sort::frame;
    header.sequence = what % 64 == 63 ? 7 : sequence++;
    header.frame.bytes = n % limit;
    std::array<std::byte, detail::wire_header_bytes> head{};
    detail::write_header(header, head);
    if (what == 250) head[what % 56] ^= std::byte{4};
    all.insert(all.end(), head.begin(), head.end());
    for (std::uint32_t i = 0; i < header.frame.bytes; ++i)
      all.push_back(input.empty() ? std::byte{1} : input[i % input.size()]);
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto cuts = bytes.first(size < 5 ? size : 5);
  shake_hands(bytes, true);
  shake_hands(bytes, false);
  read_data(bytes, cuts);
  read_told(bytes, cuts);
  read_data(framed(bytes, detail::socket_lane::data), cuts);
  read_told(framed(bytes, detail::socket_lane::told), cuts);
  return 0;
}
