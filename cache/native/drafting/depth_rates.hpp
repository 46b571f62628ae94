// Correction of a level's hit rate for how deep in a draft it is used.
//
// Rates are learned over all tokens. But a draft begins where the last draft failed, where tokens are hard to predict,
// and its deep nodes matter only if all nodes above were right, where tokens are easy. A second stage of running
// averages, by depth and by the rate itself, corrects this (adaptive probability maps: Mahoney, "Adaptive weighing of
// context models for lossless data compression", 2005).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace agentspec {

class DepthRates {
public:
    DepthRates();
    /// The hit rate of a level used at `depth` tokens below the context, whose rate over all depths is `rate`.
    double correct(int depth, double rate) const;
    void record(int depth, double rate, bool hit);

    /// (sum of rates, hits, tries) of every cell in turn.
    std::vector<double> state() const { return cells_; }
    /// Throws std::invalid_argument for a state of another size or with numbers that cannot be sums.
    void restore(std::span<const double> state);

    static const std::size_t kStateSize;

private:
    void update(int cell);

    std::vector<double> cells_, ratios_;  // ratios_: of the odds after and before correction
};

}  // namespace agentspec
