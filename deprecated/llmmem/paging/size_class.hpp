/// @file
/// Deprecated: include <llmmem/arena/size_class.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/arena/size_class.hpp>
