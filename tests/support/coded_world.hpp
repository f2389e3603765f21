/// @file
/// Caches in codes of any form, with the same values as floats: what attention over codes is held to.
#pragma once

#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "support/attention_world.hpp"
#include "support/small_elements.hpp"

namespace llmmem_tests {

/// The number that a code stands for, by the definition of its format.
[[nodiscard]] inline float number_of_code(llmmem::dtype code, const std::byte* vector, std::uint64_t i) {
  using llmmem::dtype;
  if (code == dtype::int8) return static_cast<float>(static_cast<std::int8_t>(vector[i]));
  if (code == dtype::fp8_e4m3) return load_element(code, vector + i);
  const auto nibble = static_cast<int>(vector[i / 2] >> (i % 2 * 4)) & 0xF;
  if (code == dtype::int4) return static_cast<float>(nibble < 8 ? nibble : nibble - 16);
  constexpr float sizes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  return nibble < 8 ? sizes[nibble] : -sizes[nibble - 8];
}

/// Hadamard's orthonormal matrix times a vector, in blocks of the largest power of two that divides it.
inline void turn_vector(std::vector<float>& x) {
  std::size_t block = 1;
  while (x.size() % (2 * block) == 0)
    block *= 2;
  const float factor = 1.0F / std::sqrt(static_cast<float>(block));
  for (std::size_t step = 1; step < block; step *= 2) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if ((i & step) != 0) continue;
      const float a = x[i];
      const float b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (float& each : x)
    each = each * factor;
}

/// The places of a layout's planes of scales.
struct code_places {
  std::uint32_t scales = 0;
  std::uint32_t globals = 0;
};
[[nodiscard]] inline code_places code_places_of(const llmmem::kv_layout& layout, std::uint32_t p) {
  using enum llmmem::paging::plane_role;
  code_places out;
  for (std::uint32_t at = 0; at < layout.planes(); ++at) {
    if (layout.role_of(at) == (p == 0 ? key_scale : value_scale)) out.scales = at;
    if (layout.role_of(at) == (p == 0 ? key_global : value_global)) out.globals = at;
  }
  return out;
}

/// A value of a cache in codes, dequantised by its definition.
/// @param global  of the caller, for layouts without one.
/// @param part    receives the value without its zero; may be null.
[[nodiscard]] inline float value_in_codes(const llmmem::kv_layout& layout, const std::byte* cache,
                                          std::uint64_t blocks, std::uint32_t p, std::uint64_t layer,
                                          std::uint64_t block, std::uint64_t token, std::uint64_t head,
                                          std::uint64_t i, float global, float* part = nullptr) {
  using llmmem::paging::scale_group;
  const code_places at = code_places_of(layout, p);
  const auto& form = p == 0 ? layout.key_scales : layout.value_scales;
  const std::uint64_t group = form.group == scale_group::channel ? i
                              : form.group == scale_group::run   ? i / form.run
                                                                 : 0;
  const std::byte* const scales = cache + layout.strides(at.scales, blocks).offset(layer, block, token, head);
  const std::uint64_t size = element_bytes(form.element);
  float scale = load_element(form.element, scales + group * form.numbers * size);
  float zero = form.numbers == 2 ? load_element(form.element, scales + (group * 2 + 1) * size) : 0;
  if (form.has_global)
    std::memcpy(&global, cache + layout.strides(at.globals, blocks).offset(layer, block, token, head), 4);
  if (global != 1.0F) scale = scale * global;
  if (global != 1.0F) zero = zero * global;
  const std::byte* const vector = cache + layout.strides(p, blocks).offset(layer, block, token, head);
  const float number = number_of_code(layout.element_of(p), vector, i);
  if (part != nullptr) *part = number * scale;
  return form.numbers == 2 ? std::fma(number, scale, zero) : number * scale;
}

/// A random form of a plane's codes.
[[nodiscard]] inline llmmem::paging::scale_form any_scales(std::mt19937_64& random, llmmem::dtype code,
                                                           std::uint64_t elements) {
  using namespace llmmem;
  using namespace llmmem::paging;
  scale_form out;
  out.group = static_cast<scale_group>(1 + random() % 3);
  if (out.group == scale_group::run) {
    out.run = 8;
    for (const std::uint32_t run : {16U, 32U, 64U}) {
      if (elements % run == 0 && random() % 3 != 0) out.run = run;
    }
  }
  constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::fp8_e4m3};
  out.element = types[random() % (code == dtype::fp4_e2m1 ? 3 : 2)];
  out.place = random() % 3 == 0 ? scale_place::separate : scale_place::in_block;
  if (random() % 3 == 0 && out.group != scale_group::channel) out.place = scale_place::after_vector;
  out.has_global = random() % 3 == 0;
  const bool may_have_zero = code == dtype::int8 || code == dtype::int4;
  if (may_have_zero && out.group != scale_group::channel && random() % 2 == 0) out.numbers = 2;
  return out;
}

/// Any codes, those whose products tensor cores make exactly, or those with products of integers: int8 and
/// int4 with one scale for a vector; or e2m1 with a scale of e4m3 for each eight values; or integers with a
/// scale and a zero for a vector.
enum class coded_kind { any, exact, integers, short_runs, zeros };

