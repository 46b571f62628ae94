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
constexpr int kPriorTotal = 3;        // bucket of occurrences that a level not looked at is taken to have
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

/// Hit rate assumed for a cell that has seen nothing: better for long matches and many sightings, worse once longer
/// levels failed; worse for shapes. Set by hand; it weighs kPriorTries tries against the cell's own record.
double prior(bool shapes, int length, int total, int excluded) {
    const double none = shapes ? -3.3 : -1.9;
    const double log_odds = none + 0.7 * std::log2(kLengths[length]) + 0.35 * total - 0.5 * excluded;
    return 1.0 / (1.0 + std::exp(-log_odds));
}

/// One more try of a cell.
void count(bool hit, double& hits, double& tries) {
    hits += hit ? 1.0 : 0.0;
    tries += 1.0;
    if (tries > kMemory) {
        hits *= 0.5;
        tries *= 0.5;
    }
}

}  // namespace

int length_index(int shared) { return kLengthIndex[std::min(shared, kLengths[kLengthCount - 1])]; }

const std::vector<double>& HitRates::initial() {
    static const std::vector<double> made = [] {
        std::vector<double> cells;
        for (int row = 0; row < kRows; ++row)
            for (int total = 0; total < kTotals; ++total)
                for (int distinct = 0; distinct < kDistincts; ++distinct)
                    for (int excluded = 0; excluded < kExcludeds; ++excluded) {
                        const bool shapes = row / kLengthCount == kShapeSource;
                        cells.push_back(kPriorTries * prior(shapes, row % kLengthCount, total, excluded));
                        cells.push_back(kPriorTries);
                    }
        return cells;
    }();
    return made;
}

HitRates::HitRates() : cells_(initial().data()) {}

/// Place of a cell in the row of its source and length.
int HitRates::place(const LevelKey& key) {
    const int total = bucket(key.total, kTotals), distinct = bucket(key.distinct, kDistincts);
    return 2 * ((total * kDistincts + distinct) * kExcludeds + excluded_bucket(key.excluded));
}

double HitRates::rate(const LevelKey& key) const {
    const double* c = cells_[key.source * kLengthCount + key.length] + place(key);
    return c[0] / c[1];
}

void HitRates::record(const LevelKey& key, bool hit) {
    double* c = cells_.own(key.source * kLengthCount + key.length) + place(key);
    count(hit, c[0], c[1]);
}

const std::vector<double>& RestRates::initial() {
    static const std::vector<double> made = [] {
        std::vector<double> rows(kExcludeds * 3 * kRanks);
        for (int excluded = 0; excluded < kExcludeds; ++excluded) {
            double* row = &rows[excluded * 3 * kRanks];
            for (const bool shapes : {true, false})
                for (int length = 0; length < kLengthCount; ++length) {
                    const int rank = level_rank(shapes, length);
                    row[rank] = kPriorTries * prior(shapes, length, kPriorTotal, excluded);
                    row[kRanks + rank] = kPriorTries;
                }
            settle(row);
        }
        return rows;
    }();
    return made;
}

RestRates::RestRates() : rows_(initial().data()) {}

void RestRates::record(int high, int low, int excluded, bool hit) {
    double* row = rows_.own(excluded_bucket(excluded));
    for (int rank = low; rank <= high; ++rank) count(hit, row[rank], row[kRanks + rank]);
    settle(row);
}

void RestRates::settle(double* row) {
    double* rates = row + 2 * kRanks;
    for (int rank = 1; rank < kRanks; ++rank) rates[rank] = row[rank] / row[kRanks + rank];
    for (int rank = 1; rank < kRanks; ++rank) rates[rank] = std::max(rates[rank], rates[rank - 1]);
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
