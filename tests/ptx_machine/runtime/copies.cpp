/// @file
/// Copies and fills: what memory they may name, and when the host goes on.
///
/// As CUDA documents it: what a copy reads of pageable memory of the host is read before the call returns,
/// and may reach the device later; a copy into pageable memory is over when the call returns, as is one
/// between two places of the host.
#include "ptx_machine/runtime/state.hpp"

#include <algorithm>

using namespace ptx_machine;

namespace {

/// The most that a copy from pageable memory leaves on its way.
constexpr u64 most_staged = 65536;

[[nodiscard]] bool is_host(u64 at) {
  return !now().device.memory.is_device(at);
}
[[nodiscard]] bool is_pageable(u64 at) {
  return is_host(at) && now().device.memory.find(at) == nullptr;
}
/// The memory of a pool that an address is of, also where it is not allocated yet, or not freed.
[[nodiscard]] const pool_memory* pool_memory_at(u64 at) {
  auto next = now().from_pools.upper_bound(at);
  if (next == now().from_pools.begin()) return nullptr;
  --next;
  return at - next->first < next->second.bytes ? &next->second : nullptr;
}
/// Whether an operation may be given these bytes.
[[nodiscard]] bool is_known(u64 at, u64 bytes) {
  if (is_pageable(at) || bytes == 0) return true;
  if (is_host(at)) {
    const region& of = *now().device.memory.find(at);
    return bytes <= of.size - (at - of.base);
  }
  const pool_memory* const of = pool_memory_at(at);
  if (of == nullptr) return now().device.memory.pieces(at, bytes, [](u8*, u8*, u64) {});
  const u64 base = std::prev(now().from_pools.upper_bound(at))->first;
  return bytes <= of->bytes - (at - base);
}
cudaError_t check_moves(const task& what) {
  for (const move_of_bytes& each : what.moves) {
    const bool is_copy = each.value < 0;
    if (!is_known(each.to, each.bytes) || (is_copy && !is_known(each.from, each.bytes))) {
      say(what.call + ", of which some is no memory of the device, or of two registrations");
      return cudaErrorInvalidValue;
    }
    for (const u64 at : {each.to, is_copy ? each.from : each.to}) {
      const pool_memory* const of = pool_memory_at(at);
      if (of == nullptr || !of->is_freed || each.bytes == 0) continue;
      lose(cudaErrorIllegalAddress, what.call + ": " + hex(at) + " was given to cudaFreeAsync before");
      return cudaErrorIllegalAddress;
    }
  }
  return cudaSuccess;
}
void name_moves(task& what) {
  for (const move_of_bytes& each : what.moves) {
    what.names.push_back({each.to, each.bytes});
    if (each.value < 0) what.names.push_back({each.from, each.bytes});
  }
}

[[nodiscard]] std::string called(const char* name, u64 bytes, const void* to, const void* from) {
  return std::string(name) + " of " + std::to_string(bytes) + " bytes to " + hex(reinterpret_cast<u64>(to)) +
         (from == nullptr ? "" : " from " + hex(reinterpret_cast<u64>(from)));
}
[[nodiscard]] move_of_bytes move_of(void* to, const void* from, u64 bytes) {
  return {.to = reinterpret_cast<u64>(to), .from = reinterpret_cast<u64>(from), .bytes = bytes, .staged = {}};
}

/// Reads what is to be copied now.
void stage(move_of_bytes& of) {
  const auto* const from = reinterpret_cast<const u8*>(of.from);
  of.staged = std::make_shared<const std::vector<u8>>(from, from + of.bytes);
  of.from = reinterpret_cast<u64>(of.staged->data());
}
/// Takes what is before the last `most_staged` bytes out of a task.
[[nodiscard]] task all_but_last(task& of) {
  u64 all = 0;
  for (const move_of_bytes& each : of.moves)
    all += each.bytes;
  task head{.call = of.call};
  u64 left = all - most_staged;
  while (left != 0) {
    move_of_bytes& first = of.moves.front();
    const u64 some = std::min(left, first.bytes);
    head.moves.push_back(first);
    head.moves.back().bytes = some;
    left -= some;
    if (some == first.bytes) {
      of.moves.erase(of.moves.begin());
    } else {
      first.to += some;
      first.from += some;
      first.bytes -= some;
    }
  }
  return head;
}

/// @param is_call_over  of a call that returns once the copy is done, where CUDA says so.
cudaError_t copy(task what, cudaStream_t stream, bool is_synchronous) {
  stream_state* const on = stream_of(stream);
  if (on == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t status = check_moves(what); status != cudaSuccess) return status;
  if (on->into) {
    name_moves(what);
    return submit(*on, std::move(what));
  }
  const auto any = [&](auto is) { return std::any_of(what.moves.begin(), what.moves.end(), is); };
  const bool is_from_pageable = any([](const auto& each) { return is_pageable(each.from); });
  const bool has_host_ends = any([](const auto& each) { return is_host(each.from) && is_host(each.to); });
  const bool has_host_end = any([](const auto& each) { return is_host(each.from) || is_host(each.to); });
  const bool waits = has_host_ends || any([](const auto& each) { return is_pageable(each.to); }) ||
                     (is_synchronous && has_host_end && !is_from_pageable);
  if (const cudaError_t status = check_implicit(*on); status != cudaSuccess) return status;
  if (is_synchronous && is_from_pageable) now().operations.settle(before_next(*on));
  if (is_from_pageable && !waits) {
    u64 all = 0;
    for (move_of_bytes& each : what.moves) {
      if (is_pageable(each.from)) stage(each);
      all += each.bytes;
    }
    if (all > most_staged) {
      task head = all_but_last(what);
      name_moves(head);
      operation_pointer made;
      static_cast<void>(submit(*on, std::move(head), &made));
      now().operations.settle({made});
    }
  }
  name_moves(what);
  operation_pointer made;
  const cudaError_t status = submit(*on, std::move(what), &made);
  if (waits) now().operations.settle({made});
  return status;
}
cudaError_t copy_one(const char* name, void* to, const void* from, u64 bytes, cudaStream_t stream,
                     bool is_synchronous) {
  return call(
      [&] {
        task what{.call = called(name, bytes, to, from)};
        if (bytes != 0) what.moves.push_back(move_of(to, from, bytes));
        return copy(std::move(what), stream, is_synchronous);
      },
      is_synchronous ? effect::unsafe : effect::safe);
}
cudaError_t copy_rows(const char* name, void* to, size_t to_stride, const void* from, size_t from_stride,
                      size_t bytes, size_t rows, cudaStream_t stream, bool is_synchronous) {
  if (bytes > to_stride || bytes > from_stride) return told(cudaErrorInvalidPitchValue);
  return call(
      [&] {
        task what{.call = called(name, bytes * rows, to, from), .is_unordered = true};
        for (size_t r = 0; r < rows && bytes != 0; ++r)
          what.moves.push_back(move_of(static_cast<u8*>(to) + r * to_stride,
                                       static_cast<const u8*>(from) + r * from_stride, bytes));
        return copy(std::move(what), stream, is_synchronous);
      },
      is_synchronous ? effect::unsafe : effect::safe);
}

cudaError_t fill(const char* name, void* to, int value, u64 bytes, cudaStream_t stream, bool is_synchronous) {
  return call(
      [&] {
        stream_state* const on = stream_of(stream);
        if (on == nullptr) return cudaErrorInvalidResourceHandle;
        const auto at = reinterpret_cast<u64>(to);
        if (is_pageable(at) && bytes != 0) return cudaErrorInvalidValue;
        task what{.call = called(name, bytes, to, nullptr)};
        if (bytes != 0) what.moves.push_back({.to = at, .bytes = bytes, .value = value & 0xFF, .staged = {}});
        if (const cudaError_t status = check_moves(what); status != cudaSuccess) return status;
        name_moves(what);
        operation_pointer made;
        const cudaError_t status = submit(*on, std::move(what), &made);
        if (is_synchronous && is_host(at)) now().operations.settle({made});
        return status;
      },
      is_synchronous ? effect::unsafe : effect::safe);
}

/// The batch is refused on the legacy default stream, and in a capture; that goes on without it.
cudaError_t copy_batch(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                       cudaStream_t stream) {
  return call([&] {
    const stream_state* const on = stream_of(stream);
    if (on == nullptr) return cudaErrorInvalidResourceHandle;
    if (on == &now().default_stream) return cudaErrorInvalidValue;
    if (on->into) return cudaErrorStreamCaptureUnsupported;
    task what{.call = "cudaMemcpyBatchAsync of " + std::to_string(count) + " pieces", .is_unordered = true};
    for (size_t n = 0; n < count; ++n) {
      if (bytes[n] == 0) return cudaErrorInvalidValue;
      what.moves.push_back(move_of(to[n], from[n], bytes[n]));
    }
    return copy(std::move(what), stream, false);
  });
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy_one("cudaMemcpy", to, from, bytes, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy_one("cudaMemcpyAsync", to, from, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  if (to_device != 0 || from_device != 0) return told(cudaErrorInvalidDevice);
  return copy_one("cudaMemcpyPeerAsync", to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes,
                         size_t rows, cudaMemcpyKind) {
  return copy_rows("cudaMemcpy2D", to, to_stride, from, from_stride, bytes, rows, nullptr, true);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes,
                              size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  return copy_rows("cudaMemcpy2DAsync", to, to_stride, from, from_stride, bytes, rows, stream, false);
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
#else
cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count, cudaMemcpyAttributes*,
                                 size_t*, size_t, size_t*, cudaStream_t stream) {
#endif
  return copy_batch(to, from, bytes, count, stream);
}
/// The host waits only where it could look.
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill("cudaMemset", to, value, bytes, nullptr, true);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill("cudaMemsetAsync", to, value, bytes, stream, false);
}

}  // extern "C"
