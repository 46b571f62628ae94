// Correction of a level's hit rate for how deep in a draft it is used.
//
// Rates are learned over all tokens. But a draft begins where the last draft failed, where tokens are hard to predict,
// and its deep nodes matter only if all nodes above were right, where tokens are easy. A second stage of running
// averages, by depth and by the rate itself, corrects this (adaptive probability maps: Mahoney, "Adaptive weighing of
// context models for lossless data compression", 2005).
#pragma once

#include <array>
#include <span>

#include "drafting/hit_rates.hpp"

namespace agentspec {

class DepthRates {
public:
    /// The hit rate of a level used at `depth` tokens below the context, whose rate over all depths is `rate`.
    double correct(int depth, double rate) const;
    void record(int depth, double rate, bool hit) { tallies_[place(depth, rate)].add(hit); }
    std::span<Tally> tallies() { return tallies_; }

private:
    static constexpr int kDepths = 3;  // 0, 1, and more
    static constexpr int kBins = 11;   // of the rate itself
    static int place(int depth, double rate);

    std::array<Tally, kDepths * kBins> tallies_{};
};

}  // namespace agentspec
