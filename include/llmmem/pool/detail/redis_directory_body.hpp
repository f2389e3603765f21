/// @file
/// Bodies of redis_directory.hpp. Only that file includes this one.
#pragma once

#include <llmmem/pool/redis_directory.hpp>

#include <cerrno>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {

inline redis_options redis_directory::checked(const redis_options& options) {
  const auto refuse = [&](const std::string& why) { throw argument_error(options.name + ": " + why); };
  if (options.prefix.size() > 64)
    refuse("prefix has " + std::to_string(options.prefix.size()) + " bytes; at most 64 are allowed");
  if (options.lifetime_ns < 10'000'000)
    refuse("lifetime_ns is " + std::to_string(options.lifetime_ns) + "; at least 10,000,000 is needed");
  if (options.answer_ns == 0) refuse("answer_ns is 0; at least 1 is needed");
  if (options.retry_ns == 0) refuse("retry_ns is 0; at least 1 is needed");
  if (options.max_questions == 0 || options.max_questions > 65536)
    refuse("max_questions is " + std::to_string(options.max_questions) + "; it must be 1 to 65,536");
  if (options.buffer_bytes < 65536)
    refuse("buffer_bytes is " + std::to_string(options.buffer_bytes) + "; at least 65,536 are needed");
  if (options.max_reply_bytes < 65536)
    refuse("max_reply_bytes is " + std::to_string(options.max_reply_bytes) + "; at least 65,536 are needed");
  if (!options.user.empty() && options.password.empty()) refuse("a user needs its password");
  return options;
}

template <class Link>
void redis_directory::begin(Link& link, const pool::directory_identity& identity) {
  if (alive_.size() < identity.seats) alive_.resize(identity.seats);
  if (connection_.is_open()) lose(link, errc::ok, 0);
  identity_ = identity;
  life_ = 0;
  has_claimed_ = is_contested_ = false;
  is_down_ = false;
  retry_at_ = 0;
  suspect_count_ = 0;
  open(link, link.now_ns());
}

inline void redis_directory::refuse(error_code code, std::uint64_t index, std::string_view words) noexcept {
  detail::short_text<95> where;
  where.put(options_.name).put(" (").put(connection_.address()).put(")");
  if (!words.empty()) where.put(": ");
  for (const char& each : words)  // the server's: no control characters for a log or a terminal
    where.put(static_cast<unsigned char>(each) < 0x20 || each == 0x7F ? "?" : std::string_view(&each, 1));
  why_ = {.code = code, .index = static_cast<std::uint32_t>(index), .where = where.view()};
}

// The connection

template <class Link>
void redis_directory::open(Link& link, std::uint64_t now) noexcept {
  heard_at_ = now;
  if (const int why = connection_.open(); why != 0) {
    lose(link, errc::directory_unreachable, static_cast<std::uint64_t>(why));
    return;
  }
  if (!options_.password.empty()) {
    if (options_.user.empty()) {
      connection_.command({"AUTH", options_.password});
    } else {
      connection_.command({"AUTH", options_.user, options_.password});
    }
    expect(command::setup);
  }
  if (options_.database != 0) {
    detail::short_text<16> number;
    number.put_number(options_.database);
    connection_.command({"SELECT", number.view()});
    expect(command::setup);
  }
  if (!has_claimed_) {
    claim(false);  // the seat's earlier process has ended, or must give way
  } else {
    see_name();
  }
}

/// Doubles a time between attempts, from `retry_ns` up to 16 times that.
inline std::uint64_t redis_directory::next_wait(std::uint64_t& wait) const noexcept {
  constexpr std::uint64_t most = ~std::uint64_t{0} / 64;
  const std::uint64_t first = options_.retry_ns < most ? options_.retry_ns : most;
  return wait = wait == 0 ? first : wait < first * 16 ? wait * 2 : wait;
}

