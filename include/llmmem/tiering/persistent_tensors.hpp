/// @file
/// `persistent_tensors`: named tensors in a tier's file that a later process finds again.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/tiering/tensor_names.hpp>
#include <llmmem/tiering/tensor_table.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The outcome for the tensors that an earlier process kept.
struct persistent_recovery {
  bool is_new = false;         ///< nothing was kept under the set's name
  bool started_over = false;   ///< other tensors were kept and are now given up
  bool table_damaged = false;  ///< the table is unreadable; all tensors were given up
  bool other_file = false;     ///< the table belongs to another tier's file: all tensors were given up
  std::uint32_t kept = 0;      ///< tensors with all of their contents
  std::uint32_t empty = 0;     ///< tensors without contents, or with only some, at the last `persist`
  /// Tensors that were persisted and are now incomplete: the earlier process was overwriting them when it
  /// ended, they are damaged, or the tier gave them up (`persistent_file_space::recovery`).
  std::vector<tensor_id> missing{};
  std::string first_missing{};  ///< the name of the first missing tensor
  std::uint64_t removed = 0;    ///< chunks removed because no `persist` covers them

  /// Returns all of it in one sentence.
  [[nodiscard]] std::string message() const;
};

/// Named tensors on a buffer that outlive the process: a program that opens the same names, sizes and mapping
/// on the same file again finds their contents.
///
///     persistent_file_space<> disk("weights.tier", {.space = {.budget = 64 << 30}, .layout = fingerprint});
///     tiered_buffer<host_space, persistent_file_space<>> buffer({}, {host, 8 << 30}, {disk, 64 << 30});
///     persistent_tensors weights(buffer, disk, "weights", tensor_names(names), map_to_chunks(sizes));
///     log(weights.recovery().message());  // "296 tensors were restored"
///     for (const tensor_id each : weights.without_contents()) convert(each);
///     weights.persist().value();
///
/// - **Kept contents** are those of the last `persist`, or newer bytes that the tier has stored since. A
///   tensor first written after the last `persist` has no contents in the next process.
/// - **Each tensor is kept separately**: of tensors that change in place, some come back newer than others.
///   Keep state that must be of one step alternately in two sets, each with a tensor that the program
///   discards before the set changes and writes last (docs/tiered_tensors.md).
/// - **Three cases are distinguished**: tensors that were persisted and are missing (`recovery().missing`),
///   tensors that never were persisted, and other tensors under the same name. The last are refused with the
///   first difference, or given up (`other_layout::start_over`).
/// - **The table.** Names, places, and which parts have contents are in `<tier's file>.<set>.tensors`, which
///   belongs to that file: move and copy both. The table is replaced as a whole: by `persist` if it differs,
///   by a `discard` of a persisted tensor, and when a tensor is found missing.
/// - Everything else is as with `tiered_tensors`. The chunks belong to the buffer, and outlive the tensors.
///   Tensors opened again in the same process also have the contents of the last `persist`.
///
/// @tparam Buffer  a `tiered_buffer` whose last tier is a `persistent_file_space`.
/// @par Complexity      as `tiered_tensors`. Opening and `persist` allocate, and are O(tensors + chunks);
///                      opening without a table also O(most chunks in the tier's index).
/// @par Thread safety   as the buffer.
/// @par Errors          the constructor throws `argument_error` for tensors that differ from those that were
///                      kept, a set's name that cannot be part of a file's name, and a number of names that
///                      differs from the number of tensors; `io_error` for a table that cannot be read; and
///                      what `create` refuses. All other errors are values.
template <class Buffer>
class persistent_tensors : private tiered_tensors<Buffer> {
  using base = tiered_tensors<Buffer>;
  static_assert(Buffer::persists_chunks,
                "tensors are kept where the last tier keeps chunks: take a persistent_file_space for it");

 public:
  using typename base::read_lease;
  using typename base::top_range;
  using typename base::update_lease;
  using typename base::write_lease;
  template <access_mode Mode>
  using lease = typename base::template lease<Mode>;

