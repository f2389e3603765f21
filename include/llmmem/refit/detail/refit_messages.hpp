/// @file
/// Bodies of refit.hpp: messages, their checks, and changes. Included by it alone.
#pragma once

#include <llmmem/hash/crc32c.hpp>
#include <llmmem/refit/detail/changed_units.hpp>
#include <llmmem/refit/refit.hpp>

#include <algorithm>
#include <cstring>

namespace llmmem {
inline namespace v0 {

template <transport T>
bool refit<T>::has_link(std::uint32_t from, std::uint32_t to) const noexcept {
  return std::ranges::any_of(plan_->links, [&](const refit_link& each) {
    return to_index(each.from) == from && to_index(each.to) == to;
  });
}

template <transport T>
result<void> refit<T>::swap(std::span<const std::byte> out, std::uint32_t to, std::span<std::byte> into,
                            std::uint32_t from, deadline by) {
  result<void> done;
  if (!out.empty() && !into.empty()) {
    done = ranks_->exchange(out, rank_id{to}, into, rank_id{from}, options_.tag, by);
  } else if (!out.empty()) {
    done = ranks_->send(out, rank_id{to}, options_.tag, by);
  } else if (!into.empty()) {
    done = ranks_->recv(into, rank_id{from}, options_.tag, by);
  }
  if (!done) return done;
  now_.sent_bytes += out.size();
  now_.received_bytes += into.size();
  return done;
}

template <transport T>
std::uint64_t refit<T>::gather_base(const refit_image& newest, detail::refit_cursor& from, std::byte* to) {
  return from.take(
      message_bytes_, [&](const refit_part& part, std::uint64_t, std::uint64_t element, std::uint64_t count) {
        const std::uint64_t bytes = count * detail::width_of(part.wire);
        if (!has_base(part.target)) {
          std::memset(to, 0, bytes);
        } else {
          detail::convert_elements(form_of(part), address(newest, part, element), part.wire, to, count);
        }
        to += bytes;
      });
}

/// Says to each rank that sends to this one what this one serves, and hears the same from receivers.
template <transport T>
template <class Source>
result<void> refit<T>::agree_on_bases(const ends<Source>& with) {
  const std::uint32_t world = to_number(ranks_->world());
  result<void> same;
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self_ + d) % world;
    const std::uint32_t from = (self_ + world - d) % world;
    const bool hears = has_link(self_, to);
    const bool tells = has_link(from, self_);
    detail::refit_base mine{.plan = plan_->fingerprint};
    if (tells && with.newest != nullptr && with.newest->number() != 0) {
      mine.number = with.newest->number();
      for (std::uint32_t scope = 0; scope < plan_->scopes; ++scope) {
        detail::refit_cursor cursor(*plan_, plan_->of_link(scope, rank_id{from}, rank_id{self_}));
        while (!cursor.is_at_end()) {
          const std::uint64_t bytes = gather_base(*with.newest, cursor, in_.data());
          mine.elements = crc32c(mine.elements, {in_.data(), static_cast<std::size_t>(bytes)});
        }
      }
    }
    constexpr std::size_t checked = offsetof(detail::refit_base, crc);
    mine.crc = crc32c(0, std::as_bytes(std::span(&mine, 1)).first(checked));
    detail::refit_base theirs{};
    const auto out = std::as_bytes(std::span(&mine, 1));
    const auto into = std::as_writable_bytes(std::span(&theirs, 1));
    if (auto done = swap(tells ? out : out.first(0), from, hears ? into : into.first(0), to, with.by); !done)
      return done;
    if (!hears) continue;
    const std::uint32_t crc = crc32c(0, std::as_bytes(std::span(&theirs, 1)).first(checked));
    if (crc != theirs.crc) return refusal(errc::message_damaged, to, theirs.crc, crc);
    if (theirs.plan != plan_->fingerprint)
      return refusal(errc::other_refit, to, plan_->fingerprint, theirs.plan);
    sends_changes_[to] =
        base_number_ != 0 && theirs.number == base_number_ && theirs.elements == base_crc_[to];
    if (!sends_changes_[to] && with.what == refit_sends::only_changes && same)
      same = refusal(errc::other_base, to, base_number_, theirs.number);
  }
  return same;
}

