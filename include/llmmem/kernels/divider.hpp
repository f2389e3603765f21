/// @file
/// Division by a number that is fixed before a kernel runs: `divider`, under the name that kernels include.
#pragma once

#include <llmmem/detail/divider.hpp>
