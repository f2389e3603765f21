/// @file
/// Every public header that needs nothing but the C++ standard library, for small programs. An engine
/// includes the headers it uses.
///
/// The simulators and fault plans under `testing/` are not here, nor are headers that need an optional
/// library. Those are named below as `<header> needs <target>`; the build reads these lines.

// <llmmem/paging/xxh3.hpp> needs llmmem::xxhash
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/eviction/admission.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/eviction/arc.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/gdsf.hpp>
#include <llmmem/eviction/hazard.hpp>
#include <llmmem/eviction/leaf_only.hpp>
#include <llmmem/eviction/length_aware.hpp>
#include <llmmem/eviction/lfu.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/eviction/queue_lookahead.hpp>
#include <llmmem/eviction/retention.hpp>
#include <llmmem/eviction/s3fifo.hpp>
#include <llmmem/eviction/sieve.hpp>
#include <llmmem/eviction/slru.hpp>
#include <llmmem/eviction/wtinylfu.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/metadata_pmr.hpp>
#include <llmmem/model/activations.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/model_shape.hpp>
#include <llmmem/model/presets.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/arena.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/block_history.hpp>
#include <llmmem/paging/block_key.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/block_record.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/cache_metrics.hpp>
#include <llmmem/paging/caching_split.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/deferred_frees.hpp>
#include <llmmem/paging/event_log.hpp>
#include <llmmem/paging/free_list.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/journal_what_if.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/partial_reuse.hpp>
#include <llmmem/paging/prefix_index.hpp>
#include <llmmem/paging/prometheus.hpp>
#include <llmmem/paging/sha256.hpp>
#include <llmmem/paging/siphash.hpp>
#include <llmmem/paging/size_class.hpp>
#include <llmmem/paging/stitched.hpp>
#include <llmmem/paging/upload_ring.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/space/growable_range.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/host_virtual.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/memory_file.hpp>
#include <llmmem/space/pages.hpp>
#include <llmmem/space/pmr.hpp>
#include <llmmem/space/virtual_memory.hpp>
#include <llmmem/space/virtual_range.hpp>
#include <llmmem/version.hpp>
