// Contexts, their order, and sorted runs of them.
//
// A *position* is the place of a token in the log; its *context* is the tokens before it, read backwards. Contexts are
// ordered by their nearest token first, so all positions that follow the same last p tokens stand together, for every p
// at once. Unlike forward suffixes, a context never changes when more tokens are appended.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "index/log_view.hpp"
#include "index/pages.hpp"

namespace agentspec {

using Positions = PagedVector<Position>;

/// The two tokens before `end`, the nearest in the high half: comparing two pairs compares two tokens at once.
inline std::uint64_t pair_before(const Token* end) {
    std::uint64_t pair;
    std::memcpy(&pair, end - 2, sizeof pair);  // one read, where compilers make two of shifts
    return std::endian::native == std::endian::little ? pair : std::rotl(pair, 32);
}

/// The pair before `end` as a number that grows in the order of contexts: boundaries sort below tokens. If the nearest
/// token is a boundary, the other token belongs to another piece, and the order of such keys means nothing.
inline std::uint64_t order_key(const Token* end) { return pair_before(end) ^ 0x8000000080000000; }

/// The least order_key of a context that ends with `last`.
inline std::uint64_t lowest_key(Token last) {
    return std::uint64_t{static_cast<std::uint32_t>(last) ^ 0x80000000u} << 32;
}

/// A key behind every order_key of a context that ends with `last` (at most kMostToken).
inline std::uint64_t key_behind(Token last) { return lowest_key(last) + (std::uint64_t{1} << 32); }

/// Number of tokens (at most kDepth) that a log context shares with a query, given that they share `known`.
inline int shared_context(const Token* log_end, const Token* query_end, int known = 0) {
    for (int depth = known & ~1; depth < kDepth; depth += 2) {
        const std::uint64_t difference = pair_before(log_end - depth) ^ pair_before(query_end - depth);
        if (difference != 0) return depth + (difference >> 32 == 0 ? 1 : 0);
    }
    return kDepth;
}

/// Negative, zero or positive as context `a` sorts before, with or after `b`, given that they share `known` (even)
/// tokens without a boundary. Contexts that reach a boundary together, or share kDepth tokens, are equal.
int compare_contexts(const Token* a, const Token* b, int known = 0);

/// Sort positions by context, equal contexts by position.
Positions sort_positions(LogView log, std::span<const Position> positions);

/// The first `limit` positions of two merged runs, or all, to `out`; all positions of `older` are below all of `newer`.
/// Returns how many of either these are. If one run is much smaller, the other is copied in stretches.
std::pair<std::size_t, std::size_t> merge_some(LogView log, std::span<const Position> older,
                                               std::span<const Position> newer, std::size_t limit, Position* out);

/// Merge two sorted runs into one in the same way.
Positions merge_runs(LogView log, std::span<const Position> older, std::span<const Position> newer);

}  // namespace agentspec
