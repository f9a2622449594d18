"""The kind ``pooled_cls``: a backbone, its hidden states pooled, and a head from a file of its own."""
