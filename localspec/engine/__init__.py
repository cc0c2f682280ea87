"""The algorithm: decode loop, verification, sampling, costs and the controller."""
