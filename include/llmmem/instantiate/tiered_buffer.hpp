/// @file
/// `tiered_buffer<host_space, file_space<>>`, compiled once for a program.
#pragma once

/// To be included wherever that buffer is used. The one source file that compiles it defines
/// LLMMEM_INSTANTIATES_TIERING before; for the others it is compiled elsewhere.
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

namespace llmmem {
inline namespace v0 {

#if defined(LLMMEM_INSTANTIATES_TIERING)
template class basic_tiered_buffer<tiered_traits, tier<host_space>, tier<file_space<>>>;
#elif defined(LLMMEM_EXTERN_TIERING)
extern template class basic_tiered_buffer<tiered_traits, tier<host_space>, tier<file_space<>>>;
#endif

}  // namespace v0
}  // namespace llmmem
