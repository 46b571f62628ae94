#include "index/run_cursor.hpp"

#include <algorithm>

namespace agentspec {
namespace {

constexpr int kNotSeen = -1;
constexpr int kSteps = 4;  // places tried one by one before a search
constexpr std::uint32_t kFetched = 16;  // places whose contexts are fetched from memory together

/// No places, where a run out of order has them end before they begin.
Places clipped(Places places) { return {std::min(places.low, places.high), places.high}; }

}  // namespace

RunCursor::RunCursor(LogView log, const RunPart& part, const Token* query_end)
    : log_(log),
      run_(part.data()),
      table_(&part.table()),
      query_end_(query_end),
      begin_(part.first()),
      count_(part.last()) {
    std::uint32_t low = begin_, high = count_;
    left_ = right_ = kNotSeen;
    if (!table_->empty()) {
        const std::uint64_t key = order_key(query_end);
        const Places first = table_->around(key);
        low = std::max(first.low, begin_);
        high = table_->after(key, first);
    }
    // A search waits for memory most of the time: what later steps may look at is fetched beside what this one does.
    const auto fetch = [&](std::uint32_t place) { __builtin_prefetch(log + run_[place] - 2); };
    const auto fetch_middle = [&](std::uint32_t from, std::uint32_t to) {
        if (from < to) fetch(from + (to - from) / 2);
    };
    if (high - low <= kFetched) {
        for (std::uint32_t place = low; place < high; ++place) fetch(place);
    }
    for (bool all = high - low <= kFetched; low < high;) {
        const std::uint32_t middle = low + (high - low) / 2;
        if (!all) {
            fetch_middle(low, middle);
            fetch_middle(middle + 1, high);
        }
        const Token* end = log_ + run_[middle];
        const int shared = shared_context(end, query_end_, std::max(0, std::min(left_, right_)));
        if (shared < kDepth && end[-1 - shared] < query_end_[-1 - shared]) {
            low = middle + 1;
            left_ = shared;
        } else {
            high = middle;
            right_ = shared;
        }
    }
    taken_ = {low, low};
    if (left_ == kNotSeen) left_ = low > begin_ ? shared_at(low - 1) : 0;
    if (right_ == kNotSeen) right_ = low < count_ ? shared_at(low) : 0;
}

// Shared lengths fall with the distance from the insertion point: most often within a few places, else a search by the
// table or in growing steps finds where they drop.
void RunCursor::widen_left(int length) {
    std::uint32_t& low = taken_.low;
    for (int i = 0; i < kSteps && left_ >= length; ++i) {
        --low;
        left_ = low > begin_ ? shared_at(low - 1) : 0;
    }
    if (left_ < length) return;
    if (length <= 2 && !table_->empty()) {
        const std::uint64_t key = length == 1 ? lowest_key(query_end_[-1]) : order_key(query_end_);
        const Places around = table_->around(key);
        const Places before = clipped({std::max(around.low, begin_), std::min(around.high, low)});
        low = std::min(low, std::max(begin_, first_at_least(log_, run_, before, key)));
    } else {
        std::uint32_t step = 1;
        for (; step <= low - begin_ && shared_at(low - step) >= length; step *= 2) low -= step;
        for (step /= 2; step >= 1; step /= 2) {
            if (step <= low - begin_ && shared_at(low - step) >= length) low -= step;
        }
    }
    left_ = low > begin_ ? shared_at(low - 1) : 0;
}

void RunCursor::widen_right(int length) {
    std::uint32_t& high = taken_.high;
    for (int i = 0; i < kSteps && right_ >= length; ++i) {
        ++high;
        right_ = high < count_ ? shared_at(high) : 0;
    }
    if (right_ < length) return;
    if (length <= 2 && !table_->empty()) {
        const std::uint64_t key = length == 1 ? key_behind(query_end_[-1]) : order_key(query_end_) + 1;
        const Places around = table_->around(key);
        const Places behind = clipped({std::max(around.low, high), std::min(around.high, count_)});
        high = std::max(high, first_at_least(log_, run_, behind, key));
    } else {
        std::uint32_t step = 1;
        for (; step <= count_ - high && shared_at(high + step - 1) >= length; step *= 2) high += step;
        for (step /= 2; step >= 1; step /= 2) {
            if (step <= count_ - high && shared_at(high + step - 1) >= length) high += step;
        }
    }
    right_ = high < count_ ? shared_at(high) : 0;
}

}  // namespace agentspec
