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
    SharedRows& operator=(const SharedRows&) = delete;
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

    /// Bytes of the rows that are no constants.
    std::size_t bytes() const { return owned_ * (Width * sizeof(double) + kHeapOverhead); }

private:
    static constexpr std::size_t kHeapOverhead = 16;

    bool owns(std::size_t row) const { return rows_[row] != initial_ + row * Width; }
    const double* initial_;
    std::array<const double*, Rows> rows_;
    std::size_t owned_ = 0;
};

}  // namespace agentspec
