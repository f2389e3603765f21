/// @file
/// `paged_allocator<>`, compiled once for a program that defines LLMMEM_EXTERN_PAGING.
#pragma once

/// One source file of the program consists of this include; the others see that it is compiled elsewhere.
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
