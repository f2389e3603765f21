/// @file
/// Deprecated: include <llmmem/device/streamed_space.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/device/streamed_space.hpp>