/// @param code  `errc::ok`: this node closes the connection itself.
template <class Link>
void redis_directory::lose(Link& link, error_code code, std::uint64_t index,
                           std::string_view words) noexcept {
  connection_.close();
  sent_count_ = in_flight_ = written_ = 0;
  looked_at_ = 0;
  is_up_ = is_owner_ = false;
  if (code != errc::ok) {
    ++counted_.losses;
    refuse(code, index, words);
    const std::uint64_t now = link.now_ns();
    if (code == errc::directory_unreachable && connection_.has_other_address()) {
      retry_at_ = now;
    } else {
      is_down_ = true;
      const std::uint64_t wait = next_wait(retry_wait_);
      retry_at_ = wait > ~std::uint64_t{0} - now ? ~std::uint64_t{0} : now + wait;
    }
  }
  for (std::uint32_t slot = 0; slot < questions_.size(); ++slot) {
    if (questions_[slot].is_open) release(link, slot, true);
  }
}

template <class Link>
void redis_directory::release(Link& link, std::uint32_t slot, bool is_unknown) noexcept {
  open_question& of = questions_[slot];
  of.is_open = false;
  free_.push_back(slot);
  if (!is_unknown) return;
  ++counted_.unknown;
  link.on_unknown(of.id, of.index);
}

template <class Link>
void redis_directory::progress(Link& link) noexcept {
  const std::uint64_t now = link.now_ns();
  if (!connection_.is_open()) {
    if (now < retry_at_) return;
    open(link, now);
  }
  if (!exchange(link, now)) return;
  if (is_up_ && now >= renew_at_ && has_space()) {
    renew_at_ = now + options_.lifetime_ns / 3;
    if (is_contested_) {
      claim(true);
    } else {
      see_name();
    }
  }
  if (is_up_ && suspect_count_ != 0 && looked_at_ == 0 && has_space() && !connection_.is_half_full()) {
    look();
    looked_at_ = suspect_count_;
  }
  if (is_up_ && announce_at_ != 0 && now >= announce_at_) {
    announce_at_ = 0;
    change_keeper(link);
  }
  has_looked_ = false;
  if (!connection_.has_output()) return;
  if (const int why = flush(now); why != 0)
    lose(link, errc::directory_unreachable, static_cast<std::uint64_t>(why));
}

inline int redis_directory::flush(std::uint64_t now) noexcept {
  // Their answers are due from now on: the engine may have made no step for long since it asked.
  if (in_flight_ == 0) heard_at_ = now;
  in_flight_ = sent_count_;
  return connection_.flush();
}

/// Sends and reads. Returns false if the connection was lost.
template <class Link>
bool redis_directory::exchange(Link& link, std::uint64_t now) noexcept {
  const auto fail = [&](int why) {
    lose(link, why == EPROTO ? errc::directory_refused : errc::directory_unreachable,
         static_cast<std::uint64_t>(why), why == EPROTO ? "a reply that is none, or too long" : "");
    return false;
  };
  if (!connection_.is_open()) return false;
  // A server that closes a connection may have said why: too many clients.
  const int unsent = flush(now);
  bool has_read = false;
  if (const int why = connection_.read(has_read); why != 0) return fail(unsent != 0 ? unsent : why);
  if (has_read) heard_at_ = now;
  for (;;) {
    detail::redis_reply reply;
    if (const int why = connection_.next(reply); why != 0) return fail(why);
    if (!reply) break;
    if (sent_count_ == 0) return fail(EPROTO);
    const sent_command of = sent_[sent_first_];
    sent_first_ = (sent_first_ + 1) % sent_.size();
    --sent_count_;
    if (in_flight_ != 0) --in_flight_;
    if (of.what == command::write) --written_;
    if (!take(link, of, *reply)) return false;
  }
  if (unsent != 0) return fail(unsent);
  if (sent_count_ != 0 && now - heard_at_ >= options_.answer_ns) {
    lose(link, errc::directory_unreachable, 0);
    return false;
  }
  return true;
}

