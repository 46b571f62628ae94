// The next tokens that the indexes offer after one context, in levels of ever shorter matches. Each level holds the
// symbols that no level before it offered.
#pragma once

#include <cstdint>
#include <vector>

#include "drafting/hit_rates.hpp"
#include "drafting/run_matches.hpp"
#include "drafting/tail_matches.hpp"
#include "index/sizes.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr double kRecencyBonus = 1.0;  // extra occurrences credited to a level's most recent symbol

struct Symbol {
    Token token;
    double count;
    Position newest;  // in its level's index
};

/// The symbols first offered at this level, and the key of its hit rate.
struct Level {
    LevelKey key;
    int view;                 // place of the index among those searched
    Position newest;          // newest occurrence of any of the symbols
    std::vector<Symbol> symbols;

    /// A symbol's count, with a bonus for the most recent. Symbols share the level's probability by weight.
    double weight(const Symbol& symbol) const { return symbol.count + (symbol.newest == newest ? kRecencyBonus : 0.0); }
    double weights() const { return key.total + kRecencyBonus; }
    /// The symbol of the greatest weight; of equals the symbol with the lowest id.
    const Symbol& leader() const;
};

/// An index, and the Draft.source value of its tokens.
struct SourcedIndex {
    SuffixIndex* index;
    int source;
};

/// A small set of tokens with a slot number each; clearing is free but once in 2^32 times.
class TokenSlots {
public:
    TokenSlots() : entries_(64), mask_(63) {}
    void clear();
    /// The slot of `token`, inserted with the value `fresh` if it was missing.
    int& find_or_add(Token token, int fresh);
    std::size_t size() const { return size_; }

private:
    struct Entry {
        Token token = 0;
        Stamp stamp = 0;
        int slot = 0;
    };
    Entry& locate(Token token);
    void grow();

    std::vector<Entry> entries_;  // a power of two
    std::size_t mask_;            // their number, less one
    Stamp stamp_ = 1;  // of the entries that count; 0: none
    std::size_t size_ = 0;
};

/// The indexes of one call, as they were when it began.
struct SearchedIndexes {
    std::vector<IndexView> views;
    std::vector<int> sources;   // of the view at the same place
    std::uint32_t scan_limit;   // of more new matches than this in a run an even sample is looked at
};

/// Walks the levels of one context, longest match first, earlier indexes first at each length. Reusable: it begins anew
/// with `start` or `follow`.
class LevelWalk {
public:
    void start(const SearchedIndexes& searched, std::span<const Token> context);
    /// Begin at the context of `before` extended by `token`. Matches are one token longer than they were there, so that
    /// most searches can wait.
    void follow(const LevelWalk& before, Token token);

    /// The next level that offers anything new, or nullptr. Valid until the next call.
    const Level* next();
    /// Like `next`, but returns nullptr for now if `worth(rate)` is false for the highest hit rate of the levels left.
    template <class Worth>
    const Level* next(const HitRates& rates, Worth&& worth) {
        while (length_ > 0 && worth(bound(rates))) {
            if (const Level* level = next_of_length()) return level;
            shorten();
        }
        return nullptr;
    }
    /// Upper bound of the hit rates of the levels left; 0 if none is left.
    double bound(const HitRates& rates) const;

private:
    struct Matches {  // one index's matches of the query
        std::vector<RunMatches> runs;
        TailMatches tail;
        int next() const;
    };

    void begin(std::size_t view, const Matches* before);
    void restart();
    void widen(std::size_t view, int length);
    const Level* next_of_length();
    void shorten();
    void offer(Token token, Position position, double weight);

    const SearchedIndexes* searched_ = nullptr;
    Query query_;
    std::vector<Matches> matches_;
    TokenSlots slots_;  // slot in level_.symbols, or kOffered
    Level level_;
    int length_ = 0;
    std::size_t view_ = 0;
};

}  // namespace agentspec
