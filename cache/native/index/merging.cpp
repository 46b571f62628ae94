// Work on a suffix index that waits for nobody and that nobody waits for: what is due, and merging runs.
#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kSmall = 4096;   // positions that an append merges itself
constexpr std::size_t kRewriteShare = 8;  // a short log is written anew once so much of it is removed
constexpr std::size_t kMostRuns = 64;  // more of them, and an append merges them all, where no one else does

std::size_t size_of(const Runs& runs, std::size_t first, std::size_t end) {
    std::size_t size = 0;
    for (std::size_t i = first; i < end; ++i) size += runs[i]->size();
    return size;
}

}  // namespace

bool SuffixIndex::filter_due(const Run& run) { return kDeadShare * run.dead() > run.size(); }

/// Merging until nothing is left to do, unless others see to it.
void SuffixIndex::settle() {
    if (!merging_due() || (deferred_ && run_count() <= kMostRuns)) return;
    std::unique_lock merging(merging_, std::defer_lock);
    if (deferred_ && !merging.try_lock()) return;
    if (!deferred_) merging.lock();
    try {
        while (step()) {
        }
    } catch (const std::bad_alloc&) {  // the change that it follows is made; the work is due still
    }
}

bool SuffixIndex::merge_step() {
    if (!merging_due()) return false;
    const std::unique_lock merging(merging_, std::try_to_lock);
    return merging && !held_back() && step();
}

