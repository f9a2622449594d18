"""The child process of one member. Together with the members' child sides, the only code that imports torch."""
