"""Train a small target and a one-layer draft for it: the pair that ships in assets/demo, or a
larger one.

Contract: the front room is `localspec.training.run` (`TrainSettings`, `train`, `TrainReport`). The
other files are one noun each: corpus, dialogues, tokenizer, model, optimiser, pretrain, sampling,
distil, export, evaluate, card. Nothing here is imported by the chat app. Models and loops are
plain torch; the recipe is WSD pretraining, then distillation on the target's own text.
"""
