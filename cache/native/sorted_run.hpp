// Contexts, their order, and sorted runs of them.
//
// A *position* is the place of a token in the log; its *context* is what stands before it, read backwards. Contexts are
// ordered by their nearest token first, so all positions that follow the same last p tokens stand together, for every p
// at once. Unlike forward suffixes, a context never changes when more tokens are appended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace agentspec {

using Token = std::int32_t;
using Position = std::uint32_t;
using Positions = std::vector<Position>;

inline constexpr int kDepth = 64;         // contexts are ordered by at most this many tokens
inline constexpr Token kBoundary = -1;    // stands before each piece of the log
inline constexpr Token kNoContext = -2;   // pads queries: equals nothing in the log
inline constexpr int kPadding = kDepth + 2;

/// The two tokens before `end`, the nearest in the high half: comparing two of these compares two tokens at once.
inline std::uint64_t pair_before(const Token* end) {
    return std::uint64_t{static_cast<std::uint32_t>(end[-1])} << 32 | static_cast<std::uint32_t>(end[-2]);
}

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
Positions sort_positions(const Token* log, std::span<const Position> positions);

/// Merge two sorted runs into one; all positions of `older` are below those of `newer`. Where one is much the smaller, the
/// other is copied in stretches.
Positions merge_runs(const Token* log, std::span<const Position> older, std::span<const Position> newer);

/// The positions of one run whose context shares at least some number of tokens with a query; widens as that drops.
class RunCursor {
public:
    RunCursor(const Token* log, std::span<const Position> run, const Token* query_end);

    /// The longest shared context among the positions not yet taken in; 0 when none shares a token.
    int next() const { return left_ > right_ ? left_ : right_; }

    std::uint32_t size() const { return high_ - low_; }

    /// Take in every position sharing at least `length` (>= 1) tokens. Calls `visit(position, weight)` for the new ones;
    /// of more than `limit` new ones an even sample of at most `limit`, with weights that keep their number.
    template <class Visit>
    void widen(int length, std::uint32_t limit, Visit&& visit) {
        const std::uint32_t old_low = low_, old_high = high_;
        if (left_ >= length) widen_left(length);
        if (right_ >= length) widen_right(length);
        const std::uint32_t left = old_low - low_, fresh = left + (high_ - old_high);
        const std::uint32_t samples = fresh < limit ? fresh : limit;
        const auto sample = [=, this](std::uint32_t i) {
            const auto nth = static_cast<std::uint32_t>(std::uint64_t{i} * fresh / samples);
            return run_[nth < left ? low_ + nth : old_high + (nth - left)];
        };
        for (std::uint32_t i = 0; i < samples; ++i) __builtin_prefetch(log_ + sample(i));
        for (std::uint32_t i = 0; i < samples; ++i) visit(sample(i), double(fresh) / samples);
    }

private:
    int shared_at(std::uint32_t place) const { return shared_context(log_ + run_[place], query_end_); }
    void widen_left(int length);
    void widen_right(int length);

    const Token* log_;
    const Position* run_;
    const Token* query_end_;
    std::uint32_t count_, low_, high_;
    int left_ = 0, right_ = 0;  // tokens shared by the neighbours just outside [low_, high_)
};

}  // namespace agentspec
