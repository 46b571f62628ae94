// The suffix index finds the tokens that followed a context in many sequences. It does not use Python.
//
// All tokens lie in one log, piece by piece. Positions of the log are indexed by their context, in a handful of sorted
// runs that merge as they grow (the logarithmic method of Bentley and Saxe, "Decomposable searching problems", 1980).
// Every public method is safe to call from several threads at once.
//
// Readers take a snapshot, whose parts never change below what it shows; no change to the index keeps them waiting.
// Removed text is marked at once and left out by every reader; merges drop it later. A change first takes the memory
// that it needs: where there is not enough, std::bad_alloc is thrown and nothing was changed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/query.hpp"
#include "index/relocation.hpp"
#include "index/sizes.hpp"
#include "index/snapshot.hpp"
#include "index/token_log.hpp"

namespace agentspec {

using SequenceId = std::int64_t;

struct Successors {
    std::vector<Token> tokens;          // ascending
    std::vector<std::int64_t> counts;   // of the token at the same place
    Token most_recent = kBoundary;      // kBoundary where there is none
};

/// Work of an index since it was made, in positions looked at, moved or searched for.
struct Work {
    std::size_t locked = 0;        // done while other changes waited
    std::size_t longest_hold = 0;  // the most in one go of that
};

/// A piece of a saved index, as it lies in its file.
struct PieceRecord {
    Position begin, end;
    std::uint32_t sequence;  // place among the sequences
};
static_assert(sizeof(PieceRecord) == 12);

/// A read-only copy of an index: its pieces in a row, each after a boundary and its context, and one sorted run.
struct Frozen {
    std::vector<SequenceId> sequences;      // the least recently used first
    std::vector<PieceRecord> pieces;        // by begin
    Positions run;
    std::vector<Token, PageAllocator<Token>> log;
};

/// Where the four parts of a frozen index lie in a file: in a row from byte `offset` to the file's end.
struct FrozenLayout {
    std::uint64_t offset;
    std::array<std::uint64_t, 4> counts;  // of sequences, pieces, run and log
};

class SuffixIndex {
    /// Keeps other changes out, and counts the work done meanwhile.
    class Hold {
    public:
        explicit Hold(const SuffixIndex& index) : index_(index), lock_(index.changing_) { index_.hold_ = 0; }
        ~Hold() { index_.work_.longest_hold = std::max(index_.work_.longest_hold, index_.hold_); }

    private:
        const SuffixIndex& index_;
        std::lock_guard<std::mutex> lock_;
    };
    template <class Get>
    auto held(Get&& get) const {
        const Hold hold(*this);
        return get();
    }

public:
    static constexpr std::size_t kTail = 128, kRatio = 8;
    static constexpr Position kCapacity = std::numeric_limits<Position>::max();
    static constexpr std::size_t kDeadShare = 16;  // text is taken out of runs and chunks once so much is removed

    /// New positions join the newest run up to `tail` positions; others are at least `ratio` times as large as the
    /// next. Drafts depend on neither. Unless `deferred`, merging is done when a change returns; otherwise it waits for
    /// `merge_step`. The log takes `capacity` positions, those of removed text included until work that waits has taken
    /// them back. An index of `shapes` holds the shape of all text that it is given. Throws std::invalid_argument
    /// unless tail >= 1 and ratio >= 1.
    explicit SuffixIndex(std::size_t tail = kTail, std::size_t ratio = kRatio, bool deferred = false,
                         Position capacity = kCapacity, bool shapes = false);

    /// Add tokens at the end of a sequence, a new or an open one. `context` (new sequences only) holds the tokens
    /// before it, which are matched but never counted. Throws std::invalid_argument for what is no token,
    /// std::length_error when all positions are used up.
    void append(SequenceId sequence, std::span<const Token> tokens, std::span<const Token> context = {});
    /// Delete all tokens of a sequence from `length` on. Like all methods below, throws std::out_of_range for an
    /// unknown sequence.
    void truncate(SequenceId sequence, std::size_t length);
    /// Delete sequences; unknown sequences are ignored. From then on no query and no draft that begins knows them.
    void remove(std::span<const SequenceId> sequences);

    /// Do one piece of the work that waits: merge runs, or take removed text out of them or out of the log. Returns
    /// false where nothing waits, where another thread is at it, or as long as readers hold more than a piece of what
    /// it replaced. Nobody waits for it.
    bool merge_step();
    bool merging_due() const {
        return held([&] { return is_due(); });
    }

