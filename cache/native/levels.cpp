#include "levels.hpp"

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
    ++stamp_;
    size_ = 0;
}

TokenSlots::Entry& TokenSlots::locate(Token token) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t place = (static_cast<std::uint32_t>(token) * 2654435761u >> 7) & mask;
    while (entries_[place].stamp == stamp_ && entries_[place].token != token) place = (place + 1) & mask;
    return entries_[place];
}

int& TokenSlots::find_or_add(Token token, int fresh) {
    if (2 * size_ >= entries_.size()) grow();
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
    for (const Entry& entry : old) {
        if (entry.stamp == stamp_) locate(entry.token) = entry;
    }
}

int LevelWalk::Past::longest() const {
    int longest = taken < tail.size() ? tail[taken].shared : 0;
    for (const RunCursor& cursor : cursors) longest = std::max(longest, cursor.next());
    return longest;
}

void LevelWalk::start(const Query& query) {
    slots_.clear();
    level_.symbols.clear();
    length_ = 0;
    for (std::size_t i = 0; i < views_.size(); ++i) {
        past_[i].cursors.clear();
        const std::vector<Run>& runs = views_[i].runs();
        for (std::size_t r = 0; r < runs.size(); ++r) {
            past_[i].cursors.emplace_back(views_[i].log(), runs[r], views_[i].tables()[r], query.end());
        }
        find_tail(views_[i], query, past_[i]);
        if (past_[i].longest() > 0) length_ = std::max(length_, kLengths[length_index(past_[i].longest())]);
    }
    view_ = 0;
}

void LevelWalk::find_tail(const IndexView& view, const Query& query, Past& past) const {
    past.tail.clear();
    past.taken = 0;
    const Token* log = view.log();
    const Token last = query.end()[-1];
    for (const Position position : view.tail()) {
        if (log[position - 1] != last) continue;
        past.tail.push_back({shared_context(log + position, query.end()), position});
    }
    std::sort(past.tail.begin(), past.tail.end(), [](const TailMatch& a, const TailMatch& b) {
        return a.shared != b.shared ? a.shared > b.shared : a.position > b.position;
    });
}

const Level* LevelWalk::next() {
    for (; length_ > 0; shorten()) {
        if (const Level* level = next_of_length()) return level;
    }
    return nullptr;
}

/// The next index, of those left, that offers anything new at the present length.
const Level* LevelWalk::next_of_length() {
    for (; view_ < views_.size(); ++view_) {
        if (past_[view_].longest() < length_) continue;
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
    for (const Past& past : past_) longest = std::max(longest, past.longest());
    length_ = longest > 0 ? kLengths[length_index(longest)] : 0;
    view_ = 0;
}

/// No level from here on has a higher hit rate.
double LevelWalk::bound(const HitRates& rates) const {
    double bound = 0.0;
    for (const int source : sources_) {
        bound = std::max(bound, rates.bound(source, length_index(length_), static_cast<int>(slots_.size())));
    }
    return bound;
}

/// Make level_ the matches of at least `length` tokens in one index.
void LevelWalk::widen(std::size_t view, int length) {
    for (const Symbol& symbol : level_.symbols) slots_.find_or_add(symbol.token, kOffered) = kOffered;
    level_.symbols.clear();
    level_.view = static_cast<int>(view);
    level_.newest = 0;
    level_.key = {sources_[view], length_index(length), 0.0, 0, static_cast<int>(slots_.size())};

    Past& past = past_[view];
    for (RunCursor& cursor : past.cursors) {
        if (cursor.next() < length) continue;
        cursor.widen(length, scan_limit_, [&](Token token, Position p, double weight) { offer(token, p, weight); });
    }
    for (; past.taken < past.tail.size() && past.tail[past.taken].shared >= length; ++past.taken) {
        const Position position = past.tail[past.taken].position;
        offer(views_[view].token_at(position), position, 1.0);
    }
    level_.key.distinct = static_cast<int>(level_.symbols.size());
}

void LevelWalk::offer(Token token, Position position, double weight) {
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

}  // namespace agentspec
