#include "drafting/levels.hpp"

#include <algorithm>

#include "index/shapes.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kFewTokens = 32;  // room to begin with, a power of two
constexpr std::uint32_t kMostStored = 1u << 31;

}  // namespace

void TokenSlots::clear() {
    first_ += size_;
    size_ = 0;
    if (!entries_.empty() && first_ < kMostStored) return;
    entries_.assign(std::max(entries_.size(), kFewTokens), Entry{});
    first_ = 1;
}

TokenSlots::Entry& TokenSlots::locate(Token token) {
    Entry* const entries = entries_.data();
    const std::size_t mask = entries_.size() - 1;
    std::size_t place = (static_cast<std::uint32_t>(token) * 2654435761u >> 7) & mask;
    while (entries[place].stored >= first_ && entries[place].token != token) place = (place + 1) & mask;
    return entries[place];
}

inline std::size_t TokenSlots::find_or_add(Token token) {
    if (2 * size_ >= entries_.size()) grow();
    Entry& entry = locate(token);
    if (entry.stored < first_) entry = {token, first_ + size_++};
    return entry.stored - first_;
}

void TokenSlots::grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
        if (entry.stored >= first_) locate(entry.token) = entry;
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
    while (nth == levels_.size() && length_ > 0) advance();
    return nth < levels_.size() ? &levels_[nth] : nullptr;
}

const Level* LevelWalk::advance() {
    while (view_ < end_) {
        const std::size_t view = view_++;
        if (next(matches_[view]) >= length_ && widen(view)) return &levels_.back();
    }
    shorten();
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

/// Add a level: the matches of at least the present length in one index. False if they offer nothing new.
bool LevelWalk::widen(std::size_t view) {
    const std::size_t known = symbols_.size();
    Matches& matches = matches_[view];
    const IndexView& index = searched_->views[view];
    const Token never = in_text() ? kBoundary : kRare;  // to be offered
    Token last = kBoundary;  // the last token offered: the next is most often the same
    std::size_t slot = 0;    // of it
    const auto offer = [&](Token token, Position position) {
        if (token == never || index.is_dead(position)) return;
        if (token != last) {
            last = token;
            slot = slots_.find_or_add(token);
            if (slot == symbols_.size()) symbols_.push_back({token, 0, 0.0});
        }
        if (slot < known) return;  // a longer match offered it
        Symbol& symbol = symbols_[slot];
        symbol.count += 1.0;
        symbol.newest = std::max(symbol.newest, position);
    };
    std::uint64_t fresh = 0;
    for (RunMatches& run : matches) fresh += run.widen(length_);
    const Share share(fresh, searched_->scan_limit);
    for (const RunMatches& run : matches) run.visit(share, offer);
    if (symbols_.size() == known) return false;
    const LevelKey key{searched_->rated[view], length_index(length_), 0.0, static_cast<int>(symbols_.size() - known),
                       static_cast<int>(known)};
    Level level{key, static_cast<int>(view), 0, known, symbols_.size(), known};
    for (Symbol& symbol : std::span(symbols_).subspan(known)) {
        level.key.total += symbol.count;  // before each stands for several: a sum that is exact in any order
        level.newest = std::max(level.newest, symbol.newest);
        symbol.count *= share.weight();
    }
    level.key.total *= share.weight();
    for (std::size_t i = known; i < symbols_.size(); ++i) {
        const double here = level.weight(symbols_[i]), most = level.weight(leader(level));
        if (here > most || (here == most && symbols_[i].token < leader(level).token)) level.leader = i;
    }
    levels_.push_back(level);
    return true;
}

}  // namespace agentspec
