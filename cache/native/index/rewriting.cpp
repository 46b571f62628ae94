// Taking removed text out of the log of a suffix index: out of one chunk after the other, or by writing all of it anew.
#include <algorithm>
#include <utility>

#include "index/relocation.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {

/// Write the living text into a new log, and exchange it for the old one together with all positions.
void SuffixIndex::rewrite() {
    std::vector<Piece> pieces;
    std::vector<Relocation::Piece> old;
    for (const Piece& piece : pieces_) {
        if (!piece.sequence) continue;
        pieces.push_back(piece);
        old.push_back({piece.begin, piece.end});
    }
    const Relocation relocation(log_->view(), old);
    std::shared_ptr<TokenLog> log = TokenLog().with_room(relocation.size());
    relocation.copy(log_->view(), [&](std::span<const Token> tokens) { log->append(tokens); });
    auto runs = std::make_shared<Runs>();
    for (const auto& run : *runs_) {
        Positions positions = relocation.moved(run->positions());
        if (!positions.empty()) runs->push_back(std::make_shared<Run>(log->view(), std::move(positions)));
        worked(run->size());
    }
    auto starts = starts_for(pieces.size());
    prepare(runs_->size() + 1);
    worked(pieces_.size() + log->size());
    // From here on no memory is taken.
    for (const Piece& piece : pieces) piece.sequence->spans.clear();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        Piece& piece = pieces[i];
        const Position begin = relocation.place(i);
        piece = {begin, begin + (piece.end - piece.begin), piece.sequence};
        piece.sequence->spans.push_back({piece.begin, piece.end});
    }
    pieces_ = std::move(pieces);
    for (const auto& run : *runs_) retire(run, run->memory_bytes());
    runs_ = std::move(runs);
    retire(log_, log_->memory_bytes());
    log_ = std::move(log);
    unneeded_ = log_->size() - find_starts(std::move(starts));
    left_ = 0;
    reclaim_.reset();
    ++generation_;
}

/// A set for what stands before so many pieces, and some more.
std::shared_ptr<StartSet> SuffixIndex::starts_for(std::size_t pieces) const {
    return std::make_shared<StartSet>(pieces + pieces / 2 + 4);
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

/// Find which blocks of the log are needed. Later changes only make fewer of them needed, and touch no chunk before the
/// last, out of which nothing is taken.
void SuffixIndex::begin_reclaim() {
    auto reclaim = std::make_unique<Reclaim>();
    reclaim->needed.resize(log_->size() / kBlock + 1);
    reclaim->end = (log_->size() - kPadding) / kChunk;
    reclaim->left = unneeded_;
    reclaim->need(0, kPadding);
    auto starts = starts_for(pieces_.size());
    worked(pieces_.size());
    std::erase_if(pieces_, [](const Piece& piece) { return !piece.sequence; });
    find_starts(std::move(starts));
    for (const Piece& piece : pieces_) {
        reclaim->need(piece.begin - 1 - context_before(log_->view(), piece.begin).size(), piece.end + 1);
    }
    reclaim_ = std::move(reclaim);
}

/// Take what nothing needs out of the next chunk where that is worth a copy. Positions stay what they are.
void SuffixIndex::squeeze() {
    const std::shared_ptr<const TokenLog> seen = snapshot()->log;
    std::shared_ptr<LogChunk> squeezed;
    std::size_t nth = reclaim_->chunk;
    for (; nth < reclaim_->end && !squeezed; ++nth) {
        const LogChunk& chunk = seen->chunk(nth);
        const auto first = reclaim_->needed.begin() + static_cast<std::ptrdiff_t>(nth * (kChunk / kBlock));
        const std::vector<bool> needed(first, first + kChunk / kBlock);
        const auto kept = static_cast<std::size_t>(std::count(needed.begin(), needed.end(), true));
        const std::size_t gone = chunk.present() - kBlock * kept;
        if (kDeadShare * gone > chunk.present()) squeezed = std::make_shared<LogChunk>(chunk, needed);
    }
    const Hold hold(*this);
    prepare(1);
    if (squeezed) {
        worked(log_->chunk_count());
        std::shared_ptr<TokenLog> log = log_->with_chunk(nth - 1, std::move(squeezed));
        const std::size_t gone = log->discarded() - log_->discarded();
        unneeded_ -= gone;
        reclaim_->left -= std::min(reclaim_->left, gone);
        reclaim_->chunk = nth;
        retire(std::exchange(log_, std::move(log)), seen->chunk(nth - 1).memory_bytes());
    } else {
        left_ = reclaim_->left;
        reclaim_.reset();
    }
    publish();
}

}  // namespace agentspec
