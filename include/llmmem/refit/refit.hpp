/// @file
/// `refit`: moves a trainer's weights to an engine's ranks by a plan, whole or as changes, and publishes them
/// on all ranks or on none.
#pragma once

#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/refit/detail/refit_stream.hpp>
#include <llmmem/refit/errors.hpp>
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/refit/refit_source.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What is sent.
enum class refit_sends : std::uint8_t {
  all,           ///< every element
  changes,       ///< changes where the receiver has the base, else every element
  only_changes,  ///< changes; `errc::other_base` where the receiver has another base
};

/// How a `refit` is set up, alike on all ranks except for `name` and `metadata`.
struct refit_options {
  /// The most memory for messages on a rank that sends and receives, with the codec's.
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;
  /// Whether a sender keeps what it sent last, so that it can send changes: the bytes of
  /// `refit_plan::sent_bytes`.
  bool keeps_base = true;
  std::uint32_t tag = 0x7266'0000;  ///< of its messages: nothing else uses it at the same time
  std::string name = "refit";       ///< the name in error texts
  metadata_source metadata{};       ///< source of its memory
};

/// One refit's result and traffic on a rank.
struct refit_outcome {
  std::uint64_t number = 0;          ///< of the weights
  version_id version = no_version;   ///< as which they were published here; none on a rank without an image
  std::uint64_t elements_bytes = 0;  ///< of the elements sent to other ranks, in the form of the plan
  std::uint64_t sent_bytes = 0;      ///< of messages, with their headers
  std::uint64_t received_bytes = 0;
  std::uint64_t messages = 0;       ///< sent
  std::uint32_t links = 0;          ///< to which it sent
  std::uint32_t changed_links = 0;  ///< of these to which it sent changes

  friend constexpr bool operator==(const refit_outcome&, const refit_outcome&) noexcept = default;
};

/// Runs a plan, again for each new version of the weights. All ranks of the transport make the same calls
/// with the same number: those that have sources `send`, those that have images `receive`, those that have
/// both `move`, all others `attend`.
///
///     refit moving(ranks, plan);
///     moving.send(step, source, refit_sends::changes, by).value();            // a trainer's rank
///     const auto done = moving.receive(step, weights, refit_sends::changes, by);   // an engine's rank
///     if (done) finish_refit(*done, cache);                                   // old KV is not matched again
///
/// 1. The ranks vote whether each has space for a version. Readers that pin the slot that is needed make this
///    one `errc::refit_abandoned` everywhere (`errc::version_pinned` there): end them, and call again.
/// 2. Elements travel in messages. Each has a checksum of its elements (CRC-32C), which is verified before
///    any of them is written, and they are written to the spare slot only. Tensors with groups are quantised
///    when all of their elements have arrived, so that scales do not depend on the split.
/// 3. The ranks vote again. Only if all have everything does each publish; otherwise all serve what they had.
///
/// Changes are the exclusive or with what was sent last. Before, each receiver says which number it serves,
/// and the checksum of what it has of each link; a sender that sent something else sends every element
/// instead. A message has the shortest of three forms: its elements, changed units with the gaps between
/// them, byte planes. Tensors that are quantised on arrival have a base with
/// `keeps_arrivals` of the plan; otherwise they are always sent whole.
///
/// Memory: two images on an engine's rank (`double_buffer`), one more element of `latest{n}` for each late
/// reader; `staging_bytes`; `arrival_bytes` of the plan for quantised tensors; on a trainer's rank what it
/// sends, with `keeps_base`. With one slot a failure would lose both versions: the calls throw
/// `argument_error`. A source may be sharded and in tiers (`refit_state`). Images are in memory that the host
/// can touch.
///
/// @par Complexity   O(bytes): one copy on each side, in addition to those of the transport; with changes one
///   more pass over what is served.
/// @par Thread safety   one thread at a time, which owns the transport. Readers of the images: any,
/// meanwhile.
/// @par Waits    for the other ranks until `by`. A rank that cannot continue revokes the transport.
/// @par Errors   a failed rank has its own failure: those of the transport (`errc::peer_failed` names the
///   rank), of the source, of `publish_in_place`; `errc::message_damaged`, `errc::other_refit`,
///   `errc::other_base`, `errc::old_weights`. All others have `errc::refit_abandoned`, or
///   `errc::epoch_revoked` from the transport. What a source throws passes through, after the same. If the
///   transport has other ranks than at construction, as after `shrink` without a dead one, the calls throw
///   `argument_error`: make plan and refit again. A rank whose deadline passes in the last vote serves the
///   old version, although the others may have the new one; see `communicator::agree`. Without `agree`, as of
///   a `rank_group`, a death during the last vote may leave some ranks with the new version; the next refit
///   finds that by the base, and sends them every element.
/// @par Source   plans: Megatron-LM's resharding; changes against a base: verl's delta_sharded, which took a
///   235 B model's refit from 250 s to 12 s.
template <transport T>
class refit {
 public:
  /// @param plan  outlives the refit; made from the same input on all ranks.
  /// @throws argument_error  for ranks that the transport lacks, and for too few `staging_bytes`.
  refit(T& ranks, const refit_plan& plan, refit_options options = {});
  refit(const refit&) = delete;
  refit& operator=(const refit&) = delete;

