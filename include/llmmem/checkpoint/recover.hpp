/// @file
/// `recover`: the newest checkpoint that proves whole, over several folders of one run.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A folder that checkpoints of a run may be in.
template <checkpoint_storage Storage>
struct checkpoint_source {
  using storage_type = Storage;

  std::string name;  ///< for texts: "local"
  Storage* storage;  ///< outlives this

  checkpoint_source(std::string called, Storage& of) : name(std::move(called)), storage(&of) {}
};

/// Why something of a source was passed over.
enum class passed_over : std::uint8_t {
  source,          ///< the source could not be listed: whatever it has is unknown
  damaged,         ///< the checkpoint is not whole
  conflict,        ///< another checkpoint has its generation, in a source named before it
  not_everywhere,  ///< of ranks that recover together (`replica_source`), another one cannot load it
  unread,          ///< the checkpoint may be whole, and could not be read
};

/// The reason in words.
[[nodiscard]] constexpr std::string_view to_string(passed_over what) noexcept {
  switch (what) {
    case passed_over::source:
      return "the source could not be listed";
    case passed_over::damaged:
      return "not whole";
    case passed_over::conflict:
      return "another checkpoint of the same generation";
    case passed_over::not_everywhere:
      return "not on all ranks";
    case passed_over::unread:
      return "could not be read";
  }
  return "unknown";
}

/// What was passed over.
struct skipped_in_source {
  std::size_t source = 0;  ///< its number
  std::string name{};      ///< its name
  passed_over what = passed_over::damaged;
  std::string folder{};  ///< of the checkpoint; empty: the whole source
  std::string why{};
};

/// What a recovery came to, whatever the sources are.
struct recovery_result {
  std::optional<found_checkpoint> found{};
  std::size_t source = 0;                    ///< number of the source that has it, in the order of the call
  std::string name{};                        ///< and its name
  std::vector<skipped_in_source> skipped{};  ///< sources first, then the newest first

  /// Whether the sources are of different runs: see `recover`.
  [[nodiscard]] bool has_conflict() const noexcept {
    for (const skipped_in_source& each : skipped) {
      if (each.what == passed_over::conflict) return true;
    }
    return false;
  }

  /// What was found where and what was not, in one line.
  [[nodiscard]] std::string message() const {
    std::string text = found ? name + ": " + found->folder : std::string("no checkpoint");
    for (const skipped_in_source& each : skipped) {
      text +=
          "; passed over " + each.name + (each.folder.empty() ? "" : ": ") + each.folder + ": " + each.why;
    }
    return text;
  }
};

/// What a recovery came to. The storages are the caller's and outlive it.
template <checkpoint_storage... Storages>
class checkpoint_recovery : public recovery_result {
 public:
  explicit checkpoint_recovery(Storages&... of) noexcept : storages_(&of...) {}

  /// What a search over these storages came to.
  void take(recovery_result came_to) noexcept { static_cast<recovery_result&>(*this) = std::move(came_to); }

  /// Calls `work(storage)` with the one that has what was found, whatever its type, and gives what that
  /// gives.
  /// @throws argument_error  when nothing was found.
  template <class Work>
  decltype(auto) visit(Work&& work) const {
    if (!found) throw argument_error("checkpoint_recovery: no checkpoint was found; ask `found` first");
    return visit_at<0>(work);
  }

 private:
  template <std::size_t At, class Work>
  decltype(auto) visit_at(Work& work) const {
    if constexpr (At + 1 < sizeof...(Storages)) {
      if (source != At) return visit_at<At + 1>(work);
    }
    return work(*std::get<At>(storages_));
  }

  std::tuple<Storages*...> storages_;
};

namespace detail {

/// Sources by number.
class source_set {
 public:
  template <class... Storages>
  explicit source_set(const checkpoint_source<Storages>&... sources)
      : storages_{storage_ref(*sources.storage)...}, names_{sources.name...} {}

  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }
  [[nodiscard]] const std::string& name(std::size_t i) const noexcept { return names_[i]; }
  [[nodiscard]] storage_ref storage(std::size_t i) const noexcept { return storages_[i]; }
  [[nodiscard]] std::vector<checkpoint_id> list(std::size_t i) const {
    return list_checkpoints(storages_[i]);
  }
  [[nodiscard]] checkpoint_manifest manifest(std::size_t i, const checkpoint_id& id) const;

 private:
  std::vector<storage_ref> storages_;
  std::vector<std::string> names_;
};

[[nodiscard]] recovery_result recover_from(const source_set& all, verification how,
                                           const search_patience& waits);

}  // namespace detail

/// Looks for the newest checkpoint that proves whole, over all sources.
///
///     const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
///                                    checkpoint_source("durable", durable));
///     if (recovered.found)
///       recovered.visit([&](auto& storage) { load_checkpoint(storage, *recovered.found, wanted, sink); });
///
/// The highest generation comes first; of the same one, the source that is named earlier: name the fastest
/// first. What is damaged in one source is taken from another that has it, before any older one. Whatever is
/// passed over is noted, with the reason, also a source that cannot be listed at all: what is found may then
/// be older than what is there. As `find_checkpoint`, it tries again what may pass, and takes nothing older
/// than a checkpoint that it could not read and that nothing proves to be damaged.
///
/// Generations are numbers of one run: `mirrored_coordinator` keeps them so. A run that began anew on an
/// empty disk, beside copies that it was not told of, gives some of them twice, and then nobody can tell
/// which is meant. That is found where two have the same generation and another step, or, of the generation
/// that is taken, other bytes by their manifests' checksums; the one of the source named first counts, and
/// each other is noted as `passed_over::conflict` (`has_conflict`): ask a person, and give one of them
/// another folder.
///
/// Needs no lock: runs may commit and tidy meanwhile. Ranks that must come to the same result, from folders
/// of their own or beside what they keep in each other's memory, name a `replica_source` first.
///
/// @par Complexity   what `open_checkpoint` takes for every one looked at; a list of each source.
/// @par Thread safety   any thread.
/// @throws io_error  when no source could be listed. What is wrong with a checkpoint is noted, not thrown.
/// @throws unreadable_checkpoint  for one that may be whole, that no source has readable, and that an older
///      one would be taken for (`unread_checkpoint::refuse`).
template <checkpoint_storage... Storages>
[[nodiscard]] checkpoint_recovery<Storages...> recover(verification how, const search_patience& waits,
                                                       checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0)
{
  checkpoint_recovery<Storages...> recovered(*sources.storage...);
  recovered.take(detail::recover_from(detail::source_set(sources...), how, waits));
  return recovered;
}

/// The same with the usual patience.
template <checkpoint_storage... Storages>
[[nodiscard]] checkpoint_recovery<Storages...> recover(verification how,
                                                       checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0)
{
  return recover(how, search_patience{}, std::move(sources)...);
}

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/recover_body.hpp>
#endif
