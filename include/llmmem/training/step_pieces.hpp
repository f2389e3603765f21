/// @file
/// `step_pieces`: an optimizer's step on pieces in their store, in tiers or in memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The chunks of one piece. The step ignores chunks of arrays that the form lacks.
///
/// @tparam Chunk  a store's handle.
template <class Chunk>
struct optimizer_chunks {
  Chunk gradients{};
  Chunk weights{};
  Chunk low{};
  Chunk mean{};
  Chunk variance{};
  Chunk mean_scales{};
  Chunk variance_scales{};
  std::uint64_t first = 0;  ///< index of the piece's first element in the tensor
  std::uint64_t count = 0;
};

/// Changes pieces one after the other, and leases each from the store only during its own step. A
/// `tiered_buffer` brings the piece to its fastest tier and writes changes back, so that the state of a model
/// may be larger than that tier. The resulting bits are those of one step on the whole tensor.
///
/// @param store  `tiered_buffer` or `memory_chunks`, whose leases `run` can access.
/// @return the first failure, whose `index` is the piece's: the store's errors, `errc::too_short` for a chunk
///      with fewer bytes than the piece needs, and the errors of `optimizer_step`. Earlier pieces have been
///      changed.
/// @par Complexity   leases each byte once.
/// @par Thread safety   that of the store.
template <class Run, class Store, class Chunk>
result<void> step_pieces(const Run& run, Store& store, optimizer_form form,
                         std::span<const optimizer_chunks<Chunk>> pieces, dtype gradient,
                         const optimizer_hyper& hyper) {
  const optimizer_widths each = widths_of(form);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const optimizer_chunks<Chunk>& of = pieces[i];
    if (of.count == 0) continue;
    const auto failed = [&](failure why) {
      why.index = static_cast<std::uint32_t>(i);
      return why;
    };
    // Checked before numbers of bytes are computed from it.
    if (of.count >= detail::most_tensor_elements)
      return failure{errc::out_of_range, static_cast<std::uint32_t>(i), of.count,
                     detail::most_tensor_elements - 1, "step_pieces: count"};
    if (gradient != dtype::f32 && gradient != dtype::bf16)
      return failure{errc::no_conversion, static_cast<std::uint32_t>(i),
                     static_cast<std::uint64_t>(dtype::f32), static_cast<std::uint64_t>(gradient),
                     "step_pieces: gradients"};
    const std::uint64_t groups = (of.count + optimizer_group - 1) / optimizer_group;
    const struct {
      const Chunk* chunk;
      std::uint64_t bytes;
    } arrays[] = {{&of.weights, of.count * each.weights},
                  {&of.low, of.count * each.low},
                  {&of.mean, of.count * each.mean},
                  {&of.variance, of.count * each.variance},
                  {&of.mean_scales, groups * each.group_scale},
                  {&of.variance_scales, groups * each.group_scale}};
    auto read = store.read(of.gradients);
    if (!read) return failed(read.error());
    const std::uint64_t gradient_bytes = of.count * (gradient == dtype::f32 ? 4 : 2);
    if (read->span().size() < gradient_bytes)
      return failure{errc::too_short, static_cast<std::uint32_t>(i), gradient_bytes, read->span().size(),
                     "step_pieces: gradients"};
    std::array<typename Store::update_lease, 6> held{};
    std::array<std::byte*, 6> at{};
    for (std::size_t array = 0; array < held.size(); ++array) {
      if (arrays[array].bytes == 0) continue;
      auto lease = store.update(*arrays[array].chunk);
      if (!lease) return failed(lease.error());
      if (lease->span().size() < arrays[array].bytes)
        return failure{errc::too_short, static_cast<std::uint32_t>(i), arrays[array].bytes,
                       lease->span().size(), "step_pieces: a chunk"};
      at[array] = lease->span().data();
      held[array] = std::move(*lease);
    }
    const auto done =
        optimizer_step(run, form,
                       {.weights = at[0],
                        .low = at[1],
                        .mean = at[2],
                        .variance = at[3],
                        .mean_scales = at[4],
                        .variance_scales = at[5],
                        .first = of.first,
                        .count = of.count},
                       {.data = read->span().data(), .element = gradient, .count = of.count}, hyper);
    if (!done) return failed(done.error());
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
