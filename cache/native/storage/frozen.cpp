// An index at rest: taken out as four arrays, and used again where they lie in a file.
#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "index/relocation.hpp"
#include "index/suffix_index.hpp"

namespace agentspec {
namespace {

constexpr std::array<std::uint64_t, 4> kItemBytes = {sizeof(SequenceId), sizeof(PieceRecord), sizeof(Position),
                                                     sizeof(Token)};

void demand(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

/// Every token is one or a boundary; boundaries stand before pieces and nowhere else; pieces fill the log.
void check_log(std::span<const Token> log, std::span<const PieceRecord> pieces) {
    std::size_t boundaries = 0;
    Token least = 0, most = 0;
    for (const Token token : log) {
        boundaries += token == kBoundary;
        least = std::min(least, token);
        most = std::max(most, token);
    }
    demand(least >= kBoundary, "a negative token");
    demand(most <= kMostToken, "a token above 2^31 - 2");
    demand(log.size() >= kPadding && std::count(log.begin(), log.begin() + kPadding, kBoundary) == kPadding,
           "no padding");
    demand(boundaries == kPadding + pieces.size(), "boundaries and pieces differ");
    std::uint64_t end = kPadding;
    for (const PieceRecord& piece : pieces) {
        demand(piece.begin > end && piece.begin - end - 1 <= kDepth, "a piece out of place");
        demand(piece.begin <= piece.end && piece.end <= log.size(), "a piece outside the log");
        demand(log[end] == kBoundary, "a piece without a boundary");
        end = piece.end;
    }
    demand(end == log.size(), "tokens of no piece");
}

/// The run holds the positions of all tokens in pieces, each once.
void check_run(std::span<const Position> run, std::span<const PieceRecord> pieces, std::size_t log_size) {
    std::vector<bool> tokens(log_size + 1);  // not found yet
    std::size_t living = 0;
    for (const PieceRecord& piece : pieces) {
        living += piece.end - piece.begin;
        std::fill(tokens.begin() + piece.begin, tokens.begin() + piece.end, true);
    }
    demand(run.size() == living, "positions and tokens differ");
    std::size_t found = 0;
    for (const Position position : run) {
        auto token = tokens[std::min<std::size_t>(position, log_size)];
        found += token;
        token = false;
    }
    demand(found == living, "a position of no token, or one twice");
}

/// The parts of a frozen index in a file that is as long as it should be.
struct Parts {
    Parts(int descriptor, const FrozenLayout& layout) {
        const std::uint64_t size = size_of(descriptor);
        demand(layout.offset <= size, "it is cut off");
        std::uint64_t end = layout.offset;
        for (int part = 0; part < 4; ++part) {
            demand(layout.counts[part] <= std::numeric_limits<Position>::max(), "more than 2^32 items");
            end += layout.counts[part] * kItemBytes[part];
        }
        demand(layout.offset % alignof(SequenceId) == 0 && layout.counts[3] >= kPadding && end == size,
               "its size is not what its head says");
        const std::size_t log_bytes = layout.counts[3] * sizeof(Token);
        file = std::make_shared<const Mapping>(descriptor, size);
        log_offset = size - log_bytes;
        const std::byte* at = file->data() + layout.offset;
        sequences = part<SequenceId>(layout.counts[0], at);
        pieces = part<PieceRecord>(layout.counts[1], at);
        run = part<Position>(layout.counts[2], at);
        log = part<Token>(layout.counts[3], at);
    }

    std::shared_ptr<const Mapping> file;
    std::size_t log_offset;
    std::span<const SequenceId> sequences;
    std::span<const PieceRecord> pieces;
    std::span<const Position> run;
    std::span<const Token> log;

private:
    static std::uint64_t size_of(int descriptor) {
        struct stat status;
        demand(fstat(descriptor, &status) == 0, "it cannot be read");
        return static_cast<std::uint64_t>(status.st_size);
    }

    template <class Item>
    static std::span<const Item> part(std::uint64_t count, const std::byte*& at) {
        const std::span items(reinterpret_cast<const Item*>(at), count);
        at += items.size_bytes();
        return items;
    }
};

/// A view of tokens that lie in a row.
std::vector<ChunkView> chunks_of(const Token* tokens, std::size_t size) {
    std::vector<ChunkView> chunks;
    for (std::size_t nth = 0; nth * kChunk < size; ++nth) {
        chunks.push_back(ChunkView{tokens + nth * kChunk, nullptr, nullptr}.nth(nth));
    }
    return chunks;
}

}  // namespace

Frozen SuffixIndex::freeze(std::span<const SequenceId> kept) const {
    const std::unordered_set<SequenceId> wanted(kept.begin(), kept.end());
    Frozen frozen;
    std::vector<Relocation::Piece> pieces;
    std::shared_ptr<const Snapshot> seen;
    {
        const Hold hold(*this);
        worked(pieces_.size());
        seen = snapshot_;
        std::unordered_map<const Sequence*, std::uint32_t> places;
        for (const Sequence* one = oldest_; one; one = one->newer) {
            if (!wanted.contains(one->id)) continue;
            places.emplace(one, static_cast<std::uint32_t>(places.size()));
            frozen.sequences.push_back(one->id);
        }
        for (const Piece& piece : pieces_) {
            const auto found = places.find(piece.sequence);
            if (found == places.end()) continue;
            frozen.pieces.push_back({0, piece.end - piece.begin, found->second});
            pieces.push_back({piece.begin, piece.end});
        }
    }
    const LogView old = seen->log->view();
    const Relocation relocation(old, pieces);
    frozen.log.reserve(relocation.size());
    relocation.copy(
        old, [&](std::span<const Token> text) { frozen.log.insert(frozen.log.end(), text.begin(), text.end()); });
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        frozen.pieces[i].begin = relocation.place(i);
        frozen.pieces[i].end += relocation.place(i);
    }
    const std::vector<ChunkView> chunks = chunks_of(frozen.log.data(), frozen.log.size());
    const LogView log(chunks.data());
    for (auto run = seen->runs->rbegin(); run != seen->runs->rend(); ++run) {
        for (auto part = (*run)->parts().rbegin(); part != (*run)->parts().rend(); ++part) {  // what is merged last
            frozen.run = merge_runs(log, relocation.moved(part->positions()), frozen.run);
        }
    }
    return frozen;
}

std::unique_ptr<SuffixIndex> SuffixIndex::load(int file, const FrozenLayout& layout, bool deferred) {
    const Parts parts(file, layout);
    check_log(parts.log, parts.pieces);
    check_run(parts.run, parts.pieces, parts.log.size());
    auto index = std::make_unique<SuffixIndex>(kTail, kRatio, deferred);
    const Hold hold(*index);
    index->take_records(parts.sequences, parts.pieces);
    index->log_ = std::make_shared<TokenLog>(parts.file, parts.log_offset, parts.log.size());
    if (!parts.run.empty()) {
        auto positions = std::make_shared<RunStorage>(parts.file, parts.run.data());
        index->runs_ = std::make_shared<Runs>(
            Runs{std::make_shared<Run>(index->log_->view(), parts.run.size(), std::move(positions))});
    }
    index->unneeded_ = index->log_->size() - index->find_starts(index->starts_for(parts.pieces.size()));
    index->live_ = parts.run.size();
    index->prepare(0);
    index->publish();
    return index;
}

void SuffixIndex::take_records(std::span<const SequenceId> numbers, std::span<const PieceRecord> pieces) {
    std::vector<Sequence*> taken;
    sequences_.reserve(numbers.size());
    for (const SequenceId number : numbers) {
        const auto [found, fresh] = sequences_.try_emplace(number);
        demand(fresh, "a sequence twice");
        found->second.id = number;
        use(found->second);
        taken.push_back(&found->second);
    }
    pieces_.reserve(pieces.size());
    for (const PieceRecord& piece : pieces) {
        demand(piece.sequence < taken.size(), "a piece of no sequence");
        taken[piece.sequence]->spans.push_back({piece.begin, piece.end});
        taken[piece.sequence]->length += piece.end - piece.begin;
        pieces_.push_back({piece.begin, piece.end, taken[piece.sequence]});
    }
    for (const Sequence* sequence : taken) demand(!sequence->spans.empty(), "a sequence without a place");
}

}  // namespace agentspec
