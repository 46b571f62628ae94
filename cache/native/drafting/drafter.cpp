#include "drafting/drafter.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <memory>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <utility>

namespace agentspec {
namespace {

constexpr double kNegligible = 1e-4;       // path probability not worth following
constexpr std::size_t kKeptWalks = 256;    // more are given back after a draft
constexpr std::size_t kKeptSets = 16;      // of walks, for as many threads at once
constexpr double kWorth = 0.35;  // of what the levels left hold: more than their likeliest token most often gets

SearchedIndexes searched_in(std::span<const SourcedIndex> indexes, std::uint32_t scan_limit) {
    SearchedIndexes searched{.scan_limit = scan_limit};
    for (const bool shapes : {false, true}) {
        for (const auto& [index, source] : indexes) {
            if (index->has_shapes() != shapes) continue;
            if (source < 0 || source >= kSources) throw std::invalid_argument("unknown source");
            for (const SourcedIndex& before : searched.indexes) {
                if (before.index == index) throw std::invalid_argument("an index given twice");
            }
            searched.views.emplace_back(*index);
            searched.indexes.push_back({index, source});
            searched.rated.push_back(shapes ? kShapeSource : source);
        }
        if (!shapes) searched.of_text = searched.views.size();
    }
    return searched;
}

struct Candidate {
    double probability;  // by rates over all depths: the better order to grow a tree in
    double corrected;    // for depth: what is reported
    int parent;
    Token token;
    std::int16_t match_length, source;

    /// Less likely goes later; ties by place in the tree, then by token.
    bool operator<(const Candidate& other) const {
        if (probability != other.probability) return probability < other.probability;
        if (parent != other.parent) return parent > other.parent;
        return token > other.token;
    }
};

/// A node whose levels are not all looked at.
struct Branch {
    double hope;  // for the probability of what they may offer
    int node;     // -1 for the context itself

    bool operator<(const Branch& other) const { return hope != other.hope ? hope < other.hope : node > other.node; }
};

/// The greatest first; clearing it keeps its memory.
template <class Item>
class Heap : public std::priority_queue<Item> {
public:
    void clear() { this->c.clear(); }
};

/// A lower bound of the probabilities that can be among the highest `most`, which rises with those seen.
class Threshold {
public:
    Threshold(std::size_t most, double least) : left_(most), least_(least), bin_(bin(least)) {}

    double least() const { return least_; }
    /// Take note of a probability that is at least that.
    void add(double probability) {
        const std::size_t place = bin(probability);
        ++counts_[place];
        if (place == bin_ || --left_ > 0) return;
        // All in higher bins than this one are enough: of what it holds nothing is needed.
        left_ += counts_[++bin_];
        least_ = std::bit_cast<double>(std::uint64_t{bin_ + kFirst} << kShift);
    }

private:
    static constexpr int kShift = 50;  // four bins for a factor of two
    static constexpr std::uint64_t kFirst = std::bit_cast<std::uint64_t>(kNegligible) >> kShift;
    static constexpr std::size_t kBins = (std::bit_cast<std::uint64_t>(1.0) >> kShift) - kFirst + 1;

    static std::size_t bin(double probability) {
        return (std::bit_cast<std::uint64_t>(probability) >> kShift) - kFirst;
    }

