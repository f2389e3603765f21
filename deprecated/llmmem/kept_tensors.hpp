/// @file
/// Deprecated: include <llmmem/tiering/persistent_tensors.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/persistent_tensors.hpp>
