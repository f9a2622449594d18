"""Provide the kind ``pooled_cls``: a backbone whose hidden states are pooled, and a head from another file."""