    std::vector<Token> tokens(SequenceId sequence) const;
    /// The context before a sequence, as far as it is matched.
    std::vector<Token> prefix(SequenceId sequence) const;
    std::size_t length(SequenceId sequence) const {
        return held([&] { return at(sequence).length; });
    }
    /// Number of leading tokens that a sequence shares with `tokens`.
    std::size_t common_prefix(SequenceId sequence, std::span<const Token> tokens) const;

    /// The tokens after the last min(64, n) tokens of a non-empty context.
    Successors successors(std::span<const Token> context) const;

    std::size_t sequence_count() const {
        return held([&] { return sequences_.size(); });
    }
    std::size_t token_count() const {
        return held([&] { return live_; });
    }
    std::size_t run_count() const { return snapshot()->runs->size(); }
    /// The least recently used sequences, that one first, which together hold at least `tokens` tokens; or all.
    std::vector<SequenceId> oldest(std::size_t tokens) const;
    /// Bytes held by the index, a mapped file and what drafts still read included. Constant time.
    std::size_t memory_bytes() const;
    /// Bytes of them that merge steps which are due will give back. Removed text is among them once there is enough of
    /// it to be worth the work, and what older snapshots still hold. Constant time.
    std::size_t reclaimable_bytes() const {
        return held([&] { return reclaimable() + retired_bytes(); });
    }
    /// Bytes of the index in pages of a mapped file.
    std::size_t mapped_bytes() const;
    Work work() const {
        return held([&] { return work_; });
    }

    /// Freeze those of the sequences `kept` that exist. Other threads can append meanwhile.
    Frozen freeze(std::span<const SequenceId> kept) const;
    /// Map a frozen index in a file, which must not change any more. Whatever the file holds, either the index is safe
    /// to use and drafts tokens of its pieces only, or std::invalid_argument names the fault. The order of the run is
    /// not checked: a wrong order only costs matches.
    static std::unique_ptr<SuffixIndex> load(int file, const FrozenLayout& layout, bool deferred = false);

    /// Throws std::domain_error with a description when an invariant does not hold. Linear in the index.
    void check_integrity() const;

    /// What drafts read from.
    std::shared_ptr<const Snapshot> snapshot() const;
    bool has_shapes() const { return shapes_; }
    /// Note the use of the sequences that hold these positions of a snapshot of that generation; of none if the log was
    /// rewritten since.
    void record_hits(std::uint64_t generation, std::span<const Position> positions);

private:
    struct Span {
        Position begin, end;
        std::size_t size() const { return end - begin; }
    };
    struct Sequence {
        SequenceId id;
        std::vector<Span> spans;
        std::size_t length = 0;
        Sequence *older = nullptr, *newer = nullptr;  // by last use
    };
    struct Piece {
        Position begin, end;
        Sequence* sequence;  // nullptr once removed
    };
    struct Job {
        std::size_t first = 0, end = 0;  // runs to merge
        bool rewrite = false;  // the log, and so everything
        bool reclaim = false;  // text, or to begin with it
        bool none() const { return !rewrite && !reclaim && first == end; }
    };
    /// Giving back text that was removed before this began: runs let go of it, then it is taken out of the log.
    struct Reclaim {
        std::vector<bool> needed;  // a block of the log: of living pieces, with what stands around them
        std::size_t left;  // places that nothing needs
        std::size_t run = 0;  // those before it let go of the text
        std::size_t chunk = 0, end = 0;  // of the log: the next, and the one behind the last

        void need(std::size_t begin, std::size_t behind) {
            const auto last = std::min((behind - 1) / kBlock + 1, needed.size());
            for (std::size_t block = begin / kBlock; block < last; ++block) needed[block] = true;
        }
    };
    /// What readers may still hold that the index does not, and what they alone keep of it.
    struct Retired {
        std::shared_ptr<const void> item;
        std::size_t bytes;
    };
    /// A merge of one or two runs in pieces: what is merged, and what is left of them.
    struct Merge {
        std::size_t place;  // among the runs
        std::shared_ptr<RunStorage> merged;
        std::size_t size = 0;
        std::vector<RunPart> left;
        std::shared_ptr<const Run> run;  // these three as readers see them
    };
    void worked(std::size_t positions) const {
        hold_ += positions;
        work_.locked += positions;
    }

