#include "index/run_table.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kShort = 256;            // runs of fewer places have no table
constexpr std::size_t kLong = 8192;            // places of runs in which many may match
constexpr std::size_t kFewKept = 1024;         // positions that can all be looked at
constexpr std::uint32_t kShares = 8;           // places a position kept, in those a key kept
constexpr std::uint64_t kCoarser = 16;         // so much smaller is each share that is kept
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
    if (run.size() >= kLong) keep_shares(run);
}

std::shared_ptr<const RunTable> RunTable::over(LogView log, std::span<const Position> run) {
    return run.size() < kShort ? none() : std::make_shared<const RunTable>(log, run);
}

const std::shared_ptr<const RunTable>& RunTable::none() {
    static const auto& empty = *new std::shared_ptr<const RunTable>(std::make_shared<RunTable>());
    return empty;
}

void RunTable::keep_shares(std::span<const Position> run) {
    Share share(kShares * stride_, 1);
    const auto has = [&](Position position) { return share.has(position); };
    Shared& first = shares_.emplace_back();
    first.reserve(static_cast<std::size_t>(std::ranges::count_if(run, has)));
    for (std::size_t place = 0; place < run.size(); ++place) {
        if (has(run[place])) first.push_back({static_cast<std::uint32_t>(place), run[place]});
    }
    while (shares_.back().size() > kFewKept) {
        share.below_ /= kCoarser;
        const Shared& all = shares_.back();
        Shared fewer(static_cast<std::size_t>(std::ranges::count_if(all, has, &Kept::position)));
        std::ranges::copy_if(all, fewer.begin(), has, &Kept::position);
        shares_.push_back(std::move(fewer));
    }
}

std::span<const RunTable::Kept> RunTable::kept(const Places& within, const Share& share) const {
    std::uint64_t most = Share::kAll / (kShares * std::max(1u, stride_));
    if (shares_.empty() || share.below_ > most) return {};
    std::size_t nth = 0;
    while (nth + 1 < shares_.size() && share.below_ <= (most /= kCoarser)) ++nth;
    const auto low = std::ranges::lower_bound(shares_[nth], within.low, {}, &Kept::place);
    return {low, std::ranges::lower_bound(low, shares_[nth].end(), within.high, {}, &Kept::place)};
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

std::size_t RunTable::memory_bytes() const {
    if (empty()) return 0;  // of all short runs
    std::size_t total = sizeof(*this) + keys_.capacity() * sizeof(keys_[0]);
    for (const Shared& each : shares_) total += sizeof(each) + each.capacity() * sizeof(Kept);
    return total;
}

std::uint32_t first_at_least(LogView log, const Position* run, Places within, std::uint64_t key) {
    const auto below = [=](Position position) { return order_key(log + position) < key; };
    const Position* const found = std::partition_point(run + within.low, run + within.high, below);
    return static_cast<std::uint32_t>(found - run);
}

}  // namespace agentspec
