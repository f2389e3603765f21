/// @file
/// `kept_records`: keeps activations between a layer's forward and its backward pass, completely or in part,
/// in memory or in tiers.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A run of a record's bytes.
struct record_run {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t encoded =
      0;  ///< most bytes of its encoded form, by the codec of the records; 0: kept as it is
};

/// A layer's record, and the part of it that is kept between its passes; the rest is computed again.
struct record_form {
  std::uint64_t bytes = 0;
  std::vector<record_run> kept{};  ///< ascending, without overlap; none: keeps all of it

  [[nodiscard]] bool is_complete() const noexcept { return kept.empty(); }
  [[nodiscard, deprecated("call is_complete()")]] bool is_whole() const noexcept { return is_complete(); }
  /// Returns the bytes that are kept, in their encoded form.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept {
    if (is_complete()) return bytes;
    std::uint64_t sum = 0;
    for (const record_run& each : kept)
      sum += each.encoded != 0 ? each.encoded : each.bytes;
    return sum;
  }
  /// Returns whether the runs cover the record, so that nothing is computed again.
  [[nodiscard]] bool covers_all() const noexcept {
    std::uint64_t sum = 0;
    for (const record_run& each : kept)
      sum += each.bytes;
    return is_complete() || sum == bytes;
  }
};

/// The codec of records: a `positioned_codec` such as `block_int<8>`, or a type of an engine's own that
/// chooses one at run time, with these three calls of it.
template <class C>
concept record_codec = requires(C& codec, std::span<const std::byte> in, std::span<std::byte> out,
                                const encode_position& at, std::uint64_t bytes) {
  { codec.worst_case_bytes(bytes) } noexcept -> std::same_as<std::uint64_t>;
  { codec.encode(in, out, at) } noexcept -> std::same_as<result<std::uint64_t>>;
  { codec.decode(in, out) } noexcept -> std::same_as<result<void>>;
};

/// Records whose runs are all kept as they are.
struct no_record_codec {
  [[nodiscard]] static std::uint64_t worst_case_bytes(std::uint64_t) noexcept { return 0; }
  [[nodiscard]] static result<std::uint64_t> encode(std::span<const std::byte>, std::span<std::byte>,
                                                    const encode_position&) noexcept {
    return std::uint64_t{0};
  }
  [[nodiscard]] static result<void> decode(std::span<const std::byte>, std::span<std::byte>) noexcept {
    return {};
  }
};

/// The bytes of live records.
struct kept_records_stats {
  std::uint64_t live_bytes = 0;  ///< kept and in use, in any tier
  std::uint64_t peak_bytes = 0;
  std::uint64_t rebuilds = 0;
};

/// The records of a chain of layers, in a store of chunks: a `memory_chunks`, a `tiered_buffer`, or a
/// `prefetch_schedule` over a buffer.
///
///     kept_records records(buffer, forms);
///     auto space = records.save(i).value();            // filled by the forward pass
///     records.keep(i).value();                         // the store keeps it in its form
///     ...
///     auto found = records.fetch(i, rebuild).value();  // complete, with the rest made by rebuild
///     records.drop(i);
///
/// A record kept in part is made and used in one chunk, and its kept part is copied into another chunk. Both
/// chunks live while the layer is in use, as `plan_recompute` counts. The kept part may leave tier 0 between
/// the passes, like any chunk.
///
/// Runs may be kept *encoded*, in fewer bytes: activations of 8, 4 or 2 bits. Run r of record i is encoded at
/// the position of chunk i, the version that `set_version` gave, and group r.offset / 4, so its bits depend
/// neither on the store nor on when the store moves chunks. Runs that cover the record are not computed
/// again.
///
/// @tparam Store  has `create`, `read`, `write`, `discard` and `remove`. The host can touch its tier 0.
/// @tparam Codec  of encoded runs.
/// @par Complexity      a record kept completely is never copied; of any other, the kept bytes are copied
///                      or coded twice.
/// @par Thread safety   the store's thread.
/// @par Errors          the constructor throws `argument_error` for runs outside the record, runs whose
///                      encoded size is not the codec's worst case, and the refusals of `create`. Calls
///                      return the refusals of leases and of the codec. The record is then dropped, except
///                      that a `fetch` without its leases may be repeated.
template <class Store, record_codec Codec = no_record_codec>
class kept_records {
 public:
  /// The store outlives this object.
  kept_records(Store& store, std::vector<record_form> forms)
    requires(std::same_as<Codec, no_record_codec>)
      : kept_records(store, std::move(forms), Codec{}) {}
  kept_records(Store& store, std::vector<record_form> forms, Codec codec)
      : store_(&store), codec_(std::move(codec)) {
    entries_.reserve(forms.size());
    for (record_form& each : forms) {
      check(each, entries_.size());
      entries_.push_back({});
      entries_.back().form = std::move(each);
    }
    try {
      for (entry& each : entries_) {
        each.record = store_->create(each.form.bytes).value();
        if (!each.form.is_complete()) each.kept = store_->create(each.form.kept_bytes()).value();
        each.lengths.resize(each.form.kept.size());
      }
    } catch (...) {
      remove_all();
      throw;
    }
  }
  kept_records(const kept_records&) = delete;
  kept_records& operator=(const kept_records&) = delete;
  ~kept_records() { remove_all(); }

