/// @file
/// `diff`: compares two checkpoints tensor by tensor, regardless of the parts in each.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/model/safetensors.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/memory.hpp"
#include "checkpoint_tool/progress.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/tensor_reader.hpp"
#include "checkpoint_tool/values.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// A checkpoint and its folder.
struct compared_checkpoint {
  storage_type& storage;
  llmmem::found_checkpoint found;
};

enum class difference_kind : std::uint8_t { identical, only_in_a, only_in_b, type_or_shape, contents };

[[nodiscard]] constexpr std::string_view to_string(difference_kind kind) noexcept {
  constexpr std::string_view texts[] = {"identical", "only_in_a", "only_in_b", "type_or_shape", "contents"};
  return texts[static_cast<std::size_t>(kind)];
}

/// The difference of two tensors of the same name.
struct tensor_difference {
  std::string name{};
  difference_kind kind = difference_kind::identical;
  const llmmem::checkpoint_tensor* a = nullptr;
  const llmmem::checkpoint_tensor* b = nullptr;
  std::uint64_t differing = 0;      ///< elements with other bits
  std::uint64_t first = 0;          ///< index of the first of them
  std::optional<double> largest{};  ///< absolute difference of numbers that differ
  std::uint64_t not_finite = 0;     ///< differing elements of which one is infinite or NaN
};

/// Bytes read of each checkpoint at once.
inline constexpr std::uint64_t diff_window_bytes = std::uint64_t{16} << 20;

namespace detail {

[[nodiscard]] inline std::vector<const llmmem::checkpoint_tensor*> by_name(
    const llmmem::checkpoint_manifest& manifest) {
  std::vector<const llmmem::checkpoint_tensor*> tensors;
  for (const llmmem::checkpoint_tensor& each : manifest.tensors)
    tensors.push_back(&each);
  std::sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  return tensors;
}

/// Counts the differences of elements from `first` on.
inline void compare(tensor_difference& into, std::uint64_t first, std::span<const std::byte> a,
                    std::span<const std::byte> b) {
  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return;
  const llmmem::safetensors_type type = into.a->type;
  const std::uint64_t bits = bits_of(type);
  const std::uint64_t elements = a.size() * 8 / bits;
  into.kind = difference_kind::contents;
  for (std::uint64_t i = 0; i < elements; ++i) {
    const std::uint64_t of_a = element_bits(a, bits, i);
    const std::uint64_t of_b = element_bits(b, bits, i);
    if (of_a == of_b) continue;
    if (into.differing++ == 0) into.first = first + i;
    if (!is_float(type)) continue;
    const double apart = std::abs(float_value(type, of_a) - float_value(type, of_b));
    if (std::isfinite(apart)) {
      into.largest = std::max(into.largest.value_or(0), apart);
    } else {
      ++into.not_finite;
    }
  }
}

/// Elements of a tensor that are read at once.
struct compared_range {
  std::size_t tensor = 0;  // index among the differences
  std::uint64_t first = 0;
  std::uint64_t offset = 0;  // in the memory
  std::uint64_t bytes = 0;
};

/// Compares the contents of tensors of the same types and shapes, in windows of memory.
class content_comparer {
 public:
  content_comparer(const compared_checkpoint& a, const compared_checkpoint& b,
                   std::vector<tensor_difference>& all, std::uint64_t window_bytes, progress& meter)
      : a_(a.storage, a.found),
        b_(b.storage, b.found),
        all_(&all),
        window_bytes_(window_bytes),
        of_a_(window_bytes),
        of_b_(window_bytes),
        meter_(&meter) {}

  void add(std::size_t number) {
    const tensor_difference& both = (*all_)[number];
    const element_unit unit = whole_byte_unit(both.a->type);
    const std::uint64_t elements = elements_of(*both.a);
    const std::uint64_t total = llmmem::bytes_of(both.a->type, elements, both.name);
    const llmmem::element_runs whole = llmmem::element_runs::all_of(elements);
    for (std::uint64_t done = 0; done < total;) {
      const std::uint64_t room = (window_bytes_ - used_) / unit.bytes * unit.bytes;
      if (room == 0) {
        read();
        continue;
      }
      const std::uint64_t bytes = std::min(room, total - done);
      const auto at = static_cast<std::size_t>(used_);
      a_.want(*both.a, whole, done, of_a_.span().subspan(at, static_cast<std::size_t>(bytes)));
      b_.want(*both.b, whole, done, of_b_.span().subspan(at, static_cast<std::size_t>(bytes)));
      ranges_.push_back({number, done / unit.bytes * unit.elements, used_, bytes});
      used_ += bytes;
      done += bytes;
    }
  }

  /// Reads and compares the added elements.
  void read() {
    a_.read();
    b_.read();
    for (const compared_range& each : ranges_) {
      const auto at = static_cast<std::size_t>(each.offset);
      const auto bytes = static_cast<std::size_t>(each.bytes);
      compare((*all_)[each.tensor], each.first, of_a_.span().subspan(at, bytes),
              of_b_.span().subspan(at, bytes));
      meter_->add(each.bytes);
    }
    ranges_.clear();
    used_ = 0;
  }

 private:
  tensor_reader a_;
  tensor_reader b_;
  std::vector<tensor_difference>* all_;
  std::uint64_t window_bytes_;
  file_memory of_a_;
  file_memory of_b_;
  std::vector<compared_range> ranges_{};
  std::uint64_t used_ = 0;
  progress* meter_;
};

}  // namespace detail

