/// @file
/// How `map_to_chunks` places tensors in chunks. Private to tiering/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Places tensors one by one.
class chunk_mapper {
 public:
  chunk_mapper(std::span<const tensor_size> tensors, const chunk_mapping_options& options)
      : options_(options) {
    check_options();
    check_tensors(tensors);
    made_.first_part_.reserve(tensors.size() + 1);
    for (const tensor_size& each : tensors) {
      made_.first_part_.push_back(static_cast<std::uint32_t>(made_.parts_.size()));
      place(each);
    }
    made_.first_part_.push_back(static_cast<std::uint32_t>(made_.parts_.size()));
    finish();
  }

  [[nodiscard]] chunk_mapping made() && { return std::move(made_); }

 private:
  static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

  [[noreturn]] static void refuse(const std::string& why) { throw argument_error("map_to_chunks: " + why); }

  void check_options() const {
    const auto multiple = [&](const char* name, std::uint64_t value) {
      if (value % options_.unit == 0) return;
      refuse(std::string(name) + " " + std::to_string(value) + " is not a multiple of unit " +
             std::to_string(options_.unit));
    };
    if (options_.unit == 0) refuse("unit is 0; it must be at least 1");
    if (options_.split_bytes == 0) refuse("split_bytes is 0; it must be at least unit");
    multiple("split_bytes", options_.split_bytes);
    multiple("group_bytes", options_.group_bytes);
    if (options_.group_bytes > options_.split_bytes) {
      refuse("group_bytes " + std::to_string(options_.group_bytes) + " is more than split_bytes " +
             std::to_string(options_.split_bytes) + ", the most that a chunk has");
    }
  }

  void check_tensors(std::span<const tensor_size> tensors) {
    std::uint64_t parts = 0;
    std::uint64_t padded = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const tensor_size& each = tensors[i];
      const auto which = [&] { return "tensor " + std::to_string(i); };
      if (each.bytes == 0) refuse(which() + " has 0 bytes; leave it out");
      if (!std::has_single_bit(each.alignment)) {
        refuse(which() + " has alignment " + std::to_string(each.alignment) + "; it must be a power of two");
      }
      made_.tensor_bytes_ = checked_add(made_.tensor_bytes_, each.bytes, "map_to_chunks: bytes of tensors");
      padded = checked_add(padded, checked_add(each.bytes, options_.unit, "map_to_chunks: bytes of chunks"),
                           "map_to_chunks: bytes of chunks");
      parts += (each.bytes - 1) / options_.split_bytes + 1;
      if (parts >= none || i + 1 >= none) {
        throw length_error("map_to_chunks: " + which() + " makes it " + std::to_string(parts) +
                           " parts, but a tensor may have at most 2^32 - 2; raise split_bytes");
      }
    }
    made_.parts_.reserve(static_cast<std::size_t>(parts));
  }

  [[nodiscard]] std::uint64_t in_units(std::uint64_t bytes) const noexcept {
    return (bytes - 1) / options_.unit * options_.unit + options_.unit;
  }

  /// Opens a chunk with one part.
  std::uint32_t open_chunk(std::uint64_t begin, std::uint64_t bytes) {
    const auto chunk = static_cast<std::uint32_t>(made_.chunks_.size());
    made_.chunks_.push_back(bytes);
    made_.sharers_.push_back(1);
    made_.parts_.push_back({.chunk = chunk_id{chunk}, .offset = 0, .begin = begin, .bytes = bytes});
    return chunk;
  }

  void place(const tensor_size& tensor) {
    if (tensor.bytes > options_.split_bytes) {
      const std::uint64_t fewest = (tensor.bytes - 1) / options_.split_bytes + 1;
      const std::uint64_t each = in_units((tensor.bytes - 1) / fewest + 1);
      for (std::uint64_t begin = 0; begin < tensor.bytes; begin += each)
        open_chunk(begin, each < tensor.bytes - begin ? each : tensor.bytes - begin);
    } else if (tensor.bytes > options_.group_bytes) {
      open_chunk(0, tensor.bytes);
    } else {
      share(tensor);
    }
  }

  /// Returns the last shared chunk of a set, or `none`.
  [[nodiscard]] std::uint32_t& last_of(std::uint32_t set) {
    std::size_t from = 0;
    for (std::size_t to = open_.size(); from < to;) {
      const std::size_t middle = from + (to - from) / 2;
      if (open_[middle].set < set) {
        from = middle + 1;
      } else {
        to = middle;
      }
    }
    if (from == open_.size() || open_[from].set != set)
      open_.insert(open_.begin() + static_cast<std::ptrdiff_t>(from), {.set = set});
    return open_[from].chunk;
  }

  void share(const tensor_size& tensor) {
    std::uint32_t& open = last_of(tensor.set);
    if (open != none) {
      std::uint64_t& filled = made_.chunks_[open];
      const std::uint64_t pad = (0 - filled) & (tensor.alignment - 1);
      const std::uint64_t left = options_.group_bytes - filled;
      if (pad <= left && tensor.bytes <= left - pad) {
        made_.parts_.push_back(
            {.chunk = chunk_id{open}, .offset = filled + pad, .begin = 0, .bytes = tensor.bytes});
        filled += pad + tensor.bytes;
        ++made_.sharers_[open];
        return;
      }
    }
    open = open_chunk(0, tensor.bytes);
  }

  void finish() {
    std::uint64_t all = 0;
    for (std::uint64_t& each : made_.chunks_) {
      each = in_units(each);
      all += each;
    }
    made_.padding_bytes_ = all - made_.tensor_bytes_;
  }

  chunk_mapping_options options_;
  chunk_mapping made_;
  struct open_set {
    std::uint32_t set = 0;
    std::uint32_t chunk = none;  // its last shared one
  };
  std::vector<open_set> open_;  // by set
};

}  // namespace detail

inline chunk_mapping map_to_chunks(std::span<const tensor_size> tensors,
                                   const chunk_mapping_options& options) {
  return detail::chunk_mapper(tensors, options).made();
}

}  // namespace v0
}  // namespace llmmem
