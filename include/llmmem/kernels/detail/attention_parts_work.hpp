/// @file
/// The work of merging parts of attention, and of making parts from other kernels' results.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <numbers>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns where the vector of a row and head begins.
template <class Byte>
[[nodiscard]] LLMMEM_HD inline Byte* vector_at(const token_vectors<Byte>& of, std::uint64_t row,
                                               std::uint32_t head) noexcept {
  return of.data + row * of.token_stride + head * of.head_stride;
}

/// Returns the state of a part for a row and head.
[[nodiscard]] LLMMEM_HD inline attention_state state_at(const attention_part& part, std::uint64_t row,
                                                        std::uint32_t head) noexcept {
  const auto packed = load_packet<8>(vector_at(part.states, row, head));
  return {float_of_bits(packed.words[0]), float_of_bits(packed.words[1])};
}
LLMMEM_HD inline void set_state(const attention_part_output& part, std::uint64_t row, std::uint32_t head,
                                const attention_state& state) noexcept {
  store_packet<8>(vector_at(part.states, row, head),
                  {{bits_of_float(state.most), bits_of_float(state.total)}});
}

/// NaNs have one form on hosts and devices.
[[nodiscard]] LLMMEM_HD inline float told(float x) noexcept {
  return x == x ? x : float_of_bits(0x7FFF'FFFFU);
}

/// Whether a part's sums count. A NaN counts, so that it stays visible.
[[nodiscard]] LLMMEM_HD inline bool counts(const attention_state& of) noexcept {
  return !(of.total <= 0) && !(of.most == lowest() && of.total == of.total);
}

/// A lane's eight elements of a vector: four of its first half and four of its second one, so that
/// neighbouring lanes access neighbouring packets of 4-byte elements too. @param packs  of eight elements, of
/// the vector
template <dtype Element>
LLMMEM_HD inline void load_halves(attention_raw<Element>& to, const std::byte* vector, std::uint32_t pack,
                                  std::uint32_t packs) noexcept {
  constexpr unsigned bytes = attention_raw<Element>::bytes / 2;
  LLMMEM_UNROLL
  for (unsigned half = 0; half < 2; ++half) {
    const auto in =
        load_packet<bytes, cache_hint::streaming>(vector + (pack + half * std::uint64_t{packs}) * bytes);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < bytes / 4; ++i) {
      const unsigned word = half * (bytes / 4) + i;
      to.part[word / 4].words[word % 4] = in.words[i];
    }
  }
}
template <dtype Element>
LLMMEM_HD inline void store_halves(std::byte* vector, const attention_raw<Element>& from, std::uint32_t pack,
                                   std::uint32_t packs) noexcept {
  constexpr unsigned bytes = attention_raw<Element>::bytes / 2;
  LLMMEM_UNROLL
  for (unsigned half = 0; half < 2; ++half) {
    packet<bytes> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < bytes / 4; ++i) {
      const unsigned word = half * (bytes / 4) + i;
      out.words[i] = from.part[word / 4].words[word % 4];
    }
    store_packet<bytes>(vector + (pack + half * std::uint64_t{packs}) * bytes, out);
  }
}

/// Calls `act` with an element type of vectors in a batch as a constant.
template <class Act>
LLMMEM_HD inline void with_batch_element(dtype element, const Act& act) noexcept {
  if (element == dtype::f32) return act.template operator()<dtype::f32>();
  if (element == dtype::f16) return act.template operator()<dtype::f16>();
  act.template operator()<dtype::bf16>();
}

/// Eight elements of a head of a row: the numbers of a pack, as for contiguous items.
struct part_packs {
  divider packs{};
  divider heads{};
  std::uint64_t rows = 0;

  struct place {
    std::uint64_t row = 0;
    std::uint32_t head = 0;
    std::uint32_t pack = 0;
  };

