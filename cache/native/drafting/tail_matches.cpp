#include "drafting/tail_matches.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kTogether = 16;  // tokens compared at a time

}  // namespace

void TailMatches::start(LogView log, const Snapshot& snapshot, const Token* query_end, int most) {
    log_ = log;
    tail_ = snapshot.newest();
    before_ = snapshot.tail ? snapshot.tail->before() : nullptr;
    query_end_ = query_end;
    next_ = tail_.empty() ? 0 : std::max(most, shared_context(log + tail_.front(), query_end));
    longest_ = next_;
    searched_ = false;
}

void TailMatches::search() {
    matches_.clear();
    const Token last = query_end_[-1];
    for (std::size_t begin = 0; begin < tail_.size(); begin += kTogether) {
        const std::size_t end = std::min(begin + kTogether, tail_.size());
        int found = 0;
        for (std::size_t i = begin; i < end; ++i) found |= before_[i] == last;
        for (std::size_t i = begin; found && i < end; ++i) {
            if (before_[i] == last) matches_.push_back({tail_[i], shared_context(log_ + tail_[i], query_end_)});
        }
    }
    std::sort(matches_.begin(), matches_.end(), [](const Match& a, const Match& b) {
        return a.shared != b.shared ? a.shared > b.shared : a.position > b.position;
    });
    taken_ = 0;
    longest_ = next_ = shared_at(0);
    searched_ = true;
}

}  // namespace agentspec
