// The log of an index: one contiguous array of tokens, in memory of its own or in a mapped file.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "index/pages.hpp"
#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

class TokenLog {
public:
    /// An empty log in memory of its own.
    explicit TokenLog(std::size_t capacity)
        : tokens_(PageAllocator<Token>().allocate(capacity), Release{capacity}),
          data_(tokens_.get()),
          capacity_(capacity) {}
    /// The `size` tokens at byte `offset` of a mapped file. Nothing else may lie after them.
    TokenLog(std::shared_ptr<const Mapping> file, std::size_t offset, std::size_t size)
        : file_(std::move(file)),
          data_(reinterpret_cast<Token*>(file_->data() + offset)),
          size_(size),
          capacity_((file_->size() - offset) / sizeof(Token)),
          mapped_(size) {}

    const Token* data() const { return data_; }
    const Token* begin() const { return data_; }
    const Token* end() const { return data_ + size_; }
    Token operator[](std::size_t position) const { return data_[position]; }
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }
    /// Bytes taken, those of mapped pages included.
    std::size_t bytes() const { return (file_ ? size_ : capacity_) * sizeof(Token); }
    std::size_t mapped_bytes() const { return std::min(mapped_, size_) * sizeof(Token); }

    /// Append tokens, which must fit into the capacity.
    void append(std::span<const Token> tokens) {
        assert(size_ + tokens.size() <= capacity_);
        std::copy(tokens.begin(), tokens.end(), data_ + size_);
        size_ += tokens.size();
    }
    void push_back(Token token) { append({&token, 1}); }
    void cut(std::size_t size) { size_ = size; }
    /// Put a boundary in the place of a token.
    void bound(std::size_t position) { data_[position] = kBoundary; }

    /// The same tokens in memory of their own.
    TokenLog copy(std::size_t capacity) const {
        TokenLog copied(capacity);
        copied.append({data_, size_});
        return copied;
    }

private:
    struct Release {
        std::size_t capacity;
        void operator()(Token* tokens) const { PageAllocator<Token>().deallocate(tokens, capacity); }
    };

    std::unique_ptr<Token[], Release> tokens_;
    std::shared_ptr<const Mapping> file_;
    Token* data_;
    std::size_t size_ = 0, capacity_;
    std::size_t mapped_ = 0;  // tokens that came from the file
};

}  // namespace agentspec