  explicit part_packs(const attention_part_shape& shape) noexcept
      : packs(shape.value_dim / attention_pack), heads(shape.query_heads), rows(shape.rows) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return rows * heads.by() * packs.by(); }
  [[nodiscard]] LLMMEM_HD place at(std::uint64_t item) const noexcept {
    const std::uint64_t vector = packs.quotient(item);
    return {heads.quotient(vector), heads.remainder(vector), packs.remainder(item)};
  }
};

/// The input and output of a merge. Distances in bytes.
struct merge_request {
  attention_part part[max_merged_parts];
  std::uint32_t parts = 0;
  bool is_base_two = false;
  dtype element = dtype::f32;
  batch_output out{};
  attention_part_output merged{};       // written instead of `out`, if it has memory
  log_sums<log_base::e> log_sum_exp{};  // to the base that `is_base_two` says
  const std::int32_t* sequences = nullptr;
  const float* sinks = nullptr;
};

/// Eight elements of the merged result of a row and head, in the order of the parts.
class merge_parts_work {
 public:
  merge_parts_work(const attention_part_shape& shape, const merge_request& of) noexcept
      : packs_(shape), of_(of) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return packs_.items(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const part_packs::place at = packs_.at(item);
    if (of_.sequences != nullptr && of_.sequences[at.row] < 0) return;
    attention_state all{most_of(at), 0};
    attention_floats sum{};
    const bool has_any = add_parts(at, all, sum);
    if (of_.merged.states.data != nullptr) return write_part(at, all, sum);
    if (of_.sinks != nullptr) add_sink(of_.sinks[at.head], all, sum);
    write(at, all, has_any ? sum : attention_floats{});
  }

 private:
  [[nodiscard]] LLMMEM_HD float most_of(const part_packs::place& at) const noexcept {
    float most = lowest();
    for (std::uint32_t i = 0; i < of_.parts; ++i) {
      const attention_state state = state_at(of_.part[i], at.row, at.head);
      if (counts(state)) most = larger_of(most, state.most);
    }
    return most;
  }

  /// Adds the parts that count; returns whether any does.
  [[nodiscard]] LLMMEM_HD bool add_parts(const part_packs::place& at, attention_state& all,
                                         attention_floats& sum) const noexcept {
    bool has_any = false;
    const float base = all.most == lowest() ? 0.0F : all.most;
    for (std::uint32_t i = 0; i < of_.parts; ++i) {
      const attention_state state = state_at(of_.part[i], at.row, at.head);
      if (!counts(state)) continue;
      const float weight = power_of_two(state.most - base);
      // A part without weight is not read, because 0 times arbitrary contents may be a NaN.
      if (weight == 0 && state.total == state.total) continue;
      attention_raw<dtype::f32> raw{};
      load_halves(raw, vector_at(of_.part[i].sums, at.row, at.head), at.pack, packs_.packs.by());
      const attention_floats part = floats_of(raw);
      all.total = fused(weight, state.total, all.total);
      LLMMEM_UNROLL
      for (unsigned e = 0; e < attention_pack; ++e)
        sum.of[e] = has_any ? fused(weight, part.of[e], sum.of[e]) : product_of(weight, part.of[e]);
      has_any = true;
    }
    return has_any;
  }

  /// Adds one more part, whose value is zeros.
  LLMMEM_HD static void add_sink(float logit, attention_state& all, attention_floats& sum) noexcept {
    const float product = product_of(logit, std::numbers::log2e_v<float>);
    const float most = larger_of(all.most, product);
    const float base = most == lowest() ? 0.0F : most;
    const float factor = power_of_two(all.most - base);
    all = {most, fused(all.total, factor, power_of_two(product - base))};
    LLMMEM_UNROLL
    for (float& each : sum.of)
      each = product_of(each, factor);
  }

