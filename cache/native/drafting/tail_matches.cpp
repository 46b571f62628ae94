#include "drafting/tail_matches.hpp"

#include <algorithm>

namespace agentspec {

void TailMatches::start(LogView log, std::span<const Position> tail, const Token* query_end, int most) {
    log_ = log;
    tail_ = tail;
    query_end_ = query_end;
    next_ = tail.empty() ? 0 : std::max(most, shared_context(log + tail.front(), query_end));
    longest_ = next_;
    searched_ = false;
}

void TailMatches::search() {
    matches_.clear();
    for (const Position position : tail_) {
        if (log_[position - 1] != query_end_[-1]) continue;
        matches_.push_back({position, shared_context(log_ + position, query_end_)});
    }
    std::sort(matches_.begin(), matches_.end(), [](const Match& a, const Match& b) {
        return a.shared != b.shared ? a.shared > b.shared : a.position > b.position;
    });
    taken_ = 0;
    longest_ = next_ = shared_at(0);
    searched_ = true;
}

}  // namespace agentspec
