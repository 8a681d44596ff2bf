"""CUDA C++ through CuPy's ``RawKernel``: the nearest neighbours by brute force, one query per thread."""

from __future__ import annotations

from functools import cache

import cupy
import numpy as np
import torch
from torch import Tensor

THREADS = 128
SOURCE = r"""
extern "C" __global__ void nearest(const real* queries, const real* points, real* distances, long long* indices, int M, int N) {
    __shared__ real tile[THREADS][DIM];
    int m = blockIdx.x * THREADS + threadIdx.x;
    real q[DIM], best[K];
    int which[K];
    for (int d = 0; d < DIM; d++) q[d] = m < M ? queries[(long long)m * DIM + d] : real(0);
    for (int i = 0; i < K; i++) best[i] = __int_as_float(0x7f800000), which[i] = -1;  // infinity
    for (int first = 0; first < N; first += THREADS) {
        for (int d = 0; d < DIM && first + threadIdx.x < N; d++)
            tile[threadIdx.x][d] = points[(long long)(first + threadIdx.x) * DIM + d];
        __syncthreads();
        for (int j = 0; j < THREADS && first + j < N; j++) {
            real square = 0;
            for (int d = 0; d < DIM; d++) square += (q[d] - tile[j][d]) * (q[d] - tile[j][d]);
            if (square < best[K - 1]) {
                int i = K - 1;
                for (; i > 0 && square < best[i - 1]; i--) best[i] = best[i - 1], which[i] = which[i - 1];
                best[i] = square, which[i] = first + j;
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < K && m < M; i++) {
        distances[(long long)m * K + i] = sqrt(best[i]);
        indices[(long long)m * K + i] = which[i];
    }
}
"""


@cache
def kernel(real: str, dimensions: int, k: int) -> cupy.RawKernel:
    sizes = f"typedef {real} real;\n#define DIM {dimensions}\n#define K {k}\n#define THREADS {THREADS}\n"
    return cupy.RawKernel(sizes + SOURCE, "nearest")


def nearest(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(queries.dtype, points.dtype)
    kind = torch.promote_types(wide, torch.float32)
    queries, points = (x.to(kind).contiguous() for x in (queries, points))
    (M, D), N = queries.shape, points.shape[0]
    if k > N:
        raise ValueError(f"nearest: k must be at most {N}, the number of points; got {k}")
    distances = torch.empty(M, k, dtype=kind, device=queries.device)
    indices = torch.empty(M, k, dtype=torch.int64, device=queries.device)
    if M and k:
        pointers = [np.uint64(x.data_ptr()) for x in (queries, points, distances, indices)]
        run = kernel({torch.float32: "float", torch.float64: "double"}[kind], D, k)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):  # torch's stream, not CuPy's own
            run((-(-M // THREADS),), (THREADS,), (*pointers, np.int32(M), np.int32(N)))
    return distances.to(wide), indices
