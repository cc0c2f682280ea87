"""The algorithm: decode loop, batches, verification, sampling, noise; measuring of costs."""
