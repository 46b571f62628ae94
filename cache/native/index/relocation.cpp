#include "index/relocation.hpp"

#include <algorithm>

namespace agentspec {

Relocation::Relocation(const TokenLog& from, std::span<const Piece> pieces, std::size_t more,
                       const std::shared_ptr<Account>& account, bool exact)
    : rest_(std::size_t{1} << 40) {
    const Token* old = from.data();
    std::size_t needed = kPadding + more;
    for (const Piece& piece : pieces) needed += 1 + context_before(old, piece.begin).size() + (piece.end - piece.begin);
    log_ = exact ? std::make_shared<TokenLog>(needed, account) : TokenLog::with_room(needed, account);
    log_->append({old, kPadding});
    moves_.reserve(pieces.size());
    for (const auto& [begin, end] : pieces) {
        log_->push_back(kBoundary);
        log_->append(context_before(old, begin));
        moves_.push_back({begin, end, static_cast<Position>(log_->size())});
        log_->append({old + begin, old + end});
        for (; first_.size() * kBlock < end;) first_.push_back(static_cast<std::uint32_t>(moves_.size() - 1));
    }
}

void Relocation::append_rest(const TokenLog& from, std::size_t begin, const std::shared_ptr<Account>& account) {
    rest_ = begin;
    rest_to_ = log_->size();
    const std::span<const Token> rest(from.data() + begin, from.data() + from.size());
    if (log_->size() + rest.size() > log_->capacity()) log_ = log_->grown(rest.size(), account);
    log_->append(rest);
}

std::optional<Position> Relocation::moved(Position position) const {
    if (position >= rest_) return static_cast<Position>(position - rest_ + rest_to_);
    if (position / kBlock >= first_.size()) return {};
    std::size_t i = first_[position / kBlock];
    while (i < moves_.size() && moves_[i].end <= position) ++i;
    if (i == moves_.size() || moves_[i].begin > position) return {};
    return position - moves_[i].begin + moves_[i].to;
}

Positions Relocation::moved(std::span<const Position> positions) const {
    Positions out;
    out.reserve(positions.size());
    for (const Position position : positions) {
        if (const auto to = moved(position)) out.push_back(*to);
    }
    if (out.capacity() > out.size() + out.size() / 8) out.shrink_to_fit();
    return out;
}

}  // namespace agentspec
