#include "drafter.hpp"

#include <algorithm>
#include <functional>
#include <mutex>
#include <queue>
#include <stdexcept>

namespace agentspec {
namespace {

constexpr double kNegligible = 1e-4;       // path probability not worth following
constexpr double kAlmost = 1.0 - 1e-9;     // more than rounding can take away

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
    double probability;  // by rates over all depths: the better order to grow a tree in
    double corrected;    // for depth: what is told
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

/// Best-first growth of one tree, or of the chain of likeliest children.
class Growth {
public:
    Growth(const HitRates& rates, const DepthRates& depths, const DepthRates& leads, const EndRates& ends, LevelWalk& walk, std::span<const Token> context,
           std::size_t max_tokens, double floor, bool chain)
        : rates_(rates), depths_(depths), leads_(leads), ends_(ends), walk_(walk), context_(context), max_tokens_(max_tokens), floor_(floor), chain_(chain) {}

    DraftTree grow() {
        if (max_tokens_ > 0 && !context_.empty()) expand(-1, {1.0, 1.0});
        while (!open_.empty() && tree_.tokens.size() < max_tokens_) {
            const Candidate best = take();
            tree_.tokens.push_back(best.token);
            tree_.parents.push_back(best.parent);
            tree_.match_length.push_back(best.match_length);
            tree_.probabilities.push_back(static_cast<float>(best.corrected));
            tree_.sources.push_back(static_cast<std::uint8_t>(best.source));
            const int node = static_cast<int>(tree_.tokens.size()) - 1;
            const double goes_on = ends_.goes_on(best.token);
            if (tree_.tokens.size() < max_tokens_) expand(node, {best.probability * goes_on, best.corrected * goes_on});
        }
        return std::move(tree_);
    }

private:
    struct Reach {  // the two probabilities of all that leads here
        double probability, corrected;
    };

    /// Offer every continuation of a node: confidence of its level, times the misses above, times its share there.
    void expand(int node, Reach reach) {
        path_.clear();
        for (int at = node; at >= 0; at = tree_.parents[at]) path_.push_back(tree_.tokens[at]);
        std::reverse(path_.begin(), path_.end());
        query_.assign(context_, path_);
        walk_.start(query_);
        const int depth = static_cast<int>(path_.size());
        const auto worth = [&](double bound) {
            return reach.probability * bound >= kAlmost * threshold() && reach.corrected >= floor_;
        };
        while (const Level* level = walk_.next(rates_, worth)) {
            const double rate = rates_.rate(level->key), corrected = depths_.correct(depth, rate);
            const Symbol& leader = level->leader();
            const double lead = level->weight(leader) / level->weights();
            const double told_lead = lead < 1.0 ? leads_.correct(depth, lead) : 1.0;
            const double scale = reach.probability * rate / level->weights(), told = reach.corrected * corrected;
            const double told_scale = lead < 1.0 ? told * (1.0 - told_lead) / (level->weights() * (1.0 - lead)) : 0.0;
            for (const Symbol& symbol : level->symbols) {
                const double weight = level->weight(symbol), probability = scale * weight;
                if (probability < threshold()) continue;
                offer({probability, &symbol == &leader ? told * told_lead : told_scale * weight, node, symbol.token,
                       kLengths[level->key.length], level->key.source});
            }
            reach = {reach.probability * (1.0 - rate), reach.corrected * (1.0 - corrected)};
        }
    }

    void offer(const Candidate& candidate) {
        if (candidate.corrected < floor_) return;
        open_.push(candidate);
        best_.push(candidate.probability);
        if (best_.size() > (chain_ ? 1 : max_tokens_)) best_.pop();
    }

    /// The likeliest candidate; its siblings have no place in a chain.
    Candidate take() {
        const Candidate best = open_.top();
        open_.pop();
        if (chain_) open_ = {}, best_ = {};
        return best;
    }

    /// Children are never likelier than their parent, so only the max_tokens best offers can enter a tree, one a chain.
    double threshold() const { return best_.size() < (chain_ ? 1 : max_tokens_) ? kNegligible : best_.top(); }

    const HitRates& rates_;
    const DepthRates &depths_, &leads_;
    const EndRates& ends_;
    LevelWalk& walk_;
    std::span<const Token> context_;
    std::size_t max_tokens_;
    double floor_;
    bool chain_;
    DraftTree tree_;
    Query query_{std::span<const Token>{}};
    std::vector<Token> path_;
    std::priority_queue<Candidate> open_;
    std::priority_queue<double, std::vector<double>, std::greater<>> best_;
};

}  // namespace

DraftTree Drafter::draft(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::size_t max_tokens,
                         double min_probability, bool chain) const {
    const Views locked(indexes);
    const std::shared_lock lock(mutex_);
    LevelWalk walk(locked.views, locked.sources, scan_limit_);
    return Growth(rates_, depths_, leads_, ends_, walk, context, max_tokens, min_probability, chain).grow();
}

void Drafter::observe(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                      std::span<const Token> tokens) {
    const std::vector<Outcome> outcomes = look_back(indexes, context, tokens);
    const std::unique_lock lock(mutex_);
    for (std::size_t i = context.empty() ? 1 : 0; i < tokens.size(); ++i) ends_.record(tokens[i]);
    for (const auto& [key, depth, hit, lead, led] : outcomes) {
        depths_.record(depth, rates_.rate(key), hit);
        if (hit && lead < 1.0) leads_.record(depth, lead, led);
        rates_.record(key, hit);
    }
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
            const Symbol& leader = level->leader();
            const double lead = level->weight(leader) / level->weights();
            outcomes.push_back({level->key, static_cast<int>(i), hit, lead, hit && &leader == &*found});
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
    for (const std::vector<double>& more : {depths_.state(), leads_.state(), ends_.state()}) state.insert(state.end(), more.begin(), more.end());
    return state;
}

void Drafter::restore(std::span<const double> state) {
    HitRates rates;
    DepthRates depths, leads;
    EndRates ends;
    constexpr auto take = [](std::span<const double>& from, std::size_t size) {
        const auto taken = from.first(std::min(size, from.size()));
        from = from.subspan(taken.size());
        return taken;
    };
    rates.restore(take(state, HitRates::kStateSize));
    depths.restore(take(state, DepthRates::kStateSize));
    leads.restore(take(state, DepthRates::kStateSize));
    ends.restore(state);
    const std::unique_lock lock(mutex_);
    rates_ = std::move(rates);
    depths_ = std::move(depths);
    leads_ = std::move(leads);
    ends_ = std::move(ends);
}

}  // namespace agentspec
