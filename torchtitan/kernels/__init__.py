"""Kernels: in C++ for CPUs, compiled on first use, with torch operations as the fallback; in Triton for GPUs."""
