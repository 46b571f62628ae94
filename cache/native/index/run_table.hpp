// Small tables over one sorted run: they narrow a search, and hold samples of what follows the commonest tokens.
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
    bool operator==(const Places&) const = default;
};

/// A token that followed another, one of an even sample.
struct Follower {
    Token token;
    Position position;
    bool operator==(const Follower&) const = default;
};

/// A table over one run. Takes half a byte per place of the run, an eighth in very long runs, and about as much again
/// for the commonest tokens. Building it reads few places, so it is quick over a mapped run. Empty for a short run.
class RunTable {
public:
    static constexpr std::uint32_t kSample = 64;  // places looked at for the followers of a token

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

    /// A token that precedes many places: the token, these places, and the sample of its followers.
    struct Wide {
        Token last;
        Places places;
        std::uint32_t begin;  // of its sample among the followers
        bool operator==(const Wide&) const = default;
    };
    /// nullptr for a token that is not so common.
    const Wide* wide(Token last) const;
    std::span<const Follower> followers(const Wide& wide) const {
        return std::span(followers_).subspan(wide.begin, kSample);
    }

    std::size_t memory_bytes() const;
    bool operator==(const RunTable&) const = default;

private:
    void add_wide(LogView log, std::span<const Position> run, Token last, Places around);
    /// The place where a block begins, or the run ends. In 64 bits: the last block may end behind the last position.
    std::uint32_t beginning(std::size_t block) const {
        return static_cast<std::uint32_t>(std::min<std::size_t>(block * stride_, count_));
    }

    std::uint32_t stride_ = 0, count_ = 0;
    PagedVector<std::uint64_t> keys_;  // of every stride_-th place
    PagedVector<Wide> wide_;  // by token
    PagedVector<Follower> followers_;
};

/// The first place in `within` whose context's nearest pair is `key` or more; within.high where there is none.
std::uint32_t first_at_least(LogView log, const Position* run, Places within, std::uint64_t key);

}  // namespace agentspec
