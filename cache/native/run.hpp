// A sorted run: positions that never change, in memory of their own or in a mapped file. Copies share them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "mapping.hpp"
#include "sorted_run.hpp"

namespace agentspec {

class Run {
public:
    Run(Positions positions) {  // NOLINT: a run is what sorting returns
        const auto owned = std::make_shared<const Positions>(std::move(positions));
        bytes_ = owned->capacity() * sizeof(Position);
        positions_ = *owned;
        owner_ = owned;
    }
    Run(std::shared_ptr<const Mapping> file, std::span<const Position> positions)
        : owner_(std::move(file)), positions_(positions), bytes_(positions.size_bytes()), mapped_(true) {}

    const Position* data() const { return positions_.data(); }
    auto begin() const { return positions_.begin(); }
    auto end() const { return positions_.end(); }
    Position operator[](std::size_t place) const { return positions_[place]; }
    std::size_t size() const { return positions_.size(); }
    bool empty() const { return positions_.empty(); }
    /// Bytes taken, those of mapped pages included.
    std::size_t bytes() const { return bytes_; }
    std::size_t mapped_bytes() const { return mapped_ ? bytes_ : 0; }

private:
    std::shared_ptr<const void> owner_;
    std::span<const Position> positions_;
    std::size_t bytes_;
    bool mapped_ = false;
};

}  // namespace agentspec
