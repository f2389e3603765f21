/// @file
/// A resharding plan: which elements of which stored piece go where in which wanted one, as plain data.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A piece that exists: in a file, or in the memory of a live rank.
struct stored_piece {
  tensor_id tensor{};
  holder_id holder{};
  element_runs elements{};
};

/// A piece that a rank will have.
struct wanted_piece {
  tensor_id tensor{};
  rank_id rank{};
  element_runs elements{};
  holder_id prefers = no_holder;  ///< the first choice of source: the rank itself, a local file
};

/// The index of a piece in the list that a plan was made from.
enum class stored_index : std::uint32_t {};
enum class wanted_index : std::uint32_t {};

/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(stored_index piece) noexcept {
  return static_cast<std::uint32_t>(piece);
}
/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(wanted_index piece) noexcept {
  return static_cast<std::uint32_t>(piece);
}

/// Copies `count` runs of `run` elements. Offsets and strides are in elements of the tensor's type, in the
/// dense storage of the two pieces, not in the tensor; the strides of a single run are its length. A band of
/// a matrix is thus one copy, of the form that cudaMemcpy2D takes.
struct reshard_copy {
  tensor_id tensor{};
  stored_index source{};
  wanted_index destination{};
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;
  std::uint64_t run = 0;
  std::uint64_t count = 0;
  std::uint64_t source_stride = 0;
  std::uint64_t destination_stride = 0;

  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return run * count; }

  /// Calls `visit(source offset, destination offset, elements)` for each run.
  template <class Visit>
  constexpr void each_run(Visit&& visit) const {
    for (std::uint64_t i = 0; i < count; ++i)
      visit(source_offset + i * source_stride, destination_offset + i * destination_stride, run);
  }

  friend constexpr bool operator==(const reshard_copy&, const reshard_copy&) noexcept = default;
};

/// The amounts that a plan reads from a holder, or brings to a rank.
template <class Id>
struct reshard_share {
  Id id{};
  std::uint64_t copies = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;

  friend constexpr bool operator==(const reshard_share&, const reshard_share&) noexcept = default;
};

/// The copies to make, each with its source and destination, and their cost. Each wanted element is read
/// once.
///
/// @par Thread safety   a plain value.
struct reshard_plan {
  /// By source, then source offset, then destination: each source is read from front to back.
  std::vector<reshard_copy> copies{};
  std::vector<reshard_share<holder_id>> holders{};  ///< those that are read, by id
  std::vector<reshard_share<rank_id>> ranks{};      ///< those that receive anything, by id
  std::uint64_t elements = 0;                       ///< the number of wanted elements
  std::uint64_t bytes = 0;

  friend bool operator==(const reshard_plan&, const reshard_plan&) noexcept = default;
};

/// Returns one line for all, one for each holder and rank, one for each copy: to print and to compare. It
/// cannot be parsed back.
[[nodiscard]] std::string to_text(const reshard_plan& plan);

inline std::string to_text(const reshard_plan& plan) {
  const auto number = [](std::uint64_t value) { return std::to_string(value); };
  const auto cost = [&](std::uint64_t copies, std::uint64_t elements, std::uint64_t bytes) {
    return number(copies) + " copies, " + number(elements) + " elements, " + number(bytes) + " bytes\n";
  };
  std::string text = "reshard: " + cost(plan.copies.size(), plan.elements, plan.bytes);
  for (const auto& each : plan.holders)
    text += "holder " + number(to_index(each.id)) + ": " + cost(each.copies, each.elements, each.bytes);
  for (const auto& each : plan.ranks)
    text += "rank " + number(to_index(each.id)) + ": " + cost(each.copies, each.elements, each.bytes);
  for (const reshard_copy& each : plan.copies) {
    const auto end = [&](std::uint32_t piece, std::uint64_t offset, std::uint64_t stride) {
      return number(piece) + " + " + number(offset) + (each.count == 1 ? "" : " step " + number(stride));
    };
    text += "copy tensor " + number(to_index(each.tensor)) + ": stored " +
            end(to_index(each.source), each.source_offset, each.source_stride) + " -> wanted " +
            end(to_index(each.destination), each.destination_offset, each.destination_stride) + ": ";
    if (each.count != 1) text += number(each.count) + " x ";
    text += number(each.run) + "\n";
  }
  return text;
}

}  // namespace v0
}  // namespace llmmem