  /// Sets the version of what is kept from now on: the step of training.
  void set_version(std::uint64_t version) noexcept { version_ = version; }
  /// Returns memory for record `i`, with unspecified contents.
  [[nodiscard]] result<std::span<std::byte>> save(std::uint32_t i) {
    entry& it = entries_[i];
    auto had = store_->write(it.record);
    if (!had) return had.error();
    count(it.form.bytes);
    return begin(it, std::move(*had));
  }
  /// Declares record `i` filled, and keeps it. @pre it was saved
  result<void> keep(std::uint32_t i) {
    entry& it = entries_[i];
    if (it.form.is_complete()) {
      it.lease = std::monostate{};
      return {};
    }
    auto had = store_->write(it.kept);
    if (!had) {
      drop(i);
      return had.error();
    }
    count(it.form.kept_bytes());
    it.is_kept = true;
    const result<void> packed = pack(it, i, had->span());
    *had = {};
    if (!packed) {
      drop(i);
      return packed;
    }
    end_use(it);
    return {};
  }
  /// Returns record `i` complete. @param rebuild `void(std::uint32_t, std::span<std::byte>)`: makes the other
  /// bytes of a record that has its kept bytes. @pre it was kept
  template <class Rebuild>
  [[nodiscard]] result<std::span<const std::byte>> fetch(std::uint32_t i, Rebuild&& rebuild) {
    entry& it = entries_[i];
    if (it.form.is_complete()) {
      auto had = store_->read(it.record);
      if (!had) return had.error();
      const std::span<const std::byte> found = had->span();
      it.lease = std::move(*had);
      return found;
    }
    auto kept = store_->read(it.kept);
    if (!kept) return kept.error();
    auto had = store_->write(it.record);
    if (!had) return had.error();
    count(it.form.bytes);
    const std::span<std::byte> all = begin(it, std::move(*had)).value();
    const result<void> unpacked = unpack(it, kept->span());
    *kept = {};
    if (!unpacked) {
      drop(i);
      return unpacked.error();
    }
    end_kept(it);
    if (it.form.covers_all()) return std::span<const std::byte>(all);
    ++stats_.rebuilds;
    try {
      rebuild(i, all);
    } catch (...) {
      drop(i);
      throw;
    }
    return std::span<const std::byte>(all);
  }
  /// Drops record `i`, in any state.
  void drop(std::uint32_t i) noexcept {
    entry& it = entries_[i];
    if (it.form.is_complete() || !std::holds_alternative<std::monostate>(it.lease)) end_use(it);
    end_kept(it);
  }

  [[nodiscard]] const kept_records_stats& stats() const noexcept { return stats_; }
  [[nodiscard]] const record_form& form(std::uint32_t i) const noexcept { return entries_[i].form; }

 private:
  using handle_type = std::remove_cvref_t<decltype(std::declval<Store&>().create(std::uint64_t{}).value())>;

  struct entry {
    record_form form{};
    handle_type record{};
    handle_type kept{};
    bool is_kept = false;     // `kept` has contents
    bool is_counted = false;  // `record` is counted in the statistics
    std::span<std::byte> bytes{};
    std::vector<std::uint64_t> lengths{};  // of the encoded runs
    std::variant<std::monostate, typename Store::read_lease, typename Store::write_lease> lease{};
  };

