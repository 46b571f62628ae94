// Work on a suffix index that waits for nobody and that nobody waits for: what is due, and merging runs.
#include <algorithm>
#include <iterator>
#include <new>
#include <numeric>
#include <span>
#include <utility>

#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kSmall = 4096;   // positions that an append merges itself
constexpr std::size_t kRewriteShare = 8;  // a short log is written anew once so much of it is removed
constexpr std::size_t kMostRuns = 64;  // more of them, and an append merges them all, where no one else does

std::size_t size_of(std::span<const std::shared_ptr<const Run>> runs, std::size_t (Run::*size)() const = &Run::size) {
    return std::accumulate(runs.begin(), runs.end(), std::size_t{0},
                           [=](std::size_t sum, const auto& run) { return sum + ((*run).*size)(); });
}

}  // namespace

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
    return std::ranges::any_of(merge_->left, [](const RunPart& part) { return part.sharers() > 2; });
}

bool SuffixIndex::step() {
    free_retired();
    if (merge_) {
        go_on();
        free_retired();
        return true;
    }
    Job job;
    std::shared_ptr<const Snapshot> from;
    {
        const Hold hold(*this);
        prepare(0);
        job = next_job();
        const bool begins = job.reclaim && !reclaim_;
        if (job.rewrite) rewrite();
        if (begins) begin_reclaim();
        if (job.none() || job.rewrite || begins) {
            publish();
            return !job.none();
        }
        if (reclaim_ && job.end == job.first + 1) reclaim_->run = job.first;  // no run before it has any of the text
        merging_end_ = job.end;
        from = snapshot_;
    }
    try {
        if (job.reclaim) {
            squeeze();
        } else if (size_of(std::span(*from->runs).subspan(job.first, job.end - job.first)) <= kPiece) {
            merge(*from, job);
        } else {
            begin_merge(*from, job);
        }
    } catch (...) {
        const Hold hold(*this);
        merging_end_ = 0;
        throw;
    }
    from.reset();
    free_retired();
    return true;
}

/// Give back what no reader holds any more, without a lock.
void SuffixIndex::free_retired() {
    std::vector<Retired> freed;
    const Hold hold(*this);
    freed = unread(0);
}

