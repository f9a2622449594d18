"""The child process: one member on its devices.  The only room that may import torch or transformers."""
