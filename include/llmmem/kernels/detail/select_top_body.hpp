/// @file
/// Checks of `select_top`.
#pragma once

#include <llmmem/errors.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/select_top_work.hpp>
#include <llmmem/kernels/select_top.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

template <class Run>
result<void> select_top(const Run& run, const top_scores& of, std::uint32_t k, std::int32_t* out,
                        std::uint64_t out_stride, top_order order, std::span<std::byte> workspace) {
  constexpr std::uint32_t most = std::uint32_t{1} << 20U;
  if (of.candidates > most)
    return failure{errc::out_of_range, 0, of.candidates, most, "select_top: candidates"};
  if (of.candidates > of.stride && of.rows > 1)
    return failure{errc::size_mismatch, 0, of.candidates, of.stride, "select_top: candidates and stride"};
  if (k > out_stride && of.rows > 1)
    return failure{errc::size_mismatch, 0, k, out_stride, "select_top: k and out_stride"};
  if (of.rows == 0 || k == 0) return {};
  if (of.scores == nullptr && of.candidates != 0)
    return failure{errc::too_short, 0, of.candidates, 0, "select_top: scores"};
  if (out == nullptr) return failure{errc::too_short, 0, k, 0, "select_top: out"};
  const std::uint64_t needed = select_top_workspace_bytes(of, k, order);
  if (workspace.size() < needed)
    return failure{errc::too_short, 0, needed, workspace.size(), "select_top: workspace (bytes)"};
  if (needed == 0) return run.each(detail::choose_top_work(detail::top_rows{of}, k, out, out_stride));
  if (auto fits =
          detail::whole(reinterpret_cast<std::uintptr_t>(workspace.data()), 4, "select_top: workspace");
      !fits)
    return fits;
  auto* const chosen = reinterpret_cast<std::int32_t*>(workspace.data());
  if (auto done = run.each(detail::choose_top_work(detail::top_rows{of}, k, chosen, k)); !done) return done;
  return run.each(detail::order_top_work(of, k, chosen, out, out_stride, order == top_order::by_score));
}

}  // namespace v0
}  // namespace llmmem
