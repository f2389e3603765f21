/// @file
/// `paged_allocator<>`, compiled once for a program that defines LLMMEM_EXTERN_PAGING.
#pragma once

/// One source file of the program consists of this include alone; the other files do not compile the class
/// again.
#if defined(LLMMEM_EXTERN_PAGING)
#define LLMMEM_INSTANTIATES_PAGING
#endif

#include <llmmem/paging/paged_allocator.hpp>

#if defined(LLMMEM_EXTERN_PAGING)
namespace llmmem {
inline namespace v0 {

template class paged_allocator<>;

}  // namespace v0
}  // namespace llmmem
#endif
