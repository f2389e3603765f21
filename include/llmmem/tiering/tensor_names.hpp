/// @file
/// Names of tensors, and which tensor has which name.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The names of tensors: one for each tensor, in the order of a `chunk_mapping`.
///
///     const tensor_names names({"wte", "wpe", "h.0.attn.w"});
///     weights.read(*names.find("wpe"));
///
/// @par Complexity      `find` and `operator[]` O(1). No allocation after construction.
/// @par Thread safety   const throughout.
/// @par Errors          the constructor throws `argument_error` for an empty or repeated name, and
///                      `length_error` past 2^31 names.
class tensor_names {
 public:
  tensor_names() = default;
  explicit tensor_names(std::vector<std::string> names) : names_(std::move(names)) {
    if (names_.size() > std::size_t{1} << 31)
      throw length_error("tensor_names: " + std::to_string(names_.size()) +
                         " names, at most 2^31 can be held");
    std::size_t places = 8;
    while (places < 2 * names_.size())
      places *= 2;
    places_.assign(places, none);
    for (std::uint32_t i = 0; i < names_.size(); ++i) {
      if (names_[i].empty())
        throw argument_error("tensor_names: tensor " + std::to_string(i) + " has an empty name; give it one");
      std::uint32_t& place = places_[place_of(names_[i])];
      if (place != none) {
        throw argument_error("tensor_names: tensors " + std::to_string(place) + " and " + std::to_string(i) +
                             " are both called \"" + names_[i] + "\"; names must differ");
      }
      place = i;
    }
  }

  /// Returns the tensor of that name, if one has it.
  [[nodiscard]] std::optional<tensor_id> find(std::string_view name) const noexcept {
    if (places_.empty()) return std::nullopt;
    const std::uint32_t found = places_[place_of(name)];
    return found == none ? std::nullopt : std::optional(tensor_id{found});
  }
  /// @pre `tensor` is one of these tensors.
  [[nodiscard]] const std::string& operator[](tensor_id tensor) const noexcept {
    return names_[to_index(tensor)];
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(names_.size()); }
  /// Returns the memory of the names and their table.
  [[nodiscard]] std::size_t memory_bytes() const noexcept {
    std::size_t bytes = names_.capacity() * sizeof(std::string) + places_.capacity() * sizeof(std::uint32_t);
    for (const std::string& each : names_)
      bytes += each.capacity();
    return bytes;
  }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  /// Returns the name's place in the table, or the free place for it; half of the table is always free.
  [[nodiscard]] std::size_t place_of(std::string_view name) const noexcept {
    std::uint64_t hash = 0xCBF2'9CE4'8422'2325ULL;  // FNV-1a
    for (const char each : name)
      hash = (hash ^ static_cast<std::uint8_t>(each)) * 0x100'0000'01B3ULL;
    const std::size_t mask = places_.size() - 1;
    std::size_t at = static_cast<std::size_t>(hash ^ hash >> 32) & mask;
    while (places_[at] != none && names_[places_[at]] != name)
      at = (at + 1) & mask;
    return at;
  }

  std::vector<std::string> names_;
  std::vector<std::uint32_t> places_;  // open addressing, to names
};

}  // namespace v0
}  // namespace llmmem
