/// @file
/// The bodies of `optimizer_step`, `optimizer_begin` and `optimizer_weights`.
#pragma once

#include <llmmem/kernels/detail/optimizer_arithmetic.hpp>
#include <llmmem/kernels/detail/optimizer_lanes.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/kernels/vector_path.hpp>

#include <concepts>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Up to N elements from an array. @param is_complete  there are N elements, at an address that is a multiple
/// of their bytes.
template <unsigned N, class T>
LLMMEM_HD inline void load_elements(T (&out)[N], const std::byte* from, std::uint64_t count,
                                    [[maybe_unused]] bool is_complete) noexcept {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(out) <= 16) {
    if (is_complete) {
      const auto in = load_packet<sizeof(out)>(from);
      memcpy(&out, &in, sizeof(out));
      return;
    }
  }
  for (unsigned i = 0; i < N; ++i)
    out[i] = i < count ? reinterpret_cast<const T*>(from)[i] : T{};
#else
  if (count == N) {
    std::memcpy(&out, from, sizeof(out));
  } else {
    std::memset(&out, 0, sizeof(out));
    std::memcpy(&out, from, count * sizeof(T));
  }
#endif
}
template <unsigned N, class T>
LLMMEM_HD inline void store_elements(const T (&in)[N], std::byte* to, std::uint64_t count,
                                     [[maybe_unused]] bool is_complete) noexcept {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(in) <= 16) {
    if (is_complete) {
      packet<sizeof(in)> out;
      memcpy(&out, &in, sizeof(in));
      store_packet<sizeof(in)>(to, out);
      return;
    }
  }
  for (unsigned i = 0; i < N && i < count; ++i)
    reinterpret_cast<T*>(to)[i] = in[i];
#else
  if (count == N) {
    std::memcpy(to, &in, sizeof(in));
  } else {
    std::memcpy(to, &in, count * sizeof(T));
  }
#endif
}

/// Elements of a piece per item: as many as a device's lane accesses at once, or as a host vectorises.
template <class Run>
inline constexpr unsigned elements_an_item = std::same_as<Run, host_executor> ? 64 : 4;

/// Loads elements as floats, and stores them.
template <optimizer_form Form, unsigned N>
class weight_access {
 public:
  weight_access(const optimizer_piece& piece, bool is_wide) noexcept : of_(piece), is_wide_(is_wide) {}

  LLMMEM_HD void load(float (&w)[N], std::uint64_t first, std::uint64_t count) const noexcept {
    const bool is_complete = is_wide_ && count == N;
    if constexpr (widths_of(Form).weights == 4) {
      load_elements(w, of_.weights + first * 4, count, is_complete);
    } else {
      std::uint16_t high[N];
      load_elements(high, of_.weights + first * 2, count, is_complete);
      std::uint16_t low[N]{};
      if constexpr (widths_of(Form).low != 0) load_elements(low, of_.low + first * 2, count, is_complete);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < N; ++i)
        w[i] = float_of_bits(joined_bits(high[i], low[i]));
    }
  }
  LLMMEM_HD void store(const float (&w)[N], std::uint64_t first, std::uint64_t count) const noexcept {
    const bool is_complete = is_wide_ && count == N;
    if constexpr (widths_of(Form).weights == 4) {
      store_elements(w, of_.weights + first * 4, count, is_complete);
    } else {
      std::uint16_t high[N];
      std::uint16_t low[N];
      LLMMEM_UNROLL
      for (unsigned i = 0; i < N; ++i) {
        const split_float halves = split_of(bits_of_float(w[i]));
        high[i] = halves.high;
        low[i] = halves.low;
      }
      store_elements(high, of_.weights + first * 2, count, is_complete);
      if constexpr (widths_of(Form).low != 0) store_elements(low, of_.low + first * 2, count, is_complete);
    }
  }
  LLMMEM_HD void store_stochastic(const float (&w)[N], std::uint64_t first, std::uint64_t count,
                                  const optimizer_constants& by) const noexcept {
    std::uint16_t high[N];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < N; ++i)
      high[i] = stochastic_bf16(bits_of_float(w[i]), drawn_bits(of_.first + first + i, by));
    store_elements(high, of_.weights + first * 2, count, is_wide_ && count == N);
  }

 private:
  optimizer_piece of_;
  bool is_wide_;
};