  /// @param buffer  outlives the tensors.
  /// @param home    the space of its last tier.
  /// @param called  the tensors' names, by their number in the mapping.
  /// @param set     the name of this set: letters, digits, '_', '-', '.'; at most one live object has each
  ///                name.
  template <io_engine Engine>
  persistent_tensors(Buffer& buffer, const persistent_file_space<Engine>& home, std::string set,
                     tensor_names called, chunk_mapping placed,
                     tiering::other_layout on_other = tiering::other_layout::refuse)
      : persistent_tensors(buffer, home.file().path(), home.file_id(), home.index().capacity(),
                           std::move(set), std::move(called), std::move(placed), on_other) {}
  /// Leaves the chunks to the buffer. @pre no lease is held.
  ~persistent_tensors() { leave_chunks(); }
  persistent_tensors(const persistent_tensors&) = delete;
  persistent_tensors& operator=(const persistent_tensors&) = delete;

  /// @name Names
  /// @{
  [[nodiscard]] const tensor_names& names() const noexcept { return names_; }
  [[nodiscard]] std::optional<tensor_id> find(std::string_view name) const noexcept {
    return names_.find(name);
  }
  /// @}

  /// @name As `tiered_tensors`
  /// @{
  using base::bytes;
  using base::chunk;
  using base::evict;
  using base::flush;
  using base::for_each_part;
  using base::has_contents;
  using base::mapping;
  using base::parts;
  using base::prefetch;
  using base::read;
  using base::stats;
  using base::store;
  using base::update;
  using base::write;
  /// The same. For persisted contents, the table is replaced first, so that they are no longer persisted.
  result<void> discard(tensor_id tensor);
  /// @}

  /// @name Keeping
  /// @{ Returns the outcome of opening the tensors, with those that `check_kept` has found missing since.
  [[nodiscard]] const persistent_recovery& recovery() const noexcept { return recovery_; }
  /// Returns the tensors without all of their contents: the program must compute or read these again.
  [[nodiscard]] std::vector<tensor_id> without_contents() const;
  /// Calls the buffer's `persist`, which covers everything in the buffer, and then writes the table. From
  /// then on neither a crash nor a loss of power loses the tensors' present contents, until they are written
  /// again. `errc::chunk_leased` while any tensor is written, or anything in a shared chunk is leased; the
  /// table is then as it was.
  result<void> persist();
  /// Reads each chunk that only the last tier has, discards all parts of the tensors with contents in a
  /// damaged chunk, and returns how many. They join `recovery().missing`. The buffer's own `check_kept`
  /// removes such chunks; their tensors are then refused until this function is called.
  result<std::uint64_t> check_kept();
  /// @}

  /// As the base's, and also reports a part that the table has although its contents are missing and
  /// `recovery()` does not say so.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  persistent_tensors(Buffer& buffer, const std::string& file, const chunk_key& file_id,
                     std::uint64_t most_chunks, std::string set, tensor_names called, chunk_mapping placed,
                     tiering::other_layout on_other);
  [[nodiscard]] static std::string checked(std::string set);
  /// Returns the key of a chunk of these tensors.
  [[nodiscard]] chunk_key key_of(std::uint32_t number) const {
    return key_of_name("tensors of " + set_ + ": chunk " + std::to_string(number));
  }
  void open(tiering::other_layout on_other, std::uint64_t most_chunks);
  /// @param most_chunks  the capacity of the tier's index.
  void remove_others(std::uint64_t most_chunks);
  [[nodiscard]] std::string first_other_chunk(const tensor_table& kept) const;
  void take_chunk(std::uint32_t number, bool is_vouched_for);
  void count_tensors();
  void leave_chunks() noexcept {
    for (auto& each : this->chunks_)
      each.handle = {};
  }
  [[nodiscard]] result<void> save(tensor_table now);

  std::string set_;
  std::string path_;  // of the table
  tensor_names names_;
  tensor_table table_;  // as in the file, if the file has a table of this set
  bool is_saved_ = false;
  bool is_unsure_ = false;  // whether the file has `table_`: a newer one may have its name
  persistent_recovery recovery_;
};

/// The former names of `persistent_tensors` and `persistent_recovery`. Deprecated: version 0.2 removes them.
template <class Buffer>
using kept_tensors [[deprecated("its name is persistent_tensors")]] = persistent_tensors<Buffer>;
using kept_recovery [[deprecated("its name is persistent_recovery")]] = persistent_recovery;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/persistent_tensors_body.hpp>
