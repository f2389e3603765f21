/// @file
/// The bodies of `device_file_io`.
#pragma once

#include <llmmem/transfer/device_file_io.hpp>

#include <cerrno>
#include <string>

namespace llmmem {
inline namespace v0 {

template <device_file_library Library>
device_file_io<Library>::device_file_io(const device_file_io_options& options, Library library)
    : options_(options), library_(std::move(library)) {
  const auto check = [](const char* what, std::uint32_t value, std::uint32_t most) {
    if (value >= 1 && value <= most) return;
    throw argument_error("device_file_io: " + std::string(what) + " is " + std::to_string(value) +
                         "; it must be 1 to " + std::to_string(most));
  };
  check("depth", options.depth, max_depth);
  check("batches", options.batches, max_batches);
  check("files", options.files, 1U << 16U);
  if (const char* const why = library_.why_not(); why != nullptr)
    throw system_error("device_file_io: " + std::string(why));
  const std::uint32_t all = options.depth * options.batches;
  files_ = {std::uint64_t{options.files} + all, opened_file{}, {}, "device_file_io: files"};
  requests_ = {all, request{}, {}, "device_file_io: requests"};
  queued_ = {all, 0U, {}, "device_file_io: queue"};
  starting_ = {options.depth, {}, {}, "device_file_io: batch"};
  for (std::uint32_t i = 0; i < options.batches; ++i) {
    const int error = library_.make(batches_[i].handle, options.depth);
    if (error == 0) continue;
    while (i != 0)
      library_.end(batches_[--i].handle);
    throw system_error("device_file_io: the library refused a batch, error number " + std::to_string(error));
  }
}

template <device_file_library Library>
device_file_io<Library>::~device_file_io() {
  std::array<io_completion, 16> unseen;
  for (std::uint32_t i = 0; i < options_.batches; ++i) {
    batch& each = batches_[i];
    int error = 0;
    while (each.left != 0 && error == 0) {
      std::uint32_t found = 0;
      const std::uint32_t most = each.left < unseen.size() ? each.left : std::uint32_t{unseen.size()};
      error = library_.poll(each.handle, std::span(unseen).first(most), 1, slice_ns, found);
      each.left -= found;
    }
    library_.end(each.handle);
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (files_[i].is_open) library_.close(files_[i].handle);
  }
}

template <device_file_library Library>
std::uint32_t device_file_io<Library>::entry_of(int descriptor) const noexcept {
  std::uint32_t i = 0;
  while (i != files_.size() && (!files_[i].is_open || files_[i].descriptor != descriptor))
    ++i;
  return i;
}

template <device_file_library Library>
std::uint32_t device_file_io<Library>::empty_entry() const noexcept {
  std::uint32_t i = 0;  // one for each file and request, so there is one
  while (files_[i].is_open)
    ++i;
  return i;
}

template <device_file_library Library>
void device_file_io<Library>::close_unused(opened_file& file) noexcept {
  if (file.uses != 0 || file.is_registered) return;
  library_.close(file.handle);
  file = {};
}

template <device_file_library Library>
int device_file_io<Library>::use_file(int descriptor, std::uint32_t& entry) noexcept {
  if (descriptor < 0) return EBADF;
  entry = entry_of(descriptor);
  if (entry == files_.size()) {
    entry = empty_entry();
    if (const int error = library_.open(files_[entry].handle, descriptor); error != 0) return error;
    files_[entry].descriptor = descriptor;
    files_[entry].is_open = true;
  }
  ++files_[entry].uses;
  return 0;
}

template <device_file_library Library>
bool device_file_io<Library>::try_queue(const io_request& of) noexcept {
  if (in_flight_ == requests_.size()) return false;
  std::uint32_t slot = 0;
  while (requests_[slot].is_used)
    ++slot;
  request& made = requests_[slot];
  made = {.of = of, .is_used = true};
  made.error = use_file(of.file, made.file);
  queued_[queued_count_++] = slot;
  ++in_flight_;
  return true;
}

template <device_file_library Library>
io_completion device_file_io<Library>::finish(std::uint32_t slot, std::int32_t outcome) noexcept {
  request& done = requests_[slot];
  if (done.error == 0) {
    opened_file& file = files_[done.file];
    --file.uses;
    close_unused(file);
  }
  done.is_used = false;
  --in_flight_;
  return {done.of.tag, outcome};
}

template <device_file_library Library>
std::size_t device_file_io<Library>::report_errors(std::span<io_completion> out) noexcept {
  std::size_t count = 0;
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < queued_count_; ++i) {
    const std::uint32_t slot = queued_[i];
    if (requests_[slot].error != 0 && count < out.size()) {
      out[count++] = finish(slot, -requests_[slot].error);
    } else {
      queued_[kept++] = slot;
    }
  }
  queued_count_ = kept;
  return count;
}

template <device_file_library Library>
void device_file_io<Library>::begin(batch& by) noexcept {
  std::uint32_t count = 0;
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < queued_count_; ++i) {
    const std::uint32_t slot = queued_[i];
    const request& each = requests_[slot];
    if (each.error != 0 || count == options_.depth) {
      queued_[kept++] = slot;
      continue;
    }
    starting_[count++] = {.file = files_[each.file].handle,
                          .way = each.of.way,
                          .data = each.of.data,
                          .bytes = each.of.bytes,
                          .offset = each.of.offset,
                          .tag = slot};
  }
  queued_count_ = kept;
  if (count == 0) return;
  const int error = library_.submit(by.handle, std::span(starting_.data(), count));
  if (error == 0) {
    by.left = count;
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::uint32_t>(starting_[i].tag);
    request& refused = requests_[slot];
    opened_file& file = files_[refused.file];
    --file.uses;
    close_unused(file);
    refused.error = error;
    queued_[queued_count_++] = slot;
  }
}

