/// @file
/// `redundancy_scheme`: a value that says how the state of ranks survives the loss of some of them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/coded_group.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The data kept in addition to a rank's own state.
enum class redundancy_kind : std::uint8_t {
  mirror,        ///< complete copies on other ranks
  parity,        ///< the exclusive or of stripes of k ranks, rotating in groups of k + 1 (RAID-5)
  reed_solomon,  ///< m pieces of parity of k stripes, rotating within groups of k + m
  compute,       ///< another rank computes the same state from the same inputs; no state is sent
};

/// One of:
///
/// | text | ranks per group | losses a group tolerates | extra memory per rank | sent for each step kept |
/// |---|---|---|---|---|
/// | `mirror:F` | F | F - 1 | F - 1 states | F - 1 states |
/// | `parity:K` | K + 1 | 1 | 1/K of a state | 1 state, in K stripes |
/// | `rs:K+M` | K + M | M | M/K of a state | M states, in K stripes each |
/// | `compute` | 2 | 1 | 1 state | nothing: two ranks do the work (Bamboo, NSDI 2023) |
///
/// "F copies" includes a rank's own. `coded_group` describes the layout of parity and rs.
///
/// @par Thread safety   a plain value.
class redundancy_scheme {
 public:
  static constexpr std::uint32_t max_copies = 1024;
  [[deprecated("its name is max_copies")]] static constexpr std::uint32_t most_copies = max_copies;

  /// @throws argument_error  for fewer than 2 or more than 1024 copies, including the rank's own.
  [[nodiscard]] static redundancy_scheme mirror(std::uint32_t copies);
  /// @throws argument_error  for a group of more than 256 ranks, or without data.
  [[nodiscard]] static redundancy_scheme parity(std::uint32_t data);
  /// @throws argument_error  as `checked_shape`.
  [[nodiscard]] static redundancy_scheme rs(const code_shape& shape) {
    checked_shape(shape);
    return {redundancy_kind::reed_solomon, shape.data, shape.parity};
  }
  [[nodiscard]] static redundancy_scheme compute() noexcept { return {redundancy_kind::compute, 1, 1}; }

  /// Parses "mirror:2", "parity:3", "rs:2+2" or "compute".
  /// @throws argument_error  for any other text: the error says at which character, and what is expected
  ///                         there.
  [[nodiscard]] static redundancy_scheme parse(std::string_view text);

  [[nodiscard]] redundancy_kind kind() const noexcept { return kind_; }
  /// Whether states are divided into stripes with parity, rather than copied.
  [[nodiscard]] bool is_coded() const noexcept {
    return kind_ == redundancy_kind::parity || kind_ == redundancy_kind::reed_solomon;
  }
  /// The number of whole copies of a rank's state, including its own.
  [[nodiscard]] std::uint32_t copies() const noexcept { return is_coded() ? 1 : 1 + extra_; }
  /// The code of a coded scheme, k + m.
  [[nodiscard]] code_shape shape() const noexcept { return {.data = data_, .parity = extra_}; }
  /// The smallest number of ranks in a group.
  [[nodiscard]] std::uint32_t group_ranks() const noexcept { return data_ + extra_; }
  /// The number of ranks of a group, regardless of which, that may be lost without losing any state.
  [[nodiscard]] std::uint32_t tolerates() const noexcept { return extra_; }

  /// Returns the reason why a world cannot hold the scheme, or nothing if it can: for programs that report
  /// usage errors.
  [[nodiscard]] std::optional<std::string> fits(rank_count world) const;

  /// Returns the bytes that a rank keeps for others if every state has `own` bytes and every group its
  /// smallest number of ranks. Stripes are whole units of 64 bytes. @throws length_error past 2^63 - 1.
  [[nodiscard]] std::uint64_t extra_bytes(std::uint64_t own) const {
    return checked_multiply(extra_, is_coded() ? stripe_bytes(own, data_) : own,
                            "redundancy: copies or parity pieces x bytes each");
  }

  friend bool operator==(const redundancy_scheme&, const redundancy_scheme&) noexcept = default;

 private:
  redundancy_scheme(redundancy_kind kind, std::uint32_t data, std::uint32_t extra) noexcept
      : kind_(kind), data_(data), extra_(extra) {}

  redundancy_kind kind_;
  std::uint32_t data_;   // k; 1 for whole states
  std::uint32_t extra_;  // m, or copies in addition to one's own
};

