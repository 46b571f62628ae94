// Learned confidence: how often the next token is among the symbols that a level of the drafter offers.
//
// Secondary escape estimation (Bloom, "Solving the problems of context modeling", 1998): running hit rates keyed by
// a level's visible properties, instead of a formula on its counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "drafting/shared_rows.hpp"

namespace agentspec {

inline constexpr int kSources = 3;  // of text
inline constexpr int kShapeSource = kSources;  // by which levels of shapes are rated, whatever they are reported as
inline constexpr int kRatedSources = kSources + 1;
inline constexpr int kLengths[] = {1, 2, 3, 4, 6, 8, 12, 20, 40};
inline constexpr int kLengthCount = 9;

/// Index in kLengths of the greatest length that is at most `shared` (>= 1).
int length_index(int shared);

/// The properties of a level that are known before the next token is.
struct LevelKey {
    int source;        // < kRatedSources
    int length;        // index in kLengths
    double total;      // occurrences of the symbols it offers
    int distinct;      // number of those symbols
    int excluded;      // number of symbols that longer levels offered
};

class HitRates {
public:
    HitRates();
    double rate(const LevelKey& key) const;
    /// Upper bound of the rates of all levels of `sources` that are at most kLengths[length] long and come after levels
    /// that offered `excluded` or more symbols.
    double bound(std::span<const int> sources, int length, int excluded) const;
    void record(const LevelKey& key, bool hit);

    /// Bytes of what differs from the rates that every namespace begins with.
    std::size_t memory_bytes() const { return cells_.bytes() + limits_.bytes(); }

private:
    static constexpr int kTotals = 8, kDistincts = 5, kExcludeds = 5;
    static constexpr int kRows = kRatedSources * kLengthCount;  // one of each source and length
    static constexpr std::size_t kWidth = 2 * kTotals * kDistincts * kExcludeds;  // (hits, tries) of its cells
    static constexpr int kGroups = kLengthCount * kExcludeds;  // of a source: what is known before a level is looked at

    struct Initial;  // what every namespace begins with
    static const Initial& initial();
    static int place(const LevelKey& key);
    static int group(int length, int excluded) { return length * kExcludeds + excluded; }
    static double highest(const double* row, int excluded);
    /// The limits of a source from its cells, and the bounds behind them.
    static void bind(const SharedRows<kRows, kWidth>& cells, int source, double* limits);
    static void spread(double* limits);

    SharedRows<kRows, kWidth> cells_;
    // By source: the highest rate of a cell of each group, then the highest over shorter lengths and larger exclusions.
    SharedRows<kRatedSources, 2 * kGroups> limits_;
};

/// How likely an output goes on after a token. Tokens after an end-of-turn token in a transcript are never generated.
class EndRates {
public:
    /// 1 for tokens that never ended an output.
    double goes_on(std::int32_t token) const;
    /// Record a token of an output. It counts as going on until `record_end` says otherwise.
    void record(std::int32_t token);
    void record_end(std::int32_t token);

    /// Of the tokens that ended an output keep only these.
    void keep(std::span<const std::int32_t> tokens);
    /// All tokens that ended an output.
    std::vector<std::int32_t> tokens() const;
    std::size_t memory_bytes() const { return counts_.size() * kNode; }

private:
    static constexpr std::size_t kNode = 80;  // bytes of an entry on the heap

    struct Count {
        double ends = 0.0, goes_on = 0.0;
    };
    std::map<std::int32_t, Count> counts_;  // of few tokens: the token that ended the fewest outputs is dropped
};

}  // namespace agentspec
