/// @file
/// The chunks of a `tiered_buffer`: their handles, their records, and which of them share one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/detail/chunk_record.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A chunk as its handle identifies it: one of the sharers of a record.
struct chunk_name {
  std::uint32_t record = no_index;
  std::uint32_t leases = 0;       // under this name
  std::uint32_t next = no_index;  // the names of a record form a ring
  std::uint32_t previous = no_index;
};

/// Names and records. A handle refers to a name; names that share contents have one record. Eviction policies
/// and observers identify the chunk by its record's slot. The table moves no bytes and has no places: the
/// stack and the engine update the copies in a record.
///
/// A *name* below is the slot of a handle, a *slot* that of a record.
///
/// @par Complexity      O(1); `audit` O(chunks). No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's; failures are values with the buffer's name.
template <std::size_t Tiers, bool PersistsChunks>
class chunk_table {
 public:
  using record_type = chunk_record<Tiers, PersistsChunks>;
  static constexpr bool persists_chunks = PersistsChunks;

  /// Takes the buffer's name for texts, the most chunks, and the memory of the table from `options`.
  explicit chunk_table(const tiered_options& options)
      : name_(options.name),
        names_(options.max_chunks, options.metadata, "tiered_buffer: names"),
        records_(options.max_chunks, options.metadata, "tiered_buffer: chunks") {}
  chunk_table(const chunk_table&) = delete;
  chunk_table& operator=(const chunk_table&) = delete;

  /// @name Failures, with the buffer's name
  /// @{
  [[nodiscard]] const char* where() const noexcept { return name_.c_str(); }
  [[nodiscard]] failure check(chunk_handle chunk) const noexcept { return names_.check(chunk, where()); }
  /// Makes a failure that identifies a chunk by one of its names.
  [[nodiscard]] failure at_chunk(error_code code, std::uint32_t slot, std::uint64_t wanted = 0,
                                 std::uint64_t found = 0) const noexcept {
    return {code, records_[slot].name, wanted, found, where()};
  }
  /// @}

  /// @name Records
  /// @{
  [[nodiscard]] record_type& operator[](std::uint32_t slot) noexcept { return records_[slot]; }
  [[nodiscard]] const record_type& operator[](std::uint32_t slot) const noexcept { return records_[slot]; }
  /// Returns the record of a name.
  [[nodiscard]] std::uint32_t slot_of(std::uint32_t name) const noexcept { return names_[name].record; }
  /// Returns the record of a chunk; texts then name the record by that chunk. @pre `check` found nothing
  /// wrong.
  [[nodiscard]] std::uint32_t record_of(chunk_handle chunk) noexcept {
    const std::uint32_t slot = names_[chunk.slot].record;
    records_[slot].name = chunk.slot;
    return slot;
  }
  /// Slots below this may be live.
  [[nodiscard]] std::uint32_t slots() const noexcept {
    return static_cast<std::uint32_t>(records_.touched());
  }
  [[nodiscard]] bool is_live(std::uint32_t slot) const noexcept { return records_.is_live(slot); }
  /// Returns the hint by which an eviction policy recognises a chunk after it has left.
  [[nodiscard]] access_hint hint_of(std::uint32_t slot) const noexcept;
  /// @}

  /// @name Names
  /// @{
  [[nodiscard]] std::uint32_t names() const noexcept { return static_cast<std::uint32_t>(names_.touched()); }
  [[nodiscard]] bool is_named(std::uint32_t name) const noexcept { return names_.is_live(name); }
  [[nodiscard]] chunk_handle handle(std::uint32_t name) const noexcept { return names_.handle(name); }
  /// Enters a chunk with its own record. `errc::table_full`.
  [[nodiscard]] result<chunk_handle> enter(const record_type& fresh) noexcept;
  /// Adds a name to a record. `errc::table_full`.
  [[nodiscard]] result<chunk_handle> share(std::uint32_t slot) noexcept;
  /// Gives a name its own record, and returns its slot. @pre others share its record.
  std::uint32_t part(std::uint32_t name, const record_type& fresh) noexcept;
  /// Ends a name; the last name ends the record as well.
  void remove(std::uint32_t name) noexcept;
  /// @}

  /// @name Accounts
  /// @{
  /// Returns the leases of one name; the record's `leases` counts those of all its sharers.
  [[nodiscard]] std::uint32_t leases_of(std::uint32_t name) const noexcept { return names_[name].leases; }
  void begin_lease(std::uint32_t name, record_type& c) noexcept {
    ++names_[name].leases;
    ++c.leases;
    ++c.uses;
  }
  void end_lease(std::uint32_t name, record_type& c) noexcept {
    --names_[name].leases;
    --c.leases;
  }
  /// Notes that the contents may have changed.
  void mark_changed(record_type& c) noexcept { c.changed = ++changes_; }
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  [[nodiscard]] std::uint64_t identity() const noexcept { return identity_; }
  /// Returns the number of names that share a record with another name.
  [[nodiscard]] std::uint64_t shared() const noexcept { return shared_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return names_.bytes() + records_.bytes(); }
  /// Checks that names and records agree on sharers and leases.
  void audit(std::vector<std::string>& found) const;
  /// @}

