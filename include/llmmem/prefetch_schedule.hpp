/// @file
/// `prefetch_schedule`: included under the name that users look for.
#pragma once

#include <llmmem/schedule/prefetch_schedule.hpp>
