/// @file
/// Bodies of `replica_source`: how ranks agree on the state to continue from.
#pragma once

#include <llmmem/checkpoint/detail/copy_body.hpp>
#include <llmmem/checkpoint/detail/rank_message.hpp>
#include <llmmem/checkpoint/detail/recover_body.hpp>
#include <llmmem/checkpoint/replica_source.hpp>
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/errors.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Gathers the numbers of each rank on every rank.
template <transport T>
class number_gathering {
 public:
  number_gathering(T& ranks, deadline by, std::uint32_t tag) : ranks_(&ranks), call_{.by = by, .tag = tag} {}

  /// Gathers `counts[r]` numbers of each rank r.
  [[nodiscard]] std::vector<std::uint64_t> all(std::span<const std::uint64_t> mine,
                                               std::span<const std::uint64_t> counts) {
    std::vector<std::uint64_t> blocks{0};
    for (const std::uint64_t each : counts)
      blocks.push_back(blocks.back() + each * sizeof(std::uint64_t));
    std::vector<std::uint64_t> gathered(static_cast<std::size_t>(blocks.back() / sizeof(std::uint64_t)));
    const auto first = static_cast<std::size_t>(blocks[to_index(ranks_->rank())] / sizeof(std::uint64_t));
    std::ranges::copy(mine, gathered.begin() + static_cast<std::ptrdiff_t>(first));
    const auto done = all_gather(*ranks_, std::as_writable_bytes(std::span(gathered)), blocks, call_);
    if (!done) {
      ranks_->revoke();
      done.value();
    }
    return gathered;
  }
  [[nodiscard]] std::vector<std::uint64_t> all(std::span<const std::uint64_t> mine) {
    return all(mine, std::vector<std::uint64_t>(to_number(ranks_->world()), mine.size()));
  }

 private:
  T* ranks_;
  collective_call call_;
};

/// The checkpoints that every rank lists, newest first.
struct common_list {
  std::vector<checkpoint_id> ids{};
  std::vector<std::uint32_t> blind{};  // ranks that could list no source
};

template <transport T>
[[nodiscard]] common_list list_together(number_gathering<T>& gather, const source_list& listed,
                                        bool is_blind) {
  std::vector<std::uint64_t> mine;
  for (const source_entry& each : listed.entries) {
    const bool is_told =
        mine.size() >= 2 && mine[mine.size() - 2] == each.id.generation && mine.back() == each.id.step;
    if (!is_told) mine.insert(mine.end(), {each.id.generation, each.id.step});
  }
  const std::array<std::uint64_t, 2> about{mine.size(), is_blind ? 1U : 0U};
  const std::vector<std::uint64_t> sizes = gather.all(about);
  common_list common;
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < sizes.size(); i += 2) {
    if (sizes[i + 1] != 0) common.blind.push_back(static_cast<std::uint32_t>(i / 2));
    counts.push_back(sizes[i]);
  }
  const std::vector<std::uint64_t> all = gather.all(mine, counts);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sorted;
  std::size_t at = 0;
  for (const std::uint64_t count : counts) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> of_one;
    for (std::uint64_t i = 0; i < count; i += 2, at += 2)
      of_one.emplace_back(all[at], all[at + 1]);
    std::ranges::sort(of_one);  // one checkpoint may be in several sources
    const auto twice = std::ranges::unique(of_one);
    of_one.erase(twice.begin(), twice.end());
    sorted.insert(sorted.end(), of_one.begin(), of_one.end());
  }
  std::ranges::sort(sorted, std::ranges::greater());
  for (std::size_t i = 0; i < sorted.size();) {
    const std::size_t first = i;
    while (i < sorted.size() && sorted[i] == sorted[first])
      ++i;
    if (i - first == counts.size()) common.ids.push_back({sorted[first].second, sorted[first].first});
  }
  return common;
}

/// Records this rank's checkpoints that would be newer than the result, but are not on all ranks.
template <class Recovery>
void note_partial(const source_set& sources, const source_list& listed, const common_list& common,
                  Recovery& recovered) {
  for (const source_entry& each : listed.entries) {
    if (recovered.found && each.id.generation <= recovered.found->id.generation) break;
    if (recovered.version && each.id.step <= *recovered.version) break;
    if (std::ranges::find(common.ids, each.id) != common.ids.end()) continue;
    recovered.skipped.push_back({each.source, sources.name(each.source), skip_reason::not_everywhere,
                                 folder_name(each.id), "not all ranks have it"});
  }
}

/// The state of a checkpoint on a rank, as a number that ranks exchange.
enum class rank_has : std::uint64_t {
  nothing,  ///< all its copies of the checkpoint are damaged
  whole,
  unread  ///< a copy may be complete, but could not be read
};

