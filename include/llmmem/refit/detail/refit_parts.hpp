/// @file
/// Rules applied to two catalogues: the parts of which every element of a target tensor is in exactly one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/refit/refit_part.hpp>
#include <llmmem/refit/refit_rules.hpp>
#include <llmmem/refit/refit_tensor.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] constexpr bool is_float_weight(dtype type) noexcept {
  return type == dtype::f32 || type == dtype::bf16 || type == dtype::f16;
}

/// Returns the type in which elements travel.
/// @throws argument_error  when nothing converts between the types.
[[nodiscard]] inline dtype wire_of(const refit_tensor& source, const refit_tensor& target,
                                   const refit_plan_options& options) {
  const auto refuse = [&](const std::string& why) -> argument_error {
    return argument_error("refit: '" + source.name + "' is " + std::string(name_of(source.element)) + ", '" +
                          target.name + "' is " + std::string(name_of(target.element)) + ": " + why);
  };
  if (source.group != 0)
    throw refuse("a quantised tensor cannot be a source; name the one that it was quantised from");
  if (target.group != 0) {
    if (target.group != 32 && target.group != 64 && target.group != 128)
      throw refuse("groups have 32, 64 or 128 elements");
    if (target.element != dtype::int8 && target.element != dtype::fp8_e4m3)
      throw refuse("groups are quantised to int8 or fp8_e4m3");
    if (!is_float_weight(source.element)) throw refuse("only f32, bf16 and f16 are quantised");
    if (!is_float_weight(options.quantizes_from)) throw refuse("quantizes_from is f32, bf16 or f16");
    return source.element == dtype::f32 ? options.quantizes_from : source.element;
  }
  if (source.element == target.element) return source.element;
  if (source.element == dtype::f32 && is_float_weight(target.element)) return target.element;
  if (target.element == dtype::f32 && is_float_weight(source.element)) return source.element;
  throw refuse("only f32 is converted to and from bf16 and f16");
}

/// The parts of one plan, by rule.
class refit_part_maker {
 public:
  refit_part_maker(std::span<const refit_tensor> source, std::span<const refit_tensor> target,
                   const refit_plan_options& options)
      : source_(source), target_(target), options_(options), filled_(target.size()) {
    by_name_.resize(source.size());
    for (std::size_t i = 0; i < source.size(); ++i)
      by_name_[i] = i;
    std::ranges::sort(by_name_, {}, [&](std::size_t at) -> const std::string& { return source_[at].name; });
    for (std::size_t i = 1; i < by_name_.size(); ++i) {
      if (source_[by_name_[i]].name == source_[by_name_[i - 1]].name)
        throw argument_error("refit: two source tensors have the name '" + source_[by_name_[i]].name + "'");
    }
    used_.resize(source.size());
  }

  void apply(std::span<const refit_rule> rules) {
    std::vector<bool> has_rule(target_.size());
    for (const refit_rule& rule : rules) {
      check_names(rule);
      bool is_met = false;
      for (std::size_t t = 0; t < target_.size(); ++t) {
        const auto star = star_of(rule.target, target_[t].name);
        if (!star) continue;
        is_met = true;
        has_rule[t] = true;
        add(source_named(with_star(rule.source, *star), target_[t].name), t, rule.from, rule.to);
      }
      if (!is_met)
        throw argument_error("refit: rule '" + rule.source + "' -> '" + rule.target +
                             "': no target tensor has that name");
    }
    for (std::size_t t = 0; t < target_.size(); ++t) {
      if (!has_rule[t]) add(source_named(target_[t].name, target_[t].name), t, {}, {});
      check_cover(t);
    }
  }

