"""What the kernels of decode are tuned on and measured by."""
