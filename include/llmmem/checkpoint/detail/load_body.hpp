/// @file
/// Bodies of `checkpoint_loader`: which bytes to copy from which file, chunk by chunk.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/file_chunks.hpp>
#include <llmmem/checkpoint/detail/file_plan_body.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/reshard.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The bytes to read from a file.
struct load_file {
  std::uint32_t file = 0;
  std::vector<load_copy> copies{};
};

/// Reads a file's header, in whole verified chunks if the caller requests checksums.
[[nodiscard]] inline safetensors_header read_header(const file_chunks& input, const found_checkpoint& from,
                                                    const checkpoint_file& file, verification how,
                                                    std::uint64_t& read_bytes) {
  const std::string& path = input.path();
  std::vector<std::byte> begin;
  const auto extend_to = [&](std::uint64_t bytes) {
    const std::uint64_t chunk_bytes = from.manifest.chunk_bytes;
    while (begin.size() < bytes) {
      const std::size_t at = begin.size();
      const std::size_t chunk = at / static_cast<std::size_t>(chunk_bytes);
      if (how == verification::sizes) {
        begin.resize(static_cast<std::size_t>(bytes));
        input.read(at, std::span(begin).subspan(at));
      } else {
        begin.resize(at + static_cast<std::size_t>(chunk_bytes_of(file, chunk_bytes, chunk)));
        input.read_chunk(chunk, std::span(begin).subspan(at));
      }
      read_bytes += begin.size() - at;
    }
  };
  extend_to(std::min<std::uint64_t>(8, file.bytes));
  const std::uint64_t header_bytes = safetensors_header_bytes(begin, path);
  if (header_bytes > file.bytes)
    throw format_error(path + ": a header of " + std::to_string(header_bytes) + " bytes in a file of " +
                       std::to_string(file.bytes));
  extend_to(header_bytes);
  return read_safetensors(std::span(begin).first(static_cast<std::size_t>(header_bytes)), file.bytes, path);
}

/// Converts elements to bytes, for types whose elements may share a byte.
[[nodiscard]] inline std::uint64_t whole_bytes(std::uint64_t elements, std::uint64_t bits,
                                               const std::string& path, const std::string& tensor) {
  const std::uint64_t rest = elements % 8 * bits;
  if (rest % 8 != 0)
    throw argument_error(path + ": " + tensor +
                         ": a part of it begins or ends inside a byte; request parts of whole bytes");
  return elements / 8 * bits + rest / 8;
}

/// Lets one thread execute the requests of others, one after another; each requester waits for its own.
class handover {
 public:
  /// The other threads call this. Returns false if the handover was stopped; no further request is executed
  /// then.
  template <class Work>
  bool ask(Work work) {
    request mine{&work, [](void* of) { (*static_cast<Work*>(of))(); }, state::waits};
    std::unique_lock lock(mutex_);
    if (is_stopped_) return false;
    asked_.push_back(&mine);
    changed_.notify_all();
    changed_.wait(lock, [&] { return mine.how != state::waits; });
    return mine.how == state::done;
  }
  /// Another thread calls this at its end, after its last request.
  void leave() {
    const std::scoped_lock lock(mutex_);
    --others_;
    changed_.notify_all();
  }
  /// The one thread calls this: it serves requests until all others have left. An exception from `work` stops
  /// it, and is rethrown once all have left.
  void serve(std::size_t others) {
    std::unique_lock lock(mutex_);
    others_ += static_cast<std::ptrdiff_t>(others);
    std::exception_ptr failed;
    for (;;) {
      changed_.wait(lock, [&] { return !asked_.empty() || others_ == 0; });
      if (asked_.empty()) break;
      request& next = *asked_.front();
      asked_.erase(asked_.begin());
      if (!is_stopped_) {
        lock.unlock();
        try {
          next.run(next.work);
        } catch (...) {
          failed = std::current_exception();
        }
        lock.lock();
        is_stopped_ = failed != nullptr;
      }
      next.how = is_stopped_ ? state::refused : state::done;
      changed_.notify_all();
    }
    if (failed) std::rethrow_exception(failed);
  }

