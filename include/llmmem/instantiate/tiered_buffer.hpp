/// @file
/// `tiered_buffer<host_space, file_space<>>`, compiled once for a program.
#pragma once

/// Include it in every file that uses that buffer. One source file defines LLMMEM_INSTANTIATES_TIERING before
/// the include, and compiles the buffer for all.
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
