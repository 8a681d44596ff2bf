"""cuML's nearest neighbours. Written against cuML's documented interface; it has not been run with cuML itself.

``tests/test_external_kernels.py`` runs it with a stand-in that has the signatures of cuML 26.10. With
``sonde.memory.share_pool("rmm")`` cuML allocates from PyTorch's pool.
"""

from __future__ import annotations

import cupy
import torch
from cuml.neighbors import NearestNeighbors
from torch import Tensor


def nearest(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(queries.dtype, points.dtype)
    rows, columns = (cupy.from_dlpack(x.float().contiguous()) for x in (queries, points))
    torch.cuda.current_stream().synchronize()  # cuML works on a stream of its own
    index = NearestNeighbors(n_neighbors=k, algorithm="brute", metric="euclidean", output_type="cupy").fit(columns)
    distances, indices = index.kneighbors(rows, return_distance=True)
    cupy.cuda.get_current_stream().synchronize()
    return torch.from_dlpack(distances).to(wide), torch.from_dlpack(indices).long()
