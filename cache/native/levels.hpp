// What the past offers after one context: levels of ever shorter matches, each with the symbols no longer level offered.
#pragma once

#include <cstdint>
#include <vector>

#include "hit_rates.hpp"
#include "run_cursor.hpp"
#include "suffix_index.hpp"

namespace agentspec {

inline constexpr double kRecencyBonus = 1.0;  // extra occurrences credited to a level's most recent symbol

struct Symbol {
    Token token;
    double count;
    Position newest;  // in its level's index
};

/// Symbols first offered at this level, and what its confidence is keyed by.
struct Level {
    LevelKey key;
    int view;                 // place of the index among those asked
    Position newest;          // newest occurrence of any of the symbols
    std::vector<Symbol> symbols;

    /// Probability inside the level is shared by count, with a bonus for the most recent.
    double weight(const Symbol& symbol) const {
        return symbol.count + (symbol.newest == newest ? kRecencyBonus : 0.0);
    }
    double weights() const { return key.total + kRecencyBonus; }
    /// The symbol of the greatest weight, and of these the one with the lowest id.
    const Symbol& leader() const;
};

/// An index and the Draft.source value its tokens go by.
struct SourcedIndex {
    const SuffixIndex* index;
    int source;
};

/// A small set of tokens with a slot number each; clearing is free.
class TokenSlots {
public:
    TokenSlots() : entries_(64) {}
    void clear();
    /// The slot of `token`, inserted with `fresh` where it was missing.
    int& find_or_add(Token token, int fresh);
    std::size_t size() const { return size_; }

private:
    struct Entry {
        Token token = 0;
        std::uint32_t stamp = 0;
        int slot = 0;
    };
    Entry& locate(Token token);
    void grow();

    std::vector<Entry> entries_;
    std::uint32_t stamp_ = 1;
    std::size_t size_ = 0;
};

/// Walks the levels of one context, longest match first, earlier indexes first at each length. Reusable: `start` resets.
class LevelWalk {
public:
    /// The caller holds every view's lock. Of more than `scan_limit` new matches in a run an even sample is looked at.
    LevelWalk(const std::vector<IndexView>& views, const std::vector<int>& sources, std::uint32_t scan_limit)
        : views_(views), sources_(sources), scan_limit_(scan_limit), past_(views.size()) {}

    void start(const Query& query);
    /// The next level that offers anything new, or nullptr. Valid until the next call.
    const Level* next();
    /// The same, and nullptr where the levels left are not `worth(the highest hit rate that any of them can have)`.
    template <class Worth>
    const Level* next(const HitRates& rates, Worth&& worth) {
        while (length_ > 0 && worth(bound(rates))) {
            if (const Level* level = next_of_length()) return level;
            shorten();
        }
        return nullptr;
    }

private:
    struct TailMatch {
        int shared;
        Position position;
    };
    struct Past {  // one index's matches of the query
        std::vector<RunCursor> cursors;
        std::vector<TailMatch> tail;  // longest first
        std::size_t taken = 0;        // of the tail
        int longest() const;
    };

    void find_tail(const IndexView& view, const Query& query, Past& past) const;
    void widen(std::size_t view, int length);
    const Level* next_of_length();
    void shorten();
    double bound(const HitRates& rates) const;
    void offer(Token token, Position position, double weight);

    const std::vector<IndexView>& views_;
    const std::vector<int>& sources_;
    std::uint32_t scan_limit_;
    std::vector<Past> past_;
    TokenSlots slots_;  // slot in level_.symbols, or kOffered
    Level level_;
    int length_ = 0;
    std::size_t view_ = 0;
};

}  // namespace agentspec
