/// @file
/// Deprecated: include <llmmem/tiering/tier.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/tier.hpp>
