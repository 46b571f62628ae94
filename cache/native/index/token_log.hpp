// The log of an index: chunks of tokens, filled one after the other, with a mark for each forgotten token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/log_view.hpp"
#include "index/pages.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// Up to kChunk tokens at neighbouring positions, behind the kPadding tokens before them, if there are such. One thread
/// appends and marks; others read what was there before.
class LogChunk {
public:
    /// Room for `capacity` tokens, `padded` if others stand before them.
    LogChunk(std::size_t capacity, bool padded);
    /// kChunk tokens in a mapped file.
    LogChunk(std::shared_ptr<const Mapping> file, const Token* tokens, bool padded);
    /// Those blocks of a full chunk for which `needed` holds. Both have the same marks.
    LogChunk(const LogChunk& from, const std::vector<bool>& needed);
    ~LogChunk();
    LogChunk(const LogChunk&) = delete;
    LogChunk& operator=(const LogChunk&) = delete;

    ChunkView view() const { return {tokens_, blocks_, marks_.get()}; }
    std::size_t capacity() const { return capacity_; }
    /// How many places of its positions there are.
    std::size_t present() const { return present_; }
    bool is_mapped() const { return file_ != nullptr; }
    std::size_t memory_bytes() const;

    /// Write what stands before the chunk.
    void pad(const Token* end) { room_.assign(end - before_, end); }
    /// Append tokens behind `size` others.
    void append(std::size_t size, std::span<const Token> tokens);
    /// Mark the tokens at offsets `begin` to `end` as forgotten, the latter excluded.
    void bury(std::size_t begin, std::size_t end);
    /// Take over the marks of another chunk, which is no longer than this.
    void take_marks(const LogChunk& other);

private:
    std::size_t words() const { return capacity_ / 64 + 1; }

    std::shared_ptr<const Mapping> file_;
    std::size_t capacity_, present_, before_;
    PagedVector<Token> room_;  // what stands before, and the tokens; it never grows beyond its capacity
    std::vector<std::uint16_t> table_;  // of the blocks
    std::shared_ptr<std::uint64_t[]> marks_;
    const Token* tokens_;
    const std::uint16_t* blocks_ = nullptr;
};

/// One thread appends and buries at a time; others read meanwhile what was appended before. No token ever changes. Room
/// is made, and text taken out, by another log that shares all other chunks with this one.
class TokenLog {
public:
    TokenLog() = default;
    /// The `size` tokens at byte `offset` of a mapped file.
    TokenLog(const std::shared_ptr<const Mapping>& file, std::size_t offset, std::size_t size);

    /// The same tokens with room for `more`.
    std::shared_ptr<TokenLog> with_room(std::size_t more) const;
    /// The same tokens but those that `chunk` lacks, which takes the place of the nth.
    std::shared_ptr<TokenLog> with_chunk(std::size_t nth, std::shared_ptr<LogChunk> chunk) const;

    LogView view() const { return LogView(views_.data()); }
    Token operator[](std::size_t position) const { return view()[position]; }
    const LogChunk& chunk(std::size_t nth) const { return *chunks_[nth]; }
    std::size_t chunk_count() const { return chunks_.size(); }
    std::size_t capacity() const;
    /// For the thread that appends; readers know how far they may read.
    std::size_t size() const { return size_; }
    /// For that thread, too.
    std::size_t memory_bytes() const;
    std::size_t mapped_bytes() const;

    /// Append tokens, which must fit into the capacity.
    void append(std::span<const Token> tokens);
    void push_back(Token token) { append({&token, 1}); }
    /// Take back what was appended behind `size` tokens, before any reader knows of it.
    void cut(std::size_t size) { size_ = size; }
    /// Mark tokens as forgotten.
    void bury(std::size_t begin, std::size_t end);
    /// How many places were taken out.
    std::size_t discarded() const;
    /// Whether any token is forgotten.
    bool any_dead() const { return __atomic_load_n(&any_dead_, __ATOMIC_ACQUIRE); }
    bool is_dead(std::size_t position) const { return any_dead() && view().is_dead(position); }

private:
    void set(std::size_t nth, std::shared_ptr<LogChunk> chunk);
    template <class Count>
    std::size_t sum(Count&& count) const {
        std::size_t total = 0;
        for (const auto& chunk : chunks_) total += count(*chunk);
        return total;
    }

    std::vector<std::shared_ptr<LogChunk>> chunks_;
    std::vector<ChunkView> views_;  // of them
    std::size_t size_ = 0;
    bool any_dead_ = false;
};

}  // namespace agentspec
