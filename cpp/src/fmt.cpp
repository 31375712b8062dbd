// SPDX-License-Identifier: Apache-2.0
// The functions of fmt, once for the library and once for the binding (see cpp/CMakeLists.txt). What the headers of fmt
// declare as compiled elsewhere is instantiated here.
#include <fmt/format-inl.h>

template auto fmt::detail::dragonbox::to_decimal(float) noexcept -> decimal_fp<float>;
template auto fmt::detail::dragonbox::to_decimal(double) noexcept -> decimal_fp<double>;
template auto fmt::detail::thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto fmt::detail::decimal_point_impl(locale_ref) -> char;
