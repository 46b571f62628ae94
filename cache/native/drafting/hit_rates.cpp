#include "drafting/hit_rates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace agentspec {
namespace {

constexpr double kPriorTries = 6.0;   // weight of the prior
constexpr double kPriorTotal = 1.5;   // class of occurrences that a level not looked at is taken to have

constexpr auto kLengthIndex = [] {
    std::array<std::int8_t, kLengths[kLengthCount - 1] + 1> table{};
    for (int shared = 1, index = 0; shared <= kLengths[kLengthCount - 1]; ++shared) {
        if (index + 1 < kLengthCount && shared >= kLengths[index + 1]) ++index;
        table[shared] = static_cast<std::int8_t>(index);
    }
    return table;
}();

/// Hit rate assumed of what was never tried: better for long matches and many sightings, worse once longer levels
/// failed; worse for shapes. Set by hand; it weighs kPriorTries tries against the record.
double prior(bool shapes, int length, double total, double excluded) {
    const double none = shapes ? -3.3 : -1.9;
    const double log_odds = none + 0.7 * std::log2(kLengths[length]) + 0.7 * total - excluded;
    return 1.0 / (1.0 + std::exp(-log_odds));
}

const std::array<double, HitRates::kCells> kPriorHits = [] {
    std::array<double, HitRates::kCells> hits{};
    for (int cell = 0; cell < HitRates::kCells; ++cell) {
        const int place = cell / 2 / HitRates::kDistincts, total = place % HitRates::kTotals;
        const int row = place / HitRates::kTotals;
        hits[cell] = kPriorTries * prior(row / kLengthCount == kShapeSource, row % kLengthCount, total, cell % 2);
    }
    return hits;
}();

/// By the bucket of excluded symbols and rank.
const auto kRestHits = [] {
    std::array<std::array<double, kRanks>, RestRates::kExcludeds> hits{};
    for (int excluded = 0; excluded < RestRates::kExcludeds; ++excluded)
        for (const bool shapes : {true, false})
            for (int length = 0; length < kLengthCount; ++length)
                hits[excluded][level_rank(shapes, length)] =
                    kPriorTries * prior(shapes, length, kPriorTotal, 0.5 * excluded);
    return hits;
}();

}  // namespace

int length_index(int shared) { return kLengthIndex[std::min(shared, kLengths[kLengthCount - 1])]; }

int HitRates::place(const LevelKey& key) {
    const int total = (key.total > 1.0) + (key.total > 4.0) + (key.total > 16.0);
    const int row = (key.source * kLengthCount + key.length) * kTotals + total;
    return 2 * (row * kDistincts + (key.distinct > 1) + (key.distinct > 4)) + (key.excluded > 0);
}

double HitRates::rate(const LevelKey& key) const {
    const int cell = place(key);
    return tallies_[cell].rate(kPriorTries, kPriorHits[cell]);
}

void RestRates::record(int high, int low, int excluded, bool hit) {
    for (int rank = low; rank <= high; ++rank) tallies_[bucket(excluded) * kRanks + rank].add(hit);
    settle(bucket(excluded));
}

void RestRates::settle() {
    for (int excluded = 0; excluded < kExcludeds; ++excluded) settle(excluded);
}

void RestRates::settle(int excluded) {
    auto& rates = rates_[excluded];
    for (int rank = 1; rank < kRanks; ++rank) {
        const double rate = tallies_[excluded * kRanks + rank].rate(kPriorTries, kRestHits[excluded][rank]);
        rates[rank] = std::max(rates[rank - 1], rate);
    }
}

std::size_t EndRates::place(std::int32_t token) const {
    return std::ranges::lower_bound(counts_, token, {}, &Count::token) - counts_.begin();
}

double EndRates::goes_on(std::int32_t token) const {
    const std::size_t at = place(token);
    return holds(at, token) ? (counts_[at].goes_on + 0.5) / (counts_[at].ends + (counts_[at].goes_on + 0.5)) : 1.0;
}

void EndRates::record(std::int32_t token) {
    const std::size_t at = place(token);
    if (holds(at, token)) ++counts_[at].goes_on;
}

void EndRates::record_end(std::int32_t token) {
    const std::size_t at = place(token);
    if (!holds(at, token)) counts_.insert(counts_.begin() + at, {token, 0, 0});
    ++counts_[at].ends;
    counts_[at].goes_on -= counts_[at].goes_on > 0;
    if (counts_.size() > kMost) counts_.erase(std::ranges::min_element(counts_, {}, &Count::ends));
}

void EndRates::keep(std::span<const std::int32_t> tokens) {
    std::erase_if(counts_, [=](const Count& one) { return std::ranges::find(tokens, one.token) == tokens.end(); });
}

}  // namespace agentspec
