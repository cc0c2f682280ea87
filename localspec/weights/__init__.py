"""Weights: from the tensors of a file to the linear layers of a model.

A `WeightSource` gives the tensors of a model by their names in transformers, as its files hold
them: `Dense`, `Grouped`, `Nf4` or `Int8`. `linear_for` makes a linear layer of such a weight for a
device and a precision, and quantises last. A new format is one source; a new kernel is one linear
layer. Which tensor belongs where is the business of forward.builder.
"""
