/// @file
/// Deprecated: include <llmmem/tiering/chunk_mapping.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/tiering/chunk_mapping.hpp>
