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

#include "drafting/shared_rows.hpp"

namespace agentspec {

class DepthRates {
public:
    DepthRates();
    /// The hit rate of a level used at `depth` tokens below the context, whose rate over all depths is `rate`.
    double correct(int depth, double rate) const;
    void record(int depth, double rate, bool hit);

    /// Bytes of what differs from the corrections that every namespace begins with: none.
    std::size_t memory_bytes() const { return rows_.bytes(); }

private:
    static constexpr int kDepths = 6;  // 0, 1, 2 to 3, 4 to 7, 8 to 15, and more
    static constexpr int kBins = 14;   // of the rate itself

    static const std::vector<double>& initial();
    static void update(double* row, int bin);

    // By depth: (sum of rates, hits, tries) of each bin, then the ratio of the odds after and before correction.
    SharedRows<kDepths, 4 * kBins> rows_;
};

}  // namespace agentspec
