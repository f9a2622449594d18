"""Run the child process of one member: with the members' child sides, the only code that imports torch."""
