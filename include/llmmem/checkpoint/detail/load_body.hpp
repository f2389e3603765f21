/// @file
/// How a checkpoint is read: what to copy from which file, chunk by chunk.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/file_chunks.hpp>
#include <llmmem/checkpoint/detail/file_plan_body.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/reshard.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// What is read of a file.
struct load_file {
  std::uint32_t file = 0;
  std::vector<load_copy> copies{};
};

/// The catalogue, pieces and wishes that a plan is made of.
struct load_wishes {
  std::vector<tensor_facts> catalogue{};
  std::vector<stored_piece> stored{};
  std::vector<const checkpoint_piece*> pieces{};  // of the stored ones
  std::vector<std::uint32_t> tensors{};           // in the manifest, of the catalogue's
  std::vector<wanted_piece> wanted{};
};

[[nodiscard]] inline const checkpoint_tensor& tensor_of(const found_checkpoint& from,
                                                        const wanted_tensor& wanted,
                                                        const std::vector<std::uint32_t>& by_name) {
  const auto name_of_tensor = [&](std::uint32_t i) -> std::string_view {
    return from.manifest.tensors[i].name;
  };
  const auto found = std::ranges::lower_bound(by_name, std::string_view(wanted.name), {}, name_of_tensor);
  const std::string named = from.folder + ": tensor " + json_quoted(wanted.name);
  if (found == by_name.end() || name_of_tensor(*found) != wanted.name)
    throw argument_error(named + " is not in this checkpoint");
  const checkpoint_tensor& tensor = from.manifest.tensors[*found];
  if (wanted.type && *wanted.type != tensor.type) {
    throw argument_error(named + " is of type " + std::string(name_of(tensor.type)) + ", wanted is " +
                         std::string(name_of(*wanted.type)));
  }
  if (wanted.shape && *wanted.shape != tensor.shape) {
    const auto text = [](const std::vector<std::uint64_t>& shape) {
      std::string all;
      for (const std::uint64_t each : shape)
        all += (all.empty() ? "" : " x ") + std::to_string(each);
      return all.empty() ? std::string("a single element") : all;
    };
    throw argument_error(named + " is " + text(tensor.shape) + ", wanted is " + text(*wanted.shape));
  }
  return tensor;
}

[[nodiscard]] inline load_wishes make_wishes(const found_checkpoint& from,
                                             std::span<const wanted_tensor> wanted) {
  std::vector<std::uint32_t> by_name(from.manifest.tensors.size());
  for (std::uint32_t i = 0; i < by_name.size(); ++i)
    by_name[i] = i;
  std::ranges::sort(by_name, {},
                    [&](std::uint32_t i) -> std::string_view { return from.manifest.tensors[i].name; });
  load_wishes wishes;
  constexpr std::uint32_t unseen = ~std::uint32_t{0};
  std::vector<std::uint32_t> places(from.manifest.tensors.size(), unseen);
  for (const wanted_tensor& each : wanted) {
    const checkpoint_tensor& tensor = tensor_of(from, each, by_name);
    const auto number = static_cast<std::uint32_t>(&tensor - from.manifest.tensors.data());
    const tensor_shape shape = tensor_shape::of(tensor.shape);
    if (each.part) each.part->validate(shape.elements(), from.folder + ": tensor " + json_quoted(each.name));
    if (places[number] == unseen) {
      places[number] = static_cast<std::uint32_t>(wishes.catalogue.size());
      const tensor_id id{places[number]};
      wishes.catalogue.push_back({from.folder + ": tensor " + json_quoted(tensor.name), shape, 1});
      wishes.tensors.push_back(number);
      for (const checkpoint_piece& piece : tensor.pieces) {
        wishes.stored.push_back({id, holder_id{piece.file}, piece.runs});
        wishes.pieces.push_back(&piece);
      }
    }
    wishes.wanted.push_back({tensor_id{places[number]}, rank_id{0},
                             each.part.value_or(element_runs::all_of(shape.elements())), no_holder});
  }
  return wishes;
}

/// Reads a file's header, by whole chunks that are held to their checksums where that is asked for.
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

/// Where a piece's bytes begin in its file, whose header must agree with the manifest.
[[nodiscard]] inline std::uint64_t find_piece(const safetensors_header& header, const checkpoint_piece& piece,
                                              const checkpoint_tensor& tensor, const std::string& path) {
  for (const safetensors_entry& each : header.entries) {
    if (each.name != piece.entry) continue;
    if (each.type != tensor.type || each.bytes() != bytes_of(tensor.type, piece.runs.elements(), path))
      throw format_error(path + ": tensor " + json_quoted(piece.entry) +
                         " has another type or size than the manifest says");
    return header.data_begin + each.begin;
  }
  throw format_error(path + ": the manifest says that tensor " + json_quoted(piece.entry) +
                     " is in it, which it is not");
}

/// Elements to bytes, of types that may share one.
[[nodiscard]] inline std::uint64_t whole_bytes(std::uint64_t elements, std::uint64_t bits,
                                               const std::string& what) {
  const std::uint64_t rest = elements % 8 * bits;
  if (rest % 8 != 0)
    throw argument_error(what + ": a part of it begins or ends inside a byte; take parts of whole bytes");
  return elements / 8 * bits + rest / 8;
}

/// Reads the files of a plan, several readers at once.
class checkpoint_reader {
 public:
  checkpoint_reader(const found_checkpoint& from, load_sink sink, const load_options& options)
      : from_(&from), sink_(sink), options_(&options) {}

