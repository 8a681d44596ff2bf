"""The symmetric power φ: its basis, its definition, and kernels that never store it."""
