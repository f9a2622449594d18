"""How much memory a checkpoint takes on a device, told from its files."""
