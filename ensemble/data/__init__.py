"""Read and write tables: formats, the input, the sample submission."""
