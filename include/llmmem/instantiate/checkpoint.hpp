/// @file
/// The functions of checkpoints, compiled once for a program that defines LLMMEM_EXTERN_CHECKPOINT.
#pragma once

/// One source file of the program consists of this include alone. In the other files `async_checkpointer`,
/// `checkpoint_folder`, loading, copying and recovering are only declared, and compile in a fraction of the
/// time. Several libraries of a program may each have such a file.
#if defined(LLMMEM_EXTERN_CHECKPOINT)
#if defined(LLMMEM_CHECKPOINT_BODIES)
#error "Include <llmmem/instantiate/checkpoint.hpp> before any other header of llmmem/checkpoint."
#endif
#define LLMMEM_INSTANTIATES_CHECKPOINT
#endif

#include <llmmem/checkpoint/async_checkpointer.hpp>
#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/recover.hpp>

#if defined(LLMMEM_EXTERN_CHECKPOINT)
namespace llmmem {
inline namespace v0 {

template class posix_storage<posix_io>;
template class file_queue<posix_io>;
template class async_checkpointer<checkpointer_traits>;

}  // namespace v0
}  // namespace llmmem
#endif
