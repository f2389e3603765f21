/// @file
/// The bodies of `gather_kv` and `gather_mla`.
#pragma once

#include <llmmem/kernels/detail/kv_tokens_run.hpp>
#include <llmmem/kernels/kv_gather.hpp>

namespace llmmem {
inline namespace v0 {

template <class Run, token_front Front>
result<void> gather_kv(const Run& run, const Front& front, const batch_output& keys,
                       const batch_output& values, const kv_memory& cache, std::uint32_t layer,
                       const token_options& options) {
  return detail::move_planes<kv_direction::gather>(run, front,
                                                   {detail::plane_of(keys), detail::plane_of(values)},
                                                   {cache, layer, options, &detail::gather_kv_names});
}

template <class Run, token_front Front>
result<void> gather_mla(const Run& run, const Front& front, const batch_output& latent,
                        const batch_output& rotary, std::uint32_t latent_elements, const kv_memory& cache,
                        std::uint32_t layer, const token_options& options) {
  return detail::move_halves<kv_direction::gather>(
      run, front, {detail::plane_of(latent), detail::plane_of(rotary)}, latent_elements,
      {cache, layer, options, &detail::gather_mla_names});
}

}  // namespace v0
}  // namespace llmmem
