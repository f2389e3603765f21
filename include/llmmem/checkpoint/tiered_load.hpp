/// @file
/// `load_into`: loads tensors of a checkpoint into tensors of a `tiered_buffer`, regardless of the chunks
/// that hold them.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/part_slices.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Returns the input of `map_to_chunks` for tensors described for a checkpoint: the bytes of each tensor, or
/// of the part kept here.
/// @throws argument_error, length_error  as `bytes_of`.
[[nodiscard]] inline std::vector<tensor_size> sizes_of(std::span<const state_tensor> described) {
  std::vector<tensor_size> sizes;
  for (const state_tensor& each : described) {
    const std::uint64_t elements =
        each.part ? each.part->elements() : tensor_shape::of(each.shape).elements();
    sizes.push_back({.bytes = bytes_of(each.type, elements, "tensor " + each.name)});
  }
  return sizes;
}

/// The options for loading tensors into chunks.
struct tensor_load_options {
  verification verify = verification::checksums;
  std::uint32_t readers = 4;  ///< threads that read and check
  /// Bytes of parts written at once, if tier 0 has that many; more bytes mean fewer repeated reads.
  std::uint64_t window_bytes = std::uint64_t{64} << 20;
};

namespace detail {

/// Loads parts of tensors, as many at once as tier 0 allows.
template <class Tensors>
class tensor_loading {
 public:
  tensor_loading(storage_ref storage, const found_checkpoint& from, std::span<const state_tensor> described,
                 Tensors& tensors, const tensor_load_options& options)
      : loader_(storage, from,
                {.verify = options.verify, .readers = options.readers, .sink = sink_calls::by_readers}),
        described_(described),
        tensors_(&tensors),
        window_bytes_(options.window_bytes) {}

  load_report run(std::span<const std::uint32_t> order) {
    try {
      for (const std::uint32_t each : order)
        add(tensor_id{each});
      load();
    } catch (...) {
      give_up();
      throw;
    }
    return report_;
  }

 private:
  using lease = typename Tensors::write_lease;

  void add(tensor_id tensor) {
    const std::size_t parts = tensors_->mapping().parts(tensor).size();
    for (std::uint32_t part = 0; part < parts; ++part) {
      auto taken = tensors_->write(tensor, part, tiering::wait_complete);
      if (!taken && !leases_.empty()) {  // the held leases may be the reason
        load();
        taken = tensors_->write(tensor, part, tiering::wait_complete);
      }
      touched_.push_back(tensor);
      leases_.push_back(std::move(taken).value());
      want(to_index(tensor), tensors_->mapping().parts(tensor)[part].begin, leases_.back().span());
      bytes_ += leases_.back().span().size();
      if (bytes_ >= window_bytes_) load();
    }
  }

  void want(std::uint32_t number, std::uint64_t begin, std::span<std::byte> into) {
    const state_tensor& tensor = described_[number];
    const element_runs part =
        tensor.part.value_or(element_runs::all_of(tensor_shape::of(tensor.shape).elements()));
    for (const part_slice& each : slices_of(tensor.type, part, begin, into, tensor.name)) {
      wanted_.push_back({tensor.name, each.elements, tensor.type, tensor.shape});
      places_.push_back(each);
    }
  }

  void load() {
    if (wanted_.empty()) return;
    const load_report one =
        loader_.load(wanted_, [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> bytes) {
          places_[i].take(offset, bytes);
        });
    report_.bytes += one.bytes;
    report_.read_bytes += one.read_bytes;
    report_.files += one.files;
    report_.lookups += one.lookups;
    forget();
    touched_.clear();
  }
  void forget() noexcept {
    leases_.clear();
    wanted_.clear();
    places_.clear();
    bytes_ = 0;
  }
  /// Discards the contents of leased chunks and of partly loaded tensors.
  void give_up() noexcept {
    forget();
    for (const tensor_id each : touched_)
      static_cast<void>(tensors_->discard(each));
  }

