/// @file
/// `tiered_buffer`: the door by the name users look for.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>
