/// @file
/// Every public header that needs nothing but the C++ standard library, for small programs. An engine
/// includes the headers it uses.
///
/// The simulators and fault plans under `testing/` are not here, nor are headers that need an optional
/// library. Those are named below as `<header> needs <target>`; the build reads these lines.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version.hpp>
