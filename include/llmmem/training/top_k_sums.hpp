/// @file
/// Sums of the largest gradients alone, with momentum on each rank: Deep Gradient Compression.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/sparse_sums.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/training/top_magnitudes.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The momentum of elements that were sent.
enum class sent_momentum : std::uint8_t {
  cleared,  ///< "momentum factor masking": an element that was sent begins at zero again
  kept,     ///< continues; with all elements sent in each step, this is SGD with momentum
};

/// How a rank corrects and sends gradients. Equal on all ranks.
struct top_k_options {
  float momentum = 0.9F;  ///< from 0 to below 1
  sent_momentum sent = sent_momentum::cleared;
  sparse_values form = sparse_values::f32;
};

/// One rank's state of a piece, zeros at first: 8 bytes an element in host memory, for example leased from a
/// `tiered_buffer`. It is this rank's alone: checkpoints save it for every rank, and a run resumes with as
/// many ranks.
struct top_k_piece {
  std::span<float> momentum;  ///< u of the paper
  std::span<float> unsent;    ///< v of the paper: corrected gradients that have not been sent
};

/// Returns how many elements of a piece are sent: the nearest number to `elements` x `density`, at least 1.
/// Of no elements: 0. @pre `density` is above 0 and at most 1
[[nodiscard]] constexpr std::uint64_t top_k_count(std::uint64_t elements, double density) noexcept {
  const double wanted = static_cast<double>(elements) * density;
  const auto below = static_cast<std::uint64_t>(wanted);
  const std::uint64_t nearest = wanted - static_cast<double>(below) < 0.5 ? below : below + 1;
  const std::uint64_t least = nearest == 0 ? 1 : nearest;
  return least < elements ? least : elements;
}

/// Refuses a momentum that is not from 0 to below 1.
/// @throws argument_error
inline void check_top_k(const top_k_options& by) {
  if (!(by.momentum >= 0) || !(by.momentum < 1))
    throw argument_error("top_k_options: the momentum is not from 0 to below 1; DGC's is 0.9");
}

// A step's three parts, for callers that continue after a failed sum: `accumulate_top_k` once, then
// `choose_top_k` and `sparse_all_reduce` until all ranks agree that it succeeded, then `settle_top_k`.
// `top_k_all_reduce` does all of it.

/// Adds a step's gradients: momentum = `by.momentum` x momentum + gradient, and unsent += momentum.
/// A compiler that fuses the two (`-ffp-contract`) rounds once, so the bits are those of one build; the ranks
/// of a run may differ in it, as each sends its own.
/// @pre the three have equal lengths
inline void accumulate_top_k(std::span<const float> gradients, const top_k_piece& piece,
                             const top_k_options& by) noexcept {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    piece.momentum[i] = by.momentum * piece.momentum[i] + gradients[i];
    piece.unsent[i] += piece.momentum[i];
  }
}

/// Fills a list with the largest unsent values (`select_top_magnitudes`). Changes nothing else.
/// @pre into.count() <= piece.unsent.size()
inline void choose_top_k(const top_k_piece& piece, sparse_list& into) noexcept {
  select_top_magnitudes(piece.unsent, into.count(), [&](std::uint64_t place, std::uint32_t index) {
    into.set(place, index, piece.unsent[index]);
  });
}

/// Takes out what was sent: what the list's form has lost of a value stays unsent. All values of the piece
/// that are not finite become 0, sent or not.
inline void settle_top_k(const top_k_piece& piece, const sparse_list& sent,
                         const top_k_options& by) noexcept {
  const auto finite = [](float value) {
    return (std::bit_cast<std::uint32_t>(value) & 0x7F80'0000U) != 0x7F80'0000U;
  };
  for (std::uint64_t i = 0; i < sent.count(); ++i) {
    const std::uint32_t index = sent.index(i);
    piece.unsent[index] -= sent.value(i);
    if (by.sent == sent_momentum::cleared) piece.momentum[index] = 0;
  }
  for (float& each : piece.unsent)
    each = finite(each) ? each : 0;
  for (float& each : piece.momentum)
    each = finite(each) ? each : 0;
}

/// Sums gradients over all ranks, of which each sends its `count` largest: after a gradient's momentum is
/// added on its own rank, it waits there until it is large enough. With a hundredth or a thousandth of the
/// elements, models train nearly as with all (see the figures in docs/benchmarks/training.md).
///
/// The sum, divided by the ranks, is a step of plain SGD: the momentum is in it already. Any optimizer with
/// moments of its own would take them of gradients that are mostly zeros, and so is not what the paper shows.
///
/// - **The same bits on all ranks**: those of the dense sum, in the order of ranks, of what each one sends.
///   With all elements and `sent_momentum::kept` that is the sum of the ranks' momenta; with `cleared`, which
///   then never keeps a momentum, the sum of the gradients.
/// - **Exactly `count`** elements are sent; of equal magnitudes those with the lowest indices. With 0, all
///   gradients wait. A `count` above the piece's elements is as all of them.
/// - **NaN and infinity** are sent before all numbers, so with a `count` above 0 all ranks find them in the
///   sum. They are not kept: an overflow spoils one step, as with error feedback over a wire.
/// - **One rank** sends to none, and otherwise does the same.
/// - **Hybrid models and shards**: a piece is any range of floats; each rank of the transport has all of it.
///   Sums to owners alone would save no memory, because each rank needs its momentum of everything.
/// - **Devices**: host memory only; the caller copies gradients from the device, and the sum back.
///
/// @param gradients  this rank's; they become the sum.
/// @param lists      `sparse_scratch_bytes(min(count, elements), world, form)` bytes; undefined afterwards.
/// @par Complexity      O(elements + count x world), and `sparse_sent_bytes` sent by each rank.
/// @par Thread safety   as the transport.
/// @par Errors          those of `sparse_all_reduce`, and `errc::size_mismatch` for arrays of another length:
///                      then nothing has changed. After a failed sum the gradients are undefined, the piece
///                      has them added, and nothing is taken out: so the caller may choose and sum again,
///                      with the ranks that are left.
/// @par Source          Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv 1712.01887), algorithm 4,
///                      without the clipping of each rank's gradients and without Nesterov's momentum.
template <transport T>
result<void> top_k_all_reduce(T& ranks, std::span<float> gradients, const top_k_piece& piece,
                              std::uint64_t count, const top_k_options& by, std::span<std::byte> lists,
                              const collective_call& call) {
  constexpr const char* where = "top_k_all_reduce";
  for (const std::span<float> each : {piece.momentum, piece.unsent}) {
    if (each.size() != gradients.size())
      return failure{errc::size_mismatch, 0, gradients.size(), each.size(), where};
  }
  const std::uint64_t sent = count < gradients.size() ? count : gradients.size();
  const std::uint64_t each = sparse_list_bytes(sent, by.form);
  if (lists.size() % to_number(ranks.world()) != 0 || lists.size() / to_number(ranks.world()) != each)
    return failure{errc::size_mismatch, 0, each * to_number(ranks.world()), lists.size(), where};
  accumulate_top_k(gradients, piece, by);
  sparse_list mine = own_sparse_list(ranks, lists, sent, by.form);
  choose_top_k(piece, mine);
  if (const auto done = sparse_all_reduce(ranks, gradients, sent, by.form, lists, call); !done) return done;
  settle_top_k(piece, mine, by);
  return {};
}

}  // namespace v0
}  // namespace llmmem
