/// @file
/// Deprecated: include <llmmem/tiering/plan.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/plan.hpp>
