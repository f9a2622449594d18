"""Tables in and out: formats, the input, the sample submission."""