/// Loads gradients as floats.
template <dtype Gradient, unsigned N>
LLMMEM_HD inline void load_gradients(float (&g)[N], const std::byte* from, std::uint64_t first,
                                     std::uint64_t count, bool is_wide) noexcept {
  if constexpr (Gradient == dtype::f32) {
    load_elements(g, from + first * 4, count, is_wide && count == N);
  } else {
    std::uint16_t half[N];
    load_elements(half, from + first * 2, count, is_wide && count == N);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < N; ++i)
      g[i] = float_of_bits(std::uint32_t{half[i]} << 16U);
  }
}

/// The arguments of a step that are the same for all elements.
struct optimizer_work {
  optimizer_piece piece{};
  const std::byte* gradients = nullptr;
  optimizer_constants by{};
  bool is_wide = false;
};

/// An item for each N elements.
template <optimizer_form Form, dtype Gradient, unsigned N>
class element_step {
 public:
  explicit element_step(const optimizer_work& of) noexcept : of_(of), weights_(of.piece, of.is_wide) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (of_.piece.count + N - 1) / N; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t first = item * N;
    const std::uint64_t left = of_.piece.count - first;
    const std::uint64_t count = left < N ? left : N;
    const bool is_complete = of_.is_wide && count == N;
    float w[N];
    float m[N];
    float g[N];
    load_gradients<Gradient>(g, of_.gradients, first, count, of_.is_wide);
    weights_.load(w, first, count);
    load_elements(m, of_.piece.mean + first * 4, count, is_complete);
    if constexpr (Form == optimizer_form::sgd) {
      sgd_elements(w, m, g, of_.by);
    } else {
      float v[N];
      load_elements(v, of_.piece.variance + first * 4, count, is_complete);
      adamw_elements(w, m, v, g, of_.by);
      store_elements(v, of_.piece.variance + first * 4, count, is_complete);
    }
    store_elements(m, of_.piece.mean + first * 4, count, is_complete);
    if constexpr (Form == optimizer_form::adamw_stochastic) {
      weights_.store_stochastic(w, first, count, of_.by);
    } else {
      weights_.store(w, first, count);
    }
  }

 private:
  optimizer_work of_;
  weight_access<Form, N> weights_;
};

/// A group of 8-bit moments for a warp, or for a host.
template <dtype Gradient, unsigned Each>
class group_step {
 public:
  struct held {
    float m[Each];
    float v[Each];
  };
  struct partial {
    std::uint32_t mean;  // bits of the largest size
    std::uint32_t variance;
  };

