/// @file
/// `redundant_replica`: included under the name that users look for.
#pragma once

#include <llmmem/redundancy/redundant_replica.hpp>
