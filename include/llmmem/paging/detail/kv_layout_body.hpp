/// @file
/// The computations of `kv_layout`: its planes, their places and its fingerprints.
#pragma once

#include <llmmem/hash/siphash.hpp>
#include <llmmem/paging/kv_layout.hpp>

namespace llmmem {
inline namespace v0 {

/// The planes in the order of a layer's block, and where sections and runs begin. For each token and head,
/// the vectors of a run's planes are adjacent.
struct kv_layout::plane_list {
  enum class begins : std::uint8_t { nothing, run, section };
  struct entry {
    paging::plane_role role{};
    begins what{};
  };
  std::array<entry, paging::plane_role_count> entries{};
  std::uint32_t count = 0;

  constexpr void add(paging::plane_role role, begins what) noexcept {
    entries[count] = {role, what};
    ++count;
  }
};

/// Where a plane is in a block of a layer, in bytes.
struct kv_layout::placement {
  std::uint64_t before_section = 0;  // of the sections before its own
  std::uint64_t section = 0;
  std::uint64_t before_run = 0;  // in its section
  std::uint64_t record = 0;      // of its run, for one token and head
  std::uint64_t in_record = 0;   // before its vector
};

constexpr bool kv_layout::has(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  const paging::scale_form& scales = scales_of(role);
  const bool is_scaled = scales.group != paging::scale_group::none;
  switch (role) {
    case key:
      return true;
    case value:
      return has_values;
    case rotary:
      return rotary_dim != 0;
    case key_scale:
      return is_scaled;
    case value_scale:
      return has_values && is_scaled;
    case index_key:
      return index_dim != 0;
    case index_scale:
      return index_dim != 0 && is_scaled;
    case key_global:
      return is_scaled && scales.has_global;
    case value_global:
      return has_values && is_scaled && scales.has_global;
    case index_global:
      return index_dim != 0 && is_scaled && scales.has_global;
  }
  return false;
}

constexpr std::uint32_t kv_layout::planes() const noexcept {
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < paging::plane_role_count; ++i)
    count += has(static_cast<paging::plane_role>(i)) ? 1U : 0U;
  return count;
}

constexpr paging::plane_role kv_layout::role_of(std::uint32_t p) const noexcept {
  if (p == 0) return paging::plane_role::key;
  std::uint32_t left = p;
  for (std::uint32_t i = 1; i < paging::plane_role_count; ++i) {
    const auto role = static_cast<paging::plane_role>(i);
    if (has(role) && --left == 0) return role;
  }
  return paging::plane_role::value;  // for a number past the last role, the length of V, as in earlier
                                     // versions
}

/// Returns the scales of a role's plane, or those that the plane itself holds.
constexpr const paging::scale_form& kv_layout::scales_of(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  if (role == value || role == value_scale || role == value_global) return value_scales;
  if (role == index_key || role == index_scale || role == index_global) return index_scales;
  return key_scales;
}

constexpr dtype kv_layout::element_of(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  switch (role) {
    case key:
      return element;
    case value:
      return value_element.value_or(element);
    case rotary:
      return rotary_element;
    case index_key:
      return index_element;
    case key_scale:
    case value_scale:
    case index_scale:
      return scales_of(role).element;
    case key_global:
    case value_global:
    case index_global:
      return dtype::f32;
  }
  return element;
}

constexpr std::uint64_t kv_layout::elements_of(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  const auto scales_for = [&](std::uint64_t elements) -> std::uint64_t {
    const paging::scale_form& scales = scales_of(role);
    if (scales.group == paging::scale_group::channel) return elements * scales.numbers;
    if (scales.group == paging::scale_group::run && scales.run != 0)
      return elements / scales.run * scales.numbers;
    return scales.numbers;
  };
  switch (role) {
    case key:
      return head_dim;
    case value:
      return value_dim == 0 ? head_dim : value_dim;
    case rotary:
      return rotary_dim;
    case index_key:
      return index_dim;
    case key_scale:
      return scales_for(elements_of(key));
    case value_scale:
      return scales_for(elements_of(value));
    case index_scale:
      return scales_for(elements_of(index_key));
    case key_global:
    case value_global:
    case index_global:
      return 1;
  }
  return 0;
}

constexpr std::uint32_t kv_layout::tokens_of(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  if (role == key_global || role == value_global || role == index_global) return 1;
  const bool is_scale = role == key_scale || role == value_scale || role == index_scale;
  return is_scale && scales_of(role).group == paging::scale_group::channel ? 1 : block_tokens;
}

constexpr std::uint32_t kv_layout::heads_of(paging::plane_role role) const noexcept {
  using enum paging::plane_role;
  const bool is_shared = role == key_global || role == value_global || role >= index_key;
  return is_shared ? 1 : heads;
}

constexpr std::uint64_t kv_layout::layer_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < paging::plane_role_count; ++i) {
    const auto role = static_cast<paging::plane_role>(i);
    if (has(role)) bytes += unit_bytes_of(role);
  }
  return bytes;
}

