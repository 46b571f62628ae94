// The matches of a query in one sorted run, as far as they are known without a search.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "index/run.hpp"
#include "index/run_cursor.hpp"

namespace agentspec {

/// The matches of a query, longest first. Every match extends a match of the query before, which is a token shorter, by
/// the new token. If the query before had few matches, they are known, and the run is searched only when shorter
/// matches are needed.
class RunMatches {
public:
    /// `most`: the query's length.
    RunMatches(LogView log, const Run& run, const Token* query_end, int most)
        : log_(log), run_(&run), query_end_(query_end), longest_(most), unknown_(most), next_(most) {}
    /// For the query that extends the query of `before` by a token, in the same run. Not for a query after whose last
    /// tokens a piece may begin.
    RunMatches(const RunMatches& before, const Token* query_end, int most);

    /// The longest shared context; before the first search an upper bound.
    int longest() const { return longest_; }
    /// The same for the positions not yet taken in; 0 when none of them shares a token.
    int next() const {
        if (!searched()) return next_;
        int next = 0;
        for (const RunCursor& cursor : cursors()) next = std::max(next, cursor.next());
        return next;
    }

    /// As RunCursor::widen; 0 too where none shares so many tokens.
    std::uint32_t widen(int length) {
        fresh_ = 0;
        if (next() < length) return 0;
        if (!searched() && length > unknown_) return take_known(length);
        if (!searched()) search();
        for (RunCursor& cursor : cursors()) fresh_ += cursor.widen(length);
        return fresh_;
    }
    /// As RunCursor::visit.
    template <class Visit>
    void visit(const Share& share, Visit&& visit) const {
        if (fresh_ == 0) return;
        for (const RunCursor& cursor : cursors()) cursor.visit(share, visit);
        if (searched()) return;
        for (const auto& [position, shared] : known()) {
            if (shared >= taken_ && shared < before_ && share.has(position)) visit(log_[position], position);
        }
    }

private:
    struct Match {
        Position position;
        int shared;
    };
    bool searched() const { return searched_ > 0; }
    std::span<const Match> known() const { return {known_.data(), known_count_}; }
    std::span<RunCursor> cursors() { return {cursors_.data(), searched_}; }
    std::span<const RunCursor> cursors() const { return {cursors_.data(), searched_}; }
    std::uint32_t take_known(int length) {
        next_ = unknown_;
        before_ = std::exchange(taken_, length);
        for (const auto& [position, shared] : known()) {
            if (shared < length) next_ = std::max(next_, shared);
            fresh_ += shared >= length && shared < before_;
        }
        return fresh_;
    }
    void search();
    bool follow(std::span<const Match> before);
    bool follow(const RunCursor& before);
    bool goes_on(Position position) const;

    LogView log_;
    const Run* run_;
    const Token* query_end_;
    int longest_;
    int unknown_;  // upper bound of the lengths of matches that are not known
    int next_;
    int taken_ = kDepth + 1, before_ = 0;  // known matches as long as this are taken in, and were before
    std::uint32_t known_count_ = 0, searched_ = 0, fresh_ = 0;
    // Memory that holds none is left alone: a draft makes hundreds of these.
    std::array<Match, 8> known_;
    std::array<RunCursor, 3> cursors_;  // once searched, in the run's parts: more than one while it is merged
};

}  // namespace agentspec