  [[nodiscard]] std::vector<refit_part> parts() const {
    std::vector<refit_part> all;
    for (const auto& each : filled_)
      all.insert(all.end(), each.begin(), each.end());
    return all;
  }
  [[nodiscard]] std::vector<std::string> unused() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < source_.size(); ++i) {
      if (!used_[i]) names.push_back(source_[i].name);
    }
    return names;
  }

 private:
  [[nodiscard]] std::size_t source_named(const std::string& name, const std::string& target) const {
    const auto found = std::ranges::lower_bound(
        by_name_, name, {}, [&](std::size_t at) -> const std::string& { return source_[at].name; });
    if (found == by_name_.end() || source_[*found].name != name)
      throw argument_error("refit: target tensor '" + target + "' takes '" + name +
                           "', which no source tensor is named; add a rule for it");
    return *found;
  }

  static void check_bands(const refit_tensor& tensor, const refit_bands& bands) {
    if (bands.axis == split_axis::none || bands.count == 0 || bands.run == 0) return;
    const std::uint64_t most = bands.axis == split_axis::rows ? tensor.shape.rows() : tensor.shape.columns();
    const bool fits =
        bands.run <= most && bands.first <= most - bands.run &&
        (bands.count == 1 ||
         (bands.stride >= bands.run && bands.count - 1 <= (most - bands.run - bands.first) / bands.stride));
    if (fits) return;
    throw argument_error("refit: " + std::to_string(bands.count) + " bands of " + std::to_string(bands.run) +
                         (bands.axis == split_axis::rows ? " rows from " : " columns from ") +
                         std::to_string(bands.first) + " on, " + std::to_string(bands.stride) +
                         " apart, overlap or pass the end of '" + tensor.name + "', which has " +
                         std::to_string(most));
  }

  /// The i-th band as elements.
  [[nodiscard]] static element_runs elements_of(const refit_tensor& tensor, split_axis axis,
                                                index_range range) {
    return axis == split_axis::rows ? element_runs::rows(tensor.shape, range)
                                    : element_runs::columns(tensor.shape, range);
  }

  /// All bands of rows as one set, in canonical form.
  [[nodiscard]] static element_runs rows_as_runs(const refit_tensor& tensor, const refit_bands& bands) {
    const std::uint64_t columns = tensor.shape.columns();
    const std::uint64_t run = bands.run * columns;
    if (run * bands.count == 0) return {};
    if (bands.count == 1 || bands.stride == bands.run)
      return element_runs::flat_range(bands.first * columns, run * bands.count);
    return {bands.first * columns, run, bands.stride * columns, bands.count};
  }

  void add(std::size_t s, std::size_t t, refit_bands from, refit_bands to) {
    const refit_tensor& source = source_[s];
    const refit_tensor& target = target_[t];
    const dtype wire = wire_of(source, target, options_);
    used_[s] = true;
    const auto refuse = [&](const std::string& why) -> argument_error {
      const auto text = [](const refit_tensor& of) {
        return "'" + of.name + "' (" + std::to_string(of.shape.rows()) + " x " +
               std::to_string(of.shape.columns()) + ")";
      };
      return argument_error("refit: " + text(source) + " -> " + text(target) + ": " + why);
    };
    const auto put = [&](const element_runs& a, const element_runs& b) {
      if (!a.empty() || !b.empty())
        filled_[t].push_back(
            {tensor_id{static_cast<std::uint32_t>(s)}, tensor_id{static_cast<std::uint32_t>(t)}, a, b, wire});
    };
    check_bands(source, from);
    check_bands(target, to);
    if (from.axis == split_axis::none && to.axis == split_axis::none) {
      if (source.shape.rows() != target.shape.rows() || source.shape.columns() != target.shape.columns())
        throw refuse("the shapes differ; name rows or columns, and transpose before: a refit does not");
      return put(element_runs::all_of(source.shape.elements()),
                 element_runs::all_of(target.shape.elements()));
    }
    const split_axis axis = from.axis == split_axis::none ? to.axis : from.axis;
    if (to.axis != split_axis::none && to.axis != axis)
      throw refuse("rows of one do not become columns of the other: transpose before");
    const auto whole = [&](refit_bands& bands, const refit_tensor& of) {
      if (bands.axis != split_axis::none) return;
      const std::uint64_t all = axis == split_axis::rows ? of.shape.rows() : of.shape.columns();
      bands = {axis, 0, all, all, 1};
    };
    whole(from, source);
    whole(to, target);
    // Rows of other lengths are flat ranges, so they are counted in elements.
    const bool is_flat = axis == split_axis::rows && source.shape.columns() != target.shape.columns();
    if (axis == split_axis::columns && source.shape.rows() != target.shape.rows())
      throw refuse("columns of tensors with different rows");
    const std::uint64_t a_unit = is_flat ? source.shape.columns() : 1;
    const std::uint64_t b_unit = is_flat ? target.shape.columns() : 1;
    if (from.run * a_unit * from.count != to.run * b_unit * to.count)
      throw refuse(std::to_string(from.run * a_unit * from.count) +
                   (is_flat ? " elements" : " bands' width") + " become " +
                   std::to_string(to.run * b_unit * to.count));
    if (axis == split_axis::rows) {
      const element_runs a = rows_as_runs(source, from);
      const element_runs b = rows_as_runs(target, to);
      if (a.count <= 1 || b.count <= 1) return put(a, b);
    }
    std::uint64_t i = 0;
    std::uint64_t j = 0;
    std::uint64_t a_done = 0;
    std::uint64_t b_done = 0;
    while (i < from.count && j < to.count && from.run * a_unit != 0) {
      const std::uint64_t now = std::min(from.run * a_unit - a_done, to.run * b_unit - b_done);
      const index_range a{(from.first + i * from.stride) * a_unit + a_done, now};
      const index_range b{(to.first + j * to.stride) * b_unit + b_done, now};
      if (is_flat) {
        put(element_runs::flat_range(a.first, now), element_runs::flat_range(b.first, now));
      } else {
        put(elements_of(source, axis, a), elements_of(target, axis, b));
      }
      a_done += now;
      b_done += now;
      if (a_done == from.run * a_unit) {
        a_done = 0;
        ++i;
      }
      if (b_done == to.run * b_unit) {
        b_done = 0;
        ++j;
      }
    }
  }

  void check_cover(std::size_t t) const {
    const std::vector<refit_part>& parts = filled_[t];
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      sum += parts[i].to.elements();
      if (target_[t].group != 0 && parts[i].wire != parts[0].wire)
        throw argument_error("refit: the sources of '" + target_[t].name +
                             "' have different types, but a quantised tensor arrives in one");
      for (std::size_t j = 0; j < i; ++j) {
        if (parts[i].to.begin >= parts[j].to.end() || parts[j].to.begin >= parts[i].to.end()) continue;
        intersect(parts[i].to, parts[j].to, [&](std::uint64_t first, std::uint64_t) {
          throw argument_error("refit: two rules fill element " + std::to_string(first) +
                               " of target tensor '" + target_[t].name + "'");
        });
      }
    }
    if (sum == target_[t].shape.elements()) return;
    throw argument_error("refit: the rules fill " + std::to_string(sum) + " of the " +
                         std::to_string(target_[t].shape.elements()) + " elements of target tensor '" +
                         target_[t].name + "'");
  }

  std::span<const refit_tensor> source_;
  std::span<const refit_tensor> target_;
  const refit_plan_options& options_;
  std::vector<std::size_t> by_name_{};  // source tensors
  std::vector<bool> used_{};
  std::vector<std::vector<refit_part>> filled_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
