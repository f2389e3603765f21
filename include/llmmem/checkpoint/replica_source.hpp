/// @file
/// `replica_source`: peers' memory beside folders of checkpoints, for ranks that recover together.
#pragma once

#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// What ranks keep for each other in memory. `redundant_replica` is one. `recover(by)` is called by all ranks
/// and has one answer for all; `forget()` as well.
template <class R>
concept recoverable_replica = requires(R& replica, deadline by) {
  { replica.recover(by).code() } -> std::same_as<error_code>;
  { replica.recover(by)->is_there } -> std::convertible_to<bool>;
  { replica.recover(by)->version } -> std::convertible_to<std::uint64_t>;
  replica.forget();
};

/// For ranks that keep nothing in memory, and want to agree on a folder's checkpoint.
struct no_replica {
  struct nothing {
    bool is_there = false;
    std::uint64_t version = 0;
  };
  [[nodiscard]] result<nothing> recover(deadline /*by*/) const noexcept { return nothing{}; }
  void forget() const noexcept {}
};
static_assert(recoverable_replica<no_replica>);

/// A replica, for a `replica_source`, whose parts come back into memory that the engine names, with no copy
/// of them in between.
///
///     replica_into kept(replica, [&](part_id part) { return bytes_of(parameters, part); });
///     const auto recovered = recover(how, replica_source("peers", ranks, kept, by), ...);
///
/// When what is found is a checkpoint instead, those destinations may have been written by then: load them
/// whole.
/// @tparam Destinations  what `Replica::recover(by, into)` takes.
template <class Replica, class Destinations>
class replica_into {
 public:
  /// The replica outlives this.
  replica_into(Replica& replica, Destinations into) : replica_(&replica), into_(std::move(into)) {}
  [[nodiscard]] auto recover(deadline by) { return replica_->recover(by, into_); }
  void forget() { replica_->forget(); }

 private:
  Replica* replica_;
  Destinations into_;
};

/// The memory of the ranks of an epoch. Its versions are steps of training.
template <transport T, recoverable_replica Replica>
struct replica_source {
  std::string name;  ///< for texts: "peers"
  T* ranks;          ///< with these it is agreed on; it and the replica outlive this
  Replica* replica;
  deadline by;        ///< for all of it, proving checkpoints as well
  std::uint32_t tag;  ///< of its messages: nothing else uses it at the same time

  replica_source(std::string called, T& with, Replica& kept, deadline end,
                 std::uint32_t own_tag = 0x7273'0000)
      : name(std::move(called)), ranks(&with), replica(&kept), by(end), tag(own_tag) {}
};

/// What ranks have come to together: the same for all of them, but where it is loaded from.
template <checkpoint_storage... Storages>
class joint_recovery : public checkpoint_recovery<Storages...> {
 public:
  using checkpoint_recovery<Storages...>::checkpoint_recovery;

  /// The version in memory, when that is what to go on with: `replica.recovered(part)` has its bytes.
  /// Otherwise `found` is what all ranks load, and if that is nothing, too, all begin anew.
  std::optional<std::uint64_t> version{};
  std::string memory{};       ///< the name of its source
  std::string memory_lost{};  ///< why nothing could be had of it, if anything had been kept

  /// What was found where and what was not, in one line.
  [[nodiscard]] std::string message() const {
    std::string text = recovery_result::message();
    constexpr std::string_view none = "no checkpoint";
    if (version) text.replace(0, none.size(), memory + ": version " + std::to_string(*version));
    if (!memory_lost.empty()) text += "; passed over " + memory + ": " + memory_lost;
    return text;
  }
};

/// Looks for the newest state that all ranks of an epoch can go on with, over their memory and all sources.
/// Each of them calls it when the epoch has begun, in the place of the replica's `recover`.
///
///     const auto recovered =
///         recover(verification::checksums,
///                 replica_source("peers", ranks, replica, ranks.after(60'000'000'000)),
///                 checkpoint_source("local", local), checkpoint_source("durable", durable));
///     if (recovered.version) {
///       ...  // step *recovered.version: replica.recovered(part) for each of replica.mine()
///     } else if (recovered.found) {
///       recovered.visit([&](auto& storage) { load_checkpoint(storage, *recovered.found, wanted, sink); });
///     }      // else all begin anew
///
/// Of checkpoints the newest is taken that each rank has proved whole in one of its sources, the same
/// contents for all; ranks may have folders of their own. It is taken when its step comes after the version
/// in memory, or nothing is there. What is newer, and not whole on all ranks, is noted: as damaged by those
/// that found it so, by others as `passed_over::not_everywhere`. When more ranks were lost than the replica
/// bears (`errc::state_lost`), it is told to forget.
///
/// Which of two is newer: of checkpoints their generation says; of a checkpoint and what is in memory the
/// step, which the version must be. A checkpoint that is no newer than that is not opened.
///
/// @par Complexity   as the replica's `recover`, two gathers, and one for each checkpoint that is tried.
///      Every rank proves what is taken: with many ranks and one folder, `verification::sizes` is enough.
/// @par Thread safety   one thread at a time, which owns the ranks meanwhile.
/// @throws comm_error  when a rank dies, or the time is over: the epoch is revoked; agree, and call it again
///      in the next.
/// @throws unreadable_checkpoint  on all ranks, when one of them cannot read a checkpoint that may be whole
///      and an older one would be taken for it: see `find_checkpoint`.
/// @throws argument_error  on all ranks, when their replicas are set up differently (`errc::setup_differs`).
/// @throws io_error  on all ranks, when one could list no source and nothing is in memory: what is there must
///      not be taken for nothing. What is wrong with a checkpoint is noted, not thrown.
template <transport T, recoverable_replica Replica, checkpoint_storage... Storages>
[[nodiscard]] joint_recovery<Storages...> recover(verification how, replica_source<T, Replica> memory,
                                                  checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/replica_source_body.hpp>
