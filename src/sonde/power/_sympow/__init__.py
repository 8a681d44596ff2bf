"""The symmetric power φ: its basis, its definition, and the kernels that never write it down."""
