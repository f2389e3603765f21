/// @file
/// Refits from checkpoints and safetensors folders, and an engine's weights as a file.
#pragma once

#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/safetensors_folder.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/refit/refit_source.hpp>
#include <llmmem/refit/refit_tensor.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::pair<safetensors_type, dtype> refit_types[] = {
    {safetensors_type::f64, dtype::f64},          {safetensors_type::f32, dtype::f32},
    {safetensors_type::bf16, dtype::bf16},        {safetensors_type::f16, dtype::f16},
    {safetensors_type::f8_e4m3, dtype::fp8_e4m3}, {safetensors_type::f8_e5m2, dtype::fp8_e5m2},
    {safetensors_type::i8, dtype::int8}};

[[nodiscard]] constexpr std::optional<dtype> dtype_of(safetensors_type type) noexcept {
  for (const auto& each : refit_types) {
    if (each.first == type) return each.second;
  }
  return {};
}

/// @pre the type is one of the table
[[nodiscard]] constexpr safetensors_type file_type_of(dtype type) noexcept {
  for (const auto& each : refit_types) {
    if (each.second == type) return each.first;
  }
  return safetensors_type::u8;
}

}  // namespace detail

/// The tensors of a checkpoint, of any number of ranks that wrote it, as the source of a refit.
///
/// Each engine's rank opens the checkpoint and is a sender of `sharding::replicated`: then every rank reads
/// what it needs and no byte travels. Or one rank opens it, and sends to the others what they need: it reads
/// a tensor once for each of them. A tensor is read as a whole and held alone, so memory for the largest one
/// is needed.
///
///     refit_checkpoint source(storage, *search.found);
///     const sharding::replicated from(facts_of(source.tensors()), engines);
///
/// @par Thread safety   one thread at a time.
/// @par Errors          those of `load_checkpoint`, thrown by `hold`; the other ranks then have
///   `errc::epoch_revoked` or `errc::refit_abandoned`.
class refit_checkpoint {
 public:
  struct held {
    std::vector<std::byte> piece{};
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return piece; }
  };

  /// Storage and checkpoint outlive it.
  refit_checkpoint(storage_ref storage, const found_checkpoint& from, const load_options& options = {})
      : storage_(storage), from_(&from), options_(options) {
    for (const checkpoint_tensor& each : from.manifest.tensors) {
      if (const auto type = detail::dtype_of(each.type))
        tensors_.push_back({.name = each.name, .shape = tensor_shape::of(each.shape), .element = *type});
    }
  }

  /// Returns the catalogue, in the checkpoint's order; without tensors of types that no refit moves, such as
  /// 64-bit integers.
  [[nodiscard]] std::span<const refit_tensor> tensors() const noexcept LLMMEM_LIFETIMEBOUND {
    return tensors_;
  }
  [[nodiscard]] result<held> hold(tensor_id tensor) {
    const refit_tensor& of = tensors_[to_index(tensor)];
    held made{std::vector<std::byte>(static_cast<std::size_t>(bytes_of(of.shape.elements(), of.element)))};
    const wanted_tensor wanted{.name = of.name};
    const auto sink = [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) {
      std::ranges::copy(bytes, made.piece.begin() + static_cast<std::ptrdiff_t>(offset));
    };
    load_checkpoint(storage_, *from_, {&wanted, 1}, sink, options_);
    read_bytes_ += made.piece.size();
    return made;
  }
  /// Returns the bytes of the tensors that it has read: of each as often as it was held.
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_; }

 private:
  storage_ref storage_;
  const found_checkpoint* from_;
  load_options options_;
  std::uint64_t read_bytes_ = 0;
  std::vector<refit_tensor> tensors_{};
};

/// The tensors of a safetensors folder as the source of a refit. Otherwise as `refit_checkpoint`.
///
///     refit_folder source("/models/step_400");
class refit_folder {
 public:
  explicit refit_folder(const std::string& path)
      : folder_(path), tensors_(folder_.storage(), folder_.found(), {.verify = verification::sizes}) {}
  refit_folder(const refit_folder&) = delete;
  refit_folder& operator=(const refit_folder&) = delete;

  [[nodiscard]] std::span<const refit_tensor> tensors() const noexcept LLMMEM_LIFETIMEBOUND {
    return tensors_.tensors();
  }
  [[nodiscard]] result<refit_checkpoint::held> hold(tensor_id tensor) { return tensors_.hold(tensor); }
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return tensors_.read_bytes(); }

 private:
  safetensors_folder folder_;
  refit_checkpoint tensors_;
};

static_assert(refit_source<refit_checkpoint>);
static_assert(refit_source<refit_folder>);

/// Writes an image as one safetensors file, under another name first: a crash leaves the old file or the new
/// one, complete. The scales of a quantised tensor `w` are the floats `w_scale` [rows, groups]. The metadata
/// `weights` is the image's number. Tensors of more than two dimensions are written as matrices.
///
/// @param rank  has all elements of all tensors: a receiver of `sharding::replicated`.
/// @throws argument_error  for a tensor of which the rank has a part only; `storage_error`.
inline void save_refit(storage_ref storage, const refit_plan& plan, rank_id rank, const refit_image& image,
                       const std::string& file = std::string(published_file)) {
  const std::size_t receiver = refit_plan::place_of(plan.receivers, rank);
  if (receiver == plan.receivers.size())
    throw argument_error("save_refit: rank " + std::to_string(to_index(rank)) + " has no image in the plan");
  std::vector<safetensors_tensor> tensors;
  for (std::size_t t = 0; t < plan.target.size(); ++t) {
    const refit_tensor& each = plan.target[t];
    if (plan.target_set(t, receiver) != element_runs::all_of(each.shape.elements()))
      throw argument_error("save_refit: rank " + std::to_string(to_index(rank)) + " has a part of '" +
                           each.name + "' only; refit a rank of sharding::replicated, and save there");
    std::vector<std::uint64_t> shape;
    if (each.shape.dimensions() > 0) shape.push_back(each.shape.rows());
    if (each.shape.dimensions() > 1) shape.push_back(each.shape.columns());
    tensors.push_back({each.name, detail::file_type_of(each.element), std::move(shape)});
    if (each.group != 0)
      tensors.push_back({each.name + "_scale",
                         safetensors_type::f32,
                         {each.shape.rows(), each.shape.columns() / each.group}});
  }
  const safetensors_layout layout =
      lay_out_safetensors(std::move(tensors), {{"weights", std::to_string(image.number())}});
  const std::string unfinished = file + ".unfinished";
  for (const storage_entry& each : storage.list("")) {
    if (each.name == unfinished) storage.remove(unfinished);
  }
  {
    auto output = storage.create(unfinished, layout.file_bytes());
    const auto write = [&](std::uint64_t offset, std::span<const std::byte> bytes) {
      if (!bytes.empty()) output.finish_write(output.begin_write(offset, bytes));
    };
    write(0, std::as_bytes(std::span(layout.head.data(), layout.head.size())));
    for (const safetensors_entry& entry : layout.header.entries) {
      for (std::uint32_t t = 0; t < plan.target.size(); ++t) {
        const std::uint64_t offset = layout.header.data_begin + entry.begin;
        if (plan.target[t].name == entry.name) write(offset, image.tensor(tensor_id{t}));
        if (plan.target[t].group != 0 && plan.target[t].name + "_scale" == entry.name)
          write(offset, image.scales(tensor_id{t}));
      }
    }
    output.sync();
  }
  storage.replace(unfinished, file);
  storage.sync_folder("");
}

}  // namespace v0
}  // namespace llmmem
