/// @file
/// Deprecated: include <llmmem/tiering/tensor_table.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/tensor_table.hpp>
