/// @file
/// Deprecated: include <llmmem/hash/block_key.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/hash/block_key.hpp>
