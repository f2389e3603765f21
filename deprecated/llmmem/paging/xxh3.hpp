/// @file
/// Deprecated: include <llmmem/hash/xxh3.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/hash/xxh3.hpp>
