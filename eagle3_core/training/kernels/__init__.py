"""Triton kernels of the training step; imported only where tensors are on a GPU.

Each is the twin of an eager function that stands where it is called.
"""
