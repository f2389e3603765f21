/// @file
/// Replays a journal, to reach the state of the cache that wrote it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/detail/journal_digest.hpp>
#include <llmmem/paging/detail/journal_execute.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/journal_reader.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The first difference between a replay and its journal.
struct journal_divergence {
  std::uint64_t record = 0;  ///< numbered from 1; the header is 0
  journal_op operation = journal_op::create;
  std::string expected;  ///< the recorded outcome
  std::string found;     ///< the outcome of the replay

  /// Returns one sentence for a person to read.
  [[nodiscard]] std::string message() const {
    return "journal: record " + std::to_string(record) + ", " + std::string(to_string(operation)) +
           ": expected " + expected + "; found " + found;
  }
};

namespace detail {

/// Returns a record's results as text for messages.
[[nodiscard]] inline std::string outcome_text(const failure& why, std::span<const std::uint64_t> numbers,
                                              const std::string& name) {
  if (why.code != errc::ok) {
    failure named = why;
    named.where = name.c_str();
    return '"' + named.message() + '"';
  }
  if (numbers.empty()) return "success";
  std::string text = "(";
  for (const std::uint64_t each : numbers)
    text += (text.size() == 1 ? "" : ", ") + std::to_string(each);
  return text + ")";
}

[[nodiscard]] inline std::vector<std::uint64_t> numbers_of(journal_format format, journal_op op,
                                                           const journal_outcome& came) {
  std::vector<std::uint64_t> out;
  if (came.why.code != errc::ok) return out;
  each_number(format, op, came, [&](std::uint64_t number) { out.push_back(number); });
  return out;
}

}  // namespace detail

namespace paging {

/// A cache into which a journal was replayed. It cannot move, because its fences and its pressure callback
/// point to it.
template <class Cache>
class replayed {
 public:
  using header_type = typename detail::types_of<Cache>::header;

  /// @see replay
  template <class Make>
  replayed(std::span<const std::byte> bytes, Make&& make, std::uint64_t records)
      : reader_(bytes), cache_(make(header_for_replay())), executor_(cache_, passed_) {
    while (!divergence_ && reader_.end().records < records && reader_.next())
      repeat();
  }
  replayed(const replayed&) = delete;
  replayed& operator=(const replayed&) = delete;

  [[nodiscard]] Cache& cache() noexcept { return cache_; }
  [[nodiscard]] const Cache& cache() const noexcept { return cache_; }
  [[nodiscard]] const header_type& header() const noexcept { return reader_.header(); }
  /// Where the journal, or the requested part of it, ended; a divergent record is counted.
  [[nodiscard]] const journal_end& end() const noexcept { return reader_.end(); }
  /// The first outcome that differs from the recorded one; nothing after it was replayed.
  [[nodiscard]] const std::optional<journal_divergence>& divergence() const noexcept { return divergence_; }
  /// The living sequences, by slot.
  [[nodiscard]] const std::vector<sequence_id>& sequences() const noexcept LLMMEM_LIFETIMEBOUND {
    return sequences_;
  }
  /// Returns the present handle of the sequence that `recorded` named.
  [[nodiscard]] sequence_id handle(sequence_id recorded) const noexcept {
    recorded.owner = executor_.owner();
    return recorded;
  }

  /// Ends all sequences and pins, and drops all references that wait for fences, because the kernels that
  /// used them ended with the process. Cached contents stay, idle.
  void release_all() noexcept {
    passed_ = ~std::uint64_t{0};
    cache_.collect();
    for (const sequence_id each : sequences_)
      static_cast<void>(cache_.release(each));
    sequences_.clear();
    for (; !pinned_.empty(); pinned_.pop_back())
      static_cast<void>(cache_.unpin(pinned_.back()));
  }

 private:
  [[nodiscard]] const header_type& header_for_replay() {
    header_ = reader_.header();
    if constexpr (!detail::journaled_hybrid_cache<Cache>) {
      header_.options.pressure.call = &replayed::on_pressure;
      header_.options.pressure.context = this;
    }
    return header_;
  }

