// Work on a suffix index that waits for nobody and that nobody waits for: merging runs and dropping removed text.
#include <algorithm>
#include <iterator>
#include <utility>

#include "index/relocation.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kSmall = 4096;   // positions that an append merges itself
constexpr std::size_t kDeadShare = 16;  // text is taken out once this part of a run, or of the log, is removed
constexpr std::size_t kMostRuns = 64;  // more of them, and an append merges them all, where no one else does

/// A run while it is merged, counted as long as it exists.
struct Part {
    Part(std::span<const Position> positions, const std::shared_ptr<Account>& account)
        : positions(positions), charge(std::make_unique<Charge>(account, 0)) {}
    Part(Positions merged, const std::shared_ptr<Account>& account)
        : owned(std::move(merged)),
          positions(owned),
          charge(std::make_unique<Charge>(account, owned.capacity() * sizeof(Position))) {}

    Positions owned;
    std::span<const Position> positions;
    std::unique_ptr<Charge> charge;
};

/// Merge runs, each older than the next; the smallest neighbours first.
Positions merge_all(const Token* log, std::vector<Part> parts, const std::shared_ptr<Account>& account) {
    while (parts.size() > 1) {
        std::size_t best = 0;
        const auto size = [&](std::size_t i) { return parts[i].positions.size() + parts[i + 1].positions.size(); };
        for (std::size_t i = 1; i + 1 < parts.size(); ++i) best = size(i) < size(best) ? i : best;
        parts[best] = Part(merge_runs(log, parts[best].positions, parts[best + 1].positions), account);
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    if (!parts[0].owned.empty()) return std::move(parts[0].owned);
    return {parts[0].positions.begin(), parts[0].positions.end()};
}

/// Of a run that is not complete.
const std::shared_ptr<const RunTable>& no_table() {
    static const auto& none = *new std::shared_ptr<const RunTable>(std::make_shared<RunTable>());
    return none;
}

std::size_t size_of(const Runs& runs, std::size_t first, std::size_t end) {
    std::size_t size = 0;
    for (std::size_t i = first; i < end; ++i) size += runs[i]->size();
    return size;
}

bool filter_due(const Run& run) { return kDeadShare * run.dead() > run.size(); }

}  // namespace

/// Merging until nothing is left to do, unless others see to it.
void SuffixIndex::settle() {
    if (!merging_due() || (deferred_ && run_count() <= kMostRuns)) return;
    std::unique_lock merging(merging_, std::defer_lock);
    if (deferred_ && !merging.try_lock()) return;
    if (!deferred_) merging.lock();
    while (step()) {
    }
}

bool SuffixIndex::merge_step() {
    if (!merging_due()) return false;
    const std::unique_lock merging(merging_, std::try_to_lock);
    return merging && step();
}

bool SuffixIndex::step() {
    Job job;
    std::shared_ptr<const Snapshot> from;
    free_retired();
    if (merge_) {
        go_on();
        free_retired();
        return true;
    }
    {
        const Hold hold(*this);
        job = next_job();
        from = snapshot_;
        if (job.none()) {
            publish();
            return false;
        }
        merging_end_ = job.rewrite ? runs_->size() : job.end;
    }
    try {
        if (job.rewrite) {
            rewrite();
        } else if (size_of(*from->runs, job.first, job.end) <= kPiece) {
            merge(*from, job);
        } else {
            begin_merge(*from, job);
        }
    } catch (...) {
        const Hold hold(*this);
        merging_end_ = 0;
        rewriting_ = false;
        transient_ = 0;
        throw;
    }
    from.reset();
    free_retired();
    transient_ = 0;
    return true;
}

/// What no reader holds any more, for the caller to give back without a lock.
std::vector<std::shared_ptr<const void>> SuffixIndex::free_retired() {
    const Hold hold(*this);
    std::vector<std::shared_ptr<const void>> free;
    const auto unused =
        std::partition(retired_.begin(), retired_.end(), [](const auto& one) { return one.use_count() > 1; });
    free.assign(std::make_move_iterator(unused), std::make_move_iterator(retired_.end()));
    retired_.erase(unused, retired_.end());
    return free;
}