/// Moves all elements of a scope to one rank and from one rank.
template <transport T>
template <class Source>
result<void> refit<T>::trade(const ends<Source>& with, std::uint32_t scope, std::uint32_t to,
                             std::uint32_t from) {
  detail::refit_cursor out(*plan_, plan_->of_link(scope, rank_id{self_}, rank_id{to}));
  detail::refit_cursor in(*plan_, plan_->of_link(scope, rank_id{from}, rank_id{self_}));
  if (!out.is_at_end() && scope == 0) {
    ++now_.links;
    now_.changed_links += sends_changes_[to] ? 1U : 0U;
  }
  detail::held_piece<Source> held;
  detail::refit_header goes{.plan = plan_->fingerprint, .number = with.number, .scope = scope};
  for (; !out.is_at_end() || !in.is_at_end(); ++goes.index) {
    const bool sends = !out.is_at_end();
    const bool takes = !in.is_at_end();
    if (sends) {
      if (auto done = compose(with, held, out, to, goes); !done) return done;
      ++now_.messages;
      now_.elements_bytes += goes.elements_bytes;
    }
    detail::refit_header comes{};
    const auto head = std::as_bytes(std::span(&goes, 1));
    const auto into = std::as_writable_bytes(std::span(&comes, 1));
    if (auto done = swap(sends ? head : head.first(0), to, takes ? into : into.first(0), from, with.by);
        !done)
      return done;
    if (takes) {
      if (auto done = check(comes, goes, from); !done) return done;
      if (comes.bytes > message_bytes_) return refusal(errc::other_refit, from, message_bytes_, comes.bytes);
    }
    const std::byte* const body = goes.form == detail::refit_form::whole ? out_.data() : out_packed_.data();
    if (auto done = swap({body, sends ? goes.bytes : 0}, to, {in_packed_.data(), takes ? comes.bytes : 0},
                         from, with.by);
        !done)
      return done;
    if (!takes) continue;
    if (auto done = accept(with, in, comes, from); !done) return done;
  }
  return {};
}

/// Packs the next elements, and writes them in their shortest form.
template <transport T>
template <class Source>
result<void> refit<T>::compose(const ends<Source>& with, detail::held_piece<Source>& held,
                               detail::refit_cursor& out, std::uint32_t to, detail::refit_header& header) {
  const detail::refit_cursor begin = out;
  result<void> done;
  std::byte* at = out_.data();
  const auto pack = [&](const refit_part& part, std::uint64_t element, std::uint64_t, std::uint64_t count) {
    if (!done) return;
    const auto piece = held.of(*with.source, part.source);
    if (!piece) {
      done = piece.error();
      return;
    }
    const dtype has = plan_->source[to_index(part.source)].element;
    detail::convert_elements(has, piece->data() + element * detail::width_of(has), part.wire, at, count);
    at += count * detail::width_of(part.wire);
  };
  const auto bytes = static_cast<std::size_t>(out.take(message_bytes_, pack));
  if (!done) return done;
  const std::span<std::byte> elements(out_.data(), bytes);
  header.form = detail::refit_form::whole;
  header.base = 0;
  header.elements_bytes = header.bytes = static_cast<std::uint32_t>(bytes);
  header.result = crc32c(0, elements);
  if (options_.keeps_base) {
    const std::span<std::byte> base(base_.data() + base_at_, bytes);
    if (sends_changes_[to]) {
      const std::span<std::byte> changes(out_changes_.data(), bytes);
      for (std::size_t i = 0; i < bytes; ++i)
        changes[i] = elements[i] ^ base[i];
      const auto units = detail::encode_changes(changes, {out_packed_.data(), bytes - 1});
      if (units) {
        header.form = detail::refit_form::changes;
        header.bytes = static_cast<std::uint32_t>(*units);
      }
      // Planes of a byte with one value need an eighth of it, so few changes are not tried.
      if (codec_ && bytes % codec_type::element_bytes == 0 && header.bytes > bytes / 8) {
        const auto planes = codec_->encode(changes, {out_packed_.data(), out_packed_.size()});
        if (planes && *planes < header.bytes) {
          header.form = detail::refit_form::planes;
          header.bytes = static_cast<std::uint32_t>(*planes);
        } else if (units) {
          static_cast<void>(detail::encode_changes(changes, {out_packed_.data(), bytes - 1}));
        }
      }
      if (header.form != detail::refit_form::whole) header.base = base_number_;
    }
    std::ranges::copy(elements, base.begin());
    if (has_baseless_) {
      detail::refit_cursor again = begin;
      std::byte* part_at = base.data();
      again.take(message_bytes_,
                 [&](const refit_part& part, std::uint64_t, std::uint64_t, std::uint64_t count) {
                   const std::uint64_t width = count * detail::width_of(part.wire);
                   if (!has_base(part.target)) std::memset(part_at, 0, width);
                   part_at += width;
                 });
    }
    base_crc_[to] = crc32c(base_crc_[to], base);
    base_at_ += bytes;
  }
  header.header =
      crc32c(0, std::as_bytes(std::span(&header, 1)).first(offsetof(detail::refit_header, header)));
  return {};
}

