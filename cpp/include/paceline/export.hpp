// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything is compiled with hidden visibility; what is marked PACELINE_API is the library's ABI.
#if defined(__GNUC__) || defined(__clang__)
#define PACELINE_API __attribute__((visibility("default")))
#else
#define PACELINE_API
#endif
