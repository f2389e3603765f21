/// @file
/// `prefetch_schedule`: the door by the name users look for.
#pragma once

#include <llmmem/schedule/prefetch_schedule.hpp>