  template <refit_source Source>
  result<refit_outcome> send(std::uint64_t number, Source& source, refit_sends what, deadline by) {
    return run(number, &source, static_cast<no_store*>(nullptr), what, by);
  }
  /// @param weights  a `versioned<refit_image, ...>` with at least two slots.
  template <class Store>
  result<refit_outcome> receive(std::uint64_t number, Store& weights, refit_sends what, deadline by) {
    return run(number, static_cast<refit_spans*>(nullptr), &weights, what, by);
  }
  template <refit_source Source, class Store>
  result<refit_outcome> move(std::uint64_t number, Source& source, Store& weights, refit_sends what,
                             deadline by) {
    return run(number, &source, &weights, what, by);
  }
  result<refit_outcome> attend(std::uint64_t number, refit_sends what, deadline by) {
    return run(number, static_cast<refit_spans*>(nullptr), static_cast<no_store*>(nullptr), what, by);
  }

  [[nodiscard]] const refit_plan& plan() const noexcept LLMMEM_LIFETIMEBOUND { return *plan_; }
  /// The answer of the last vote, for `shrink` or `admit`; none of a transport without `agree`.
  [[nodiscard]] const std::optional<comm::agreed>& last_vote() const noexcept { return vote_; }
  /// The memory for messages on this rank; at most `staging_bytes`.
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept {
    return out_.size() + out_changes_.size() + out_packed_.size() + in_.size() + in_changes_.size() +
           in_packed_.size() + (codec_ ? codec_->metadata_bytes() : 0);
  }
  /// The memory of what was sent last, on this rank.
  [[nodiscard]] std::uint64_t base_bytes() const noexcept { return base_.size(); }
  /// The memory for tensors that are quantised on arrival, on this rank.
  [[nodiscard]] std::uint64_t arrival_bytes() const noexcept { return arrivals_.size(); }

 private:
  using codec_type = byte_plane<dtype::bf16>;
  struct no_store {};
  struct abandoned {};  // thrown out of `publish_in_place` only

  /// What a call works with.
  template <class Source>
  struct ends {
    std::uint64_t number = 0;
    refit_sends what{};
    deadline by{};
    Source* source = nullptr;
    const refit_image* newest = nullptr;
    refit_image* into = nullptr;
  };

  template <class Source, class Store>
  result<refit_outcome> run(std::uint64_t number, Source* source, Store* weights, refit_sends what,
                            deadline by);
  /// @throws argument_error  when the transport has renumbered its ranks, or has lost or admitted some.
  void check_ranks() const;
  template <class Source, class Store>
  void check_ends(const Source* source, const Store* weights) const;
  result<bool> vote(bool mine, deadline by);
  /// Votes, transfers, votes. @return the failure of this rank, or `errc::refit_abandoned`.
  template <class Source>
  result<void> attempt(const ends<Source>& with);

