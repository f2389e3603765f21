/// @file
/// Deprecated: include <llmmem/device/batch_copier.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/device/batch_copier.hpp>
