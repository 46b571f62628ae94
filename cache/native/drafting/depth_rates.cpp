#include "drafting/depth_rates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>

namespace agentspec {
namespace {

constexpr double kEdges[] = {0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0};
constexpr double kNeutralTries = 10.0;  // weight of there being nothing to correct
constexpr int kBins = std::size(kEdges);

/// Of the rates of each bin, on average.
constexpr auto kMiddles = [] {
    std::array<double, kBins> middles{};
    for (int bin = 0; bin < kBins; ++bin) middles[bin] = 0.5 * ((bin == 0 ? 0.0 : kEdges[bin - 1]) + kEdges[bin]);
    return middles;
}();

}  // namespace

int DepthRates::place(int depth, double rate) {
    int place = std::min<int>(kDepths - 1, std::bit_width(static_cast<unsigned>(depth))) * kBins;
    for (int i = 0; i + 1 < kBins; ++i) place += rate > kEdges[i];  // without jumps
    return place;
}

double DepthRates::correct(int depth, double rate) const {
    const int cell = place(depth, rate);
    const double yes = kNeutralTries * kMiddles[cell % kBins], no = kNeutralTries - yes;
    const double hit = rate * no * (tallies_[cell].hits + yes),
                 missed = (1.0 - rate) * yes * (tallies_[cell].misses + no);
    return hit / (hit + missed);
}

}  // namespace agentspec
