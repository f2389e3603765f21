/// @file
/// `paged_allocator`: the door by the name users look for.
#pragma once

#include <llmmem/paging/paged_allocator.hpp>