/// Of what was retired, from the given place on, what no reader holds; nothing where there is no memory for the list.
std::vector<SuffixIndex::Retired> SuffixIndex::unread(std::size_t from) try {
    const auto begin = retired_.begin() + static_cast<std::ptrdiff_t>(from);
    const auto first = std::partition(begin, retired_.end(), [](const auto& one) { return one.item.use_count() > 1; });
    std::vector<Retired> out(std::make_move_iterator(first), std::make_move_iterator(retired_.end()));
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
/// meanwhile), or where it is one chunk, out of which nothing is taken as long as text is appended to it.
bool SuffixIndex::rewrite_due() const {
    const bool short_of_positions = log_->size() > capacity_ - capacity_ / 8;
    return (short_of_positions || log_->size() <= kChunk) &&
           kRewriteShare * unneeded_ > living() + (short_of_positions ? 0 : kSlack);
}

/// Whether taking text out of chunks is worth a look at all pieces.
bool SuffixIndex::reclaim_due() const {
    return log_->size() > kChunk && unneeded_ > left_ && kDeadShare * (unneeded_ - left_) > living() + kSlack;
}

/// Whether a run is to let go of removed text.
bool SuffixIndex::filter_due(std::size_t nth) const {
    const std::size_t dead = (*runs_)[nth]->dead();
    return kDeadShare * dead > (*runs_)[nth]->size() || (reclaim_ && nth >= reclaim_->run && dead > 0);
}

/// Bytes of removed text that work which is due, or under way, gives back.
std::size_t SuffixIndex::reclaimable() const {
    const bool text = rewrite_due() || reclaim_ || reclaim_due();
    std::size_t dead = 0;
    for (std::size_t i = 0; i < runs_->size(); ++i) dead += text || filter_due(i) ? (*runs_)[i]->dead() : 0;
    return dead * sizeof(Position) + (text ? unneeded_ - std::min(unneeded_, left_) : 0) * sizeof(Token);
}

SuffixIndex::Job SuffixIndex::next_job() const {
    if (merging_end_ > 0) return {};
    if (rewrite_due()) return {.rewrite = true};
    for (std::size_t end = runs_->size(); end > 1; --end) {
        if (const std::size_t first = cascade(end, 0, ~std::size_t{0}); first + 1 < end) return {first, end};
    }
    for (std::size_t i = 0; i < runs_->size(); ++i) {
        if (filter_due(i)) return {i, i + 1};
    }
    return {.reclaim = retired_.empty() && (reclaim_ || reclaim_due())};
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
    Positions room;
    room.reserve(size);
    merge.merged = std::make_shared<RunStorage>(std::move(room));
    std::vector<RunPart> parts{{merge.merged, 0, 0, RunTable::none()}};
    parts.insert(parts.end(), merge.left.begin(), merge.left.end());
    const Position oldest = (*from.runs)[place]->oldest(), newest = (*from.runs)[end - 1]->newest();
    merge.run = std::make_shared<Run>(std::move(parts), oldest, newest);
    const Hold hold(*this);
    prepare(end - place);
    replace(place, end, merge.run, 0, 0);
    merging_end_ = place + 1;
    merge_ = std::move(merge);
    publish();
}

/// Merge a piece more. What is merged grows at its end and what is left shrinks at its beginning, so that never much
/// more memory is needed than the result takes.
void SuffixIndex::go_on() {
    for (const RunPart& part : merge_->left) {
        if (part.sharers() == 2) part.give_back_before();  // in this merge alone, and as readers see it now
    }
    const std::shared_ptr<const TokenLog> log = snapshot()->log;
    const std::vector<RunPart>& left = merge_->left;
    const std::span<const Position> newer = left.size() > 1 ? left[1].positions() : std::span<const Position>();
    Positions& merged = merge_->merged->own();
    merged.resize(merge_->size);  // without a piece that was not taken
    merged.resize(std::min(merge_->size + kPiece, merged.capacity()));
    const auto begin = merged.begin() + static_cast<std::ptrdiff_t>(merge_->size);
    const auto [first, second] = merge_some(log->view(), left[0].positions(), newer, kPiece, &*begin);
    const auto end = begin + static_cast<std::ptrdiff_t>(first + second);
    merged.erase(std::remove_if(begin, end, [&](Position p) { return log->is_dead(p); }), merged.end());
    const std::size_t size = merged.size();
    std::vector<RunPart> rest;
    if (first < left[0].size()) rest.push_back(left[0].behind(first));
    if (second < newer.size()) rest.push_back(left[1].behind(second));
    if (rest.empty()) merge_->merged->give_back(size, merged.capacity());  // as much as was dropped
    const auto table = rest.empty() ? RunTable::over(log->view(), merged) : RunTable::none();
    std::vector<RunPart> parts{{merge_->merged, 0, size, table}};
    parts.insert(parts.end(), rest.begin(), rest.end());
    const auto run = std::make_shared<Run>(std::move(parts), merge_->run->oldest(), merge_->run->newest());

    const Hold hold(*this);
    prepare(1);
    const bool empty = rest.empty() && size == 0;
    const std::size_t gone = first + second, dropped = gone - (size - merge_->size);
    replace(merge_->place, merge_->place + 1, empty ? nullptr : run, dropped, gone * sizeof(Position));
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
    std::size_t dropped = 0;
    const auto run = merged(*from.log, old, dropped);
    const Hold hold(*this);
    prepare(old.size());
    replace(job.first, job.end, run, dropped, size_of(old, &Run::memory_bytes));
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
    return std::make_shared<Run>(log.view(), std::move(positions));
}

/// Put `run`, if any, in the place of the runs from `first` to `end`, of whose dead entries it `dropped` some, and
/// which take so many bytes besides what it takes.
void SuffixIndex::replace(std::size_t first, std::size_t end, const std::shared_ptr<const Run>& run,
                          std::size_t dropped, std::size_t bytes) {
    auto runs = std::make_shared<Runs>(*runs_);
    const auto begin = runs->begin() + static_cast<std::ptrdiff_t>(first);
    const auto behind = runs->begin() + static_cast<std::ptrdiff_t>(end);
    reserve_for(retired_, end - first);
    std::size_t dead = 0;
    for (auto old = begin; old != behind; ++old) {
        dead += (*old)->dead();
        retire(std::move(*old), std::exchange(bytes, 0));
    }
    const auto place = runs->erase(begin, behind);
    if (run) {
        run->count_dead(dead - dropped);
        runs->insert(place, run);
    }
    runs_ = std::move(runs);
    const bool whole = !run || run->parts().size() == 1;  // and without text that is to be given back
    if (reclaim_ && whole && first <= reclaim_->run) reclaim_->run = first + (run ? 1 : 0);
}

/// Merge the newest runs as long as that is little work; where memory is short, a later step does.
void SuffixIndex::merge_newest() try {
    for (;;) {
        const std::size_t end = runs_->size();
        const std::size_t first = cascade(end, std::min(merging_end_, end - 1), kSmall);
        if (first + 1 >= end) return;
        const std::vector<std::shared_ptr<const Run>> old(runs_->begin() + static_cast<std::ptrdiff_t>(first),
                                                          runs_->end());
        worked(size_of(old, &Run::size));
        std::size_t dropped = 0;
        const auto run = merged(*log_, old, dropped);
        replace(first, end, run, dropped, size_of(old, &Run::memory_bytes));
        if (!run) return;
    }
} catch (const std::bad_alloc&) {
}

}  // namespace agentspec