  template <class Source>
  result<void> transfer(const ends<Source>& with);
  template <class Source>
  result<void> agree_on_bases(const ends<Source>& with);
  template <class Source>
  result<void> trade(const ends<Source>& with, std::uint32_t scope, std::uint32_t to, std::uint32_t from);
  template <class Source>
  result<void> keep(const ends<Source>& with, std::uint32_t scope);
  template <class Source>
  result<void> compose(const ends<Source>& with, detail::held_piece<Source>& held, detail::refit_cursor& out,
                       std::uint32_t to, detail::refit_header& header);
  result<void> check(const detail::refit_header& header, const detail::refit_header& here,
                     std::uint32_t from) const noexcept;
  template <class Source>
  result<void> accept(const ends<Source>& with, detail::refit_cursor& in, const detail::refit_header& header,
                      std::uint32_t from);
  result<void> swap(std::span<const std::byte> out, std::uint32_t to, std::span<std::byte> into,
                    std::uint32_t from, deadline by);
  result<void> quantize(const refit_image& into, std::uint32_t scope);

  void place_arrivals();
  [[nodiscard]] bool is_quantized(tensor_id target) const noexcept {
    return plan_->target[to_index(target)].group != 0;
  }
  /// Whether receivers keep what changes of a tensor refer to.
  [[nodiscard]] bool has_base(tensor_id target) const noexcept {
    return plan_->options.keeps_arrivals || !is_quantized(target);
  }
  /// Where an element that has arrived goes.
  [[nodiscard]] std::byte* address(const refit_image& into, const refit_part& part,
                                   std::uint64_t element) noexcept {
    if (is_quantized(part.target))
      return arrivals_.data() + arrival_at_[to_index(part.target)] + element * detail::width_of(part.wire);
    return into.tensor(part.target).data() + element * detail::width_of(form_of(part));
  }
  /// The form of an element where it goes.
  [[nodiscard]] dtype form_of(const refit_part& part) const noexcept {
    return is_quantized(part.target) ? part.wire : plan_->target[to_index(part.target)].element;
  }
  /// Writes the next elements of what is served, in the form in which they travel; zeros without a base.
  std::uint64_t gather_base(const refit_image& newest, detail::refit_cursor& from, std::byte* to);
  [[nodiscard]] bool has_link(std::uint32_t from, std::uint32_t to) const noexcept;
  [[nodiscard]] failure refusal(error_code code, std::uint64_t index, std::uint64_t wanted,
                                std::uint64_t found) const noexcept {
    return {code, static_cast<std::uint32_t>(index), wanted, found, options_.name.c_str()};
  }

  T* ranks_;
  const refit_plan* plan_;
  refit_options options_;
  std::uint32_t self_ = 0;
  std::uint64_t message_bytes_ = 0;
  detail::fixed_array<std::byte> out_{};
  detail::fixed_array<std::byte> out_changes_{};
  detail::fixed_array<std::byte> out_packed_{};
  detail::fixed_array<std::byte> in_{};
  detail::fixed_array<std::byte> in_changes_{};
  detail::fixed_array<std::byte> in_packed_{};
  detail::fixed_array<std::byte> arrivals_{};
  detail::fixed_array<std::byte> base_{};  // what was sent last, in the order of the messages
  std::optional<codec_type> codec_{};
  std::vector<std::uint64_t> arrival_at_{};  // by target tensor
  std::vector<std::uint32_t> scope_of_{};    // by target tensor
  bool has_baseless_ = false;                // tensors without a base
  std::uint64_t base_number_ = 0;            // 0: what was sent last is not served
  std::vector<std::uint32_t> base_crc_{};    // by receiver
  std::vector<bool> sends_changes_{};        // by receiver, of the call in flight
  std::uint64_t base_at_ = 0;                // of the call in flight
  refit_outcome now_{};                      // of the call in flight
  std::optional<comm::agreed> vote_{};
};

/// Begins the epoch of the new weights in caches of keys and values, so that no block computed with older
/// weights is matched again (`paged_allocator::reset`, `hybrid_allocator::reset`, and those of journals).
/// Call it after the refit and before the first request that uses the new weights; numbers of weights are the
/// epochs.
/// @return the blocks that were cached. `errc::old_epoch` for a cache whose epoch is not older; the caches
///   before it have been reset.
template <class... Caches>
result<std::uint64_t> finish_refit(const refit_outcome& done, Caches&... caches) noexcept {
  std::uint64_t blocks = 0;
  result<std::uint64_t> last = std::uint64_t{0};
  const auto each = [&](auto& cache) {
    last = cache.reset(done.number);
    if (last) blocks += *last;
    return last.has_value();
  };
  if (!(each(caches) && ...)) return last;
  return blocks;
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/refit/detail/refit_body.hpp>
#include <llmmem/refit/detail/refit_messages.hpp>