/// A layout in codes of the shape of another one: keys and values each in a form of their own.
[[nodiscard]] inline llmmem::kv_layout any_coded_layout(std::mt19937_64& random,
                                                        const llmmem::kv_layout& shape, std::uint64_t blocks,
                                                        coded_kind kind = coded_kind::any) {
  alignas(16) static std::byte somewhere[16];
  using namespace llmmem;
  constexpr dtype codes[] = {dtype::int8, dtype::int4, dtype::fp4_e2m1, dtype::fp8_e4m3};
  while (true) {
    kv_layout out = shape;
    const std::size_t kinds = kind == coded_kind::integers || kind == coded_kind::zeros ? 2 : 4;
    out.element = codes[random() % kinds];
    out.value_element = codes[random() % kinds];
    if (kind == coded_kind::short_runs) out.value_element = out.element = dtype::fp4_e2m1;
    out.key_scales = any_scales(random, out.element, out.vector_elements(0));
    out.value_scales = any_scales(random, out.element_of(1), out.vector_elements(1));
    for (std::uint32_t p = 0; p < 2 && kind != coded_kind::any; ++p) {
      paging::scale_form& scales = p == 0 ? out.key_scales : out.value_scales;
      scales.group = paging::scale_group::vector;
      if (kind == coded_kind::zeros) scales.numbers = 2;
      const bool is_short = kind == coded_kind::short_runs;
      const bool may_run = kind == coded_kind::exact && out.element_of(p) == dtype::fp4_e2m1;
      if (!is_short && (!may_run || random() % 3 == 0)) continue;
      scales.group = paging::scale_group::run;
      scales.numbers = 1;
      scales.run = is_short || random() % 3 == 0 ? 8 : 16;
      scales.element = dtype::fp8_e4m3;
    }
    out.key_scales.is_rotated = out.key_scales.group != paging::scale_group::channel && random() % 2 == 0;
    // Scales that are not aligned to their type are refused; then another one is drawn.
    if (llmmem::detail::check_code_places({somewhere, blocks, out}, "")) return out.checked();
  }
}

/// A cache in codes, and one of floats with the same values.
struct coded_world {
  attention_world codes;
  attention_world floats;

  /// @param element     of queries and outputs.
  /// @param arithmetic  over the codes; over the floats it is `reproducible`.
  explicit coded_world(std::mt19937_64& random, llmmem::dtype element = llmmem::dtype::f32,
                       coded_kind kind = coded_kind::any, llmmem::attention_arithmetic arithmetic = {})
      : codes(random, arithmetic), floats(codes) {
    using namespace llmmem;
    floats.options.arithmetic = {};
    codes.layout = any_coded_layout(random, codes.layout, codes.blocks, kind);
    draw_codes(random);
    const bool is_by_head = random() % 2 == 0;
    for (auto& each : codes.scales) {
      each.clear();
      for (std::uint32_t h = 0; codes.layer % 2 == 0 && h < codes.layout.heads; ++h)
        each.push_back(h % 2 == 0 ? 0.75F : 1.25F);
    }
    codes.options.scales.is_by_head = is_by_head;
    set_element(random, element);
    dequantize();
  }

  /// Makes the floats of the codes.
  void dequantize() {
    using namespace llmmem;
    kv_layout of = codes.layout;
    of.element = dtype::f32;
    of.value_element = {};
    of.key_scales = of.value_scales = {};
    floats.layout = of;
    for (auto& each : floats.scales)
      each.clear();
    floats.cache.assign(of.total_bytes(codes.blocks), std::byte{0});
    for (std::uint32_t p = 0; p < 2; ++p) {
      for (std::uint64_t b = 0; b < codes.blocks; ++b) {
        for (std::uint64_t t = 0; t < of.block_tokens; ++t) {
          for (std::uint64_t h = 0; h < of.heads; ++h) {
            for (std::uint64_t i = 0; i < of.vector_elements(p); ++i)
              store_element(
                  dtype::f32,
                  floats.cache.data() + of.strides(p, codes.blocks).offset(codes.layer, b, t, h) + 4 * i,
                  value_in_codes(codes.layout, codes.cache.data(), codes.blocks, p, codes.layer, b, t, h, i,
                                 global(p, h)));
          }
        }
      }
    }
  }
  /// The size of a key's or value's element without its zero: code x scale. What codes round is a part of it.
  [[nodiscard]] double size_without_zero(std::uint32_t p, std::int32_t sequence, std::int64_t position,
                                         std::uint32_t head, std::uint64_t i) const {
    const auto in_block = static_cast<std::int64_t>(codes.layout.block_tokens);
    const std::int32_t block =
        codes.tables[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(position / in_block)];
    float out = 0;
    static_cast<void>(value_in_codes(
        codes.layout, codes.cache.data(), codes.blocks, p, codes.layer, static_cast<std::uint64_t>(block),
        static_cast<std::uint64_t>(position % in_block), head, i, global(p, head), &out));
    return std::fabs(static_cast<double>(out));
  }
  /// The caller's scale of a head.
  [[nodiscard]] float global(std::uint32_t p, std::uint64_t head) const {
    if (codes.scales[p].empty()) return 1;
    return codes.scales[p][codes.options.scales.is_by_head ? head : 0];
  }