/// The first of the runs before `end` that must merge with those behind it: runs shrink by `ratio_` each.
std::size_t SuffixIndex::cascade(std::size_t end, std::size_t begin, std::size_t most) const {
    const auto size = [&](std::size_t i) { return (*runs_)[i]->size() - (*runs_)[i]->dead(); };
    std::size_t first = end - 1, total = size(first);
    for (; first > begin && size(first - 1) < ratio_ * total && total + size(first - 1) <= most; --first) {
        total += size(first - 1);
    }
    return first;
}

/// Whether so much of the log is removed that writing it anew is worth the work.
bool SuffixIndex::rewrite_due() const {
    // What is cut from a session often is soon there again.
    const std::size_t removed = kDeadShare * removed_ + truncated_;
    return removed > log_->size() - removed_ - truncated_ + 8 * 1024;
}

/// Bytes of removed text that work which is due, or under way, gives back.
std::size_t SuffixIndex::reclaimable() const {
    const bool everything = rewrite_due();
    std::size_t dead = 0;
    for (const auto& run : *runs_) dead += everything || filter_due(*run) ? run->dead() : 0;
    return dead * sizeof(Position) + (everything ? (removed_ + truncated_) * sizeof(Token) : 0);
}

SuffixIndex::Job SuffixIndex::next_job() const {
    if (merging_end_ > 0) return {};
    if (rewrite_due()) return {0, 0, true};
    for (std::size_t end = runs_->size(); end > 1; --end) {
        if (const std::size_t first = cascade(end, 0, ~std::size_t{0}); first + 1 < end) return {first, end};
    }
    for (std::size_t i = 0; i < runs_->size(); ++i) {
        if (filter_due(*(*runs_)[i])) return {i, i + 1};
    }
    return {};
}

/// Begin to merge runs that are too large for one piece: the two smallest neighbours among them, or to filter one.
void SuffixIndex::begin_merge(const Snapshot& from, Job job) {
    const auto both = [&](std::size_t i) { return (*from.runs)[i]->size() + (*from.runs)[i + 1]->size(); };
    std::size_t place = job.first;
    for (std::size_t i = job.first; i + 1 < job.end; ++i) place = both(i) < both(place) ? i : place;
    const std::size_t end = std::min(place + 2, job.end);
    Merge merge{place, nullptr, 0, {}, nullptr};
    std::size_t size = 0;
    for (std::size_t i = place; i < end; ++i) {
        merge.left.push_back((*from.runs)[i]->parts()[0]);
        size += (*from.runs)[i]->size();
    }
    merge.merged = std::make_shared<RunStorage>(size, account_);
    std::vector<RunPart> parts{{merge.merged, 0, no_table()}};
    parts.insert(parts.end(), merge.left.begin(), merge.left.end());
    const Position oldest = (*from.runs)[place]->oldest(), newest = (*from.runs)[end - 1]->newest();
    merge.run = std::make_shared<Run>(std::move(parts), oldest, newest, 0);
    const Hold hold(*this);
    replace(place, end, merge.run, 0);
    merging_end_ = place + 1;
    merge_ = std::move(merge);
    publish();
}

/// Merge a piece more. What is merged grows at its end and what is left shrinks at its beginning, so that never much
/// more memory is needed than the result takes.
void SuffixIndex::go_on() {
    const std::shared_ptr<const TokenLog> log = snapshot()->log;
    std::vector<RunPart>& left = merge_->left;
    const std::span<const Position> newer = left.size() > 1 ? left[1].positions() : std::span<const Position>();
    Position* piece = merge_->merged->room() + merge_->size;
    const auto [first, second] = merge_some(log->data(), left[0].positions(), newer, kPiece, piece);
    Position* const end = piece + first + second;
    const std::size_t kept = std::remove_if(piece, end, [&](Position p) { return log->is_dead(p); }) - piece;
    const std::size_t size = merge_->size + kept;
    std::vector<RunPart> rest;
    if (first < left[0].size()) rest.push_back(left[0].behind(first));
    if (second < newer.size()) rest.push_back(left[1].behind(second));
    std::shared_ptr<const RunTable> table = no_table();
    const std::span<const Position> merged(merge_->merged->data(), size);
    if (rest.empty()) table = std::make_shared<RunTable>(log->data(), merged, account_);
    std::vector<RunPart> parts{{merge_->merged, size, table}};
    parts.insert(parts.end(), rest.begin(), rest.end());
    const auto run = std::make_shared<Run>(std::move(parts), merge_->run->oldest(), merge_->run->newest(), 0);

    const Hold hold(*this);
    work_.background += first + second;
    merge_->merged->fill(size);
    const std::size_t place = merge_->place;
    const bool empty = rest.empty() && size == 0;
    replace(place, place + 1, empty ? nullptr : run, first + second - kept);
    merge_->size = size;
    merge_->left = std::move(rest);
    merge_->run = run;
    if (merge_->left.empty()) {
        merge_.reset();
        merging_end_ = 0;
    }
    publish();
}

