#include "index/suffix_index.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "index/run_cursor.hpp"

namespace agentspec {
namespace {

template <class IsDead>
Run without(const Run& run, const IsDead& is_dead) {
    if (std::none_of(run.begin(), run.end(), is_dead)) return run;
    Positions left;
    left.reserve(run.size());
    std::remove_copy_if(run.begin(), run.end(), std::back_inserter(left), is_dead);
    if (left.capacity() > left.size() + left.size() / 8) left.shrink_to_fit();
    return left;
}

template <class Items>
std::size_t bytes(const Items& items) {
    return items.capacity() * sizeof(typename Items::value_type);
}

}  // namespace

SuffixIndex::SuffixIndex(std::size_t tail, std::size_t ratio) : tail_limit_(tail), ratio_(ratio), log_(kPadding) {
    if (tail < 1 || ratio < 1) throw std::invalid_argument("tail and ratio must be at least 1");
    log_.append(std::vector<Token>(kPadding, kBoundary));
}

const SuffixIndex::Sequence& SuffixIndex::at(SequenceId sequence) const {
    const auto found = sequences_.find(sequence);
    if (found == sequences_.end()) throw std::out_of_range("no sequence " + std::to_string(sequence));
    return found->second;
}

SuffixIndex::Sequence& SuffixIndex::at(SequenceId sequence) {
    return const_cast<Sequence&>(std::as_const(*this).at(sequence));
}

void SuffixIndex::append(SequenceId id, std::span<const Token> tokens, std::span<const Token> context) {
    require_tokens(tokens);
    require_tokens(context);
    const std::lock_guard writing(writing_);
    if (log_.size() + tokens.size() + kPadding > std::numeric_limits<Position>::max()) {
        throw std::length_error("the index is full: 2^32 positions");
    }
    make_room(tokens.size() + kPadding);
    add(id, tokens, context);
    if (tail_.size() > tail_limit_) merge_tail();
}

/// Grow the log in a copy, so that readers wait for the exchange alone.
void SuffixIndex::make_room(std::size_t more) {
    const std::size_t needed = log_.size() + more;
    if (needed <= log_.capacity()) return;
    TokenLog larger = log_.copy(std::max(needed, 2 * log_.size()));
    const std::unique_lock lock(mutex_);
    std::swap(log_, larger);
}

void SuffixIndex::add(SequenceId id, std::span<const Token> tokens, std::span<const Token> context) {
    const std::unique_lock lock(mutex_);
    const bool fresh = !sequences_.contains(id);
    if (!fresh && !context.empty()) throw std::invalid_argument("only a new sequence takes a context");
    Sequence& sequence = sequences_[id];
    if (sequence.closed) throw std::invalid_argument("sequence " + std::to_string(id) + " is closed");
    sequence.last_used = ++clock_;
    if (fresh || (!tokens.empty() && sequence.spans.back().end != log_.size())) begin_piece(id, sequence, context);
    if (tokens.empty()) return;
    for (std::size_t i = 0; i < tokens.size(); ++i) tail_.push_back(static_cast<Position>(log_.size() + i));
    log_.append(tokens);
    sequence.spans.back().end = static_cast<Position>(log_.size());
    sequence.length += tokens.size();
    live_ += tokens.size();
}

/// Start a piece at the end of the log, beginning with what stood before it.
void SuffixIndex::begin_piece(SequenceId id, Sequence& sequence, std::span<const Token> context) {
    std::vector<Token> prefix(context.end() - std::min<std::size_t>(context.size(), kDepth), context.end());
    if (!sequence.spans.empty()) prefix = context_before(sequence.spans.back().end);
    log_.push_back(kBoundary);
    log_.append(prefix);
    const auto begin = static_cast<Position>(log_.size());
    if (!prefix.empty()) starts_.insert(pair_before(log_.end()));
    sequence.spans.push_back({begin, begin});
    pieces_.push_back({begin, id});
}

std::vector<Token> SuffixIndex::context_before(Position end) const {
    Position begin = end;
    while (end - begin < kDepth && log_[begin - 1] != kBoundary) --begin;
    return {log_.begin() + begin, log_.begin() + end};
}

/// Make the tail a run of its own, and merge runs until each is at least ratio_ times the next. Only the caller, who
/// holds writing_, changes what is read here; so sorting and merging leave the readers alone.
void SuffixIndex::merge_tail() {
    replace_runs(runs_.size(), sort_positions(log_.data(), tail_), true);
    std::size_t first = runs_.size() - 1;
    std::span<const Position> newest = runs_[first];
    Positions merged;
    for (; first > 0 && runs_[first - 1].size() < ratio_ * newest.size(); --first) {
        merged = merge_runs(log_.data(), runs_[first - 1], newest);
        newest = merged;
    }
    if (!merged.empty()) replace_runs(first, std::move(merged), false);
}

/// Put `run` in the place of the runs from `first` on, and of the tail. What goes is given back after the lock.
void SuffixIndex::replace_runs(std::size_t first, Positions run, bool and_tail) {
    std::vector<Run> gone;
    Positions tail;
    gone.reserve(runs_.size());
    RunTable table(log_.data(), run);
    const std::unique_lock lock(mutex_);
    const auto begin = runs_.begin() + static_cast<std::ptrdiff_t>(first);
    gone.insert(gone.end(), std::move_iterator(begin), std::move_iterator(runs_.end()));
    if (and_tail) tail.swap(tail_);
    runs_.erase(begin, runs_.end());
    runs_.push_back(std::move(run));
    tables_.resize(first);
    tables_.push_back(std::move(table));
}

void SuffixIndex::close(SequenceId sequence) {
    const std::unique_lock lock(mutex_);
    at(sequence).closed = true;
}

void SuffixIndex::truncate(SequenceId id, std::size_t length) {
    const std::lock_guard writing(writing_);
    const std::unique_lock lock(mutex_);
    Sequence& sequence = at(id);
    if (sequence.closed) throw std::invalid_argument("sequence " + std::to_string(id) + " is closed");
    std::vector<Span> cut = take_from(sequence, length);
    if (const Position end = sequence.spans.back().end; end < log_.size()) log_.bound(end);
    drop(std::move(cut), 2.0);
}

void SuffixIndex::remove(std::span<const SequenceId> sequences) {
    const std::lock_guard writing(writing_);
    const std::unique_lock lock(mutex_);
    std::vector<Span> dead;
    for (const SequenceId id : sequences) {
        const auto found = sequences_.find(id);
        if (found == sequences_.end()) continue;
        const std::vector<Span> spans = take_from(found->second, 0);
        dead.insert(dead.end(), spans.begin(), spans.end());
        sequences_.erase(found);
    }
    std::erase_if(pieces_, [this](const Piece& piece) { return !sequences_.contains(piece.sequence); });
    drop(std::move(dead), 1.125);
}

/// Cut a sequence to `length` tokens; returns the places of the tokens cut off.
std::vector<SuffixIndex::Span> SuffixIndex::take_from(Sequence& sequence, std::size_t length) {
    std::vector<Span> cut;
    while (sequence.length > length) {
        Span& last = sequence.spans.back();
        const auto excess = static_cast<Position>(std::min(sequence.length - length, last.size()));
        cut.push_back({last.end - excess, last.end});
        last.end -= excess;
        sequence.length -= excess;
        live_ -= excess;
        if (last.size() == 0 && sequence.spans.size() > 1) {
            const Position begin = last.begin;
            sequence.spans.pop_back();
            std::erase_if(pieces_, [begin](const Piece& piece) { return piece.begin == begin; });
        }
    }
    return cut;
}

/// Take dead positions out of tail and runs; rewrite the log when it holds more than `slack` times what lives.
void SuffixIndex::drop(std::vector<Span> dead, double slack) {
    if (dead.empty()) return;
    std::sort(dead.begin(), dead.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const auto is_dead = [&dead](Position position) {
        auto after = std::upper_bound(dead.begin(), dead.end(), position,
                                      [](Position p, const Span& span) { return p < span.begin; });
        return after != dead.begin() && position < std::prev(after)->end;
    };
    std::erase_if(tail_, is_dead);
    const Position tail_begin = tail_.empty() ? static_cast<Position>(log_.size()) : tail_.front();
    if (dead.front().begin < tail_begin) {
        for (Run& run : runs_) run = without(run, is_dead);
        std::erase_if(runs_, [](const Run& run) { return run.empty(); });
        tabulate();
    }
    shrink_log();
    const double living = static_cast<double>(live_ + pieces_.size() * (kDepth + 1)) + kPadding;
    if (static_cast<double>(log_.bytes() / sizeof(Token)) > slack * living + 1024) compact();
}

void SuffixIndex::tabulate() {
    tables_.clear();
    for (const Run& run : runs_) tables_.emplace_back(log_.data(), run);
}

/// Cut dead tokens off the end of the log, so that a truncated sequence goes on where it was cut.
void SuffixIndex::shrink_log() {
    Position end = kPadding;
    if (!pieces_.empty()) {
        const Piece& last = pieces_.back();
        end = last.begin;
        for (const Span& span : at(last.sequence).spans) end = std::max(end, span.end);
    }
    log_.cut(end);
}

/// Rewrite the log without dead tokens. Contexts, and so the order of the runs, stay as they are.
void SuffixIndex::compact() {
    TokenLog log(kPadding + live_ + pieces_.size() * (kDepth + 1));
    log.append({log_.data(), kPadding});
    std::vector<Piece> pieces;
    std::map<Position, Position> moved;
    for (const Piece& piece : pieces_) {
        const std::vector<Span>& spans = at(piece.sequence).spans;
        const auto span =
            std::find_if(spans.begin(), spans.end(), [&](const Span& s) { return s.begin == piece.begin; });
        const std::vector<Token> prefix = context_before(span->begin);
        log.push_back(kBoundary);
        log.append(prefix);
        moved[span->begin] = static_cast<Position>(log.size());
        pieces.push_back({static_cast<Position>(log.size()), piece.sequence});
        log.append({log_.data() + span->begin, span->size()});
    }
    const auto move = [&moved](Position& position) {
        const auto& [from, to] = *std::prev(moved.upper_bound(position));
        position = position - from + to;
    };
    for (Position& position : tail_) move(position);
    for (Run& run : runs_) {
        Positions positions(run.begin(), run.end());
        for (Position& position : positions) move(position);
        run = std::move(positions);
    }
    for (auto& [id, sequence] : sequences_) {
        for (Span& span : sequence.spans) {
            const auto size = static_cast<Position>(span.size());
            move(span.begin);
            span.end = span.begin + size;
        }
    }
    log_ = std::move(log);
    pieces_ = std::move(pieces);
    tabulate();
    find_starts();
}

void SuffixIndex::find_starts() {
    starts_.clear();
    for (const Piece& piece : pieces_) {
        if (log_[piece.begin - 1] != kBoundary) starts_.insert(pair_before(log_.begin() + piece.begin));
    }
}

const SuffixIndex::Piece& SuffixIndex::piece_of(Position position) const {
    const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                        [](Position p, const Piece& piece) { return p < piece.begin; });
    return *std::prev(after);
}

void SuffixIndex::record_hit(Position position) const {
    Sequence& sequence = sequences_.at(piece_of(position).sequence);
    sequence.hits.fetch_add(1, std::memory_order_relaxed);
    sequence.last_used.store(++clock_, std::memory_order_relaxed);
}

std::vector<Token> SuffixIndex::tokens(SequenceId sequence) const {
    const std::shared_lock lock(mutex_);
    std::vector<Token> out;
    for (const Span& span : at(sequence).spans) {
        out.insert(out.end(), log_.begin() + span.begin, log_.begin() + span.end);
    }
    return out;
}

std::vector<Token> SuffixIndex::prefix(SequenceId sequence) const {
    const std::shared_lock lock(mutex_);
    return context_before(at(sequence).spans.front().begin);
}

std::size_t SuffixIndex::length(SequenceId sequence) const {
    const std::shared_lock lock(mutex_);
    return at(sequence).length;
}

std::size_t SuffixIndex::common_prefix(SequenceId sequence, std::span<const Token> tokens) const {
    const std::shared_lock lock(mutex_);
    std::size_t shared = 0;
    for (const Span& span : at(sequence).spans) {
        const std::size_t size = std::min(span.size(), tokens.size() - shared);
        const Token* mine = log_.data() + span.begin;
        const auto differs = std::mismatch(mine, mine + size, tokens.begin() + shared);
        shared += differs.first - mine;
        if (differs.first != mine + span.size()) break;
    }
    return shared;
}

template <class Visit>
void SuffixIndex::visit_matches(std::span<const Token> context, Visit&& visit) const {
    if (context.empty()) throw std::invalid_argument("a context needs at least one token");
    require_tokens(context);
    const Query query(context);
    const std::shared_lock lock(mutex_);
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        RunCursor cursor(log_.data(), runs_[i], tables_[i], query.end());
        cursor.widen(query.length(), std::numeric_limits<std::uint32_t>::max(),
                     [&](Token, Position position, double) { visit(position); });
    }
    for (const Position position : tail_) {
        if (shared_context(log_.data() + position, query.end()) >= query.length()) visit(position);
    }
}

