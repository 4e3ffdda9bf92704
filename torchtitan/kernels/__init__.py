"""C++ kernels for CPUs, compiled on first use, with torch operations as the fallback."""
