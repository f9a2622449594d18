"""The child process: one member on its lease.  The only room that may import torch or transformers."""
