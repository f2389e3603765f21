/// @file
/// Bodies of refit.hpp: setup, votes, and the order of a transfer. Included by it alone.
#pragma once

#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/refit/detail/agreeing_ranks.hpp>
#include <llmmem/refit/refit.hpp>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <transport T>
refit<T>::refit(T& ranks, const refit_plan& plan, refit_options options)
    : ranks_(&ranks), plan_(&plan), options_(std::move(options)), self_(to_index(ranks.rank())) {
  for (const auto* side : {&plan.senders, &plan.receivers}) {
    for (const rank_id each : *side) {
      if (to_index(each) >= to_number(ranks.world()))
        throw argument_error(options_.name + ": the plan has rank " + std::to_string(to_index(each)) +
                             ", but the transport has " + std::to_string(to_number(ranks.world())) +
                             " ranks");
    }
  }
  // Six buffers of about a message; the codec's scratch memory is a block of it and some tables.
  const std::uint64_t share = std::min(options_.staging_bytes, std::uint64_t{1} << 32) / 7;
  message_bytes_ = share < 4096 ? 0 : (share - share / 4096 - 64) / 8 * 8;
  if (message_bytes_ == 0)
    throw argument_error(options_.name + ": staging_bytes is " + std::to_string(options_.staging_bytes) +
                         "; give it at least 28672");
  const char* const what = "refit: staging";
  const std::uint64_t packed = codec_type::worst_case_bytes(message_bytes_);
  bool sends = false;
  bool takes = false;
  for (const refit_link& each : plan.links) {
    sends = sends || to_index(each.from) == self_;
    takes = takes || to_index(each.to) == self_;
  }
  if (sends) {
    out_ = {message_bytes_, options_.metadata, what};
    if (options_.keeps_base) {
      out_changes_ = {message_bytes_, options_.metadata, what};
      out_packed_ = {packed, options_.metadata, what};
      base_ = {plan.sent_bytes(ranks.rank()), options_.metadata, "refit: what was sent last"};
    }
  }
  if (takes) {
    in_ = {message_bytes_, options_.metadata, what};
    in_changes_ = {message_bytes_, options_.metadata, what};
    in_packed_ = {message_bytes_, options_.metadata, what};
  }
  if (takes || (sends && options_.keeps_base)) {
    codec_.emplace(message_bytes_, options_.metadata);
    // A small budget has no space for the codec's tables: then changed units are the only form of changes, on
    // all ranks.
    if (5 * message_bytes_ + packed + codec_->metadata_bytes() > options_.staging_bytes) codec_.reset();
  }
  base_crc_.resize(to_number(ranks.world()));
  sends_changes_.resize(to_number(ranks.world()));
  place_arrivals();
}

template <transport T>
void refit<T>::place_arrivals() {
  arrival_at_.resize(plan_->target.size());
  scope_of_.resize(plan_->target.size());
  for (const refit_copy& each : plan_->copies)
    scope_of_[to_index(plan_->part_of(each).target)] = each.scope;
  const std::size_t receiver = refit_plan::place_of(plan_->receivers, rank_id{self_});
  std::vector<std::uint64_t> used(plan_->scopes);
  std::vector<dtype> wires(plan_->target.size(), dtype::bf16);
  for (const refit_part& each : plan_->parts)
    wires[to_index(each.target)] = each.wire;
  for (std::uint32_t t = 0; t < plan_->target.size(); ++t) {
    if (!is_quantized(tensor_id{t})) continue;
    has_baseless_ = has_baseless_ || !has_base(tensor_id{t});
    if (receiver == plan_->receivers.size()) continue;
    arrival_at_[t] = used[scope_of_[t]];
    used[scope_of_[t]] += plan_->target_set(t, receiver).elements() * detail::width_of(wires[t]);
  }
  const std::uint64_t most = used.empty() ? 0 : *std::ranges::max_element(used);
  arrivals_ = {most, std::byte{}, options_.metadata, "refit: tensors that arrive"};
}

