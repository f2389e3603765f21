/// @file
/// Deprecated: include <llmmem/tiering/model_file_space.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/model_file_space.hpp>
