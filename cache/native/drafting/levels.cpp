#include "drafting/levels.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr int kOffered = -1, kUnseen = -2;

}  // namespace

const Symbol& Level::leader() const {
    const Symbol* leader = &symbols.front();
    for (const Symbol& symbol : symbols) {
        const double x = weight(symbol), y = weight(*leader);
        if (x > y || (x == y && symbol.token < leader->token)) leader = &symbol;
    }
    return *leader;
}

void TokenSlots::clear() {
    if (++stamp_ == 0) {
        std::fill(entries_.begin(), entries_.end(), Entry{});
        stamp_ = 1;
    }
    size_ = 0;
}

TokenSlots::Entry& TokenSlots::locate(Token token) {
    Entry* const entries = entries_.data();
    std::size_t place = (static_cast<std::uint32_t>(token) * 2654435761u >> 7) & mask_;
    while (entries[place].stamp == stamp_ && entries[place].token != token) place = (place + 1) & mask_;
    return entries[place];
}

int& TokenSlots::find_or_add(Token token, int fresh) {
    if (2 * size_ > mask_) grow();
    Entry& entry = locate(token);
    if (entry.stamp != stamp_) {
        entry = {token, stamp_, fresh};
        ++size_;
    }
    return entry.slot;
}

void TokenSlots::grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    mask_ = entries_.size() - 1;
    for (const Entry& entry : old) {
        if (entry.stamp == stamp_) locate(entry.token) = entry;
    }
}

int LevelWalk::Matches::next() const {
    int next = tail.next();
    for (const RunMatches& run : runs) next = std::max(next, run.next());
    return next;
}

void LevelWalk::start(const SearchedIndexes& searched, std::span<const Token> context) {
    searched_ = &searched;
    query_.assign(context);
    matches_.resize(searched.views.size());
    for (std::size_t view = 0; view < matches_.size(); ++view) begin(view, nullptr);
    restart();
}

void LevelWalk::follow(const LevelWalk& before, Token token) {
    searched_ = before.searched_;
    query_.follow(before.query_, token);
    matches_.resize(before.matches_.size());
    for (std::size_t view = 0; view < matches_.size(); ++view) begin(view, &before.matches_[view]);
    restart();
}

void LevelWalk::restart() {
    slots_.clear();
    level_.symbols.clear();
    shorten();
}

/// Look for the query in one index, where `before` was found when it was a token shorter.
void LevelWalk::begin(std::size_t view, const Matches* before) {
    const IndexView& index = searched_->views[view];
    const Token* end = query_.end();
    const int most = query_.length();
    if (index.may_start(pair_before(end))) before = nullptr;
    Matches& matches = matches_[view];
    matches.runs.clear();
    for (std::size_t r = 0; r < index.runs().size(); ++r) {
        if (before) {
            matches.runs.emplace_back(before->runs[r], end, most);
        } else {
            matches.runs.emplace_back(index.log(), *index.runs()[r], end, most);
        }
    }
    matches.tail.start(index.log(), index.tail(), end, before ? std::min(before->tail.longest() + 1, most) : most);
}

const Level* LevelWalk::next() {
    for (; length_ > 0; shorten()) {
        if (const Level* level = next_of_length()) return level;
    }
    return nullptr;
}

/// The next index, of those left, that offers anything new at the present length.
const Level* LevelWalk::next_of_length() {
    for (; view_ < matches_.size(); ++view_) {
        if (matches_[view_].next() < length_) continue;
        widen(view_, length_);
        if (level_.symbols.empty()) continue;
        ++view_;
        return &level_;
    }
    return nullptr;
}

/// Go on to the next length that any index has matches of; 0 where there is none.
void LevelWalk::shorten() {
    int longest = 0;
    for (const Matches& one : matches_) longest = std::max(longest, one.next());
    length_ = longest > 0 ? kLengths[length_index(longest)] : 0;
    view_ = 0;
}

double LevelWalk::bound(const HitRates& rates) const {
    if (length_ == 0) return 0.0;
    return rates.bound(searched_->sources, length_index(length_), static_cast<int>(slots_.size()));
}

inline void LevelWalk::offer(Token token, Position position, double weight) {
    int& slot = slots_.find_or_add(token, kUnseen);
    if (slot == kOffered) return;
    if (slot == kUnseen) {
        slot = static_cast<int>(level_.symbols.size());
        level_.symbols.push_back({token, 0.0, 0});
    }
    Symbol& symbol = level_.symbols[slot];
    symbol.count += weight;
    symbol.newest = std::max(symbol.newest, position);
    level_.key.total += weight;
    level_.newest = std::max(level_.newest, position);
}

/// Make level_ the matches of at least `length` tokens in one index.
void LevelWalk::widen(std::size_t view, int length) {
    for (const Symbol& symbol : level_.symbols) slots_.find_or_add(symbol.token, kOffered) = kOffered;
    level_.symbols.clear();
    level_.view = static_cast<int>(view);
    level_.newest = 0;
    level_.key = {searched_->sources[view], length_index(length), 0.0, 0, static_cast<int>(slots_.size())};

    Matches& matches = matches_[view];
    const IndexView& index = searched_->views[view];
    const auto offer_living = [&](Token token, Position position, double weight) {
        if (!index.is_dead(position)) offer(token, position, weight);
    };
    for (RunMatches& run : matches.runs) {
        if (run.next() >= length) run.widen(length, searched_->scan_limit, offer_living);
    }
    if (matches.tail.next() >= length) {
        matches.tail.widen(length, [&](Token token, Position position) { offer_living(token, position, 1.0); });
    }
    level_.key.distinct = static_cast<int>(level_.symbols.size());
}

}  // namespace agentspec
