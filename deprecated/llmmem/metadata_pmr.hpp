/// @file
/// Deprecated: include <llmmem/space/metadata_pmr.hpp>. This path goes with version 0.2.
#pragma once

#include <llmmem/space/metadata_pmr.hpp>
