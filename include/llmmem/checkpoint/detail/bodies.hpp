/// @file
/// Whether the functions of checkpoints are compiled in every translation unit that uses them, or in one.
#pragma once

/// A program that defines LLMMEM_EXTERN_CHECKPOINT in all of its translation units compiles them in the one
/// that includes <llmmem/instantiate/checkpoint.hpp>; the others see declarations.
#if defined(LLMMEM_EXTERN_CHECKPOINT) && !defined(LLMMEM_INSTANTIATES_CHECKPOINT)
#define LLMMEM_CHECKPOINT_BODIES 0
#else
#define LLMMEM_CHECKPOINT_BODIES 1
#endif

/// Marks such a function. A weak symbol is like an inline function to a linker, but is emitted even if this
/// translation unit does not call it.
#if defined(LLMMEM_INSTANTIATES_CHECKPOINT)
#define LLMMEM_CHECKPOINT_BODY [[gnu::weak]]
#else
#define LLMMEM_CHECKPOINT_BODY inline
#endif
