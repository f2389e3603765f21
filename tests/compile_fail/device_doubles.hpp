// What stands for a device and its messages where only types matter: nothing here is defined.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_task.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

/// A device's memory that works on its bytes.
struct device_memory : llmmem::file_space<> {
  llmmem::result<void> clear(std::byte* at, std::uint64_t bytes);
  llmmem::result<void> copy(std::span<const llmmem::copy_task> tasks);
  llmmem::result<void> add(llmmem::dtype elements, std::span<const std::byte* const> parts, std::byte* into,
                           std::uint64_t bytes);
  llmmem::result<void> finish() noexcept;
  llmmem::result<void> precede(int stream);
};
/// Messages on a stream.
struct stream_ranks : llmmem::communicator<llmmem::thread_endpoint> {
  int stream() const noexcept;
};
