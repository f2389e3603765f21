/// @file
/// The library's version. CMake reads these three lines: no other file states it.
#pragma once

#define LLMMEM_VERSION_MAJOR 0
#define LLMMEM_VERSION_MINOR 1
#define LLMMEM_VERSION_PATCH 0

/// One number to compare in `#if`: 1.2.3 is 1002003.
#define LLMMEM_VERSION (LLMMEM_VERSION_MAJOR * 1000000 + LLMMEM_VERSION_MINOR * 1000 + LLMMEM_VERSION_PATCH)
