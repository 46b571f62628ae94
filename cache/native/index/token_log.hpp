// The log of an index: one array of tokens at an address that never changes, with a mark for each forgotten token.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/account.hpp"
#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// One thread appends and buries at a time; others read meanwhile what was appended before. No token ever changes.
class TokenLog {
public:
    /// An empty log of at most `capacity` tokens. A large one only reserves addresses, and takes memory as it grows.
    TokenLog(std::size_t capacity, std::shared_ptr<Account> account);
    /// The `size` tokens at byte `offset` of a mapped file. Nothing else may lie after them.
    TokenLog(std::shared_ptr<const Mapping> file, std::size_t offset, std::size_t size,
             std::shared_ptr<Account> account);
    ~TokenLog();
    TokenLog(const TokenLog&) = delete;
    TokenLog& operator=(const TokenLog&) = delete;

    /// An empty log with room for `needed` tokens, and to grow.
    static std::shared_ptr<TokenLog> with_room(std::size_t needed, const std::shared_ptr<Account>& account);
    /// The same tokens and marks in memory of their own, with room for `more` and to grow.
    std::shared_ptr<TokenLog> grown(std::size_t more, const std::shared_ptr<Account>& account) const;

    const Token* data() const { return data_; }
    Token operator[](std::size_t position) const { return data_[position]; }
    std::size_t capacity() const { return capacity_; }
    /// For the thread that appends; readers know how far they may read.
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return charge_.bytes(); }
    std::size_t mapped_bytes() const { return mapped_ * sizeof(Token); }

    /// Append tokens, which must fit into the capacity.
    void append(std::span<const Token> tokens);
    void push_back(Token token) { append({&token, 1}); }
    /// Mark tokens as forgotten.
    void bury(std::size_t begin, std::size_t end);
    /// Whether pages that nobody needs can go by themselves: not those of a file, nor a small array's from the heap.
    bool can_discard() const;
    /// Give those pages back to the system that lie inside. Nobody may read the tokens from `begin` to `end` any more.
    void discard(std::size_t begin, std::size_t end);
    /// How many tokens lay in pages that are given back.
    std::size_t discarded() const { return discarded_; }
    /// Whether any token is forgotten.
    bool any_dead() const { return dead_.load(std::memory_order_acquire) != nullptr; }
    bool is_dead(std::size_t position) const {
        const std::uint64_t* dead = dead_.load(std::memory_order_acquire);
        return dead && __atomic_load_n(dead + position / 64, __ATOMIC_RELAXED) >> position % 64 & 1;
    }

private:
    std::size_t dead_bytes() const { return (capacity_ / 64 + 1) * sizeof(std::uint64_t); }
    void charge();
    bool is_gone(std::size_t page) const { return page < gone_.size() && gone_[page]; }
    std::size_t alike(std::size_t page, std::size_t last) const;
    void let_go(std::size_t first, std::size_t last);

    std::shared_ptr<const Mapping> file_;
    Token* data_;
    std::size_t size_ = 0, capacity_;
    std::size_t mapped_ = 0;  // tokens that came from the file
    std::vector<bool> gone_;  // the pages that are given back, as far as there are any
    std::size_t discarded_ = 0;  // tokens that lay in them
    std::size_t gone_marks_ = 0;  // bytes of their marks in pages that are given back, too
    std::atomic<std::uint64_t*> dead_{nullptr};  // a bit each; none before the first token is forgotten
    Charge charge_;
};

}  // namespace agentspec