    std::size_t left_;  // how many more in higher bins are enough
    double least_;
    std::size_t bin_;  // the lowest whose probabilities count
    std::array<std::size_t, kBins + 1> counts_{};
};

/// The walks of a draft, with what they are of: who learns what came of the draft looks at the same levels.
class Walks {
public:
    /// The walk of the context, in these indexes.
    LevelWalk& start(const SearchedIndexes& searched, std::span<const Token> context) {
        forget();
        nodes_.push_back({});
        begun_ = 1;
        at(0).start(searched, context);
        for (const IndexView& view : searched.views) snapshots_.push_back(view.snapshot().number);
        rated_ = searched.rated;
        return at(0);
    }
    /// A further node of the tree, whose walk has not begun.
    void add(int parent, Token token) { nodes_.push_back({parent, token, kNotBegun}); }
    /// Begin the walk of a node whose parent's has begun. False if it has begun already.
    bool begin(int node) {
        Node& here = nodes_[node + 1];
        if (here.walk != kNotBegun) return false;
        here.walk = begun_++;
        LevelWalk& walk = at(here.walk);  // may make room: walks stay where they are
        walk.follow(of(here.parent), here.token);
        return true;
    }
    /// A walk that nobody will ask for, the nth such in a row.
    LevelWalk& pass(const LevelWalk& before, Token token, std::size_t nth) {
        LevelWalk& walk = at(begun_ + nth % 2);
        walk.follow(before, token);
        return walk;
    }
    LevelWalk& of(int node) { return walks_[nodes_[node + 1].walk]; }
    /// The node of a token behind another node, if the tree has it.
    std::optional<int> child(int node, Token token) const {
        for (std::size_t i = static_cast<std::size_t>(node + 2); i < nodes_.size(); ++i) {
            if (nodes_[i].parent == node && nodes_[i].token == token) return static_cast<int>(i) - 1;
        }
        return {};
    }
    /// Whether they are of this context, in the same snapshots of the same indexes.
    bool are_of(const SearchedIndexes& searched, std::span<const Token> context) const {
        const auto same = [](const IndexView& view, std::uint64_t number) { return view.snapshot().number == number; };
        return !snapshots_.empty() && rated_ == searched.rated && walks_[0].query().is(context) &&
               std::ranges::equal(searched.views, snapshots_, same);
    }
    bool are_free() const { return snapshots_.empty(); }
    void forget() {
        snapshots_.clear();
        nodes_.clear();
        if (walks_.size() > kKeptWalks) walks_.resize(kKeptWalks);
    }

private:
    LevelWalk& at(std::size_t place) {
        while (walks_.size() <= place) walks_.emplace_back();
        return walks_[place];
    }

    static constexpr std::size_t kNotBegun = SIZE_MAX;
    struct Node {
        int parent = -1;
        Token token = kNoContext;
        std::size_t walk = 0;
    };

    std::vector<std::uint64_t> snapshots_;  // their numbers: what these walks point to is there as long as these are
    std::vector<int> rated_;
    std::deque<LevelWalk> walks_;  // of the context, then of nodes in the order in which they begin
    std::size_t begun_ = 0;
    std::vector<Node> nodes_;  // the context, then the nodes of the tree
};

/// Walks own memory, so they are kept from one draft to the next.
class KeptWalks {
public:
    KeptWalks() { kept_.reserve(kKeptSets + 1); }

    /// Walks to begin with: those last used of what nobody will ask for, else what waited longest.
    std::unique_ptr<Walks> take() {
        const std::unique_lock lock(mutex_, std::try_to_lock);  // as in a child of a fork: it may never be free
        if (!lock) return std::make_unique<Walks>();
        const auto free = std::find_if(kept_.rbegin(), kept_.rend(), [](const auto& one) { return one->are_free(); });
        if (free != kept_.rend()) return taken(std::prev(free.base()));
        return kept_.size() < kKeptSets ? std::make_unique<Walks>() : taken(kept_.begin());
    }
    /// The walks of a draft for this context, if it was the last; nullptr else.
    std::unique_ptr<Walks> take(const SearchedIndexes& searched, std::span<const Token> context) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return nullptr;
        const auto found = std::ranges::find_if(kept_, [&](const auto& one) { return one->are_of(searched, context); });
        return found == kept_.end() ? nullptr : taken(found);
    }
    void give_back(std::unique_ptr<Walks> walks) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock && kept_.size() < kKeptSets) kept_.push_back(std::move(walks));
    }

private:
    std::unique_ptr<Walks> taken(std::vector<std::unique_ptr<Walks>>::iterator place) {
        auto walks = std::move(*place);
        kept_.erase(place);
        return walks;
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<Walks>> kept_;
};

KeptWalks& kept_walks() {
    static KeptWalks& walks = *new KeptWalks;  // never destroyed: threads may draft while the process ends
    return walks;
}

/// Best-first growth of one tree, or of the chain of likeliest children. Levels wait until nothing found so far is
/// likelier than what they may be hoped to offer: most are never looked at.
class Growth {
public:
    Growth(const Learned& learned, std::size_t max_tokens, double floor, bool chain, const Deadline& until)
        : learned_(learned), max_tokens_(max_tokens), floor_(floor), chain_(chain), until_(until) {
        reserve(std::min(max_tokens, kKeptWalks));
    }
    Growth(const Growth&) = delete;
    ~Growth() { kept_walks().give_back(std::move(walks_)); }

