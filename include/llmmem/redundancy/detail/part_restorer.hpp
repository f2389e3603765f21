/// @file
/// `redundant_replica`: moves each part to its present owner, according to a plan.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/detail/part_arrival.hpp>
#include <llmmem/redundancy/detail/replica_ranks.hpp>
#include <llmmem/redundancy/detail/replica_rendezvous.hpp>
#include <llmmem/redundancy/detail/replica_setup.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/replica_types.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A reference to `part_destinations` of any type, or to none. The destinations must outlive it.
class destinations_ref {
 public:
  destinations_ref() noexcept = default;
  template <part_destinations D>
  explicit destinations_ref(D& destinations) noexcept
      : destinations_(&destinations),
        ask_([](void* of, part_id part) -> std::span<std::byte> { return (*static_cast<D*>(of))(part); }) {}

  [[nodiscard]] explicit operator bool() const noexcept { return ask_ != nullptr; }
  [[nodiscard]] std::span<std::byte> operator()(part_id part) const { return ask_(destinations_, part); }

 private:
  void* destinations_ = nullptr;
  std::span<std::byte> (*ask_)(void* of, part_id part) = nullptr;
};

/// Executes an `ownership_plan`, and returns where each part of this rank is afterwards: at the caller's
/// destination, in the restorer's memory, or where the rank already held it. It verifies each part by its
/// checksum; a failed restoration makes no part available.
///
/// @par Complexity      one pass and a checksum for each byte that arrives; at most 1 MiB of memory in
///                      addition to the parts. @par Thread safety one thread at a time.
/// @par Errors          those of the transport, which is then revoked; `errc::size_mismatch` for a
///   destination of the wrong size, `errc::message_damaged`. Exceptions of the caller's destinations pass
///   through. After a failure the caller calls `clear`.
class part_restorer {
 public:
  /// Both must outlive the restorer.
  part_restorer(replica_ranks& ranks, const replica_setup& setup)
      : ranks_(&ranks), setup_(&setup), arrivals_(setup.parts()), recovered_(setup.parts()) {}

  /// @param held  this rank's version, if the plan uses it as a source; otherwise it may be null. It contains
  ///              the parts that stay in place.
  /// @return bytes of parts on this rank whose owner was lost, or had damaged bytes. @pre no part is
  ///         available
  [[nodiscard]] result<std::uint64_t> restore(const found_version& found, const ownership_plan& plan,
                                              const kept_version* held, destinations_ref into, deadline by);
  /// Returns the bytes of a part that this rank owns; empty for other parts, and after `clear`.
  [[nodiscard]] std::span<const std::byte> recovered(part_id part) const noexcept {
    return recovered_[to_index(part)];
  }
  /// Returns the bytes of memory that the restorer uses for parts.
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept;
  /// Makes all parts unavailable, and frees that memory.
  void clear() noexcept;

 private:
  /// The most bytes of a part in one message.
  static constexpr std::uint64_t piece_bytes = std::uint64_t{1} << 20;

  [[nodiscard]] result<void> choose_destinations(const ownership_plan& plan, const kept_version* held,
                                                 destinations_ref into);
  [[nodiscard]] result<void> carry_out(const ownership_plan& plan, const kept_version* held, deadline by);
  [[nodiscard]] result<void> move_piece(const part_transfer& transfer, const kept_version* held,
                                        std::uint64_t at, deadline by);
  [[nodiscard]] result<std::uint64_t> prove(const found_version& found, const ownership_plan& plan);
  [[nodiscard]] static std::span<const std::byte> source_of(const part_transfer& transfer,
                                                            const kept_version& held) noexcept {
    return held.at(transfer.place, transfer.of, transfer.codeword)
        .subspan(transfer.place_offset, transfer.bytes);
  }
  /// Returns whether the part is already at its destination.
  [[nodiscard]] bool stays(const part_transfer& transfer) const noexcept {
    return transfer.source == transfer.target && arrivals_[to_index(transfer.part)].destination().empty();
  }

  replica_ranks* ranks_;
  const replica_setup* setup_;
  std::vector<part_memory> memory_{};                  // for parts without a destination of the caller
  std::vector<part_arrival> arrivals_;                 // by part, while the bytes arrive
  std::vector<std::span<const std::byte>> recovered_;  // by part
  std::vector<std::byte> scratch_{};                   // a piece to be added
};

inline void part_restorer::clear() noexcept {
  for (part_arrival& each : arrivals_)
    each = part_arrival();
  for (std::span<const std::byte>& each : recovered_)
    each = {};
  memory_.clear();
  scratch_ = {};
}

