// Decodes over a paged cache on a device: the same tokens and bits of logits as over a contiguous one on the
// host, in every form of keys and values, with blocks handed out in any order.
#include <cinttypes>
#include <cstdint>
#include <cstdio>

#include "paged_decode/comparison.hpp"
#include "paged_decode/device_place.cuh"
#include "paged_decode/latent_run.hpp"
#include "support/device.cuh"

namespace {

using namespace paged_decode;

void check_form(kv_form form, std::uint64_t seed, device_place& place) {
  experiment what;
  what.plan.seed = seed;
  what.cache.form = form;
  if (seed % 2 == 0) what.cache.heads_in_block = llmmem::paging::head_order::hnd;
  what.cache.order = static_cast<llmmem::block_order>(seed % llmmem::block_order_count);
  const model made(what.shape, what.most_tokens(), seed);
  contiguous_cache contiguous(what.shape, form, what.most_tokens());
  const service_result expected = service(made, contiguous, what.plan).run();
  paged_config how = what.large_enough();
  how.permutation = seed;
  const paged_run<device_place> found = run_paged(made, what, how, place);
  std::printf("%-5s host, contiguous %016" PRIx64 "   device, paged %016" PRIx64 "   %" PRIu64 " tokens\n",
              name_of(form).data(), expected.digest(), found.result.digest(),
              expected.answer_tokens(what.plan));
  llmmem_tests::require(found.result.digest() == expected.digest(), "the device came to other bits", seed);
}

/// The same of a model with latents, whose matrices are absorbed.
void check_latents(latent_form form, std::uint64_t seed, device_place& place) {
  experiment what;
  what.plan = {.requests = 2, .answer_tokens = 12, .seed = seed};
  what.shape.layers = 2;
  what.shape.head_dim = 32;
  what.shape.latents = 128;
  what.cache.order = static_cast<llmmem::block_order>(seed % llmmem::block_order_count);
  const latent_model made(what.shape, what.most_tokens(), seed);
  const llmmem::paging::latent_record record = record_of(form, what.shape.latents, what.shape.rotary_dim);
  contiguous_cache contiguous(what.shape, record, what.most_tokens());
  const service_result expected = service(made, contiguous, what.plan).run();
  paged_config how = what.large_enough();
  how.record = record;
  how.permutation = seed;
  const paged_run<device_place> found = run_paged(made, what, how, place);
  llmmem_tests::require(found.result.digest() == expected.digest(), "records came to other bits", seed);
}

}  // namespace

int main() {
  const int device = llmmem_tests::require_device();
  llmmem_tests::describe(device);
  cudaDeviceProp properties{};
  llmmem_tests::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  device_place place(llmmem::device_id{0}, std::uint64_t{1} << 30,
                     static_cast<std::uint32_t>(properties.multiProcessorCount));
  for (std::uint64_t seed = 1; seed <= llmmem_tests::wanted_worlds(2); ++seed) {
    for (const kv_form form : all_forms)
      check_form(form, seed, place);
    for (const latent_form form : latent_forms)
      check_latents(form, seed, place);
  }
  return 0;
}
