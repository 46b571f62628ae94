// Moves text from one log to another: pieces in their order, without what lies between them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "index/log_view.hpp"
#include "index/sorted_run.hpp"

namespace agentspec {

class Relocation {
public:
    struct Piece {
        Position begin, end;
    };

    /// For `pieces` (by begin), each of which will stand behind a boundary and its context.
    Relocation(LogView from, std::span<const Piece> pieces);

    /// How many places the text needs.
    std::size_t size() const { return size_; }
    /// Hand the new text to `write`, stretch by stretch.
    template <class Write>
    void copy(LogView from, Write&& write) const {
        const std::vector<Token> padding(kPadding, kBoundary);
        write(std::span<const Token>(padding));
        for (const Move& move : moves_) {
            write(std::span<const Token>(padding).first(1));
            write(context_before(from, move.begin));
            copy(from, move.begin, move.end, write);
        }
    }
    template <class Write>
    static void copy(LogView from, std::size_t begin, std::size_t end, Write&& write) {
        while (begin < end) {
            const std::span<const Token> stretch = from.stretch(begin, end);
            write(stretch);
            begin += stretch.size();
        }
    }

    /// Where those of the positions are now that were moved, in their order.
    Positions moved(std::span<const Position> positions) const;
    /// Where the nth of the pieces begins now.
    Position place(std::size_t nth) const { return moves_[nth].to; }

private:
    struct Move {
        Position begin, end, to;
    };
    static constexpr std::size_t kStride = 256;

    std::vector<Move> moves_;
    std::vector<std::uint32_t> first_;  // for each stride of positions the first move that ends behind its beginning
    std::size_t size_ = kPadding;
};

}  // namespace agentspec
