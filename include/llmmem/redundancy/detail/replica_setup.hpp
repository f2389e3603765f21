/// @file
/// `redundant_replica`: its setup, which is equal on all ranks.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/redundancy/replica_types.hpp>
#include <llmmem/redundancy/seat_placement.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The scheme, the parts with their sizes and homes, and the tags of messages and errors. It never changes
/// after construction. The maps, homes and owners of an epoch follow from the setup and the seats of its
/// members.
///
/// @par Complexity      as stated. @par Thread safety   any number of readers.
/// @par Errors          those of the constructor, and of a placement.
class replica_setup {
 public:
  /// @param seats  number of seats of the job, if known.
  /// @throws argument_error  if sizes and homes differ in number, or a home is not a seat of the job.
  replica_setup(const redundancy_scheme& scheme, std::span<const std::uint64_t> sizes,
                std::span<const seat_id> homes, std::optional<std::uint32_t> seats,
                const replica_options& options)
      : scheme_(scheme),
        sizes_(sizes.begin(), sizes.end()),
        homes_(homes.begin(), homes.end()),
        options_(options) {
    check(seats);
    std::vector<seat_id> different = homes_;
    std::ranges::sort(different);
    home_seats_ = static_cast<std::size_t>(std::ranges::unique(different).begin() - different.begin());
  }

  [[nodiscard]] const redundancy_scheme& scheme() const noexcept { return scheme_; }
  /// Returns the bytes of each part.
  [[nodiscard]] const std::vector<std::uint64_t>& sizes() const noexcept { return sizes_; }
  [[nodiscard]] std::size_t parts() const noexcept { return sizes_.size(); }
  [[nodiscard]] std::uint32_t tag() const noexcept { return options_.tag; }
  [[nodiscard]] collective_call call(deadline by) const { return {.by = by, .tag = options_.tag}; }
  /// Makes a failure with the replica's name.
  [[nodiscard]] failure refuse(error_code code, std::uint32_t index, std::uint64_t wanted,
                               std::uint64_t found) const noexcept {
    return {.code = code, .index = index, .wanted = wanted, .found = found, .where = options_.name};
  }

  /// Returns the map of which rank keeps which state, for members in these seats; nothing for a single rank.
  /// If fewer seats are left than the parts have homes in, and the placement refuses them, neighbours keep
  /// the copies.
  /// @throws argument_error  if the placement refuses the seats of a full job.
  template <seat_placement Place>
  [[nodiscard]] std::optional<replica_map> map_of(const Place& place, std::span<const seat_id> seats) const;
  /// Returns, by part, the rank at its home, if there is one.
  [[nodiscard]] std::vector<std::optional<rank_id>> homes_among(std::span<const seat_id> seats) const;
  /// Returns the owners by part for the case that no version is held: the rank at the part's home, otherwise
  /// the rank with the fewest bytes so far.
  [[nodiscard]] std::vector<rank_id> owners_by_home(std::span<const seat_id> seats) const;
  /// The digest of the scheme, the parts, their homes, and the map of this epoch.
  [[nodiscard]] std::uint32_t digest(const std::optional<replica_map>& map) const;

 private:
  void check(std::optional<std::uint32_t> seats) const;

  redundancy_scheme scheme_;
  std::vector<std::uint64_t> sizes_;  // by part
  std::vector<seat_id> homes_;        // by part
  std::size_t home_seats_ = 0;        // number of different home seats
  replica_options options_;
};

inline void replica_setup::check(std::optional<std::uint32_t> seats) const {
  if (sizes_.size() != homes_.size()) {
    throw argument_error(std::string(options_.name) + ": " + std::to_string(sizes_.size()) + " parts and " +
                         std::to_string(homes_.size()) + " homes; give one home for each part");
  }
  for (std::size_t i = 0; seats && i < homes_.size(); ++i) {
    if (to_index(homes_[i]) < *seats) continue;
    throw argument_error(std::string(options_.name) + ": part " + std::to_string(i) +
                         " has its home in seat " + std::to_string(to_index(homes_[i])) +
                         ", but the job has seats 0 to " + std::to_string(*seats - 1) +
                         "; name one of these");
  }
}

template <seat_placement Place>
std::optional<replica_map> replica_setup::map_of(const Place& place, std::span<const seat_id> seats) const {
  const rank_count world{static_cast<std::uint32_t>(seats.size())};
  const std::optional<redundancy_scheme> scheme = scheme_for(scheme_, world);
  if (!scheme) return std::nullopt;
  try {
    return place(seats).place(*scheme, world);
  } catch (const argument_error&) {
    // The placement's rule may need more members than remain: a copy on a neighbour is better than none.
    if (seats.size() >= home_seats_) throw;
    return ring_neighbours().place(*scheme, world);
  }
}

inline std::vector<std::optional<rank_id>> replica_setup::homes_among(std::span<const seat_id> seats) const {
  std::vector<std::optional<rank_id>> homes(homes_.size());
  for (std::size_t i = 0; i < homes_.size(); ++i) {
    const auto at = std::ranges::find(seats, homes_[i]);
    if (at != seats.end()) homes[i] = rank_id{static_cast<std::uint32_t>(at - seats.begin())};
  }
  return homes;
}

inline std::vector<rank_id> replica_setup::owners_by_home(std::span<const seat_id> seats) const {
  const std::vector<std::optional<rank_id>> homes = homes_among(seats);
  std::vector<std::uint64_t> load(seats.size(), 0);
  for (std::size_t i = 0; i < homes.size(); ++i) {
    if (homes[i]) load[to_index(*homes[i])] += sizes_[i];
  }
  std::vector<rank_id> owners(homes.size(), rank_id{0});
  for (std::size_t i = 0; i < homes.size(); ++i) {
    const auto least = std::ranges::min_element(load) - load.begin();
    owners[i] = homes[i].value_or(rank_id{static_cast<std::uint32_t>(least)});
    if (!homes[i]) load[to_index(owners[i])] += sizes_[i];
  }
  return owners;
}

inline std::uint32_t replica_setup::digest(const std::optional<replica_map>& map) const {
  std::vector<std::uint64_t> words{static_cast<std::uint64_t>(scheme_.kind()), scheme_.shape().data,
                                   scheme_.shape().parity, sizes_.size()};
  words.insert(words.end(), sizes_.begin(), sizes_.end());
  for (const seat_id home : homes_)
    words.push_back(to_index(home));
  for (std::uint32_t rank = 0; map && rank < to_number(map->world()); ++rank) {
    for (const rank_id holder : map->holders(rank_id{rank}))
      words.push_back(to_index(holder));
  }
  return crc32c(0, std::as_bytes(std::span(words)));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
