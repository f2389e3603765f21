/// @file
/// A side channel of an NCCL transport that answers as a test has told it.
#pragma once

#include <llmmem/comm/nccl_types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// Ranks in seats of the same numbers. Its clock goes on by 1 ns with each `poll` and each agreement.
struct scripted_side {
  using bytes_type = std::vector<std::byte>;

  llmmem::rank_id self{0};
  std::vector<llmmem::seat_id> members{llmmem::seat_id{0}, llmmem::seat_id{1}, llmmem::seat_id{2}};
  llmmem::seat_set dead{};
  bool revoked = false;
  mutable std::uint64_t clock_ns = 0;
  std::uint64_t epoch_number = 7;

  /// What the next agreements come to; none left: the caller's own bits, and no failure. A nothing throws.
  std::deque<std::optional<llmmem::result<llmmem::comm::agreed>>> answers{};
  std::vector<std::uint64_t> said{};                         ///< bits of each agreement
  std::vector<std::pair<std::uint32_t, bytes_type>> sent{};  ///< rank and bytes of each message
  std::deque<bytes_type> coming{};                           ///< messages that are still to be received
  std::vector<llmmem::comm::agreed> epochs{};                ///< those that `shrink` and `admit` began

  [[nodiscard]] llmmem::rank_id rank() const noexcept { return self; }
  [[nodiscard]] llmmem::rank_count world() const noexcept {
    return llmmem::rank_count{static_cast<std::uint32_t>(members.size())};
  }
  [[nodiscard]] llmmem::deadline after(std::uint64_t ns) const noexcept { return {clock_ns + ns}; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_number; }
  [[nodiscard]] std::span<const llmmem::seat_id> seats() const noexcept { return members; }
  [[nodiscard]] std::optional<llmmem::rank_id> rank_of(llmmem::seat_id seat) const noexcept {
    const auto at = std::ranges::find(members, seat);
    if (at == members.end()) return {};
    return llmmem::rank_id{static_cast<std::uint32_t>(at - members.begin())};
  }
  [[nodiscard]] llmmem::seat_set failed() const noexcept { return dead; }
  [[nodiscard]] bool has_failed(llmmem::rank_id rank) const noexcept {
    return dead.contains(members[to_index(rank)]);
  }
  [[nodiscard]] bool is_revoked() const noexcept { return revoked; }
  void revoke() noexcept { revoked = true; }
  void poll() const { ++clock_ns; }

  llmmem::result<llmmem::comm::agreed> agree(std::uint64_t bits, llmmem::deadline) {
    ++clock_ns;
    said.push_back(bits);
    if (answers.empty()) return llmmem::comm::agreed{.bits = bits};
    const auto answer = std::move(answers.front());
    answers.pop_front();
    if (!answer) throw std::runtime_error("the side channel cannot");
    return *answer;
  }
  void shrink(const llmmem::comm::agreed& outcome) { begin(outcome); }
  void admit(const llmmem::comm::agreed& outcome) {
    begin(outcome);
    for (const llmmem::seat_id seat : outcome.joining)
      members.push_back(seat);
    std::ranges::sort(members);
  }

  llmmem::result<void> send(std::span<const std::byte> bytes, llmmem::rank_id to, std::uint32_t,
                            llmmem::deadline) {
    sent.emplace_back(to_index(to), bytes_type(bytes.begin(), bytes.end()));
    return {};
  }
  llmmem::result<void> recv(std::span<std::byte> bytes, llmmem::rank_id from, std::uint32_t,
                            llmmem::deadline) {
    if (coming.empty()) return llmmem::failure{llmmem::errc::peer_timed_out, to_index(from), bytes.size(), 0};
    std::ranges::copy(coming.front(), bytes.begin());
    coming.pop_front();
    return {};
  }
  llmmem::result<void> exchange(std::span<const std::byte>, llmmem::rank_id, std::span<std::byte>,
                                llmmem::rank_id, std::uint32_t, llmmem::deadline) {
    return {};
  }

 private:
  void begin(const llmmem::comm::agreed& outcome) {
    std::erase_if(members, [&](llmmem::seat_id seat) { return outcome.failed.contains(seat); });
    dead = {};
    revoked = false;
    epochs.push_back(outcome);
  }
};
static_assert(llmmem::nccl_side<scripted_side>);

}  // namespace llmmem_tests