/// Checks what a header says of its message; the message's own numbers are checked with its bytes.
template <transport T>
result<void> refit<T>::check(const detail::refit_header& there, const detail::refit_header& here,
                             std::uint32_t from) const noexcept {
  const std::uint32_t crc =
      crc32c(0, std::as_bytes(std::span(&there, 1)).first(offsetof(detail::refit_header, header)));
  if (crc != there.header) return refusal(errc::message_damaged, from, there.header, crc);
  const auto differs = [&](std::uint64_t wanted, std::uint64_t found) {
    return refusal(errc::other_refit, from, wanted, found);
  };
  if (there.magic != here.magic) return differs(here.magic, there.magic);
  if (there.plan != here.plan) return differs(here.plan, there.plan);
  if (there.number != here.number) return differs(here.number, there.number);
  if (there.scope != here.scope) return differs(here.scope, there.scope);
  if (there.index != here.index) return differs(here.index, there.index);
  return {};
}

/// Verifies a message, and only then writes its elements.
template <transport T>
template <class Source>
result<void> refit<T>::accept(const ends<Source>& with, detail::refit_cursor& in,
                              const detail::refit_header& header, std::uint32_t from) {
  const std::span<const std::byte> body(in_packed_.data(), header.bytes);
  detail::refit_cursor ahead = in;
  const auto bytes =
      static_cast<std::size_t>(ahead.take(message_bytes_, [](const auto&, auto, auto, auto) {}));
  if (header.elements_bytes != bytes) return refusal(errc::other_refit, from, bytes, header.elements_bytes);
  const std::span<std::byte> elements(in_.data(), bytes);
  if (header.form == detail::refit_form::whole) {
    if (header.bytes != bytes) return refusal(errc::other_refit, from, bytes, header.bytes);
    std::ranges::copy(body, elements.begin());
  } else {
    const std::uint64_t served = with.newest == nullptr ? 0 : with.newest->number();
    if (served == 0 || header.base != served) return refusal(errc::other_refit, from, served, header.base);
    ahead = in;
    gather_base(*with.newest, ahead, elements.data());
    bool is_right = false;
    if (header.form == detail::refit_form::changes) {
      is_right = detail::apply_changes(body, elements);
    } else if (header.form == detail::refit_form::planes && codec_) {
      const std::span<std::byte> changes(in_changes_.data(), bytes);
      is_right = codec_->decode(body, changes).has_value();
      for (std::size_t i = 0; is_right && i < bytes; ++i)
        elements[i] ^= changes[i];
    }
    if (!is_right) return refusal(errc::message_damaged, from, header.result, 0);
  }
  if (const std::uint32_t crc = crc32c(0, elements); crc != header.result)
    return refusal(errc::message_damaged, from, header.result, crc);
  const std::byte* at = elements.data();
  in.take(message_bytes_,
          [&](const refit_part& part, std::uint64_t, std::uint64_t element, std::uint64_t count) {
            detail::convert_elements(part.wire, at, form_of(part), address(*with.into, part, element), count);
            at += count * detail::width_of(part.wire);
          });
  return {};
}

}  // namespace v0
}  // namespace llmmem
