"""C++ kernels for CPUs, compiled when first needed, with torch operations in their place where they cannot be."""
