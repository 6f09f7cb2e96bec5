"""Model of CUDA streams: records what all ranks submit, and runs it in random interleavings."""
