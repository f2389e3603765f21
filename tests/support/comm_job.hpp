/// @file
/// A job of ranks that lose some of their own and go on: the smallest that needs all that a communicator
/// does.
#pragma once

#include <llmmem/comm/communicator.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace llmmem_tests {

/// Bytes that depend on the seed alone.
inline std::vector<std::byte> bytes_of_seed(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> made(count);
  std::uint64_t state = seed * 0x9E37'79B9'7F4A'7C15U + 1;
  for (std::byte& each : made) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    each = static_cast<std::byte>(state >> 56);
  }
  return made;
}

/// What all ranks of a job hold: a step changes all of it, in a way that shows where one was left out.
class job_state {
 public:
  explicit job_state(std::size_t words) : words_(words, 1) {}

  void step(std::uint64_t number) {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] = (words_[i] ^ (number + i)) * 0x9E37'79B9'7F4A'7C15U;
  }
  [[nodiscard]] std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(words_)); }

  friend bool operator==(const job_state&, const job_state&) = default;

 private:
  std::vector<std::uint64_t> words_;
};

/// What was committed in which epoch, by which members: one job has one history, whatever its ranks believe.
class job_history {
 public:
  /// @param process  the nonce of the process that committed, at `now_ns`.
  void committed(std::uint64_t step, std::uint64_t epoch, std::span<const llmmem::seat_id> members,
                 std::uint64_t process, std::uint64_t now_ns) {
    const std::lock_guard held(mutex_);
    const commit now{epoch, {members.begin(), members.end()}};
    if (commits_.size() <= step) commits_.resize(step + 1);
    if (commits_[step].epoch == 0) commits_[step] = now;
    if (commits_[step] != now) has_split_ = true;
    all_.push_back({step, now, process, now_ns});
  }
  /// A process is over: it ended, or was killed.
  void ended(std::uint64_t process, std::uint64_t now_ns) {
    const std::lock_guard held(mutex_);
    ends_.emplace(process, now_ns);
  }
  [[nodiscard]] bool has_split() const { return has_split_; }
  /// Whether two processes committed different things of one step, while the first one lived.
  [[nodiscard]] bool has_split_of_the_living() const {
    for (const record& first : all_) {
      for (const record& second : all_) {
        if (first.step != second.step || first.what == second.what || second.now_ns < first.now_ns) continue;
        const auto end = ends_.find(first.process);
        if (end == ends_.end() || end->second > second.now_ns) return true;
      }
    }
    return false;
  }
  [[nodiscard]] std::size_t steps() const { return commits_.size(); }

 private:
  struct commit {
    std::uint64_t epoch = 0;
    std::vector<llmmem::seat_id> members{};

    friend bool operator==(const commit&, const commit&) = default;
  };

  struct record {
    std::uint64_t step = 0;
    commit what{};
    std::uint64_t process = 0;
    std::uint64_t now_ns = 0;
  };

  std::mutex mutex_;
  std::vector<commit> commits_;
  std::vector<record> all_;
  std::map<std::uint64_t, std::uint64_t> ends_;
  bool has_split_ = false;
};

/// How a process of a job ended.
struct job_end {
  bool is_through = false;
  bool has_lost_quorum = false;
  bool is_fresh = false;  // never was admitted
  std::uint64_t redone = 0;
  std::uint32_t last_world = 0;
};

struct job_options {
  std::uint64_t steps = 10;
  std::size_t words = 600;
  std::uint64_t patience_ns = 30'000'000'000;
  std::uint64_t join_patience_ns = 5'000'000'000;
};

namespace job_parts {

/// Everybody's number, by rank.
template <class Ranks>
std::optional<std::vector<std::uint64_t>> gather_numbers(Ranks& ranks, std::uint64_t mine,
                                                         llmmem::deadline by) {
  const std::uint32_t world = to_number(ranks.world());
  const std::uint32_t self = to_index(ranks.rank());
  std::vector<std::uint64_t> all(world, mine);
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t from = (self + world - d) % world;
    const auto done =
        ranks.exchange(std::as_bytes(std::span(&mine, 1)), llmmem::rank_id{(self + d) % world},
                       std::as_writable_bytes(std::span(&all[from], 1)), llmmem::rank_id{from}, 7, by);
    if (!done) return std::nullopt;
  }
  return all;
}

