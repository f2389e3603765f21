/// @file
/// Deprecated: include <llmmem/arena/range_arena.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/arena/range_arena.hpp>
