// expect: only the last tier may be lossy
// What comes back from a lossy tier would be stored as exact by the tier below.
#include <llmmem/codec/bf16_cast.hpp>
#include <llmmem/codec/identity.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using form = llmmem::offload::coded<llmmem::identity_codec>;
#else
using form = llmmem::offload::coded<llmmem::bf16_cast>;
#endif

struct traits : llmmem::paged_traits {
  using observer = llmmem::offload::tier_link;
};
using tier = llmmem::offload::kv_tier<llmmem::host_space>;
using coded_tier = llmmem::offload::kv_tier<llmmem::host_space, llmmem::lru_eviction, form>;
using tiers = llmmem::kv_tiers<llmmem::paged_allocator<traits>,
                               llmmem::offload::layout_mover<llmmem::host_executor>, tier, coded_tier, tier>;

bool is_exact() {
  return tiers::is_lossless;
}
