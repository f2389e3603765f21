/// @file
/// The parts of a journal: its operations, its header, the fence it records, the sinks it is written to.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/space/fence.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The kind of a record. The numbers are part of the format.
enum class journal_op : std::uint8_t {
  create = 1,
  fork = 2,
  release = 3,
  release_after = 4,
  match = 5,
  match_keys = 6,
  append = 7,
  extend = 8,
  append_batch = 9,
  truncate = 10,
  truncate_after = 11,
  commit = 12,
  commit_keys = 13,
  deduplicate = 14,
  deduplicate_after = 15,
  retain = 16,
  advance = 17,
  expect = 18,
  expect_keys = 19,
  resize = 20,
  collect = 21,
  drop_idle = 22,
  compact = 23,
  fences_passed = 24,  ///< the fences up to a point have passed
  checkpoint = 25,     ///< a digest of the whole state
  pressed = 26,        ///< the pressure callback was called, inside the open operation
  relieved = 27,       ///< and returned
  outcome = 28,        ///< the outcome of the open operation
  reset = 29,
  invalidate_block = 30,
  invalidate = 31,
  remove = 32,
  remove_after = 33,
  name_tokens = 34,
  pin = 35,
  unpin = 36,
  limit_commits = 37,
  read_until = 38,  ///< this one and those after it: of a `hybrid_allocator`
  limit_releases = 39,
  shortage = 40,
  batch_shortage = 41,
  evacuate = 42,
};
inline constexpr journal_op last_journal_op = journal_op::evacuate;

/// Returns the name of the operation in error texts.
[[nodiscard]] constexpr std::string_view to_string(journal_op op) noexcept {
  constexpr std::array<std::string_view, 43> names{"",
                                                   "create",
                                                   "fork",
                                                   "release",
                                                   "release_after",
                                                   "match",
                                                   "match",
                                                   "append",
                                                   "extend",
                                                   "append_batch",
                                                   "truncate",
                                                   "truncate_after",
                                                   "commit",
                                                   "commit",
                                                   "deduplicate",
                                                   "deduplicate_after",
                                                   "retain",
                                                   "advance",
                                                   "expect",
                                                   "expect",
                                                   "resize",
                                                   "collect",
                                                   "drop_idle",
                                                   "compact",
                                                   "fences_passed",
                                                   "checkpoint",
                                                   "pressed",
                                                   "relieved",
                                                   "outcome",
                                                   "reset",
                                                   "invalidate",
                                                   "invalidate",
                                                   "remove",
                                                   "remove_after",
                                                   "name_tokens",
                                                   "pin",
                                                   "unpin",
                                                   "limit_commits",
                                                   "read_until",
                                                   "limit_releases",
                                                   "shortage",
                                                   "shortage",
                                                   "evacuate"};
  const auto number = static_cast<std::size_t>(op);
  return number != 0 && number < names.size() ? names[number] : "unknown operation";
}

/// The maximum nesting of pressure callbacks that call a journaled cache: deeper ones are not called.
inline constexpr std::uint32_t max_pressure_depth = 16;
[[deprecated("its name is max_pressure_depth")]] inline constexpr std::uint32_t most_pressure_depth =
    max_pressure_depth;

/// The version of the format in which a `paged_allocator` is recorded: the only one written or read.
inline constexpr std::uint32_t journal_version = 2;
/// The version in which a `hybrid_allocator` is recorded.
inline constexpr std::uint32_t hybrid_journal_version = 3;

/// The header of a `paged_allocator`'s journal. Of `options.pressure` only `low` is recorded, of
/// `options.metadata` nothing.
struct journal_header {
  std::uint32_t version = journal_version;
  paged_options options{};
  std::string configuration;  ///< free text of the engine: the policies' names, a build, a model
};

namespace paging {

/// The header of a `hybrid_allocator`'s journal. `options.groups` refers to `groups`, in copies too.
struct hybrid_journal_header {
  std::uint32_t version = hybrid_journal_version;
  hybrid_options options{};  ///< `metadata` is not recorded
  std::string configuration;
  std::vector<layer_group> groups;
  std::vector<std::string> names;  ///< of the groups

  hybrid_journal_header() = default;
  hybrid_journal_header(const hybrid_journal_header& other)
      : version(other.version),
        options(other.options),
        configuration(other.configuration),
        groups(other.groups),
        names(other.names) {
    bind();
  }
  hybrid_journal_header(hybrid_journal_header&&) noexcept = default;  // the vectors keep their memory
  hybrid_journal_header& operator=(hybrid_journal_header other) noexcept {
    version = other.version;
    options = std::move(other.options);
    configuration = std::move(other.configuration);
    groups = std::move(other.groups);
    names = std::move(other.names);
    return *this;
  }

  /// Lets the options refer to `groups`, and these to `names`.
  void bind() noexcept {
    for (std::size_t g = 0; g < groups.size() && g < names.size(); ++g)
      groups[g].name = names[g];
    options.groups = groups;
  }
};

}  // namespace paging

/// A journal that cannot be read at all; the text has the offset and the reason.
class journal_error : public error {
 public:
  using error::error;
};

/// The fence of a journaled cache: a point that its journal declares passed. The journal keeps the real
/// fences, so that it can record when they passed and a replay can repeat it.
class recorded_fence {
 public:
  /// Constructs a fence that has passed.
  constexpr recorded_fence() noexcept = default;
  constexpr recorded_fence(const std::uint64_t* passed, std::uint64_t point) noexcept
      : passed_(passed), point_(point) {}

  [[nodiscard]] bool ready() const noexcept { return passed_ == nullptr || *passed_ >= point_; }
  /// @throws argument_error when it has not passed, because nothing could declare it passed during a wait.
  void wait() const {
    if (!ready())
      throw argument_error(
          "recorded_fence: it has not passed; wait for the engine's fence that it represents");
  }

 private:
  const std::uint64_t* passed_ = nullptr;
  std::uint64_t point_ = 0;
};

static_assert(fence<recorded_fence>);

/// The destination of a journal: `write` takes all of the bytes, or returns false and is never called again.
/// It must not call the cache.
template <class S>
concept journal_sink = std::movable<S> && requires(S& sink, std::span<const std::byte> bytes) {
  { sink.write(bytes) } noexcept -> std::same_as<bool>;
};

/// A sink in memory, of fixed size.
class memory_journal {
 public:
  /// @param capacity  bytes, allocated at once and committed as they are used.
  explicit memory_journal(std::uint64_t capacity, const metadata_source& source = {})
      : bytes_(capacity, source, "memory_journal: bytes") {}

  [[nodiscard]] bool write(std::span<const std::byte> bytes) noexcept {
    if (bytes.size() > bytes_.size() - used_) return false;
    if (!bytes.empty()) std::memcpy(bytes_.data() + used_, bytes.data(), bytes.size());
    used_ += bytes.size();
    return true;
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept LLMMEM_LIFETIMEBOUND {
    return {bytes_.data(), used_};
  }

 private:
  detail::fixed_array<std::byte> bytes_;
  std::size_t used_ = 0;
};

static_assert(journal_sink<memory_journal>);

/// A sink that calls a function of the engine: for a file, a socket, or a ring that a thread empties.
struct callback_journal {
  bool (*call)(void* context, std::span<const std::byte> bytes) noexcept = nullptr;
  void* context = nullptr;

  [[nodiscard]] bool write(std::span<const std::byte> bytes) noexcept {
    return call != nullptr && call(context, bytes);
  }
};

static_assert(journal_sink<callback_journal>);

}  // namespace v0
}  // namespace llmmem
