/// @file
/// Deprecated: include <llmmem/arena/caching_split.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/arena/caching_split.hpp>
