#include "drafting/passages.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace agentspec {
namespace {

constexpr Token kNoToken = -1;

template <class Items>
void keep_last(Items& items, std::size_t count) {
    if (items.size() > count) items.erase(items.begin(), items.end() - static_cast<std::ptrdiff_t>(count));
}

/// At most `count` paths of a draft tree, from the root to a leaf, that between them hold its likeliest nodes. Each
/// path begins with the likeliest node that no path holds yet, after that node's ancestors, and goes on to the
/// likeliest child: a tree lists its nodes by probability within each level, so that a first child is the likeliest.
std::vector<Path> likeliest_paths(const DraftTree& tree, std::size_t count) {
    const auto nodes = static_cast<Token>(tree.tokens.size());
    std::vector<Token> first_child(tree.tokens.size(), kNoToken);
    for (Token node = nodes; node-- > 0;) {
        if (tree.parents[node] >= 0) first_child[tree.parents[node]] = node;
    }
    std::vector<bool> held(tree.tokens.size());
    const auto chance = [&](Token node) {
        const Token above = tree.parents[node];
        return kCertain * tree.probabilities[node] / (above < 0 ? 1.0f : tree.probabilities[above]);
    };
    std::vector<Path> paths;
    for (Token node = 0; node < nodes && paths.size() < count; ++node) {
        if (held[node]) continue;
        std::vector<Token> steps;
        for (Token above = node; above >= 0; above = tree.parents[above]) steps.push_back(above);
        std::ranges::reverse(steps);
        for (Token below = first_child[node]; below >= 0; below = first_child[below]) steps.push_back(below);
        Path& path = paths.emplace_back();
        for (const Token step : steps) {
            held[step] = true;
            path.push_back({tree.tokens[step], static_cast<Token>(chance(step))});
        }
    }
    return paths;
}

}  // namespace

Passages::Passages(std::span<const Token> text, const PassageShape& shape) : shape_(shape) {
    if (shape.rows == 0 || shape.width <= shape.overlap) throw std::invalid_argument("passages need room for tokens");
    const std::size_t kept = std::min<std::size_t>(text.size(), kDepth);
    context_.assign(text.end() - static_cast<std::ptrdiff_t>(kept), text.end());
}

void Passages::advance(std::span<const Token> fresh) {
    for (std::size_t row = 0; row < paths_.size(); ++row) {
        const std::span<const Step> path = paths_[row];
        open_[row] = open_[row] && path.size() >= followed_ + fresh.size() &&
                     std::ranges::equal(fresh, path.subspan(followed_, fresh.size()), {}, {}, &Step::token);
    }
    followed_ += fresh.size();
    context_.insert(context_.end(), fresh.begin(), fresh.end());
    keep_last(context_, kDepth);
}

void Passages::replace(std::span<const Path> paths, Token vocabulary) {
    paths_.assign(paths.begin(), paths.begin() + static_cast<std::ptrdiff_t>(std::min(paths.size(), shape_.rows)));
    for (Path& path : paths_) {
        const auto unknown = std::ranges::find_if(path, [&](Token token) { return token >= vocabulary; }, &Step::token);
        const auto ahead = static_cast<std::ptrdiff_t>(shape_.width - shape_.overlap);
        path.erase(path.begin() + std::min(unknown - path.begin(), ahead), path.end());
    }
    known_ = context_;
    keep_last(known_, shape_.overlap);
    open_.assign(paths_.size(), true);
    followed_ = 0;
}

std::size_t Passages::left() const {
    std::size_t most = 0;
    for (std::size_t row = 0; row < paths_.size(); ++row) {
        if (open_[row]) most = std::max(most, paths_[row].size() - followed_);
    }
    return most;
}

void Passages::write(std::vector<Token>& out) const {
    const std::size_t before = out.size(), size = shape_.rows * shape_.width;
    out.resize(before + size, kNoToken);
    out.resize(before + 2 * size, 0);
    for (std::size_t row = 0; row < paths_.size(); ++row) {
        const auto path = out.begin() + static_cast<std::ptrdiff_t>(before + row * shape_.width + shape_.overlap);
        std::ranges::copy_backward(known_, path);
        std::ranges::transform(paths_[row], path, &Step::token);
        std::ranges::transform(paths_[row], path + static_cast<std::ptrdiff_t>(size), &Step::chance);
    }
}

std::vector<Token> find_passages(std::span<const PassageJob> jobs, std::size_t nodes, Token vocabulary) {
    std::vector<DraftJob> searches;
    for (const PassageJob& job : jobs) {
        if (job.drafter) searches.push_back({job.drafter, job.indexes, job.passages->context(), nodes, 0.0});
    }
    const std::vector<DraftTree> trees = draft_batch(searches);
    std::vector<Token> found;
    auto tree = trees.begin();
    for (const PassageJob& job : jobs) {
        std::vector<Path> paths;
        if (job.drafter) paths = likeliest_paths(*tree++, job.passages->count());
        if (!job.first.empty()) {
            Path& first = *paths.emplace(paths.begin());
            for (const Token token : job.first) first.push_back({token, kUnknown});
        }
        job.passages->replace(paths, vocabulary);
        job.passages->write(found);
    }
    return found;
}

}  // namespace agentspec
