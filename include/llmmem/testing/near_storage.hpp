/// @file
/// `near_storage`: a holder of blocks behind a link, in virtual time.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/near_attention.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// The time that a device near its storage would take for the calls so far, and the time with the keys and
/// values on the link.
struct near_storage_costs {
  near_traffic traffic{};        ///< bytes of queries and parts
  std::uint64_t read_bytes = 0;  ///< keys and values that the device itself read
  std::uint64_t near_ns = 0;     ///< queries over the link, reads, parts back
  std::uint64_t fetch_ns = 0;    ///< the time if the keys and values had come over the link instead
};

/// A device that attends to the contents of its storage: the results of `beneath`, with the times as if
/// queries and parts used a link, and keys and values were read at the device's own rate. It computes as fast
/// as it reads. The parts are those of `beneath`, bit for bit.
///
/// @par Thread safety   as `beneath`.
/// @par Errors          those of `beneath`; the constructor throws `argument_error` for links without
///      bandwidth.
template <attention_holder Holder>
class near_storage {
 public:
  /// @param layout  of the cache: gives the bytes of a token. `beneath` outlives it.
  /// @param inside  how the device reads its storage.
  near_storage(Holder& beneath, const kv_layout& layout, const link_model& link, const link_model& inside)
      : beneath_(&beneath),
        token_bytes_(layout.layer_bytes() / layout.block_tokens),
        link_(link),
        inside_(inside) {
    check_link(link, "near_storage: link");
    check_link(inside, "near_storage: inside");
    part_ = layout.part;
  }

  [[nodiscard]] std::uint32_t parts() const noexcept { return beneath_->parts(); }
  result<void> begin(const near_query& query, std::span<std::byte> memory) {
    if (auto begun = beneath_->begin(query, memory); !begun) return begun;
    now_ = {};
    now_.traffic.sent_bytes = query.rows * 8 + query.query_bytes();
    now_.traffic.received_bytes = attention_part_bytes(query.shape()) * parts();
    for (std::uint64_t row = 0; row < query.rows; ++row) {
      if (query.sequences[row] < 0 || query.lengths[row] <= 0) continue;
      const auto end = static_cast<std::uint64_t>(query.lengths[row]);
      const std::uint64_t first = query.window != 0 && end > query.window ? end - query.window : 0;
      now_.read_bytes += (part_.local_tokens(end) - part_.local_tokens(first)) * token_bytes_;
    }
    now_.near_ns = transfer_ns(link_, now_.traffic.sent_bytes) + transfer_ns(inside_, now_.read_bytes) +
                   transfer_ns(link_, now_.traffic.received_bytes) + 2 * link_.latency_ns +
                   inside_.latency_ns;
    now_.fetch_ns = transfer_ns(link_, now_.read_bytes) + link_.latency_ns;
    return {};
  }
  result<near_traffic> finish() {
    if (auto done = beneath_->finish(); !done) return done;
    costs_.traffic += now_.traffic;
    costs_.read_bytes += now_.read_bytes;
    costs_.near_ns += now_.near_ns;
    costs_.fetch_ns += now_.fetch_ns;
    return now_.traffic;
  }

  [[nodiscard]] const near_storage_costs& costs() const noexcept { return costs_; }

 private:
  Holder* beneath_;
  std::uint64_t token_bytes_;
  link_model link_;
  link_model inside_;
  paging::kv_part part_{};
  near_storage_costs now_{};
  near_storage_costs costs_{};
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