  explicit group_step(const optimizer_work& of) noexcept : of_(of), weights_(of.piece, of.is_wide) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return (of_.piece.count + optimizer_group - 1) / optimizer_group;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept {
    return static_cast<std::uint32_t>(optimizer_group / Each);
  }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine{};
    float mean_scale[1];
    float variance_scale[1];
    load_elements(mean_scale, of_.piece.mean_scales + item * 4, 1, false);
    load_elements(variance_scale, of_.piece.variance_scales + item * 4, 1, false);
    LLMMEM_UNROLL
    for (unsigned part = 0; part < Each / width; ++part) {
      const std::uint64_t first = first_of(item, lane, part);
      const std::uint64_t count = count_from(first);
      if (count == 0) break;
      float w[width];
      float m[width];
      float v[width];
      float g[width];
      std::uint8_t code[width];
      load_gradients<Gradient>(g, of_.gradients, first, count, of_.is_wide);
      weights_.load(w, first, count);
      load_elements(code, of_.piece.mean + first, count, of_.is_wide && count == width);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < width; ++i)
        m[i] = unfused(signed_.value[code[i]], mean_scale[0]);
      load_elements(code, of_.piece.variance + first, count, of_.is_wide && count == width);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < width; ++i)
        v[i] = unfused(unsigned_.value[code[i]], variance_scale[0]);
      adamw_elements(w, m, v, g, of_.by);
      weights_.store(w, first, count);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < width; ++i) {
        mine.m[part * width + i] = i < count ? m[i] : 0;
        mine.v[part * width + i] = i < count ? v[i] : 0;
      }
    }
    return mine;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept {
    partial most{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < Each; ++i)
      most =
          combine(most, {bits_of_float(mine.m[i]) & 0x7FFF'FFFFU, bits_of_float(mine.v[i]) & 0x7FFF'FFFFU});
    return most;
  }
  [[nodiscard]] static LLMMEM_HD partial combine(const partial& a, const partial& b) noexcept {
    return {a.mean > b.mean ? a.mean : b.mean, a.variance > b.variance ? a.variance : b.variance};
  }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& mine,
                      const partial& largest) const noexcept {
    const moment_scale mean = moment_scale::of(largest.mean);
    const moment_scale variance = moment_scale::of(largest.variance);
#if defined(__CUDA_ARCH__)
    __syncwarp();  // all lanes have read the former scales
#endif
    if (lane.lane == 0) {
      const float scales[2][1] = {{mean.scale}, {variance.scale}};
      store_elements(scales[0], of_.piece.mean_scales + item * 4, 1, false);
      store_elements(scales[1], of_.piece.variance_scales + item * 4, 1, false);
    }
    LLMMEM_UNROLL
    for (unsigned part = 0; part < Each / width; ++part) {
      const std::uint64_t first = first_of(item, lane, part);
      const std::uint64_t count = count_from(first);
      if (count == 0) break;
      std::uint8_t code[width];
      for (unsigned i = 0; i < width; ++i)
        code[i] = signed_.nearest(unfused(mine.m[part * width + i], mean.inverse));
      store_elements(code, of_.piece.mean + first, count, of_.is_wide && count == width);
      for (unsigned i = 0; i < width; ++i) {
        const float v = mine.v[part * width + i];
        const std::uint8_t nearest = unsigned_.nearest(unfused(v, variance.inverse));
        code[i] = nearest == 0 && v > 0 ? std::uint8_t{1} : nearest;  // a mean is never divided by 0
      }
      store_elements(code, of_.piece.variance + first, count, of_.is_wide && count == width);
    }
  }

 private:
  static constexpr unsigned width = Each < 64 ? 4 : 64;  // elements that are accessed at once

  [[nodiscard]] static LLMMEM_HD std::uint64_t first_of(std::uint64_t item, group_lane lane,
                                                        unsigned part) noexcept {
    return item * optimizer_group + (std::uint64_t{part} * lane.lanes + lane.lane) * width;
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t count_from(std::uint64_t first) const noexcept {
    if (first >= of_.piece.count) return 0;
    return of_.piece.count - first < width ? of_.piece.count - first : width;
  }

  optimizer_work of_;
  weight_access<optimizer_form::adamw_8bit, width> weights_;
  code_book signed_ = signed_codes;
  code_book unsigned_ = unsigned_codes;
};

/// Sets weights, and clears state.
template <optimizer_form Form, unsigned N>
class begin_work {
 public:
  begin_work(const optimizer_piece& piece, const float* from, bool is_wide) noexcept
      : piece_(piece), from_(reinterpret_cast<const std::byte*>(from)), weights_(piece, is_wide) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (piece_.count + N - 1) / N; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t first = item * N;
    const std::uint64_t count = piece_.count - first < N ? piece_.count - first : N;
    float w[N];
    load_elements(w, from_ + first * 4, count, false);
    if constexpr (Form == optimizer_form::adamw_stochastic) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < N; ++i)
        w[i] = float_of_bits(std::uint32_t{bf16_from_f32_bits(bits_of_float(w[i]))} << 16U);
    }
    weights_.store(w, first, count);
    clear<widths_of(Form).mean>(piece_.mean, first, count);
    clear<widths_of(Form).variance>(piece_.variance, first, count);
    if (widths_of(Form).group_scale != 0 && first % optimizer_group == 0) {
      clear<widths_of(Form).group_scale>(piece_.mean_scales, first / optimizer_group, 1);
      clear<widths_of(Form).group_scale>(piece_.variance_scales, first / optimizer_group, 1);
    }
  }

 private:
  template <std::uint32_t Width>
  static LLMMEM_HD void clear(std::byte* of, std::uint64_t first, std::uint64_t count) noexcept {
    for (std::uint64_t i = 0; i < count * Width; ++i)
      of[first * Width + i] = std::byte{0};
  }

  optimizer_piece piece_;
  const std::byte* from_;
  weight_access<Form, N> weights_;
};

/// Reads weights.
template <optimizer_form Form, unsigned N>
class read_work {
 public:
  read_work(const optimizer_piece& piece, float* to, bool is_wide) noexcept
      : count_(piece.count), to_(reinterpret_cast<std::byte*>(to)), weights_(piece, is_wide) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (count_ + N - 1) / N; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t first = item * N;
    const std::uint64_t count = count_ - first < N ? count_ - first : N;
    float w[N];
    weights_.load(w, first, count);
    store_elements(w, to_ + first * 4, count, false);
  }

 private:
  std::uint64_t count_;
  std::byte* to_;
  weight_access<Form, N> weights_;
};

