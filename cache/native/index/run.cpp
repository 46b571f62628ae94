#include "index/run.hpp"

#include <algorithm>

namespace agentspec {

Run::Run(LogView log, std::size_t size, std::shared_ptr<RunStorage> storage) : size_(size) {
    const std::span<const Position> positions(storage->data(), size);
    const auto [oldest, newest] = std::minmax_element(positions.begin(), positions.end());
    oldest_ = *oldest;
    newest_ = *newest;
    parts_.emplace_back(std::move(storage), 0, size, RunTable::over(log, positions));
}

Run::Run(LogView log, Positions positions)
    : Run{log, positions.size(), std::make_shared<RunStorage>(std::move(positions))} {}

Run::Run(std::vector<RunPart> parts, Position oldest, Position newest)
    : parts_(std::move(parts)), oldest_(oldest), newest_(newest) {
    for (const RunPart& part : parts_) size_ += part.size();
}

std::size_t Run::memory_bytes() const {
    std::size_t total = 0;
    for (const RunPart& part : parts_) total += part.memory_bytes();
    return total;
}

std::size_t Run::mapped_bytes() const {
    std::size_t total = 0;
    for (const RunPart& part : parts_) total += part.mapped_bytes();
    return total;
}

}  // namespace agentspec
