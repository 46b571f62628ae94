#include "drafting/run_matches.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kMany = 64;  // matches that take as long to follow as a search

}  // namespace

RunMatches::RunMatches(const RunMatches& before, const Token* query_end, int most)
    : RunMatches(before.log_, *before.run_, query_end, most) {
    const bool found = before.searched();
    const auto follows = [this](const RunCursor& cursor) { return follow(cursor); };
    const bool all = found ? std::ranges::all_of(before.cursors(), follows) : follow(before.known());
    if (!all) known_count_ = 0;
    const int shorter = !all ? before.longest_ : found ? before.next() : before.unknown_;
    // The oldest position follows none of this run.
    unknown_ = std::max(std::min(shorter + 1, most), shared_context(log_ + run_->oldest(), query_end_));
    next_ = unknown_;
    for (const Match& match : known()) next_ = std::max(next_, match.shared);
    longest_ = next_;
}

/// Know what follows the matches of the query before. False where they are too many.
bool RunMatches::follow(std::span<const Match> before) {
    for (const auto& [position, shared] : before) {
        if (goes_on(position)) known_[known_count_++] = {position + 1, std::min(shared + 1, kDepth)};
    }
    return true;
}

bool RunMatches::follow(const RunCursor& before) {
    if (before.taken().size() > kMany) return false;
    for (const Position position : before.taken()) {
        if (!goes_on(position)) continue;
        if (known_count_ == known_.size()) return false;
        known_[known_count_++] = {position + 1, shared_context(log_ + (position + 1), query_end_)};
    }
    return true;
}

/// Whether the position behind a match of the query before is of this run and a match.
bool RunMatches::goes_on(Position position) const {
    return log_[position] == query_end_[-1] && position != run_->newest() && log_[position + 1] != kBoundary;
}

void RunMatches::search() {
    for (const RunPart& part : run_->parts()) cursors_[searched_++] = RunCursor(log_, part, query_end_);
    longest_ = next();
    for (RunCursor& cursor : cursors()) cursor.widen(taken_);
}

}  // namespace agentspec
