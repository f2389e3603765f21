/// @file
/// Records of latents by their definition: a writer and a reader that go byte by byte, and random caches of
/// them with the sequences that attend to them.
#pragma once

#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "support/small_elements.hpp"

namespace llmmem_tests {

using llmmem::paging::latent_record;

struct named_record {
  std::string_view name{};
  latent_record record{};
};
inline constexpr std::array<named_record, 9> all_records{
    {{"bf16", llmmem::paging::bf16_mla},
     {"fp8", llmmem::paging::fp8_mla},
     {"fp8_ds", llmmem::paging::fp8_ds_mla},
     {"fp8_ds_flashmla", llmmem::paging::fp8_ds_mla_flashmla},
     {"fp8_v4", llmmem::paging::fp8_v4_mla},
     {"nvfp4_432", llmmem::paging::nvfp4_ds_mla_432},
     {"nvfp4_368", llmmem::paging::nvfp4_ds_mla_368},
     {"nvfp4", llmmem::paging::nvfp4_ds_mla},
     {"f32", llmmem::paging::f32_mla}}};

/// The numbers of codes, smallest first.
[[nodiscard]] inline std::vector<float> code_numbers(llmmem::dtype code) {
  if (code == llmmem::dtype::fp4_e2m1) return {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  std::vector<float> out;
  for (std::uint32_t i = 0; i < 0x7F; ++i)
    out.push_back(std::bit_cast<float>(llmmem::f32_from_e4m3_bits(static_cast<std::uint8_t>(i))));
  return out;
}

/// The code nearest to a number, by search: of two equally near the even one, beyond the largest that.
[[nodiscard]] inline std::uint32_t nearest_code(const std::vector<float>& numbers, float x) {
  const double size = std::abs(static_cast<double>(x));
  std::uint32_t best = 0;
  if (size >= static_cast<double>(numbers.back())) best = static_cast<std::uint32_t>(numbers.size() - 1);
  for (std::uint32_t i = 0; size < static_cast<double>(numbers.back()) && i < numbers.size(); ++i) {
    const double nearer = std::abs(static_cast<double>(numbers[best]) - size);
    const double here = std::abs(static_cast<double>(numbers[i]) - size);
    if (here < nearer || (here == nearer && i % 2 == 0)) best = i;
  }
  return best | (std::signbit(x) ? static_cast<std::uint32_t>(numbers.size() > 8 ? 0x80 : 8) : 0);
}

/// The record of a token, by its definition.
class record_by_definition {
 public:
  record_by_definition(const latent_record& record, std::span<const float> latents,
                       std::span<const float> rotary, float outer)
      : of_(record), row_(record.row_bytes), after_(record.after_rows), outer_(outer) {
    if (of_.has_outer_scale) {
      float most = 0;
      for (std::uint32_t g = 0; g < of_.scales(); ++g) {
        const float amax = largest_of(latents.subspan(std::size_t{g} * of_.group, of_.group));
        if (std::isfinite(amax)) most = std::max(most, amax);
      }
      outer_ = std::max(most / (6.0F * 448.0F), 0x1p-126F);
      store(row_, of_.outer_scale_at, outer_);
    }
    for (std::uint32_t g = 0; g < of_.scales(); ++g)
      put_group(latents.subspan(std::size_t{g} * of_.group, of_.group), g);
    if (of_.group == 0) put(of_.latent_element, of_.latents_at, 0, latents, outer_, true);
    float factor = of_.group == 0 ? outer_ : 1.0F;
    if (of_.has_rotary_scale) {
      const float amax = largest_of(rotary);
      factor =
          std::isfinite(amax) ? std::max(amax / 448.0F, 0x1p-126F) : std::numeric_limits<float>::quiet_NaN();
      if (std::isnan(factor)) factor = std::bit_cast<float>(0x7FFF'FFFFU);
      store(row_, of_.rotary_scale_at, factor);
    }
    put(of_.rotary_element, of_.rotary_at, 0, rotary, factor, factor != 1.0F);
  }

  [[nodiscard]] const std::vector<std::byte>& row() const noexcept { return row_; }
  [[nodiscard]] const std::vector<std::byte>& after() const noexcept { return after_; }

 private:
  static float largest_of(std::span<const float> values) {
    float most = 0;
    for (const float each : values) {
      if (!std::isfinite(each)) return std::numeric_limits<float>::infinity();
      most = std::max(most, std::abs(each));
    }
    return most;
  }
  static void store(std::vector<std::byte>& to, std::uint32_t at, float value) {
    std::memcpy(to.data() + at, &value, sizeof(value));
  }

  void put_group(std::span<const float> values, std::uint32_t g) {
    using llmmem::paging::latent_scale;
    using llmmem::paging::scale_rounding;
    std::vector<std::byte>& home = of_.after_rows != 0 ? after_ : row_;
    const std::uint32_t place =
        of_.order == llmmem::paging::scale_order::linear ? g : 8 * (g % 4) + g / 4;  // of 32 scales
    const float amax = largest_of(values);
    float wanted = amax / (of_.latent_element == llmmem::dtype::fp4_e2m1 ? 6.0F : 448.0F);
    if (outer_ != 1.0F) wanted /= outer_;
    wanted = std::max(wanted, of_.floor);
    const bool is_broken = !std::isfinite(amax);
    if (of_.rounding == scale_rounding::power_of_two_up && !is_broken) {
      int exponent = 0;
      if (std::frexp(wanted, &exponent) > 0.5F) wanted = std::ldexp(1.0F, exponent);
    }
    float scale = wanted;
    if (of_.scale == latent_scale::e4m3) {
      const std::vector<float> numbers = code_numbers(llmmem::dtype::fp8_e4m3);
      std::uint32_t code = is_broken ? 0x7F : nearest_code(numbers, wanted);
      if (!is_broken && of_.rounding == scale_rounding::up) {
        code = 0;
        while (code < 0x7E && numbers[code] < wanted)
          ++code;
      }
      home[of_.scales_at + place] = static_cast<std::byte>(code);
      if (!is_broken) scale = numbers[code];
    } else if (of_.scale == latent_scale::ue8m0) {
      home[of_.scales_at + place] = static_cast<std::byte>(is_broken ? 255 : std::ilogb(wanted) + 127);
    } else {
      store(home, of_.scales_at + 4 * place, is_broken ? std::bit_cast<float>(0x7FFF'FFFFU) : wanted);
    }
    const float factor = is_broken ? std::numeric_limits<float>::quiet_NaN() : scale * outer_;
    put(of_.latent_element, of_.latents_at, g * of_.group, values, factor, true);
  }

  void put(llmmem::dtype element, std::uint32_t at, std::uint32_t first, std::span<const float> values,
           float factor, bool is_scaled) {
    using llmmem::dtype;
    const bool is_code = element == dtype::fp8_e4m3 || element == dtype::fp4_e2m1;
    const std::vector<float> numbers = is_code ? code_numbers(element) : std::vector<float>{};
    for (std::uint32_t i = 0; i < values.size(); ++i) {
      const std::uint32_t place = first + i;
      if (!is_code) {
        // Devices have one NaN of bf16.
        const bool is_nan = std::isnan(values[i]) && element == dtype::bf16;
        if (element == dtype::f32) {
          store(row_, at + 4 * place, values[i]);
          continue;
        }
        store_element(element, row_.data() + at + 2 * place, values[i]);
        if (is_nan) std::memset(row_.data() + at + 2 * place, 0xFF, 1);
        if (is_nan) row_[at + 2 * place + 1] = std::byte{0x7F};
        continue;
      }
      float x = values[i];
      if (is_scaled) {
        if (!(factor > 0)) {
          x = 0;
        } else {
          x = of_.is_divided ? x / factor : x * (1 / factor);
        }
      }
      const std::uint32_t code = std::isnan(x) ? 0x7F : nearest_code(numbers, x);
      if (element == dtype::fp8_e4m3) {
        row_[at + place] = static_cast<std::byte>(code);
      } else {
        row_[at + place / 2] |= static_cast<std::byte>(code << (place % 2 * 4));
      }
    }
  }

  latent_record of_;
  std::vector<std::byte> row_;
  std::vector<std::byte> after_;
  float outer_;
};

/// Sequences over a cache of records: what a batch appends, and what its rows attend to.
struct latent_world {
  static constexpr std::uint32_t layers = 2;
  static constexpr std::uint32_t layer = 1;

  latent_record record{};
  llmmem::kv_layout layout{};
  std::uint64_t blocks = 0;
  std::uint32_t query_heads = 0;
  llmmem::dtype element = llmmem::dtype::f32;  // of the batch, queries and outputs
  float outer = 1;
  std::vector<std::int32_t> tokens{};  // of each sequence
  std::int32_t columns = 0;
  std::vector<std::int32_t> padded{};
  std::vector<std::int64_t> slots{};  // of all tokens, sequence by sequence
  std::vector<std::byte> latents{};   // [tokens][latents]
  std::vector<std::byte> rotary{};    // [tokens][rotary]
  std::vector<std::byte> cache{};     // NaN codes everywhere
  std::vector<std::int32_t> sequences{};
  std::vector<std::int32_t> lengths{};
  std::vector<std::byte> queries{};
  llmmem::attention_options options{};

  /// @param most  tokens of a sequence
  latent_world(std::mt19937_64& random, const latent_record& of, llmmem::dtype type,
               llmmem::block_order order = llmmem::block_order::layer_first_paired, std::uint32_t most = 24)
      : record(of), element(type) {
    constexpr std::uint32_t sizes[] = {1, 8, 9, 16, 64};
    const bool is_padded = of.block_multiple != 1;
    const llmmem::kv_layout shape{.layers = layers,
                                  .heads = 1,
                                  .head_dim = 1,
                                  .block_tokens = is_padded ? 16 : sizes[random() % std::size(sizes)],
                                  .order = order,
                                  .model = 7};
    layout = llmmem::paging::latent_layout(shape, of);
    query_heads = static_cast<std::uint32_t>(1 + random() % 9);
    const std::size_t count = 1 + random() % 3;
    for (std::size_t i = 0; i < count; ++i)
      tokens.push_back(static_cast<std::int32_t>(1 + random() % most));
    columns = static_cast<std::int32_t>((most - 1) / layout.block_tokens + 1);
    blocks = count * static_cast<std::uint64_t>(columns) + 1;
    std::vector<std::int32_t> order_of(blocks);
    std::iota(order_of.begin(), order_of.end(), 0);
    std::ranges::shuffle(order_of, random);
    padded.assign(order_of.begin(), order_of.end() - 1);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::int32_t t = 0; t < tokens[i]; ++t)
        slots.push_back(slot_of(static_cast<std::int32_t>(i), t));
    }
    latents = numbers(random, slots.size() * record.latents);
    rotary = numbers(random, slots.size() * record.rotary);
    cache.assign(layout.total_bytes(blocks), std::byte{0xFF});
    for (std::size_t row = 0; row < 2 * count; ++row) {
      sequences.push_back(static_cast<std::int32_t>(random() % count));
      lengths.push_back(static_cast<std::int32_t>(
          random() % (static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(sequences[row])]) + 1)));
    }
    queries = numbers(random, sequences.size() * query_heads * record.key_elements());
    options.query_heads = query_heads;
    options.element = element;
    options.scale = 0.07F;
    options.window = random() % 3 == 0 ? static_cast<std::uint32_t>(1 + random() % most) : 0;
    if (random() % 2 == 0) options.split = {8, static_cast<std::uint32_t>(2 + random() % 3)};
    options.latents = &record;
  }
  latent_world(const latent_world&) = delete;
  latent_world& operator=(const latent_world&) = delete;

  [[nodiscard]] std::int64_t slot_of(std::int32_t sequence, std::int32_t token) const {
    const auto per = static_cast<std::int32_t>(layout.block_tokens);
    return std::int64_t{padded[static_cast<std::size_t>(sequence * columns + token / per)]} * per +
           token % per;
  }
  /// Numbers of the batch's type. Groups differ in size.
  [[nodiscard]] std::vector<std::byte> numbers(std::mt19937_64& random, std::size_t count) const {
    std::vector<std::byte> out(count * element_bytes(element));
    float size = 1;
    for (std::size_t i = 0; i < count; ++i) {
      if (i % 8 == 0) size = std::ldexp(1.0F, static_cast<int>(random() % 8) - 6);
      store_element(element, out.data() + i * element_bytes(element),
                    (static_cast<float>(random() % 20'001) / 10'000 - 1) * size);
    }
    return out;
  }
  [[nodiscard]] float number(const std::vector<std::byte>& of, std::size_t i) const {
    return load_element(element, of.data() + i * element_bytes(element));
  }
  [[nodiscard]] std::vector<float> floats(const std::vector<std::byte>& of, std::size_t first,
                                          std::size_t count) const {
    std::vector<float> out;
    for (std::size_t i = 0; i < count; ++i)
      out.push_back(number(of, first + i));
    return out;
  }
  [[nodiscard]] llmmem::batch_vectors rows_of(const std::byte* data, std::uint32_t elements) const {
    return {data, elements * element_bytes(element), 0};
  }
  [[nodiscard]] llmmem::padded_table_view tables(const std::int32_t* table,
                                                 const std::int32_t* seq_lens) const {
    return {.block_table = table,
            .seq_lens = seq_lens,
            .num_sequences = static_cast<std::int32_t>(tokens.size()),
            .max_blocks = columns,
            .block_tokens = static_cast<std::int32_t>(layout.block_tokens)};
  }
  [[nodiscard]] llmmem::padded_table_view tables() const { return tables(padded.data(), tokens.data()); }
  [[nodiscard]] std::uint64_t out_bytes() const {
    return sequences.size() * query_heads * record.value_elements() * element_bytes(element);
  }
  [[nodiscard]] llmmem::batch_vectors query_rows(const std::byte* data) const {
    const std::uint64_t head = record.key_elements() * element_bytes(element);
    return {data, head * query_heads, head};
  }
  [[nodiscard]] llmmem::batch_output out_rows(std::byte* data) const {
    const std::uint64_t head = record.value_elements() * element_bytes(element);
    return {data, head * query_heads, head};
  }
};

}  // namespace llmmem_tests