 private:
  void join(std::uint32_t name, std::uint32_t slot) noexcept;
  void leave(std::uint32_t name) noexcept;
  [[nodiscard]] failure full() const noexcept {
    return {errc::table_full, static_cast<std::uint32_t>(full_table::chunks), 1, 0, where()};
  }

  std::string name_;
  handle_table<chunk_handle, chunk_name> names_;
  handle_table<chunk_handle, record_type> records_;
  std::uint64_t changes_ = 0;
  std::uint64_t identity_ = number_of_its_own(this);
  std::uint64_t shared_ = 0;
};

template <std::size_t Tiers, bool PersistsChunks>
access_hint chunk_table<Tiers, PersistsChunks>::hint_of(std::uint32_t slot) const noexcept {
  // The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): different for different handles, never 0.
  std::uint64_t x = (std::uint64_t{records_.handle(slot).generation} << 32) + slot;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return {.next_use = records_[slot].next_use, .content = x ^ (x >> 31)};
}

template <std::size_t Tiers, bool PersistsChunks>
result<chunk_handle> chunk_table<Tiers, PersistsChunks>::enter(const record_type& fresh) noexcept {
  const std::uint32_t name = names_.acquire({});
  if (name == no_index) return full();
  // Cannot fail: there are at most as many records as names.
  const std::uint32_t slot = records_.acquire(fresh);
  mark_changed(records_[slot]);
  join(name, slot);
  return names_.handle(name);
}

template <std::size_t Tiers, bool PersistsChunks>
result<chunk_handle> chunk_table<Tiers, PersistsChunks>::share(std::uint32_t slot) noexcept {
  const std::uint32_t name = names_.acquire({});
  if (name == no_index) return full();
  join(name, slot);
  return names_.handle(name);
}

template <std::size_t Tiers, bool PersistsChunks>
std::uint32_t chunk_table<Tiers, PersistsChunks>::part(std::uint32_t name,
                                                       const record_type& fresh) noexcept {
  const std::uint32_t own = records_.acquire(fresh);
  mark_changed(records_[own]);
  leave(name);
  join(name, own);
  return own;
}

template <std::size_t Tiers, bool PersistsChunks>
void chunk_table<Tiers, PersistsChunks>::remove(std::uint32_t name) noexcept {
  const std::uint32_t slot = names_[name].record;
  leave(name);
  if (records_[slot].sharers == 0) records_.release(slot);
  names_.release(name);
}

/// Gives a name its record.
template <std::size_t Tiers, bool PersistsChunks>
void chunk_table<Tiers, PersistsChunks>::join(std::uint32_t name, std::uint32_t slot) noexcept {
  record_type& c = records_[slot];
  chunk_name& n = names_[name];
  n.record = slot;
  n.previous = c.sharers == 0 ? name : c.name;
  n.next = c.sharers == 0 ? name : names_[c.name].next;
  names_[n.next].previous = name;
  names_[n.previous].next = name;
  c.name = name;
  if (++c.sharers > 1) shared_ += c.sharers == 2 ? 2 : 1;
}

/// Takes a name from its record, which may then have no name left.
template <std::size_t Tiers, bool PersistsChunks>
void chunk_table<Tiers, PersistsChunks>::leave(std::uint32_t name) noexcept {
  const chunk_name n = names_[name];
  record_type& c = records_[n.record];
  names_[n.next].previous = n.previous;
  names_[n.previous].next = n.next;
  if (c.name == name) c.name = n.next;
  if (c.sharers > 1) shared_ -= c.sharers == 2 ? 2 : 1;
  --c.sharers;
}

template <std::size_t Tiers, bool PersistsChunks>
void chunk_table<Tiers, PersistsChunks>::audit(std::vector<std::string>& found) const {
  const auto say = [&](std::uint32_t name, const std::string& what) {
    found.push_back(name_ + ": chunk " + std::to_string(name) + " " + what);
  };
  std::vector<std::uint32_t> sharers(slots());
  std::vector<std::uint32_t> leases(slots());
  for (std::uint32_t name = 0; name < names(); ++name) {
    if (!is_named(name)) continue;
    const chunk_name& n = names_[name];
    if (n.record >= slots() || !is_live(n.record)) {
      say(name, "has no record");
      continue;
    }
    ++sharers[n.record];
    leases[n.record] += n.leases;
    if (names_[n.next].previous != name || names_[n.next].record != n.record)
      say(name, "is not among those that share its record");
  }
  std::uint64_t shared = 0;
  for (std::uint32_t slot = 0; slot < slots(); ++slot) {
    if (!is_live(slot)) continue;
    const record_type& c = records_[slot];
    if (c.sharers > 1) shared += c.sharers;
    if (c.sharers != sharers[slot] || c.sharers == 0) {
      say(c.name,
          "has " + std::to_string(c.sharers) + " sharers, there are " + std::to_string(sharers[slot]));
    } else if (names_[c.name].record != slot || !names_.is_live(c.name)) {
      say(c.name, "is named by a record that is not its own");
    }
    if (c.leases != leases[slot]) {
      say(c.name, "has " + std::to_string(c.leases) + " leases, its sharers " + std::to_string(leases[slot]));
    }
    if (c.writing && c.leases != 1) say(c.name, "is written under " + std::to_string(c.leases) + " leases");
  }
  if (shared != shared_) {
    found.push_back(name_ + ": " + std::to_string(shared) + " chunks are shared, " + std::to_string(shared_) +
                    " are counted");
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