 private:
  enum class state : std::uint8_t { waits, done, refused };
  struct request {
    void* work;
    void (*run)(void* work);
    state how;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<request*> asked_{};
  std::ptrdiff_t others_ = 0;  // may be negative, because others may leave before `serve` counts them
  bool is_stopped_ = false;
};

/// The copies of a file, sorted by their beginnings, to find those within a range.
class copies_within {
 public:
  explicit copies_within(std::span<const load_copy> copies) : copies_(copies), ends_(copies.size()) {
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < copies.size(); ++i)
      ends_[i] = end = std::max(end, copies[i].end());
  }

  /// Returns the copies that may have bytes in `[begin, end)`; all others have none.
  [[nodiscard]] std::span<const load_copy> of(std::uint64_t begin, std::uint64_t end) const {
    const auto first = std::ranges::upper_bound(ends_, begin) - ends_.begin();
    const auto last = std::ranges::lower_bound(copies_, end, {}, &load_copy::begin) - copies_.begin();
    if (first >= last) return {};
    return copies_.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
  }

 private:
  std::span<const load_copy> copies_;  // sorted by `begin`
  std::vector<std::uint64_t> ends_;    // the highest end up to each copy
};

/// Reads the files of a plan with several readers concurrently.
class checkpoint_reader {
 public:
  checkpoint_reader(const found_checkpoint& from, load_sink sink, const load_options& options)
      : from_(&from), sink_(sink), options_(&options) {}

  void read(const load_file& file, const file_chunks& input) {
    next_.store(0);
    const std::size_t parts = options_->verify == verification::checksums
                                  ? from_->manifest.files[file.file].chunks.size()
                                  : file.copies.size();
    const std::size_t useful = std::min<std::size_t>(options_->readers, parts);
    const bool gives_here = options_->sink == sink_calls::by_caller;
    const bool shares = useful > 1;
    handover to_caller;
    const auto work = [&](handover* through) {
      try {
        if (options_->verify == verification::checksums) {
          read_chunks(file, input, through);
        } else {
          read_runs(file, input, through);
        }
      } catch (...) {
        const std::scoped_lock lock(mutex_);
        if (!failed_) failed_ = std::current_exception();
        next_.store(none_left);
      }
      if (through != nullptr) through->leave();
    };
    std::vector<std::thread> readers;
    readers.reserve(useful);
    try {
      // If the caller's thread passes bytes to the sink, it does not read.
      for (std::size_t i = gives_here ? 0 : 1; shares && i < useful; ++i)
        readers.emplace_back(work, gives_here ? &to_caller : nullptr);
    } catch (const std::system_error&) {  // the system has no more threads; the existing ones suffice
    }
    if (gives_here && !readers.empty()) {
      try {
        to_caller.serve(readers.size());
      } catch (...) {
        failed_ = std::current_exception();
      }
    } else {
      work(nullptr);
    }
    for (std::thread& each : readers)
      each.join();
    if (failed_) std::rethrow_exception(failed_);
  }

  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_.load(); }
  [[nodiscard]] std::uint64_t lookups() const noexcept { return looks_.load(); }

 private:
  static constexpr std::uint64_t none_left = std::uint64_t{1} << 62;

  /// Passes bytes to the sink on the right thread. Returns false if the load was stopped.
  template <class Give>
  [[nodiscard]] bool give(handover* through, Give work) {
    if (through != nullptr) return through->ask(work);
    work();
    return true;
  }

  void read_chunks(const load_file& file, const file_chunks& input, handover* through) {
    const checkpoint_file& described = from_->manifest.files[file.file];
    const std::uint64_t chunk_bytes = from_->manifest.chunk_bytes;
    aligned_bytes memory(static_cast<std::size_t>(std::min(described.bytes, chunk_bytes)));
    const copies_within copies(file.copies);
    for (std::uint64_t i = next_.fetch_add(1); i < described.chunks.size(); i = next_.fetch_add(1)) {
      const std::uint64_t begin = i * chunk_bytes;
      const std::uint64_t end = std::min(begin + chunk_bytes, described.bytes);
      const auto is_wanted = [&](const load_copy& each) { return each.begin < end && each.end() > begin; };
      const std::span<const load_copy> within = copies.of(begin, end);
      looks_.fetch_add(within.size());
      if (std::ranges::none_of(within, is_wanted)) continue;
      const auto bytes = memory.span().first(static_cast<std::size_t>(end - begin));
      input.read_chunk(static_cast<std::size_t>(i), bytes);
      read_bytes_.fetch_add(bytes.size());
      const bool goes_on = give(through, [&] {
        for (const load_copy& each : within) {
          if (is_wanted(each)) sink_.give(sink_.sink, each, begin, bytes);
        }
      });
      if (!goes_on) return;
    }
  }

  void read_runs(const load_file& file, const file_chunks& input, handover* through) {
    constexpr std::uint64_t most = std::uint64_t{4} << 20;
    aligned_bytes memory(static_cast<std::size_t>(most));
    bool goes_on = true;
    for (std::uint64_t i = next_.fetch_add(1); goes_on && i < file.copies.size(); i = next_.fetch_add(1)) {
      const load_copy& copy = file.copies[static_cast<std::size_t>(i)];
      copy.each_within(copy.begin, copy.end(), [&](std::uint64_t at, std::uint64_t count, std::uint64_t to) {
        for (std::uint64_t done = 0; goes_on && done < count;) {
          const auto part = memory.span().first(static_cast<std::size_t>(std::min(most, count - done)));
          input.read(at + done, part);
          read_bytes_.fetch_add(part.size());
          goes_on = give(through, [&] {
            sink_.give(sink_.sink, {at + done, part.size(), 1, 0, copy.wanted, to + done, 0}, at + done,
                       part);
          });
          done += part.size();
        }
      });
    }
  }

  const found_checkpoint* from_;
  load_sink sink_;
  const load_options* options_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> looks_{0};
  std::mutex mutex_;
  std::exception_ptr failed_;
};

