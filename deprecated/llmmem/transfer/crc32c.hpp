/// @file
/// Deprecated: include <llmmem/hash/crc32c.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/hash/crc32c.hpp>
