/// @file
/// The bodies of `append_kv` and `append_mla`.
#pragma once

#include <llmmem/kernels/detail/kv_tokens_run.hpp>
#include <llmmem/kernels/kv_append.hpp>

namespace llmmem {
inline namespace v0 {

template <class Run, token_front Front>
result<void> append_kv(const Run& run, const Front& front, const batch_vectors& keys,
                       const batch_vectors& values, const kv_memory& cache, std::uint32_t layer,
                       const token_options& options) {
  return detail::move_planes<kv_direction::append>(run, front,
                                                   {detail::plane_of(keys), detail::plane_of(values)},
                                                   {cache, layer, options, &detail::append_kv_names});
}

template <class Run, token_front Front>
result<void> append_mla(const Run& run, const Front& front, const batch_vectors& latent,
                        const batch_vectors& rotary, std::uint32_t latent_elements, const kv_memory& cache,
                        std::uint32_t layer, const token_options& options) {
  return detail::move_halves<kv_direction::append>(
      run, front, {detail::plane_of(latent), detail::plane_of(rotary)}, latent_elements,
      {cache, layer, options, &detail::append_mla_names});
}

}  // namespace v0
}  // namespace llmmem
