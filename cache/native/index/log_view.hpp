// Tokens, positions of a log, and how readers find the tokens by position.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "index/sizes.hpp"

namespace agentspec {

using Token = std::int32_t;
using Position = std::uint32_t;

inline constexpr int kDepth = 64;  // contexts are ordered by at most this many tokens
inline constexpr Token kMostToken = 0x7ffffffe;  // there are order_keys behind those of every token
inline constexpr Token kBoundary = -1;  // stands before each piece of the log
inline constexpr Token kNoContext = -2;  // pads queries: equals nothing in the log
inline constexpr int kPadding = kDepth + 2;

inline constexpr std::size_t kChunk = std::size_t{1} << kChunkBits;  // positions that lie together in memory
inline constexpr std::size_t kBlock = 16;  // positions that can leave a chunk: a line of the processor's cache

/// Where the tokens of a chunk lie: in a row or, once text was taken out, block by block. kPadding tokens that stand
/// before the chunk lie before them.
struct ChunkView {
    const Token* tokens;
    const std::uint16_t* blocks;  // where each block lies, in blocks; null if all lie in a row
    const std::uint64_t* marks;  // a bit for each forgotten token
    std::uintptr_t origin = 0;  // where the log's first position would lie, if all of it lay in a row with these

    /// Of the nth chunk of a log.
    ChunkView nth(std::size_t number) const {
        return {tokens, blocks, marks, reinterpret_cast<std::uintptr_t>(tokens) - number * kChunk * sizeof(Token)};
    }
    const Token* at(std::size_t position) const {
        if (blocks == nullptr) return reinterpret_cast<const Token*>(origin + position * sizeof(Token));
        const std::size_t offset = position % kChunk;
        return tokens + blocks[offset / kBlock] * kBlock + offset % kBlock;
    }
};

/// Read access to a log, for as long as that is held.
class LogView {
public:
    LogView() = default;
    explicit LogView(const ChunkView* chunks) : chunks_(chunks) {}

    Token operator[](std::size_t position) const { return *at(position); }
    /// The end of the context of a position (not 0): the kPadding tokens before can be read from there, those behind
    /// cannot.
    const Token* operator+(std::size_t position) const { return at(position - 1) + 1; }
    /// The tokens from `begin` up to `end` at most, as far as they lie in a row.
    std::span<const Token> stretch(std::size_t begin, std::size_t end) const {
        const std::size_t row = chunks_[begin >> kChunkBits].blocks ? kBlock : kChunk;
        return {at(begin), std::min(end, (begin / row + 1) * row) - begin};
    }
    /// Whether the token there was forgotten.
    bool is_dead(std::size_t position) const {
        const std::size_t offset = position % kChunk;
        const std::uint64_t* const word = chunks_[position >> kChunkBits].marks + offset / 64;
        return __atomic_load_n(word, __ATOMIC_RELAXED) >> offset % 64 & 1;
    }

private:
    const Token* at(std::size_t position) const { return chunks_[position >> kChunkBits].at(position); }

    const ChunkView* chunks_;
};

/// The tokens before `end` that stand in the same piece, kDepth at most.
inline std::span<const Token> context_before(LogView log, std::size_t end) {
    const Token* const last = log + end;
    std::size_t size = 0;
    while (size < kDepth && last[-1 - static_cast<std::ptrdiff_t>(size)] != kBoundary) ++size;
    return {last - size, size};
}

}  // namespace agentspec
