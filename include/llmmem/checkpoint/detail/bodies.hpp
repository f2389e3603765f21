/// @file
/// Decides whether every translation unit that uses checkpoints compiles their functions, or only one.
#pragma once

/// If a program defines LLMMEM_EXTERN_CHECKPOINT in all of its translation units, only the one that includes
/// <llmmem/instantiate/checkpoint.hpp> compiles the functions; the others see declarations.
#if defined(LLMMEM_EXTERN_CHECKPOINT) && !defined(LLMMEM_INSTANTIATES_CHECKPOINT)
#define LLMMEM_CHECKPOINT_BODIES 0
#else
#define LLMMEM_CHECKPOINT_BODIES 1
#endif

/// Marks such a function. To a linker, a weak symbol is like an inline function, but it is emitted even if
/// this translation unit does not call it.
#if defined(LLMMEM_INSTANTIATES_CHECKPOINT)
#define LLMMEM_CHECKPOINT_BODY [[gnu::weak]]
#else
#define LLMMEM_CHECKPOINT_BODY inline
#endif
