// Learned confidence: how often the next token is among the symbols that a level of the drafter offers.
//
// Secondary escape estimation (Bloom, "Solving the problems of context modeling", 1998): running hit rates keyed by
// a level's visible properties, instead of a formula on its counts.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace agentspec {

inline constexpr int kSources = 3;  // of text
inline constexpr int kSession = 0;  // the source that is the session's own text
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
    bool is_own() const { return source == kSession; }
};

inline constexpr int kRanks = 1 + 2 * kLengthCount;
/// Levels of higher ranks are looked at first: those of text before those of shapes. 0 is the rank of none.
inline int level_rank(bool shapes, int length) { return 1 + length + (shapes ? 0 : kLengthCount); }

inline int LevelKey::rank() const { return level_rank(source == kShapeSource, length); }

/// Hits and misses, of which the older count for less and less: both halve as they grow, which follows a change of
/// work.
struct Tally {
    static constexpr int kMost = 100;
    std::uint8_t hits = 0, misses = 0;

    void add(bool hit) {
        ++(hit ? hits : misses);
        if (hits + misses > kMost) *this = {half(hits), half(misses)};
    }
    /// Of tries, where `tries` more had `hits_before`.
    double rate(double tries, double hits_before) const { return (hits + hits_before) / (hits + misses + tries); }

private:
    /// To an even number where it lies between two, so that rare ones are neither lost nor kept for ever.
    static std::uint8_t half(int count) { return static_cast<std::uint8_t>((count + (count >> 1 & 1)) / 2); }
};

class HitRates {
public:
    double rate(const LevelKey& key) const;
    void record(const LevelKey& key, bool hit) { tallies_[place(key)].add(hit); }
    std::span<Tally> tallies() { return tallies_; }

    static constexpr int kTotals = 4;     // classes of occurrences: 1, up to 4, up to 16, more
    static constexpr int kDistincts = 3;  // of symbols: 1, up to 4, more
    static constexpr int kCells = kRatedSources * kLengthCount * kTotals * kDistincts * 2;

private:
    static int place(const LevelKey& key);

    std::array<Tally, kCells> tallies_{};  // by source, length, total, distinct, whether any are excluded
};

/// How likely the next token is in the levels that are left, by the highest rank of them and by how many symbols those
/// before offered.
class RestRates {
public:
    RestRates() { settle(); }
    /// 0 for rank 0, and never higher for a lower rank.
    double rate(int rank, int excluded) const { return rates_[bucket(excluded)][rank]; }
    /// Whether the token was in a level of one of the ranks from `high` to `low`, or in a lower one.
    void record(int high, int low, int excluded, bool hit);
    std::span<Tally> tallies() { return tallies_; }
    /// To be called once tallies were changed.
    void settle();

    static constexpr int kExcludeds = 5;  // 0, 1, 2, 3 and 4, more

private:
    static int bucket(int excluded) {
        const auto all = static_cast<unsigned>(excluded);
        return excluded == 0 ? 0 : 1 + std::min<int>(kExcludeds - 2, std::bit_width(all - 1));
    }
    void settle(int bucket);

    std::array<Tally, kExcludeds * kRanks> tallies_{};
    std::array<std::array<double, kRanks>, kExcludeds> rates_{};  // the highest of this rank and those below
};

/// How likely an output goes on after a token. Tokens after an end-of-turn token in a transcript are never generated.
class EndRates {
public:
    static constexpr std::size_t kMost = 64;  // tokens; more drop the token that ended the fewest outputs

    struct Count {
        std::int32_t token;
        std::uint32_t ends, goes_on;
    };
    /// 1 for tokens that never ended an output.
    double goes_on(std::int32_t token) const;
    /// Record a token of an output. It counts as going on until `record_end` says otherwise.
    void record(std::int32_t token);
    void record_end(std::int32_t token);

    /// Of the tokens that ended an output keep only these.
    void keep(std::span<const std::int32_t> tokens);
    /// Those that ended an output, by token.
    std::vector<Count>& counts() { return counts_; }
    const std::vector<Count>& counts() const { return counts_; }

private:
    std::size_t place(std::int32_t token) const;
    bool holds(std::size_t place, std::int32_t token) const {
        return place < counts_.size() && counts_[place].token == token;
    }

    std::vector<Count> counts_;
};

}  // namespace agentspec
