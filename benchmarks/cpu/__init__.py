"""What the processor's kernels reach, op by op."""
