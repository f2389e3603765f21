/// @file
/// The parts of a tier of a `tiered_buffer`: its space, which copy it evicts, when written bytes move down,
/// and in what form.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/identity.hpp>
#include <llmmem/config.hpp>
#include <llmmem/eviction/admission.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/space/concepts.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// When bytes written to a tier's copy move to the tier below. The names are SGLang HiCache's.
template <class W>
concept write_policy = requires(std::uint32_t uses) {
  { W::writes_at(uses) } noexcept -> std::same_as<bool>;
};

/// Bytes move when the copy must leave, or is flushed: bytes that are overwritten before that never move.
struct write_back {
  /// Whether a copy moves down when its lease ends, if the chunk has been leased `uses` times.
  [[nodiscard]] static constexpr bool writes_at(std::uint32_t) noexcept { return false; }
};

/// Bytes move when the lease that wrote them ends: a copy that must leave is clean by then.
struct write_through {
  [[nodiscard]] static constexpr bool writes_at(std::uint32_t) noexcept { return true; }
};

/// As `write_through` from the n-th lease of a chunk on, because a chunk that is used once does not repay the
/// write.
template <std::uint32_t N>
struct write_through_selective {
  [[nodiscard]] static constexpr bool writes_at(std::uint32_t uses) noexcept { return uses >= N; }
};

/// As `Write`, and clean copies are *demoted* when another chunk needs their space here, or when they are
/// evicted. If the next tier has lost its copy and would admit it, the chunk is stored there in full before
/// it leaves. The next tier is then a victim cache: it has the chunks last used in this tier, so leases find
/// them there and not further down. For links that are much faster than those below them.
///
/// A demotion never waits for space: the next tier gives it free space, or the space of clean copies. If that
/// does not suffice, or the store fails, the copy is dropped, which loses nothing because it is clean.
/// Directly above the last tier, which has all clean contents, the policy changes nothing; it does not change
/// the `drop` of a plan either.
///
/// Source: Wong and Wilkes, "My cache or yours? Making storage more exclusive", USENIX ATC 2002, for DEMOTE.
template <write_policy Write = write_back>
struct demoting {
  static constexpr bool demotes = true;
  [[nodiscard]] static constexpr bool writes_at(std::uint32_t uses) noexcept {
    return Write::writes_at(uses);
  }
};

static_assert(write_policy<write_back> && write_policy<write_through> &&
              write_policy<write_through_selective<2>> && write_policy<demoting<>>);

/// A tier. A bare space means `tier<Space>`.
///
/// @tparam Space     where its bytes are stored; also the queue of copies within it.
/// @tparam Eviction  which copy leaves when it is full. Unused in the last tier, where every chunk has its
///                   place.
/// @tparam Write     when bytes written here move down.
/// @tparam Codec     the form in which chunks are stored here. Only the last tier can have one, and the host
///                   must be able to access the tier above it. Encoding and decoding run on the calling
///                   thread, in staging memory that the constructor takes from that tier's budget.
/// @tparam Admission which passing chunks stay here. Only middle tiers ask it, once for each passage of a
///         chunk that has no copy in the tier: when it comes up, or goes down without having come up since
///         the last question. A refused chunk has its space while it passes: the copy leaves as soon as the
///         next tier has all of it. On its way down it continues without a further call, as if written
///         through.
template <memory_space Space, eviction_policy Eviction = lru_eviction, write_policy Write = write_back,
          codec Codec = identity_codec, admission_policy Admission = admit_all>
  requires copy_queue<Space, Space>
struct tier {
  using space_type = Space;
  using eviction_type = Eviction;
  using write_type = Write;
  using codec_type = Codec;
  using admission_type = Admission;
};

namespace detail {

template <class T>
struct lifted_tier {
  static_assert(memory_space<T>,
                "a tier is a memory_space, as host_space or file_space<>, or a tier<Space, ...>: "
                "<llmmem/space/concepts.hpp> lists the members of a space");
  static_assert(copy_queue<T, T>, "the space of a tier must copy within itself: copy_async(to, from)");
  using type = tier<T>;
};
template <class Space, class Eviction, class Write, class Codec, class Admission>
struct lifted_tier<tier<Space, Eviction, Write, Codec, Admission>> {
  using type = tier<Space, Eviction, Write, Codec, Admission>;
};
template <class T>
using lifted_tier_t = typename lifted_tier<T>::type;

/// Whether clean copies move to the next tier before they leave.
template <write_policy Write>
[[nodiscard]] consteval bool demotes() noexcept {
  if constexpr (requires { Write::demotes; }) {
    return Write::demotes;
  } else {
    return false;
  }
}

/// Whether a space holds bytes outside this process's memory, so that they are verified when they return.
template <class Space>
[[nodiscard]] consteval bool leaves_memory() noexcept {
  if constexpr (requires { Space::leaves_memory; }) {
    return Space::leaves_memory;
  } else {
    return false;
  }
}

/// Whether a space has an index of its chunks, by which another process finds them.
template <class Space>
[[nodiscard]] consteval bool persists_chunks() noexcept {
  static_assert(
      !requires { Space::keeps_chunks; } || requires { Space::persists_chunks; },
      "a space says by `persists_chunks` that its chunks outlive the process: rename its `keeps_chunks`");
  if constexpr (requires { Space::persists_chunks; }) {
    return Space::persists_chunks;
  } else {
    return false;
  }
}

}  // namespace detail

/// The space of a tier, and the bytes that the tier may take of it.
template <memory_space Space>
struct tier_place {
  Space* space = nullptr;
  std::uint64_t budget = 0;          ///< bytes, resident and in flight together
  std::uint64_t granularity = 4096;  ///< chunks begin at, and take, multiples of this
  /// Chunks and gaps that it can account for, at some 94 bytes of memory each; 0: as many as `max_chunks` can
  /// require.
  std::uint32_t max_pieces = 0;

  tier_place(Space& where, std::uint64_t bytes, std::uint64_t unit = 4096) noexcept
      : space(&where), budget(bytes), granularity(unit) {}

  /// Rejects any other space than the tier's, with a sentence from the compiler.
  template <class Other>
    requires(!std::derived_from<Other, Space>)
  tier_place(Other& /*where*/, std::uint64_t /*bytes*/, std::uint64_t /*unit*/ = 4096) noexcept {
    static_assert(
        sizeof(Other) == 0,
        "this place names a space of another type than its tier's: give a tiered_buffer its places in the "
        "order of its tiers, as in tiered_buffer<host_space, file_space<>> buffer({}, {host, bytes}, "
        "{file, bytes})");
  }
};

}  // namespace v0
}  // namespace llmmem