 private:
  void draw_codes(std::mt19937_64& random) {
    using namespace llmmem;
    const kv_layout& layout = codes.layout;
    codes.cache.resize(layout.total_bytes(codes.blocks));
    for (std::byte& each : codes.cache)
      each = static_cast<std::byte>(random());
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const plane_strides strides = layout.strides(p, codes.blocks);
      const bool is_value = p < 2;
      const dtype element = layout.element_of(p);
      for (std::uint64_t l = 0; l < layout.layers; ++l) {
        for (std::uint64_t b = 0; b < codes.blocks; ++b) {
          for (std::uint64_t t = 0; t < layout.block_tokens; ++t) {
            for (std::uint64_t h = 0; h < layout.heads; ++h) {
              std::byte* const at = codes.cache.data() + strides.offset(l, b, t, h);
              for (std::uint64_t i = 0; i < layout.vector_elements(p); ++i) {
                if (is_value && element == dtype::fp8_e4m3) at[i] &= std::byte{0xBF};  // below 2
                const std::size_t size = element_bytes(element);
                if (!is_value) {
                  const bool is_key = layout.role_of(p) == paging::plane_role::key_scale ||
                                      layout.role_of(p) == paging::plane_role::key_global;
                  const dtype code = layout.element_of(is_key ? 0 : 1);
                  const float most = code == dtype::int8 ? 128.0F : code == dtype::int4 ? 8.0F : 6.0F;
                  const auto& form = is_key ? layout.key_scales : layout.value_scales;
                  float number = static_cast<float>(1 + random() % 64) / 32;
                  number = number / (element == dtype::fp8_e4m3 || code == dtype::fp8_e4m3 ? 2.0F : most);
                  if (form.numbers == 2 && i % 2 == 1) number = static_cast<float>(random() % 65) / 32 - 1;
                  store_element(element, at + i * size, number);
                }
              }
            }
          }
        }
      }
    }
  }

  void set_element(std::mt19937_64& random, llmmem::dtype element) {
    using namespace llmmem;
    codes.options.element = element;
    floats.options.element = dtype::f32;
    const auto lay = [&](attention_world& of, std::uint64_t more) {
      const std::size_t size = element_bytes(of.options.element);
      of.query_strides[1] = of.layout.vector_elements(0) * size + more;
      of.query_strides[0] = of.query_strides[1] * of.query_heads();
      of.queries.assign(of.query_strides[0] * of.rows, std::byte{0x5A});
      of.out_strides[1] = of.layout.vector_elements(1) * size + more;
      of.out_strides[0] = of.out_strides[1] * of.query_heads();
      of.out.assign(of.out_strides[0] * of.rows, std::byte{0x5A});
    };
    lay(codes, random() % 2 * 32);
    lay(floats, 0);
    const std::uint64_t elements = codes.layout.vector_elements(0);
    std::vector<float> query(elements);
    for (std::uint64_t row = 0; row < codes.rows; ++row) {
      for (std::uint32_t q = 0; q < codes.query_heads(); ++q) {
        std::byte* const to =
            codes.queries.data() + row * codes.query_strides[0] + q * codes.query_strides[1];
        for (std::uint64_t i = 0; i < elements; ++i) {
          store_element(element, to + i * element_bytes(element),
                        static_cast<float>(static_cast<std::int64_t>(random() % 401) - 200) / 100);
          query[i] = load_element(element, to + i * element_bytes(element));
        }
        if (codes.layout.key_scales.is_rotated) turn_vector(query);
        std::memcpy(floats.queries.data() + row * floats.query_strides[0] + q * floats.query_strides[1],
                    query.data(), elements * 4);
      }
    }
  }
};

/// Whether outputs are those of the floats, rounded to the type of the codes' outputs.
[[nodiscard]] inline bool are_rounded(const coded_world& of, const std::vector<std::byte>& codes,
                                      const std::vector<std::byte>& floats) {
  for (std::uint64_t row = 0; row < of.codes.rows; ++row) {
    if (!of.codes.sequences.empty() && of.codes.sequences[row] < 0) continue;
    for (std::uint32_t q = 0; q < of.codes.query_heads(); ++q) {
      for (std::uint64_t i = 0; i < of.codes.layout.vector_elements(1); ++i) {
        const llmmem::dtype element = of.codes.options.element;
        std::byte rounded[4];
        const float exact = load_element(llmmem::dtype::f32, floats.data() + row * of.floats.out_strides[0] +
                                                                 q * of.floats.out_strides[1] + 4 * i);
        store_element(element, rounded, exact);
        const std::byte* const got = codes.data() + row * of.codes.out_strides[0] +
                                     q * of.codes.out_strides[1] + i * element_bytes(element);
        if (std::memcmp(rounded, got, element_bytes(element)) != 0) return false;
      }
    }
  }
  return true;
}

}  // namespace llmmem_tests
