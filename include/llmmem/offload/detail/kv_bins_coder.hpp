/// @file
/// The coder of `kv_bins`. Only kv_bins.hpp includes this file.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/huffman_plane.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/kv_bins_types.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline const offload::layer_bins& bins_of(const offload::kv_bins_options& of,
                                                        std::uint32_t layer) noexcept {
  return of.layers[layer < of.layers.size() ? layer : of.layers.size() - 1];
}

/// Fills in defaults. @throws argument_error
inline void check_bins(offload::kv_bins_options& options) {
  const kv_layout& layout = options.layout.checked();
  for (std::uint32_t p = 0; p < layout.planes(); ++p) {
    const dtype element = layout.element_of(p);
    if (p < layout.kv_planes() && (element == dtype::f32 || element == dtype::bf16 || element == dtype::f16))
      continue;
    throw argument_error("kv_bins: plane " + std::to_string(p) + " of the layout has codes, scales, a " +
                         "separate rotary part or an indexer's keys; it takes keys and values of f32, bf16 "
                         "or f16 alone: store other forms as they are, or by a lossless codec");
  }
  if (options.layers.empty()) options.layers.push_back({});
  const auto check = [](std::uint32_t bins, const char* what) {
    if (bins >= 3 && bins <= 255 && bins % 2 == 1) return;
    throw argument_error("kv_bins: " + std::string(what) + " is " + std::to_string(bins) +
                         "; it must be odd, from 3 to 255, so that 0 has a code");
  };
  for (const offload::layer_bins& each : options.layers) {
    check(each.keys, "a layer's keys");
    check(each.values, "a layer's values");
  }
  check(options.anchor_bins, "anchor_bins");
  if (options.group_tokens == 0) throw argument_error("kv_bins: group_tokens is 0; at least 1 is needed");
}

