#include "drafting/hit_rates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <ranges>

namespace agentspec {
namespace {

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

/// 0 for 0, else one more than `bucket`, without its steps.
int excluded_bucket(int excluded, int buckets) {
    return excluded == 0 ? 0 : 1 + std::min<int>(buckets - 2, std::bit_width(static_cast<unsigned>(excluded - 1)));
}

/// Hit rate assumed for a cell that has seen nothing: better for long matches and many sightings, worse once longer
/// levels failed; worse for shapes. Set by hand; it weighs kPriorTries tries against the cell's own record.
double prior(bool shapes, int length, int total, int excluded) {
    const double none = shapes ? -3.3 : -1.9;
    const double log_odds = none + 0.7 * std::log2(kLengths[length]) + 0.35 * total - 0.5 * excluded;
    return 1.0 / (1.0 + std::exp(-log_odds));
}

}  // namespace

int length_index(int shared) { return kLengthIndex[std::min(shared, kLengths[kLengthCount - 1])]; }

/// The rates by hand, and their bounds, made once.
struct HitRates::Initial {
    std::vector<double> cells = std::vector<double>(kRows * kWidth);
    std::vector<double> limits = std::vector<double>(kRatedSources * 2 * kGroups);

    Initial() {
        double* c = cells.data();
        for (int row = 0; row < kRows; ++row)
            for (int total = 0; total < kTotals; ++total)
                for (int distinct = 0; distinct < kDistincts; ++distinct)
                    for (int excluded = 0; excluded < kExcludeds; ++excluded, c += 2) {
                        c[0] = kPriorTries *
                               prior(row / kLengthCount == kShapeSource, row % kLengthCount, total, excluded);
                        c[1] = kPriorTries;
                    }
        const SharedRows<kRows, kWidth> rows(cells.data());
        for (int source = 0; source < kRatedSources; ++source) bind(rows, source, &limits[source * 2 * kGroups]);
    }
};

const HitRates::Initial& HitRates::initial() {
    static const Initial made;
    return made;
}

HitRates::HitRates() : cells_(initial().cells.data()), limits_(initial().limits.data()) {}

/// Place of a cell in the row of its source and length.
int HitRates::place(const LevelKey& key) {
    const int total = bucket(key.total, kTotals), distinct = bucket(key.distinct, kDistincts);
    return 2 * ((total * kDistincts + distinct) * kExcludeds + excluded_bucket(key.excluded, kExcludeds));
}

double HitRates::rate(const LevelKey& key) const {
    const double* c = cells_[key.source * kLengthCount + key.length] + place(key);
    return c[0] / c[1];
}

void HitRates::record(const LevelKey& key, bool hit) {
    double* c = cells_.own(key.source * kLengthCount + key.length) + place(key);
    const double before = c[0] / c[1];
    c[0] += hit ? 1.0 : 0.0;
    c[1] += 1.0;
    if (c[1] > kMemory) {
        c[0] *= 0.5;
        c[1] *= 0.5;
    }
    const int excluded = excluded_bucket(key.excluded, kExcludeds), here = group(key.length, excluded);
    const double limit = limits_[key.source][here];
    if (before != limit && c[0] / c[1] <= limit) return;
    double* limits = limits_.own(key.source);
    limits[here] = highest(cells_[key.source * kLengthCount + key.length], excluded);
    spread(limits);
}

double HitRates::bound(std::span<const int> sources, int length, int excluded) const {
    const int place = kGroups + group(length, excluded_bucket(excluded, kExcludeds));
    double bound = 0.0;
    for (const int source : sources) bound = std::max(bound, limits_[source][place]);
    return bound;
}

double HitRates::highest(const double* row, int excluded) {
    double highest = 0.0;
    for (int cell = excluded; cell < kTotals * kDistincts * kExcludeds; cell += kExcludeds) {
        highest = std::max(highest, row[2 * cell] / row[2 * cell + 1]);
    }
    return highest;
}

void HitRates::bind(const SharedRows<kRows, kWidth>& cells, int source, double* limits) {
    for (int length = 0; length < kLengthCount; ++length)
        for (int excluded = 0; excluded < kExcludeds; ++excluded) {
            limits[group(length, excluded)] = highest(cells[source * kLengthCount + length], excluded);
        }
    spread(limits);
}

void HitRates::spread(double* limits) {
    double* bounds = limits + kGroups;
    for (int length = 0; length < kLengthCount; ++length)
        for (int excluded = kExcludeds - 1; excluded >= 0; --excluded) {
            const int here = group(length, excluded);
            bounds[here] = limits[here];
            if (length > 0) bounds[here] = std::max(bounds[here], bounds[group(length - 1, excluded)]);
            if (excluded + 1 < kExcludeds) bounds[here] = std::max(bounds[here], bounds[here + 1]);
        }
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

void EndRates::keep(std::span<const std::int32_t> tokens) {
    std::erase_if(counts_, [=](const auto& one) { return std::ranges::find(tokens, one.first) == tokens.end(); });
}

std::vector<std::int32_t> EndRates::tokens() const {
    const auto all = std::views::keys(counts_);
    return {all.begin(), all.end()};
}

}  // namespace agentspec