/// The first source from which a checkpoint can be loaded.
struct first_source {
  const source_entry* entry = nullptr;
  rank_has what = rank_has::nothing;
  std::string why_unread{};
};

template <class Recovery>
[[nodiscard]] first_source open_first(const source_set& sources, const source_list& listed,
                                      const checkpoint_id& id, verification how, Recovery& recovered) {
  first_source first;
  for (const source_entry& each : listed.entries) {
    if (!(each.id == id)) continue;
    open_attempt opened = attempt_to_open(sources, each, how, {});
    if (opened.found) {
      recovered.found = std::move(opened.found);
      return {&each, rank_has::whole, {}};
    }
    if (!opened.trouble.is_proof) {
      first.what = rank_has::unread;
      first.why_unread = opened.trouble.why;
    }
    recovered.skipped.push_back(noted(sources, each, std::move(opened.trouble)));
  }
  return first;
}

/// Returns whether all ranks can load the checkpoint, and it is the same on all; if not, sets `why`.
/// @throws unreadable_checkpoint  on all ranks, if one of them could not read a checkpoint that may be
///                                complete.
template <transport T>
[[nodiscard]] std::string why_not_all(number_gathering<T>& gather, const checkpoint_id& id,
                                      const first_source& first,
                                      const std::optional<found_checkpoint>& found) {
  std::array<std::uint64_t, 2> mine{static_cast<std::uint64_t>(first.what), 0};
  if (found) mine[1] = crc32c_of(to_json(folded_manifest(found->manifest)));
  const std::vector<std::uint64_t> all = gather.all(mine);
  std::vector<std::uint32_t> cannot;
  std::vector<std::uint32_t> unread;
  bool is_same = true;
  for (std::size_t i = 0; i < all.size(); i += 2) {
    const auto rank = static_cast<std::uint32_t>(i / 2);
    if (all[i] == static_cast<std::uint64_t>(rank_has::nothing)) cannot.push_back(rank);
    if (all[i] == static_cast<std::uint64_t>(rank_has::unread)) unread.push_back(rank);
    is_same = is_same && all[i + 1] == all[1];
  }
  if (!unread.empty()) {
    throw unreadable_checkpoint(
        "recover: " +
        unread_text(to_text(std::span<const std::uint32_t>(unread)), folder_name(id),
                    first.why_unread.empty() ? "see their errors for the reason" : first.why_unread));
  }
  if (!cannot.empty()) return to_text(std::span<const std::uint32_t>(cannot)) + " cannot load it";
  return is_same ? std::string()
                 : "ranks have different contents under that name: these belong to different runs";
}

}  // namespace detail

template <transport T, recoverable_replica Replica, checkpoint_storage... Storages>
joint_recovery<Storages...> recover(verification how, replica_source<T, Replica> memory,
                                    checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0)
{
  joint_recovery<Storages...> recovered(*sources.storage...);
  recovered.memory = memory.name;
  const auto kept = memory.replica->recover(memory.by);
  if (kept.code() == errc::state_lost) {
    recovered.memory_lost = kept.error().message();
    memory.replica->forget();
  } else if (!kept) {
    memory.ranks->revoke();
    kept.error().raise();
  } else if (kept->is_recovered) {
    recovered.version = kept->version;
  }

  const detail::source_set all(sources...);
  const detail::source_list listed = detail::list_sources(all, {});
  recovered.skipped = listed.skipped;
  detail::number_gathering<T> gather(*memory.ranks, memory.by, memory.tag);
  const detail::common_list common =
      detail::list_together(gather, listed, listed.skipped.size() == all.size());
  if (!common.blind.empty() && !recovered.version) {
    std::string text = "recover: no source can be listed on " + detail::to_text(std::span(common.blind));
    for (const skipped_in_source& each : listed.skipped)
      text += "; " + each.name + ": " + each.why;
    throw io_error(text);
  }
  for (const checkpoint_id& id : common.ids) {
    if (recovered.version && id.step <= *recovered.version) break;
    const detail::first_source first = detail::open_first(all, listed, id, how, recovered);
    const detail::source_entry* const entry = first.entry;
    const std::string why = detail::why_not_all(gather, id, first, recovered.found);
    if (why.empty()) {
      recovered.source = entry->source;
      recovered.name = all.name(entry->source);
      recovered.version.reset();
      detail::note_conflicts(all, listed, *entry, *recovered.found, recovered.skipped);
      break;
    }
    recovered.found.reset();
    if (entry != nullptr) {
      recovered.skipped.push_back(
          {entry->source, all.name(entry->source), skip_reason::not_everywhere, folder_name(id), why});
    }
  }
  detail::note_partial(all, listed, common, recovered);
  return recovered;
}

}  // namespace v0
}  // namespace llmmem
