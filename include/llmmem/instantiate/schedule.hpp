/// @file
/// Traces, planners, their bounds and simulations, compiled once for a program that defines
/// LLMMEM_EXTERN_SCHEDULE.
///
/// One translation unit of the program includes this header, before anything else of llmmem/schedule. See
/// docs/your_engine.md.
#pragma once

#if defined(LLMMEM_EXTERN_SCHEDULE)
#if defined(LLMMEM_SCHEDULE_BODIES)
#error "Include <llmmem/instantiate/schedule.hpp> before any other header of llmmem/schedule."
#endif
#define LLMMEM_INSTANTIATES_SCHEDULE
#endif

#include <llmmem/schedule/access_window.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/placement.hpp>
#include <llmmem/schedule/plan_text.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>
#include <llmmem/schedule/trace.hpp>
