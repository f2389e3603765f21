/// @file
/// `sharded_state`: the door by the name users look for.
#pragma once

#include <llmmem/sharding/sharded_state.hpp>
