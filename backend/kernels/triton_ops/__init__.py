"""The fixed lane's ops as Triton kernels, for CUDA (and ROCm) devices. One file per op.

What all of them have in common, and why a row's bits then depend on that row alone:

- **One binary for a model.** What describes the model (sizes, strides, tiles) is a compile-time constant. What changes
  from pass to pass (rows, sequences, length of the block tables) is exempt from Triton's specialisation, and pointers
  are always 16-byte aligned, so no pass ever runs other code than the one before. There is no autotuning.
- **One program computes one result from start to end**: no split-K, no atomics, no second kernel that adds up parts.
  The order of every sum is fixed by constants.
- **Rounding is as written.** The compiler may not fuse a product into a sum where it sees fit.
- **Rows meet only as rows of a matrix product**, whose elements the hardware computes each from its own row and column.
  That is the one thing taken on trust (no vendor promises it in words); the start-up probe checks it.

The PyTorch ops of the same names in backend/kernels are the readable references; tests/backend/triton_ops compares the
two, in Triton's interpreter without a GPU; tests/backend/test_triton_compile.py compiles each for three GPUs. Never run
on a GPU yet.
"""
