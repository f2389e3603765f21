/// @file
/// Decides whether every translation unit that plans compiles the planners, or only one.
#pragma once

/// If a program defines LLMMEM_EXTERN_SCHEDULE in all of its translation units, only the one that includes
/// <llmmem/instantiate/schedule.hpp> compiles the functions; the others see declarations.
#if defined(LLMMEM_EXTERN_SCHEDULE) && !defined(LLMMEM_INSTANTIATES_SCHEDULE)
#define LLMMEM_SCHEDULE_BODIES 0
#else
#define LLMMEM_SCHEDULE_BODIES 1
#endif

/// Marks such a function. To a linker, a weak symbol is like an inline function, but it is emitted even if
/// this translation unit does not call it.
#if defined(LLMMEM_INSTANTIATES_SCHEDULE)
#define LLMMEM_SCHEDULE_BODY [[gnu::weak]]
#else
#define LLMMEM_SCHEDULE_BODY inline
#endif
