"""Engines that run elsewhere, behind the same seam."""
