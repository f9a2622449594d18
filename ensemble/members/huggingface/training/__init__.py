"""Provide what training a Hugging Face model needs of it; predictions import none of this."""