[[nodiscard]] inline std::uint64_t bins_digest(const offload::kv_bins_options& of) noexcept {
  std::uint64_t out = format_digest("kv_bins 1");
  const auto add = [&](std::uint64_t number) { out = (out ^ number) * 0x9E37'79B9'7F4A'7C15ULL; };
  add(of.layout.content_fingerprint());
  add(of.group_tokens);
  add(of.anchor_bins);
  for (std::uint32_t l = 0; l < of.layout.layers; ++l) {
    const offload::layer_bins& each = bins_of(of, l);
    add(std::uint64_t{each.keys} << 32U | each.values);
    add((each.key_differences ? 2U : 0U) | (each.value_differences ? 1U : 0U));
  }
  return out;
}

/// Encodes and decodes blocks of one group.
///
/// The form: a byte 0 and the block; or a byte 1, the scales of all vectors (layer by layer, K then V, token
/// by token) in bf16, and streams of codes: from the first layer on, for each number of bins that is new,
/// those of keys, of keys that begin a group, and the same of values. Each is its bytes in 4 bytes,
/// little-endian, and the plane of `huffman_plane`; 0 and the codes if that saves nothing. Empty streams are
/// left out.
class kv_bins_coder {
 public:
  kv_bins_coder(const offload::kv_bins_options& options, const metadata_source& source)
      : options_(options),
        layout_(options.layout.packed()),
        huffman_(0, source),
        anchor_(most_elements(), source, "kv_bins: anchors"),
        vector_(most_elements(), source, "kv_bins: a vector") {
    name_streams();
    for_each_vector([&](const vector_place& at) { streams_[at.stream].count += elements_of(at.plane); });
    std::uint64_t first = 0;
    for (stream& each : streams_) {
      each.first = first;
      first += each.count;
    }
    codes_ = fixed_array<std::byte>(first, source, "kv_bins: codes");
    vectors_ = std::uint64_t{layout_.layers} * layout_.kv_planes() * layout_.block_tokens;
  }

  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in,
                                             std::span<std::byte> out) noexcept {
    if (out.size() < 1 + in.size()) return failure{errc::too_short, 0, 1 + in.size(), out.size(), name};
    if (const std::uint64_t bytes = encode_bins(in, out.first(1 + in.size())); bytes != 0) return bytes;
    out[0] = std::byte{0};
    std::memcpy(out.data() + 1, in.data(), in.size());
    return std::uint64_t{1 + in.size()};
  }
  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    if (!in.empty() && in[0] == std::byte{0} && in.size() == 1 + out.size()) {
      std::memcpy(out.data(), in.data() + 1, out.size());
      return {};
    }
    if (in.empty() || in[0] != std::byte{1} || out.size() != layout_.block_bytes() || !decode_bins(in, out))
      return failure{errc::damaged_encoding, 0, 1 + out.size(), in.size(), name};
    return {};
  }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return huffman_.metadata_bytes() + codes_.bytes() + anchor_.bytes() + vector_.bytes();
  }

 private:
  static constexpr const char* name = "kv_bins";

  /// The codes that share a table: of keys or of values, in layers of the same bins.
  struct stream {
    std::uint32_t plane = 0;
    std::int32_t most = 0;
    bool is_of_anchors = false;
    std::uint64_t count = 0;
    std::uint64_t first = 0;  // in `codes_`
    std::uint64_t next = 0;
  };
  struct vector_place {
    std::uint32_t layer = 0;
    std::uint32_t plane = 0;
    std::uint32_t token = 0;
    std::size_t stream = 0;
    bool is_difference = false;
    bool is_anchor = false;
    std::int32_t most = 0;  ///< the largest code, of both signs
  };

  template <class F>
  void for_each_vector(F&& f) const {
    for (std::uint32_t l = 0; l < layout_.layers; ++l) {
      const offload::layer_bins& bins = bins_of(options_, l);
      for (std::uint32_t p = 0; p < layout_.kv_planes(); ++p) {
        const bool differs = p == 0 ? bins.key_differences : bins.value_differences;
        for (std::uint32_t t = 0; t < layout_.block_tokens; ++t) {
          const bool is_anchor = differs && t % options_.group_tokens == 0;
          const std::uint32_t codes = is_anchor ? options_.anchor_bins : p == 0 ? bins.keys : bins.values;
          f(vector_place{.layer = l,
                         .plane = p,
                         .token = t,
                         .stream = stream_of_[(std::size_t{l} * 2 + p) * 2 + (is_anchor ? 1 : 0)],
                         .is_difference = differs && !is_anchor,
                         .is_anchor = is_anchor,
                         .most = static_cast<std::int32_t>((codes - 1) / 2)});
        }
      }
    }
  }
  void name_streams() {
    for (std::uint32_t l = 0; l < layout_.layers; ++l) {
      const offload::layer_bins& bins = bins_of(options_, l);
      for (std::uint32_t p = 0; p < 2; ++p) {
        for (const bool is_anchor : {false, true}) {
          const std::uint32_t codes = is_anchor ? options_.anchor_bins : p == 0 ? bins.keys : bins.values;
          const auto most = static_cast<std::int32_t>((codes - 1) / 2);
          std::size_t at = 0;
          while (at < streams_.size() && (streams_[at].plane != p || streams_[at].most != most ||
                                          streams_[at].is_of_anchors != is_anchor))
            ++at;
          if (at == streams_.size())
            streams_.push_back({.plane = p, .most = most, .is_of_anchors = is_anchor});
          stream_of_.push_back(at);
        }
      }
    }
  }
  void rewind() noexcept {
    for (stream& each : streams_)
      each.next = each.first;
  }
  [[nodiscard]] std::uint64_t elements_of(std::uint32_t plane) const noexcept {
    return layout_.vector_elements(plane) * layout_.heads_of(plane);
  }
  [[nodiscard]] std::uint64_t most_elements() const noexcept {
    const std::uint64_t keys = elements_of(0);
    const std::uint64_t values = layout_.has_values ? elements_of(1) : 0;
    return keys > values ? keys : values;
  }

  /// Calls `f(index, address)` for each element of a token's vectors.
  template <class Bytes, class F>
  void for_each_element(const vector_place& at, Bytes* block, F&& f) const {
    const plane_strides strides = layout_.strides(at.plane, 1);
    const std::uint64_t each = layout_.vector_elements(at.plane);
    const std::uint64_t bytes = bits_of(layout_.element_of(at.plane)) / 8;
    for (std::uint64_t h = 0; h < layout_.heads_of(at.plane); ++h) {
      Bytes* const first = block + strides.offset(at.layer, 0, at.token, h);
      for (std::uint64_t i = 0; i < each; ++i)
        f(h * each + i, first + i * bytes);
    }
  }
  template <dtype E>
  static float read_as(const std::byte* from) noexcept {
    element_bits<E> bits;
    std::memcpy(&bits, from, sizeof(bits));
    return float_of<E>(bits);
  }
  template <dtype E>
  static void write_as(std::byte* to, float value) noexcept {
    const auto bits = static_cast<element_bits<E>>(nearest_of<E>(value));
    std::memcpy(to, &bits, sizeof(bits));
  }
  void read(const vector_place& at, const std::byte* block) noexcept {
    const dtype element = layout_.element_of(at.plane);
    for_each_element(at, block, [&](std::uint64_t i, const std::byte* from) {
      vector_[i] = element == dtype::f32    ? read_as<dtype::f32>(from)
                   : element == dtype::bf16 ? read_as<dtype::bf16>(from)
                                            : read_as<dtype::f16>(from);
    });
  }
  /// Scales are rounded up, so the largest code may stand for more than an element can be.
  [[nodiscard]] static float largest_of(dtype element) noexcept {
    return element == dtype::f16 ? 65504.0F : element == dtype::bf16 ? 0x1.FEp127F : 0x1.FFFFFEp127F;
  }
  void write(const vector_place& at, std::byte* block) noexcept {
    const dtype element = layout_.element_of(at.plane);
    const float most = largest_of(element);
    for_each_element(at, block, [&](std::uint64_t i, std::byte* to) {
      vector_[i] = vector_[i] > most ? most : vector_[i] < -most ? -most : vector_[i];
      if (element == dtype::f32) {
        write_as<dtype::f32>(to, vector_[i]);
      } else if (element == dtype::bf16) {
        write_as<dtype::bf16>(to, vector_[i]);
      } else {
        write_as<dtype::f16>(to, vector_[i]);
      }
    });
  }

  // <cmath> would be a fifth of this header's cost.
  [[nodiscard]] static bool is_finite_number(float of) noexcept { return of - of == 0; }
  /// @pre between the smallest and the largest code
  [[nodiscard]] static std::int32_t nearest(float of) noexcept {
    return static_cast<std::int32_t>(of < 0 ? of - 0.5F : of + 0.5F);
  }
  /// Returns the bits of the smallest bf16 that is not below a finite size.
  [[nodiscard]] static std::uint16_t scale_above(float size) noexcept {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &size, sizeof(bits));
    return static_cast<std::uint16_t>((bits + 0xFFFF) >> 16U);
  }

  /// Returns the bytes of the form; 0 if it would be longer than `out`, or something is not finite.
  [[nodiscard]] std::uint64_t encode_bins(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    if (in.size() != layout_.block_bytes()) return 0;
    std::uint64_t at = 1 + 2 * vectors_;
    if (at > out.size()) return 0;
    out[0] = std::byte{1};
    rewind();
    std::byte* scale_at = out.data() + 1;
    bool is_finite = true;
    for_each_vector([&](const vector_place& v) {
      if (!is_finite) return;
      read(v, in.data());
      const std::uint64_t n = elements_of(v.plane);
      float largest = 0;
      for (std::uint64_t i = 0; i < n; ++i) {
        if (v.is_difference) vector_[i] -= anchor_[i];
        const float size = vector_[i] < 0 ? -vector_[i] : vector_[i];
        is_finite = is_finite && is_finite_number(size);
        largest = size > largest ? size : largest;
      }
      const std::uint16_t scale_bits = scale_above(largest / static_cast<float>(v.most));
      const float scale = float_of<dtype::bf16>(scale_bits);
      is_finite = is_finite && is_finite_number(scale * static_cast<float>(v.most));
      if (!is_finite) return;
      std::memcpy(scale_at, &scale_bits, sizeof(scale_bits));
      scale_at += sizeof(scale_bits);
      for (std::uint64_t i = 0; i < n; ++i) {
        auto code = scale == 0 ? 0 : nearest(vector_[i] / scale);
        code = code > v.most ? v.most : code < -v.most ? -v.most : code;
        codes_[streams_[v.stream].next++] = static_cast<std::byte>(code + v.most);
        if (v.is_anchor) anchor_[i] = static_cast<float>(code) * scale;
      }
    });
    if (!is_finite) return 0;
    for (const stream& each : streams_) {
      if (each.count == 0) continue;
      if (out.size() - at < sizeof(std::uint32_t) + each.count) return 0;
      const auto codes = std::span<const std::byte>(codes_.data() + each.first, each.count);
      std::byte* const length_at = out.data() + at;
      at += sizeof(std::uint32_t);
      const auto coded = huffman_.compress(codes, out.subspan(at, codes.size()));
      const auto length = coded && *coded < codes.size() ? static_cast<std::uint32_t>(*coded) : 0;
      if (length == 0) std::memcpy(out.data() + at, codes.data(), codes.size());
      std::memcpy(length_at, &length, sizeof(length));
      at += length == 0 ? codes.size() : length;
    }
    return at < out.size() ? at : 0;
  }

  [[nodiscard]] bool decode_bins(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    const std::uint64_t scales = 1 + 2 * vectors_;
    if (in.size() < scales) return false;
    std::uint64_t at = scales;
    for (const stream& each : streams_) {
      if (each.count == 0) continue;
      std::uint32_t length = 0;
      if (in.size() - at < sizeof(length)) return false;
      std::memcpy(&length, in.data() + at, sizeof(length));
      at += sizeof(length);
      const std::uint64_t bytes = length == 0 ? each.count : length;
      if (in.size() - at < bytes) return false;
      const auto codes = std::span<std::byte>(codes_.data() + each.first, each.count);
      const auto from = in.subspan(at, bytes);
      if (length == 0) {
        std::memcpy(codes.data(), from.data(), codes.size());
      } else if (!huffman_.decompress(from, codes)) {
        return false;
      }
      at += bytes;
    }
    if (at != in.size()) return false;
    rewind();
    const std::byte* scale_at = in.data() + 1;
    bool is_right = true;
    for_each_vector([&](const vector_place& v) {
      const float scale = read_as<dtype::bf16>(scale_at);
      scale_at += 2;
      is_right = is_right && is_finite_number(scale) && scale >= 0;
      const std::uint64_t n = elements_of(v.plane);
      for (std::uint64_t i = 0; i < n; ++i) {
        const auto code = static_cast<std::int32_t>(codes_[streams_[v.stream].next++]) - v.most;
        is_right = is_right && code <= v.most;
        vector_[i] = static_cast<float>(code) * scale;
        if (v.is_anchor) anchor_[i] = vector_[i];
        if (v.is_difference) vector_[i] += anchor_[i];
      }
      write(v, out.data());
    });
    return is_right;
  }

  offload::kv_bins_options options_;
  kv_layout layout_;
  huffman_plane huffman_;
  fixed_array<std::byte> codes_;
  fixed_array<float> anchor_;
  fixed_array<float> vector_;
  std::vector<stream> streams_{};
  std::vector<std::size_t> stream_of_{};  // of each layer, plane, and of anchors or not
  std::uint64_t vectors_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