/// Those that are behind get the state of the lowest rank that is not.
template <class Ranks>
bool bring_up(Ranks& ranks, std::optional<std::uint64_t>& step, job_state& state, llmmem::deadline by) {
  const auto all = gather_numbers(ranks, step ? *step + 1 : 0, by);
  if (!all) return false;
  std::uint32_t newest = 0;
  for (std::uint32_t rank = 0; rank < all->size(); ++rank) {
    if ((*all)[rank] > (*all)[newest]) newest = rank;
  }
  const std::uint32_t self = to_index(ranks.rank());
  if ((*all)[newest] == 0) {  // all are fresh
    step = 0;
    return true;
  }
  for (std::uint32_t rank = 0; rank < all->size(); ++rank) {
    if ((*all)[rank] == (*all)[newest]) continue;
    if (self == newest && !ranks.send(state.bytes(), llmmem::rank_id{rank}, 8, by)) return false;
    if (self == rank && !ranks.recv(state.bytes(), llmmem::rank_id{newest}, 8, by)) return false;
  }
  step = (*all)[newest] - 1;
  return true;
}

/// Passes the state once round the ring, and holds it to one's own.
template <class Ranks>
bool compare_round(Ranks& ranks, job_state& state, llmmem::deadline by) {
  const std::uint32_t world = to_number(ranks.world());
  if (world == 1) return true;
  const std::uint32_t self = to_index(ranks.rank());
  job_state seen = state;
  std::memset(seen.bytes().data(), 0, seen.bytes().size());
  const auto done = ranks.exchange(state.bytes(), llmmem::rank_id{(self + 1) % world}, seen.bytes(),
                                   llmmem::rank_id{(self + world - 1) % world}, 9, by);
  if (!done) return false;
  CHECK(seen == state);
  return true;
}

}  // namespace job_parts

/// One process of it. `between(step)` is called before each step: it may compute, or die.
template <class End, class Between>
job_end run_job(End& end, job_history& history, const job_options& options, Between between) {
  using namespace llmmem;
  communicator<End> ranks(end, {.early_bytes = 1 << 16, .check = llmmem::comm::payload_check::crc32c});
  job_end how;
  if (!ranks.join(ranks.after(options.join_patience_ns))) {
    how.is_fresh = true;
    return how;
  }
  job_state state(options.words);
  std::optional<std::uint64_t> step;
  bool is_in_step = false;
  for (bool is_over = false; !is_over;) {
    const deadline by = ranks.after(options.patience_ns);
    bool well = is_in_step || job_parts::bring_up(ranks, step, state, by);
    const bool is_last = well && *step == options.steps;
    job_state next = state;
    if (well && !is_last) {
      between(*step);
      next.step(*step);
      well = job_parts::compare_round(ranks, next, by);
    }
    if (!well) ranks.revoke();
    const std::uint64_t say = !well ? 0 : is_last ? 3 : 1;
    const result<llmmem::comm::agreed> outcome = ranks.agree(say, ranks.after(options.patience_ns));
    if (!outcome) {
      CHECK(outcome.code() == errc::no_quorum);
      how.has_lost_quorum = true;
      return how;
    }
    // Nobody is admitted any more: who waits would find nobody to go on with.
    is_over = outcome->bits == 3;
    if (outcome->bits == 0) ++how.redone;
    if (outcome->bits == 1) {
      history.committed(*step, ranks.epoch(), ranks.seats(), end.nonce(), end.now_ns());
      state = next;
      ++*step;
    }
    is_in_step = outcome->bits != 0 && outcome->failed.empty() && outcome->joining.empty();
    if (!is_in_step && !is_over) ranks.admit(*outcome);
  }
  job_state expected(options.words);
  for (std::uint64_t i = 0; i < options.steps; ++i)
    expected.step(i);
  CHECK(state == expected);
  how.is_through = true;
  how.last_world = to_number(ranks.world());
  return how;
}

}  // namespace llmmem_tests
