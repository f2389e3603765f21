/// @file
/// The state of a load in flight.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>
#include <llmmem/paging/ids.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The progress of one block of a load.
enum class part_state : std::uint8_t {
  queued,    ///< in a lower tier, its slot pinned
  reading,   ///< on its way to the first tier
  ready,     ///< in the first tier, its slot pinned; some layers may be restored
  restored,  ///< all layers are restored, or their copies have begun
  bad,       ///< damaged, withdrawn or refused
  late,      ///< did not arrive in time, or was cancelled
};

/// One block of a load.
template <class Fence>
struct load_part {
  std::uint32_t group = 0;
  std::uint32_t index = 0;  ///< its index in the sequence's table
  block_id block = null_block;
  slot_id slot = no_slot;  ///< its slot in `tier`, pinned
  std::uint8_t tier = 0;   ///< the tier that has it now
  std::uint8_t from = 0;   ///< the tier that had it first
  part_state state = part_state::queued;
  bool is_wrong = false;     ///< its contents were withdrawn while it loaded
  std::uint32_t layers = 0;  ///< layers whose copies have begun
  Fence fence{};             ///< the fence of the last copy
};

/// How far the blocks of one group of a load are.
struct load_progress {
  std::uint64_t missing = 0;  ///< parts that are queued or reading
  std::uint64_t reading = 0;
  std::uint32_t layers = 0;  ///< every part that is ready or restored has begun at least these
};

/// A load, from `prepare_load` until it and its copies have ended.
template <class Fence>
struct load_record {
  enum class phase : std::uint8_t { free, running, ending };

  phase state = phase::free;
  std::uint32_t generation = 1;
  sequence_id sequence{};
  const kv_chain* chain = nullptr;
  std::uint64_t deadline = 0;
  std::uint32_t first_queued = 0;  ///< parts before it are not queued
  offload::load_result wanted{};
  std::vector<load_part<Fence>> parts;
  std::array<load_progress, max_layer_groups> progress{};
  std::array<std::vector<Fence>, max_layer_groups> layer_fences;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
