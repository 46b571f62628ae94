#include "index/run_table.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr std::size_t kShort = 256;            // runs of fewer places have no table
constexpr std::size_t kFew = 1024;             // followers that can all be looked at
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
    keep_followers(log, run);
}

std::shared_ptr<const RunTable> RunTable::over(LogView log, std::span<const Position> run) {
    return run.size() < kShort ? none() : std::make_shared<const RunTable>(log, run);
}

const std::shared_ptr<const RunTable>& RunTable::none() {
    static const auto& empty = *new std::shared_ptr<const RunTable>(std::make_shared<RunTable>());
    return empty;
}

void RunTable::keep_followers(LogView log, std::span<const Position> run) {
    Share share(stride_, 1);
    Followers& kept = followers_.emplace_back();
    kept.reserve(run.size() / stride_ + run.size() / (8 * stride_) + kShort);
    for (std::size_t place = 0; place < run.size(); ++place) {
        if (!share.has(run[place])) continue;
        __builtin_prefetch(log + run[place]);
        kept.push_back({static_cast<std::uint32_t>(place), run[place], 0});
    }
    for (Follower& next : kept) next.token = log[next.position];
    while (followers_.back().size() > kFew) {
        share.below_ /= kCoarser;
        Followers fewer;
        std::ranges::copy_if(followers_.back(), std::back_inserter(fewer),
                             [&](const Follower& next) { return share.has(next.position); });
        followers_.push_back(std::move(fewer));
    }
    for (Followers& each : followers_) each.shrink_to_fit();
}

std::span<const RunTable::Follower> RunTable::followers(const Places& within, const Share& share) const {
    std::uint64_t kept = Share::kAll / std::max(1u, stride_);
    if (empty() || share.below_ > kept) return {};
    std::size_t nth = 0;
    while (nth + 1 < followers_.size() && share.below_ <= (kept /= kCoarser)) ++nth;
    const auto place_of = [](const Follower& next) { return next.place; };
    const auto low = std::ranges::lower_bound(followers_[nth], within.low, {}, place_of);
    return {low, std::ranges::lower_bound(low, followers_[nth].end(), within.high, {}, place_of)};
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
    for (const Followers& each : followers_) total += sizeof(each) + each.capacity() * sizeof(Follower);
    return total;
}

std::uint32_t first_at_least(LogView log, const Position* run, Places within, std::uint64_t key) {
    const auto below = [=](Position position) { return order_key(log + position) < key; };
    const Position* const found = std::partition_point(run + within.low, run + within.high, below);
    return static_cast<std::uint32_t>(found - run);
}

}  // namespace agentspec
