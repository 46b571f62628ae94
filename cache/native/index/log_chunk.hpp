// A chunk of a log: tokens at neighbouring positions, with a mark for each forgotten one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/account.hpp"
#include "index/log_view.hpp"
#include "index/pages.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// The marks of a chunk, which its copies share. One thread marks; others may ask meanwhile.
class ChunkMarks {
public:
    ChunkMarks(std::size_t size, const std::shared_ptr<Account>& account) : size_(size), charge_(account, 0) {}
    ~ChunkMarks() { delete[] marks_.load(); }
    ChunkMarks(const ChunkMarks&) = delete;
    ChunkMarks& operator=(const ChunkMarks&) = delete;

    const Marks& marks() const { return marks_; }
    /// The array, which is made unless it is there.
    std::uint64_t* make();
    void set(std::size_t begin, std::size_t end);
    /// Take over the marks of another chunk, which is no longer than this.
    void take(const ChunkMarks& other);
    std::size_t memory_bytes() const { return charge_.bytes(); }

private:
    std::size_t words() const { return size_ / 64 + 1; }

    std::size_t size_;
    Marks marks_{nullptr};
    Charge charge_;
};

/// Up to kChunk tokens. One thread appends; others read what was there before.
class LogChunk {
public:
    /// Room for `capacity` tokens behind kPadding others, or behind none.
    LogChunk(std::size_t capacity, bool padded, const std::shared_ptr<Account>& account);
    /// `size` tokens in a mapped file, behind others there if `padded`.
    LogChunk(std::shared_ptr<const Mapping> file, const Token* tokens, std::size_t size, bool padded,
             const std::shared_ptr<Account>& account);
    ~LogChunk();
    LogChunk(const LogChunk&) = delete;
    LogChunk& operator=(const LogChunk&) = delete;

    /// A copy of those blocks alone for which `needed` holds, of a full chunk that has a place for each of them.
    std::shared_ptr<LogChunk> squeezed(const std::vector<bool>& needed, const std::shared_ptr<Account>& account) const;

    ChunkView view() const { return {tokens_, blocks_, &marks_->marks()}; }
    ChunkMarks& marks() const { return *marks_; }
    std::size_t capacity() const { return capacity_; }
    /// How many places of its positions there are.
    std::size_t present() const { return present_; }
    bool is_mapped() const { return file_ != nullptr; }
    std::size_t memory_bytes() const { return charge_.bytes() + marks_->memory_bytes(); }

    /// Write tokens at an offset, where nobody reads yet.
    void write(std::size_t offset, std::span<const Token> tokens);
    /// Write what stands before the chunk.
    void pad(const Token* end);

private:
    /// A full chunk of which nothing is left.
    explicit LogChunk(const std::shared_ptr<Account>& account);
    LogChunk(const LogChunk& from, const std::vector<bool>& needed, std::size_t kept,
             const std::shared_ptr<Account>& account);
    void take(std::size_t bytes);
    void charge(std::size_t used);
    void give_back() const;
    bool is_paged() const;

    std::shared_ptr<const Mapping> file_;
    std::byte* memory_ = nullptr;  // the places of the blocks, if they have any, what stands before, and the tokens
    std::size_t bytes_ = 0;  // of it
    const Token* tokens_;
    const std::uint16_t* blocks_ = nullptr;
    std::size_t before_, capacity_, present_;  // before_: tokens of other chunks that lie before
    std::shared_ptr<ChunkMarks> marks_;
    Charge charge_;
};

}  // namespace agentspec
