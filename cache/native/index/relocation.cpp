#include "index/relocation.hpp"

namespace agentspec {

Relocation::Relocation(LogView from, std::span<const Piece> pieces) {
    moves_.reserve(pieces.size());
    for (const auto& [begin, end] : pieces) {
        size_ += 1 + context_before(from, begin).size();
        moves_.push_back({begin, end, static_cast<Position>(size_)});
        size_ += end - begin;
        for (; first_.size() * kStride < end;) first_.push_back(static_cast<std::uint32_t>(moves_.size() - 1));
    }
}

Positions Relocation::moved(std::span<const Position> positions) const {
    Positions out;
    out.reserve(positions.size());
    for (const Position position : positions) {
        std::size_t i = position / kStride < first_.size() ? first_[position / kStride] : moves_.size();
        while (i < moves_.size() && moves_[i].end <= position) ++i;
        if (i == moves_.size() || moves_[i].begin > position) continue;
        out.push_back(position - moves_[i].begin + moves_[i].to);
    }
    if (out.capacity() > out.size() + out.size() / 8) out.shrink_to_fit();
    return out;
}

}  // namespace agentspec
