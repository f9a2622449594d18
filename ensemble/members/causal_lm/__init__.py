"""Provide the kind ``causal_lm``: a language model, scored at the tokens of each label's text."""
