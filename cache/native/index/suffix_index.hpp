// The suffix index finds the tokens that followed a context in many sequences. It does not use Python.
//
// All tokens lie in one log, piece by piece. Positions of the log are indexed by their context: the newest few in an
// unsorted tail, the others in a handful of sorted runs that merge as they grow (the logarithmic method of Bentley and
// Saxe, "Decomposable searching problems", 1980). Every public method is safe to call from several threads at once;
// readers never wait for a merge.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "index/query.hpp"
#include "index/run.hpp"
#include "index/run_table.hpp"
#include "index/sorted_run.hpp"
#include "index/token_log.hpp"

namespace agentspec {

using SequenceId = std::int64_t;
using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // none: as long as it takes
using ReadLock = std::shared_lock<std::shared_timed_mutex>;

struct Successors {
    std::vector<Token> tokens;          // ascending
    std::vector<std::int64_t> counts;   // of the token at the same place
    Token most_recent = kBoundary;      // kBoundary where there is none
};

struct Usage {
    std::vector<SequenceId> sequences;
    std::vector<std::int64_t> lengths, hits, last_used;  // last_used: a clock that ticks with every insert and hit
};

/// The tables of a saved index, as they lie in its file.
struct SequenceRecord {
    SequenceId number;
    std::int64_t hits, last_used, closed;
};
struct PieceRecord {
    Position begin, end;
    std::uint32_t sequence;  // place among the records
};
static_assert(sizeof(SequenceRecord) == 32 && sizeof(PieceRecord) == 12);

/// A read-only copy of an index: its pieces in a row, each after a boundary and its context, and one sorted run.
struct Frozen {
    std::vector<SequenceRecord> sequences;  // by their first piece
    std::vector<PieceRecord> pieces;        // by begin
    Positions run;
    TokenLog log{0};
};

/// Where the four parts of a frozen index lie in a file: in a row from byte `offset` to the file's end.
struct FrozenLayout {
    std::uint64_t offset;
    std::array<std::uint64_t, 4> counts, checksums;  // of sequences, pieces, run and log
};

class SuffixIndex {
public:
    /// At most `tail` positions are matched one by one; a sorted run is at least `ratio` times as large as the next.
    /// Drafts depend on neither. Throws std::invalid_argument unless tail >= 1 and ratio >= 1.
    explicit SuffixIndex(std::size_t tail = 128, std::size_t ratio = 8);

    /// Add tokens at the end of a sequence, a new or an open one. `context` (new sequences only) holds the tokens
    /// before it, which are matched but never counted. Throws std::invalid_argument for a closed sequence or a negative
    /// token, std::length_error when 2^32 positions are used up.
    void append(SequenceId sequence, std::span<const Token> tokens, std::span<const Token> context = {});
    /// Refuse further tokens for a sequence. Like all methods below, throws std::out_of_range for an unknown sequence.
    void close(SequenceId sequence);
    /// Delete all tokens of a sequence from `length` on.
    void truncate(SequenceId sequence, std::size_t length);
    /// Delete sequences in one pass over the index; unknown sequences are ignored.
    void remove(std::span<const SequenceId> sequences);

    std::vector<Token> tokens(SequenceId sequence) const;
    /// The context before a sequence, as far as it is matched.
    std::vector<Token> prefix(SequenceId sequence) const;
    std::size_t length(SequenceId sequence) const;
    /// Number of leading tokens that a sequence shares with `tokens`.
    std::size_t common_prefix(SequenceId sequence, std::span<const Token> tokens) const;

    /// How often the last min(64, n) tokens of a non-empty context occurred with a token after them.
    std::int64_t count(std::span<const Token> context) const;
    Successors successors(std::span<const Token> context) const;

    std::size_t sequence_count() const;
    std::size_t token_count() const;
    std::size_t run_count() const;
    Usage usage() const;
    /// Bytes held by the index, by the capacity of its parts, a mapped file included. Constant time.
    std::size_t memory_bytes() const;
    /// Bytes of the index in pages of a mapped file, except pages written to since.
    std::size_t mapped_bytes() const;

