/// @file
/// `async_checkpointer`: included under the name that users look for.
#pragma once

#include <llmmem/checkpoint/async_checkpointer.hpp>