/// Returns the indices of named items, sorted by name. @param name_of returns the name of an index.
template <class NameOf>
[[nodiscard]] std::vector<std::uint32_t> sorted_places(std::size_t count, NameOf name_of_place) {
  std::vector<std::uint32_t> places(count);
  for (std::uint32_t i = 0; i < places.size(); ++i)
    places[i] = i;
  std::ranges::sort(places, {}, name_of_place);
  return places;
}

/// Returns the item of that name, or null. @param sorted  from `sorted_places` of the same names.
template <class NameOf>
[[nodiscard]] const std::uint32_t* find_sorted(const std::vector<std::uint32_t>& sorted,
                                               std::string_view name, NameOf name_of_place) {
  const auto found = std::ranges::lower_bound(sorted, name, {}, name_of_place);
  return found != sorted.end() && name_of_place(*found) == name ? &*found : nullptr;
}

}  // namespace detail

/// The catalogue, pieces and requests from which a plan is made.
struct checkpoint_loader::wishes {
  std::vector<tensor_facts> catalogue{};
  std::vector<stored_piece> stored{};
  std::vector<const checkpoint_piece*> pieces{};  // the stored pieces
  std::vector<std::uint32_t> tensors{};           // the manifest's index of each tensor of the catalogue
  std::vector<wanted_piece> wanted{};
};

LLMMEM_CHECKPOINT_BODY checkpoint_loader::checkpoint_loader(storage_ref storage, const found_checkpoint& from,
                                                            const load_options& options)
    : storage_(storage),
      from_(&from),
      options_(options),
      by_name_(detail::sorted_places(
          from.manifest.tensors.size(),
          [&](std::uint32_t i) -> std::string_view { return from.manifest.tensors[i].name; })),
      files_(from.manifest.files.size()) {}

