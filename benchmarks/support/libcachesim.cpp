#include "support/libcachesim.hpp"

#include <libCacheSim.h>
#include <bit>
#include <cstdint>

namespace llmmem_benchmarks {

struct libcachesim_cache::parts {
  cache_t* cache;
  request_t* request;
};

libcachesim_cache::libcachesim_cache(libcachesim_policy policy, std::uint64_t capacity) {
  common_cache_params_t options{};
  options.cache_size = capacity;
  options.hashpower = static_cast<std::int32_t>(std::bit_width(capacity));
  const auto make = policy == libcachesim_policy::lru   ? &LRU_init
                    : policy == libcachesim_policy::arc ? &ARC_init
                                                        : &S3FIFO_init;
  parts_.reset(new parts{.cache = make(options, nullptr), .request = new_request()});
  parts_->request->obj_size = 1;
}

bool libcachesim_cache::access(std::uint64_t key) {
  parts_->request->obj_id = key;
  return parts_->cache->get(parts_->cache, parts_->request);
}

void libcachesim_cache::discard::operator()(parts* gone) const noexcept {
  gone->cache->cache_free(gone->cache);
  free_request(gone->request);
  delete gone;
}

}  // namespace llmmem_benchmarks
