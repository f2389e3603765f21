/// @file
/// Deprecated: include <llmmem/arena/stitched_source.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/arena/stitched_source.hpp>