inline std::uint64_t part_restorer::memory_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const part_memory& each : memory_)
    bytes += each.bytes().size();
  return bytes;
}

inline result<std::uint64_t> part_restorer::restore(const found_version& found, const ownership_plan& plan,
                                                    const kept_version* held, destinations_ref into,
                                                    deadline by) {
  if (auto chosen = choose_destinations(plan, held, into); !chosen) return chosen.error();
  if (auto moved = carry_out(plan, held, by); !moved) return moved.error();
  scratch_ = {};
  return prove(found, plan);
}

/// Chooses the destination of each part that this rank owns now. If the caller names no destinations, a part
/// that this rank has complete stays in place, and the others get memory.
inline result<void> part_restorer::choose_destinations(const ownership_plan& plan, const kept_version* held,
                                                       destinations_ref into) {
  const std::vector<std::uint64_t>& sizes = setup_->sizes();
  std::vector<const part_transfer*> here(sizes.size(), nullptr);
  for (const part_transfer& each : plan.transfers) {
    const std::uint32_t part = to_index(each.part);
    if (each.source == each.target && !each.is_summed && each.bytes == sizes[part]) here[part] = &each;
  }
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    if (plan.owners[i] != ranks_->rank()) continue;
    if (into) {
      arrivals_[i] = part_arrival(into(part_id{i}));
      const std::uint64_t bytes = arrivals_[i].destination().size();
      if (bytes != sizes[i]) return setup_->refuse(errc::size_mismatch, i, sizes[i], bytes);
    } else if (here[i] != nullptr) {
      recovered_[i] = source_of(*here[i], *held);
      continue;
    } else {
      memory_.emplace_back(sizes[i]);
      arrivals_[i] = part_arrival(memory_.back().bytes());
    }
    recovered_[i] = arrivals_[i].destination();
  }
  return {};
}

inline result<void> part_restorer::carry_out(const ownership_plan& plan, const kept_version* held,
                                             deadline by) {
  const rank_id self = ranks_->rank();
  for (const part_transfer& each : plan.transfers) {
    if ((each.source != self && each.target != self) || stays(each)) continue;
    for (std::uint64_t at = 0; at < each.bytes; at += piece_bytes) {
      const result<void> done = move_piece(each, held, at, by);
      if (done) continue;
      ranks_->revoke();
      return done;
    }
  }
  return {};
}

/// Moves a piece of a transfer. While the next piece is in flight, the checksum of the last one is computed,
/// because that piece is still in the processor's caches.
inline result<void> part_restorer::move_piece(const part_transfer& transfer, const kept_version* held,
                                              std::uint64_t at, deadline by) {
  const rank_id self = ranks_->rank();
  const std::uint64_t bytes = std::min(transfer.bytes - at, piece_bytes);
  if (transfer.source == self && transfer.target != self)
    return ranks_->send(source_of(transfer, *held).subspan(at, bytes), transfer.target, setup_->tag(), by);
  part_arrival& part = arrivals_[to_index(transfer.part)];
  const std::uint64_t offset = transfer.part_offset + at;
  if (transfer.source == self) {
    part.take(offset, source_of(transfer, *held).subspan(at, bytes), transfer.coefficient,
              transfer.is_summed);
    return {};
  }
  const std::span<std::byte> straight = part.landing(offset, bytes, transfer.is_summed);
  if (straight.empty()) scratch_.resize(bytes);
  const std::span<std::byte> into = straight.empty() ? std::span<std::byte>(scratch_) : straight;
  if (auto done = ranks_->recv(into, transfer.source, setup_->tag(), by); !done) return done;
  if (straight.empty()) {
    part.add(offset, into, transfer.coefficient);
  } else {
    part.landed(offset, bytes, transfer.coefficient);
  }
  return {};
}

inline result<std::uint64_t> part_restorer::prove(const found_version& found, const ownership_plan& plan) {
  const rank_id self = ranks_->rank();
  std::uint64_t rebuilt = 0;
  for (std::size_t i = 0; i < plan.owners.size(); ++i) {
    if (plan.owners[i] != self) continue;
    const bool stayed = arrivals_[i].destination().empty();
    const std::uint32_t sum = stayed ? crc32c(0, recovered_[i]) : arrivals_[i].finish();
    const std::uint32_t wanted = found.facts.sums[i];
    if (sum != wanted) return setup_->refuse(errc::message_damaged, to_index(self), wanted, sum);
    const rank_id owner = found.facts.layout.owners[i];
    if (!found.change.now[to_index(owner)] || found.damaged.own.contains(owner))
      rebuilt += setup_->sizes()[i];
  }
  for (part_arrival& each : arrivals_)
    each = part_arrival();
  return rebuilt;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
