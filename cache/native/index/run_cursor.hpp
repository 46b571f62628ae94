// A search in one sorted run that begins at the longest match and widens to shorter ones.
#pragma once

#include <algorithm>
#include <array>
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

    /// Take in every position sharing at least `length` (>= 1) tokens. Returns how many are new.
    std::uint32_t widen(int length) {
        old_ = taken_;
        if (left_ >= length) widen_left(length);
        if (right_ >= length) widen_right(length);
        return taken_.size() - old_.size();
    }
    /// Call `visit(token, position)` for those of the new positions that a share has.
    template <class Visit>
    void visit(const Share& share, Visit&& visit) const {
        std::array<Position, kTogether> some;
        auto kept = table_->kept(taken_, share);
        if (kept.empty()) {
            visit_places({taken_.low, old_.low}, share, some, visit);
            visit_places({old_.high, taken_.high}, share, some, visit);
        }
        for (; !kept.empty(); kept = kept.subspan(std::min<std::size_t>(kTogether, kept.size()))) {
            std::size_t count = 0;
            for (const auto& [place, position] : kept.first(std::min<std::size_t>(kTogether, kept.size()))) {
                some[count] = position;
                count += share.has(position) & (place - old_.low >= old_.size());  // without a jump
            }
            visit_fetched(std::span(some).first(count), visit);
        }
    }

private:
    static constexpr std::uint32_t kTogether = 256;  // places whose tokens are fetched from memory together

    int shared_at(std::uint32_t place) const { return shared_context(log_ + run_[place], query_end_); }
    template <class Visit>
    void visit_places(Places places, const Share& share, std::span<Position> some, Visit& visit) const {
        for (std::uint32_t place = places.low, end; place < places.high; place = end) {
            end = place + std::min(places.high - place, kTogether);
            visit_fetched(share.of({run_ + place, run_ + end}, some.data()), visit);
        }
    }
    template <class Visit>
    void visit_fetched(std::span<const Position> found, Visit& visit) const {
        for (const Position position : found) __builtin_prefetch(log_ + position);
        for (const Position position : found) visit(log_[position], position);
    }
    void widen_left(int length);
    void widen_right(int length);

    LogView log_;
    const Position* run_;
    const RunTable* table_;
    const Token* query_end_;
    std::uint32_t begin_, count_;  // the first place, and the one behind the last
    Places taken_, old_;  // and taken_ before it was widened
    int left_, right_;  // tokens shared by the neighbours just outside taken_
};

}  // namespace agentspec
