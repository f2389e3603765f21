/// @file
/// `async_checkpointer`: the door by the name users look for.
#pragma once

#include <llmmem/checkpoint/async_checkpointer.hpp>
