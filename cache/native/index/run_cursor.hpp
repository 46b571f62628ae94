// A search in one sorted run that begins at the longest match and widens to shorter ones.
#pragma once

#include <span>

#include "index/run.hpp"
#include "index/run_table.hpp"
#include "index/sorted_run.hpp"

namespace agentspec {

/// The positions of one part of a run whose context shares at least some number of tokens with a query. `widen` and
/// `take` lower that number and so take in more positions.
class RunCursor {
public:
    RunCursor() = default;
    RunCursor(LogView log, const RunPart& part, const Token* query_end);

    /// The longest shared context among the positions not yet taken in; 0 when none shares a token.
    int next() const { return left_ > right_ ? left_ : right_; }

    std::span<const Position> taken() const { return {run_ + taken_.low, taken_.size()}; }

    /// Take in every position sharing at least `length` (>= 1) tokens, and call `visit(token, position, weight)` for
    /// each new position. Of more than `limit` new positions only an even sample of about `limit` is visited, with
    /// weights that sum to their number; if the table holds a sample of all positions, old ones included, that sample.
    template <class Visit>
    void widen(int length, std::uint32_t limit, Visit&& visit) {
        const Places old = taken_;
        const RunTable::Wide* wide = length == 1 ? table_->wide(query_end_[-1]) : nullptr;
        if (wide != nullptr && wide->places.low >= begin_ && limit <= RunTable::kSample &&
            wide->places.size() - old.size() > limit) {
            taken_ = wide->places;
            left_ = right_ = 0;
            const double weight = double(taken_.size()) / RunTable::kSample;
            for (const Follower& next : table_->followers(*wide)) visit(next.token, next.position, weight);
            return;
        }
        take(length);
        visit_new(old, limit, visit);
    }
    /// The same without calls of `visit`.
    void take(int length) {
        if (left_ >= length) widen_left(length);
        if (right_ >= length) widen_right(length);
    }

private:
    int shared_at(std::uint32_t place) const { return shared_context(log_ + run_[place], query_end_); }
    template <class Visit>
    void visit_new(const Places& old, std::uint32_t limit, Visit& visit) const {
        const std::uint32_t left = old.low - taken_.low, fresh = taken_.size() - old.size();
        if (fresh <= limit) {
            visit_all({taken_.low, old.low}, visit);
            visit_all({old.high, taken_.high}, visit);
            return;
        }
        const std::uint32_t samples = limit;
        if (samples == 0) return;
        const std::uint64_t step = (std::uint64_t{fresh} << 32) / samples;
        const auto sample = [=, this](std::uint32_t i) {
            const auto nth = static_cast<std::uint32_t>(i * step >> 32);
            return run_[nth < left ? taken_.low + nth : old.high + (nth - left)];
        };
        for (std::uint32_t i = 0; i < samples; ++i) __builtin_prefetch(log_ + sample(i));
        const double weight = double(fresh) / samples;
        for (std::uint32_t i = 0; i < samples; ++i) visit(log_[sample(i)], sample(i), weight);
    }
    template <class Visit>
    void visit_all(Places places, Visit& visit) const {
        for (std::uint32_t place = places.low; place < places.high; ++place) __builtin_prefetch(log_ + run_[place]);
        for (std::uint32_t place = places.low; place < places.high; ++place) {
            visit(log_[run_[place]], run_[place], 1.0);
        }
    }
    void widen_left(int length);
    void widen_right(int length);

    LogView log_;
    const Position* run_;
    const RunTable* table_;
    const Token* query_end_;
    std::uint32_t begin_, count_;  // the first place, and the one behind the last
    Places taken_;
    int left_, right_;  // tokens shared by the neighbours just outside taken_
};

}  // namespace agentspec
