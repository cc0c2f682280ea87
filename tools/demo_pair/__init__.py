"""Trains the demo pair: a small target and a two-layer draft for it, as shipped in assets/demo.

Contract: `python -m tools.demo_pair` runs `pipeline.train`. Pretraining with a warm-up, stable and
decay schedule, then distillation of the draft on text that the target wrote. Models and loops are
plain torch. The heads of the demo target are made by `python -m localspec train`, as for any other.
"""
