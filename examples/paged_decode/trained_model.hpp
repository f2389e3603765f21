/// @file
/// A model of train_gpt, read from one of its checkpoints: all of a decode step except attention over the
/// cache.
#pragma once

#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/ids.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/text.hpp"
#include "paged_decode/model.hpp"
#include "train_gpt/exact_math.hpp"
#include "train_gpt/matrix.hpp"
#include "train_gpt/shape.hpp"

namespace paged_decode {

/// A decode step of train_gpt's model. Products, norms and GELU have the bits of `train_gpt::gpt`, regardless
/// of the rest of the batch. The attention of a paged cache sums in another order, so logits differ from
/// those of `train_gpt::gpt` only by rounding.
///
/// @par Thread safety   one caller, because products share scratch memory.
class trained_model {
 public:
  /// @param layers  the parameters of each layer, in the order of `train_gpt::parameter_layout`.
  trained_model(const train_gpt::gpt_shape& shape, std::vector<std::vector<float>> layers)
      : shape_(shape), layers_(std::move(layers)), scratch_(train_gpt::product_scratch_elements) {
    shape_.validate();
    for (std::size_t layer = 0; layer < shape.layers(); ++layer)
      layouts_.push_back(train_gpt::parameter_layout(shape, shape.layer(layer)));
    config_ = {.layers = static_cast<std::uint32_t>(shape.blocks),
               .query_heads = static_cast<std::uint32_t>(shape.heads),
               .kv_heads = static_cast<std::uint32_t>(shape.heads),
               .head_dim = static_cast<std::uint32_t>(shape.head_width()),
               .hidden = static_cast<std::uint32_t>(shape.width),
               .inner = static_cast<std::uint32_t>(shape.inner()),
               .vocabulary = static_cast<std::uint32_t>(train_gpt::vocabulary),
               .window = 0};
  }

  [[nodiscard]] const model_config& config() const noexcept { return config_; }
  [[nodiscard]] const train_gpt::gpt_shape& shape() const noexcept { return shape_; }

  /// @pre every position is below the shape's context
  [[nodiscard]] rows_of_floats embed(std::span<const llmmem::token_id> tokens,
                                     std::span<const std::uint64_t> positions) const {
    const weights of = weights_of(0);
    rows_of_floats out(tokens.size(), shape_.width);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const float* const token =
          of[train_gpt::embedding_tensor::tokens].row(static_cast<std::size_t>(tokens[row]));
      const float* const position = of[train_gpt::embedding_tensor::positions].row(positions[row]);
      for (std::size_t c = 0; c < shape_.width; ++c)
        out[row][c] = token[c] + position[c];
    }
    return out;
  }

  [[nodiscard]] projected project(std::uint32_t block, const rows_of_floats& x,
                                  std::span<const std::uint64_t> /*positions*/) const {
    using enum train_gpt::block_tensor;
    const weights of = weights_of(block + std::size_t{1});
    const rows_of_floats qkv =
        affine(normalized(x, of[norm1_scale].data, of[norm1_shift].data), of[qkv_weight], of[qkv_bias].data);
    projected out{{x.rows(), shape_.width}, {x.rows(), shape_.width}, {x.rows(), shape_.width}};
    for (std::size_t row = 0; row < x.rows(); ++row) {
      const std::span<const float> all = qkv[row];
      std::ranges::copy(all.subspan(0, shape_.width), out.queries[row].begin());
      std::ranges::copy(all.subspan(shape_.width, shape_.width), out.keys[row].begin());
      std::ranges::copy(all.subspan(2 * shape_.width, shape_.width), out.values[row].begin());
    }
    return out;
  }

  /// Adds a block's output to `x`, given the results of its heads' attention.
  void finish_layer(std::uint32_t block, rows_of_floats& x, const rows_of_floats& attended) const {
    using enum train_gpt::block_tensor;
    const weights of = weights_of(block + std::size_t{1});
    x = affine(attended, of[project_weight], of[project_bias].data, &x);
    rows_of_floats inner = affine(normalized(x, of[norm2_scale].data, of[norm2_shift].data),
                                  of[expand_weight], of[expand_bias].data);
    for (float& each : inner.all())
      each = gelu(each);
    x = affine(inner, of[contract_weight], of[contract_bias].data, &x);
  }