    DraftTree grow(const SearchedIndexes& searched, std::span<const Token> context) {
        if (max_tokens_ == 0 || context.empty()) return {};
        walks_->start(searched, context);
        reaches_.push_back({1.0, 1.0, 0});
        wait(-1);
        while (tree_.tokens.size() < max_tokens_ && !over() && find()) add(take());
        return std::move(tree_);
    }

private:
    struct Reach {  // the two probabilities of all that leads to a node and to none of the children offered so far
        double probability, corrected;
        int depth;
    };

    bool over() const { return until_ && std::chrono::steady_clock::now() >= *until_; }
    double best() const { return open_.empty() ? kNegligible : open_.top().probability; }

    void reserve(std::size_t nodes) {
        for (auto* column : {&tree_.tokens, &tree_.parents, &tree_.match_length}) column->reserve(nodes);
        tree_.probabilities.reserve(nodes);
        tree_.sources.reserve(nodes);
        reaches_.reserve(nodes + 1);
    }

    /// Look at levels until none may be hoped to hold anything as likely as the likeliest candidate. False where there
    /// is no candidate.
    bool find() {
        while (!branches_.empty() && branches_.top().hope >= best()) {
            const int node = branches_.top().node;
            branches_.pop();
            if (!walks_->begin(node)) expand(node);
            wait(node);
        }
        return !open_.empty();
    }

    /// Leave the levels that a node has left until they are worth it.
    void wait(int node) {
        const Reach& reach = reaches_[node + 1];
        const LevelWalk& walk = walks_->of(node);
        const double rest = learned_.rests.rate(walk.rank(), walk.offered());
        const double hope = reach.probability * (kWorth * rest);
        if (hope >= kNegligible && reach.corrected * rest >= floor_) branches_.push({hope, node});
    }

    /// Offer the continuations in a node's next level: its confidence, times the misses above, times each one's share.
    void expand(int node) {
        Reach& reach = reaches_[node + 1];
        LevelWalk& walk = walks_->of(node);
        const Level* level = walk.advance();
        if (level == nullptr) return;
        const double rate = learned_.rates.rate(level->key);
        const double corrected = learned_.depths[level->key.is_own()].correct(reach.depth, rate);
        const Symbol& leader = walk.leader(*level);
        const double lead = level->weight(leader) / level->weights();
        const double reported_lead = lead < 1.0 ? learned_.leads.correct(reach.depth, lead) : 1.0;
        const double scale = reach.probability * rate / level->weights(), reported = reach.corrected * corrected;
        const double reported_scale =
            lead < 1.0 ? reported * (1.0 - reported_lead) / (level->weights() * (1.0 - lead)) : 0.0;
        const auto match_length = static_cast<std::int16_t>(kLengths[level->key.length]);
        const auto source = static_cast<std::int16_t>(walk.source(*level));
        for (const Symbol& symbol : walk.symbols(*level)) {
            const double weight = level->weight(symbol), probability = scale * weight;
            if (probability < least_.least()) continue;
            const double reported_here = &symbol == &leader ? reported * reported_lead : reported_scale * weight;
            if (reported_here < floor_) continue;
            if (!chain_) least_.add(probability);
            open_.push({probability, reported_here, node, symbol.token, match_length, source});
        }
        reach.probability *= 1.0 - rate;
        reach.corrected *= 1.0 - corrected;
    }

    /// The likeliest candidate; its siblings have no place in a chain.
    Candidate take() {
        const Candidate best = open_.top();
        open_.pop();
        if (chain_) open_.clear(), branches_.clear();
        return best;
    }

    void add(const Candidate& best) {
        const int node = static_cast<int>(tree_.tokens.size());
        tree_.tokens.push_back(best.token);
        tree_.parents.push_back(best.parent);
        tree_.match_length.push_back(best.match_length);
        tree_.probabilities.push_back(static_cast<float>(best.corrected));
        tree_.sources.push_back(static_cast<std::uint8_t>(best.source));
        if (tree_.tokens.size() == max_tokens_) return;
        const double goes_on = learned_.ends.goes_on(best.token);
        reaches_.push_back({best.probability * goes_on, best.corrected * goes_on, reaches_[best.parent + 1].depth + 1});
        walks_->add(best.parent, best.token);
        branches_.push({reaches_.back().probability * kWorth, node});  // at most: its levels are not known yet
    }

