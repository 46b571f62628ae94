#include "index/run_table.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kShort = 256;            // runs of fewer places have no table
constexpr std::uint32_t kWide = 128;           // places that make a token common
constexpr std::size_t kLine = 8;               // keys in a line of the processor's cache
constexpr std::size_t kDense = std::size_t{1} << 22;  // of longer runs fewer keys are kept

}  // namespace

RunTable::RunTable(LogView log, std::span<const Position> run) {
    if (run.size() < kShort) return;
    count_ = static_cast<std::uint32_t>(run.size());
    stride_ = run.size() <= kDense ? 16 : 64;
    keys_.reserve(run.size() / stride_ + 1);
    for (std::size_t place = 0; place < run.size(); place += stride_) {
        const std::size_t ahead = std::min(place + 16 * stride_, run.size() - 1);
        __builtin_prefetch(log + run[ahead] - 2);
        // What stands before a boundary is another piece's, and becomes zeros when its page is given back.
        const bool first = log[run[place] - 1] == kBoundary;
        keys_.push_back(first ? lowest_key(kBoundary) : order_key(log + run[place]));
    }
    for (std::uint32_t begin = 0, end; begin < keys_.size(); begin = end) {
        const Token last = log[run[std::size_t{begin} * stride_] - 1];
        for (end = begin + 1; end < keys_.size() && keys_[end] >> 32 == keys_[begin] >> 32; ++end) {
        }
        const Places around{begin == 0 ? 0 : (begin - 1) * stride_, beginning(end)};
        if (last >= 0 && around.size() > kWide) add_wide(log, run, last, around);
    }
    wide_.shrink_to_fit();
    followers_.shrink_to_fit();
}

std::shared_ptr<const RunTable> RunTable::over(LogView log, std::span<const Position> run) {
    return run.size() < kShort ? none() : std::make_shared<const RunTable>(log, run);
}

const std::shared_ptr<const RunTable>& RunTable::none() {
    static const auto& empty = *new std::shared_ptr<const RunTable>(std::make_shared<RunTable>());
    return empty;
}

void RunTable::add_wide(LogView log, std::span<const Position> run, Token last, Places around) {
    const std::uint32_t low = first_at_least(log, run.data(), around, lowest_key(last));
    const std::uint32_t high = first_at_least(log, run.data(), {low, around.high}, key_behind(last));
    if (high - low <= kWide) return;
    const auto begin = static_cast<std::uint32_t>(followers_.size());
    const auto sample = [&](std::uint32_t i) { return run[low + std::uint64_t{i} * (high - low) / kSample]; };
    for (std::uint32_t i = 0; i < kSample; ++i) __builtin_prefetch(log + sample(i));
    for (std::uint32_t i = 0; i < kSample; ++i) followers_.push_back({log[sample(i)], sample(i)});
    std::sort(followers_.begin() + begin, followers_.end(), [](const Follower& a, const Follower& b) {
        return a.token != b.token ? a.token < b.token : a.position > b.position;
    });
    wide_.push_back({last, {low, high}, begin});
}

Places RunTable::around(std::uint64_t key) const {
    const std::uint64_t* first = keys_.data();
    for (std::size_t size = keys_.size(); size > 0;) {  // a search without jumps: each step is a coin toss
        const std::size_t half = (size + 1) / 2, next = (size - half + 1) / 2;
        if (next > kLine) {  // whichever of the two it will be
            __builtin_prefetch(first + next - 1);
            __builtin_prefetch(first + half + next - 1);
        }
        first += half & -static_cast<std::size_t>(first[half - 1] < key);  // compilers make a jump of a choice
        size -= half;
    }
    const auto block = static_cast<std::uint32_t>(first - keys_.data());
    return {block == 0 ? 0 : (block - 1) * stride_ + 1, beginning(block)};
}

std::uint32_t RunTable::after(std::uint64_t key, const Places& first) const {
    const std::size_t block = (std::size_t{first.high} + stride_ - 1) / stride_;
    if (block >= keys_.size() || keys_[block] > key) return first.high;
    return around(key + 1).high;
}

const RunTable::Wide* RunTable::wide(Token last) const {
    const auto found = std::lower_bound(wide_.begin(), wide_.end(), last,
                                        [](const Wide& wide, Token token) { return wide.last < token; });
    return found != wide_.end() && found->last == last ? &*found : nullptr;
}

std::size_t RunTable::memory_bytes() const {
    if (empty()) return 0;  // of all short runs
    return sizeof(*this) + keys_.capacity() * sizeof(keys_[0]) + wide_.capacity() * sizeof(Wide) +
           followers_.capacity() * sizeof(Follower);
}

std::uint32_t first_at_least(LogView log, const Position* run, Places within, std::uint64_t key) {
    const auto below = [=](Position position) { return order_key(log + position) < key; };
    const Position* const found = std::partition_point(run + within.low, run + within.high, below);
    return static_cast<std::uint32_t>(found - run);
}

}  // namespace agentspec