  /// For each row, the logit of each byte.
  [[nodiscard]] rows_of_floats logits(const rows_of_floats& x) const {
    using enum train_gpt::head_tensor;
    const weights of = weights_of(shape_.blocks + 1);
    const rows_of_floats in = normalized(x, of[norm_scale].data, of[norm_shift].data);
    rows_of_floats out(x.rows(), train_gpt::vocabulary);
    add_product(out, in, of[weight]);
    return out;
  }

 private:
  using weights = train_gpt::layer_view<const float>;
  using weight_matrix = train_gpt::matrix<const float>;

  [[nodiscard]] weights weights_of(std::size_t layer) const noexcept {
    return {layers_[layer], layouts_[layer]};
  }

  void add_product(rows_of_floats& y, const rows_of_floats& x, const weight_matrix& w) const {
    train_gpt::multiply_add<float>(train_gpt::as_matrix(y.all(), y.columns()),
                                   train_gpt::as_matrix(x.all(), x.columns()), w, scratch_);
  }

  /// added + bias + x w, or without `added` if it is omitted.
  [[nodiscard]] rows_of_floats affine(const rows_of_floats& x, const weight_matrix& w, const float* bias,
                                      const rows_of_floats* added = nullptr) const {
    rows_of_floats y(x.rows(), w.columns);
    for (std::size_t row = 0; row < y.rows(); ++row) {
      for (std::size_t j = 0; j < w.columns; ++j)
        y[row][j] = added == nullptr ? bias[j] : (*added)[row][j] + bias[j];
    }
    add_product(y, x, w);
    return y;
  }

  /// The operations of `train_gpt::gpt`'s norm, in its order.
  [[nodiscard]] static rows_of_floats normalized(const rows_of_floats& x, const float* scale,
                                                 const float* shift) {
    rows_of_floats y(x.rows(), x.columns());
    const float share = 1 / static_cast<float>(x.columns());
    for (std::size_t row = 0; row < x.rows(); ++row) {
      const std::span<const float> from = x[row];
      const float mean =
          train_gpt::ordered_sum<float>(from.size(), [&](std::size_t c) { return from[c]; }) * share;
      const float variance =
          train_gpt::ordered_sum<float>(from.size(),
                                        [&](std::size_t c) { return (from[c] - mean) * (from[c] - mean); }) *
          share;
      const float inverse = 1 / std::sqrt(variance + 1e-5F);
      for (std::size_t c = 0; c < from.size(); ++c)
        y[row][c] = (from[c] - mean) * inverse * scale[c] + shift[c];
    }
    return y;
  }

  /// The operations of `train_gpt::gpt`'s GELU.
  [[nodiscard]] static float gelu(float v) noexcept {
    constexpr float rate = 0.7978845608028654F;
    constexpr float cubic = 0.044715F;
    return 0.5F * v * (1 + train_gpt::exact_tanh(rate * (v + cubic * v * v * v)));
  }

  train_gpt::gpt_shape shape_;
  model_config config_{};
  std::vector<std::vector<float>> layers_;
  std::vector<train_gpt::layer_layout> layouts_{};
  mutable std::vector<float> scratch_;
};

