/// @file
/// `sharded_state`: included under the name that users look for.
#pragma once

#include <llmmem/sharding/sharded_state.hpp>
