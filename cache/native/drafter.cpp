#include "drafter.hpp"

#include <algorithm>
#include <functional>
#include <mutex>
#include <queue>
#include <stdexcept>

namespace agentspec {
namespace {

constexpr double kRecencyBonus = 1.0;      // extra occurrences credited to a level's most recent symbol
constexpr double kNegligible = 1e-4;       // path probability not worth following

/// The indexes of one call, locked in one global order so that readers and waiting writers cannot form a ring.
class Views {
public:
    explicit Views(std::span<const SourcedIndex> indexes) {
        for (const SourcedIndex& sourced : indexes) {
            if (sourced.source < 0 || sourced.source >= kSources) throw std::invalid_argument("unknown source");
            views.emplace_back(*sourced.index);
            sources.push_back(sourced.source);
        }
        std::vector<IndexView> order(views);
        std::sort(order.begin(), order.end(), [](const IndexView& a, const IndexView& b) {
            return std::less<>()(a.index(), b.index());
        });
        for (std::size_t i = 0; i < order.size(); ++i) {
            if (i > 0 && order[i].index() == order[i - 1].index()) throw std::invalid_argument("an index given twice");
            locks_.push_back(order[i].lock());
        }
    }

    std::vector<IndexView> views;
    std::vector<int> sources;

private:
    std::vector<std::shared_lock<std::shared_mutex>> locks_;
};

struct Candidate {
    double probability;
    int parent;
    Token token;
    int match_length, source;

    /// Less likely goes later; ties by place in the tree, then by token.
    bool operator<(const Candidate& other) const {
        if (probability != other.probability) return probability < other.probability;
        if (parent != other.parent) return parent > other.parent;
        return token > other.token;
    }
};

/// Best-first growth of one tree.
class Growth {
public:
    Growth(const HitRates& rates, const EndRates& ends, LevelWalk& walk, std::span<const Token> context,
           std::size_t max_tokens, double floor)
        : rates_(rates), ends_(ends), walk_(walk), context_(context), max_tokens_(max_tokens), floor_(std::max(floor, kNegligible)) {}

    DraftTree grow() {
        if (max_tokens_ > 0 && !context_.empty()) expand(-1, 1.0);
        while (!open_.empty() && tree_.tokens.size() < max_tokens_) {
            const Candidate best = open_.top();
            open_.pop();
            tree_.tokens.push_back(best.token);
            tree_.parents.push_back(best.parent);
            tree_.match_length.push_back(best.match_length);
            tree_.probabilities.push_back(static_cast<float>(best.probability));
            tree_.sources.push_back(static_cast<std::uint8_t>(best.source));
            const int node = static_cast<int>(tree_.tokens.size()) - 1;
            if (tree_.tokens.size() < max_tokens_) expand(node, best.probability * ends_.goes_on(best.token));
        }
        return std::move(tree_);
    }

private:
    /// Offer every continuation of a node: confidence of its level, times the misses above, times its share there.
    void expand(int node, double reach) {
        path_.clear();
        for (int at = node; at >= 0; at = tree_.parents[at]) path_.push_back(tree_.tokens[at]);
        std::reverse(path_.begin(), path_.end());
        query_.assign(context_, path_);
        walk_.start(query_);
        while (const Level* level = reach >= threshold() ? walk_.next() : nullptr) {
            const double confidence = rates_.rate(level->key);
            const double scale = reach * confidence / (level->key.total + kRecencyBonus);
            for (const Symbol& symbol : level->symbols) {
                const double share = symbol.count + (symbol.newest == level->newest ? kRecencyBonus : 0.0);
                offer({scale * share, node, symbol.token, kLengths[level->key.length], level->key.source});
            }
            reach *= 1.0 - confidence;
        }
    }

    void offer(const Candidate& candidate) {
        if (candidate.probability < threshold()) return;
        open_.push(candidate);
        best_.push(candidate.probability);
        if (best_.size() > max_tokens_) best_.pop();
    }

    /// Children are never likelier than their parent, so only the max_tokens best offers can enter the tree.
    double threshold() const { return best_.size() < max_tokens_ ? floor_ : best_.top(); }

    const HitRates& rates_;
    const EndRates& ends_;
    LevelWalk& walk_;
    std::span<const Token> context_;
    std::size_t max_tokens_;
    double floor_;
    DraftTree tree_;
    Query query_{std::span<const Token>{}};
    std::vector<Token> path_;
    std::priority_queue<Candidate> open_;
    std::priority_queue<double, std::vector<double>, std::greater<>> best_;
};

}  // namespace

DraftTree Drafter::draft(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::size_t max_tokens,
                         double min_probability) const {
    const Views locked(indexes);
    const std::shared_lock lock(mutex_);
    LevelWalk walk(locked.views, locked.sources, scan_limit_);
    return Growth(rates_, ends_, walk, context, max_tokens, min_probability).grow();
}

void Drafter::observe(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                      std::span<const Token> tokens) {
    const std::vector<Outcome> outcomes = look_back(indexes, context, tokens);
    const std::unique_lock lock(mutex_);
    for (std::size_t i = context.empty() ? 1 : 0; i < tokens.size(); ++i) ends_.record(tokens[i]);
    for (const auto& [key, hit] : outcomes) rates_.record(key, hit);
}

/// The levels that were asked for each token, down to the one that held it. What was learned plays no part, so others
/// draft meanwhile.
std::vector<Drafter::Outcome> Drafter::look_back(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                                                 std::span<const Token> tokens) const {
    const Views locked(indexes);
    LevelWalk walk(locked.views, locked.sources, scan_limit_);
    Query query(context);
    std::vector<Outcome> outcomes;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        query.assign(context, tokens.first(i));
        if (query.length() == 0) continue;
        walk.start(query);
        while (const Level* level = walk.next()) {
            const auto found = std::find_if(level->symbols.begin(), level->symbols.end(),
                                            [&](const Symbol& symbol) { return symbol.token == tokens[i]; });
            const bool hit = found != level->symbols.end();
            outcomes.push_back({level->key, hit});
            if (!hit) continue;
            locked.views[level->view].touch(found->newest);
            break;
        }
    }
    return outcomes;
}

void Drafter::observe_end(Token token) {
    const std::unique_lock lock(mutex_);
    ends_.record_end(token);
}

std::vector<double> Drafter::state() const {
    const std::shared_lock lock(mutex_);
    std::vector<double> state = rates_.state();
    const std::vector<double> ends = ends_.state();
    state.insert(state.end(), ends.begin(), ends.end());
    return state;
}

void Drafter::restore(std::span<const double> state) {
    HitRates rates;
    EndRates ends;
    const std::size_t split = std::min(state.size(), HitRates::kStateSize);
    rates.restore(state.first(split));
    ends.restore(state.subspan(split));
    const std::unique_lock lock(mutex_);
    rates_ = std::move(rates);
    ends_ = std::move(ends);
}

}  // namespace agentspec