namespace detail {

/// Returns the number after `name` in a run's description: `layers 6 width 256 heads 8 ...`.
[[nodiscard]] inline std::optional<std::uint64_t> number_after(std::string_view text, std::string_view name) {
  const std::size_t at = text.find(std::string(name) + " ");
  if (at == std::string_view::npos || (at != 0 && text[at - 1] != ' ')) return std::nullopt;
  const std::string_view rest = text.substr(at + name.size() + 1);
  return example::parse_count(rest.substr(0, rest.find(' ')));
}

/// The shape of a checkpoint's model: from its tensors, and, for the number of heads, which no tensor shows,
/// from the run's description.
/// @throws llmmem::format_error  for another model's checkpoint; the text says what is missing or differs.
[[nodiscard]] inline train_gpt::gpt_shape shape_of(llmmem::posix_storage<>& storage,
                                                   const std::string& folder,
                                                   const llmmem::found_checkpoint& found) {
  const auto wrong = [&](const std::string& why) {
    return llmmem::format_error(
        fmt::format("{}/{}: {}; --weights takes a folder that train_gpt wrote with "
                    "--checkpoint-dir",
                    example::printable(folder, 512), found.folder, why));
  };
  const auto sizes_of = [&](const std::string& name) -> const std::vector<std::uint64_t>& {
    for (const llmmem::checkpoint_tensor& each : found.manifest.tensors) {
      if (each.name != name) continue;
      if (each.shape.size() != 2)
        throw wrong(fmt::format("tensor {} has {} dimensions, and 2 are needed", name, each.shape.size()));
      return each.shape;
    }
    throw wrong("it has no tensor " + name);
  };
  const std::vector<std::uint64_t>& tokens = sizes_of("wte.weight");
  if (tokens[0] != train_gpt::vocabulary) {
    throw wrong(fmt::format("tensor wte.weight is of {} tokens, and a model of bytes has {}", tokens[0],
                            train_gpt::vocabulary));
  }
  train_gpt::gpt_shape shape{.blocks = 0, .width = static_cast<std::size_t>(tokens[1]), .batch = 1};
  shape.context = static_cast<std::size_t>(sizes_of("wpe.weight")[0]);
  const auto has = [&](const std::string& name) {
    return std::ranges::any_of(found.manifest.tensors, [&](const auto& each) { return each.name == name; });
  };
  while (has(fmt::format("h.{}.attn.c_attn.weight", shape.blocks)))
    ++shape.blocks;
  if (shape.blocks == 0) throw wrong("it has no tensor h.0.attn.c_attn.weight");
  const auto extra = llmmem::load_extra(storage, found, 0, "run");
  if (!extra) throw wrong("it does not say what run it is of, and so not how many heads the model has");
  const std::string run(reinterpret_cast<const char*>(extra->data()), extra->size());
  const auto check = [&](const char* name, std::size_t there) {
    if (number_after(run, name) != there) {
      throw wrong(fmt::format("its run is \"{}\", and its tensors have {} {}", example::printable(run, 200),
                              name, there));
    }
  };
  check("layers", shape.blocks);
  check("width", shape.width);
  check("context", shape.context);
  const auto heads = number_after(run, "heads");
  if (!heads) throw wrong(fmt::format("its run is \"{}\", without heads", example::printable(run, 200)));
  shape.heads = static_cast<std::size_t>(*heads);
  try {
    shape.validate();
  } catch (const llmmem::argument_error& why) {
    throw wrong(why.what());
  }
  return shape;
}

}  // namespace detail

/// Reads the newest complete checkpoint of a folder of train_gpt, and verifies every byte. If newer ones are
/// damaged, `notes` says so.
/// @throws llmmem::system_error  if the folder does not exist; `format_error` if it has no checkpoint of
///         train_gpt, `storage_error` if it cannot be read.
[[nodiscard]] inline trained_model load_trained_model(const std::string& folder, std::FILE* notes = stderr) {
  if (std::error_code why; !std::filesystem::is_directory(folder, why)) {
    throw llmmem::system_error(fmt::format("--weights {}: {}; train_gpt --checkpoint-dir makes one",
                                           example::printable(folder, 512),
                                           why ? why.message() : "it is no folder"));
  }
  llmmem::posix_storage<> storage(folder);
  const llmmem::checkpoint_search search = llmmem::find_checkpoint(storage);
  if (!search.found) {
    throw llmmem::format_error(fmt::format("--weights {}: {}; train_gpt --checkpoint-dir saves one",
                                           example::printable(folder, 512), search.message()));
  }
  if (!search.skipped.empty())
    example::write(
        notes,
        fmt::format("paged_decode: --weights {}: {}\n", example::printable(folder, 512), search.message()),
        "notes");
  const train_gpt::gpt_shape shape = detail::shape_of(storage, folder, *search.found);
  std::vector<std::vector<float>> layers;
  std::vector<llmmem::wanted_tensor> wanted;
  std::vector<std::pair<std::size_t, std::size_t>> places;  // layer, first element
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const train_gpt::layer_layout layout = train_gpt::parameter_layout(shape, shape.layer(i));
    layers.emplace_back(layout.elements);
    for (const train_gpt::tensor_place& each : layout.tensors) {
      std::vector<std::uint64_t> sizes{each.columns};
      if (each.rows != 1) sizes.insert(sizes.begin(), each.rows);
      wanted.push_back(
          {.name = each.name, .part = {}, .type = llmmem::safetensors_type::f32, .shape = std::move(sizes)});
      places.emplace_back(i, each.offset);
    }
  }
  llmmem::load_checkpoint(storage, *search.found, wanted,
                          [&](std::uint32_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                            const auto [layer, first] = places[tensor];
                            const auto into = std::as_writable_bytes(std::span(layers[layer]).subspan(first));
                            std::memcpy(into.data() + offset, bytes.data(), bytes.size());
                          });
  return {shape, std::move(layers)};
}

}  // namespace paged_decode
