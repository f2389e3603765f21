/// @file
/// `agreeing_ranks`: the transports whose ranks agree.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A transport whose ranks agree: all that get an answer get the same.
template <class T>
concept agreeing_ranks = requires(T& ranks, deadline by) {
  { ranks.agree(std::uint64_t{1}, by) } -> std::same_as<result<comm::agreed>>;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
