// A sorted run: positions that never change, in memory of their own or in a mapped file, with a table over them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "index/account.hpp"
#include "index/run_table.hpp"
#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// Not empty.
class Run {
public:
    Run(const Token* log, Positions positions, const std::shared_ptr<Account>& account)
        : owned_(std::move(positions)),
          positions_(owned_),
          table_(log, positions_),
          charge_(account, owned_.capacity() * sizeof(Position) + sizeof(Run) + table_.memory_bytes()) {
        find_ends();
    }
    Run(const Token* log, std::shared_ptr<const Mapping> file, std::span<const Position> positions,
        const std::shared_ptr<Account>& account)
        : file_(std::move(file)),
          positions_(positions),
          table_(log, positions_),
          charge_(account, positions.size_bytes() + sizeof(Run) + table_.memory_bytes()) {
        find_ends();
    }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    std::span<const Position> positions() const { return positions_; }
    auto begin() const { return positions_.begin(); }
    auto end() const { return positions_.end(); }
    Position operator[](std::size_t place) const { return positions_[place]; }
    std::size_t size() const { return positions_.size(); }
    const RunTable& table() const { return table_; }
    /// The lowest and the highest position.
    Position oldest() const { return oldest_; }
    Position newest() const { return newest_; }
    std::size_t mapped_bytes() const { return file_ ? positions_.size_bytes() : 0; }

    /// How many of the positions are of forgotten tokens.
    std::size_t dead() const { return dead_.load(std::memory_order_relaxed); }
    void count_dead(std::size_t more) const { dead_.fetch_add(more, std::memory_order_relaxed); }

private:
    void find_ends() {
        const auto [oldest, newest] = std::minmax_element(begin(), end());
        oldest_ = *oldest;
        newest_ = *newest;
    }

    std::shared_ptr<const Mapping> file_;
    Positions owned_;
    std::span<const Position> positions_;
    RunTable table_;
    Position oldest_ = 0, newest_ = 0;
    mutable std::atomic<std::size_t> dead_{0};
    Charge charge_;
};

using Runs = std::vector<std::shared_ptr<const Run>>;  // by position: each is older than the next

}  // namespace agentspec
