// The log of an index: chunks of tokens, filled one after the other, with a mark for each forgotten token.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "index/account.hpp"
#include "index/log_chunk.hpp"
#include "index/log_view.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// One thread appends and buries at a time; others read meanwhile what was appended before. No token ever changes. Room
/// is made, and text taken out, by another log that shares all other chunks with this one.
class TokenLog {
public:
    explicit TokenLog(std::shared_ptr<Account> account);
    /// The `size` tokens at byte `offset` of a mapped file.
    TokenLog(const std::shared_ptr<const Mapping>& file, std::size_t offset, std::size_t size,
             std::shared_ptr<Account> account);

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
    std::size_t memory_bytes() const { return bytes_.load(std::memory_order_relaxed); }
    std::size_t mapped_bytes() const;

    /// Append tokens, which must fit into the capacity.
    void append(std::span<const Token> tokens);
    void push_back(Token token) { append({&token, 1}); }
    /// Take back what was appended behind `size` tokens, before any reader knows of it.
    void cut(std::size_t size) { size_ = size; }
    /// Have the memory for marks, so that `bury` needs none.
    void make_marks(std::size_t begin, std::size_t end);
    /// Mark tokens as forgotten.
    void bury(std::size_t begin, std::size_t end);
    /// How many places were taken out.
    std::size_t discarded() const { return discarded_; }
    /// Whether any token is forgotten.
    bool any_dead() const { return any_dead_.load(std::memory_order_acquire); }
    bool is_dead(std::size_t position) const { return any_dead() && view().is_dead(position); }

private:
    TokenLog(const TokenLog& other);
    void set(std::size_t nth, std::shared_ptr<LogChunk> chunk);
    void grow_first(std::size_t capacity);

    std::shared_ptr<Account> account_;
    std::vector<std::shared_ptr<LogChunk>> chunks_;
    std::vector<ChunkView> views_;  // of them
    std::size_t size_ = 0;
    std::size_t discarded_ = 0;
    std::atomic<std::size_t> bytes_{0};  // of all chunks
    std::atomic<bool> any_dead_{false};
    Charge charge_;  // for the table of chunks
};

}  // namespace agentspec