/// Returns false if the connection was lost.
template <class Link>
bool redis_directory::take(Link& link, const sent_command& of, const redisReply& reply) noexcept {
  const std::string_view words(reply.str == nullptr ? "" : reply.str, reply.str == nullptr ? 0 : reply.len);
  if (reply.type == REDIS_REPLY_ERROR) {
    ++counted_.refused_commands;
    refuse(errc::directory_refused, 0, words);
    if (of.what == command::find) take_found(link, of, reply);
    // A full server, one that loads its file, a replica: later it takes what it refuses now. A key of another
    // type stays.
    if (of.what == command::write && !words.starts_with("WRONGTYPE") && announce_at_ == 0)
      announce_at_ = link.now_ns() + next_wait(announce_wait_);
    // Without a name or a look at the others' there is no directory; a span's key may be damaged alone.
    const bool is_alone = of.what == command::find || of.what == command::write || of.what == command::repair;
    if (!is_alone) lose(link, errc::directory_refused, 0, words);
    return is_alone;
  }
  switch (of.what) {
    case command::claim:
      is_owner_ = has_claimed_ = true;
      is_contested_ = false;
      come_up(link);
      return true;
    case command::claim_free:
      is_contested_ = reply.type == REDIS_REPLY_NIL;
      is_owner_ = !is_contested_;
      if (is_contested_) refuse(errc::directory_name_taken, to_index(identity_.seat), {});
      if (is_owner_ || !is_up_) come_up(link);
      return true;
    case command::see_name:
      take_name(link, reply, words);
      return true;
    case command::renew:
      if (reply.type != REDIS_REPLY_INTEGER || reply.integer != 1) {
        is_owner_ = false;  // it has expired in between
        claim(true);
        return true;
      }
      is_owner_ = true;
      is_contested_ = false;
      if (!is_up_) come_up(link);
      return true;
    case command::view:
      if (take_view(reply)) return true;
      lose(link, errc::directory_refused, 0, "MGET: not a value for each key");
      return false;
    case command::find:
      take_found(link, of, reply);
      return true;
    default:
      return true;
  }
}

/// Whose the name is. Only its own process renews it: another's must expire if that process is dead.
template <class Link>
void redis_directory::take_name(Link& link, const redisReply& reply, std::string_view words) noexcept {
  const auto found = reply.type == REDIS_REPLY_STRING ? detail::parse_redis_life(words) : std::nullopt;
  if (found && *found == own_life()) {
    detail::short_text<24> lifetime;
    put_lifetime(lifetime);
    connection_.command({"PEXPIRE", node_key(identity_.seat).view(), lifetime.view()});
    expect(command::renew);
    return;
  }
  is_owner_ = false;
  if (found && found->nonce != identity_.nonce) {
    is_contested_ = true;
    refuse(errc::directory_name_taken, to_index(identity_.seat), {});
    if (!is_up_) come_up(link);
    return;
  }
  // It has expired, or the server has lost it, or was given an old file. What is no incarnation belongs to
  // no process, and might never expire.
  const bool is_free = reply.type == REDIS_REPLY_NIL;
  if (!is_free && !found) ++counted_.refused_values;
  claim(is_free);
}

/// The name is settled. What was announced before may be lost.
template <class Link>
void redis_directory::come_up(Link& link) noexcept {
  if (!is_up_) ++counted_.connections;
  if (!is_contested_) why_ = {};
  is_up_ = true;
  is_down_ = false;
  retry_wait_ = announce_wait_ = announce_at_ = 0;
  renew_at_ = link.now_ns() + options_.lifetime_ns / 3;
  change_keeper(link);
}

/// Lets the pool announce everything again.
template <class Link>
void redis_directory::change_keeper(Link& link) noexcept {
  if (++generation_ == pool::no_keeper) generation_ = 1;
  link.on_keepers_changed();
}

// This node's name

