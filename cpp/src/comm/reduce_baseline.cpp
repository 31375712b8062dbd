// SPDX-License-Identifier: Apache-2.0
#define PACELINE_ISA baseline
#define PACELINE_VECTOR_BYTES 16
#include "comm/reduce_kernels.inc"
