/// @file
/// Ranks of a simulated job, as the objects of a replica see them.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/redundancy/detail/replica_ranks.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem_tests {

/// A rank of a simulated job, as the objects of a replica see it. Of the messages that it receives, one may
/// have a bit turned.
class sim_rank final : public llmmem::detail::replica_ranks {
 public:
  using ranks_type = llmmem::communicator<llmmem::testing::sim_endpoint>;

  explicit sim_rank(ranks_type& ranks) : beneath_(ranks), ranks_(&ranks) {}

  /// From now on.
  void turn_message(std::uint32_t number) { turns_ = received_ + number; }
  [[nodiscard]] std::uint32_t received() const noexcept { return received_; }
  [[nodiscard]] bool is_revoked() const { return ranks_->is_revoked(); }
  [[nodiscard]] llmmem::deadline soon() const noexcept { return after(60'000'000'000); }

  [[nodiscard]] llmmem::rank_id rank() const noexcept override { return beneath_.rank(); }
  [[nodiscard]] llmmem::rank_count world() const noexcept override { return beneath_.world(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept override { return beneath_.epoch(); }
  [[nodiscard]] std::span<const llmmem::seat_id> seats() const noexcept override { return beneath_.seats(); }
  [[nodiscard]] llmmem::deadline after(std::uint64_t ns) const noexcept override {
    return beneath_.after(ns);
  }
  llmmem::result<void> send(std::span<const std::byte> bytes, llmmem::rank_id to, std::uint32_t tag,
                            llmmem::deadline by) override {
    return beneath_.send(bytes, to, tag, by);
  }
  llmmem::result<void> recv(std::span<std::byte> bytes, llmmem::rank_id from, std::uint32_t tag,
                            llmmem::deadline by) override {
    const llmmem::result<void> done = beneath_.recv(bytes, from, tag, by);
    count(bytes);
    return done;
  }
  llmmem::result<void> exchange(std::span<const std::byte> out, llmmem::rank_id to, std::span<std::byte> into,
                                llmmem::rank_id from, std::uint32_t tag, llmmem::deadline by) override {
    const llmmem::result<void> done = beneath_.exchange(out, to, into, from, tag, by);
    count(into);
    return done;
  }
  void revoke() noexcept override { beneath_.revoke(); }

 private:
  void count(std::span<std::byte> bytes) noexcept {
    if (received_++ == turns_ && !bytes.empty()) bytes[bytes.size() / 2] ^= std::byte{16};
  }

  llmmem::detail::replica_ranks_of<ranks_type> beneath_;
  ranks_type* ranks_;
  std::uint32_t received_ = 0;
  std::uint32_t turns_ = ~std::uint32_t{0};
};

/// Runs `body(sim_rank&)` on each rank of a job.
template <class Body>
void on_all_ranks(std::uint32_t world, std::uint64_t seed, Body body) {
  llmmem::testing::sim_network net({.seats = world, .seed = seed});
  net.run([&](llmmem::testing::sim_endpoint& end) {
    sim_rank::ranks_type ranks(end);
    ranks.join(ranks.after(1'000'000'000)).value();
    sim_rank rank(ranks);
    body(rank);
    ranks.agree(0, ranks.after(60'000'000'000)).value();
  });
}

}  // namespace llmmem_tests