/// More elements than any tensor has, so that no number of bytes overflows.
inline constexpr std::uint64_t most_tensor_elements = std::uint64_t{1} << 60U;

/// Checks an array of floats outside of a piece.
[[nodiscard]] inline result<void> check_floats(const float* data, std::uint64_t count,
                                               const char* what) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (data == nullptr) return failure{errc::too_short, 0, count, 0, what};
  if (address % sizeof(float) != 0) return failure{errc::bad_granularity, 0, address, sizeof(float), what};
  return {};
}

/// Returns whether arrays allow wide accesses, or the error of one.
[[nodiscard]] inline result<bool> check_piece(optimizer_form form, const optimizer_piece& piece,
                                              const char* who) noexcept {
  const optimizer_widths each = widths_of(form);
  const std::uint64_t multiple = cut_multiple(form);
  if (form == optimizer_form::muon)
    return failure{errc::out_of_range, 0, static_cast<std::uint64_t>(form), 4,
                   "optimizer_step: form muon, whose steps begin with muon_momentum"};
  if (form == optimizer_form::adafactor)
    return failure{errc::out_of_range, 0, static_cast<std::uint64_t>(form), 4,
                   "optimizer_step: form adafactor, whose steps begin with adafactor_add"};
  if (each.weights == 0) return failure{errc::out_of_range, 0, static_cast<std::uint64_t>(form), 4, who};
  if (piece.count >= most_tensor_elements || piece.first >= most_tensor_elements)
    return failure{errc::out_of_range, 0, piece.count >= most_tensor_elements ? piece.count : piece.first,
                   most_tensor_elements - 1, who};
  if (piece.first % multiple != 0) return failure{errc::bad_granularity, 0, piece.first, multiple, who};
  bool is_wide = true;
  const struct {
    const std::byte* data;
    std::uint32_t width;
  } arrays[] = {{piece.weights, each.weights},
                {piece.low, each.low},
                {piece.mean, each.mean},
                {piece.variance, each.variance},
                {piece.mean_scales, each.group_scale},
                {piece.variance_scales, each.group_scale}};
  std::uint32_t index = 0;
  for (const auto& array : arrays) {
    const auto address = reinterpret_cast<std::uintptr_t>(array.data);
    if (array.width != 0 && array.data == nullptr)
      return failure{errc::too_short, index, piece.count, 0, who};
    if (array.width != 0 && address % array.width != 0)
      return failure{errc::bad_granularity, index, address, array.width, who};
    is_wide = is_wide && (array.width == 0 || address % (std::uint64_t{4} * array.width) == 0);
    ++index;
  }
  return is_wide;
}

/// Calls with a form as a constant.
template <class Do>
result<void> with_form(optimizer_form form, const Do& act) {
  switch (form) {
    case optimizer_form::adamw:
      return act.template operator()<optimizer_form::adamw>();
    case optimizer_form::adamw_split16:
      return act.template operator()<optimizer_form::adamw_split16>();
    case optimizer_form::adamw_stochastic:
      return act.template operator()<optimizer_form::adamw_stochastic>();
    case optimizer_form::adamw_8bit:
      return act.template operator()<optimizer_form::adamw_8bit>();
    case optimizer_form::sgd:
      return act.template operator()<optimizer_form::sgd>();
    case optimizer_form::adafactor:
    case optimizer_form::muon:
      break;  // refused by `check_piece`
  }
  return {};
}

/// The work that is left behind a piece's first `count` elements.
template <optimizer_form Form, dtype Gradient>
[[nodiscard]] optimizer_work behind(const optimizer_work& work, std::uint64_t count) noexcept {
  optimizer_work rest = work;
  rest.piece.weights += count * widths_of(Form).weights;
  if constexpr (widths_of(Form).low != 0) rest.piece.low += count * widths_of(Form).low;
  rest.piece.mean += count * widths_of(Form).mean;
  if constexpr (widths_of(Form).variance != 0) rest.piece.variance += count * widths_of(Form).variance;
  rest.piece.first += count;
  rest.piece.count -= count;
  rest.gradients += count * (Gradient == dtype::f32 ? 4 : 2);
  return rest;
}