/// Merge runs of `from`, without what is forgotten by now.
void SuffixIndex::merge(const Snapshot& from, Job job) {
    std::vector<std::shared_ptr<const Run>> old(from.runs->begin() + static_cast<std::ptrdiff_t>(job.first),
                                                from.runs->begin() + static_cast<std::ptrdiff_t>(job.end));
    std::size_t dropped = 0, looked_at = 0;
    for (const auto& run : old) looked_at += run->size();
    const auto run = merged(*from.log, old, dropped);
    const Hold hold(*this);
    work_.background += looked_at;
    replace(job.first, job.end, run, dropped);
    merging_end_ = 0;
    publish();
}

std::shared_ptr<const Run> SuffixIndex::merged(const TokenLog& log, std::span<const std::shared_ptr<const Run>> runs,
                                               std::size_t& dropped) const {
    std::vector<Part> parts;
    std::size_t dead = 0;
    for (const auto& run : runs) {
        parts.emplace_back(run->positions(), account_);
        dead += run->dead();
    }
    Positions positions = merge_all(log.data(), std::move(parts), account_);
    if (dead > 0) {
        dropped = std::erase_if(positions, [&](Position position) { return log.is_dead(position); });
        if (dropped > positions.size() / 8) positions.shrink_to_fit();
    }
    if (positions.empty()) return nullptr;
    return std::make_shared<Run>(log.data(), std::move(positions), account_);
}

/// Put `run`, if any, in the place of the runs from `first` to `end`, of whose dead entries it `dropped` some.
void SuffixIndex::replace(std::size_t first, std::size_t end, const std::shared_ptr<const Run>& run,
                          std::size_t dropped) {
    auto runs = std::make_shared<Runs>(*runs_);
    const auto begin = runs->begin() + static_cast<std::ptrdiff_t>(first);
    const auto behind = runs->begin() + static_cast<std::ptrdiff_t>(end);
    std::size_t dead = 0;
    for (auto old = begin; old != behind; ++old) dead += (*old)->dead();
    retired_.insert(retired_.end(), begin, behind);
    const auto place = runs->erase(begin, behind);
    if (run) {
        run->count_dead(dead - dropped);
        runs->insert(place, run);
    }
    runs_ = std::move(runs);
}

/// Add a run of the newest positions, and merge it with others as long as that is little work.
void SuffixIndex::add_run(Positions positions) {
    worked(2 * positions.size());
    auto runs = std::make_shared<Runs>(*runs_);
    runs->push_back(std::make_shared<Run>(log_->data(), std::move(positions), account_));
    runs_ = std::move(runs);
    for (;;) {
        const std::size_t end = runs_->size();
        const std::size_t first = cascade(end, std::min(merging_end_, end - 1), kSmall);
        if (first + 1 >= end) return;
        const std::vector<std::shared_ptr<const Run>> old(runs_->begin() + static_cast<std::ptrdiff_t>(first),
                                                          runs_->end());
        for (const auto& run : old) worked(run->size());
        std::size_t dropped = 0;
        const auto run = merged(*log_, old, dropped);
        replace(first, end, run, dropped);
        if (!run) return;
    }
}

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
    find_starts();
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

/// Find anew what stands before pieces, and how much of the log nothing needs.
void SuffixIndex::find_starts() {
    starts_ = std::make_shared<StartSet>(pieces_.size() + pieces_.size() / 2 + 4, account_);
    std::size_t needed = kPadding;
    for (const Piece& piece : pieces_) {
        const std::size_t prefix = context_before(log_->data(), piece.begin).size();
        needed += 1 + prefix + (piece.end - piece.begin);
        if (prefix > 0) starts_->add(pair_before(log_->data() + piece.begin));
    }
    removed_ = log_->size() - needed;
    truncated_ = 0;
}

}  // namespace agentspec
