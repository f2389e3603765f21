/// @file
/// Deprecated: include <llmmem/device/cuda.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/device/cuda.hpp>