/// Whether readers, one of which may not run for long on a busy machine, keep a merge from giving back what it
/// replaced: each further piece would then be there twice. They are not waited for; a later step goes on.
bool SuffixIndex::held_back() {
    if (!merge_) return false;
    free_retired();
    const Hold hold(*this);
    return !retired_.empty() && unneeded_bytes() > kPiece * sizeof(Position);
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
        prepare(0);
        job = next_job();
        from = snapshot_;
        if (job.none()) {
            publish();
            return false;
        }
        merging_end_ = job.rewrite ? runs_->size() : job.end;
    }
    try {
        if (job.squeeze) {
            if (!squeeze_) begin_squeeze();
            squeeze();
        } else if (job.rewrite) {
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
    return unused(0);
}

/// Of what was retired, from the given place on; nothing where there is no memory for the list.
std::vector<std::shared_ptr<const void>> SuffixIndex::unused(std::size_t from) try {
    const auto begin = retired_.begin() + static_cast<std::ptrdiff_t>(from);
    const auto first = std::partition(begin, retired_.end(), [](const auto& one) { return one.use_count() > 1; });
    std::vector<std::shared_ptr<const void>> out(std::make_move_iterator(first),
                                                 std::make_move_iterator(retired_.end()));
    retired_.erase(first, retired_.end());
    return out;
} catch (const std::bad_alloc&) {
    return {};
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

/// Whether writing the log anew is worth the work: where its positions run out (the last eighth is for what comes
/// meanwhile), or where it is one chunk, which is never squeezed as long as text is appended to it.
bool SuffixIndex::rewrite_due() const {
    if (squeezing_) return false;
    const std::size_t size = log_->size(), living = size - log_->discarded() - removed_ - truncated_;
    if (size > capacity_ - capacity_ / 8 && kRewriteShare * (size - living) > living) return true;
    // What is cut from a session often is soon there again.
    return size <= kChunk && kRewriteShare * removed_ + truncated_ > living + kSlack;
}

/// Whether taking text out of chunks is worth a look at all pieces.
bool SuffixIndex::squeeze_due() const {
    const std::size_t living = log_->size() - log_->discarded() - removed_ - truncated_;
    return log_->size() > kChunk && kDeadShare * discardable() > living + kSlack;
}

/// Unneeded places that no run leads to, but those that chunks were left with.
std::size_t SuffixIndex::discardable() const {
    const std::size_t all = removed_ + truncated_, others = scattered_ + dead_in_runs();
    return all - std::min(all, others);
}

std::size_t SuffixIndex::dead_in_runs() const {
    std::size_t dead = 0;
    for (const auto& run : *runs_) dead += run->dead();
    return dead;
}

/// Bytes of removed text that work which is due, or under way, gives back.
std::size_t SuffixIndex::reclaimable() const {
    if (rewrite_due()) return dead_in_runs() * sizeof(Position) + (removed_ + truncated_) * sizeof(Token);
    std::size_t dead = 0;
    for (const auto& run : *runs_) dead += filter_due(*run) ? run->dead() : 0;
    const bool chunks = log_->size() > kChunk;
    return dead * (sizeof(Position) + (chunks ? sizeof(Token) : 0)) +
           (squeezing_ || squeeze_due() ? discardable() * sizeof(Token) : 0);
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
    return {.squeeze = retired_.empty() && (squeezing_ || squeeze_due())};
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
    std::vector<RunPart> parts{{merge.merged, 0, RunTable::none()}};
    parts.insert(parts.end(), merge.left.begin(), merge.left.end());
    const Position oldest = (*from.runs)[place]->oldest(), newest = (*from.runs)[end - 1]->newest();
    merge.run = std::make_shared<Run>(std::move(parts), oldest, newest, 0);
    const Hold hold(*this);
    prepare(0);
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
    const auto [first, second] = merge_some(log->view(), left[0].positions(), newer, kPiece, piece);
    Position* const end = piece + first + second;
    const std::size_t kept = std::remove_if(piece, end, [&](Position p) { return log->is_dead(p); }) - piece;
    const std::size_t size = merge_->size + kept;
    std::vector<RunPart> rest;
    if (first < left[0].size()) rest.push_back(left[0].behind(first));
    if (second < newer.size()) rest.push_back(left[1].behind(second));
    std::shared_ptr<const RunTable> table = RunTable::none();
    const std::span<const Position> merged(merge_->merged->data(), size);
    if (rest.empty()) table = RunTable::over(log->view(), merged, account_);
    std::vector<RunPart> parts{merge_->run->parts()[0].until(size, table)};
    parts.insert(parts.end(), rest.begin(), rest.end());
    const auto run = std::make_shared<Run>(std::move(parts), merge_->run->oldest(), merge_->run->newest(), 0);

    const Hold hold(*this);
    prepare(0);
    const std::size_t place = merge_->place;
    const bool empty = rest.empty() && size == 0;
    replace(place, place + 1, empty ? nullptr : run, first + second - kept);
    work_.background += first + second;
    merge_->merged->fill(size);
    std::size_t nth = 0;
    if (first < left[0].size()) left[0].precede(rest[nth++]);
    if (second < newer.size()) left[1].precede(rest[nth]);
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
    prepare(0);
    work_.background += looked_at;
    replace(job.first, job.end, run, dropped);
    merging_end_ = 0;
    publish();
}

std::shared_ptr<const Run> SuffixIndex::merged(const TokenLog& log, std::span<const std::shared_ptr<const Run>> runs,
                                               std::size_t& dropped) const {
    Positions positions;
    std::size_t dead = 0;
    for (auto run = runs.rbegin(); run != runs.rend(); ++run) {  // the smallest first
        positions = merge_runs(log.view(), (*run)->positions(), positions);
        dead += (*run)->dead();
    }
    if (dead > 0) {
        dropped = std::erase_if(positions, [&](Position position) { return log.is_dead(position); });
        if (dropped > positions.size() / 8) positions.shrink_to_fit();
    }
    if (positions.empty()) return nullptr;
    return std::make_shared<Run>(log.view(), std::move(positions), account_);
}

/// Put `run`, if any, in the place of the runs from `first` to `end`, of whose dead entries it `dropped` some.
void SuffixIndex::replace(std::size_t first, std::size_t end, const std::shared_ptr<const Run>& run,
                          std::size_t dropped) {
    auto runs = std::make_shared<Runs>(*runs_);
    const auto begin = runs->begin() + static_cast<std::ptrdiff_t>(first);
    const auto behind = runs->begin() + static_cast<std::ptrdiff_t>(end);
    std::size_t dead = 0;
    for (auto old = begin; old != behind; ++old) dead += (*old)->dead();
    reserve_for(retired_, end - first);
    retired_.insert(retired_.end(), begin, behind);
    const auto place = runs->erase(begin, behind);
    if (run) {
        run->count_dead(dead - dropped);
        runs->insert(place, run);
    }
    runs_ = std::move(runs);
}

/// Merge the newest runs as long as that is little work; where memory is short, a later step does.
void SuffixIndex::merge_newest() try {
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
} catch (const std::bad_alloc&) {
}

}  // namespace agentspec