  checkpoint_loader loader_;
  std::span<const state_tensor> described_;
  Tensors* tensors_;
  std::uint64_t window_bytes_;
  std::vector<lease> leases_{};
  std::vector<wanted_tensor> wanted_{};
  std::vector<part_slice> places_{};
  std::vector<tensor_id> touched_{};
  std::uint64_t bytes_ = 0;
  load_report report_{};
};

/// Returns the numbers of tensors in file order, as far as a manifest shows it, so that adjacent data is read
/// once.
[[nodiscard]] inline std::vector<std::uint32_t> in_file_order(const found_checkpoint& from,
                                                              std::span<const state_tensor> described) {
  std::vector<std::pair<std::string_view, std::uint32_t>> files;  // of each tensor's first piece
  files.reserve(from.manifest.tensors.size());
  for (const checkpoint_tensor& each : from.manifest.tensors)
    files.emplace_back(each.name, each.pieces.empty() ? 0 : each.pieces.front().file);
  std::ranges::sort(files);
  std::vector<std::uint32_t> order(described.size());
  std::vector<std::uint32_t> file_of(described.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    const auto found =
        std::ranges::lower_bound(files, std::pair<std::string_view, std::uint32_t>(described[i].name, 0U));
    if (found != files.end() && found->first == described[i].name) file_of[i] = found->second;
  }
  std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(file_of[a], bits_of(described[b].type), std::string_view(described[a].name)) <
           std::tuple(file_of[b], bits_of(described[a].type), std::string_view(described[b].name));
  });
  return order;
}

}  // namespace detail

/// Loads each tensor of a checkpoint into the tensor of the same number, regardless of the chunks that hold
/// both, and of the parts in which they were saved.
///
///     const checkpoint_search search = find_checkpoint(storage);
///     load_into(storage, *search.found, described, tensors);
///
/// Bytes go from the files to leases of tier 0, as many at once as fit there. Loaded chunks move down the
/// tiers during the load, as after any write.
///
/// @param described  the tensors' names, types, shapes and parts, as a checkpointer takes them, by number.
/// @param tensors    a `tiered_tensors` or `persistent_tensors`, on a buffer whose tier 0 the host can
///                   access.
/// @par Complexity      the bytes, and O(n log n) for n tensors and parts. Each window that needs any byte of
///                      a checkpoint's chunk reads the chunk again.
/// @par Thread safety   the buffer's thread; no other thread writes the buffer.
/// @throws argument_error  for tensors whose number or sizes differ from the description, and as
///   `load_checkpoint`. @throws format_error, storage_error as there; and the errors of a write lease. The
///   tensors in the window then have no contents; those before them are complete.
template <class Tensors>
load_report load_into(storage_ref storage, const found_checkpoint& from,
                      std::span<const state_tensor> described, Tensors& tensors,
                      const tensor_load_options& options = {}) {
  const chunk_mapping& mapping = tensors.mapping();
  if (described.size() != mapping.tensors()) {
    throw argument_error("load_into: " + std::to_string(described.size()) +
                         " tensors are described, but the buffer has " + std::to_string(mapping.tensors()));
  }
  for (std::uint32_t i = 0; i < described.size(); ++i) {
    const state_tensor& each = described[i];
    const std::uint64_t elements =
        each.part ? each.part->elements() : tensor_shape::of(each.shape).elements();
    const std::uint64_t bytes = bytes_of(each.type, elements, "load_into: tensor " + each.name);
    if (bytes == mapping.bytes(tensor_id{i})) continue;
    throw argument_error("load_into: tensor " + each.name + " is described with " + std::to_string(bytes) +
                         " bytes, but tensor " + std::to_string(i) + " has " +
                         std::to_string(mapping.bytes(tensor_id{i})));
  }
  const std::vector<std::uint32_t> order = detail::in_file_order(from, described);
  return detail::tensor_loading<Tensors>(storage, from, described, tensors, options).run(order);
}

}  // namespace v0
}  // namespace llmmem
