/// @file
/// `paged_allocator`: included under the name that users look for.
#pragma once

#include <llmmem/paging/paged_allocator.hpp>