template <device_file_library Library>
void device_file_io<Library>::begin_batches() noexcept {
  for (std::uint32_t i = 0; i < options_.batches && queued_count_ != 0; ++i) {
    if (batches_[i].left == 0) begin(batches_[i]);
  }
}

template <device_file_library Library>
int device_file_io<Library>::collect(std::span<io_completion> out, std::size_t& count,
                                     std::uint64_t timeout_ns) noexcept {
  bool may_wait = timeout_ns != 0;
  for (std::uint32_t i = 0; i < options_.batches && count != out.size(); ++i) {
    batch& each = batches_[i];
    if (each.left == 0) continue;
    const std::size_t left = out.size() - count;
    const auto free = out.subspan(count, left < each.left ? left : each.left);
    std::uint32_t found = 0;
    // Only the first batch in flight is waited for.
    const int error = library_.poll(each.handle, free, may_wait ? 1 : 0, may_wait ? timeout_ns : 0, found);
    may_wait = false;
    for (io_completion& done : free.first(found))
      done = finish(static_cast<std::uint32_t>(done.tag), done.outcome);
    count += found;
    each.left -= found;
    if (error != 0) return error;
  }
  return 0;
}

template <device_file_library Library>
result<std::size_t> device_file_io<Library>::reap(std::span<io_completion> out,
                                                  const io_wait& wait) noexcept {
  if (out.empty()) return std::size_t{0};
  std::size_t count = 0;
  std::uint64_t waited_ns = 0;
  for (;;) {
    begin_batches();
    count += report_errors(out.subspan(count));
    const std::size_t least = wait.least < out.size() ? wait.least : out.size();
    const bool is_enough = count >= least || in_flight_ == 0 || waited_ns >= wait.timeout_ns;
    const std::uint64_t rest = wait.timeout_ns - waited_ns;
    const std::uint64_t timeout = is_enough ? 0 : rest < slice_ns ? rest : slice_ns;
    const int error = collect(out, count, timeout);
    if (error != 0 && count == 0) {
      return failure{
          .code = errc::engine_failed, .index = static_cast<std::uint32_t>(error), .where = "device_file_io"};
    }
    waited_ns += timeout;
    if (is_enough || error != 0 || woken_.exchange(false, std::memory_order_acq_rel)) break;
  }
  begin_batches();
  return count;
}

template <device_file_library Library>
result<void> device_file_io<Library>::register_memory(std::span<const std::span<std::byte>> ranges) noexcept {
  for (const std::span<std::byte>& each : ranges) {
    if (const int error = library_.keep_registered(each.data(), each.size()); error != 0) {
      return failure{.code = errc::engine_failed,
                     .index = static_cast<std::uint32_t>(error),
                     .where = "device_file_io: register_memory"};
    }
  }
  return {};
}

template <device_file_library Library>
bool device_file_io<Library>::register_file(int descriptor) noexcept {
  if (!takes_files_ || descriptor < 0) return false;
  std::uint32_t entry = entry_of(descriptor);
  const bool is_open = entry != files_.size();
  if (is_open && files_[entry].is_registered) return true;
  std::uint32_t registered = 0;
  for (std::size_t i = 0; i < files_.size(); ++i)
    registered += files_[i].is_registered ? 1U : 0U;
  if (registered == options_.files) return false;
  if (!is_open) entry = empty_entry();
  opened_file& file = files_[entry];
  if (!is_open && library_.open(file.handle, descriptor) != 0) return false;
  file.descriptor = descriptor;
  file.is_open = file.is_registered = true;
  return true;
}

template <device_file_library Library>
void device_file_io<Library>::forget_file(int descriptor) noexcept {
  const std::uint32_t entry =
      descriptor < 0 ? static_cast<std::uint32_t>(files_.size()) : entry_of(descriptor);
  if (entry == files_.size()) return;
  files_[entry].descriptor = -1;
  files_[entry].is_registered = false;
  close_unused(files_[entry]);
}

template <device_file_library Library>
void device_file_io<Library>::forget_files() noexcept {
  takes_files_ = false;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (files_[i].is_registered) forget_file(files_[i].descriptor);
  }
}

}  // namespace v0
}  // namespace llmmem
