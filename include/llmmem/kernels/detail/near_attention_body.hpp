/// @file
/// Begins and awaits the holders' work, and does the work of a holder of blocks.
#pragma once

#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/near_attention.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Checks the properties of a query that every holder relies on.
[[nodiscard]] inline result<void> check_query(const near_query& query) noexcept {
  if (query.rows == 0) return {};
  const auto missing = [&](const char* what) { return failure{errc::too_short, 0, query.rows, 0, what}; };
  if (query.sequences == nullptr) return missing("attend_near: query.sequences");
  if (query.lengths == nullptr) return missing("attend_near: query.lengths");
  if (query.queries == nullptr) return missing("attend_near: query.queries");
  return whole(reinterpret_cast<std::uintptr_t>(query.queries), 16, "attend_near: query.queries");
}

/// Consecutive calls, each with the memory after that of the previous one.
class near_calls {
 public:
  near_calls(const near_query& query, std::span<std::byte> memory) noexcept
      : query_(query), stride_(near_part_stride(query.shape())), rest_(memory) {}

  /// Begins nothing after a failure.
  template <class Holder>
  bool begin(Holder& holder) {
    if (first_.code != errc::ok) return false;
    const auto bytes = static_cast<std::size_t>(stride_ * holder.parts());
    auto begun = holder.begin(query_, rest_.first(bytes));
    rest_ = rest_.subspan(bytes);
    if (!begun) first_ = begun.error();
    return begun.has_value();
  }
  /// Waits for all begun work, also after a failure: no holder writes memory when the call returns.
  template <class Holder>
  void finish(Holder& holder, bool has_begun) {
    if (!has_begun) return;
    auto done = holder.finish();
    if (!done) {
      if (first_.code == errc::ok) first_ = done.error();
      return;
    }
    traffic_ += done.value();
  }
  [[nodiscard]] const failure& first_failure() const noexcept { return first_; }
  [[nodiscard]] const near_traffic& traffic() const noexcept { return traffic_; }

 private:
  const near_query& query_;
  std::uint64_t stride_;
  std::span<std::byte> rest_;
  failure first_{};
  near_traffic traffic_{};
};

}  // namespace detail

template <class Run, class Tables>
result<void> table_holder<Run, Tables>::begin(const near_query& query, std::span<std::byte> memory) {
  const kv_layout& layout = cache_.layout;
  const attention_options how{.latents = how_.latents};
  const std::uint64_t keys = detail::attended_elements(layout, how, 0);
  const std::uint64_t values = detail::attended_elements(layout, how, 1);
  if (query.head_dim != keys)
    return failure{errc::size_mismatch, 0, query.head_dim, keys,
                   "table_holder: head_dim of the query and of the cache"};
  if ((layout.has_values || how_.latents != nullptr) && query.value_dim != values)
    return failure{errc::size_mismatch, 0, query.value_dim, values,
                   "table_holder: value_dim of the query and of the cache"};
  auto part = attention_part_in(memory, query.shape());
  if (!part) return part.error();
  query_ = query;
  part_ = part.value();
  return {};
}

template <class Run, class Tables>
result<near_traffic> table_holder<Run, Tables>::finish() {
  attention_options how;
  how.query_heads = query_.query_heads;
  how.element = query_.element;
  how.scale = query_.scale;
  how.window = query_.window;
  how.scales = how_.scales;
  how.split = how_.split;
  how.arithmetic = how_.arithmetic;
  how.out_of_range = how_.out_of_range;
  how.latents = how_.latents;
  const std::uint64_t head = std::uint64_t{query_.head_dim} * bits_of(query_.element) / 8;
  if (auto done = paged_attention_part(
          run_, tables_, {.rows = query_.rows, .sequences = query_.sequences, .lengths = query_.lengths},
          {query_.queries, head * query_.query_heads, head}, part_, cache_, query_.layer, how_.workspace,
          how);
      !done)
    return done.error();
  return near_traffic{};
}

template <class Run, log_base Base, attention_holder... Holders>
result<near_traffic> attend_near(const Run& run, const near_query& query, std::span<std::byte> workspace,
                                 const merged_attention<Base>& out, Holders&... holders) {
  if (auto fits = detail::check_query(query); !fits) return fits.error();
  const attention_part_shape shape = query.shape();
  const std::uint64_t parts = (std::uint64_t{0} + ... + holders.parts());
  if (parts > max_merged_parts)
    return failure{errc::out_of_range, 0, parts, max_merged_parts, "attend_near: parts of all holders"};
  const std::uint64_t needed = near_workspace_bytes(shape, parts);
  if (workspace.size() < needed)
    return failure{errc::too_short, 0, needed, workspace.size(), "attend_near: workspace (bytes)"};
  attention_part views[max_merged_parts];
  const std::uint64_t stride = near_part_stride(shape);
  for (std::uint64_t i = 0; i < parts; ++i) {
    auto view = attention_part_of(workspace.subspan(static_cast<std::size_t>(i * stride)), shape);
    if (!view) return view.error();
    views[i] = view.value();
  }
  detail::near_calls calls(query, workspace);
  // Braces: in the order of the holders.
  const bool begun[] = {calls.begin(holders)..., false};
  std::size_t at = 0;
  (calls.finish(holders, begun[at++]), ...);
  if (calls.first_failure().code != errc::ok) return calls.first_failure();
  if (auto done = merge_attention(run, shape, std::span<const attention_part>(views, parts), out); !done)
    return done.error();
  return calls.traffic();
}

}  // namespace v0
}  // namespace llmmem
