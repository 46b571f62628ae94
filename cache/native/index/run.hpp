// A sorted run: positions that never change, in memory of their own or in a mapped file. Copies share them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

class Run {
public:
    Run(Positions positions) {  // NOLINT: a run is what sorting returns
        const auto owned = std::make_shared<const Positions>(std::move(positions));
        bytes_ = owned->capacity() * sizeof(Position);
        positions_ = *owned;
        owner_ = owned;
        find_ends();
    }
    Run(std::shared_ptr<const Mapping> file, std::span<const Position> positions)
        : owner_(std::move(file)), positions_(positions), bytes_(positions.size_bytes()), mapped_(true) {
        find_ends();
    }

    const Position* data() const { return positions_.data(); }
    auto begin() const { return positions_.begin(); }
    auto end() const { return positions_.end(); }
    Position operator[](std::size_t place) const { return positions_[place]; }
    std::size_t size() const { return positions_.size(); }
    bool empty() const { return positions_.empty(); }
    /// The lowest and the highest position of a run that is not empty.
    Position oldest() const { return oldest_; }
    Position newest() const { return newest_; }
    /// Bytes taken, mapped pages included.
    std::size_t bytes() const { return bytes_; }
    std::size_t mapped_bytes() const { return mapped_ ? bytes_ : 0; }

private:
    void find_ends() {
        if (empty()) return;
        const auto [oldest, newest] = std::minmax_element(begin(), end());
        oldest_ = *oldest;
        newest_ = *newest;
    }

    std::shared_ptr<const void> owner_;
    std::span<const Position> positions_;
    Position oldest_ = 0, newest_ = 0;
    std::size_t bytes_;
    bool mapped_ = false;
};

}  // namespace agentspec