/// Compares all tensors of both, by name. @throws as `llmmem::load_checkpoint`: damaged ones are not
/// compared.
[[nodiscard]] inline std::vector<tensor_difference> compare_checkpoints(
    const compared_checkpoint& a, const compared_checkpoint& b, std::FILE* notes,
    std::uint64_t window_bytes = diff_window_bytes) {
  const auto of_a = detail::by_name(a.found.manifest);
  const auto of_b = detail::by_name(b.found.manifest);
  std::vector<tensor_difference> all;
  std::uint64_t total = 0;
  for (std::size_t i = 0, j = 0; i < of_a.size() || j < of_b.size();) {
    tensor_difference one;
    const bool takes_a = j == of_b.size() || (i < of_a.size() && of_a[i]->name <= of_b[j]->name);
    const bool takes_b = i == of_a.size() || (j < of_b.size() && of_b[j]->name <= of_a[i]->name);
    if (takes_a) one.a = of_a[i++];
    if (takes_b) one.b = of_b[j++];
    one.name = takes_a ? one.a->name : one.b->name;
    if (!takes_b) {
      one.kind = difference_kind::only_in_a;
    } else if (!takes_a) {
      one.kind = difference_kind::only_in_b;
    } else if (one.a->type != one.b->type || one.a->shape != one.b->shape) {
      one.kind = difference_kind::type_or_shape;
    } else {
      total += llmmem::bytes_of(one.a->type, elements_of(*one.a), one.name);
    }
    all.push_back(std::move(one));
  }
  progress meter(notes, "comparing", total);
  detail::content_comparer contents(a, b, all, std::min(window_bytes, std::max<std::uint64_t>(total, 8)),
                                    meter);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].kind == difference_kind::identical) contents.add(i);
  }
  contents.read();
  return all;
}

[[nodiscard]] inline std::uint64_t count_of(const std::vector<tensor_difference>& all, difference_kind kind) {
  return static_cast<std::uint64_t>(std::count_if(
      all.begin(), all.end(), [&](const tensor_difference& each) { return each.kind == kind; }));
}

[[nodiscard]] inline bool is_same(const std::vector<tensor_difference>& all) {
  return count_of(all, difference_kind::identical) == all.size();
}

[[nodiscard]] inline std::string to_report(const compared_checkpoint& a, const compared_checkpoint& b,
                                           const std::vector<tensor_difference>& all) {
  std::string text = fmt::format("a  {}\nb  {}\n", shown(a.storage.path(a.found.folder)),
                                 shown(b.storage.path(b.found.folder)));
  const auto kind_text = [](const llmmem::checkpoint_tensor& tensor) {
    return fmt::format("{} {}", name_of(tensor.type), shape_text(tensor.shape));
  };
  for (const tensor_difference& each : all) {
    switch (each.kind) {
      case difference_kind::identical:
        break;
      case difference_kind::only_in_a:
        text += fmt::format("  only in a      {}  {}\n", shown(each.name), kind_text(*each.a));
        break;
      case difference_kind::only_in_b:
        text += fmt::format("  only in b      {}  {}\n", shown(each.name), kind_text(*each.b));
        break;
      case difference_kind::type_or_shape:
        text += fmt::format("  type or shape  {}  {} in a, {} in b\n", shown(each.name), kind_text(*each.a),
                            kind_text(*each.b));
        break;
      case difference_kind::contents:
        text += fmt::format("  contents       {}  {} of {} differ, the first is {}", shown(each.name),
                            example::grouped(each.differing), counted(elements_of(*each.a), "element"),
                            each.first);
        if (each.largest) text += fmt::format("; by {} at most", *each.largest);
        if (each.not_finite != 0) text += fmt::format("; {} not finite", example::grouped(each.not_finite));
        text += '\n';
        break;
    }
  }
  const auto count = [&](difference_kind kind) { return count_of(all, kind); };
  return text + fmt::format(
                    "{}: {} identical, {} of other contents, {} of another type or shape, {} only in "
                    "a, {} only in b\n",
                    counted(all.size(), "tensor"), count(difference_kind::identical),
                    count(difference_kind::contents), count(difference_kind::type_or_shape),
                    count(difference_kind::only_in_a), count(difference_kind::only_in_b));
}

[[nodiscard]] inline std::string to_json(const compared_checkpoint& a, const compared_checkpoint& b,
                                         const std::vector<tensor_difference>& all) {
  const auto kind_json = [](const llmmem::checkpoint_tensor* tensor) {
    return tensor == nullptr ? std::string("null")
                             : fmt::format(R"({{"type": "{}", "shape": {}}})", name_of(tensor->type),
                                           shape_text(tensor->shape));
  };
  std::vector<std::string> tensors;
  for (const tensor_difference& each : all) {
    const bool differs = each.kind == difference_kind::contents;
    tensors.push_back(
        fmt::format(R"({{"name": {}, "difference": "{}", "a": {}, "b": {}, "differing": {}, "first": {}, )"
                    R"("largest": {}, "not_finite": {}}})",
                    example::json_string(each.name), to_string(each.kind), kind_json(each.a),
                    kind_json(each.b), each.differing, differs ? std::to_string(each.first) : "null",
                    each.largest ? fmt::format("{}", *each.largest) : "null", each.not_finite));
  }
  return fmt::format(R"({{"a": {{{}}}, "b": {{{}}}, "identical": {}, "tensors": {}}})"
                     "\n",
                     json_of(a.storage.path(""), a.found.id), json_of(b.storage.path(""), b.found.id),
                     is_same(all), json_lines(tensors));
}

}  // namespace checkpoint_tool
