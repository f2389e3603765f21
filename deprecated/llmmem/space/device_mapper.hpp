/// @file
/// Deprecated: include <llmmem/device/device_mapper.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/device/device_mapper.hpp>