constexpr kv_layout::plane_list kv_layout::planes_in_memory() const noexcept {
  using enum paging::plane_role;
  using begins = plane_list::begins;
  using place = paging::scale_place;
  plane_list out;
  const auto has_at = [&](paging::plane_role role, place at) {
    if (!has(role)) return false;
    const place said = scales_of(role).place;
    // Without a rotary part, `after_vector` and `after_rotary` are the same place.
    const bool is_behind_vector =
        said == place::after_vector || (said == place::after_rotary && (role != key_scale || !has(rotary)));
    if (at == place::after_vector) return is_behind_vector;
    return said == at && !is_behind_vector;
  };
  const auto add_behind = [&](paging::plane_role role, place at) {
    if (has_at(role, at)) out.add(role, begins::nothing);
  };
  const auto add_in_block = [&](paging::plane_role scale, paging::plane_role global) {
    if (has_at(scale, place::in_block)) out.add(scale, begins::run);
    if (has(global) && scales_of(global).place != place::separate) out.add(global, begins::run);
  };
  out.add(key, begins::section);
  add_behind(key_scale, place::after_vector);
  if (has(rotary)) out.add(rotary, begins::nothing);
  add_behind(key_scale, place::after_rotary);
  if (is_joined()) {
    out.add(value, begins::nothing);
    add_behind(value_scale, place::after_vector);
  }
  add_in_block(key_scale, key_global);
  if (has_values && !is_joined()) {
    out.add(value, begins::section);
    add_behind(value_scale, place::after_vector);
  }
  add_in_block(value_scale, value_global);
  if (has(index_key)) {
    out.add(index_key, begins::section);
    add_behind(index_scale, place::after_vector);
    add_in_block(index_scale, index_global);
  }
  const auto add_apart = [&](paging::plane_role scale, paging::plane_role global) {
    if (!has_at(scale, place::separate)) return;
    out.add(scale, begins::section);
    if (has(global)) out.add(global, begins::run);
  };
  add_apart(key_scale, key_global);
  add_apart(value_scale, value_global);
  add_apart(index_scale, index_global);
  return out;
}

constexpr kv_layout::placement kv_layout::place_of(paging::plane_role role) const noexcept {
  using begins = plane_list::begins;
  const plane_list all = planes_in_memory();
  std::uint32_t section = 0;
  std::uint32_t run = 0;
  std::uint32_t at = 0;
  for (;; ++at) {
    if (all.entries[at].what == begins::section) section = at;
    if (all.entries[at].what != begins::nothing) run = at;
    if (all.entries[at].role == role || at + 1 == all.count) break;
  }
  placement out;
  bool is_same_run = true;
  bool is_same_section = true;
  for (std::uint32_t i = 0; i < all.count; ++i) {
    const plane_list::entry& each = all.entries[i];
    const std::uint64_t bytes = unit_bytes_of(each.role);
    const std::uint64_t vector = vector_bytes_of(each.role);
    if (i > at && each.what != begins::nothing) is_same_run = false;
    if (i > at && each.what == begins::section) is_same_section = false;
    if (i < section) out.before_section += bytes;
    if (i >= section && is_same_section) out.section += bytes;
    if (i >= section && i < run) out.before_run += bytes;
    if (i >= run && is_same_run) out.record += vector;
    if (i >= run && i < at) out.in_record += vector;
  }
  return out;
}

constexpr detail::kv_vector_run kv_layout::vector_run_of(std::uint32_t p) const noexcept {
  const placement at = place_of(role_of(p));
  return {at.record, at.in_record};
}

constexpr std::uint64_t kv_layout::fragments() const noexcept {
  std::uint64_t sections = 0;
  const plane_list all = planes_in_memory();
  for (std::uint32_t i = 0; i < all.count; ++i)
    sections += all.entries[i].what == plane_list::begins::section ? 1U : 0U;
  switch (order) {
    case block_order::layer_first:
      return layers * sections;
    case block_order::layer_first_paired:
    case block_order::layer_first_joined:
      return layers;
    case block_order::block_first:
    case block_order::block_first_planes:
    case block_order::block_first_joined:
      return 1;
    case block_order::block_first_separate:
    case block_order::layer_between:
    case block_order::layer_last:
      return sections;
  }
  return 0;
}

