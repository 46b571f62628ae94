#include "drafting/hit_rates.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace agentspec {
namespace {

constexpr int kTotals = 8, kDistincts = 5, kExcludeds = 5;
constexpr int kCells = kSources * kLengthCount * kTotals * kDistincts * kExcludeds;
constexpr int kGroups = kSources * kLengthCount * kExcludeds;
constexpr std::size_t kEndTokens = 64;
constexpr double kPriorTries = 6.0;   // weight of the prior
constexpr double kMemory = 400.0;     // tries after which a cell halves: it follows a change of work

constexpr auto kLengthIndex = [] {
    std::array<std::int8_t, kLengths[kLengthCount - 1] + 1> table{};
    for (int shared = 1, index = 0; shared <= kLengths[kLengthCount - 1]; ++shared) {
        if (index + 1 < kLengthCount && shared >= kLengths[index + 1]) ++index;
        table[shared] = static_cast<std::int8_t>(index);
    }
    return table;
}();

/// 0, 1, 2, ... as n reaches 1, 2, 3, 5, 9, 17, ...: doubling steps.
int bucket(double n, int buckets) {
    int place = 0;
    for (double edge = 1.0; place < buckets - 1 && n > edge; ++place, edge *= 2.0) {
    }
    return place;
}

int cell(int source, int length, int total, int distinct, int excluded) {
    return (((source * kLengthCount + length) * kTotals + total) * kDistincts + distinct) * kExcludeds + excluded;
}

int excluded_bucket(int excluded) { return excluded == 0 ? 0 : 1 + bucket(excluded, kExcludeds - 1); }

int cell_of(const LevelKey& key) {
    return cell(key.source, key.length, bucket(key.total, kTotals), bucket(key.distinct, kDistincts),
                excluded_bucket(key.excluded));
}

/// Place in the tables of what is known before a level is looked at.
int group(int source, int length, int excluded) { return (source * kLengthCount + length) * kExcludeds + excluded; }

/// Hit rate assumed for a cell that has seen nothing: better for long matches and many sightings, worse once longer
/// levels failed. Set by hand; it weighs kPriorTries tries against the cell's own record.
double prior(int length, int total, int excluded) {
    const double log_odds = -1.9 + 0.7 * std::log2(kLengths[length]) + 0.35 * total - 0.5 * excluded;
    return 1.0 / (1.0 + std::exp(-log_odds));
}

}  // namespace

int length_index(int shared) { return kLengthIndex[std::min(shared, kLengths[kLengthCount - 1])]; }

const std::size_t HitRates::kStateSize = 2 * kCells;

HitRates::HitRates() : cells_(2 * kCells), highest_(kGroups), bounds_(kGroups) {
    for (int source = 0; source < kSources; ++source)
        for (int length = 0; length < kLengthCount; ++length)
            for (int total = 0; total < kTotals; ++total)
                for (int distinct = 0; distinct < kDistincts; ++distinct)
                    for (int excluded = 0; excluded < kExcludeds; ++excluded) {
                        double* c = &cells_[2 * cell(source, length, total, distinct, excluded)];
                        c[0] = kPriorTries * prior(length, total, excluded);
                        c[1] = kPriorTries;
                    }
    for (int source = 0; source < kSources; ++source) bind(source);
}

double HitRates::rate(const LevelKey& key) const {
    const double* c = &cells_[2 * cell_of(key)];
    return c[0] / c[1];
}

void HitRates::record(const LevelKey& key, bool hit) {
    double* c = &cells_[2 * cell_of(key)];
    const double before = c[0] / c[1];
    c[0] += hit ? 1.0 : 0.0;
    c[1] += 1.0;
    if (c[1] > kMemory) {
        c[0] *= 0.5;
        c[1] *= 0.5;
    }
    const double highest = highest_[group(key.source, key.length, excluded_bucket(key.excluded))];
    if (before == highest || c[0] / c[1] > highest) bind(key.source);
}

double HitRates::bound(int source, int length, int excluded) const {
    return bounds_[group(source, length, excluded_bucket(excluded))];
}

double HitRates::highest(int source, int length, int excluded) const {
    double highest = 0.0;
    for (int total = 0; total < kTotals; ++total)
        for (int distinct = 0; distinct < kDistincts; ++distinct) {
            const double* c = &cells_[2 * cell(source, length, total, distinct, excluded)];
            highest = std::max(highest, c[0] / c[1]);
        }
    return highest;
}

void HitRates::bind(int source) {
    for (int length = 0; length < kLengthCount; ++length)
        for (int excluded = kExcludeds - 1; excluded >= 0; --excluded) {
            const int here = group(source, length, excluded);
            highest_[here] = bounds_[here] = highest(source, length, excluded);
            if (length > 0) bounds_[here] = std::max(bounds_[here], bounds_[group(source, length - 1, excluded)]);
            if (excluded + 1 < kExcludeds) bounds_[here] = std::max(bounds_[here], bounds_[here + 1]);
        }
}

void HitRates::restore(std::span<const double> state) {
    if (state.size() != cells_.size()) throw std::invalid_argument("learned state of another shape");
    for (std::size_t i = 0; i < state.size(); i += 2) {
        const double hits = state[i], tries = state[i + 1];
        if (!(hits >= 0 && tries > 0 && hits <= tries && tries <= kMemory)) {
            throw std::invalid_argument("learned state holds impossible rates");
        }
    }
    std::copy(state.begin(), state.end(), cells_.begin());
    for (int source = 0; source < kSources; ++source) bind(source);
}

double EndRates::goes_on(std::int32_t token) const {
    const auto found = counts_.find(token);
    if (found == counts_.end()) return 1.0;
    const auto& [ends, goes_on] = found->second;
    return (goes_on + 0.5) / (ends + goes_on + 0.5);
}

void EndRates::record(std::int32_t token) {
    const auto found = counts_.find(token);
    if (found != counts_.end()) found->second.goes_on += 1.0;
}

void EndRates::record_end(std::int32_t token) {
    Count& count = counts_[token];
    count.ends += 1.0;
    count.goes_on = std::max(0.0, count.goes_on - 1.0);
    if (counts_.size() <= kEndTokens) return;
    counts_.erase(std::min_element(counts_.begin(), counts_.end(),
                                   [](const auto& a, const auto& b) { return a.second.ends < b.second.ends; }));
}

std::vector<double> EndRates::state() const {
    std::vector<double> state;
    for (const auto& [token, count] : counts_) state.insert(state.end(), {double(token), count.ends, count.goes_on});
    return state;
}

void EndRates::restore(std::span<const double> state) {
    if (state.size() % 3 != 0 || state.size() > 3 * kEndTokens)
        throw std::invalid_argument("learned state of another shape");
    counts_.clear();
    for (std::size_t i = 0; i < state.size(); i += 3) {
        const double token = state[i], ends = state[i + 1], goes_on = state[i + 2];
        if (!(token >= 0 && token <= std::numeric_limits<std::int32_t>::max() && ends >= 1 && goes_on >= 0)) {
            throw std::invalid_argument("learned state holds impossible counts");
        }
        counts_[static_cast<std::int32_t>(token)] = {ends, goes_on};
    }
}

}  // namespace agentspec
