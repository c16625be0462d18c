"""Triton kernels of the training step; imported only where tensors are on a GPU.

Each is the twin of an eager function that stands where it is called. What changes from pack to pack, numbers
of rows and where lists of rows lie in memory, is not part of what a kernel is compiled for.
"""
