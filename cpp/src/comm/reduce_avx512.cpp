// SPDX-License-Identifier: Apache-2.0
#define PACELINE_ISA avx512
#define PACELINE_VECTOR_BYTES 64
#include "comm/reduce_kernels.inc"
