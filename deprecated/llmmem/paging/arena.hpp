/// @file
/// Deprecated: include <llmmem/arena/arena.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/arena/arena.hpp>