std::int64_t SuffixIndex::count(std::span<const Token> context) const {
    std::int64_t total = 0;
    visit_matches(context, [&](Position) { ++total; });
    return total;
}

Successors SuffixIndex::successors(std::span<const Token> context) const {
    std::map<Token, std::int64_t> counts;
    Position newest = 0;
    Successors out;
    visit_matches(context, [&](Position position) {
        ++counts[log_[position]];
        if (position > newest) out.most_recent = log_[newest = position];
    });
    for (const auto& [token, count] : counts) {
        out.tokens.push_back(token);
        out.counts.push_back(count);
    }
    return out;
}

std::size_t SuffixIndex::sequence_count() const {
    const std::shared_lock lock(mutex_);
    return sequences_.size();
}

std::size_t SuffixIndex::token_count() const {
    const std::shared_lock lock(mutex_);
    return live_;
}

std::size_t SuffixIndex::run_count() const {
    const std::shared_lock lock(mutex_);
    return runs_.size();
}

Usage SuffixIndex::usage() const {
    const std::shared_lock lock(mutex_);
    Usage out;
    for (const auto& [id, sequence] : sequences_) {
        out.sequences.push_back(id);
        out.lengths.push_back(static_cast<std::int64_t>(sequence.length));
        out.hits.push_back(sequence.hits.load(std::memory_order_relaxed));
        out.last_used.push_back(sequence.last_used.load(std::memory_order_relaxed));
    }
    return out;
}

std::size_t SuffixIndex::memory_bytes() const {
    const std::shared_lock lock(mutex_);
    constexpr std::size_t kNode = sizeof(SequenceId) + sizeof(Sequence) + 2 * sizeof(void*);
    std::size_t total = sizeof(*this) + log_.bytes() + bytes(pieces_) + bytes(tail_) + bytes(runs_);
    for (const Run& run : runs_) total += run.bytes();
    for (const RunTable& table : tables_) total += sizeof(table) + table.memory_bytes();
    total += sequences_.bucket_count() * sizeof(void*) + sequences_.size() * kNode;
    total += starts_.bucket_count() * sizeof(void*) + starts_.size() * 2 * sizeof(void*);
    total += 2 * pieces_.size() * sizeof(Span);  // the sequences' spans, grown by doubling
    return total;
}

std::size_t SuffixIndex::mapped_bytes() const {
    const std::shared_lock lock(mutex_);
    std::size_t total = log_.mapped_bytes();
    for (const Run& run : runs_) total += run.mapped_bytes();
    return total;
}

}  // namespace agentspec