  void check(const record_form& form, std::size_t i) {
    std::uint64_t end = 0;
    for (const record_run& run : form.kept) {
      const std::uint64_t encoded = run.encoded == 0 ? 0 : codec_.worst_case_bytes(run.bytes);
      if (run.encoded != encoded) {
        throw argument_error("kept_records: record " + std::to_string(i) + " encodes " +
                             std::to_string(run.bytes) + " bytes as " + std::to_string(run.encoded) +
                             ", but its codec takes " + std::to_string(encoded) +
                             "; give its worst_case_bytes, or 0 for a run that is kept as it is");
      }
      if (run.bytes != 0 && run.offset >= end && run.offset <= form.bytes &&
          run.bytes <= form.bytes - run.offset) {
        end = run.offset + run.bytes;
        continue;
      }
      throw argument_error("kept_records: record " + std::to_string(i) + " of " + std::to_string(form.bytes) +
                           " bytes keeps " + std::to_string(run.bytes) + " from byte " +
                           std::to_string(run.offset) +
                           " on; runs must be inside the record, in order, without overlap");
    }
    if (form.bytes == 0) throw argument_error("kept_records: record " + std::to_string(i) + " has 0 bytes");
  }
  /// Fills a kept part from its record.
  [[nodiscard]] result<void> pack(entry& it, std::uint32_t i, std::span<std::byte> into) noexcept {
    for (std::size_t r = 0; r < it.form.kept.size(); ++r) {
      const record_run& run = it.form.kept[r];
      const std::span<const std::byte> from =
          it.bytes.subspan(static_cast<std::size_t>(run.offset), static_cast<std::size_t>(run.bytes));
      if (run.encoded == 0) {
        std::memcpy(into.data(), from.data(), from.size());
      } else {
        const result<std::uint64_t> length =
            codec_.encode(from, into.first(static_cast<std::size_t>(run.encoded)),
                          {.chunk = i, .version = version_, .group = run.offset / 4});
        if (!length) return length.error();
        it.lengths[r] = *length;
      }
      into = into.subspan(static_cast<std::size_t>(run.encoded == 0 ? run.bytes : run.encoded));
    }
    return {};
  }
  /// Fills the kept runs of a record.
  [[nodiscard]] result<void> unpack(entry& it, std::span<const std::byte> from) noexcept {
    for (std::size_t r = 0; r < it.form.kept.size(); ++r) {
      const record_run& run = it.form.kept[r];
      const std::span<std::byte> into =
          it.bytes.subspan(static_cast<std::size_t>(run.offset), static_cast<std::size_t>(run.bytes));
      if (run.encoded == 0) {
        std::memcpy(into.data(), from.data(), into.size());
      } else if (const result<void> decoded =
                     codec_.decode(from.first(static_cast<std::size_t>(it.lengths[r])), into);
                 !decoded) {
        return decoded;
      }
      from = from.subspan(static_cast<std::size_t>(run.encoded == 0 ? run.bytes : run.encoded));
    }
    return {};
  }
  template <class Lease>
  [[nodiscard]] result<std::span<std::byte>> begin(entry& it, Lease lease) {
    it.bytes = lease.span();
    it.is_counted = true;
    it.lease = std::move(lease);
    return it.bytes;
  }
  void end_use(entry& it) noexcept {
    it.lease = std::monostate{};
    it.bytes = {};
    static_cast<void>(store_->discard(it.record));
    if (std::exchange(it.is_counted, false)) stats_.live_bytes -= it.form.bytes;
  }
  void end_kept(entry& it) noexcept {
    if (!std::exchange(it.is_kept, false)) return;
    static_cast<void>(store_->discard(it.kept));
    stats_.live_bytes -= it.form.kept_bytes();
  }
  void count(std::uint64_t bytes) noexcept {
    stats_.live_bytes += bytes;
    if (stats_.live_bytes > stats_.peak_bytes) stats_.peak_bytes = stats_.live_bytes;
  }
  void remove_all() noexcept {
    for (entry& each : entries_) {
      each.lease = std::monostate{};
      if (each.record != handle_type{}) static_cast<void>(store_->remove(each.record));
      if (each.kept != handle_type{}) static_cast<void>(store_->remove(each.kept));
    }
  }

  Store* store_;
  LLMMEM_NO_UNIQUE_ADDRESS Codec codec_;
  std::uint64_t version_ = 0;
  std::vector<entry> entries_{};
  kept_records_stats stats_{};
};

}  // namespace v0
}  // namespace llmmem
