// Changes of a suffix index, each of which takes work in proportion to the tokens given, and questions to it.
#include "index/suffix_index.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "index/relocation.hpp"
#include "index/run_cursor.hpp"
#include "index/shapes.hpp"

namespace agentspec {

SuffixIndex::SuffixIndex(std::size_t tail, std::size_t ratio, bool deferred, Position capacity, bool shapes)
    : tail_limit_(tail), ratio_(ratio), deferred_(deferred), shapes_(shapes), capacity_(capacity) {
    if (tail < 1 || ratio < 1) throw std::invalid_argument("tail and ratio must be at least 1");
    log_ = TokenLog().with_room(kPadding);
    log_->append(std::vector<Token>(kPadding, kBoundary));
    prepare(0);
    publish();
}

const SuffixIndex::Sequence& SuffixIndex::at(SequenceId sequence) const {
    const auto found = sequences_.find(sequence);
    if (found == sequences_.end()) throw std::out_of_range("no sequence " + std::to_string(sequence));
    return found->second;
}

void SuffixIndex::append(SequenceId id, std::span<const Token> tokens, std::span<const Token> context) {
    require_tokens(tokens);
    require_tokens(context);
    std::vector<Token> shape, shape_before;
    if (shapes_) {
        tokens = shape = shape_of(tokens);
        context = shape_before = shape_of(context);
    }
    std::vector<Retired> outgrown;
    {
        const Hold hold(*this);
        const std::size_t retired = retired_.size();
        if (log_->size() + tokens.size() + kPadding > capacity_) {
            throw std::length_error("the index is full: " + std::to_string(capacity_) + " positions");
        }
        const auto known = sequences_.find(id);
        const bool fresh = known == sequences_.end();
        if (!fresh && !context.empty()) throw std::invalid_argument("only a new sequence takes a context");
        prepare(2);
        make_room(tokens.size() + kPadding);
        reserve_for(pieces_, 1);
        const auto place = sequences_.try_emplace(id).first;
        Sequence& sequence = place->second;
        const std::size_t written = log_->size();
        const bool begins = fresh || (!tokens.empty() && sequence.spans.back().end != written);
        Position begin;
        std::shared_ptr<const Runs> runs;
        try {
            reserve_for(sequence.spans, 1);
            if (begins) write_start(sequence, context);
            begin = static_cast<Position>(log_->size());
            log_->append(tokens);
            runs = runs_with(begin);
        } catch (...) {
            log_->cut(written);  // nobody has read behind it
            if (fresh) sequences_.erase(place);
            throw;
        }
        sequence.id = id;
        use(sequence);
        if (begins) {
            sequence.spans.push_back({begin, begin});
            pieces_.push_back({begin, begin, &sequence});
        }
        add(sequence, begin, std::move(runs));
        publish();
        outgrown = unread(retired);  // little, and so not left to merging
    }
    settle();
}

/// Have the memory ready that the next change needs besides its own: it is then made wholly, or not at all.
void SuffixIndex::prepare(std::size_t retiring) {
    if (!blank_) blank_ = std::make_shared<Snapshot>();
    reserve_for(retired_, retiring);
}

void SuffixIndex::make_room(std::size_t more) {
    if (log_->size() + more <= log_->capacity()) return;
    std::shared_ptr<TokenLog> larger = log_->with_room(more);
    const bool moved = log_->chunk_count() > 0 && &larger->chunk(0) != &log_->chunk(0);
    worked((moved ? log_->size() : 0) + log_->chunk_count());
    const std::size_t bytes = moved ? log_->chunk(0).memory_bytes() : 0;
    retire(std::exchange(log_, std::move(larger)), bytes);
}

/// Write what stands before a new piece at the end of the log.
void SuffixIndex::write_start(const Sequence& sequence, std::span<const Token> context) {
    std::span<const Token> prefix = context.last(std::min<std::size_t>(context.size(), kDepth));
    if (!sequence.spans.empty()) prefix = context_before(log_->view(), sequence.spans.back().end);
    log_->push_back(kBoundary);
    log_->append(prefix);
    worked(prefix.size() + 1);
    if (prefix.empty()) return;
    if (!starts_ || starts_->full()) {
        starts_ = starts_ ? starts_->larger() : std::make_shared<StartSet>(4);
    }
    starts_->add(pair_before(log_->view() + log_->size()));
}

/// The runs with the positions from `begin` on: in the newest where that stays short, else in a further one; nullptr
/// where there are none.
std::shared_ptr<const Runs> SuffixIndex::runs_with(Position begin) const {
    Positions positions(log_->size() - begin);
    if (positions.empty()) return nullptr;
    std::iota(positions.begin(), positions.end(), begin);
    const LogView log = log_->view();
    positions = sort_positions(log, positions);
    auto runs = std::make_shared<Runs>(*runs_);
    if (runs->size() > merging_end_ && runs->back()->size() + positions.size() <= tail_limit_) {
        positions = merge_runs(log, runs->back()->positions(), positions);
        std::erase_if(positions, [&](Position position) { return log_->is_dead(position); });
        runs->pop_back();
    }
    worked(2 * positions.size());
    runs->push_back(std::make_shared<Run>(log, std::move(positions)));
    return runs;
}

/// Let the last piece hold the tokens from `begin` to the log's end, which `runs_with` has made ready for.
void SuffixIndex::add(Sequence& sequence, Position begin, std::shared_ptr<const Runs> runs) {
    const auto end = static_cast<Position>(log_->size());
    if (begin == end) return;
    sequence.spans.back().end = end;
    pieces_.back().end = end;
    sequence.length += end - begin;
    live_ += end - begin;
    worked(end - begin);
    if (runs->size() == runs_->size()) retire(runs_->back(), runs_->back()->memory_bytes());
    runs_ = std::move(runs);
    merge_newest();
}

/// Let readers see a change that was prepared.
void SuffixIndex::publish() {
    static std::atomic<std::uint64_t> numbers{0};
    *blank_ = {log_, runs_, starts_, generation_, ++numbers};
    std::shared_ptr<const Snapshot> next = std::exchange(blank_, nullptr);
    {
        const std::lock_guard lock(publishing_);
        snapshot_.swap(next);
    }
}

std::size_t SuffixIndex::memory_bytes() const {
    constexpr std::size_t kNode = sizeof(SequenceId) + sizeof(Sequence) + 2 * sizeof(void*) + 2 * sizeof(Span);
    const Hold hold(*this);
    return sizeof(*this) + snapshot_->memory_bytes() + retired_bytes() + pieces_.capacity() * sizeof(Piece) +
           sequences_.bucket_count() * sizeof(void*) + sequences_.size() * kNode;
}

/// Let go of what readers may still hold, for which there was made room; they alone then keep so many bytes.
void SuffixIndex::retire(std::shared_ptr<const void> item, std::size_t bytes) {
    retired_.push_back({std::move(item), bytes});
}

std::size_t SuffixIndex::retired_bytes() const {
    return std::accumulate(retired_.begin(), retired_.end(), std::size_t{0},
                           [](std::size_t sum, const Retired& one) { return sum + one.bytes; });
}

std::shared_ptr<const Snapshot> SuffixIndex::snapshot() const {
    const std::lock_guard lock(publishing_);
    return snapshot_;
}

void SuffixIndex::truncate(SequenceId id, std::size_t length) {
    {
        const Hold hold(*this);
        Sequence& sequence = const_cast<Sequence&>(at(id));
        prepare(0);
        while (sequence.length > length) {
            Span& last = sequence.spans.back();
            const auto excess = static_cast<Position>(std::min(sequence.length - length, last.size()));
            bury({last.end - excess, last.end});
            unneeded_ += excess;
            last.end -= excess;
            piece_of(last.begin)->end = last.end;
            sequence.length -= excess;
            if (last.size() > 0 || sequence.spans.size() == 1) continue;
            unneeded_ += forget_piece(last.begin);
            sequence.spans.pop_back();
        }
        publish();
    }
    settle();
}

void SuffixIndex::remove(std::span<const SequenceId> sequences) {
    {
        const Hold hold(*this);
        prepare(0);
        for (const SequenceId id : sequences) {
            const auto found = sequences_.find(id);
            if (found == sequences_.end()) continue;
            for (const Span& span : found->second.spans) {
                bury(span);
                unneeded_ += span.size() + forget_piece(span.begin);
            }
            unlink(found->second);
            sequences_.erase(found);
        }
        publish();
    }
    settle();
}

/// Mark living tokens as forgotten, and count them in the run that holds them.
void SuffixIndex::bury(Span span) {
    if (span.size() == 0) return;
    log_->bury(span.begin, span.end);
    live_ -= span.size();
    worked(span.size() / 64 + 1);
    for (const auto& run : *runs_) {
        const std::size_t from = std::max(span.begin, run->oldest());
        const std::size_t to = std::min<std::size_t>(span.end, std::size_t{run->newest()} + 1);
        if (from < to) run->count_dead(to - from);
    }
}

/// Forget a piece without tokens; returns how many places of the log stand before it for its sake.
std::size_t SuffixIndex::forget_piece(Position begin) {
    piece_of(begin)->sequence = nullptr;
    return 1 + context_before(log_->view(), begin).size();
}

/// The first piece that begins behind a position.
std::vector<SuffixIndex::Piece>::iterator SuffixIndex::after_piece(Position position) {
    return std::upper_bound(pieces_.begin(), pieces_.end(), position,
                            [](Position p, const Piece& piece) { return p < piece.begin; });
}

std::vector<SuffixIndex::Piece>::iterator SuffixIndex::piece_of(Position position) {
    return std::prev(after_piece(position));
}

/// Make a sequence the most recently used.
void SuffixIndex::use(Sequence& sequence) {
    if (&sequence == newest_) return;
    unlink(sequence);
    sequence.older = newest_;
    (newest_ ? newest_->newer : oldest_) = &sequence;
    newest_ = &sequence;
}

void SuffixIndex::unlink(Sequence& sequence) {
    if (sequence.older) sequence.older->newer = sequence.newer;
    if (sequence.newer) sequence.newer->older = sequence.older;
    if (oldest_ == &sequence) oldest_ = sequence.newer;
    if (newest_ == &sequence) newest_ = sequence.older;
    sequence.older = sequence.newer = nullptr;
}

void SuffixIndex::record_hits(std::uint64_t generation, std::span<const Position> positions) {
    const Hold hold(*this);
    if (generation != generation_) return;
    for (const Position position : positions) {
        const auto after = after_piece(position);
        Sequence* sequence = after == pieces_.begin() ? nullptr : std::prev(after)->sequence;
        if (sequence && position < std::prev(after)->end) use(*sequence);
    }
}

/// The spans of a sequence, in a snapshot that keeps their text readable if it is removed meanwhile.
std::pair<std::shared_ptr<const Snapshot>, std::vector<SuffixIndex::Span>> SuffixIndex::places(SequenceId id) const {
    const Hold hold(*this);
    return {snapshot_, at(id).spans};
}

std::vector<Token> SuffixIndex::tokens(SequenceId sequence) const {
    const auto [seen, spans] = places(sequence);
    std::vector<Token> out;
    const auto add = [&](std::span<const Token> tokens) { out.insert(out.end(), tokens.begin(), tokens.end()); };
    for (const Span& span : spans) Relocation::copy(seen->log->view(), span.begin, span.end, add);
    return out;
}

std::vector<Token> SuffixIndex::prefix(SequenceId sequence) const {
    const auto [seen, spans] = places(sequence);
    const std::span<const Token> before = context_before(seen->log->view(), spans.front().begin);
    return {before.begin(), before.end()};
}

std::size_t SuffixIndex::common_prefix(SequenceId sequence, std::span<const Token> tokens) const {
    const auto [seen, spans] = places(sequence);
    const LogView log = seen->log->view();
    std::size_t shared = 0;
    for (const Span& span : spans) {
        for (std::size_t at = span.begin; at < span.end; ++at, ++shared) {
            if (shared == tokens.size() || log[at] != tokens[shared]) return shared;
        }
    }
    return shared;
}

Successors SuffixIndex::successors(std::span<const Token> context) const {
    if (context.empty()) throw std::invalid_argument("a context needs at least one token");
    require_tokens(context);
    Query query(context);
    if (shapes_) query.take_shape_of(query);
    const IndexView seen(*this);
    std::map<Token, std::int64_t> counts;
    Position newest = 0;
    Successors out;
    const auto add = [&](Token token, Position position) {
        if (seen.is_dead(position)) return;
        ++counts[token];
        if (position > newest) out.most_recent = token, newest = position;
    };
    for (const auto& run : seen.runs()) {
        for (const RunPart& part : run->parts()) {
            RunCursor matches(seen.log(), part, query.end());
            matches.widen(query.length());
            matches.visit(Share{}, add);
        }
    }
    for (const auto& [token, count] : counts) {
        out.tokens.push_back(token);
        out.counts.push_back(count);
    }
    return out;
}

std::vector<SequenceId> SuffixIndex::oldest(std::size_t tokens) const {
    const Hold hold(*this);
    std::vector<SequenceId> out;
    std::size_t held = 0;
    for (const Sequence* one = oldest_; one && held < tokens; one = one->newer) {
        out.push_back(one->id);
        held += one->length;
    }
    worked(out.size());
    return out;
}

std::size_t SuffixIndex::mapped_bytes() const {
    const std::shared_ptr<const Snapshot> seen = snapshot();
    std::size_t total = seen->log->mapped_bytes();
    for (const auto& run : *seen->runs) total += run->mapped_bytes();
    return total;
}

}  // namespace agentspec
