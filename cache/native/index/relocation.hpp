// Moves text from one log to another: pieces in their order, without what lies between them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "index/sorted_run.hpp"
#include "index/token_log.hpp"

namespace agentspec {

/// The tokens before `end` that stand in the same piece, kDepth at most.
inline std::span<const Token> context_before(const Token* log, std::size_t end) {
    std::size_t begin = end;
    while (end - begin < kDepth && log[begin - 1] != kBoundary) --begin;
    return {log + begin, log + end};
}

class Relocation {
public:
    struct Piece {
        Position begin, end;
    };

    /// Copy `pieces` (by begin), each after a boundary and its context, into a log with room for `more` tokens.
    Relocation(const TokenLog& from, std::span<const Piece> pieces, std::size_t more,
               const std::shared_ptr<Account>& account, bool exact = false);

    /// Copy what was appended to the old log since, from `begin` on. What stands before is as it was.
    void append_rest(const TokenLog& from, std::size_t begin, const std::shared_ptr<Account>& account);

    const std::shared_ptr<TokenLog>& log() const { return log_; }
    /// Where a position is now, if it was moved.
    std::optional<Position> moved(Position position) const;
    /// Where those of the positions are now that were moved, in their order.
    Positions moved(std::span<const Position> positions) const;
    /// Where the nth of the pieces begins now.
    Position place(std::size_t nth) const { return moves_[nth].to; }

private:
    struct Move {
        Position begin, end, to;
    };
    static constexpr std::size_t kBlock = 256;

    std::shared_ptr<TokenLog> log_;
    std::vector<Move> moves_;
    std::vector<std::uint32_t> first_;  // for each block of positions the first move that ends behind its beginning
    std::size_t rest_, rest_to_ = 0;    // from here on all moved by the same distance
};

}  // namespace agentspec
