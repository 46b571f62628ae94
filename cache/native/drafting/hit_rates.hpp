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

namespace agentspec {

inline constexpr int kSources = 3;
inline constexpr int kLengths[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48};
inline constexpr int kLengthCount = 15;

/// Index in kLengths of the greatest length that is at most `shared` (>= 1).
int length_index(int shared);

/// The properties of a level that are known before the next token is.
struct LevelKey {
    int source;        // < kSources
    int length;        // index in kLengths
    double total;      // occurrences of the symbols it offers
    int distinct;      // number of those symbols
    int excluded;      // number of symbols that longer levels offered
};

class HitRates {
public:
    HitRates();
    double rate(const LevelKey& key) const;
    /// Upper bound of the rates of all levels of `source` that are at most kLengths[length] long and come after levels
    /// that offered `excluded` or more symbols.
    double bound(int source, int length, int excluded) const;
    void record(const LevelKey& key, bool hit);

    /// (hits, tries) of every cell in turn.
    std::vector<double> state() const { return cells_; }
    /// Throws std::invalid_argument for a state of another size or with numbers that cannot be rates.
    void restore(std::span<const double> state);

    static const std::size_t kStateSize;

private:
    double highest(int source, int length, int excluded) const;
    void bind(int source);

    std::vector<double> cells_;
    std::vector<double> highest_;  // highest rate of a cell of each source, length and exclusion
    std::vector<double> bounds_;  // the highest of these over shorter lengths and larger exclusions too
};

/// How likely an output goes on after a token. Tokens after an end-of-turn token in a transcript are never generated.
class EndRates {
public:
    /// 1 for tokens that never ended an output.
    double goes_on(std::int32_t token) const;
    /// Record a token of an output. It counts as going on until `record_end` says otherwise.
    void record(std::int32_t token);
    void record_end(std::int32_t token);

    /// (token, ends, times gone on) of every token that ended an output.
    std::vector<double> state() const;
    /// Throws std::invalid_argument for an invalid state.
    void restore(std::span<const double> state);

private:
    struct Count {
        double ends = 0.0, goes_on = 0.0;
    };
    std::map<std::int32_t, Count> counts_;  // of few tokens: the token that ended the fewest outputs is dropped
};

}  // namespace agentspec
