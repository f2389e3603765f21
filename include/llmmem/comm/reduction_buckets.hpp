/// @file
/// `reduction_buckets`: sums many small tensors over all ranks in few large pieces, as they become ready.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How tensors are grouped.
struct bucket_options {
  /// A bucket takes tensors until it has this many bytes. A larger tensor has a bucket of its own.
  std::uint64_t bucket_bytes = std::uint64_t{25} << 20;
  std::uint32_t tag = 0x6275'0000;  ///< the tag of its messages: nothing else uses it at the same time
  reduce_algorithm algorithm = reduce_algorithm::direct;
  const char* name = "reduction_buckets";  ///< the name in error texts; outlives it
};

/// Sums tensors over the ranks. An all-reduce costs a latency even for few bytes, and a model has hundreds of
/// small tensors. So neighbours share a bucket, which is summed as one when its last tensor is ready.
///
///     reduction_buckets sums(ranks, bytes_of_gradients, sum_f32);     // in the order of the backward pass
///     for (layer = last; ...) {
///       ... backward ...
///       sums.ready(tensor, gradient, by).value();   // copied; may sum full buckets
///     }
///     sums.finish([&](std::uint32_t tensor, std::span<const std::byte> sum) { ... }).value();
///
/// Buckets are summed in their order on all ranks, regardless of the order in which tensors become ready on
/// each, because ranks that disagree about the order would deadlock. A bucket waits for its turn. With
/// `reduce_algorithm::direct` the bits equal those of tensors summed one by one.
///
/// @par Complexity      each byte is copied once, and returned in place; memory: all tensors once.
/// @par Thread safety   one thread at a time, which owns the transport: that of an `operation_queue`, to sum
///   while computing.
/// @par Errors          those of the transport: the sums are then undefined; call `reset` in the next
///   epoch. `errc::out_of_range` for a tensor that does not exist, `errc::size_mismatch` for one with another
///   size, a duplicate, or one missing at the end.
/// @par Source          Li et al., "PyTorch Distributed", VLDB 2020: buckets, 25 MB, one order for all.
template <transport T>
class reduction_buckets {
 public:
  /// @param tensors  bytes of each, the same on all ranks, in the order in which most become ready.
  /// @throws argument_error  for a tensor that splits an element.
  reduction_buckets(T& ranks, std::span<const std::uint64_t> tensors, const reduce_op& op,
                    const bucket_options& options = {})
      : ranks_(&ranks), op_(op), options_(options) {
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i] % op.element_bytes != 0) {
        throw argument_error(std::string(options.name) + ": tensor " + std::to_string(i) + " has " +
                             std::to_string(tensors[i]) + " bytes, which is not a multiple of an element's " +
                             std::to_string(op.element_bytes));
      }
      const bool is_full = buckets_.empty() || at + tensors[i] - buckets_.back().first > options.bucket_bytes;
      if (is_full && (buckets_.empty() || buckets_.back().tensors != 0)) buckets_.push_back({.first = at});
      places_.push_back({.first = at, .bytes = tensors[i], .bucket = buckets_.size() - 1});
      at = checked_add(at, tensors[i], "reduction_buckets: bytes of all tensors");
      buckets_.back().bytes = at - buckets_.back().first;
      ++buckets_.back().tensors;
    }
    values_.resize(at);
    reset();
  }

  [[nodiscard]] std::uint32_t buckets() const noexcept { return static_cast<std::uint32_t>(buckets_.size()); }
  /// The number of summed buckets.
  [[nodiscard]] std::uint32_t summed() const noexcept { return static_cast<std::uint32_t>(next_); }

  /// Adds this rank's values of `tensor`. They are copied, so they may change when this returns. Sums the
  /// buckets that are complete and next in order.
  result<void> ready(std::uint32_t tensor, std::span<const std::byte> gradient, deadline by) {
    if (tensor >= places_.size()) return refuse(errc::out_of_range, tensor, places_.size(), tensor);
    place& at = places_[tensor];
    if (gradient.size() != at.bytes) return refuse(errc::size_mismatch, tensor, at.bytes, gradient.size());
    if (at.is_ready) return refuse(errc::size_mismatch, tensor, 0, gradient.size());
    if (!gradient.empty()) std::memcpy(values_.data() + at.first, gradient.data(), gradient.size());
    at.is_ready = true;
    ++buckets_[at.bucket].ready;
    return sum_complete(by);
  }

  /// Passes the sums of all tensors to `each(std::uint32_t tensor, std::span<const std::byte> sum)`, and
  /// begins again. The spans are valid until the next `ready`.
  template <class Each>
  result<void> finish(Each each) {
    if (next_ != buckets_.size()) {
      const bucket& lacks = buckets_[next_];
      for (std::uint32_t i = 0; i < places_.size(); ++i) {
        if (places_[i].bucket == next_ && !places_[i].is_ready)
          return refuse(errc::size_mismatch, i, lacks.tensors, lacks.ready);
      }
    }
    for (std::uint32_t i = 0; i < places_.size(); ++i)
      each(i, std::span<const std::byte>(values_).subspan(places_[i].first, places_[i].bytes));
    reset();
    return {};
  }

  /// Resets all tensors to not ready.
  void reset() noexcept {
    for (place& each : places_)
      each.is_ready = false;
    for (bucket& each : buckets_)
      each.ready = 0;
    next_ = 0;
  }
  [[deprecated("call reset()")]] void begin_again() noexcept { reset(); }

 private:
  struct place {
    std::uint64_t first = 0;
    std::uint64_t bytes = 0;
    std::size_t bucket = 0;
    bool is_ready = false;
  };
  struct bucket {
    std::uint64_t first = 0;
    std::uint64_t bytes = 0;
    std::uint64_t tensors = 0;
    std::uint64_t ready = 0;
  };

  [[nodiscard]] failure refuse(error_code code, std::uint32_t tensor, std::uint64_t wanted,
                               std::uint64_t found) const noexcept {
    return {.code = code, .index = tensor, .wanted = wanted, .found = found, .where = options_.name};
  }

  result<void> sum_complete(deadline by) {
    for (; next_ < buckets_.size() && buckets_[next_].ready == buckets_[next_].tensors; ++next_) {
      call_.by = by;
      call_.tag = options_.tag;
      call_.algorithm = options_.algorithm;
      const auto bytes = std::span(values_).subspan(buckets_[next_].first, buckets_[next_].bytes);
      if (auto done = all_reduce(*ranks_, bytes, op_, call_); !done) return done;
    }
    return {};
  }

  T* ranks_;
  reduce_op op_;
  bucket_options options_;
  std::vector<place> places_{};    // by tensor
  std::vector<bucket> buckets_{};  // the tensors of one bucket are adjacent
  std::vector<std::byte> values_{};
  std::size_t next_ = 0;  // the next bucket in order
  collective_call call_{};
};

}  // namespace v0
}  // namespace llmmem
