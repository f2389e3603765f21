/// @file
/// `reed_solomon`: k pieces of data and m of parity, of which any m may be lost.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/detail/reed_solomon_body.hpp>
#include <llmmem/redundancy/gf_engine.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A systematic Reed-Solomon code by a Cauchy matrix (`code_coefficient`): data pieces stay unchanged, and
/// any k of the k + m pieces restore the others.
///
///     reed_solomon<> code({.data = 4, .parity = 2});
///     code.encode(data, parity).value();
///     const rebuild_plan plan = plan_rebuild(code.shape(), lost);
///     code.rebuild(plan, sources_in_the_order_of_the_plan, lost_pieces).value();
///
/// Pieces may have any alignment and different lengths; a shorter one counts as if zeros followed it. Parity
/// pieces are at least as long as the longest data piece. For one parity piece `xor_parity.hpp` is faster.
/// Only `verify` detects that a piece is damaged; checksums show which one.
///
/// @tparam Engine   computes the sums of products; `isal_gf_engine` (`llmmem::isal`) computes the same bytes.
/// @par Complexity      per byte of a piece, `encode` k m products, `rebuild` k for each target. Only
///                      `rebuild` allocates: a few KiB for its coefficients.
/// @par Thread safety   any number of threads, on different destinations.
/// @par Errors          the constructor throws `argument_error` for an invalid shape.
template <gf_engine Engine = portable_gf_engine>
class reed_solomon {
 public:
  explicit reed_solomon(const code_shape& shape, Engine engine = {})
      : shape_(checked_shape(shape)), engine_(std::move(engine)) {
    std::vector<std::uint8_t> coefficients;
    coefficients.reserve(std::size_t{shape.data} * shape.parity);
    for (std::uint32_t parity = shape.data; parity < shape.pieces(); ++parity) {
      for (std::uint32_t data = 0; data < shape.data; ++data)
        coefficients.push_back(code_coefficient(shape, piece_id{parity}, piece_id{data}));
    }
    matrix_ = engine_.prepare(coefficients, shape.data);
  }

  [[nodiscard]] const code_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const Engine& engine() const noexcept { return engine_; }

  /// Computes all parity pieces from all data pieces.
  /// @return `errc::size_mismatch` if the number of spans differs from the shape's (wanted = the shape's,
  ///         found = the number of spans), `errc::past_the_bytes` if data piece `index` is longer than a
  ///         parity piece. In both cases nothing is written.
  result<void> encode(std::span<const std::span<const std::byte>> data,
                      std::span<const std::span<std::byte>> parity) const noexcept {
    const failure why = check(data, parity, "reed_solomon::encode");
    if (why.code != errc::ok) return why;
    detail::code_product(engine_, matrix_, data, parity);
    return {};
  }

  /// Updates all parity pieces after a data piece changed from `before` to `after`.
  /// @par Complexity   two passes over the piece, one over each parity; the other data pieces are not needed.
  /// @return as `encode`, and `errc::out_of_range` if `changed` is not a data piece.
  result<void> update(piece_id changed, std::span<const std::byte> before, std::span<const std::byte> after,
                      std::span<const std::span<std::byte>> parity) const noexcept {
    constexpr const char* where = "reed_solomon::update";
    if (to_index(changed) >= shape_.data) {
      return failure{
          .code = errc::out_of_range, .wanted = to_index(changed), .found = shape_.data - 1, .where = where};
    }
    const failure why = check_parity(before.size() < after.size() ? after.size() : before.size(),
                                     to_index(changed), parity, where);
    if (why.code != errc::ok) return why;
    detail::code_update(engine_, matrix_, to_index(changed), before, after, parity);
    return {};
  }

  /// Returns the first parity piece that does not match the data, or nothing if all match.
  /// @par Complexity   as `encode`, in blocks of a few KiB on the stack.
  /// @return as `encode`.
  [[nodiscard]] result<std::optional<piece_id>> verify(
      std::span<const std::span<const std::byte>> data,
      std::span<const std::span<const std::byte>> parity) const noexcept {
    const failure why = check(data, parity, "reed_solomon::verify");
    if (why.code != errc::ok) return why;
    const std::size_t found = detail::code_verify(engine_, matrix_, data, parity);
    if (found == parity.size()) return std::optional<piece_id>{};
    return std::optional<piece_id>{piece_id{shape_.data + static_cast<std::uint32_t>(found)}};
  }

  /// Computes the first bytes of the plan's targets, as many as each span has, from the plan's sources, which
  /// are complete pieces in the plan's order. If a span is longer than its piece was, zeros follow.
  ///
  /// @return `errc::size_mismatch` if the number of spans differs from the plan's, or the plan has another k.
  ///         Nothing is written then.
  /// @throws std::bad_alloc  if there is no memory for the coefficients.
  result<void> rebuild(const rebuild_plan& plan, std::span<const std::span<const std::byte>> sources,
                       std::span<const std::span<std::byte>> targets) const {
    constexpr const char* where = "reed_solomon::rebuild";
    if (plan.sources.size() != shape_.data) return mismatch(shape_.data, plan.sources.size(), where);
    if (sources.size() != plan.sources.size()) return mismatch(plan.sources.size(), sources.size(), where);
    if (targets.size() != plan.targets.size() || targets.size() > max_code_pieces)
      return mismatch(plan.targets.size(), targets.size(), where);
    if (plan.coefficients.size() != plan.sources.size() * plan.targets.size())
      return mismatch(plan.sources.size() * plan.targets.size(), plan.coefficients.size(), where);
    if (targets.empty()) return {};
    detail::code_product(engine_, engine_.prepare(plan.coefficients, shape_.data), sources, targets);
    return {};
  }

 private:
  static failure mismatch(std::uint64_t wanted, std::uint64_t found, const char* where) noexcept {
    return {.code = errc::size_mismatch, .wanted = wanted, .found = found, .where = where};
  }

  template <class Byte>
  [[nodiscard]] failure check(std::span<const std::span<const std::byte>> data,
                              std::span<const std::span<Byte>> parity, const char* where) const noexcept {
    if (data.size() != shape_.data) return mismatch(shape_.data, data.size(), where);
    std::size_t longest = 0;
    for (std::size_t i = 1; i < data.size(); ++i) {
      if (data[i].size() > data[longest].size()) longest = i;
    }
    return check_parity(data[longest].size(), static_cast<std::uint32_t>(longest), parity, where);
  }

  template <class Byte>
  [[nodiscard]] failure check_parity(std::size_t longest, std::uint32_t piece,
                                     std::span<const std::span<Byte>> parity,
                                     const char* where) const noexcept {
    if (parity.size() != shape_.parity) return mismatch(shape_.parity, parity.size(), where);
    for (const std::span<Byte> each : parity) {
      if (each.size() < longest) {
        return {.code = errc::past_the_bytes,
                .index = piece,
                .wanted = longest,
                .found = each.size(),
                .where = where};
      }
    }
    return {};
  }

  code_shape shape_;
  Engine engine_;
  typename Engine::matrix matrix_{};
};

}  // namespace v0
}  // namespace llmmem