    const Learned& learned_;
    std::size_t max_tokens_;
    double floor_;
    bool chain_;
    Deadline until_;
    DraftTree tree_;
    std::vector<Reach> reaches_;  // of the context and of each node
    std::unique_ptr<Walks> walks_ = kept_walks().take();  // likewise
    Threshold least_{max_tokens_, kNegligible};
    Heap<Candidate> open_;
    Heap<Branch> branches_;
};

}  // namespace

std::size_t path_length(std::span<const Token> tokens, std::span<const Token> parents, std::span<const Token> output) {
    Token node = -1;
    for (std::size_t count = 0; count < output.size(); ++count) {
        std::size_t child = static_cast<std::size_t>(node + 1);
        while (child < tokens.size() && (parents[child] != node || tokens[child] != output[count])) ++child;
        if (child >= tokens.size()) return count;
        node = static_cast<Token>(child);
    }
    return output.size();
}

DraftTree Drafter::draft(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::size_t max_tokens,
                         double min_probability, bool chain, const Deadline& until) const {
    require_tokens(context.last(std::min<std::size_t>(context.size(), kDepth)));
    const SearchedIndexes searched = searched_in(indexes, scan_limit_);
    std::optional<Reading> reading(*this);
    DraftTree tree = Growth(learned_, max_tokens, min_probability, chain, until).grow(searched, context);
    reading.reset();
    if (waiting_bytes_ > 0) const_cast<Drafter*>(this)->take_in(false);
    return tree;
}

void Drafter::observe(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                      std::span<const Token> tokens) {
    learn(look_back(indexes, context, tokens));
}

void Drafter::learn(Lesson lesson) {
    for (const auto& [index, generation, positions] : lesson.hits) {
        if (!positions.empty()) index->record_hits(generation, positions);
    }
    lesson.hits = {};
    {
        const std::lock_guard lock(arriving_);
        waiting_.push_back(std::move(lesson));
        waiting_bytes_ += waiting_.back().bytes();
    }
    take_in(waiting_bytes_ > kMostWaiting);
}

/// Learn what waits. Unless `wait`, it goes on waiting while drafts are made.
void Drafter::take_in(bool wait) {
    std::unique_lock learning(mutex_, std::defer_lock);
    std::unique_lock arriving(arriving_, std::defer_lock);
    if (wait) std::lock(learning, arriving);
    if (!wait && std::try_lock(learning, arriving) >= 0) return;
    const std::vector<Lesson> lessons = std::exchange(waiting_, {});
    waiting_bytes_ = 0;
    arriving.unlock();
    for (const Lesson& lesson : lessons) take_in(lesson);
}

void Drafter::take_in(const Lesson& lesson) {
    for (const Token token : lesson.tokens) learned_.ends.record(token);
    for (std::size_t i = 0; i < lesson.outcomes.size();) i = take_in_rest(lesson.outcomes, i);
    for (const auto& [key, depth, hit, lead, led] : lesson.outcomes) {
        learned_.depths[key.is_own()].record(depth, learned_.rates.rate(key), hit);
        if (hit && lead < 1.0) learned_.leads.record(depth, lead, led);
        learned_.rates.record(key, hit);
    }
    if (lesson.end) learned_.ends.record_end(*lesson.end);
}

/// Learn from the levels consulted for the token whose first outcome is the nth. Returns where the next token's begin.
std::size_t Drafter::take_in_rest(std::span<const Outcome> outcomes, std::size_t nth) {
    std::size_t end = nth + 1;
    while (end < outcomes.size() && outcomes[end].depth == outcomes[nth].depth) ++end;
    const auto& [last, depth, hit, lead, led] = outcomes[end - 1];
    for (int high = outcomes[nth].key.rank(); nth < end; ++nth) {
        const LevelKey& key = outcomes[nth].key;
        learned_.rests.record(high, key.rank(), key.excluded, hit);
        high = key.rank();
    }
    if (!hit) learned_.rests.record(last.rank(), 1, last.excluded + last.distinct, false);
    return end;
}

