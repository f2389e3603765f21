/// @file
/// `redundant_replica`: the door by the name users look for.
#pragma once

#include <llmmem/redundancy/redundant_replica.hpp>
