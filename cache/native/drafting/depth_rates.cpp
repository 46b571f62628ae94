#include "drafting/depth_rates.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>

namespace agentspec {
namespace {

constexpr double kEdges[] = {0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0};
constexpr double kNeutralTries = 10.0;  // weight of there being nothing to correct
constexpr double kHalvingTries = 300.0;    // tries after which a cell halves

int bin_of(double rate) {
    int bin = 0;
    for (std::size_t i = 0; i + 1 < std::size(kEdges); ++i) bin += rate > kEdges[i];  // without jumps
    return bin;
}

int row_of(int depth, int depths) { return std::min<int>(depths - 1, std::bit_width(static_cast<unsigned>(depth))); }

double middle_of(int bin) { return 0.5 * ((bin == 0 ? 0.0 : kEdges[bin - 1]) + kEdges[bin]); }

double scaled(double rate, double ratio) { return rate * ratio / (rate * ratio + 1.0 - rate); }

}  // namespace

const std::vector<double>& DepthRates::initial() {
    static const std::vector<double> made = [] {
        std::vector<double> rows(kDepths * 4 * kBins);
        for (int depth = 0; depth < kDepths; ++depth)
            for (int bin = 0; bin < kBins; ++bin) update(&rows[depth * 4 * kBins], bin);
        return rows;
    }();
    return made;
}

DepthRates::DepthRates() : rows_(initial().data()) { static_assert(kBins == std::size(kEdges)); }

double DepthRates::correct(int depth, double rate) const {
    return scaled(rate, rows_[row_of(depth, kDepths)][3 * kBins + bin_of(rate)]);
}

void DepthRates::record(int depth, double rate, bool hit) {
    const int bin = bin_of(rate);
    double* row = rows_.own(row_of(depth, kDepths));
    double* c = row + 3 * bin;
    c[0] += rate;
    c[1] += hit ? 1.0 : 0.0;
    c[2] += 1.0;
    if (c[2] > kHalvingTries) {
        for (int i = 0; i < 3; ++i) c[i] *= 0.5;
    }
    update(row, bin);
}

void DepthRates::update(double* row, int bin) {
    const double* c = row + 3 * bin;
    const double yes = kNeutralTries * middle_of(bin), no = kNeutralTries - yes;
    row[3 * kBins + bin] = (c[1] + yes) * (c[2] - c[0] + no) / ((c[2] - c[1] + no) * (c[0] + yes));
}

}  // namespace agentspec
