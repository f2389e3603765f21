/// @file
/// Deprecated: include <llmmem/hash/sha256.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/hash/sha256.hpp>