inline void redis_directory::claim(bool only_if_free) noexcept {
  ++life_;
  ++counted_.incarnations;
  const detail::redis_key name = node_key(identity_.seat);
  const detail::redis_field value = detail::redis_life_text(own_life());
  detail::short_text<24> lifetime;
  put_lifetime(lifetime);
  if (only_if_free) {
    connection_.command({"SET", name.view(), value.view(), "PX", lifetime.view(), "NX"});
  } else {
    connection_.command({"SET", name.view(), value.view(), "PX", lifetime.view()});
  }
  expect(only_if_free ? command::claim_free : command::claim);
}

inline void redis_directory::see_name() noexcept {
  connection_.command({"GET", node_key(identity_.seat).view()});
  expect(command::see_name);
}

// Spans

/// Writes what this node holds of a span, in the hash of each depth that a chain has. One pass over the
/// records serves all depths: prompts with a common beginning have thousands.
/// @param without  a block that it no longer holds.
inline void redis_directory::write(const block_key& span, const pool::span_record& of,
                                   const pool::span_records& all, const pool::span_block* without) noexcept {
  if (!is_up_ || !is_owner_) return;
  std::array<std::uint64_t, max_layer_groups> masks{};
  const auto has_any = [&](const pool::span_record& each) {
    bool out = false;
    for (std::size_t g = 0; g < identity_.groups; ++g) {
      masks[g] = each.masks[g];
      if (without != nullptr && without->group == g && without->place < each.digests.size() &&
          each.digests[without->place] == without->digest)
        masks[g] &= ~(std::uint64_t{1} << without->place);
      out = out || masks[g] != 0;
    }
    return out;
  };
  struct chosen_records {
    std::array<pool::span_record, detail::redis_record_writer::most_records> of{};
    std::size_t count = 0;
  };
  std::array<chosen_records, pool::span_chunks / depth_step + 1> chosen{};
  const auto choose = [&](const pool::span_record& each, std::size_t same) {
    if (!has_any(each)) return;
    for (std::size_t d = 0; d <= same / depth_step; ++d) {
      if (chosen[d].count != chosen[d].of.size()) chosen[d].of[chosen[d].count++] = each;
    }
  };
  choose(of, of.digests.size());
  all.for_each([&](const pool::span_record& each) {
    if (each.digests.data() != of.digests.data()) choose(each, common(each.digests, of.digests));
  });
  const detail::redis_field field = detail::redis_field_of(identity_.seat, own_life());
  for (std::uint32_t depth = 0; depth <= of.digests.size(); depth += depth_step) {
    // A correction that is left out costs its readers a message.
    if (!has_space() || connection_.free_bytes() < 2 * sizeof(detail::redis_record_writer)) return;
    detail::redis_record_writer value(identity_.groups);
    const chosen_records& in = chosen[depth / depth_step];
    for (std::size_t i = 0; i < in.count; ++i) {
      if (has_any(in.of[i])) value.add(in.of[i].digests, masks);
    }
    const detail::redis_key name = span_key(span, of.digests, depth);
    if (value.count() == 0) {
      connection_.command({"HDEL", name.view(), field.view()});
    } else {
      connection_.command({"HSET", name.view(), field.view(), value.view()});
    }
    expect(command::write);
    ++written_;
    ++counted_.announced;
  }
  static_cast<void>(connection_.flush());  // what fails is seen by the next `progress`
}

template <class Link>
pool::asked redis_directory::ask(Link& link, const pool::span_question& question) noexcept {
  ++counted_.questions;
  if (!takes(link, generation_) || question.digests.size() > pool::span_chunks) {
    ++counted_.unknown;
    return pool::asked::unreachable;
  }
  if (!has_looked_) look();
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  open_question& of = questions_[slot];
  of.is_open = true;
  of.keeper = generation_;
  of.id = question.id;
  of.index = question.index;
  of.span = question.span;
  of.count = static_cast<std::uint32_t>(question.digests.size());
  for (std::size_t i = 0; i < question.digests.size(); ++i)
    of.digests[i] = question.digests[i];
  of.found.count = 0;
  of.ranking.emplace(of.found, identity_.groups);
  of.left = 0;
  of.is_refused = false;
  for (std::uint32_t depth = 0; depth <= of.count; depth += depth_step, ++of.left) {
    connection_.command(
        {"HRANDFIELD", span_key(of.span, question.digests, depth).view(), most_fields, "WITHVALUES"});
    expect(command::find, slot, depth);
  }
  static_cast<void>(connection_.flush());  // what fails is seen by the next `progress`
  return pool::asked::pending;
}

