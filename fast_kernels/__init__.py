"""Triton kernels and cuBLASLt GEMMs that make FP8 training on Hopper faster; without them everything works,
slower."""