LLMMEM_CHECKPOINT_BODY const checkpoint_tensor& checkpoint_loader::tensor_of(
    const wanted_tensor& wanted) const {
  const std::uint32_t* const found = detail::find_sorted(
      by_name_, wanted.name,
      [&](std::uint32_t i) -> std::string_view { return from_->manifest.tensors[i].name; });
  const auto named = [&] { return from_->folder + ": tensor " + detail::json_quoted(wanted.name); };
  if (found == nullptr) throw argument_error(named() + " is not in this checkpoint");
  const checkpoint_tensor& tensor = from_->manifest.tensors[*found];
  if (wanted.type && *wanted.type != tensor.type) {
    throw argument_error(named() + " is of type " + std::string(name_of(tensor.type)) +
                         ", but the wanted type is " + std::string(name_of(*wanted.type)));
  }
  if (wanted.shape && *wanted.shape != tensor.shape) {
    const auto text = [](const std::vector<std::uint64_t>& shape) {
      std::string all;
      for (const std::uint64_t each : shape)
        all += (all.empty() ? "" : " x ") + std::to_string(each);
      return all.empty() ? std::string("a single element") : all;
    };
    throw argument_error(named() + " is " + text(tensor.shape) + ", but the wanted shape is " +
                         text(*wanted.shape));
  }
  return tensor;
}

LLMMEM_CHECKPOINT_BODY auto checkpoint_loader::make_wishes(std::span<const wanted_tensor> wanted) const
    -> wishes {
  wishes all;
  constexpr std::uint32_t unseen = ~std::uint32_t{0};
  std::vector<std::uint32_t> places(from_->manifest.tensors.size(), unseen);
  for (const wanted_tensor& each : wanted) {
    const checkpoint_tensor& tensor = tensor_of(each);
    const auto number = static_cast<std::uint32_t>(&tensor - from_->manifest.tensors.data());
    const tensor_shape shape = tensor_shape::of(tensor.shape);
    if (each.part)
      each.part->validate(shape.elements(), from_->folder + ": tensor " + detail::json_quoted(each.name));
    if (places[number] == unseen) {
      places[number] = static_cast<std::uint32_t>(all.catalogue.size());
      const tensor_id id{places[number]};
      all.catalogue.push_back({from_->folder + ": tensor " + detail::json_quoted(tensor.name), shape, 1});
      all.tensors.push_back(number);
      for (const checkpoint_piece& piece : tensor.pieces) {
        all.stored.push_back({id, holder_id{piece.file}, piece.runs});
        all.pieces.push_back(&piece);
      }
    }
    all.wanted.push_back({tensor_id{places[number]}, rank_id{0},
                          each.part.value_or(element_runs::all_of(shape.elements())), no_holder});
  }
  return all;
}

LLMMEM_CHECKPOINT_BODY auto checkpoint_loader::know(std::uint32_t file, const detail::file_chunks& input,
                                                    std::uint64_t& read_bytes) -> const known_file& {
  known_file& known = files_[file];
  if (known.is_read) return known;
  known.header = detail::read_header(input, *from_, from_->manifest.files[file], options_.verify, read_bytes);
  known.by_name = detail::sorted_places(
      known.header.entries.size(),
      [&](std::uint32_t i) -> std::string_view { return known.header.entries[i].name; });
  known.is_read = true;
  return known;
}