constexpr plane_strides kv_layout::strides(std::uint32_t p, std::uint64_t blocks) const noexcept {
  const paging::plane_role role = role_of(p);
  const placement at = place_of(role);
  const std::uint64_t unit = at.section;
  const std::uint64_t before = at.before_section;  // V is after K
  const std::uint64_t inside = at.before_run + at.in_record;
  switch (order) {
    case block_order::layer_first:
      return inside_unit({before * blocks + inside, layer_bytes() * blocks, unit}, role, at.record);
    case block_order::layer_first_paired:
    case block_order::layer_first_joined:
      return inside_unit({before + inside, layer_bytes() * blocks, layer_bytes()}, role, at.record);
    case block_order::block_first:
    case block_order::block_first_joined:
      return inside_unit({before + inside, layer_bytes(), block_bytes()}, role, at.record);
    case block_order::block_first_planes:
      return inside_unit({before * layers + inside, unit, block_bytes()}, role, at.record);
    case block_order::block_first_separate:
      return inside_unit({before * layers * blocks + inside, unit, unit * layers}, role, at.record);
    case block_order::layer_between:
    case block_order::layer_last:
      return among_vectors(
          {before * layers * blocks + at.before_run * layers + at.in_record, 0, unit * layers}, role,
          at.record);
  }
  return {};
}

/// Adds the distances between vectors for orders that keep a layer's block together.
constexpr plane_strides kv_layout::inside_unit(plane_strides out, paging::plane_role role,
                                               std::uint64_t record) const noexcept {
  const bool is_nhd = heads_in_block == paging::head_order::nhd;
  out.vector_bytes = vector_bytes_of(role);
  out.head = is_nhd ? record : record * tokens_of(role);
  out.token = is_nhd ? record * heads_of(role) : record;
  if (tokens_of(role) != block_tokens) out.token = 0;
  if (heads_of(role) != heads) out.head = 0;
  return out;
}

/// Adds the distances for orders that put the layers between a block's vectors.
constexpr plane_strides kv_layout::among_vectors(plane_strides out, paging::plane_role role,
                                                 std::uint64_t record) const noexcept {
  const bool is_last = order == block_order::layer_last;
  const bool is_nhd = heads_in_block == paging::head_order::nhd;
  const std::uint64_t inner_count = is_nhd ? heads_of(role) : tokens_of(role);
  out = inside_unit(out, role, record);
  std::uint64_t& inner = is_nhd ? out.head : out.token;
  std::uint64_t& outer = is_nhd ? out.token : out.head;
  out.layer = is_last ? record : record * inner_count;
  outer *= layers;
  if (is_last) inner *= layers;
  return out;
}

constexpr kv_layout kv_layout::packed() const noexcept {
  kv_layout out = *this;
  out.order = block_order::block_first;
  out.heads_in_block = paging::head_order::nhd;
  for (paging::scale_form* each : {&out.key_scales, &out.value_scales, &out.index_scales})
    each->place = paging::scale_place::in_block;
  return out;
}

constexpr std::uint64_t kv_layout::content_fingerprint() const noexcept {
  return digest(packed()) | 1U;
}

constexpr std::uint64_t kv_layout::fingerprint() const noexcept {
  return digest(*this) | 1U;
}

namespace detail {

/// The names of the numbers of a record.
inline constexpr std::array<const char*, kv_layout_words> kv_layout_fields{
    "the layouts' version",
    "the layouts' layers",
    "the layouts' heads",
    "the layouts' head_dim",
    "the layouts' value_dim",
    "the layouts' block_tokens",
    "the layouts' has_values",
    "the layouts' element",
    "the layouts' heads_in_block",
    "the layouts' order",
    "the layouts' model",
    "the layouts' value_element",
    "the layouts' key_scales.group",
    "the layouts' key_scales.element",
    "the layouts' key_scales.run",
    "the layouts' key_scales.numbers",
    "the layouts' key_scales.place",
    "the layouts' key_scales.has_global or is_rotated",
    "the layouts' value_scales.group",
    "the layouts' value_scales.element",
    "the layouts' value_scales.run",
    "the layouts' value_scales.numbers",
    "the layouts' value_scales.place",
    "the layouts' value_scales.has_global or is_rotated",
    "the layouts' rotary_dim",
    "the layouts' rotary_element",
    "the layouts' index_dim",
    "the layouts' index_element",
    "the layouts' index_scales.group",
    "the layouts' index_scales.element",
    "the layouts' index_scales.run",
    "the layouts' index_scales.numbers",
    "the layouts' index_scales.place",
    "the layouts' index_scales.has_global or is_rotated",
    "the layouts' part.tp_size",
    "the layouts' part.tp_rank",
    "the layouts' part.cp_size",
    "the layouts' part.cp_rank",
    "the layouts' part.cp_interleave",
};
/// The first numbers are the fields of version 1, so layouts without later fields keep their fingerprints.
inline constexpr std::size_t plain_layout_words = 11;
inline constexpr std::size_t first_part_word = 34;

/// Returns the record of a layout without the later fields.
[[nodiscard]] constexpr kv_layout_record plain_record(kv_layout_record of) noexcept {
  of[0] = 1;
  for (std::size_t i = plain_layout_words; i < of.size(); ++i)
    of[i] = 0;
  of[first_part_word] = of[first_part_word + 2] = of[first_part_word + 4] = 1;
  return of;
}

/// SipHash over a record, one number per word, under a key of its own. Digests are stored with data, so the
/// computation must never change. The first word is the version of the list: 1 for the first numbers alone, 2
/// for all.
[[nodiscard]] constexpr std::uint64_t digest_of_record(const kv_layout_record& of) noexcept {
  siphash_state<2, 4> state({.low = 0x6B76'206C'6179'6F75ULL, .high = 0x7420'7631});
  const std::size_t words = of[0] == 1 ? plain_layout_words : of.size();
  for (std::size_t i = 0; i < words; ++i)
    state.absorb(of[i]);
  return state.finish(0, words * sizeof(std::uint64_t)).low;
}

/// Returns the first number in which two records differ, starting with the parts; `kv_layout_words` if they
/// are equal.
[[nodiscard]] constexpr std::size_t first_difference(const kv_layout_record& a,
                                                     const kv_layout_record& b) noexcept {
  for (std::size_t i = first_part_word; i < kv_layout_words; ++i)
    if (a[i] != b[i]) return i;
  for (std::size_t i = 1; i < first_part_word; ++i)
    if (a[i] != b[i]) return i;
  return kv_layout_words;
}

/// Returns the name of the first field in which the contents of two layouts differ.
[[nodiscard]] constexpr const char* differing_field(const kv_layout& a, const kv_layout& b) noexcept;

}  // namespace detail