/// The levels that were consulted for each token, down to the one that held it. What was learned plays no part, so
/// others draft meanwhile.
Drafter::Lesson Drafter::look_back(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                                   std::span<const Token> tokens) const {
    require_tokens(context.last(std::min<std::size_t>(context.size(), kDepth)));
    require_tokens(tokens);
    const SearchedIndexes searched = searched_in(indexes, scan_limit_);
    Lesson lesson;
    lesson.tokens.assign(tokens.begin() + (context.empty() && !tokens.empty() ? 1 : 0), tokens.end());
    for (std::size_t i = 0; i < searched.of_text; ++i) {
        lesson.hits.push_back({searched.indexes[i].index, searched.views[i].generation(), {}});
    }
    auto walks = kept_walks().take(searched, context);
    if (!walks) {
        walks = kept_walks().take();
        walks->start(searched, context);
    }
    std::optional<int> node = -1;  // none: none that the draft has
    LevelWalk* walk = &walks->of(-1);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0) {
            if (node) node = walks->child(*node, tokens[i - 1]);
            if (node) walks->begin(*node);
            walk = node ? &walks->of(*node) : &walks->pass(*walk, tokens[i - 1], i);
        }
        walk->resume(searched);
        for (std::size_t nth = 0; const Level* level = walk->level(nth); ++nth) {
            const std::span<const Symbol> symbols = walk->symbols(*level);
            const auto found = std::ranges::find(symbols, tokens[i], &Symbol::token);
            const bool hit = found != symbols.end();
            const Symbol& leader = walk->leader(*level);
            const double lead = level->weight(leader) / level->weights();
            lesson.outcomes.push_back({level->key, static_cast<int>(i), hit, lead, hit && &leader == &*found});
            if (!hit) continue;
            const auto view = static_cast<std::size_t>(level->view);
            if (view < searched.of_text) lesson.hits[view].positions.push_back(found->newest);
            break;
        }
    }
    walks->forget();
    kept_walks().give_back(std::move(walks));
    return lesson;
}

void Drafter::observe_end(Token token) {
    Lesson lesson;
    lesson.end = token;
    learn(std::move(lesson));
}

std::size_t Drafter::memory_bytes() const {
    const std::shared_lock lock(mutex_);
    return sizeof(*this) + learned_.ends.counts().capacity() * sizeof(EndRates::Count) + waiting_bytes_;
}

void Drafter::keep_ends(std::span<const Token> tokens) {
    take_in(true);
    const std::unique_lock lock(mutex_);
    learned_.ends.keep(tokens);
}

std::vector<Token> Drafter::ends() const {
    const std::shared_lock lock(mutex_);
    std::vector<Token> tokens;
    for (const EndRates::Count& one : learned_.ends.counts()) tokens.push_back(one.token);
    return tokens;
}

std::vector<std::uint8_t> Drafter::state() {
    take_in(true);
    const std::unique_lock lock(mutex_);
    std::vector<std::uint8_t> state;
    const auto add = [&](const auto& items) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(items.data());
        state.insert(state.end(), bytes, bytes + items.size() * sizeof(items[0]));
    };
    for (const auto& tallies : learned_.tallies()) add(tallies);
    add(learned_.ends.counts());
    return state;
}

void Drafter::restore(std::span<const std::uint8_t> state) {
    const std::unique_lock lock(mutex_);
    std::size_t size = 0;
    for (const auto& tallies : learned_.tallies()) size += tallies.size_bytes();
    const std::size_t ends = (state.size() - size) / sizeof(EndRates::Count);
    if (state.size() < size || ends > EndRates::kMost || size + ends * sizeof(EndRates::Count) != state.size())
        throw std::domain_error("a learned state of another length");
    const auto take = [&](const auto& items, std::size_t bytes) {
        std::ranges::copy(state.first(bytes), reinterpret_cast<std::uint8_t*>(items.data()));
        state = state.subspan(bytes);
    };
    for (const auto& tallies : learned_.tallies()) take(tallies, tallies.size_bytes());
    learned_.ends.counts().resize(ends);
    take(std::span(learned_.ends.counts()), state.size());
    learned_.rests.settle();
}

}  // namespace agentspec
