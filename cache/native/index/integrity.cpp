// What must hold inside a suffix index, checked on demand.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw std::domain_error("suffix index is damaged: " + what);
}

/// A part is in order, and its table is right. Returns how many of its positions are dead.
std::size_t check_part(const TokenLog& log, const Run& run, const RunPart& part) {
    const std::span<const Position> positions = part.positions();
    require(run.parts().size() > 1 || part.table() == RunTable(log.view(), positions), "table of another run");
    std::size_t dead = 0;
    for (std::size_t i = 0; i < positions.size(); ++i) {
        require(positions[i] >= run.oldest() && positions[i] <= run.newest(), "a position outside its run");
        dead += log.is_dead(positions[i]);
        if (i == 0) continue;
        const int order = compare_contexts(log.view() + positions[i - 1], log.view() + positions[i]);
        require(order < 0 || (order == 0 && positions[i - 1] < positions[i]),
                "run out of order at " + std::to_string(i));
    }
    return dead;
}

}  // namespace

void SuffixIndex::check_integrity() const {
    const std::lock_guard merging(merging_);
    const Hold hold(*this);
    check_positions();
    check_runs();
    check_use();
}

/// Runs are in order, older than the next, and count what is dead in them.
void SuffixIndex::check_runs() const {
    std::size_t behind = 0;
    for (const auto& run : *runs_) {
        require(run->size() > 0, "empty run");
        require(run->oldest() >= behind, "a run reaches into an older one");
        behind = std::size_t{run->newest()} + 1;
        std::size_t dead = 0;
        for (const RunPart& part : run->parts()) dead += check_part(*log_, *run, part);
        require(dead == run->dead(),
                "a run with " + std::to_string(dead) + " dead, not " + std::to_string(run->dead()));
    }
}

/// Spans lie inside the log behind a boundary, match the pieces, and are indexed once each; nothing else is, unless it
/// is dead.
void SuffixIndex::check_positions() const {
    Positions indexed;
    const auto index = [&](Position position) {
        if (!log_->is_dead(position)) indexed.push_back(position);
    };
    for (const auto& run : *runs_) {
        for (const RunPart& part : run->parts()) std::for_each(part.positions().begin(), part.positions().end(), index);
    }
    std::sort(indexed.begin(), indexed.end());
    require(indexed.size() == live_, "indexed and living tokens differ");

    std::size_t seen = 0, spans = 0, needed = kPadding;
    for (const Piece& piece : pieces_) {
        if (!piece.sequence) continue;
        ++spans;
        require(piece.begin > kPadding && piece.begin <= piece.end && piece.end <= log_->size(),
                "span outside the log");
        require(piece.end == log_->size() || (*log_)[piece.end] == kBoundary || log_->is_dead(piece.end),
                "a token behind a span");
        const auto context = context_before(log_->view(), piece.begin);
        require(context.empty() || (starts_ && starts_->contains(pair_before(log_->view() + piece.begin))),
                "a start that is not known");
        needed += 1 + context.size() + (piece.end - piece.begin);
        for (Position position = piece.begin; position < piece.end; ++position, ++seen) {
            require((*log_)[position] >= 0, "no token at " + std::to_string(position));
            require(indexed[seen] == position, "position " + std::to_string(position) + " not indexed once");
        }
    }
    require(seen == live_, "pieces and living tokens differ");
    require(needed + unneeded_ + log_->discarded() == log_->size(), "the log holds what nobody knows of");
    std::size_t length = 0;
    for (const auto& [id, sequence] : sequences_) {
        require(!sequence.spans.empty(), "a sequence without a place");
        spans -= sequence.spans.size();
        std::size_t own = 0;
        for (const Span& span : sequence.spans) own += span.size();
        require(own == sequence.length, "length of sequence " + std::to_string(id));
        length += own;
    }
    require(spans == 0 && length == live_, "sequences and pieces differ");
}

/// All sequences are known by their last use.
void SuffixIndex::check_use() const {
    std::size_t known = 0;
    for (const Sequence* one = oldest_; one; one = one->newer, ++known) {
        require(sequences_.contains(one->id) && &sequences_.at(one->id) == one, "a sequence that is gone");
        require(one->newer ? one->newer->older == one : one == newest_, "sequences out of order of use");
    }
    require(known == sequences_.size(), "a sequence that was never used");
}

}  // namespace agentspec
