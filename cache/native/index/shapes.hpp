// Text by its shape: common tokens as they are, and every other as one and the same. A shape comes back where names and
// numbers differ. Vocabularies of byte pairs number their tokens by how common they are.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "index/log_view.hpp"

namespace agentspec {

inline constexpr Token kCommonTokens = 600;  // the bytes, and the pairs that were merged first
inline constexpr int kShapeDepth = 8;  // contexts of shapes are looked for by at most this many tokens
inline constexpr Token kRare = kMostToken;  // stands for each of the others, and is never drafted

inline Token shape_of(Token token) { return token < kCommonTokens ? token : kRare; }
inline std::vector<Token> shape_of(std::span<const Token> text) {
    std::vector<Token> shape(text.size());
    std::ranges::transform(text, shape.begin(), [](Token token) { return shape_of(token); });
    return shape;
}

}  // namespace agentspec
