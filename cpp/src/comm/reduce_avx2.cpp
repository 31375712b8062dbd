// SPDX-License-Identifier: Apache-2.0
#define PACELINE_ISA avx2
#define PACELINE_VECTOR_BYTES 32
#include "comm/reduce_kernels.inc"
