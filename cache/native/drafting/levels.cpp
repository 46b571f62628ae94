#include "drafting/levels.hpp"

#include <algorithm>

#include "index/shapes.hpp"

namespace agentspec {
void TokenSlots::clear() {
    if (++stamp_ == 0) {
        std::fill(entries_.begin(), entries_.end(), Entry{});
        stamp_ = 1;
    }
    size_ = 0;
}

TokenSlots::Entry& TokenSlots::locate(Token token) {
    Entry* const entries = entries_.data();
    const std::size_t mask = entries_.size() - 1;
    std::size_t place = (static_cast<std::uint32_t>(token) * 2654435761u >> 7) & mask;
    while (entries[place].stamp == stamp_ && entries[place].token != token) place = (place + 1) & mask;
    return entries[place];
}

inline std::size_t TokenSlots::find_or_add(Token token, std::size_t fresh) {
    if (2 * size_ >= entries_.size()) grow();
    Entry& entry = locate(token);
    if (entry.stamp != stamp_) {
        entry = {token, stamp_, static_cast<std::uint32_t>(fresh)};
        ++size_;
    }
    return entry.slot;
}

void TokenSlots::grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
        if (entry.stamp == stamp_) locate(entry.token) = entry;
    }
}

/// The longest shared context among what was not taken in yet.
int LevelWalk::next(const Matches& matches) {
    int next = 0;
    for (const RunMatches& run : matches) next = std::max(next, run.next());
    return next;
}

void LevelWalk::start(const SearchedIndexes& searched, std::span<const Token> context) {
    searched_ = &searched;
    query_.assign(context);
    matches_.resize(searched.views.size());
    for (std::size_t view = 0; view < searched.of_text; ++view) begin(view, query_, nullptr);
    restart();
}

void LevelWalk::follow(const LevelWalk& before, Token token) {
    searched_ = before.searched_;
    query_.follow(before.query_, token);
    matches_.resize(before.matches_.size());
    for (std::size_t view = 0; view < searched_->of_text; ++view) begin(view, query_, &before.matches_[view]);
    restart();
}

void LevelWalk::restart() {
    slots_.clear();
    symbols_.clear();
    levels_.clear();
    first_ = 0;
    end_ = searched_->of_text;
    shorten();
}

/// Look for a query in one index, where `before` was found when it was a token shorter.
void LevelWalk::begin(std::size_t view, const Query& query, const Matches* before) {
    const IndexView& index = searched_->views[view];
    const Token* end = query.end();
    const int most = query.length();
    if (index.may_start(pair_before(end))) before = nullptr;
    Matches& matches = matches_[view];
    matches.clear();
    for (std::size_t r = 0; r < index.runs().size(); ++r) {
        if (before) {
            matches.emplace_back((*before)[r], end, most);
        } else {
            matches.emplace_back(index.log(), *index.runs()[r], end, most);
        }
    }
}

const Level* LevelWalk::level(std::size_t nth) {
    for (; nth == levels_.size() && length_ > 0; shorten()) {
        if (const Level* level = next_of_length()) return level;
    }
    return nth < levels_.size() ? &levels_[nth] : nullptr;
}

const Symbol& LevelWalk::leader(const Level& level) const {
    const Symbol* leader = &symbols_[level.begin];
    for (const Symbol& symbol : symbols(level)) {
        const double x = level.weight(symbol), y = level.weight(*leader);
        if (x > y || (x == y && symbol.token < leader->token)) leader = &symbol;
    }
    return *leader;
}

/// The next index, of those left, that offers anything new at the present length.
const Level* LevelWalk::next_of_length() {
    while (view_ < end_) {
        const std::size_t view = view_++;
        if (next(matches_[view]) < length_) continue;
        widen(view, length_);
        if (levels_.back().end > levels_.back().begin) return &levels_.back();
        levels_.pop_back();
    }
    return nullptr;
}

/// Go on to the next length that any index has matches of, at last to those of shapes; 0 where there is none.
void LevelWalk::shorten() {
    int longest = 0;
    for (std::size_t view = first_; view < end_; ++view) longest = std::max(longest, next(matches_[view]));
    length_ = longest > 0 ? kLengths[length_index(longest)] : 0;
    view_ = first_;
    if (length_ == 0 && in_text() && end_ < matches_.size()) begin_shapes();
}

/// Few contexts come to this, and their shapes are looked for only then.
void LevelWalk::begin_shapes() {
    shape_.take_shape_of(query_);
    first_ = end_;
    end_ = matches_.size();
    for (std::size_t view = first_; view < end_; ++view) begin(view, shape_, nullptr);
    shorten();
}

double LevelWalk::bound(const HitRates& rates) const {
    if (length_ == 0) return 0.0;
    const std::span<const int> sources = searched_->rated;
    const int excluded = static_cast<int>(symbols_.size());
    const double here = rates.bound(sources.subspan(first_, end_ - first_), length_index(length_), excluded);
    return std::max(here,
                    rates.bound(sources.subspan(end_), length_index(std::min(query_.length(), kShapeDepth)), excluded));
}

/// Add a level: the matches of at least `length` tokens in one index, which may offer nothing new.
void LevelWalk::widen(std::size_t view, int length) {
    const std::size_t known = symbols_.size();
    Matches& matches = matches_[view];
    const IndexView& index = searched_->views[view];
    const Token never = in_text() ? kBoundary : kRare;  // to be offered
    Token last = kBoundary;  // the last token offered: the next is most often the same
    std::size_t slot = 0;    // of it
    const auto offer = [&](Token token, Position position, double weight) {
        if (token == never || index.is_dead(position)) return;
        if (token != last) {
            last = token;
            slot = slots_.find_or_add(token, symbols_.size());
            if (slot == symbols_.size()) symbols_.push_back({token, 0, 0.0});
        }
        if (slot < known) return;  // a longer match offered it
        Symbol& symbol = symbols_[slot];
        symbol.count += weight;
        symbol.newest = std::max(symbol.newest, position);
    };
    for (std::size_t r = 0; r < matches.size(); ++r) {
        if (matches[r].next() < length) continue;
        const std::size_t size = index.runs()[r]->size();
        matches[r].widen(length, size <= SuffixIndex::kTail ? SuffixIndex::kTail : searched_->scan_limit, offer);
    }
    Level level{{searched_->rated[view], length_index(length), 0.0, 0, static_cast<int>(known)},
                static_cast<int>(view),
                0,
                known,
                symbols_.size()};
    level.key.distinct = static_cast<int>(level.end - level.begin);
    for (const Symbol& symbol : symbols(level)) {
        level.key.total += symbol.count;
        level.newest = std::max(level.newest, symbol.newest);
    }
    levels_.push_back(level);
}

}  // namespace agentspec
