// Learned confidence: how often the next token is among the symbols that a level of the drafter offers.
//
// Secondary escape estimation (Bloom, "Solving the problems of context modeling", 1998): running hit rates keyed by
// a level's visible properties, instead of a formula on its counts.
#pragma once

#include <algorithm>
#include <bit>
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
inline constexpr int kLengths[] = {1, 2, 3, 4, 6, 8, 12, 24, 64};
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

    int rank() const;
};

inline constexpr int kRanks = 1 + 2 * kLengthCount;
/// Levels of higher ranks are looked at first: those of text before those of shapes. 0 is the rank of none.
inline int level_rank(bool shapes, int length) { return 1 + length + (shapes ? 0 : kLengthCount); }

inline int LevelKey::rank() const { return level_rank(source == kShapeSource, length); }

inline constexpr int kExcludeds = 5;
/// 0 for 0, 1 for 1, 2 for 2, 3 for 3 and 4, then 4.
inline int excluded_bucket(int excluded) {
    return excluded == 0 ? 0 : 1 + std::min<int>(kExcludeds - 2, std::bit_width(static_cast<unsigned>(excluded - 1)));
}

class HitRates {
public:
    HitRates();
    double rate(const LevelKey& key) const;
    void record(const LevelKey& key, bool hit);

    /// Bytes of what differs from the rates that every namespace begins with.
    std::size_t memory_bytes() const { return cells_.bytes(); }

private:
    static constexpr int kTotals = 8, kDistincts = 5;
    static constexpr int kRows = kRatedSources * kLengthCount;  // one of each source and length
    static constexpr std::size_t kWidth = 2 * kTotals * kDistincts * kExcludeds;  // (hits, tries) of its cells

    static const std::vector<double>& initial();  // what every namespace begins with
    static int place(const LevelKey& key);

    SharedRows<kRows, kWidth> cells_;
};

/// How likely the next token is in the levels that are left, by the highest rank of them and by how many symbols those
/// before offered.
class RestRates {
public:
    RestRates();
    /// 0 for rank 0, and never higher for a lower rank.
    double rate(int rank, int excluded) const { return rows_[excluded_bucket(excluded)][2 * kRanks + rank]; }
    /// Whether the token was in a level of one of the ranks from `high` to `low`, or in a lower one.
    void record(int high, int low, int excluded, bool hit);

    std::size_t memory_bytes() const { return rows_.bytes(); }

private:
    static const std::vector<double>& initial();
    static void settle(double* row);

    // By excluded symbols: the hits of each rank, the tries, then the highest rate of this rank and those below.
    SharedRows<kExcludeds, 3 * kRanks> rows_;
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
