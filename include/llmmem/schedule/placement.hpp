/// @file
/// Chooses the shares of weights, KV cache and activations on the device, in host memory and on NVMe that
/// make a generation step fastest.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>

#include <algorithm>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Where attention is computed over KV that is not on the device.
enum class offloaded_attention : std::uint8_t {
  on_device,  ///< the KV is sent there, every step
  on_host,    ///< on the host, in `host_attention_ns` for all KV; the results that travel are not counted
};

using away_attention [[deprecated("its name is offloaded_attention")]] = offloaded_attention;

/// The input of placement. A *step* makes one token for each sequence of the block: the batches that pass
/// through a layer while its weights are on the device (FlexGen's zig-zag block schedule).
struct placement_facts {
  // The bytes to place
  std::uint64_t weight_bytes = 0;
  std::uint64_t kv_bytes = 0;  ///< of all sequences of the block, at their longest
  std::uint64_t activation_bytes = 0;

  // The bytes that a step moves if they are not on the device
  std::uint64_t kv_read_bytes = 0;
  std::uint64_t kv_written_bytes = 0;
  std::uint64_t activation_moved_bytes = 0;  ///< each way

  // The memory of each tier, in bytes, without buffers
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;

  // Bandwidths in bytes per second, 1 to 2^53; those of NVMe are unused if NVMe has no space
  std::uint64_t host_to_device = 0;
  std::uint64_t device_to_host = 0;
  std::uint64_t nvme_to_host = 0;
  std::uint64_t host_to_nvme = 0;

  std::uint64_t compute_ns = 0;  ///< of a step, on the device
  offloaded_attention attention = offloaded_attention::on_device;
  std::uint64_t host_attention_ns = 0;  ///< of a step, if no KV were on the device
};

/// The shares of one kind in each tier. They add up to 1.
struct tier_fractions {
  double device = 0;
  double host = 0;
  double nvme = 0;
};

/// The parts of a step. A step takes as long as the longest part, because all run at once.
struct placement_times {
  std::uint64_t compute_ns = 0;  ///< device, and attention on the host
  std::uint64_t host_to_device_ns = 0;
  std::uint64_t device_to_host_ns = 0;
  std::uint64_t nvme_to_host_ns = 0;
  std::uint64_t host_to_nvme_ns = 0;

  [[nodiscard]] constexpr std::uint64_t step_ns() const noexcept {
    return std::max({compute_ns, host_to_device_ns, device_to_host_ns, nvme_to_host_ns, host_to_nvme_ns});
  }
};

namespace schedule {

/// Shares of each kind in each tier, and the resulting time of a step.
struct placement {
  tier_fractions weights{};
  tier_fractions kv{};
  tier_fractions activations{};
  placement_times times{};
};

}  // namespace schedule

using placement [[deprecated("its name is schedule::placement")]] = schedule::placement;

/// Whole chunks in each tier.
struct tier_chunks {
  std::uint32_t device = 0;
  std::uint32_t host = 0;
  std::uint32_t nvme = 0;

  friend constexpr bool operator==(const tier_chunks&, const tier_chunks&) noexcept = default;
};

namespace schedule {

/// The number of equal chunks of each kind: weights into layers, for example. At most `max_chunks`.
struct chunk_counts {
  static constexpr std::uint32_t max_chunks = 1U << 20;

  std::uint32_t weights = 1;
  std::uint32_t kv = 1;
  std::uint32_t activations = 1;
};

}  // namespace schedule

using chunk_counts [[deprecated("its name is schedule::chunk_counts")]] = schedule::chunk_counts;

/// The maximum number of ways to distribute chunks over the tiers up to which `round_placement` tries all: (n
/// + 1) (n + 2) / 2 for the n chunks of a kind, multiplied over the three kinds.
inline constexpr std::uint64_t max_exact_placements = std::uint64_t{1} << 18;

/// Whole chunks in each tier, and the resulting time of a step.
struct chunked_placement {
  tier_chunks weights{};
  tier_chunks kv{};
  tier_chunks activations{};
  placement_times times{};
};

/// Returns the fractions with the shortest step, after FlexGen (Sheng et al., ICML 2023, arXiv 2303.06865,
/// section 4.3): compute and the four directions of traffic run at the same time, so the step takes as long
/// as the longest. With W, K, A the bytes and w, k, a the fractions on host (h) and NVMe (n), R, N, M the
/// bytes of KV read and written and of activations moved:
///
///     host to device   (w_h + w_n) W + (k_h + k_n) R + (a_h + a_n) M
///     device to host                   (k_h + k_n) N + (a_h + a_n) M
///     NVMe to host     w_n W         + k_n R         + a_n M
///     host to NVMe                     k_n N         + a_n M
///     compute          compute_ns    + (k_h + k_n) host_attention_ns
///
/// each as bytes over bandwidth. With `offloaded_attention::on_host` the last term applies, and R from host
/// to device does not. FlexGen computes the time of a layer; because layers are equal, a step is a multiple
/// of that. FlexGen's prefill, and its choice of the block size by trials, are left to the caller.
///
/// This is a linear program of nine fractions, solved by the simplex method in double precision: times are
/// accurate to a millionth of the slowest placement's time, and budgets to a millionth of a millionth of all
/// bytes. `round_placement` meets budgets exactly. Of equally fast placements, the function returns one with
/// the most bytes on the device, where a byte in host memory counts half.
///
/// @par Complexity   constant; some microseconds.
/// @throws length_error    when all tiers together are too small, or bytes or times pass 2^63 - 1.
/// @throws argument_error  for a bandwidth of 0 or above 2^53.
[[nodiscard]] schedule::placement solve_placement(const placement_facts& facts);

/// Returns whole chunks near the fractions of `solve_placement`, or near any others, strictly within
/// `device_bytes`, `host_bytes` and `nvme_bytes`. A chunk counts as its kind's bytes over the number of
/// chunks, rounded up.
///
/// With up to `max_exact_placements` ways to distribute the chunks, it tries each and takes the fastest; of
/// equally fast ways, the one with the fewest bytes away from the device, then with the fewest on NVMe. With
/// more ways, it tries every combination of numbers of chunks less than 1 away from the fractions, then less
/// than 2, then less than 3, until one meets the budgets. From the fastest of these it moves one or two
/// chunks at a time while that helps. The result is then near the best, but not always the best.
///
/// @par Complexity   O(ways) when exact; otherwise 46,656 ways, and 342 more for each move.
/// @throws argument_error  for 0 chunks or more than `max_chunks`, or fractions that are negative, not a
///                         number, or do not add up to 1 within a millionth; as `solve_placement`.
/// @throws length_error    when none of the tried ways meets the budgets; as `solve_placement`.
[[nodiscard]] chunked_placement round_placement(const placement_facts& facts,
                                                const schedule::placement& fractional,
                                                const schedule::chunk_counts& chunks);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/placement_body.hpp>
#endif
