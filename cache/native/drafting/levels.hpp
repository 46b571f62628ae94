// The next tokens that the indexes offer after one context, in levels of ever shorter matches: first of text, then of
// its shape. Each level holds the symbols that no level before it offered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "drafting/hit_rates.hpp"
#include "drafting/run_matches.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

inline constexpr double kRecencyBonus = 1.0;  // extra occurrences credited to a level's most recent symbol

struct Symbol {
    Token token;
    Position newest;  // in its level's index
    double count;
};

/// The symbols first offered at this level, and the key of its hit rate.
struct Level {
    LevelKey key;
    int view;                 // place of the index among those searched
    Position newest;          // newest occurrence of any of the symbols
    std::size_t begin, end;   // of its symbols among those of the walk
    std::size_t leader;       // the symbol of the greatest weight; of equals that of the lowest token

    /// A symbol's count, with a bonus for the most recent. Symbols share the level's probability by weight.
    double weight(const Symbol& symbol) const { return symbol.count + (symbol.newest == newest ? kRecencyBonus : 0.0); }
    double weights() const { return key.total + kRecencyBonus; }
};

/// An index, and the Draft.source value of its tokens.
struct SourcedIndex {
    SuffixIndex* index;
    int source;
};

/// Numbers a few tokens, in the order in which they come.
class TokenSlots {
public:
    void clear();
    std::size_t find_or_add(Token token);

private:
    struct Entry {
        Token token = 0;
        std::uint32_t stored = 0;  // the number and `first_`; of a token that was cleared less than `first_`
    };
    Entry& locate(Token token);
    void grow();

    std::vector<Entry> entries_;  // a power of two
    std::uint32_t first_ = 1, size_ = 0;
};

/// The indexes of one call, as they were when it began; those of shapes go last.
struct SearchedIndexes {
    std::vector<IndexView> views;
    std::vector<SourcedIndex> indexes;  // of the view at the same place
    std::vector<int> rated;     // the source that its levels are rated by, likewise
    std::size_t of_text = 0;    // so many are of text
    std::uint32_t scan_limit = 0;  // of more new matches than this about so many are looked at
};

/// Walks the levels of one context, longest match first, earlier indexes first at each length, and keeps them. Levels
/// of shapes follow those of text. Reusable: it begins again with `start` or `follow`.
class LevelWalk {
public:
    void start(const SearchedIndexes& searched, std::span<const Token> context);
    /// Begin at the context of `before` extended by `token`. Matches are one token longer than they were there, so that
    /// most searches can wait.
    void follow(const LevelWalk& before, Token token);
    /// Go on in other views of the same snapshots.
    void resume(const SearchedIndexes& searched) { searched_ = &searched; }

    /// The nth level, which is looked for if it was not yet; nullptr where there are fewer. Valid until another is
    /// looked for.
    const Level* level(std::size_t nth);
    /// Look for a further level, where any is left. nullptr if the present length offers nothing new.
    const Level* advance();
    /// Of the level looked for next: no level left has a higher rank. 0 if none is left.
    int rank() const { return length_ == 0 ? 0 : level_rank(!in_text(), length_index(length_)); }
    /// How many symbols the levels found so far offer.
    int offered() const { return static_cast<int>(symbols_.size()); }

    /// The Draft.source value of a level's symbols.
    int source(const Level& level) const { return searched_->indexes[static_cast<std::size_t>(level.view)].source; }
    std::span<const Symbol> symbols(const Level& level) const {
        return std::span(symbols_).subspan(level.begin, level.end - level.begin);
    }
    const Symbol& leader(const Level& level) const { return symbols_[level.leader]; }
    const Query& query() const { return query_; }

private:
    using Matches = std::vector<RunMatches>;  // one index's matches of the query, by run

    static int next(const Matches& matches);
    void begin(std::size_t view, const Query& query, const Matches* before);
    void restart();
    bool widen(std::size_t view);
    void shorten();
    void begin_shapes();
    bool in_text() const { return end_ == searched_->of_text; }

    const SearchedIndexes* searched_ = nullptr;
    Query query_, shape_;
    std::vector<Matches> matches_;
    TokenSlots slots_;  // places in symbols_
    std::vector<Symbol> symbols_;  // of all levels
    std::vector<Level> levels_;
    int length_ = 0;
    std::size_t first_ = 0, view_ = 0, end_ = 0;  // the views searched now, and the next of them at this length
};

}  // namespace agentspec
