/// @file
/// Deprecated: include <llmmem/hash/siphash.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/hash/siphash.hpp>
