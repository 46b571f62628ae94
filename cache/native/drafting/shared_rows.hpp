// A table of numbers that starts as constants: thousands of namespaces share those rows that they have not changed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace agentspec {

/// `Rows` rows of `Width` numbers. A row is one of the constants until `own` copies it, to be written to.
template <std::size_t Rows, std::size_t Width>
class SharedRows {
public:
    /// `initial`: Rows * Width constants, row by row, which must outlive this table.
    explicit SharedRows(const double* initial) : initial_(initial) {
        for (std::size_t row = 0; row < Rows; ++row) rows_[row] = initial + row * Width;
    }
    SharedRows(const SharedRows&) = delete;
    SharedRows(SharedRows&& other) noexcept : SharedRows(other.initial_) { swap(other); }
    SharedRows& operator=(SharedRows&& other) noexcept {
        swap(other);
        return *this;
    }
    ~SharedRows() {
        for (std::size_t row = 0; row < Rows; ++row)
            if (owns(row)) delete[] rows_[row];
    }

    const double* operator[](std::size_t row) const { return rows_[row]; }

    /// The row, to be written to. Its address may change.
    double* own(std::size_t row) {
        if (!owns(row)) {
            double* copy = new double[Width];
            std::copy_n(rows_[row], Width, copy);
            rows_[row] = copy;
            ++owned_;
        }
        return const_cast<double*>(rows_[row]);
    }

    /// Give a row these values, of which there may be fewer than its width; it stays shared where it has them already.
    void assign(std::size_t row, std::span<const double> values) {
        if (!std::equal(values.begin(), values.end(), rows_[row])) std::copy(values.begin(), values.end(), own(row));
    }

    /// Bytes of the rows that are no constants.
    std::size_t bytes() const { return owned_ * (Width * sizeof(double) + kHeapOverhead); }

private:
    static constexpr std::size_t kHeapOverhead = 16;

    bool owns(std::size_t row) const { return rows_[row] != initial_ + row * Width; }
    void swap(SharedRows& other) noexcept {
        std::swap(initial_, other.initial_);
        std::swap(rows_, other.rows_);
        std::swap(owned_, other.owned_);
    }

    const double* initial_;
    std::array<const double*, Rows> rows_;
    std::size_t owned_ = 0;
};

}  // namespace agentspec
