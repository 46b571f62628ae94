#include "index/query.hpp"

#include <algorithm>
#include <stdexcept>

#include "index/shapes.hpp"

namespace agentspec {

bool are_tokens(std::span<const Token> tokens) {
    return std::ranges::all_of(tokens, [](Token token) { return token >= 0 && token <= kMostToken; });
}

void require_tokens(std::span<const Token> tokens) {
    if (!are_tokens(tokens)) throw std::invalid_argument("token ids must be from 0 to 2^31 - 2");
}

void Query::assign(std::span<const Token> context) {
    length_ = static_cast<int>(std::min<std::size_t>(context.size(), kDepth));
    Token* out = std::fill_n(buffer_, kPadding - length_, kNoContext);
    std::copy(context.end() - length_, context.end(), out);
}

bool Query::is(std::span<const Token> context) const {
    const std::span<const Token> last = context.last(std::min<std::size_t>(context.size(), kDepth));
    return std::equal(last.begin(), last.end(), end() - length_, end());
}

void Query::follow(const Query& before, Token token) {
    length_ = std::min(before.length_ + 1, kDepth);
    Token* out = std::fill_n(buffer_, kPadding - length_, kNoContext);
    *std::copy(before.end() - (length_ - 1), before.end(), out) = token;
}

void Query::take_shape_of(const Query& text) {
    length_ = std::min(text.length_, kShapeDepth);
    Token* out = std::fill_n(buffer_, kPadding - length_, kNoContext);
    std::ranges::copy(shape_of({text.end() - length_, text.end()}), out);
}

}  // namespace agentspec
