// What is searched for: the end of a context, as the log would hold it.
#pragma once

#include <span>

#include "index/sorted_run.hpp"

namespace agentspec {

/// Whether all are token ids, 0 to kMostToken. `require_tokens` throws std::invalid_argument where not.
bool are_tokens(std::span<const Token> tokens);
void require_tokens(std::span<const Token> tokens);

/// A query: up to kDepth tokens, padded so that comparisons never run over its start.
class Query {
public:
    explicit Query(std::span<const Token> context = {}) { assign(context); }
    const Token* end() const { return buffer_ + kPadding; }
    int length() const { return length_; }
    /// Whether this is the query for the last tokens of `context`.
    bool is(std::span<const Token> context) const;
    /// Make this the query for the last tokens of `context`.
    void assign(std::span<const Token> context);
    /// Make this the query `before` followed by `token`.
    void follow(const Query& before, Token token);
    /// Make this the query for the shape of what `text` is for.
    void take_shape_of(const Query& text);

private:
    Token buffer_[kPadding];
    int length_ = 0;
};

}  // namespace agentspec