  /// Repeats the current record, with every operation recorded inside it.
  void repeat() {
    if (!reader_.record().is_open) {
      const bool was_open = std::exchange(is_open_, false);
      finish(reader_.record(), executor_.execute(reader_.record(), results_));
      is_open_ = was_open;
      return;
    }
    detail::owned_record again = std::move(reader_.record());
    detail::journal_results<Cache> results;
    const bool was_open = std::exchange(is_open_, true);
    const detail::journal_outcome came = executor_.execute(again, results);
    is_open_ = was_open;
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
    if (divergence_ || !reader_.next()) return;  // truncated inside the operation: no outcome was recorded
    detail::owned_record& then = reader_.record();
    if (then.op != journal_op::outcome || then.closes != again.op) {
      return diverge(std::string(to_string(then.op)), "the outcome of " + std::string(to_string(again.op)));
    }
    again.why = then.why;
    again.numbers = then.numbers;
    finish(again, came);
  }

  void finish(const detail::owned_record& again, const detail::journal_outcome& came) {
    switch (again.op) {
      case journal_op::pressed:
      case journal_op::relieved:
      case journal_op::outcome:
        return diverge(std::string(to_string(again.op)), "no operation open");
      case journal_op::checkpoint: {
        const std::uint64_t digest = detail::state_digest(cache_);
        if (digest == again.given.number) return;
        return diverge("state " + std::to_string(again.given.number), "state " + std::to_string(digest));
      }
      default: {
        const std::vector<std::uint64_t> numbers =
            detail::numbers_of(detail::format_of<Cache>, again.op, came);
        if (came.why != again.why || numbers != again.numbers) {
          diverge(detail::outcome_text(again.why, again.numbers, cache_.name()),
                  detail::outcome_text(came.why, numbers, cache_.name()), again.op);
        }
        // Where it differs too, because `release_all` ends what the cache holds.
        if (came.why.code == errc::ok) follow(again, came);
      }
    }
  }

  /// Takes the place of the engine's callback and repeats its operations.
  static bool on_pressure(void* context, const block_shortage& shortage) noexcept {
    auto& self = *static_cast<replayed*>(context);
    if (!self.is_open_ || self.divergence_ || self.failed_ || self.depth_ == max_pressure_depth) return false;
    ++self.depth_;
    bool again = false;
    try {
      again = self.relieve(shortage);
    } catch (...) {
      self.failed_ = std::current_exception();
    }
    --self.depth_;
    return again;
  }

  bool relieve(const block_shortage& shortage) {
    if (!reader_.next()) return false;
    const detail::owned_record& asked = reader_.record();
    const auto text = [](std::uint64_t needed, std::uint64_t available) {
      return "pressure (" + std::to_string(needed) + ", " + std::to_string(available) + ")";
    };
    const std::string found = text(shortage.needed, shortage.available);
    const std::string expected = asked.op == journal_op::pressed ? text(asked.given.number, asked.given.extra)
                                                                 : std::string(to_string(asked.op));
    if (expected != found) {
      diverge(expected, found);
      return false;
    }
    while (!divergence_ && reader_.next()) {
      if (reader_.record().op == journal_op::relieved) return reader_.record().given.number != 0;
      repeat();
    }
    return false;
  }

  void diverge(std::string expected, std::string found) {
    diverge(std::move(expected), std::move(found), reader_.record().op);
  }
  void diverge(std::string expected, std::string found, journal_op operation) {
    divergence_ = {reader_.end().records, operation, std::move(expected), std::move(found)};
  }

