/// @file
/// `redundant_replica`: its transport as an interface, so that the communicating code is not a template.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/replica_types.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A `seated_transport` of any type: a virtual call costs nothing compared with a message, and the objects of
/// a replica are compiled once for all transports. See `transport` for the functions.
class replica_ranks {
 public:
  replica_ranks(const replica_ranks&) = delete;
  replica_ranks& operator=(const replica_ranks&) = delete;

  [[nodiscard]] virtual rank_id rank() const noexcept = 0;
  [[nodiscard]] virtual rank_count world() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t epoch() const noexcept = 0;
  [[nodiscard]] virtual std::span<const seat_id> seats() const noexcept = 0;
  [[nodiscard]] virtual deadline after(std::uint64_t ns) const noexcept = 0;
  virtual result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) = 0;
  virtual result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) = 0;
  virtual result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into,
                                rank_id from, std::uint32_t tag, deadline by) = 0;
  virtual void revoke() noexcept = 0;

 protected:
  replica_ranks() = default;
  ~replica_ranks() = default;
};

static_assert(seated_transport<replica_ranks>);

/// Adapts a transport, which must outlive it.
template <seated_transport T>
class replica_ranks_of final : public replica_ranks {
 public:
  explicit replica_ranks_of(T& ranks) noexcept : ranks_(&ranks) {}

  [[nodiscard]] rank_id rank() const noexcept override { return seen().rank(); }
  [[nodiscard]] rank_count world() const noexcept override { return seen().world(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept override { return seen().epoch(); }
  [[nodiscard]] std::span<const seat_id> seats() const noexcept override { return seen().seats(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept override { return seen().after(ns); }
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) override {
    return ranks_->send(bytes, to, tag, by);
  }
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) override {
    return ranks_->recv(bytes, from, tag, by);
  }
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by) override {
    return ranks_->exchange(out, to, into, from, tag, by);
  }
  void revoke() noexcept override { ranks_->revoke(); }

 private:
  [[nodiscard]] const T& seen() const noexcept { return *ranks_; }

  T* ranks_;
};

/// Returns the number of seats of the job, members or not, if the transport knows it.
template <class T>
[[nodiscard]] std::optional<std::uint32_t> seats_of_job(T& ranks) {
  if constexpr (requires { ranks.endpoint().seats(); }) {
    return static_cast<std::uint32_t>(ranks.endpoint().seats());
  } else {
    return std::nullopt;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
