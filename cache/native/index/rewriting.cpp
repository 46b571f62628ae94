// Taking removed text out of the log of a suffix index: writing it anew, and giving back pages that nothing needs.
#include <algorithm>
#include <utility>

#include "index/relocation.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

/// Write the living text into a new log, and exchange it for the old one together with all positions.
void SuffixIndex::rewrite() {
    std::shared_ptr<const Snapshot> from;
    std::vector<Relocation::Piece> pieces;
    std::size_t known, rest;
    {
        const Hold hold(*this);
        rewriting_ = true;
        buried_.clear();
        from = snapshot_;
        merging_end_ = runs_->size();  // with the runs that came since this job was chosen
        known = pieces_.size();
        rest = log_->size();
        for (const Piece& piece : pieces_) {
            if (piece.sequence) pieces.push_back({piece.begin, piece.end});
        }
        worked(known);
    }
    const std::size_t before = account_->bytes();
    const auto count = [&] { transient_ = account_->bytes() - std::min(before, account_->bytes()); };
    Relocation relocation(*from->log, pieces, deferred_ ? rest / 64 : 0, account_);
    count();
    Runs runs;
    std::size_t looked_at = rest;
    for (const auto& run : *from->runs) {
        looked_at += run->size();
        Positions positions = relocation.moved(run->positions());
        if (positions.empty()) continue;
        runs.push_back(std::make_shared<Run>(relocation.log()->data(), std::move(positions), account_));
        count();
    }
    const Hold hold(*this);
    work_.background += looked_at;
    exchange(relocation, std::move(runs), pieces, known, rest);
    publish();
}

/// Take what `relocation` has written, with what came and went since it began.
void SuffixIndex::exchange(Relocation& relocation, Runs runs, std::span<const Relocation::Piece> moved,
                           std::size_t known, std::size_t rest) {
    relocation.append_rest(*log_, rest, account_);
    worked(log_->size() - rest + pieces_.size() + tail_size_);
    const std::shared_ptr<TokenLog> log = relocation.log();
    const auto older = static_cast<std::ptrdiff_t>(runs.size());
    for (std::size_t i = merging_end_; i < runs_->size(); ++i) {
        const Run& run = *(*runs_)[i];
        worked(run.size());
        Positions positions = relocation.moved(run.positions());
        if (!positions.empty()) runs.push_back(std::make_shared<Run>(log->data(), std::move(positions), account_));
    }
    auto tail = tail_ ? std::make_shared<Tail>(tail_limit_, account_) : nullptr;
    std::size_t tail_size = 0;
    for (const Position position : this->tail()) {
        if (!log_->is_dead(position)) tail->set(tail_size++, *relocation.moved(position));
    }
    for (const Span& span : buried_) {
        const Position to = *relocation.moved(span.begin);
        log->bury(to, to + span.size());
        for (auto run = runs.begin(); run != runs.begin() + older; ++run) {
            const std::size_t from = std::max(to, (*run)->oldest());
            const std::size_t end = std::min<std::size_t>(to + span.size(), std::size_t{(*run)->newest()} + 1);
            if (from < end) (*run)->count_dead(end - from);
        }
    }
    for (auto run = runs.begin() + older; run != runs.end(); ++run) {
        const std::span<const Position> all = (*run)->positions();
        (*run)->count_dead(std::count_if(all.begin(), all.end(), [&](Position p) { return log->is_dead(p); }));
    }
    move_pieces(relocation, moved, known);
    retired_.insert(retired_.end(), runs_->begin(), runs_->end());
    retired_.push_back(std::exchange(log_, log));
    runs_ = std::make_shared<Runs>(std::move(runs));
    tail_ = std::move(tail);
    tail_size_ = tail_size;
    removed_ = log_->size() - find_starts();
    truncated_ = scattered_ = 0;
    merging_end_ = 0;
    rewriting_ = false;
    buried_ = {};
    ++generation_;
}

/// Let pieces and sequences name the places in the new log. The first `known` pieces are those of `moved`, in order,
/// and pieces that were forgotten before.
void SuffixIndex::move_pieces(const Relocation& relocation, std::span<const Relocation::Piece> moved,
                              std::size_t known) {
    std::vector<Piece> pieces;
    for (const Piece& piece : pieces_) {
        if (piece.sequence) piece.sequence->spans.clear();
    }
    for (std::size_t i = 0, next = 0; i < pieces_.size(); ++i) {
        const Piece& piece = pieces_[i];
        const bool copied = i < known && next < moved.size() && moved[next].begin == piece.begin;
        if (copied) ++next;
        if (!piece.sequence) continue;
        const Position begin = copied ? relocation.place(next - 1) : *relocation.moved(piece.begin);
        const Position end = begin + (piece.end - piece.begin);
        pieces.push_back({begin, end, piece.sequence});
        piece.sequence->spans.push_back({begin, end});
    }
    pieces_ = std::move(pieces);
}

/// Find anew what stands before pieces; returns how many places of the log are needed.
std::size_t SuffixIndex::find_starts() {
    starts_ = std::make_shared<StartSet>(pieces_.size() + pieces_.size() / 2 + 4, account_);
    std::size_t needed = kPadding;
    for (const Piece& piece : pieces_) {
        const std::size_t prefix = context_before(log_->data(), piece.begin).size();
        needed += 1 + prefix + (piece.end - piece.begin);
        if (prefix > 0) starts_->add(pair_before(log_->data() + piece.begin));
    }
    return needed;
}

/// Give back the pages of the log that lie between living pieces, as far as runs without dead positions reach: none of
/// them leads there and, while nothing is retired, nor does any older snapshot. Positions stay what they are.
void SuffixIndex::discard() {
    worked(pieces_.size());
    std::erase_if(pieces_, [](const Piece& piece) { return !piece.sequence; });
    find_starts();
    const std::size_t before = log_->discarded();
    for (std::size_t i = 0; i < runs_->size(); ++i) {
        if ((*runs_)[i]->dead() > 0) continue;
        const std::size_t begin = i == 0 ? kPadding : (*runs_)[i]->oldest();
        const std::size_t end = i + 1 < runs_->size() ? (*runs_)[i + 1]->oldest() : (*runs_)[i]->newest();
        discard_between(begin, end - kPadding);  // dead positions behind have their contexts there
    }
    const std::size_t gone = log_->discarded() - before, removed = std::min(removed_, gone);
    removed_ -= removed;
    truncated_ -= gone - removed;
    scattered_ = removed_ + truncated_ - std::min(removed_ + truncated_, dead_in_runs());
}

void SuffixIndex::discard_between(std::size_t begin, std::size_t end) {
    auto piece = std::lower_bound(pieces_.begin(), pieces_.end(), begin,
                                  [](const Piece& one, std::size_t place) { return one.end < place; });
    for (; piece != pieces_.end() && begin < end; ++piece) {
        const std::size_t next = piece->begin - 1 - context_before(log_->data(), piece->begin).size();
        log_->discard(begin, std::min(next, end));
        begin = std::size_t{piece->end} + 1;  // readers look at the place behind a piece
    }
    log_->discard(begin, end);
}

}  // namespace agentspec