  void follow(const detail::owned_record& again, const detail::journal_outcome& came) {
    if (again.op == journal_op::pin || again.op == journal_op::unpin) {
      const block_id block{static_cast<std::uint32_t>(again.given.number)};
      if (again.op == journal_op::pin) {
        pinned_.push_back(block);
      } else {
        std::size_t i = 0;
        while (pinned_[i] != block)
          ++i;
        pinned_.erase(pinned_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      return;
    }
    const bool is_new = again.op == journal_op::create || again.op == journal_op::fork;
    const bool ends = again.op == journal_op::release || again.op == journal_op::release_after;
    if (!is_new && !ends) return;
    const auto slot = static_cast<std::uint32_t>(is_new ? came.numbers[0] : again.given.sequence.slot);
    std::size_t at = 0;
    while (at < sequences_.size() && sequences_[at].slot < slot)
      ++at;
    const auto place = sequences_.begin() + static_cast<std::ptrdiff_t>(at);
    if (ends) {
      sequences_.erase(place);
      return;
    }
    sequences_.insert(place, {slot, static_cast<std::uint32_t>(came.numbers[1]), executor_.owner()});
  }

  basic_journal_reader<header_type> reader_;
  header_type header_;
  std::uint64_t passed_ = 0;  // read by the cache's fences
  Cache cache_;
  detail::record_executor<Cache> executor_;
  std::vector<sequence_id> sequences_;
  std::vector<block_id> pinned_;
  detail::journal_results<Cache> results_;
  std::optional<journal_divergence> divergence_;
  std::exception_ptr failed_;  // thrown by a callback, which may not let it escape
  std::uint32_t depth_ = 0;
  bool is_open_ = false;  // the running operation was interrupted
};

/// Repeats the operations of a journal, comparing each outcome with the recorded one.
///
/// In a cache built like the journal's, the state becomes the same: block tables, keys, the order of free and
/// idle blocks, counts. After a crash, the bytes that reached the file replay to the state at the last
/// complete record: `release_all()` then leaves the index of the cached contents.
///
///     auto same = llmmem::paging::replay(bytes, [](const llmmem::journal_header& header) {
///       return llmmem::paged_allocator<traced>(header.options);
///     });
///     if (same.divergence()) log(same.divergence()->message());
///
/// @param make  builds the cache from the header, like the original one; `options.pressure` there replaces
///   the engine's callback. For untrusted input, `make` checks the options first, because they determine how
///   much memory the cache takes.
/// @param records  how many records to replay (up to the end of the operation that contains the last one),
///   for example to stop before a record of interest.
/// @par Complexity   that of the operations; allocates.
/// @par Errors   `journal_error` for a header that cannot be read, what `make` throws, `std::bad_alloc`.
template <class Make>
  requires std::is_invocable_v<Make&, const journal_header&>
[[nodiscard]] auto replay(std::span<const std::byte> bytes, Make&& make, std::uint64_t records = unlimited) {
  using cache_type = std::invoke_result_t<Make&, const journal_header&>;
  static_assert(std::is_same_v<typename cache_type::fence_type, recorded_fence>,
                "Traits::fence of a cache to replay into must be recorded_fence");
  return replayed<cache_type>(bytes, make, records);
}

/// The same for the journal of a `hybrid_allocator`: `make` takes a `const hybrid_journal_header&`. The type
/// of its parameter selects the journal, so it is not `auto`.
template <class Make>
  requires(!std::is_invocable_v<Make&, const journal_header&> &&
           std::is_invocable_v<Make&, const hybrid_journal_header&>)
[[nodiscard]] auto replay(std::span<const std::byte> bytes, Make&& make, std::uint64_t records = unlimited) {
  using cache_type = std::invoke_result_t<Make&, const hybrid_journal_header&>;
  static_assert(std::is_same_v<typename cache_type::fence_type, recorded_fence>,
                "Traits::fence of a cache to replay into must be recorded_fence");
  return replayed<cache_type>(bytes, make, records);
}

}  // namespace paging

template <class Cache>
using replayed [[deprecated("its name is paging::replayed")]] = paging::replayed<Cache>;

}  // namespace v0
}  // namespace llmmem
