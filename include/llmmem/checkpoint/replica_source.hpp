/// @file
/// `replica_source`: peers' memory as a source, together with folders of checkpoints, for ranks that recover
/// together.
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

/// State that ranks keep for each other in memory. `redundant_replica` is a model. All ranks call
/// `recover(by)` and get the same answer; all ranks call `forget()`, or none.
template <class R>
concept recoverable_replica = requires(R& replica, deadline by) {
  { replica.recover(by).code() } -> std::same_as<error_code>;
  { replica.recover(by)->is_recovered } -> std::convertible_to<bool>;
  { replica.recover(by)->version } -> std::convertible_to<std::uint64_t>;
  replica.forget();
};

/// For ranks that keep nothing in memory, and need to agree on a folder's checkpoint.
struct no_replica {
  struct nothing {
    bool is_recovered = false;
    std::uint64_t version = 0;
  };
  [[nodiscard]] result<nothing> recover(deadline /*by*/) const noexcept { return nothing{}; }
  void forget() const noexcept {}
};
static_assert(recoverable_replica<no_replica>);

/// A replica for a `replica_source` that restores parts directly into the engine's memory, without an
/// intermediate copy.
///
///     replica_into kept(replica, [&](part_id part) { return bytes_of(parameters, part); });
///     const auto recovered = recover(how, replica_source("peers", ranks, kept, by), ...);
///
/// If a checkpoint is found instead, the destinations may already have been written, so load all of them.
/// @tparam Destinations  the second argument of `Replica::recover(by, into)`.
template <class Replica, class Destinations>
class replica_into {
 public:
  /// The replica must outlive this.
  replica_into(Replica& replica, Destinations into) : replica_(&replica), into_(std::move(into)) {}
  [[nodiscard]] auto recover(deadline by) { return replica_->recover(by, into_); }
  void forget() { replica_->forget(); }

 private:
  Replica* replica_;
  Destinations into_;
};

/// The memory of the ranks of an epoch. Its versions are training steps.
template <transport T, recoverable_replica Replica>
struct replica_source {
  std::string name;  ///< in texts: "peers"
  T* ranks;          ///< the ranks that must agree; they and the replica must outlive this
  Replica* replica;
  deadline by;        ///< deadline of all steps, including the verification of checkpoints
  std::uint32_t tag;  ///< tag of its messages; nothing else uses this tag at the same time

  replica_source(std::string called, T& with, Replica& kept, deadline end,
                 std::uint32_t own_tag = 0x7273'0000)
      : name(std::move(called)), ranks(&with), replica(&kept), by(end), tag(own_tag) {}
};

/// The common result of the ranks, which differs only in the source from which each loads.
template <checkpoint_storage... Storages>
class joint_recovery : public checkpoint_recovery<Storages...> {
 public:
  using checkpoint_recovery<Storages...>::checkpoint_recovery;

  /// The version in memory, if that is the state to continue from: `replica.recovered(part)` has its bytes.
  /// Otherwise all ranks load `found`; if that is also empty, all start from scratch.
  std::optional<std::uint64_t> version{};
  std::string memory{};       ///< the name of its source
  std::string memory_lost{};  ///< why the memory was lost, if anything had been kept

  /// Returns in one line what was found where, and what was not.
  [[nodiscard]] std::string message() const {
    std::string text = recovery_result::message();
    constexpr std::string_view none = "no checkpoint";
    if (version) text.replace(0, none.size(), memory + ": version " + std::to_string(*version));
    if (!memory_lost.empty()) text += "; passed over " + memory + ": " + memory_lost;
    return text;
  }
};

/// Looks for the newest state that all ranks of an epoch can continue from, over their memory and all
/// sources. Each of them calls it when the epoch has begun, instead of the replica's `recover`.
///
///     const auto recovered =
///         recover(verification::checksums,
///                 replica_source("peers", ranks, replica, ranks.after(60'000'000'000)),
///                 checkpoint_source("local", local), checkpoint_source("durable", durable));
///     if (recovered.version) {
///       ...  // step *recovered.version: replica.recovered(part) for each of replica.own_parts()
///     } else if (recovered.found) {
///       recovered.visit([&](auto& storage) { load_checkpoint(storage, *recovered.found, wanted, sink); });
///     }      // else all start from scratch
///
/// Among the checkpoints, it considers the newest that every rank has verified as complete in one of its
/// sources, with the same contents on all ranks; ranks may have separate folders. It takes this checkpoint if
/// its step is later than the version in memory, or if nothing is in memory. A newer checkpoint that is not
/// complete on all ranks is recorded: as damaged on the ranks that found it damaged, and as
/// `skip_reason::not_everywhere` on the others. If more ranks were lost than the replica tolerates
/// (`errc::state_lost`), its state is forgotten.
///
/// Between checkpoints, the generation decides which is newer; between a checkpoint and memory, the step
/// does, so the replica's versions must be steps. A checkpoint that is not newer than the memory is not
/// opened.
///
/// @par Complexity   that of the replica's `recover`, two gathers, and one per checkpoint tried. Every rank
///   verifies the result: with many ranks and one folder, `verification::sizes` is enough.
/// @par Thread safety   one thread at a time, which owns the ranks during the call.
/// @throws comm_error  if a rank dies, or the time runs out: the epoch is revoked; agree, and call it again
///                     in the next epoch.
/// @throws unreadable_checkpoint  on all ranks, if one of them cannot read a checkpoint that may be complete
///                                and an older one would be taken instead: see `find_checkpoint`.
/// @throws argument_error  on all ranks, if their replicas are set up differently (`errc::setup_differs`).
/// @throws io_error  on all ranks, if one could list no source and nothing is in memory, because existing
///                   checkpoints must not count as missing. Problems of a checkpoint are recorded, not
///                   thrown.
template <transport T, recoverable_replica Replica, checkpoint_storage... Storages>
[[nodiscard]] joint_recovery<Storages...> recover(verification how, replica_source<T, Replica> memory,
                                                  checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/replica_source_body.hpp>
