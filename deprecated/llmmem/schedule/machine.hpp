/// @file
/// Deprecated: include <llmmem/tiering/machine.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/machine.hpp>
