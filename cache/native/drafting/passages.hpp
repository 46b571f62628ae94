// Passages: the likeliest continuations of a request's text as rows of one size, for a device that finds where in them
// the text has got to.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "drafting/draft_batch.hpp"

namespace agentspec {

/// `rows` rows of `width` tokens, the first `overlap` of them known text, or -1 where it is shorter.
struct PassageShape {
    std::size_t rows, overlap, width;
};

/// A token of a passage, and how likely it follows those before it, in parts of kCertain, or kUnknown.
struct Step {
    Token token, chance;
};
using Path = std::vector<Step>;
constexpr Token kCertain = 1 << 16, kUnknown = -1;

/// The end of one request's text, and its passages. For one thread at a time.
class Passages {
public:
    /// Throws std::invalid_argument for a shape without rows or without room behind the overlap.
    Passages(std::span<const Token> text, const PassageShape& shape);

    /// Follow further tokens of the text.
    void advance(std::span<const Token> fresh);
    /// Have `paths` follow, the likeliest first; each ends before its first token that is not below `vocabulary`.
    void replace(std::span<const Path> paths, Token vocabulary);

    /// The most tokens that a passage has left; 0 where the text has gone on like none of them.
    std::size_t left() const;
    std::span<const Token> context() const { return context_; }
    std::size_t count() const { return shape_.rows; }  // most passages
    /// Add the passages as `replace` made them: row after row, filled up with -1; then the chances of all their tokens,
    /// filled up with 0.
    void write(std::vector<Token>& out) const;

private:
    PassageShape shape_;
    std::vector<Token> context_, known_;  // at most kDepth tokens; those before the paths
    std::vector<Path> paths_;
    std::vector<bool> open_;  // paths that the text goes on like
    std::size_t followed_ = 0;  // tokens since `replace`
};

/// A request's part in a search: its passages, and the continuation that goes before all others, if it is not empty.
/// Without a drafter only that one is known.
struct PassageJob {
    Passages* passages;
    const Drafter* drafter;
    std::vector<SourcedIndex> indexes;
    std::vector<Token> first;
};

/// Search for what follows each text, in trees of at most `nodes` nodes, and replace its passages. Returns those of
/// all, one after the other. Throws as `draft_batch`, before any passage is changed.
std::vector<Token> find_passages(std::span<const PassageJob> jobs, std::size_t nodes, Token vocabulary);

}  // namespace agentspec