  void read(const load_file& file, const file_chunks& input) {
    const checkpoint_file& described = from_->manifest.files[file.file];
    next_.store(0);
    const auto work = [&] {
      try {
        if (options_->how == verification::checksums) {
          read_chunks(file, described, input);
        } else {
          read_runs(file, input);
        }
      } catch (...) {
        const std::scoped_lock lock(mutex_);
        if (!failed_) failed_ = std::current_exception();
        next_.store(none_left);
      }
    };
    std::vector<std::thread> readers;
    const std::size_t useful = std::min<std::size_t>(options_->readers, described.chunks.size());
    readers.reserve(useful);
    try {
      for (std::size_t i = 1; i < useful; ++i)
        readers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads are to be had: those that are there do
    }
    work();
    for (std::thread& each : readers)
      each.join();
    if (failed_) std::rethrow_exception(failed_);
  }

  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_.load(); }

 private:
  static constexpr std::uint64_t none_left = std::uint64_t{1} << 62;

  void read_chunks(const load_file& file, const checkpoint_file& described, const file_chunks& input) {
    const std::uint64_t chunk_bytes = from_->manifest.chunk_bytes;
    aligned_bytes memory(static_cast<std::size_t>(std::min(described.bytes, chunk_bytes)));
    for (std::uint64_t i = next_.fetch_add(1); i < described.chunks.size(); i = next_.fetch_add(1)) {
      const std::uint64_t begin = i * chunk_bytes;
      const std::uint64_t end = std::min(begin + chunk_bytes, described.bytes);
      const auto is_wanted = [&](const load_copy& each) { return each.begin < end && each.end() > begin; };
      if (std::ranges::none_of(file.copies, is_wanted)) continue;
      const auto bytes = memory.span().first(static_cast<std::size_t>(end - begin));
      input.read_chunk(static_cast<std::size_t>(i), bytes);
      read_bytes_.fetch_add(bytes.size());
      for (const load_copy& each : file.copies) {
        if (is_wanted(each)) sink_.give(sink_.sink, each, begin, bytes);
      }
    }
  }

  void read_runs(const load_file& file, const file_chunks& input) {
    constexpr std::uint64_t most = std::uint64_t{4} << 20;
    aligned_bytes memory(static_cast<std::size_t>(most));
    for (std::uint64_t i = next_.fetch_add(1); i < file.copies.size(); i = next_.fetch_add(1)) {
      const load_copy& copy = file.copies[static_cast<std::size_t>(i)];
      copy.each_within(copy.begin, copy.end(), [&](std::uint64_t at, std::uint64_t count, std::uint64_t to) {
        for (std::uint64_t done = 0; done < count;) {
          const auto part = memory.span().first(static_cast<std::size_t>(std::min(most, count - done)));
          input.read(at + done, part);
          read_bytes_.fetch_add(part.size());
          sink_.give(sink_.sink, {at + done, part.size(), 1, 0, copy.wanted, to + done, 0}, at + done, part);
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
  std::mutex mutex_;
  std::exception_ptr failed_;
};

LLMMEM_CHECKPOINT_BODY load_report load_into(storage_ref storage, const found_checkpoint& from,
                                             std::span<const wanted_tensor> wanted, load_sink sink,
                                             const load_options& options) {
  const load_wishes wishes = make_wishes(from, wanted);
  const reshard_plan plan = make_reshard(wishes.catalogue, wishes.stored, wishes.wanted);
  load_report report;
  std::vector<std::vector<const reshard_copy*>> by_file(from.manifest.files.size());
  for (const reshard_copy& each : plan.copies)
    by_file[to_index(wishes.stored[to_index(each.source)].holder)].push_back(&each);
  checkpoint_reader reader(from, sink, options);
  for (std::uint32_t file = 0; file < by_file.size(); ++file) {
    if (by_file[file].empty()) continue;
    const checkpoint_file& described = from.manifest.files[file];
    const file_chunks input(storage, from.folder, from.manifest, described);
    const std::string& path = input.path();
    const safetensors_header header = read_header(input, from, described, options.how, report.read_bytes);
    load_file todo{file, {}};
    for (const reshard_copy* const copy : by_file[file]) {
      const std::uint32_t source = to_index(copy->source);
      const checkpoint_tensor& tensor = from.manifest.tensors[wishes.tensors[to_index(copy->tensor)]];
      const std::uint64_t begin = find_piece(header, *wishes.pieces[source], tensor, path);
      const auto bytes = [&](std::uint64_t elements) {
        return whole_bytes(elements, bits_of(tensor.type), path + ": " + tensor.name);
      };
      todo.copies.push_back({begin + bytes(copy->source_offset), bytes(copy->run), copy->count,
                             bytes(copy->source_stride), to_index(copy->destination),
                             bytes(copy->destination_offset), bytes(copy->destination_stride)});
      report.bytes += bytes(copy->run) * copy->count;
    }
    std::ranges::sort(todo.copies, [](const load_copy& a, const load_copy& b) { return a.begin < b.begin; });
    reader.read(todo, input);
    ++report.files;
  }
  report.read_bytes += reader.read_bytes();
  return report;
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY std::optional<std::vector<std::byte>> load_extra(storage_ref storage,
                                                                        const found_checkpoint& from,
                                                                        std::uint32_t rank,
                                                                        std::string_view name) {
  const std::string called = extra_name(rank, name);
  for (const checkpoint_tensor& each : from.manifest.tensors) {
    if (each.name != called) continue;
    // As `plan_extras` has it; then it is no longer than its file, which is known to be there.
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
