"""Operations for GPUs, written in Triton; it is imported only where a kernel is launched."""