/// Steps elements on the host or a device; on the host by vectors of a path, with the same bits.
template <optimizer_form Form, dtype Gradient, class Run>
result<void> step_elements(const Run& run, const optimizer_work& work, [[maybe_unused]] vector_path path) {
#if defined(__x86_64__) && !defined(__CUDACC__)
  if constexpr (std::same_as<Run, host_executor>) {
    const std::uint64_t done =
        step_first<Form, Gradient>(float_path(path), work.piece, work.gradients, work.by);
    if (done == work.piece.count) return {};
    return run.each(element_step<Form, Gradient, elements_an_item<Run>>(behind<Form, Gradient>(work, done)));
  }
#endif
  return run.each(element_step<Form, Gradient, elements_an_item<Run>>(work));
}

/// @param path  of the host's vectors
template <dtype Gradient, class Run>
result<void> start_step(const Run& run, optimizer_form form, const optimizer_work& work, vector_path path) {
  return with_form(form, [&]<optimizer_form Form>() -> result<void> {
    if constexpr (Form == optimizer_form::adamw_8bit) {
      return run.each(group_step<Gradient, std::same_as<Run, host_executor> ? 256 : 8>(work));
    } else {
      return step_elements<Form, Gradient>(run, work, path);
    }
  });
}

/// `optimizer_step` by the host's vectors of a path.
template <class Run>
result<void> optimizer_step_by(vector_path path, const Run& run, optimizer_form form,
                               const optimizer_piece& piece, const gradient_piece& gradients,
                               const optimizer_hyper& hyper) {
  constexpr const char* who = "optimizer_step";
  if (gradients.count != piece.count)
    return failure{errc::size_mismatch, 0, piece.count, gradients.count, "optimizer_step: gradients"};
  if (gradients.element != dtype::f32 && gradients.element != dtype::bf16) {
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f32),
                   static_cast<std::uint64_t>(gradients.element), "optimizer_step: gradients"};
  }
  if (hyper.step == 0)
    return failure{errc::out_of_range, 0, 0, ~std::uint64_t{0}, "optimizer_step: step, which counts from 1"};
  if (piece.count == 0) return {};
  const auto is_wide = check_piece(form, piece, who);
  if (!is_wide.has_value()) return is_wide.error();
  const auto address = reinterpret_cast<std::uintptr_t>(gradients.data);
  const std::uint32_t width = gradients.element == dtype::f32 ? 4 : 2;
  if (gradients.data == nullptr)
    return failure{errc::too_short, 0, piece.count, 0, "optimizer_step: gradients"};
  if (address % width != 0)
    return failure{errc::bad_granularity, 0, address, width, "optimizer_step: gradients"};
  const optimizer_work work{piece, gradients.data,
                            optimizer_constants::of(hyper, form == optimizer_form::sgd),
                            *is_wide && address % (std::uint64_t{4} * width) == 0};
  return gradients.element == dtype::f32 ? start_step<dtype::f32>(run, form, work, path)
                                         : start_step<dtype::bf16>(run, form, work, path);
}

}  // namespace detail

template <class Run>
result<void> optimizer_step(const Run& run, optimizer_form form, const optimizer_piece& piece,
                            const gradient_piece& gradients, const optimizer_hyper& hyper) {
  return detail::optimizer_step_by(best_vector_path(), run, form, piece, gradients, hyper);
}

template <class Run>
result<void> optimizer_begin(const Run& run, optimizer_form form, const optimizer_piece& piece,
                             const float* weights) {
  if (piece.count == 0) return {};
  const auto is_wide = detail::check_piece(form, piece, "optimizer_begin");
  if (!is_wide.has_value()) return is_wide.error();
  if (auto done = detail::check_floats(weights, piece.count, "optimizer_begin: weights"); !done) return done;
  return detail::with_form(form, [&]<optimizer_form Form>() -> result<void> {
    return run.each(detail::begin_work<Form, detail::elements_an_item<Run>>(piece, weights, *is_wide));
  });
}

template <class Run>
result<void> optimizer_weights(const Run& run, optimizer_form form, const optimizer_piece& piece,
                               float* weights) {
  if (piece.count == 0) return {};
  const auto is_wide = detail::check_piece(form, piece, "optimizer_weights");
  if (!is_wide.has_value()) return is_wide.error();
  if (auto done = detail::check_floats(weights, piece.count, "optimizer_weights: weights"); !done)
    return done;
  return detail::with_form(form, [&]<optimizer_form Form>() -> result<void> {
    return run.each(detail::read_work<Form, detail::elements_an_item<Run>>(piece, weights, *is_wide));
  });
}

}  // namespace v0
}  // namespace llmmem
