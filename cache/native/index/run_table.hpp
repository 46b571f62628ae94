// Small tables over one sorted run: they narrow a search, and hold those positions of it that are looked at where many
// match.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "index/pages.hpp"
#include "index/sorted_run.hpp"

namespace agentspec {

/// Part of a run: places from `low` to `high`, the latter excluded.
struct Places {
    std::uint32_t low, high;
    std::uint32_t size() const { return high - low; }
};

/// Which of many matches are looked at: by their positions, so that it does not matter which runs they are in.
class Share {
public:
    /// About `most` of so many matches, or all if there are no more.
    explicit Share(std::uint64_t matches = 0, std::uint64_t most = 0)
        : below_(matches <= most ? kAll : most * kAll / matches) {}
    bool has(Position position) const {
        position = (position ^ position >> 16) * 0x7feb352d;  // "lowbias32" of Wellons but for its last step
        return (position ^ position >> 15) * 0x846ca68b < below_;
    }
    /// Those of the positions that it has: the same, or a copy at `room`.
    std::span<const Position> of(std::span<const Position> positions, Position* room) const {
        if (below_ == kAll) return positions;
        std::size_t count = 0;
        for (const Position position : positions) room[count] = position, count += has(position);  // without a jump
        return {room, count};
    }
    /// For how many matches each that is looked at stands.
    double weight() const { return double(kAll) / double(below_); }

private:
    friend class RunTable;
    static constexpr std::uint64_t kAll = std::uint64_t{1} << 32;

    std::uint64_t below_;  // a number as good as drawn, from 0 to kAll
};

/// A table over one run. Takes about half a byte per place of the run, an eighth in very long runs. Empty for a short
/// run.
class RunTable {
public:
    RunTable() = default;
    RunTable(LogView log, std::span<const Position> run);
    static std::shared_ptr<const RunTable> over(LogView log, std::span<const Position> run);
    /// That of a short run, or of one that is not complete.
    static const std::shared_ptr<const RunTable>& none();

    bool empty() const { return keys_.empty(); }
    /// Bounds of the first place whose context's nearest pair is `key` (an `order_key`) or more: at least low, at most
    /// high.
    Places around(std::uint64_t key) const;
    /// An upper bound of the place after all places with that key; `first` are the bounds of where they begin.
    std::uint32_t after(std::uint64_t key, const Places& first) const;

    struct Kept {
        std::uint32_t place;
        Position position;
        bool operator==(const Kept&) const = default;
    };
    /// All of a share that are among these places, and others; nothing if so large a share is not kept.
    std::span<const Kept> kept(const Places& within, const Share& share) const;

    std::size_t memory_bytes() const;
    bool operator==(const RunTable&) const = default;

private:
    using Shared = PagedVector<Kept>;

    void keep_shares(std::span<const Position> run);
    /// The place where a block begins, or the run ends. In 64 bits: the last block may end behind the last position.
    std::uint32_t beginning(std::size_t block) const {
        return static_cast<std::uint32_t>(std::min<std::size_t>(block * stride_, count_));
    }

    std::uint32_t stride_ = 0, count_ = 0;
    PagedVector<std::uint64_t> keys_;  // of every stride_-th place
    std::vector<Shared> shares_;  // a share of all, then ever sixteenth parts of that; none in runs that are not long
};

/// The first place in `within` whose context's nearest pair is `key` or more; within.high where there is none.
std::uint32_t first_at_least(LogView log, const Position* run, Places within, std::uint64_t key);

}  // namespace agentspec