  LLMMEM_HD void write_part(const part_packs::place& at, const attention_state& all,
                            const attention_floats& sum) const noexcept {
    if (at.pack == 0) set_state(of_.merged, at.row, at.head, {all.most, told(all.total)});
    attention_floats out{};
    LLMMEM_UNROLL
    for (unsigned e = 0; e < attention_pack; ++e)
      out.of[e] = told(sum.of[e]);
    store_halves(vector_at(of_.merged.sums, at.row, at.head), raw_of<dtype::f32>(out), at.pack,
                 packs_.packs.by());
  }

  LLMMEM_HD void write(const part_packs::place& at, const attention_state& all,
                       const attention_floats& sum) const noexcept {
    if (at.pack == 0 && of_.log_sum_exp.data != nullptr) {
      store_packet<4>(reinterpret_cast<std::byte*>(of_.log_sum_exp.data) +
                          at.row * of_.log_sum_exp.row_stride + at.head * of_.log_sum_exp.head_stride,
                      {{bits_of_float(logarithm_of_sum(all))}});
    }
    const float factor = all.total == 0 ? 0.0F : quotient_of(1.0F, all.total);
    attention_floats values{};
    LLMMEM_UNROLL
    for (unsigned e = 0; e < attention_pack; ++e)
      values.of[e] = told(product_of(sum.of[e], factor));
    with_batch_element(of_.element, [&]<dtype Element>() {
      store_halves(vector_at(of_.out, at.row, at.head), raw_of<Element>(values), at.pack, packs_.packs.by());
    });
  }

  [[nodiscard]] LLMMEM_HD float logarithm_of_sum(const attention_state& all) const noexcept {
    if (!(all.total == all.total)) return told(all.total);
    if (all.total == 0) return lowest();
    const float of_total = logarithm_of(all.total);
    return of_.is_base_two ? fused(of_total, std::numbers::log2e_v<float>, all.most)
                           : fused(all.most, std::numbers::ln2_v<float>, of_total);
  }

  part_packs packs_;
  merge_request of_;
};
static_assert(item_work<merge_parts_work>);

/// The input and output of an import.
struct import_request {
  batch_vectors from{};
  dtype element = dtype::f32;
  bool is_base_two = false;
  log_sums<log_base::e, const float> log_sum_exp{};  // to the base that `is_base_two` says
  const std::int32_t* tokens = nullptr;
  attention_part_output out{};
};

/// Eight elements of a part, from another kernel's result.
class import_part_work {
 public:
  import_part_work(const attention_part_shape& shape, const import_request& of) noexcept
      : packs_(shape), of_(of) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return packs_.items(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const part_packs::place at = packs_.at(item);
    const attention_state state = state_of(at);
    if (at.pack == 0) set_state(of_.out, at.row, at.head, state);
    if (of_.out.sums.data == nullptr) return;
    attention_floats sum{};
    if (state.total != 0) {
      with_batch_element(of_.element, [&]<dtype Element>() {
        attention_raw<Element> raw{};
        load_halves(raw, vector_at(of_.from, at.row, at.head), at.pack, packs_.packs.by());
        sum = floats_of(raw);
      });
    }
    store_halves(vector_at(of_.out.sums, at.row, at.head), raw_of<dtype::f32>(sum), at.pack,
                 packs_.packs.by());
  }

 private:
  [[nodiscard]] LLMMEM_HD attention_state state_of(const part_packs::place& at) const noexcept {
    constexpr attention_state empty{};
    if (of_.tokens != nullptr && of_.tokens[at.row] <= 0) return empty;
    const auto packed =
        load_packet<4>(reinterpret_cast<const std::byte*>(of_.log_sum_exp.data) +
                       at.row * of_.log_sum_exp.row_stride + at.head * of_.log_sum_exp.head_stride);
    const float sum = float_of_bits(packed.words[0]);
    // Kernels write infinities of either sign, and NaNs, for rows without tokens.
    if (!(size_of(sum) < float_of_bits(0x7F80'0000U))) return empty;
    return {of_.is_base_two ? sum : product_of(sum, std::numbers::log2e_v<float>), 1};
  }

  part_packs packs_;
  import_request of_;
};
static_assert(item_work<import_part_work>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
