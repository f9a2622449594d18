"""Train in a process of its own: with the members' child sides, the only code that imports torch."""
