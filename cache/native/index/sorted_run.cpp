#include "index/sorted_run.hpp"

#include <algorithm>
#include <span>

namespace agentspec {
namespace {

constexpr auto kBoundaryHalf = static_cast<std::uint32_t>(kBoundary);

constexpr std::size_t kFewContexts = 12;  // contexts that are sorted sooner as they are than by keys

constexpr std::uint64_t kSigns = 0x8000000080000000;  // flips two signs: boundaries sort below tokens

bool holds_boundary(std::uint64_t pair) {
    return static_cast<std::uint32_t>(pair >> 32) == kBoundaryHalf || static_cast<std::uint32_t>(pair) == kBoundaryHalf;
}

/// Order of two unequal pairs; zero when both contexts ended at the nearer token, so that the farther one is foreign.
int compare_pairs(std::uint64_t a, std::uint64_t b) {
    const auto near = static_cast<std::uint32_t>(a >> 32);
    if (near == static_cast<std::uint32_t>(b >> 32) && near == kBoundaryHalf) return 0;
    return (a ^ kSigns) < (b ^ kSigns) ? -1 : 1;
}

struct Keyed {
    std::uint64_t key;
    Position position;

    bool operator<(const Keyed& other) const { return key != other.key ? key < other.key : position < other.position; }
};

/// Sort contexts that share `depth` tokens: a few by comparing them, more by the next pair, then groups of equal pairs
/// by what comes after: linear in the number of equal contexts, however long they are. What lies beyond a boundary is
/// kept out of the key.
void sort_from(LogView log, std::span<Keyed> items, int depth) {
    const auto before = [=](const Keyed& a, const Keyed& b) {
        const int order = compare_contexts(log + a.position, log + b.position, depth);
        return order != 0 ? order < 0 : a.position < b.position;
    };
    if (items.size() <= kFewContexts) return std::sort(items.begin(), items.end(), before);
    for (Keyed& item : items) {
        const std::uint64_t pair = pair_before(log + item.position - depth);
        const bool ended = static_cast<std::uint32_t>(pair >> 32) == kBoundaryHalf;
        item.key = (ended ? pair | kBoundaryHalf : pair) ^ kSigns;
    }
    if (!std::is_sorted(items.begin(), items.end())) std::sort(items.begin(), items.end());
    for (std::size_t begin = 0, end; begin < items.size(); begin = end) {
        for (end = begin + 1; end < items.size() && items[end].key == items[begin].key; ++end) {
        }
        const bool differs_later = depth + 2 < kDepth && !holds_boundary(items[begin].key ^ kSigns);
        if (end - begin > 1 && differs_later) sort_from(log, items.subspan(begin, end - begin), depth + 2);
    }
}

/// The first place in [first, end) whose context sorts behind that of `position`, looked for in steps that double.
const Position* behind(LogView log, const Position* first, const Position* end, Position position) {
    const auto goes_on = [=](const Position* place) { return compare_contexts(log + *place, log + position) <= 0; };
    std::ptrdiff_t step = 1;
    while (end - first >= step && goes_on(first + step - 1)) {
        first += step;
        step *= 2;
    }
    end = end - first < step ? end : first + step - 1;
    while (first < end) {
        const Position* middle = first + (end - first) / 2;
        if (goes_on(middle)) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return first;
}

}  // namespace

int compare_contexts(const Token* a, const Token* b, int known) {
    for (int depth = known; depth < kDepth; depth += 2) {
        const std::uint64_t x = pair_before(a - depth), y = pair_before(b - depth);
        if (x != y) return compare_pairs(x, y);
        if (holds_boundary(x)) return 0;
    }
    return 0;
}

Positions sort_positions(LogView log, std::span<const Position> positions) {
    std::vector<Keyed> keyed(positions.size());
    std::ranges::transform(positions, keyed.begin(), [](Position position) { return Keyed{0, position}; });
    sort_from(log, keyed, 0);
    Positions sorted(keyed.size());
    std::ranges::transform(keyed, sorted.begin(), &Keyed::position);
    return sorted;
}

std::pair<std::size_t, std::size_t> merge_some(LogView log, std::span<const Position> older,
                                               std::span<const Position> newer, std::size_t limit, Position* out) {
    const Position* from = older.data();
    const Position* end = from + older.size();
    std::size_t left = limit, taken = 0;
    for (; taken < newer.size() && left > 0; ++taken, --left) {
        const Position* to = behind(log, from, from + std::min<std::size_t>(end - from, left), newer[taken]);
        out = std::copy(from, to, out);
        left -= static_cast<std::size_t>(to - from);
        from = to;
        if (left == 0) break;
        *out++ = newer[taken];
    }
    const std::size_t rest = std::min<std::size_t>(taken == newer.size() ? left : 0, end - from);
    std::copy_n(from, rest, out);
    return {from + rest - older.data(), taken};
}

Positions merge_runs(LogView log, std::span<const Position> older, std::span<const Position> newer) {
    Positions merged(older.size() + newer.size());
    merge_some(log, older, newer, merged.size(), merged.data());
    return merged;
}

}  // namespace agentspec