template <transport T>
void refit<T>::check_ranks() const {
  if (to_index(ranks_->rank()) == self_ && to_number(ranks_->world()) == base_crc_.size()) return;
  throw argument_error(
      options_.name + ": rank " + std::to_string(self_) + " of " + std::to_string(base_crc_.size()) +
      " is now rank " + std::to_string(to_index(ranks_->rank())) + " of " +
      std::to_string(to_number(ranks_->world())) + "; make a plan for these ranks, and a refit of it");
}

template <transport T>
template <class Source, class Store>
void refit<T>::check_ends(const Source* source, const Store* weights) const {
  const bool sends = refit_plan::place_of(plan_->senders, rank_id{self_}) != plan_->senders.size();
  const bool takes = refit_plan::place_of(plan_->receivers, rank_id{self_}) != plan_->receivers.size();
  if (sends != (source != nullptr))
    throw argument_error(options_.name + ": rank " + std::to_string(self_) +
                         (sends ? " has sources in the plan; call send() or move()"
                                : " has no source in the plan; call receive() or attend()"));
  if (takes != (weights != nullptr))
    throw argument_error(options_.name + ": rank " + std::to_string(self_) +
                         (takes ? " has an image in the plan; call receive() or move()"
                                : " has no image in the plan; call send() or attend()"));
  if constexpr (!std::is_same_v<Store, no_store>) {
    if (weights != nullptr && weights->slots() < 2)
      throw argument_error(options_.name +
                           ": a refit into the only slot would lose both versions if it "
                           "failed; give the versions double_buffer, or latest with two slots");
  }
}

/// @return whether all ranks are for it.
template <transport T>
result<bool> refit<T>::vote(bool mine, deadline by) {
  vote_.reset();
  if constexpr (detail::agreeing_ranks<T>) {
    const auto answer = ranks_->agree(mine ? 1 : 0, by);
    if (!answer) return answer.error();
    vote_ = *answer;
    return answer->bits == 1;
  } else {
    const std::uint32_t world = to_number(ranks_->world());
    std::byte all{mine};
    if (self_ != 0) {
      if (auto done = ranks_->send({&all, 1}, rank_id{0}, options_.tag, by); !done) return done.error();
      if (auto done = ranks_->recv({&all, 1}, rank_id{0}, options_.tag, by); !done) return done.error();
      return all == std::byte{1};
    }
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      std::byte theirs{};
      if (auto done = ranks_->recv({&theirs, 1}, rank_id{rank}, options_.tag, by); !done) return done.error();
      all &= theirs;
    }
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      if (auto done = ranks_->send({&all, 1}, rank_id{rank}, options_.tag, by); !done) return done.error();
    }
    return all == std::byte{1};
  }
}

template <transport T>
template <class Source, class Store>
result<refit_outcome> refit<T>::run(std::uint64_t number, Source* source, Store* weights, refit_sends what,
                                    deadline by) {
  check_ranks();
  check_ends(source, weights);
  now_ = {.number = number};
  ends<Source> with{.number = number, .what = what, .by = by, .source = source};
  if constexpr (std::is_same_v<Store, no_store>) {
    if (auto done = attempt(with); !done) return done.error();
  } else {
    bool is_begun = false;
    result<void> done;
    result<version_id> published = no_version;
    try {
      published = weights->publish_in_place([&](refit_image& into, const refit_image* newest) {
        is_begun = true;
        with.into = &into;
        with.newest = newest;
        done = attempt(with);
        if (!done) throw abandoned{};
        into.set_number(number);
      });
    } catch (const abandoned&) {
      return done.error();
    }
    if (!is_begun) {
      static_cast<void>(vote(false, by));
      return published.error();
    }
    if (!published) return published.error();
    now_.version = *published;
  }
  return now_;
}

