/// @file
/// Deprecated: include <llmmem/sharding/gather_schedule.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/sharding/gather_schedule.hpp>