/// Returns "mirror:2", as `parse` reads it.
[[nodiscard]] inline std::string to_text(const redundancy_scheme& scheme) {
  switch (scheme.kind()) {
    case redundancy_kind::mirror:
      return "mirror:" + std::to_string(scheme.copies());
    case redundancy_kind::parity:
      return "parity:" + std::to_string(scheme.shape().data);
    case redundancy_kind::reed_solomon:
      return "rs:" + to_text(scheme.shape());
    case redundancy_kind::compute:
      return "compute";
  }
  return "unknown";
}

inline redundancy_scheme redundancy_scheme::mirror(std::uint32_t copies) {
  if (copies < 2 || copies > max_copies) {
    throw argument_error("redundancy: a mirror of " + std::to_string(copies) +
                         (copies == 1 ? " copy" : " copies") + "; use 2 to 1024, including the rank's own");
  }
  return {redundancy_kind::mirror, 1, copies - 1};
}

inline redundancy_scheme redundancy_scheme::parity(std::uint32_t data) {
  if (data == 0 || data >= max_code_pieces) {
    throw argument_error("redundancy: parity over " + std::to_string(data) + " pieces of data; use 1 to 255");
  }
  return {redundancy_kind::parity, data, 1};
}

inline std::optional<std::string> redundancy_scheme::fits(rank_count world) const {
  const std::uint32_t needed = group_ranks();
  const std::uint32_t there = to_number(world);
  if (there >= needed) return std::nullopt;
  std::string head = to_text(*this) + " needs " + std::to_string(needed) + " ranks, but the world has " +
                     std::to_string(there) + ": start " + std::to_string(needed - there) + " more";
  if (there < 2) return head;
  switch (kind_) {
    case redundancy_kind::mirror:
      return head + ", or use mirror:" + std::to_string(there);
    case redundancy_kind::parity:
      return head + ", or use parity:" + std::to_string(there - 1);
    default:
      return there > extra_
                 ? head + ", or use rs:" + std::to_string(there - extra_) + "+" + std::to_string(extra_)
                 : head + ", or use mirror:" + std::to_string(there);
  }
}

namespace detail {

/// Parses the text of a scheme from its beginning, and reports where it is invalid.
class scheme_reader {
 public:
  explicit scheme_reader(std::string_view text) noexcept : text_(text) {}

  [[nodiscard]] std::string_view word() noexcept {
    const std::size_t first = at_;
    while (at_ < text_.size() && text_[at_] >= 'a' && text_[at_] <= 'z')
      ++at_;
    return text_.substr(first, at_ - first);
  }
  [[nodiscard]] std::uint32_t number(const char* what, std::uint32_t least, std::uint32_t most) {
    const std::size_t first = at_;
    std::uint32_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (value <= most) value = value * 10 + static_cast<std::uint32_t>(text_[at_] - '0');
      ++at_;
    }
    if (at_ == first || value < least || value > most) {
      fail(first,
           std::string(what) + " is expected here, " + std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
  }
  void sign(char wanted, const char* then) {
    if (at_ == text_.size() || text_[at_] != wanted)
      fail(at_, "'" + std::string(1, wanted) + "' is expected here, then " + then);
    ++at_;
  }
  void end() const {
    if (at_ != text_.size()) fail(at_, "the text must end here");
  }
  [[noreturn]] LLMMEM_COLD void fail(std::size_t at, const std::string& why) const {
    throw argument_error("redundancy: '" + std::string(text_) + "', character " + std::to_string(at + 1) +
                         ": " + why);
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace detail

inline redundancy_scheme redundancy_scheme::parse(std::string_view text) {
  detail::scheme_reader reader(text);
  const std::string_view name = reader.word();
  std::optional<redundancy_scheme> scheme;
  if (name == "mirror") {
    reader.sign(':', "the number of copies including the rank's own");
    scheme = mirror(reader.number("the number of copies including the rank's own", 2, max_copies));
  } else if (name == "parity") {
    reader.sign(':', "how many ranks' data share a parity");
    scheme = parity(reader.number("how many ranks' data share a parity", 1, max_code_pieces - 1));
  } else if (name == "rs") {
    reader.sign(':', "the number of data pieces");
    const std::uint32_t data = reader.number("the number of data pieces", 1, max_code_pieces - 1);
    reader.sign('+', "the number of parity pieces");
    scheme =
        rs({.data = data, .parity = reader.number("the number of parity pieces", 1, max_code_pieces - data)});
  } else if (name == "compute") {
    scheme = compute();
  } else {
    reader.fail(0, "not the beginning of a scheme; write mirror:F, parity:K, rs:K+M or compute");
  }
  reader.end();
  return *scheme;
}

}  // namespace v0
}  // namespace llmmem