namespace detail {

/// Returns where a piece's bytes begin in its file. The file's header must agree with the manifest.
[[nodiscard]] inline std::uint64_t find_piece(const safetensors_header& header,
                                              const std::vector<std::uint32_t>& by_name,
                                              const checkpoint_piece& piece, const checkpoint_tensor& tensor,
                                              const std::string& path) {
  const std::uint32_t* const found = find_sorted(
      by_name, piece.entry, [&](std::uint32_t i) -> std::string_view { return header.entries[i].name; });
  if (found == nullptr) {
    throw format_error(path + ": the manifest says that tensor " + json_quoted(piece.entry) +
                       " is in it, but it is not");
  }
  const safetensors_entry& entry = header.entries[*found];
  if (entry.type != tensor.type || entry.bytes() != bytes_of(tensor.type, piece.runs.elements(), path))
    throw format_error(path + ": tensor " + json_quoted(piece.entry) +
                       " has a type or size other than the manifest says");
  return header.data_begin + entry.begin;
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY load_report checkpoint_loader::load_into(std::span<const wanted_tensor> wanted,
                                                                detail::load_sink sink) {
  const detail::named_range range("checkpoint load");
  const wishes all = make_wishes(wanted);
  const reshard_plan plan = make_reshard(all.catalogue, all.stored, all.wanted);
  load_report report;
  std::vector<std::vector<const reshard_copy*>> by_file(from_->manifest.files.size());
  for (const reshard_copy& each : plan.copies)
    by_file[to_index(all.stored[to_index(each.source)].holder)].push_back(&each);
  detail::checkpoint_reader reader(*from_, sink, options_);
  for (std::uint32_t file = 0; file < by_file.size(); ++file) {
    if (by_file[file].empty()) continue;
    const checkpoint_file& described = from_->manifest.files[file];
    if (options_.verify == verification::checksums && described.chunks.empty() && described.bytes != 0) {
      throw argument_error(storage_.path(described.name) +
                           ": it has no checksums; load it with verification::sizes");
    }
    const detail::file_chunks input(storage_, from_->folder, from_->manifest, from_->manifest.files[file]);
    const std::string& path = input.path();
    const known_file& known = know(file, input, report.read_bytes);
    detail::load_file todo{file, {}};
    for (const reshard_copy* const copy : by_file[file]) {
      const std::uint32_t source = to_index(copy->source);
      const checkpoint_tensor& tensor = from_->manifest.tensors[all.tensors[to_index(copy->tensor)]];
      const std::uint64_t begin =
          detail::find_piece(known.header, known.by_name, *all.pieces[source], tensor, path);
      const auto bytes = [&](std::uint64_t elements) {
        return detail::whole_bytes(elements, bits_of(tensor.type), path, tensor.name);
      };
      todo.copies.push_back({begin + bytes(copy->source_offset), bytes(copy->run), copy->count,
                             bytes(copy->source_stride), to_index(copy->destination),
                             bytes(copy->destination_offset), bytes(copy->destination_stride)});
      report.bytes += bytes(copy->run) * copy->count;
    }
    std::ranges::sort(todo.copies, {}, &detail::load_copy::begin);
    reader.read(todo, input);
    ++report.files;
  }
  report.read_bytes += reader.read_bytes();
  report.lookups = reader.lookups();
  return report;
}

LLMMEM_CHECKPOINT_BODY std::optional<std::vector<std::byte>> load_extra(storage_ref storage,
                                                                        const found_checkpoint& from,
                                                                        std::uint32_t rank,
                                                                        std::string_view name) {
  const std::string called = extra_name(rank, name);
  for (const checkpoint_tensor& each : from.manifest.tensors) {
    if (each.name != called) continue;
    // An extra is as `plan_extras` makes it, so it is no longer than its file, whose size is verified.
    if (each.pieces.size() != 1 || each.pieces[0].runs != element_runs::all_of(elements_of(each)))
      throw format_error(from.folder + ": extra " + detail::json_quoted(called) + " is not in one piece");
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(bytes_of(each.type, elements_of(each), from.folder + ": " + called)));
    const wanted_tensor wanted[] = {{.name = called}};
    load_checkpoint(storage, from, wanted,
                    [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> part) {
                      std::memcpy(bytes.data() + offset, part.data(), part.size());
                    },
                    {.readers = 1});
    return bytes;
  }
  return std::nullopt;
}

}  // namespace v0
}  // namespace llmmem
