/// @file
/// `persistent_tensors`: tensors with names that a later process finds again, in a tier's file.
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

/// What became of the tensors that an earlier process kept.
struct persistent_recovery {
  bool is_new = false;         ///< nothing was kept under that name
  bool started_over = false;   ///< other tensors were kept, and given up
  bool table_damaged = false;  ///< it could not be told which were kept; all were given up
  bool other_file = false;     ///< the table is of another tier's file: all was given up
  std::uint32_t kept = 0;      ///< tensors whose contents are all there
  std::uint32_t empty = 0;     ///< tensors that had none, or not all, at the last `persist`
  /// Tensors that were persisted and are not all there: they were being overwritten when the process ended,
  /// lie damaged, or the tier gave them up (`persistent_file_space::recovery`).
  std::vector<tensor_id> missing{};
  std::string first_missing{};  ///< the name of the first of these
  std::uint64_t removed = 0;    ///< chunks that were there and that no `persist` vouched for

  /// All of it in one sentence.
  [[nodiscard]] std::string message() const;
};

/// Tensors on a buffer, by name, that outlive the process: the same names, sizes and mapping opened again
/// on the same file find their contents.
///
///     persistent_file_space<> disk("weights.tier", {.space = {.budget = 64 << 30}, .layout = fingerprint});
///     tiered_buffer<host_space, persistent_file_space<>> buffer({}, {host, 8 << 30}, {disk, 64 << 30});
///     persistent_tensors weights(buffer, disk, "weights", tensor_names(names), map_to_chunks(sizes));
///     log(weights.recovery().message());  // "296 tensors are there again"
///     for (const tensor_id each : weights.without_contents()) convert(each);
///     weights.persist().value();
///
/// - **What is kept** is what was there at the last `persist`, or what was stored of it since. A tensor that
///   was first written after it has no contents in the next process.
/// - **Each tensor by itself**: of tensors that change in place some come back newer than others. State that
///   must be of one step goes into two sets by turns, each with a tensor that is discarded before the set
///   changes and written last (docs/tiered_tensors.md).
/// - **Told apart**: tensors that were persisted and are not there (`recovery().missing`), those that never
///   were, and other tensors than these under the same name: refused with the first difference, or given up
///   (`other_layout::start_over`).
/// - **The table.** Names, places, and which parts have contents lie in `<tier's file>.<set>.tensors`, which
///   belongs to that file: move and copy both. It is replaced as a whole, by `persist` where it differs, by
///   a `discard` of what was persisted, and when something of it is found missing.
/// - Everything else is as with `tiered_tensors`. The chunks are the buffer's, and stay there when the
///   tensors end, for as long as it lives; opened again in the same process they are as of the last
///   `persist` too.
///
/// @tparam Buffer  a `tiered_buffer` whose last tier is a `persistent_file_space`.
/// @par Complexity      as `tiered_tensors`. Opening and `persist` allocate, and are O(tensors + chunks);
///                      opening without a table also O(most chunks in the tier's index).
/// @par Thread safety   as the buffer.
/// @par Errors          the constructor throws `argument_error` for other tensors than those that were kept,
///                      a set's name that is no part of a file's, and as many names as there are not tensors;
///                      `io_error` for a table that cannot be read; and what `create` refuses. Everything
///                      else is a value.
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
  /// @param set     what these tensors are kept as: letters, digits, '_', '-', '.'; not two at once of one.
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
  /// The same. Contents that were persisted are so no more: the table is replaced first.
  result<void> discard(tensor_id tensor);
  /// @}

  /// @name Keeping
  /// @{
  /// What was found when they were opened, and what `check_kept` found missing since.
  [[nodiscard]] const persistent_recovery& recovery() const noexcept { return recovery_; }
  /// Tensors that have not all of their contents: what is to be made or read anew.
  [[nodiscard]] std::vector<tensor_id> without_contents() const;
  /// The buffer's `persist`, of everything in it, and then the table. From then on neither a crash nor a loss
  /// of power takes what the tensors have now, until they are written again. `errc::chunk_leased` while any
  /// tensor is written, or anything in a shared chunk is leased; the table is then as it was.
  result<void> persist();
  /// Reads each chunk that rests in the last tier only, and discards the tensors that have any contents in
  /// one whose bytes are damaged, all parts of them; how many. They join `recovery().missing`. The buffer's
  /// own `check_kept` removes such chunks, after which their tensors are refused until this one is called.
  result<std::uint64_t> check_kept();
  /// @}

  /// Beside the base's: a part that the table has and that lost its contents unnoticed.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  persistent_tensors(Buffer& buffer, const std::string& file, const chunk_key& file_id,
                     std::uint64_t most_chunks, std::string set, tensor_names called, chunk_mapping placed,
                     tiering::other_layout on_other);
  [[nodiscard]] static std::string checked(std::string set);
  /// The key of a chunk of these tensors.
  [[nodiscard]] chunk_key key_of(std::uint32_t number) const {
    return key_of_name("tensors of " + set_ + ": chunk " + std::to_string(number));
  }
  void open(tiering::other_layout on_other, std::uint64_t most_chunks);
  /// @param most_chunks  that the tier's index can hold.
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
  tensor_table table_;  // as it is in the file, where there is one of ours
  bool is_saved_ = false;
  bool is_unsure_ = false;  // whether it is `table_`: a newer one may have its name
  persistent_recovery recovery_;
};

/// What `persistent_tensors` and `persistent_recovery` were called before. Deprecated: they go with version
/// 0.2.
template <class Buffer>
using kept_tensors [[deprecated("its name is persistent_tensors")]] = persistent_tensors<Buffer>;
using kept_recovery [[deprecated("its name is persistent_recovery")]] = persistent_recovery;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/persistent_tensors_body.hpp>
