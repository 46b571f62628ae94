// Taking removed text out of the log of a suffix index: out of one chunk after the other, or by writing all of it anew.
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
    const LogView old = from->log->view();
    Relocation relocation(old, pieces);
    std::shared_ptr<TokenLog> log = TokenLog(account_).with_room(relocation.size());
    relocation.copy(old, [&](std::span<const Token> tokens) { log->append(tokens); });
    count();
    Runs runs;
    std::size_t looked_at = rest;
    for (const auto& run : *from->runs) {
        looked_at += run->size();
        Positions positions = relocation.moved(run->positions());
        if (positions.empty()) continue;
        runs.push_back(std::make_shared<Run>(log->view(), std::move(positions), account_));
        count();
    }
    const Hold hold(*this);
    work_.background += looked_at;
    exchange(std::move(log), relocation, std::move(runs), pieces, known, rest);
    publish();
}

/// Take `log`, where what was moved is, with what came and went since the rewriting began.
void SuffixIndex::exchange(std::shared_ptr<TokenLog> log, Relocation& relocation, Runs runs,
                           std::span<const Relocation::Piece> moved, std::size_t known, std::size_t rest) {
    relocation.move_rest(rest, log->size());
    log = log->with_room(log_->size() - rest);
    Relocation::copy(log_->view(), rest, log_->size(), [&](std::span<const Token> tokens) { log->append(tokens); });
    worked(log_->size() - rest + pieces_.size());
    const auto older = static_cast<std::ptrdiff_t>(runs.size());
    for (std::size_t i = merging_end_; i < runs_->size(); ++i) {
        const Run& run = *(*runs_)[i];
        worked(run.size());
        Positions positions = relocation.moved(run.positions());
        if (!positions.empty()) runs.push_back(std::make_shared<Run>(log->view(), std::move(positions), account_));
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
    auto shared = std::make_shared<const Runs>(std::move(runs));
    const auto living = std::count_if(pieces_.begin(), pieces_.end(), [](const Piece& one) { return one.sequence; });
    auto starts = empty_starts(living);
    std::vector<Piece> pieces;
    pieces.reserve(living);
    prepare(runs_->size() + 1);
    // From here on no memory is taken.
    move_pieces(relocation, moved, known, std::move(pieces));
    retired_.insert(retired_.end(), runs_->begin(), runs_->end());
    retired_.push_back(std::exchange(log_, log));
    runs_ = std::move(shared);
    removed_ = log_->size() - find_starts(std::move(starts));
    truncated_ = scattered_ = 0;
    merging_end_ = 0;
    rewriting_ = false;
    buried_ = {};
    ++generation_;
}

/// Let pieces, listed in `pieces`, and sequences name the places in the new log. The first `known` pieces are those of
/// `moved`, in order, and pieces that were forgotten before.
void SuffixIndex::move_pieces(const Relocation& relocation, std::span<const Relocation::Piece> moved, std::size_t known,
                              std::vector<Piece> pieces) {
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

std::shared_ptr<StartSet> SuffixIndex::empty_starts(std::size_t pieces) const {
    return std::make_shared<StartSet>(pieces + pieces / 2 + 4, account_);
}

/// Find anew what stands before pieces; returns how many places of the log are needed.
std::size_t SuffixIndex::find_starts(std::shared_ptr<StartSet> starts) {
    starts_ = std::move(starts);
    std::size_t needed = kPadding;
    for (const Piece& piece : pieces_) {
        const std::size_t prefix = context_before(log_->view(), piece.begin).size();
        needed += 1 + prefix + (piece.end - piece.begin);
        if (prefix > 0) starts_->add(pair_before(log_->view() + piece.begin));
    }
    return needed;
}

/// Find which blocks of the log are needed: those of living pieces with what stands around them, and those where what
/// runs still hold stood. Later changes only make fewer of them needed, and touch no chunk before the last.
void SuffixIndex::begin_squeeze() {
    Squeeze squeeze;
    std::shared_ptr<const Snapshot> seen;
    {
        const Hold hold(*this);
        worked(pieces_.size());
        prepare(0);
        std::erase_if(pieces_, [](const Piece& piece) { return !piece.sequence; });
        find_starts(empty_starts(pieces_.size()));
        publish();
        seen = snapshot_;
        squeeze.needed.resize(log_->size() / kBlock + 1);
        squeeze.end = (log_->size() - kPadding) / kChunk;
        squeeze.need(0, kPadding);
        for (const Piece& piece : pieces_) {
            squeeze.need(piece.begin - 1 - context_before(log_->view(), piece.begin).size(), piece.end + 1);
        }
        scattered_ = 0;
        squeezing_ = true;
    }
    for (const auto& run : *seen->runs) {
        if (run->dead() == 0) continue;
        for (const RunPart& part : run->parts()) {
            for (const Position position : part.positions()) {
                if (seen->log->is_dead(position)) squeeze.need(position - kPadding, position + 2);
            }
        }
    }
    std::size_t gain = 0;
    for (std::size_t nth = 0; nth < squeeze.end; ++nth) gain += squeeze.gain(nth, seen->log->chunk(nth));
    squeeze_ = std::move(squeeze);
    const Hold hold(*this);
    const std::size_t all = discardable();
    scattered_ = all - std::min(all, gain);
}

std::size_t SuffixIndex::Squeeze::gain(std::size_t nth, const LogChunk& chunk) const {
    const std::vector<bool> blocks = blocks_of(nth);
    const auto kept = kBlock * static_cast<std::size_t>(std::count(blocks.begin(), blocks.end(), true));
    const std::size_t gone = chunk.present() - kept;
    return kDeadShare * gone > chunk.present() ? gone : 0;
}

/// Take what nothing needs out of the next chunk where that is worth a copy. Positions stay what they are.
void SuffixIndex::squeeze() {
    const std::shared_ptr<const Snapshot> seen = snapshot();
    std::shared_ptr<LogChunk> squeezed;
    std::size_t nth = squeeze_->next;
    for (; nth < squeeze_->end && !squeezed; ++nth) {
        const LogChunk& chunk = seen->log->chunk(nth);
        if (squeeze_->gain(nth, chunk) > 0) squeezed = chunk.squeezed(squeeze_->blocks_of(nth), account_);
    }
    const Hold hold(*this);
    prepare(1);
    if (squeezed) {
        work_.background += squeezed->present();
        take_chunk(nth - 1, std::move(squeezed));
        squeeze_->next = nth;
    } else {
        squeezing_ = false;
        squeeze_.reset();
    }
    publish();
}

void SuffixIndex::take_chunk(std::size_t nth, std::shared_ptr<LogChunk> squeezed) {
    worked(log_->chunk_count());
    const std::size_t before = log_->discarded();
    retired_.push_back(std::exchange(log_, log_->with_chunk(nth, std::move(squeezed))));
    const std::size_t gone = log_->discarded() - before, removed = std::min(removed_, gone);
    removed_ -= removed;
    truncated_ -= gone - removed;
}

}  // namespace agentspec