template <transport T>
template <class Source>
result<void> refit<T>::attempt(const ends<Source>& with) {
  result<void> mine;
  const std::uint64_t served = with.newest == nullptr ? 0 : with.newest->number();
  if (with.number <= served) mine = refusal(errc::old_weights, 0, with.number, served);
  const auto abandoned_by = [&] {
    return refusal(errc::refit_abandoned, 0, with.number, vote_ ? vote_->failed.size() : 0);
  };
  const auto ready = vote(mine.has_value(), with.by);
  if (!mine) return mine;
  if (!ready.has_value()) return ready.error();
  if (!ready.value()) return abandoned_by();

  sends_changes_.assign(sends_changes_.size(), false);
  if (with.what != refit_sends::all) mine = agree_on_bases(with);
  if (with.what == refit_sends::only_changes && (mine || mine.code() == errc::other_base)) {
    // A base that differs is no reason to revoke: the ranks learn it by a vote of their own.
    const auto same = vote(mine.has_value(), with.by);
    if (!mine) return mine;
    if (!same.has_value()) return same.error();
    if (!same.value()) return abandoned_by();
  }
  base_at_ = 0;
  try {
    if (mine) mine = transfer(with);
  } catch (...) {  // of the source
    base_number_ = 0;
    ranks_->revoke();
    static_cast<void>(vote(false, with.by));
    throw;
  }
  base_number_ = 0;  // until all have what replaces it
  if (!mine) ranks_->revoke();
  const auto all = vote(mine.has_value(), with.by);
  if (!mine) return mine;
  if (!all.has_value()) return all.error();
  if (!all.value()) return abandoned_by();
  if (options_.keeps_base) base_number_ = with.number;
  return {};
}

template <transport T>
template <class Source>
result<void> refit<T>::transfer(const ends<Source>& with) {
  std::ranges::fill(base_crc_, 0U);
  const std::uint32_t world = to_number(ranks_->world());
  for (std::uint32_t scope = 0; scope < plan_->scopes; ++scope) {
    // The n-th message of distance d is the same for sender and receiver: no ranks wait in a circle.
    for (std::uint32_t d = 1; d < world; ++d) {
      if (auto done = trade(with, scope, (self_ + d) % world, (self_ + world - d) % world); !done)
        return done;
    }
    if (auto done = keep(with, scope); !done) return done;
    if (with.into != nullptr) {
      if (auto done = quantize(*with.into, scope); !done) return done;
    }
  }
  return {};
}

/// Copies what this rank has on both sides.
template <transport T>
template <class Source>
result<void> refit<T>::keep(const ends<Source>& with, std::uint32_t scope) {
  detail::held_piece<Source> held;
  for (const refit_copy& copy : plan_->of_link(scope, rank_id{self_}, rank_id{self_})) {
    const refit_part& part = plan_->part_of(copy);
    const auto piece = held.of(*with.source, part.source);
    if (!piece) return piece.error();
    const dtype has = plan_->source[to_index(part.source)].element;
    plan_->each_run(copy, [&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
      detail::convert_elements(has, piece->data() + from * detail::width_of(has), form_of(part),
                               address(*with.into, part, to), count);
    });
  }
  return {};
}

template <transport T>
result<void> refit<T>::quantize(const refit_image& into, std::uint32_t scope) {
  for (const refit_part& part : plan_->parts) {
    const std::uint32_t t = to_index(part.target);
    const bool is_first = &part == &*std::ranges::find(plan_->parts, part.target, &refit_part::target);
    if (!is_first || !is_quantized(part.target) || scope_of_[t] != scope) continue;
    const refit_layout::place& at = into.layout().of(part.target);
    if (at.elements.empty()) continue;
    const refit_tensor& tensor = plan_->target[t];
    const std::uint64_t groups = at.row_elements / tensor.group;
    const auto done = quantize_groups(
        host_executor{},
        {.rows = at.elements.elements() / at.row_elements,
         .groups = static_cast<std::uint32_t>(groups),
         .elements = tensor.group},
        {.data = arrivals_.data() + arrival_at_[t],
         .element = part.wire,
         .row_stride = at.row_elements * detail::width_of(part.wire)},
        {.data = into.tensor(part.target).data(), .element = tensor.element, .row_stride = at.row_elements},
        {.data = into.scales(part.target).data(), .row_stride = groups * sizeof(float)});
    if (!done) return done;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