/// Asks which incarnations live. One look serves all questions of a step.
inline void redis_directory::look() noexcept {
  has_looked_ = true;
  connection_.command(1 + identity_.seats);
  connection_.argument("MGET");
  for (std::uint32_t i = 0; i < identity_.seats; ++i)
    connection_.argument(node_key(seat_id{i}).view());
  expect(command::view);
}

inline bool redis_directory::take_view(const redisReply& reply) noexcept {
  if (reply.type != REDIS_REPLY_ARRAY || reply.elements != identity_.seats) return false;
  for (std::uint32_t i = 0; i < identity_.seats; ++i) {
    const redisReply& each = *reply.element[i];
    alive_[i] = {};
    if (each.type != REDIS_REPLY_STRING) continue;
    if (const auto life = detail::parse_redis_life({each.str, each.len})) {
      alive_[i] = *life;
    } else {
      ++counted_.refused_values;
    }
  }
  repair();
  return true;
}

/// Removes entries of nodes that are dead still. A life that has ended does not begin again, so no live
/// entry is lost.
inline void redis_directory::repair() noexcept {
  const std::size_t count = std::exchange(looked_at_, 0);
  for (std::size_t i = 0; i < count && has_space(); ++i) {
    const suspect& each = suspects_[i];
    if (alive_[to_index(each.holder.seat)] == each.holder.life) continue;
    connection_.command(
        {"HDEL", each.key.view(), detail::redis_field_of(each.holder.seat, each.holder.life).view()});
    expect(command::repair);
    ++counted_.repaired;
  }
  if (count != 0) suspect_count_ = 0;
}

/// Takes one of a question's replies; the last answers it.
template <class Link>
void redis_directory::take_found(Link& link, const sent_command& what, const redisReply& reply) noexcept {
  open_question& of = questions_[what.slot];
  const std::size_t elements = reply.type == REDIS_REPLY_ARRAY ? reply.elements : 0;
  const std::span<const std::uint32_t> asked = std::span(of.digests).first(of.count);
  for (std::size_t i = 0; i + 1 < elements; i += 2) {
    const redisReply& field = *reply.element[i];
    const redisReply& value = *reply.element[i + 1];
    const auto holder = field.type == REDIS_REPLY_STRING
                            ? detail::parse_redis_field({field.str, field.len}, identity_.seats)
                            : std::nullopt;
    if (!holder || value.type != REDIS_REPLY_STRING) {
      ++counted_.refused_values;
      continue;
    }
    if (alive_[to_index(holder->seat)] != holder->life) {
      ++counted_.dead_entries;
      if (looked_at_ == 0 && suspect_count_ < suspects_.size())
        suspects_[suspect_count_++] = {span_key(of.span, asked, what.depth), *holder};
      continue;
    }
    if (holder->seat == identity_.seat) continue;
    const bool is_right = detail::read_redis_records(
        {value.str, value.len}, identity_.groups,
        [&](std::span<const std::uint32_t> digests, std::span<const std::uint64_t> masks) {
          of.ranking->offer(holder->seat, holder->life.nonce, common(digests, asked), masks);
        });
    if (!is_right) ++counted_.refused_values;
  }
  of.is_refused = of.is_refused || reply.type == REDIS_REPLY_ERROR;
  if (--of.left != 0) return;
  const bool is_unknown = of.is_refused && of.found.count == 0;
  if (!is_unknown) {
    ++counted_.answers;
    link.on_answer(of.keeper, of.id, of.index, of.found);
  }
  release(link, what.slot, is_unknown);
}

}  // namespace v0
}  // namespace llmmem