    // All of these under a Hold.
    const Sequence& at(SequenceId sequence) const;
    std::vector<Piece>::iterator after_piece(Position position);
    std::vector<Piece>::iterator piece_of(Position position);
    void use(Sequence& sequence);
    void unlink(Sequence& sequence);
    template <class Item>
    static void reserve_for(std::vector<Item>& items, std::size_t more) {
        if (items.capacity() - items.size() < more) items.reserve(std::max(2 * items.size(), items.size() + more));
    }
    void prepare(std::size_t retiring);
    void retire(std::shared_ptr<const void> item, std::size_t bytes);
    void make_room(std::size_t more);
    void write_start(const Sequence& sequence, std::span<const Token> context);
    std::shared_ptr<const Runs> runs_with(Position begin) const;
    void add(Sequence& sequence, Position begin, std::shared_ptr<const Runs> runs);
    void merge_newest();
    void bury(Span span);
    std::size_t forget_piece(Position begin);
    Job next_job() const;
    bool is_due() const { return !retired_.empty() || merging_end_ > 0 || !next_job().none(); }
    std::vector<Retired> unread(std::size_t from);
    std::size_t living() const { return log_->size() - log_->discarded() - unneeded_; }
    bool rewrite_due() const;
    bool reclaim_due() const;
    bool filter_due(std::size_t nth) const;
    std::size_t reclaimable() const;
    std::size_t retired_bytes() const;
    std::size_t cascade(std::size_t end, std::size_t begin, std::size_t most) const;
    void replace(std::size_t first, std::size_t end, const std::shared_ptr<const Run>& run, std::size_t dropped,
                 std::size_t bytes);
    void rewrite();
    void begin_reclaim();
    std::shared_ptr<StartSet> starts_for(std::size_t pieces) const;
    std::size_t find_starts(std::shared_ptr<StartSet> starts);
    void publish();
    void take_records(std::span<const SequenceId> sequences, std::span<const PieceRecord> pieces);

    // Merging, by the thread that holds merging_.
    void settle();
    bool step();
    void merge(const Snapshot& from, Job job);
    void begin_merge(const Snapshot& from, Job job);
    void go_on();
    void squeeze();
    bool held_back();
    void free_retired();

    std::shared_ptr<const Run> merged(const TokenLog& log, std::span<const std::shared_ptr<const Run>> runs,
                                      std::size_t& dropped) const;
    std::pair<std::shared_ptr<const Snapshot>, std::vector<Span>> places(SequenceId sequence) const;
    void check_runs() const;
    void check_positions() const;
    void check_use() const;

    const std::size_t tail_limit_, ratio_;
    const bool deferred_, shapes_;
    const std::size_t capacity_;  // positions
    mutable std::mutex merging_;  // held by the one thread that merges, before the next
    mutable std::mutex changing_;  // held to change the index, for work in proportion to the tokens given
    mutable std::mutex publishing_;  // held to copy or exchange one pointer
    std::shared_ptr<const Snapshot> snapshot_;
    std::shared_ptr<Snapshot> blank_;  // the next

    std::shared_ptr<TokenLog> log_;  // after the tokens of a span there is a boundary, dead tokens, or the log ends
    std::uint64_t generation_ = 0;  // of the log
    std::vector<Piece> pieces_;  // by begin
    std::unordered_map<SequenceId, Sequence> sequences_;
    Sequence *oldest_ = nullptr, *newest_ = nullptr;  // by last use
    std::shared_ptr<const Runs> runs_ = std::make_shared<Runs>();
    std::optional<Merge> merge_;  // under merging_
    std::size_t merging_end_ = 0;  // number of the runs at the beginning that a merge is at work on
    std::shared_ptr<StartSet> starts_;  // the pairs of tokens before pieces, some of pieces that are gone
    std::size_t live_ = 0;  // tokens of all sequences
    std::size_t unneeded_ = 0;  // places of the log that are there, and that nothing needs any more
    std::size_t left_ = 0;  // of them, those that were not worth a copy when text was last given back
    std::unique_ptr<Reclaim> reclaim_;  // changed under merging_ too
    std::vector<Retired> retired_;  // given back once nobody reads it, and never by a reader
    mutable Work work_;
    mutable std::size_t hold_ = 0;
};

/// Read access to one index for a drafter.
class IndexView {
public:
    explicit IndexView(const SuffixIndex& index)
        : snapshot_(index.snapshot()), log_(snapshot_->log->view()), any_dead_(snapshot_->log->any_dead()) {}

    LogView log() const { return log_; }
    const Runs& runs() const { return *snapshot_->runs; }
    const Snapshot& snapshot() const { return *snapshot_; }
    /// Whether a piece may begin after these two tokens. Matches at all other positions extend a match of the query one
    /// token shorter.
    bool may_start(std::uint64_t pair) const { return snapshot_->starts && snapshot_->starts->contains(pair); }
    /// Whether the token there was removed, as far as it was when this view was made.
    bool is_dead(Position position) const { return any_dead_ && log_.is_dead(position); }
    std::uint64_t generation() const { return snapshot_->generation; }

private:
    std::shared_ptr<const Snapshot> snapshot_;
    LogView log_;
    bool any_dead_;
};

}  // namespace agentspec
