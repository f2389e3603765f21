/// @file
/// Joins the results of a row's shares.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/lanes.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Eight elements of an output of a row with several shares, for a group of lanes: each of n lanes joins
/// every n-th share in order, and then pairs of lanes join their results.
template <class Tables>
class attention_merge_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  attention_merge_work(const attention_shape& shape, const Tables& tables, std::uint32_t lanes) noexcept
      : shape_(shape),
        tables_(tables),
        packs_(shape.value_packs),
        query_heads_(shape.query_heads()),
        group_(shape.group),
        lanes_(lanes) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return shape_.rows * query_heads_.by() * packs_.by();
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return lanes_; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    const std::uint64_t output = packs_.quotient(item);
    const std::uint32_t pack = packs_.remainder(item);
    attention_output at;
    at.row = query_heads_.quotient(output);
    at.query = query_heads_.remainder(output);
    at.head = static_cast<std::uint32_t>(group_.quotient(at.query));
    attention_span span;
    if (at.row < shape_.rows) span = span_of(shape_, tables_, at.row);
    // A single share has written its result itself.
    const std::uint32_t shares = span.sequence < 0 || span.shares < 2 ? 0 : span.shares;
    const std::uint64_t first = output * shape_.shares.by();
    typename Group::template held<float> most;
    group.each([&](std::uint32_t lane) { most[lane] = most_of(first, lane, shares); });
    join_lanes(group, most, [](float a, float b) { return larger_of(a, b); });
    typename Group::template held<attention_total> own;
    group.each([&](std::uint32_t lane) { own[lane] = joined(first, lane, shares, pack, most[lane]); });
    typename Group::template held<float> number;
    LLMMEM_UNROLL
    for (unsigned e = 0; e <= attention_pack; ++e) {
      group.each([&](std::uint32_t lane) { number[lane] = number_of(own[lane], e); });
      join_lanes(group, number, [](float a, float b) { return a + b; });
      group.each([&](std::uint32_t lane) { number_of(own[lane], e) = number[lane]; });
    }
    if (shares == 0) return;
    group.each([&](std::uint32_t lane) {
      if (lane == 0) write_output(shape_, at, pack, own[lane]);
    });
  }

 private:
  /// The number of shares whose reads are in flight together.
  static constexpr std::uint32_t at_once = 4;

  struct part {
    packet<8> state;
    attention_raw<dtype::f32> sum;
  };

  /// The eight sums, then the sum of exponentials.
  [[nodiscard]] LLMMEM_HD static float& number_of(attention_total& of, unsigned e) noexcept {
    return e < attention_pack ? of.sum.of[e] : of.total;
  }
  [[nodiscard]] LLMMEM_HD packet<8> state(std::uint64_t of) const noexcept {
    return load_packet<8>(reinterpret_cast<const std::byte*>(shape_.states + 2 * of));
  }
  [[nodiscard]] LLMMEM_HD float most_of(std::uint64_t first, std::uint32_t lane,
                                        std::uint32_t shares) const noexcept {
    float most = lowest();
    for (std::uint32_t i = lane; i < shares; i += lanes_)
      most = larger_of(most, float_of_bits(state(first + i).words[0]));
    return most;
  }
  [[nodiscard]] LLMMEM_HD part read(std::uint64_t of, std::uint32_t pack) const noexcept {
    part out{state(of), {}};
    out.sum.load(
        reinterpret_cast<const std::byte*>(shape_.sums + (of * packs_.by() + pack) * attention_pack));
    return out;
  }
  LLMMEM_HD static void add(attention_total& to, const part& of, float base) noexcept {
    const float weight = power_of_two(float_of_bits(of.state.words[0]) - base);
    to.total = fused(weight, float_of_bits(of.state.words[1]), to.total);
    const attention_floats sum = floats_of(of.sum);
    LLMMEM_UNROLL
    for (unsigned e = 0; e < attention_pack; ++e)
      to.sum.of[e] = fused(weight, sum.of[e], to.sum.of[e]);
  }
  /// Returns the result of a lane's shares, relative to the largest product of all.
  [[nodiscard]] LLMMEM_HD attention_total joined(std::uint64_t first, std::uint32_t lane,
                                                 std::uint32_t shares, std::uint32_t pack,
                                                 float most) const noexcept {
    attention_total out{{}, most, 0};
    const float base = most == lowest() ? 0.0F : most;
    std::uint32_t i = lane;
    for (; i + (at_once - 1) * lanes_ < shares; i += at_once * lanes_) {
      part in[at_once];
      LLMMEM_UNROLL
      for (std::uint32_t k = 0; k < at_once; ++k)
        in[k] = read(first + i + std::uint64_t{k} * lanes_, pack);
      LLMMEM_UNROLL
      for (const part& each : in)
        add(out, each, base);
    }
    for (; i < shares; i += lanes_)
      add(out, read(first + i, pack), base);
    return out;
  }

  attention_shape shape_;
  Tables tables_;
  divider packs_;
  divider query_heads_;
  divider group_;
  std::uint32_t lanes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
