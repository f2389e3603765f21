/// @file
/// `tiered_buffer`: included under the name that users look for.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>
