// What must hold inside a suffix index, checked on demand.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error("suffix index is damaged: " + what);
}

}  // namespace

void SuffixIndex::check_integrity() const {
    const std::lock_guard writing(writing_);  // an append is checked before or after it, not half way
    const std::shared_lock lock(mutex_);
    check_positions();
    check_runs();
}

/// Runs are in order, large enough for their number to stay logarithmic, and older than the tail.
void SuffixIndex::check_runs() const {
    const Position tail_begin = tail_.empty() ? static_cast<Position>(log_.size()) : tail_.front();
    require(std::is_sorted(tail_.begin(), tail_.end()), "tail out of order");
    require(tail_.size() <= tail_limit_, "tail of " + std::to_string(tail_.size()) + " positions");
    require(tables_.size() == runs_.size(), "tables and runs differ");
    for (std::size_t r = 0; r < runs_.size(); ++r) {
        const Run& run = runs_[r];
        require(!run.empty(), "empty run");
        require(tables_[r] == RunTable(log_.data(), run), "table of another run");
        for (std::size_t i = 0; i < run.size(); ++i) {
            require(run[i] < tail_begin, "a run reaches into the tail");
            if (i == 0) continue;
            const int order = compare_contexts(log_.data() + run[i - 1], log_.data() + run[i]);
            require(order < 0 || (order == 0 && run[i - 1] < run[i]), "run out of order at " + std::to_string(i));
        }
    }
}

/// Spans lie inside the log behind a boundary, match the pieces, and are indexed once each; nothing else is.
void SuffixIndex::check_positions() const {
    Positions indexed(tail_);
    for (const Run& run : runs_) indexed.insert(indexed.end(), run.begin(), run.end());
    std::sort(indexed.begin(), indexed.end());
    require(indexed.size() == live_, "indexed and living tokens differ");

    std::size_t seen = 0, spans = 0;
    for (const Piece& piece : pieces_) {
        const Sequence& sequence = at(piece.sequence);
        for (const Span& span : sequence.spans) {
            if (span.begin != piece.begin) continue;
            ++spans;
            require(span.begin > kPadding && span.begin <= span.end && span.end <= log_.size(), "span outside the log");
            require(span.end == log_.size() || log_[span.end] == kBoundary, "a token behind a span");
            for (Position position = span.begin; position < span.end; ++position, ++seen) {
                require(log_[position] >= 0, "no token at " + std::to_string(position));
                require(indexed[seen] == position, "position " + std::to_string(position) + " not indexed once");
            }
        }
    }
    require(seen == live_, "pieces and living tokens differ");
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

}  // namespace agentspec
