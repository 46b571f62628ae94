// The matches of a query in the unsorted tail of an index.
#pragma once

#include <span>
#include <vector>

#include "index/snapshot.hpp"
#include "index/sorted_run.hpp"

namespace agentspec {

/// The matches of a query, longest first. The search runs when they are first needed. Reusable: `start` resets.
class TailMatches {
public:
    /// `most`: only the oldest position may share more tokens.
    void start(LogView log, const Snapshot& snapshot, const Token* query_end, int most);

    /// The longest shared context; before the first search an upper bound.
    int longest() const { return longest_; }
    /// The same for the positions not yet taken in; 0 when none of them shares a token.
    int next() const { return next_; }

    /// Take in every position sharing at least `length` (>= 1) tokens; calls `visit(token, position)` for each new one.
    template <class Visit>
    void widen(int length, Visit&& visit) {
        if (!searched_) search();
        for (; next_ >= length; next_ = shared_at(++taken_)) {
            const Position position = matches_[taken_].position;
            visit(log_[position], position);
        }
    }

private:
    struct Match {
        Position position;
        int shared;
    };
    int shared_at(std::size_t place) const { return place < matches_.size() ? matches_[place].shared : 0; }
    void search();

    LogView log_;
    std::span<const Position> tail_;
    const Token* before_ = nullptr;  // the token before each
    const Token* query_end_ = nullptr;
    int longest_ = 0, next_ = 0;
    bool searched_ = false;
    std::vector<Match> matches_;  // longest first
    std::size_t taken_ = 0;
};

}  // namespace agentspec
