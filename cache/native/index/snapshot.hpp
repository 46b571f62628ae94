// What readers see of an index: parts that only grow behind what they see, and are replaced rather than changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "index/run.hpp"
#include "index/start_set.hpp"
#include "index/token_log.hpp"

namespace agentspec {

/// The newest positions, in the order of the log: matched one by one. Appended to behind what readers know of.
class Tail {
public:
    Tail(std::size_t capacity, const std::shared_ptr<Account>& account)
        : capacity_(capacity),
          positions_(new Position[capacity]),
          before_(new Token[capacity]),
          charge_(account, capacity * (sizeof(Position) + sizeof(Token)) + sizeof(Tail)) {}

    std::size_t capacity() const { return capacity_; }
    std::size_t memory_bytes() const { return charge_.bytes(); }
    std::span<const Position> first(std::size_t count) const { return {positions_.get(), count}; }
    /// The token before each of the positions.
    const Token* before() const { return before_.get(); }
    void set(std::size_t place, Position position, Token before) {
        positions_[place] = position;
        before_[place] = before;
    }

private:
    std::size_t capacity_;
    std::unique_ptr<Position[]> positions_;
    std::unique_ptr<Token[]> before_;
    Charge charge_;
};

struct Snapshot {
    std::shared_ptr<const TokenLog> log;
    std::shared_ptr<const Runs> runs;
    std::shared_ptr<const Tail> tail;
    std::size_t tail_size;
    std::shared_ptr<const StartSet> starts;
    std::uint64_t generation;  // of the log: positions of another mean other tokens
    std::uint64_t number;      // of this snapshot, among those of all indexes

    /// What its parts take, and nothing else that is on their account.
    std::size_t memory_bytes() const {
        std::size_t total =
            log->memory_bytes() + (tail ? tail->memory_bytes() : 0) + (starts ? starts->memory_bytes() : 0);
        for (const auto& run : *runs) total += run->memory_bytes();
        return total;
    }
    std::span<const Position> newest() const { return tail ? tail->first(tail_size) : std::span<const Position>(); }
};

}  // namespace agentspec
