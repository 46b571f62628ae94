#include "drafting/depth_rates.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>

namespace agentspec {
namespace {

constexpr int kDepths = 6;  // 0, 1, 2 to 3, 4 to 7, 8 to 15, and more
constexpr double kEdges[] = {0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0};
constexpr int kBins = std::size(kEdges), kCells = kDepths * kBins;
constexpr double kPriorTries = 10.0;  // weight of there being nothing to correct
constexpr double kMemory = 300.0;    // tries after which a cell halves

int bin_of(double rate) {
    int bin = 0;
    for (int i = 0; i < kBins - 1; ++i) bin += rate > kEdges[i];  // without jumps
    return bin;
}

int row_of(int depth) { return kBins * std::min<int>(kDepths - 1, std::bit_width(static_cast<unsigned>(depth))); }

double middle_of(int bin) { return 0.5 * ((bin == 0 ? 0.0 : kEdges[bin - 1]) + kEdges[bin]); }

double scaled(double rate, double ratio) { return rate * ratio / (rate * ratio + 1.0 - rate); }

}  // namespace

const std::size_t DepthRates::kStateSize = 3 * kCells;

DepthRates::DepthRates() : cells_(3 * kCells), ratios_(kCells) {
    for (int cell = 0; cell < kCells; ++cell) update(cell);
}

double DepthRates::correct(int depth, double rate) const { return scaled(rate, ratios_[row_of(depth) + bin_of(rate)]); }

void DepthRates::record(int depth, double rate, bool hit) {
    const int cell = row_of(depth) + bin_of(rate);
    double* c = &cells_[3 * cell];
    c[0] += rate;
    c[1] += hit ? 1.0 : 0.0;
    c[2] += 1.0;
    if (c[2] > kMemory) {
        for (int i = 0; i < 3; ++i) c[i] *= 0.5;
    }
    update(cell);
}

void DepthRates::update(int cell) {
    const double* c = &cells_[3 * cell];
    const double yes = kPriorTries * middle_of(cell % kBins), no = kPriorTries - yes;
    ratios_[cell] = (c[1] + yes) * (c[2] - c[0] + no) / ((c[2] - c[1] + no) * (c[0] + yes));
}

void DepthRates::restore(std::span<const double> state) {
    if (state.size() != cells_.size()) throw std::invalid_argument("learned state of another shape");
    for (std::size_t i = 0; i < state.size(); i += 3) {
        const double rates = state[i], hits = state[i + 1], tries = state[i + 2];
        if (!(rates >= 0 && rates <= tries && hits >= 0 && hits <= tries && tries <= kMemory)) {
            throw std::invalid_argument("learned state holds impossible corrections");
        }
    }
    std::copy(state.begin(), state.end(), cells_.begin());
    for (int cell = 0; cell < kCells; ++cell) update(cell);
}

}  // namespace agentspec