constexpr detail::kv_layout_record kv_layout::record() const noexcept {
  using paging::plane_role;
  detail::kv_layout_record out{};
  std::size_t at = 1;
  const auto add = [&](std::uint64_t number) { out[at++] = number; };
  add(layers);
  add(heads);
  add(head_dim);
  // Without values, the length of a value has no meaning.
  add(has_values ? elements_of(plane_role::value) : head_dim);
  add(block_tokens);
  add(has_values ? 1U : 0U);
  add(static_cast<std::uint64_t>(element));
  add(static_cast<std::uint64_t>(heads_in_block));
  add(static_cast<std::uint64_t>(order));
  add(model);
  const dtype values = element_of(plane_role::value);
  add(!has_values || values == element ? 0U : 1U + static_cast<std::uint64_t>(values));
  const auto add_scales = [&](plane_role role, bool is_there) {
    const paging::scale_form& scales = scales_of(role);
    const bool is_scaled = is_there && scales.group != paging::scale_group::none;
    // With no rotary part between, `after_vector` and `after_rotary` are the same place.
    const bool is_behind =
        scales.place == paging::scale_place::after_rotary && (role != plane_role::key || rotary_dim == 0);
    const paging::scale_place place = is_behind ? paging::scale_place::after_vector : scales.place;
    const auto if_scaled = [&](auto number) {
      add(is_scaled ? static_cast<std::uint64_t>(number) : std::uint64_t{0});
    };
    if_scaled(scales.group);
    if_scaled(scales.element);
    if_scaled(scales.group == paging::scale_group::run ? scales.run : 0U);
    if_scaled(scales.numbers);
    if_scaled(place);
    if_scaled((scales.has_global ? 1U : 0U) | (scales.is_rotated ? 2U : 0U));
  };
  add_scales(plane_role::key, true);
  add_scales(plane_role::value, has_values);
  add(rotary_dim);
  add(rotary_dim == 0 ? 0U : static_cast<std::uint64_t>(rotary_element));
  add(index_dim);
  add(index_dim == 0 ? 0U : static_cast<std::uint64_t>(index_element));
  add_scales(plane_role::index_key, index_dim != 0);
  // Ranks that hold the same heads count as one.
  const std::uint64_t holders =
      part.heads_of_model != 0 && part.heads_of_model < part.tp_size ? part.heads_of_model : part.tp_size;
  add(holders);
  add(part.tp_size == 0 ? 0U : part.tp_rank * holders / part.tp_size);
  add(part.cp_size);
  add(part.cp_rank);
  add(part.cp_size == 1 ? 1U : part.cp_interleave);
  out[0] = 1;
  if (out != detail::plain_record(out)) out[0] = 2;
  return out;
}

constexpr const char* detail::differing_field(const kv_layout& a, const kv_layout& b) noexcept {
  const std::size_t at = first_difference(a.packed().record(), b.packed().record());
  return at == kv_layout_words ? "" : kv_layout_fields[at];
}

constexpr std::uint64_t kv_layout::digest(const kv_layout& of) noexcept {
  return detail::digest_of_record(of.record());
}

}  // namespace v0
}  // namespace llmmem
