"""Triton kernels, imported as fastcollab.kernels. Nothing here is imported before a kernel is asked for."""
