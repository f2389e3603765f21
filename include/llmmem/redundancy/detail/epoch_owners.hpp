/// @file
/// `redundant_replica`: the owners of parts in an epoch.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/replica_setup.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/redundancy/replica_types.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The owners of all parts in one epoch, and the map of which rank keeps which state. An epoch begins without
/// owners; recovery assigns them, and they are valid once the epoch is settled.
///
/// @par Complexity      O(parts) for each function. @par Thread safety one thread at a time.
/// @par Errors          values, with the replica's name.
class epoch_owners {
 public:
  /// The setup must outlive it.
  explicit epoch_owners(const replica_setup& setup) noexcept : setup_(&setup) {}

  /// @name While an epoch is recovered
  /// @{
  void begin(std::uint64_t epoch, rank_id self, std::optional<replica_map> map) noexcept {
    epoch_ = epoch;
    self_ = self;
    map_ = std::move(map);
    settled_epoch_ = 0;
    owners_.clear();
    lost_ = {};
  }
  void assign(std::vector<rank_id> owners) noexcept { owners_ = std::move(owners); }
  /// Records that the state of these ranks is lost; their numbers are of the epoch in which it was kept.
  void lose(const rank_set& ranks) { lost_ = ranks; }
  /// Allows parts to be kept from now on. @pre the owners are assigned
  void settle() noexcept { settled_epoch_ = epoch_; }
  /// @}

  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] rank_id self() const noexcept { return self_; }
  [[nodiscard]] const std::optional<replica_map>& map() const noexcept { return map_; }
  [[nodiscard]] const rank_set& lost() const noexcept { return lost_; }
  /// By part.
  [[nodiscard]] const std::vector<rank_id>& all() const noexcept { return owners_; }
  /// The parts that this rank owns, in order.
  [[nodiscard]] std::vector<part_id> own_parts() const;
  /// The parts that this rank keeps copies of for their owners, in order.
  [[nodiscard]] std::vector<part_id> wards() const;
  /// Returns `errc::not_recovered` unless this epoch is settled.
  [[nodiscard]] result<void> check_settled(std::uint64_t epoch) const noexcept {
    if (settled_epoch_ != 0 && settled_epoch_ == epoch) return {};
    return setup_->refuse(errc::not_recovered, 0, epoch, settled_epoch_);
  }
  /// Sorts by part the bytes that the caller passes to `keep`: those of each part that this rank owns, and of
  /// its wards if these are computed twice. `errc::size_mismatch` if `keep` was given any other parts.
  [[nodiscard]] result<std::vector<std::span<const std::byte>>> by_part(
      std::span<const part_bytes> given) const;

 private:
  const replica_setup* setup_;
  std::uint64_t epoch_ = 0;
  std::uint64_t settled_epoch_ = 0;  // 0: none
  rank_id self_{};
  std::optional<replica_map> map_{};
  std::vector<rank_id> owners_{};
  rank_set lost_{};
};

inline std::vector<part_id> epoch_owners::own_parts() const {
  std::vector<part_id> all;
  for (std::uint32_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] == self_) all.push_back(part_id{i});
  }
  return all;
}

inline std::vector<part_id> epoch_owners::wards() const {
  std::vector<part_id> all;
  if (!map_ || map_->scheme().is_coded()) return all;
  const std::span<const rank_id> kept = map_->kept_by(self_);
  for (std::uint32_t i = 0; i < owners_.size(); ++i) {
    if (std::ranges::find(kept, owners_[i]) != kept.end()) all.push_back(part_id{i});
  }
  return all;
}

inline result<std::vector<std::span<const std::byte>>> epoch_owners::by_part(
    std::span<const part_bytes> given) const {
  const std::vector<std::uint64_t>& sizes = setup_->sizes();
  std::vector<part_id> wanted = own_parts();
  if (setup_->scheme().kind() == redundancy_kind::compute) {
    const std::vector<part_id> more = wards();
    wanted.insert(wanted.end(), more.begin(), more.end());
  }
  std::vector<std::span<const std::byte>> parts(sizes.size());
  std::vector<bool> is_given(sizes.size(), false);
  for (const part_bytes& each : given) {
    const std::uint32_t part = to_index(each.part);
    if (std::ranges::find(wanted, each.part) == wanted.end() || is_given[part])
      return setup_->refuse(errc::size_mismatch, part, 0, each.bytes.size());
    if (each.bytes.size() != sizes[part])
      return setup_->refuse(errc::size_mismatch, part, sizes[part], each.bytes.size());
    parts[part] = each.bytes;
    is_given[part] = true;
  }
  for (const part_id each : wanted) {
    if (!is_given[to_index(each)])
      return setup_->refuse(errc::size_mismatch, to_index(each), sizes[to_index(each)], 0);
  }
  return result<std::vector<std::span<const std::byte>>>(std::move(parts));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