    /// Freeze those of the sequences `kept` that exist. Other threads can append, except while the log is copied.
    Frozen freeze(std::span<const SequenceId> kept) const;
    /// Map a frozen index in a file, which must not change any more. Whatever the file holds, either the index is safe
    /// to use and drafts tokens of its pieces only, or std::invalid_argument names the fault. The order of the run is
    /// not checked: a wrong order only costs matches.
    static std::unique_ptr<SuffixIndex> load(int file, const FrozenLayout& layout);

    /// Throws std::runtime_error with a description when an invariant does not hold. Linear in the index.
    void check_integrity() const;

private:
    friend class IndexView;
    struct Span {
        Position begin, end;
        std::size_t size() const { return end - begin; }
    };
    struct Sequence {
        std::vector<Span> spans;
        std::size_t length = 0;
        bool closed = false;
        std::atomic<std::int64_t> hits{0}, last_used{0};
    };
    struct Piece {
        Position begin;
        SequenceId sequence;
    };

    const Sequence& at(SequenceId sequence) const;
    Sequence& at(SequenceId sequence);
    void begin_piece(SequenceId id, Sequence& sequence, std::span<const Token> context);
    std::vector<Token> context_before(Position end) const;
    void make_room(std::size_t more);
    void add(SequenceId id, std::span<const Token> tokens, std::span<const Token> context);
    void merge_tail();
    void replace_runs(std::size_t first, Positions run, bool and_tail);
    std::vector<Span> take_from(Sequence& sequence, std::size_t length);
    void drop(std::vector<Span> dead, double slack);
    void shrink_log();
    void compact();
    std::unique_ptr<SuffixIndex> copy() const;
    void keep(std::span<const SequenceId> kept);
    bool is_compact() const;
    Positions single_run() const;
    void take_records(std::span<const SequenceRecord> sequences, std::span<const PieceRecord> pieces);
    void tabulate();
    void find_starts();
    const Piece& piece_of(Position position) const;
    void record_hit(Position position) const;
    template <class Visit>
    void visit_matches(std::span<const Token> context, Visit&& visit) const;
    void check_runs() const;
    void check_positions() const;

    const std::size_t tail_limit_, ratio_;
    mutable std::mutex writing_;  // held by the one writer, first; merging needs no other lock
    mutable std::shared_timed_mutex mutex_;  // held shared to read the index, exclusively to change it
    mutable std::atomic<std::int64_t> clock_{0};
    TokenLog log_;  // after the tokens of a span there is a boundary, or the log ends
    std::vector<Piece> pieces_;  // by begin
    mutable std::unordered_map<SequenceId, Sequence> sequences_;
    std::vector<Run> runs_;  // largest first; every position below those of the tail
    std::vector<RunTable> tables_;  // of the run at the same place
    Positions tail_;  // ascending
    std::unordered_set<std::uint64_t> starts_;  // the pairs of tokens before pieces, some of pieces that are gone
    std::size_t live_ = 0;  // tokens of all sequences
};

/// Read access to one index for a drafter. The caller holds what `lock` gives for as long as it uses the rest.
class IndexView {
public:
    explicit IndexView(const SuffixIndex& index) : index_(&index) {}
    /// The lock is not held if the deadline passed first: evicting and compacting keep readers out for long.
    ReadLock lock(const Deadline& until) const {
        return until ? ReadLock(index_->mutex_, *until) : ReadLock(index_->mutex_);
    }
    const SuffixIndex* index() const { return index_; }
    const Token* log() const { return index_->log_.data(); }
    const std::vector<Run>& runs() const { return index_->runs_; }
    const std::vector<RunTable>& tables() const { return index_->tables_; }
    const Positions& tail() const { return index_->tail_; }
    /// Whether a piece may begin after these two tokens. Matches at all other positions extend a match of the query one
    /// token shorter.
    bool may_start(std::uint64_t pair) const { return index_->starts_.contains(pair); }
    /// Count a hit for the sequence that holds `position`.
    void record_hit(Position position) const { index_->record_hit(position); }

private:
    const SuffixIndex* index_;
};

}  // namespace agentspec
